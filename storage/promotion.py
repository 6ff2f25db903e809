"""The way up: turns a list of keys into pinned host pages, reading what is only on nvme.

Owns the promotions under way (one per page, however many fetches want it), the pins that fetches
and leases hold, the breaker and the counters of reads. Does not copy (storage.mover does), does
not choose what leaves host (storage.demotion does). Called by storage.store, engines (through
fetch and lease objects) and mover workers.

Invariants: `pins[key]` is the number of host leases that fetches and their leases hold on `key`;
a page is read from nvme by at most one promotion at a time; a promotion nobody waits for is
cancelled while it is queued, else its page lands in host unpinned.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from tierkv.storage.bandwidth import TransferMeter
from tierkv.storage.base import Lease, MappedTier
from tierkv.storage.breaker import Breaker
from tierkv.storage.clock import Clock
from tierkv.storage.deadlines import DeadlineWatch
from tierkv.storage.demotion import Demoter, Lower
from tierkv.storage.errors import TierError
from tierkv.storage.eviction_log import EvictionReason
from tierkv.storage.fetch import PinnedPage, TieredFetch
from tierkv.storage.mover import Job, JobState
from tierkv.storage.preload import PreloadStart
from tierkv.storage.room import Room
from tierkv.storage.types import PageKey, ReadOutcome, TierName

PRELOAD_WAIT_S = 3600.0
"""A preloaded page may wait this long behind the reads of requests."""

log = logging.getLogger(__name__)


class Verify(StrEnum):
    """Which host pages take() checks before it hands them out (about 15 GB/s)."""

    ALWAYS = "always"
    """Each time they are leased: memory is not trusted between two leases."""
    RECOVERED = "recovered"
    """Once, those that another process left in the arena; others only when written."""


@dataclass(slots=True)
class Promotion:
    """One page on its way up and who waits for it: (fetch, index in its run)."""

    job: Job
    waiters: list[tuple[TieredFetch, int]]


@dataclass(slots=True)
class FetchCounts:
    """What fetches gave, since the store was opened. Guarded by the store's lock."""

    restored: Counter[TierName]
    missed: int = 0
    late: int = 0


class Promoter:
    """See the module docstring. `lock` is the store's; methods named _locked need it held."""

    def __init__(
        self,
        host: MappedTier,
        lower: Lower | None,
        room: Room,
        demoter: Demoter,
        breaker: Breaker,
        pins: Counter[PageKey],
        verify: Verify,
        recovered: set[PageKey],
        host_reads: TransferMeter,
        lock: threading.RLock,
        clock: Clock,
        on_verified: Callable[[PageKey], None],
    ) -> None:
        """`on_verified` is told of each page that a read from nvme found sound."""
        self._on_verified = on_verified
        self._closing = False
        self._host = host
        self._lower = lower
        self._room = room
        self._demoter = demoter
        self._breaker = breaker
        self._pins = pins
        self._verify = verify
        self._recovered = recovered
        self._host_reads = host_reads
        self._lock = lock
        self._clock = clock
        self._watch = DeadlineWatch(clock)
        self._watched: dict[TieredFetch, int] = {}
        self._promotions: dict[PageKey, Promotion] = {}
        self.counts = FetchCounts(restored=Counter())

    def where(self, keys: Sequence[PageKey]) -> list[TierName | None]:
        """Fastest tier of each key; nvme counts only while its breaker lets it be asked."""
        found: list[TierName | None] = [
            TierName.HOST if there else None for there in self._host.lookup(keys)
        ]
        if self._lower is None or not self._breaker.closed:
            return found
        absent = [index for index, tier in enumerate(found) if tier is None]
        below = self._lower.holds([keys[index] for index in absent]) if absent else []
        for index, there in zip(absent, below, strict=True):
            if there:
                found[index] = self._lower.tier.name
        return found

    def start(
        self, keys: Sequence[PageKey], deadline_s: float, verify: bool | None = None
    ) -> TieredFetch:
        """Pin the leading run that is in host and start reading the rest of it from nvme."""
        deadline = self._clock.monotonic() + max(0.0, deadline_s)
        fetch = TieredFetch(self, self._host, keys, deadline, self._clock, verify)
        with self._lock:
            run = self._pin_run(fetch.keys)
            fetch.begin(run)
            reach = next((i for i, page in enumerate(run) if page.lease is None), len(run))
            if reach < len(run):
                # Without time for a read, none is started: its lateness would blame nvme.
                reach = self._start_promotions(fetch, run) if deadline_s > 0 else reach
                self.unpin(fetch.cut(reach))
            if not fetch.done:
                self._watched[fetch] = self._watch.add(deadline, fetch.expire)
        # What was in host already is complete now, and no promotion will ever say so.
        fetch.announce()
        return fetch

    def detach(self, fetch: TieredFetch, late: bool) -> None:
        with self._lock:
            token = self._watched.pop(fetch, None)
            if token is not None:
                self._watch.discard(token)
            self._leave(fetch, 0)
            if late:
                self.counts.late += 1
                self._breaker.failed()

    def unpin(self, pages: Sequence[PinnedPage]) -> None:
        with self._lock:
            for page in pages:
                if page.lease is not None:
                    self._unpin(page.key, page.lease)
                    page.lease = None

    def sound(self, page: PinnedPage, verify: bool | None) -> bool:
        # What nvme just delivered was verified by that read, against the same digest.
        if page.lease is None or page.tier is not TierName.HOST:
            return page.lease is not None
        if verify is None:
            verify = self._verify is Verify.ALWAYS or page.key in self._recovered
        if not verify:
            return True
        started = self._host_reads.begin()
        ok = self._host.verify(page.lease, 0) is ReadOutcome.OK
        self._host_reads.end(started, self._host.page_bytes if ok else 0)
        with self._lock:
            self._recovered.discard(page.key)
        if not ok:
            self._room.removed([page.key], EvictionReason.CORRUPT)
            log.warning("fetch: key=%s is corrupt in host, quarantined", page.key.hex())
        return ok

    def handed_out(self, asked: int, pages: Sequence[PinnedPage]) -> None:
        with self._lock:
            self.counts.missed += asked - len(pages)
            self.counts.restored.update(page.tier for page in pages)
            self._demoter.handed_out_locked(
                [page.key for page in pages],
                [page.lease.owners[0] if page.lease is not None else 0 for page in pages],
                [page.tier for page in pages],
            )

    def check_locked(self) -> None:
        """Assert that pins and promotions are conserved. O(promotions)."""
        assert all(count > 0 for count in self._pins.values()), "a pin count below one"
        for key, promotion in self._promotions.items():
            assert promotion.job.key == key, "a promotion under the wrong key"
        self._watch.check()
        self._breaker.check()

    @property
    def promoting_locked(self) -> int:
        """How many promotions are under way."""
        return len(self._promotions)

    def close(self, timeout_s: float) -> bool:
        """End every fetch that still waits, then the watch; False when it did not end in time."""
        with self._lock:
            self._closing = True
            waiting = list(self._watched)
        for fetch in waiting:
            fetch.expire(late=False)
        return self._watch.close(timeout_s)

    def _pin_run(self, keys: Sequence[PageKey]) -> list[PinnedPage]:
        """The leading run of keys that some tier holds, those in host pinned."""
        run: list[PinnedPage] = []
        for key, tier in zip(keys, self.where(keys), strict=True):
            if tier is None:
                break
            lease = self._pin(key) if tier is TierName.HOST else None
            if lease is None and tier is TierName.HOST:
                break
            run.append(PinnedPage(key, tier, lease))
        return run

    def _pin(self, key: PageKey) -> Lease | None:
        lease = self._host.lease([key])
        if not lease.slots:
            lease.release()
            return None
        self._pins[key] += 1
        self._demoter.pinned_locked(key)
        return lease

    def _unpin(self, key: PageKey, lease: Lease) -> None:
        lease.release()
        self._pins[key] -= 1
        if self._pins[key] == 0:
            del self._pins[key]

    def _leave(self, fetch: TieredFetch, first_index: int) -> None:
        """Stop waiting for the pages of `fetch` from `first_index` on; cancel what nobody wants."""
        for promotion in list(self._promotions.values()):
            left = [
                (other, index)
                for other, index in promotion.waiters
                if other is not fetch or index < first_index
            ]
            wanted_less = len(left) < len(promotion.waiters)
            promotion.waiters = left
            if wanted_less and not left and self._lower is not None:
                # Cancelling a queued job reports back here at once, which the lock allows.
                self._lower.mover.cancel(promotion.job)

    def _start_promotions(self, fetch: TieredFetch, run: list[PinnedPage]) -> int:
        """Read what is not in host yet; returns the length of the run that has a chance."""
        absent = {page.key for page in run if page.lease is None}
        assert self._lower is not None, "a page below host without a lower tier"
        first = next(page.key for page in run if page.lease is None)
        # The pages of one run have one owner.
        (owner,) = self._lower.tier.owner_of([first])
        self._demoter.make_room_locked(len(absent - self._promotions.keys()), owner)
        for index, page in enumerate(run):
            if page.lease is None and not self._join(fetch, index, page.key):
                return index
        return len(run)

    def _join(self, fetch: TieredFetch, index: int, key: PageKey) -> bool:
        """Wait for the promotion of `key`, started now if there is none; False: impossible."""
        promotion = self._promotions.get(key)
        if promotion is not None:
            promotion.job.deadline = max(promotion.job.deadline, fetch.deadline)
            promotion.waiters.append((fetch, index))
            if promotion.job.background and self._lower is not None:
                self._lower.mover.hasten(promotion.job)
            return True
        job = self._promote(key, fetch.deadline, self._promoted)
        if job is None:
            return False
        self._promotions[key] = Promotion(job, [(fetch, index)])
        return True

    def preload(self, key: PageKey, on_end: Callable[[bool], None]) -> PreloadStart:
        """Start bringing one nvme page into a free host slot, behind every request's reads.

        `on_end` is told once whether it arrived, with no lock held, if STARTED.
        """

        def ended(job: Job) -> None:
            self._promoted(job)
            on_end(job.state is JobState.DONE)

        with self._lock:
            if self._lower is None or not self._breaker.closed or self._closing:
                return PreloadStart.STOP
            if not self._host.stats().free_pages:
                return PreloadStart.STOP
            if key in self._promotions or self._host.lookup([key])[0]:
                return PreloadStart.SKIPPED
            deadline = self._clock.monotonic() + PRELOAD_WAIT_S
            job = self._promote(key, deadline, ended, background=True)
            if job is None:
                return PreloadStart.SKIPPED
            self._promotions[key] = Promotion(job, [])
            return PreloadStart.STARTED

    def _promote(
        self,
        key: PageKey,
        deadline: float,
        on_end: Callable[[Job], None],
        background: bool = False,
    ) -> Job | None:
        assert self._lower is not None, "a page below host without a lower tier"
        target = self._host.reserve(1)
        if not target.slots:
            target.release()
            return None
        try:
            source = self._lower.tier.lease([key], quiet=background)
        except (TierError, OSError) as error:
            log.warning("promote: key=%s error=%s", key.hex(), error)
            target.release()
            return None
        if source.slots and self._room.admit(source.owners[0], 1):
            # The worker cannot report before this thread lets go of the store's lock.
            job = self._lower.mover.submit_promote(
                key, deadline, source, target, on_end, background
            )
            if isinstance(job, Job):
                return job
            self._room.settle(source.owners[0], 1)
        source.release()
        target.release()
        return None

    def _promoted(self, job: Job) -> None:
        """Runs when a promotion ended: pin the page for each fetch that waits, or cut them."""
        told: list[TieredFetch] = []
        with self._lock:
            promotion = self._promotions.pop(job.key)
            self._room.settle(job.owner, 1)
            if job.outcome is ReadOutcome.OK:
                self._breaker.succeeded()
                self._on_verified(job.key)
            elif job.outcome is ReadOutcome.FAILED:
                self._breaker.failed()
            for fetch, index in promotion.waiters:
                lease = self._pin(job.key) if job.state is JobState.DONE else None
                if lease is None:
                    self.unpin(fetch.cut(index))
                    self._leave(fetch, index)
                elif not fetch.arrived(index, lease):
                    self._unpin(job.key, lease)
                told.append(fetch)
        for fetch in told:
            fetch.announce()
