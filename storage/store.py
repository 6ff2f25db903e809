"""TieredStore: host, nvme and a remote tier put together behind the PageStore contract.

Owns the tiers, the mover and one lock over their bookkeeping, and does the opening, the closing
and the counting. Which page goes down is storage.demotion's business, which comes up
storage.promotion's, what a remote tier is told storage.neighbours'. Knows pages as opaque bytes
under opaque keys. Called by engines, by the daemon and by remote tiers (as their LocalStore).

Lock order: the store's lock, then a fetch's or the mover's or a tier's own. Nothing waits for I/O
with the store's lock held; callbacks of users run with no lock held.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from tierkv.storage.arena import ArenaGeometry
from tierkv.storage.bandwidth import Bandwidth, Way
from tierkv.storage.base import (
    Fetch,
    MappedTier,
    MoverStats,
    OwnerUsage,
    PageStore,
    StoreStats,
    Tier,
)
from tierkv.storage.breaker import Breaker
from tierkv.storage.clock import Clock, SystemClock
from tierkv.storage.demotion import Demoter, DemotionRules, Heat, Lower
from tierkv.storage.errors import ConfigError, TierClosedError, TierError
from tierkv.storage.eviction_log import Eviction, EvictionLog, EvictionReason
from tierkv.storage.flushing import Flusher
from tierkv.storage.hotness_keeper import HotnessKeeper
from tierkv.storage.mover import Mover, MoverLimits
from tierkv.storage.neighbours import Neighbours
from tierkv.storage.owners import Owners
from tierkv.storage.policy import make_admission
from tierkv.storage.preload import HostOrder, Preload, hottest_first
from tierkv.storage.promotion import Promoter
from tierkv.storage.publishing import Publisher
from tierkv.storage.quota import Quota, QuotaBook, TierSize
from tierkv.storage.remote import Remote
from tierkv.storage.reservation import TieredReservation
from tierkv.storage.room import Room
from tierkv.storage.scrub import Scrubber, ScrubReport
from tierkv.storage.store_config import StoreConfig, StoreRules
from tierkv.storage.tiers.host import HostTier
from tierkv.storage.tiers.nvme import NvmeTier
from tierkv.storage.types import PageKey, TierName
from tierkv.storage.write_budget import WriteBudget

__all__ = ["StoreConfig", "StoreRules", "TieredStore"]

BUDGET_NAME = "write-budget.json"

log = logging.getLogger(__name__)


class TieredStore(PageStore):
    """See PageStore. All methods are thread-safe.

    `on_durable` is called from a worker thread with the key of each page that nvme made durable;
    it must be quick. `nvme_fault` says why a configured nvme tier is missing. The tiers become
    the store's: close() closes them.
    """

    def __init__(
        self,
        host: MappedTier,
        nvme: Tier | None = None,
        rules: StoreRules | None = None,
        clock: Clock | None = None,
        on_durable: Callable[[PageKey], None] | None = None,
        nvme_fault: str | None = None,
        state: Path | None = None,
    ) -> None:
        """`state` is a folder for what makes pages hot and for the write budget; None: both start
        anew with each store.
        """
        rules = rules or StoreRules()
        clock = clock or SystemClock()
        assert nvme is None or nvme.page_bytes == host.page_bytes, "tiers of two page sizes"
        self.page_bytes = host.page_bytes
        self._host = host
        self._rules = rules
        self._clock = clock
        self._nvme_fault = nvme_fault
        self._lock = threading.RLock()
        self._bandwidth = Bandwidth(clock)
        self._breaker = Breaker(clock, rules.breaker_failures, rules.breaker_open_s)
        self._pins: Counter[PageKey] = Counter()
        self._closed = False
        self._tiers_closed = False
        self._evictions = EvictionLog(clock)
        tiers = [host] if nvme is None else [host, nvme]
        sizes = {tier.name: tier.stats() for tier in tiers}
        self._book = QuotaBook(
            {name: TierSize(size.slot_bytes, size.capacity_pages) for name, size in sizes.items()}
        )
        self._room = Room(host, self._book, self._evictions)
        self._neighbours = Neighbours(host, self._room, self._evictions, self._lock)
        pages = sum(size.capacity_pages for size in sizes.values())
        self._hotness = HotnessKeeper(pages, clock, state, rules.save_hotness_s)
        self._budget: WriteBudget | None = None
        if rules.nvme_write_bytes_per_day is not None:
            path = None if state is None else state / BUDGET_NAME
            self._budget = WriteBudget(rules.nvme_write_bytes_per_day, clock, path)
        self._lower: Lower | None = None
        self._scrubber: Scrubber | None = None
        self._preload: Preload | None = None
        if nvme is not None:
            room = Room(nvme, self._book, self._evictions)
            mover = Mover(host, nvme, self._mover_limits(), clock, self._bandwidth, room)
            self._lower = Lower(nvme, mover, room, clock)
            self._scrubber = Scrubber(nvme, room)
        self._on_durable = on_durable
        self._demoter = self._make_demoter()
        self._promoter = self._make_promoter()
        self._publisher = Publisher(
            host, self._room, self._book, self._demoter, self._neighbours, self._lock
        )
        self._owners = Owners(
            host,
            self._lower,
            self._room,
            self._demoter,
            self._book,
            self._hotness.last_use,
            self._lock,
            clock,
            self._promoter.end_pulls,
        )

    @classmethod
    def open(
        cls,
        config: StoreConfig,
        clock: Clock | None = None,
        on_durable: Callable[[PageKey], None] | None = None,
    ) -> TieredStore:
        """Open or create the tiers that `config` names and recover what is in them.

        Raises ConfigError and its kinds for what the user must change. A failing nvme device
        raises nothing: the store serves from host alone and stats() says why.
        """
        config.validate()
        host = HostTier(
            config.host_arena_path,
            config.page_bytes,
            config.host_bytes,
            checksums=config.checksums,
            clock=clock,
            huge_pages=config.huge_pages,
        )
        nvme: Tier | None = None
        fault: str | None = None
        try:
            nvme = _open_nvme(config, clock)
        except ConfigError as error:
            if not isinstance(error.__cause__, TierError):
                host.close()
                raise
            # The device failed, not the user: serving can go on without it.
            fault = str(error)
            log.warning("open store: nvme=off error=%s", error)
        except BaseException:
            host.close()
            raise
        # The folder is the nvme tier's, and safe to use only while that holds its lock.
        own = config.state_dir is None and nvme is None
        state = None if own else config.state_folder
        return cls(host, nvme, config.rules, clock, on_durable, fault, state)

    def attach_remote(self, remote: Remote) -> None:
        """Make `remote` the lowest tier: once, before or after the store is used.

        Raises what Remote.bind raises; the store is then as it was. The remote becomes the
        store's: close() closes it. Waits as long as bind() does, without holding anybody up.
        """
        self._assert_open()
        self._neighbours.attach(remote, self, self._bandwidth, self._rules.remote_lookup_s)

    def lookup(self, keys: Sequence[PageKey]) -> list[TierName | None]:
        """See PageStore. Waits at most StoreRules.remote_lookup_s, and only if lookup_waits."""
        self._assert_open()
        return self._promoter.lookup(keys)

    @property
    def lookup_waits(self) -> bool:
        """Whether lookup() may wait for a remote tier that has to be asked who holds a page."""
        return self._neighbours.lookup_waits

    def reserve(self, count: int, owner: int = 0) -> TieredReservation:
        self._assert_open()
        return self._publisher.reserve(count, owner)

    def fetch(
        self,
        keys: Sequence[PageKey],
        deadline_s: float,
        *,
        verify: bool | None = None,
        owner: int = 0,
        here: bool = False,
        quiet: bool = False,
    ) -> Fetch:
        """See PageStore. `owner`: whose the pages from the remote tier are to be, here.

        `here`: only what host and nvme have, for the remote tier's own reading: it refreshes the
        pages' recency, unless `quiet`, but counts neither as a use nor as restored or missed, and
        offers nothing.
        """
        self._assert_open()
        return self._promoter.start(keys, deadline_s, verify, owner, here, quiet)

    def touch(self, keys: Sequence[PageKey]) -> None:
        self._assert_open()
        self._host.touch(keys)
        if self._lower is not None:
            self._lower.tier.touch(keys)
        owners = self._owners_of(keys)
        with self._lock:
            self._demoter.used_locked(keys, owners)

    def flush(self, deadline_s: float) -> bool:
        """Copy every host page that nvme lacks, admission or not, and wait until all are durable.

        False when the deadline passed first, or a page could not be written or kept there. A
        store without nvme has nothing to wait for: True, unless nvme was configured and failed.
        O(host pages).
        """
        self._assert_open()
        if self._lower is None:
            return self._nvme_fault is None
        flusher = Flusher(self._host, self._lower, self._demoter, self._lock, self._clock)
        return flusher.flush(deadline_s)

    def arena_geometry(self) -> ArenaGeometry:
        """Where the slots that reservations and leases name lie in the arena.

        ConfigError when host is no arena (a tier double).
        """
        return self._arena_host("arena geometry").arena_geometry()

    def arena_fd(self) -> int:
        """The arena's open file, for handing over to a client; borrowed until close().

        ConfigError when the arena is anonymous: set host_arena_path.
        """
        return self._arena_host("arena descriptor").arena_fd()

    # --- for a remote tier: storage.remote.LocalStore -------------------------------------

    @property
    def host(self) -> MappedTier:
        """Where pulls land."""
        return self._host

    def lookup_here(self, keys: Sequence[PageKey]) -> list[bool]:
        """Whether each page is in host or nvme. No side effects, no network."""
        self._assert_open()
        found = self._host.lookup(keys)
        if self._lower is None or all(found):
            return found
        below = self._lower.holds(keys)
        return [upper or lower for upper, lower in zip(found, below, strict=True)]

    def keys_here(self) -> list[PageKey]:
        """Every page in host or nvme, once; host's first, coldest first in each. O(capacity)."""
        self._assert_open()
        keys = self._host.keys_of()
        if self._lower is not None:
            keys += self._lower.tier.keys_of()
        return list(dict.fromkeys(keys))

    def let_go(self, keys: Sequence[PageKey]) -> int:
        """Drop the host copies of pages that are in nvme too and that nobody holds."""
        self._assert_open()
        with self._lock:
            return self._demoter.let_go_locked(keys)

    def arena_memory(self) -> memoryview:
        """All of the host arena; borrowed until close(). ConfigError when host is no arena."""
        return self._arena_host("arena memory").arena_memory()

    def payload_offset(self, slot: int) -> int:
        """Where the payload of a host slot begins in arena_memory(), in bytes."""
        geometry = self.arena_geometry()
        assert 0 <= slot < geometry.slot_count, (slot, geometry.slot_count)
        return geometry.first_slot + slot * geometry.slot_bytes + geometry.payload_offset

    # --- removing -------------------------------------------------------------------------

    def drop(self, keys: Sequence[PageKey], tier: TierName) -> int:
        """Remove the copies of `keys` in one tier; returns how many. Leased ones go last.

        For collecting a dead namespace. On nvme it waits until the removal is durable, so an
        engine does not call it between requests. ValueError for a tier this store lacks.
        """
        self._assert_open()
        if tier is not TierName.HOST:
            self._below(tier, "drop")
        return self._owners.remove(list(dict.fromkeys(keys)), tier, EvictionReason.DROPPED)

    def trim(self, tier: TierName, keep_pages: int) -> int:
        """Evict the coldest pages of one tier until it holds `keep_pages`; returns how many.

        Copied to a lower tier or not: flush() first to keep them. Leased pages stay, so more
        may be left. On nvme it waits until the removal is durable. ValueError for a tier this
        store lacks. O(pages evicted).
        """
        self._assert_open()
        if tier is TierName.HOST:
            with self._lock:
                excess = self._host.stats().committed_pages - keep_pages
                gone = self._host.evict(max(0, excess))
                self._demoter.gone_locked(gone)
            self._room.removed(gone, EvictionReason.TRIMMED)
            return len(gone)
        lower = self._below(tier, "trim")
        gone = lower.tier.evict(max(0, lower.tier.stats().committed_pages - keep_pages))
        lower.room.removed(gone, EvictionReason.TRIMMED)
        return len(gone)

    # --- owners ---------------------------------------------------------------------------

    def owners(self) -> dict[int, OwnerUsage]:
        """What each owner has; owners without a page are absent. O(owners)."""
        self._assert_open()
        return self._owners.usage()

    def keys_of(self, owner: int, tier: TierName) -> list[PageKey]:
        """The owner's pages in one tier, coldest first. O(capacity). Empty without that tier."""
        self._assert_open()
        return self._owners.keys_of(owner, tier)

    def drop_owner(self, owner: int) -> int:
        """Remove every page of `owner`, wherever it is; returns how many pages there were.

        Leased ones go when their last lease ends. Waits until the removal is durable.
        """
        self._assert_open()
        return self._owners.drop(owner, self._rules.close_s)

    def set_quota(self, owner: int, quota: Quota | None) -> None:
        """Set or, with None, clear an owner's floors and ceilings; evicts what is above one now.

        A page that its owner has no room for is refused and counted in stats(). Not persisted.
        ConfigError for limits that cannot be, CapacityError for floors that do not fit.
        """
        self._assert_open()
        self._owners.set_quota(owner, quota)

    def set_group_quota(self, name: str, owners: Iterable[int], quota: Quota | None) -> None:
        """Set or clear the quota of several owners together, such as a tenant's. Like set_quota.

        ConfigError when one of them is in another group already.
        """
        self._assert_open()
        self._owners.set_group_quota(name, owners, quota)

    def set_ttl(self, owner: int, seconds: float | None) -> None:
        """Let expire() remove the owner's pages this long after their last use; None: never.

        storage.ttl says what counts as time. Not persisted. ConfigError when not above 0.
        """
        self._assert_open()
        self._owners.ttl.set_limit(owner, seconds)

    def expire(self) -> int:
        """Remove a bounded batch of pages past their owner's time to live; returns how many.

        For a timer: on nvme it waits until the removal is durable.
        """
        self._assert_open()
        return self._owners.ttl.expire()

    # --- upkeep ---------------------------------------------------------------------------

    def preload(self, budget_pages: int | None = None) -> Preload:
        """Bring the hottest nvme pages into free host slots in the background; returns at once.

        Of the `budget_pages` (None: the rules' share of host, less what is there) used last, the
        most used first. Reads of requests go before it and nothing is evicted for it. A preload
        that runs already is cancelled. O(nvme pages).
        """
        self._assert_open()
        if self._preload is not None:
            self._preload.cancel()
        if budget_pages is None:
            stats = self._host.stats()
            share = int(stats.capacity_pages * self._rules.preload_fraction)
            budget_pages = share - stats.committed_pages
        keys: list[PageKey] = []
        if self._lower is not None and budget_pages > 0:
            keys = self._lower.tier.keys_of()[-budget_pages:][::-1]
            keys = hottest_first(keys, self._hotness.sketch, self._lock)
        order = HostOrder(self._host, self._hotness.last_use, self._lock)
        self._preload = Preload(keys, self.page_bytes, self._promoter.preload, order.restore)
        self._preload.begin()
        return self._preload

    def scrub_step(self, max_pages: int) -> ScrubReport:
        """Reread up to `max_pages` nvme pages nobody read lately and quarantine bad ones.

        Waits for the reads: the caller sets the pace. Without nvme there is nothing to check.
        """
        self._assert_open()
        if self._scrubber is None:
            return ScrubReport(0, 0, 0, 1.0)
        return self._scrubber.step(max_pages)

    def save_state(self) -> bool:
        """Save use counts and write budget now; False when the device refused. O(capacity).

        Done at close and now and then anyway. True when there is nowhere to save to.
        """
        if self._budget is not None:
            self._budget.save()
        return self._hotness.save(self._lock, closing=False)

    def evicted_when(self, key: PageKey) -> list[Eviction]:
        """The latest removal of `key` from each tier, newest first, as far as remembered. O(1)."""
        return self._evictions.evicted_when(key)

    # --- as a whole -----------------------------------------------------------------------

    def wait_quiet(self, timeout_s: float) -> bool:
        """Wait until nothing is on its way between tiers; False past the timeout."""
        deadline = self._clock.monotonic() + timeout_s
        mover = None if self._lower is None else self._lower.mover
        while True:
            # Each may give the other something to do: what lands is copied down, what is copied
            # to elsewhere may have to come up first.
            quiet = self._neighbours.wait_quiet(deadline - self._clock.monotonic())
            if mover is not None and quiet:
                quiet = mover.wait_quiet(deadline - self._clock.monotonic())
            if not quiet:
                return False
            if mover is None or (self._neighbours.wait_quiet(0.0) and mover.quiet):
                return True

    def stats(self) -> StoreStats:
        remote = self._neighbours.stats()
        with self._lock:
            tiers = [self._host.stats()]
            if self._lower is not None:
                tiers.append(self._lower.tier.stats())
            counts = self._promoter.counts
            return StoreStats(
                tiers=tuple(tiers),
                mover=self._mover_stats(),
                admission_rejected=self._demoter.admission_rejected,
                restored_pages=dict(counts.restored),
                missed_pages=counts.missed,
                rejected_pages=self._publisher.rejected,
                demote_skipped=self._demoter.skipped,
                late_fetches=counts.late,
                quota_refused=self._quota_refused(),
                evictions={reason.value: n for reason, n in self._evictions.counts().items()},
                reuse_gaps=self._hotness.last_use.reuse_gaps(),
                budget_skipped=self._budget.skipped_pages if self._budget else 0,
                budget_left_bytes=self._budget.left_bytes if self._budget else None,
                breaker_trips=self._breaker.trips,
                breaker_open=not self._breaker.closed,
                remote=remote,
                degraded=self._degraded(
                    [tier.degraded for tier in tiers],
                    None if remote is None else remote.degraded,
                ),
            )

    def check(self) -> None:
        self._host.check()
        if self._lower is not None:
            self._lower.tier.check()
            self._lower.mover.check()
        self._neighbours.check()
        self._book.check()
        self._evictions.check()
        self._owners.ttl.check()
        if self._scrubber is not None:
            self._scrubber.check()
        if self._preload is not None:
            self._preload.check()
        with self._lock:
            self._demoter.check_locked()
            self._promoter.check_locked()
            if self._neighbours.quiet and (self._lower is None or self._lower.mover.quiet):
                self._check_quiet()

    def close(self) -> None:
        with self._lock:
            self._closed = True
        deadline = self._clock.monotonic() + self._rules.close_s
        if self._preload is not None:
            self._preload.cancel()
        # First, while its pulls can still end as they should and what it lent is there.
        stopped = self._neighbours.close(self._rules.close_s)
        stopped &= self._promoter.close(max(0.0, deadline - self._clock.monotonic()))
        if self._lower is not None:
            stopped &= self._lower.mover.close(max(0.0, deadline - self._clock.monotonic()))
        if not stopped:
            # What is stuck in I/O may still reach into its host slot: the memory must stay.
            log.error("close store: a worker or the remote is stuck in I/O, the tiers stay open")
            return
        if not self._tiers_closed:
            self._tiers_closed = True
            self._hotness.save(self._lock, closing=True)
            if self._budget is not None:
                self._budget.save()
            self._host.close()
            if self._lower is not None:
                self._lower.tier.close()

    def _assert_open(self) -> None:
        if self._closed:
            raise TierClosedError("store: used after close(); open it again")

    def _arena_host(self, operation: str) -> HostTier:
        self._assert_open()
        if not isinstance(self._host, HostTier):
            raise ConfigError(f"{operation}: host is a {type(self._host).__name__}, no arena")
        return self._host

    def _owners_of(self, keys: Sequence[PageKey]) -> list[int | None]:
        """Each page's owner, wherever it is."""
        owners = self._host.owner_of(keys)
        if self._lower is None or None not in owners:
            return owners
        below = self._lower.tier.owner_of(keys)
        return [
            lower if upper is None else upper for upper, lower in zip(owners, below, strict=True)
        ]

    def _quota_refused(self) -> dict[TierName, int]:
        rooms = {self._host.name: self._room}
        if self._lower is not None:
            rooms[self._lower.tier.name] = self._lower.room
        return {name: room.refused for name, room in rooms.items() if room.refused}

    def _durable(self, key: PageKey) -> None:
        """Runs in a worker when nvme made a page durable."""
        self._hotness.save_if_due(self._lock)
        if self._on_durable is not None:
            self._on_durable(key)

    def _below(self, tier: TierName, operation: str) -> Lower:
        if self._lower is None or tier is not self._lower.tier.name:
            raise ValueError(f"{operation}: this store has no tier {tier}; name one it has")
        return self._lower

    def _mover_limits(self) -> MoverLimits:
        """The rules' limits, with at most half of host held by pages on their way down: copies
        that wait pin their slots, and a slow disk must not take host away from the engine."""
        limits = self._rules.mover
        half = max(1, self._host.stats().capacity_pages // 2)
        return replace(limits, demote_queue_pages=min(limits.demote_queue_pages, half))

    def _make_demoter(self) -> Demoter:
        sketch = self._hotness.sketch
        clean = self._host.stats().capacity_pages * self._rules.host_clean_fraction
        rules = DemotionRules(
            policy=self._rules.write_policy,
            admission=make_admission(self._rules.admission, sketch),
            selective_hits=self._rules.selective_hits,
            clean_pages_min=max(1, round(clean)),
            deadline_s=self._rules.demote_deadline_s,
            budget=self._budget,
        )
        return Demoter(
            self._host,
            self._lower,
            self._room,
            rules,
            Heat(sketch, self._hotness.last_use),
            self._pins,
            self._lock,
            self._clock,
            self._neighbours,
            self._durable,
        )

    def _make_promoter(self) -> Promoter:
        return Promoter(
            self._host,
            self._lower,
            self._room,
            self._demoter,
            self._breaker,
            self._pins,
            self._rules.verify,
            # Nothing is leased yet, so the victims are all the pages that are there.
            set(self._host.victims(self._host.stats().capacity_pages)),
            self._bandwidth.meter(TierName.HOST, Way.READ),
            self._lock,
            self._clock,
            self._neighbours,
            lambda key: self._scrubber.verified(key) if self._scrubber is not None else None,
        )

    def _mover_stats(self) -> MoverStats:
        if self._lower is not None:
            return self._lower.mover.stats()
        speeds = self._bandwidth
        return MoverStats(
            *(0, 0, 0, 0, 0, 0, 0),
            read_bytes_per_s=speeds.rates(Way.READ),
            write_bytes_per_s=speeds.rates(Way.WRITE),
            read_latency_s=speeds.latencies(Way.READ),
            write_latency_s=speeds.latencies(Way.WRITE),
        )

    def _degraded(self, tiers: Sequence[str | None], remote: str | None) -> str | None:
        known = [reason for reason in (self._nvme_fault, *tiers) if reason is not None]
        if remote is not None:
            known.append(f"remote: {remote}")
        if not self._breaker.closed:
            known.append("nvme: not asked for a while, it kept failing or being late")
        return "; ".join(known) or None

    def _check_quiet(self) -> None:
        """With no copy under way, what the tiers hold is exactly what this store holds."""
        host = self._host.stats()
        assert self._promoter.promoting_locked == 0, "a promotion outlived its job"
        assert self._book.held_pages == 0, "room was held for pages that never came"
        # A key may be pinned in two slots when it was dropped and committed again, and a page
        # found corrupt while it was held is counted as quarantined, no longer as leased.
        held = sum(self._pins.values())
        assert host.leased_pages <= held, (host.leased_pages, held)
        assert len(self._pins) <= host.leased_pages + host.quarantined_pages, host
        open_slots = self._publisher.open_slots
        assert host.reserved_pages == open_slots, (host.reserved_pages, open_slots)
        if self._lower is not None:
            nvme = self._lower.tier.stats()
            if self._scrubber is not None and self._scrubber.busy:
                return
            assert nvme.leased_pages == 0, f"nvme leases leaked: {nvme.leased_pages}"
            assert nvme.reserved_pages == 0, f"nvme slots leaked: {nvme.reserved_pages}"


def _open_nvme(config: StoreConfig, clock: Clock | None) -> Tier | None:
    if config.nvme_root is None:
        return None
    return NvmeTier(
        config.nvme_root,
        config.page_bytes,
        config.nvme_bytes,
        checksums=config.checksums,
        clock=clock,
        min_free_bytes=config.nvme_min_free_bytes,
    )
