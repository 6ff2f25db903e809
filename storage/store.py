"""TieredStore: host and nvme put together behind the PageStore contract.

Owns the tiers, the mover and one lock over their bookkeeping, and does the opening, the closing
and the counting. Which page goes down is storage.demotion's business, which comes up
storage.promotion's. Knows pages as opaque bytes under opaque keys. Called by engines and by the
daemon.

Lock order: the store's lock, then a fetch's or the mover's or a tier's own. Nothing waits for I/O
with the store's lock held; callbacks of users run with no lock held.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

from tierkv.storage.arena import ArenaGeometry
from tierkv.storage.bandwidth import Bandwidth, Way
from tierkv.storage.base import (
    Fetch,
    MappedTier,
    MoverStats,
    PageStore,
    Reservation,
    StoreReservation,
    StoreStats,
    Tier,
)
from tierkv.storage.breaker import Breaker
from tierkv.storage.checksum import payload_checksum
from tierkv.storage.clock import Clock, SystemClock
from tierkv.storage.demotion import Demoter, DemotionRules, Lower
from tierkv.storage.errors import ConfigError, TierClosedError, TierError
from tierkv.storage.mover import Mover, MoverLimits, Refusal
from tierkv.storage.policy import FrequencySketch, make_admission
from tierkv.storage.promotion import Promoter
from tierkv.storage.store_config import StoreConfig, StoreRules
from tierkv.storage.tiers.host import HostTier
from tierkv.storage.tiers.nvme import NvmeTier
from tierkv.storage.types import CommitOutcome, PageKey, TierName

__all__ = ["StoreConfig", "StoreRules", "TieredReservation", "TieredStore"]

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
    ) -> None:
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
        self._open_slots = 0
        self._rejected = 0
        self._closed = False
        self._tiers_closed = False
        self._lower: Lower | None = None
        if nvme is not None:
            mover = Mover(host, nvme, self._mover_limits(), clock, self._bandwidth)
            self._lower = Lower(nvme, mover, clock)
        self._demoter = self._make_demoter(on_durable)
        self._promoter = self._make_promoter()

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
        return cls(host, nvme, config.rules, clock, on_durable, fault)

    def lookup(self, keys: Sequence[PageKey]) -> list[TierName | None]:
        self._assert_open()
        return self._promoter.where(keys)

    def reserve(self, count: int, owner: int = 0) -> StoreReservation:
        self._assert_open()
        with self._lock:
            self._demoter.make_room_locked(count)
            held = self._host.reserve(count)
            self._open_slots += len(held)
            self._rejected += count - len(held)
        return TieredReservation(self, self._host, held)

    def fetch(
        self, keys: Sequence[PageKey], deadline_s: float, *, verify: bool | None = None
    ) -> Fetch:
        self._assert_open()
        return self._promoter.start(keys, deadline_s, verify)

    def touch(self, keys: Sequence[PageKey]) -> None:
        self._assert_open()
        self._host.touch(keys)
        if self._lower is not None:
            self._lower.tier.touch(keys)
        with self._lock:
            self._demoter.used_locked(keys)

    def flush(self, deadline_s: float) -> bool:
        """Copy every host page that nvme lacks, admission or not, and wait until all are durable.

        False when the deadline passed first, or a page could not be written or kept there. A
        store without nvme has nothing to wait for: True, unless nvme was configured and failed.
        O(host pages).
        """
        self._assert_open()
        lower = self._lower
        if lower is None:
            return self._nvme_fault is None
        deadline = self._clock.monotonic() + deadline_s
        with self._lock:
            stats = self._host.stats()
            keys = [*self._host.victims(stats.capacity_pages), *self._pins]
        there = lower.holds(keys)
        # What is written now must not displace the copies that host pages have there already.
        lower.tier.touch([key for key, found in zip(keys, there, strict=True) if found])
        for key, found in zip(keys, there, strict=True):
            if not found and not self._queue_for_flush(lower, key, deadline):
                return False
        left = deadline - self._clock.monotonic()
        if not lower.mover.wait_ended(lower.mover.demotions(), left):
            return False
        safe = zip(lower.holds(keys), self._host.lookup(keys), strict=True)
        return all(found or not in_host for found, in_host in safe)

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

    def wait_quiet(self, timeout_s: float) -> bool:
        """Wait until no copy between tiers is queued or running; False past the timeout."""
        return self._lower is None or self._lower.mover.wait_quiet(timeout_s)

    def drop(self, keys: Sequence[PageKey], tier: TierName) -> int:
        """Remove the copies of `keys` in one tier; returns how many. Leased ones go last.

        For collecting a dead namespace. On nvme it waits until the removal is durable, so an
        engine does not call it between requests. ValueError for a tier this store lacks.
        """
        self._assert_open()
        if tier is TierName.HOST:
            with self._lock:
                return self._host.drop(keys)
        return self._below(tier, "drop").drop(keys)

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
                return self._demoter.evict_locked(max(0, excess))
        lower = self._below(tier, "trim")
        return len(lower.evict(max(0, lower.stats().committed_pages - keep_pages)))

    def stats(self) -> StoreStats:
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
                rejected_pages=self._rejected,
                demote_skipped=self._demoter.skipped,
                late_fetches=counts.late,
                breaker_trips=self._breaker.trips,
                breaker_open=not self._breaker.closed,
                degraded=self._degraded([tier.degraded for tier in tiers]),
            )

    def check(self) -> None:
        self._host.check()
        if self._lower is not None:
            self._lower.tier.check()
            self._lower.mover.check()
        with self._lock:
            self._demoter.check_locked()
            self._promoter.check_locked()
            if self._lower is None or self._lower.mover.quiet:
                self._check_quiet()

    def close(self) -> None:
        with self._lock:
            self._closed = True
        deadline = self._clock.monotonic() + self._rules.close_s
        stopped = self._promoter.close(self._rules.close_s)
        if self._lower is not None:
            stopped &= self._lower.mover.close(max(0.0, deadline - self._clock.monotonic()))
        if not stopped:
            # A worker stuck in I/O may still write into its host slot: the memory must stay.
            log.error("close store: a worker is stuck in I/O, its tiers stay open")
            return
        if not self._tiers_closed:
            self._tiers_closed = True
            self._host.close()
            if self._lower is not None:
                self._lower.tier.close()

    def committed(self, keys: Sequence[PageKey], outcomes: Sequence[CommitOutcome]) -> None:
        """Account for one host commit and apply the write policy. By TieredReservation only."""
        new = [
            key for key, was in zip(keys, outcomes, strict=True) if was is CommitOutcome.COMMITTED
        ]
        again = [
            key for key, was in zip(keys, outcomes, strict=True) if was is CommitOutcome.EXISTS
        ]
        with self._lock:
            self._rejected += list(outcomes).count(CommitOutcome.FAILED)
            self._host.touch(again)
            self._demoter.committed_locked(new)

    def closed_slots(self, count: int) -> None:
        """Account for reserved slots that were committed or given back."""
        with self._lock:
            self._open_slots -= count

    def _assert_open(self) -> None:
        if self._closed:
            raise TierClosedError("store: used after close(); open it again")

    def _arena_host(self, operation: str) -> HostTier:
        self._assert_open()
        if not isinstance(self._host, HostTier):
            raise ConfigError(f"{operation}: host is a {type(self._host).__name__}, no arena")
        return self._host

    def _below(self, tier: TierName, operation: str) -> Tier:
        if self._lower is None or tier is not self._lower.tier.name:
            raise ValueError(f"{operation}: this store has no tier {tier}; name one it has")
        return self._lower.tier

    def _mover_limits(self) -> MoverLimits:
        """The rules' limits, with at most half of host held by pages on their way down: copies
        that wait pin their slots, and a slow disk must not take host away from the engine."""
        limits = self._rules.mover
        half = max(1, self._host.stats().capacity_pages // 2)
        return replace(limits, demote_queue_pages=min(limits.demote_queue_pages, half))

    def _make_demoter(self, on_durable: Callable[[PageKey], None] | None) -> Demoter:
        pages = self._host.stats().capacity_pages
        if self._lower is not None:
            pages += self._lower.tier.stats().capacity_pages
        sketch = FrequencySketch(max(1, pages))
        clean = self._host.stats().capacity_pages * self._rules.host_clean_fraction
        rules = DemotionRules(
            policy=self._rules.write_policy,
            admission=make_admission(self._rules.admission, sketch),
            selective_hits=self._rules.selective_hits,
            clean_pages_min=max(1, round(clean)),
            deadline_s=self._rules.demote_deadline_s,
        )
        return Demoter(
            self._host, self._lower, rules, sketch, self._pins, self._lock, self._clock, on_durable
        )

    def _make_promoter(self) -> Promoter:
        return Promoter(
            self._host,
            self._lower,
            self._demoter,
            self._breaker,
            self._pins,
            self._rules.verify,
            # Nothing is leased yet, so the victims are all the pages that are there.
            set(self._host.victims(self._host.stats().capacity_pages)),
            self._bandwidth.meter(TierName.HOST, Way.READ),
            self._lock,
            self._clock,
        )

    def _queue_for_flush(self, lower: Lower, key: PageKey, deadline: float) -> bool:
        """Queue one page, waiting for room in the queue; False when it cannot be before then."""
        while lower.mover.wait_demote_room(deadline - self._clock.monotonic()):
            with self._lock:
                queued = self._demoter.queue_locked(key, deadline)
            # Another thread may have taken the room; a page that left host needs no copy.
            if queued is not Refusal.QUEUE_FULL:
                return queued is not Refusal.CLOSING
        return False

    def _mover_stats(self) -> MoverStats:
        if self._lower is not None:
            return self._lower.mover.stats()
        return MoverStats(0, 0, 0, 0, 0, 0, 0, read_bytes_per_s=self._bandwidth.rates(Way.READ))

    def _degraded(self, reasons: Sequence[str | None]) -> str | None:
        known = [reason for reason in (self._nvme_fault, *reasons) if reason is not None]
        if not self._breaker.closed:
            known.append("nvme: not asked for a while, it kept failing or being late")
        return "; ".join(known) or None

    def _check_quiet(self) -> None:
        """With no copy under way, what the tiers hold is exactly what this store holds."""
        host = self._host.stats()
        assert self._promoter.promoting_locked == 0, "a promotion outlived its job"
        # A key may be pinned in two slots when it was dropped and committed again, and a page
        # found corrupt while it was held is counted as quarantined, no longer as leased.
        held = sum(self._pins.values())
        assert host.leased_pages <= held, (host.leased_pages, held)
        assert len(self._pins) <= host.leased_pages + host.quarantined_pages, host
        assert host.reserved_pages == self._open_slots, (host.reserved_pages, self._open_slots)
        if self._lower is not None:
            nvme = self._lower.tier.stats()
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


class TieredReservation(StoreReservation):
    """Host slots to fill in place; see StoreReservation."""

    def __init__(self, store: TieredStore, host: MappedTier, held: Reservation) -> None:
        self._store = store
        self._host = host
        self._held = held
        self._closed = False
        self.views = [host.payload(held, index) for index in range(len(held))]
        self.slots = [int(slot) for slot in held.slots]

    def commit(
        self,
        keys: Sequence[PageKey],
        checksums: Sequence[bytes] | None = None,
        owner: int = 0,
    ) -> list[CommitOutcome]:
        assert not self._closed, "a reservation is committed once"
        assert len(keys) <= len(self.views), (len(keys), len(self.views))
        assert checksums is None or len(checksums) == len(keys), "one checksum a key"
        for index in range(len(keys)):
            self._host.seal(self._held, index, None if checksums is None else checksums[index])
        outcomes = self._host.commit(self._held, keys)
        self._close()
        self._store.committed(keys, outcomes)
        return outcomes

    def verify(self, index: int, checksum: bytes) -> bool:
        assert not self._closed, "a closed reservation holds no slots"
        return payload_checksum(self.views[index]) == checksum

    def release(self) -> None:
        if not self._closed:
            self._held.release()
            self._close()

    def _close(self) -> None:
        self._closed = True
        # Whoever still holds a view must not find it here: the slot may be another page's now.
        count, self.views, self.slots = len(self.views), [], []
        self._store.closed_slots(count)
