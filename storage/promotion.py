"""The way up: turns a list of keys into pinned host pages, bringing what is only further down.

Owns the promotions under way (one per page, however many fetches want it), the pins that fetches
and leases hold, nvme's breaker and the counters of reads. Does not copy (storage.mover reads nvme,
the remote tier pulls), does not choose what leaves host (storage.demotion does). Called by
storage.store, engines (through fetch and lease objects), mover and remote workers.

Invariants: `pins[key]` is the number of host leases that fetches and their leases hold on `key`;
a page is brought by at most one promotion at a time; a promotion nobody waits for is cancelled
while it is queued, else its page lands in host unpinned. Only nvme's own failures and the fetches
that it kept waiting count against nvme: the remote tier judges its peers itself.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import wait
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
from tierkv.storage.neighbours import Neighbours
from tierkv.storage.preload import PreloadStart
from tierkv.storage.remote import Pull, PullState
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

    work: Job | Pull
    """A read from nvme, or a pull from the remote tier."""
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
        neighbours: Neighbours,
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
        self._neighbours = neighbours
        self._watch = DeadlineWatch(clock)
        self._watched: dict[TieredFetch, int] = {}
        self._promotions: dict[PageKey, Promotion] = {}
        self.counts = FetchCounts(restored=Counter())

    def lookup(self, keys: Sequence[PageKey]) -> list[TierName | None]:
        """Fastest tier of each key; waits a little for a remote tier that has to be asked."""
        if self._neighbours.lookup_waits:
            found = self._where(keys, here=True)
            pairs = zip(keys, found, strict=True)
            self._neighbours.refresh([key for key, tier in pairs if tier is None])
        return self._where(keys, here=False)

    def _where(self, keys: Sequence[PageKey], here: bool) -> list[TierName | None]:
        """Fastest tier of each key; nvme counts only while its breaker lets it be asked, and the
        remote tier unless only what is `here` is wanted."""
        found: list[TierName | None] = [
            TierName.HOST if there else None for there in self._host.lookup(keys)
        ]
        if self._lower is not None and self._breaker.closed:
            _fill(found, keys, self._lower.holds, self._lower.tier.name)
        if self._neighbours.attached and not here:
            _fill(found, keys, self._neighbours.holds, TierName.REMOTE)
        return found

    def start(
        self,
        keys: Sequence[PageKey],
        deadline_s: float,
        verify: bool | None = None,
        owner: int = 0,
        here: bool = False,
        quiet: bool = False,
    ) -> TieredFetch:
        """Pin the leading run that is in host and start bringing the rest of it.

        `owner`: whose the pages from the remote tier are to be. `here`: do not ask that, which
        asks itself: it says nothing about the demand of this node, and if `quiet` leaves the
        recency of what is in host as it is.
        """
        deadline = self._clock.monotonic() + max(0.0, deadline_s)
        fetch = TieredFetch(self, self._host, keys, deadline, self._clock, verify, not here)
        with self._lock:
            run = self._pin_run(fetch.keys, here, quiet)
            fetch.begin(run)
            reach = next((i for i, page in enumerate(run) if page.lease is None), len(run))
            if reach < len(run):
                # Without time for a read, none is started: its lateness would blame nvme.
                reach = self._start_promotions(fetch, run, owner) if deadline_s > 0 else reach
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
            if late:
                self.counts.late += 1
                if self._waits_for_nvme(fetch):
                    self._breaker.failed()
            self._leave(fetch, 0)

    def unpin(self, pages: Sequence[PinnedPage]) -> None:
        with self._lock:
            for page in pages:
                if page.lease is not None:
                    self._unpin(page.key, page.lease)
                    page.lease = None

    def sound(self, page: PinnedPage, verify: bool | None) -> bool:
        # What came from below was verified on its way, against the same digest.
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

    def handed_out(self, asked: int, pages: Sequence[PinnedPage], demand: bool) -> None:
        if not demand:
            # Counted as a use, a page that is read to be copied would be offered to be copied.
            return
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
            assert promotion.work.key == key, "a promotion under the wrong key"
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

    def end_pulls(self, owner: int, timeout_s: float) -> None:
        """Cancel the queued pulls of `owner` and wait for those that run, at most so long."""
        with self._lock:
            works = [promotion.work for promotion in self._promotions.values()]
        pulls = [work for work in works if isinstance(work, Pull) and work.owner == owner]
        running = [pull.future for pull in pulls if not self._neighbours.cancel(pull)]
        wait(running, max(0.0, timeout_s))

    def _pin_run(self, keys: Sequence[PageKey], here: bool, quiet: bool) -> list[PinnedPage]:
        """The leading run of keys that some tier holds, those in host pinned."""
        run: list[PinnedPage] = []
        for key, tier in zip(keys, self._where(keys, here), strict=True):
            if tier is None:
                break
            lease = self._pin(key, quiet) if tier is TierName.HOST else None
            if lease is None and tier is TierName.HOST:
                break
            run.append(PinnedPage(key, tier, lease))
        return run

    def _pin(self, key: PageKey, quiet: bool = False) -> Lease | None:
        lease = self._host.lease([key], quiet=quiet)
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
            if not wanted_less or left:
                continue
            # What is cancelled while queued reports back here at once, which the lock allows.
            if isinstance(promotion.work, Pull):
                self._neighbours.cancel(promotion.work)
            elif self._lower is not None:
                self._lower.mover.cancel(promotion.work)

    def _waits_for_nvme(self, fetch: TieredFetch) -> bool:
        return any(
            isinstance(promotion.work, Job)
            and any(other is fetch for other, _ in promotion.waiters)
            for promotion in self._promotions.values()
        )

    def _start_promotions(self, fetch: TieredFetch, run: list[PinnedPage], owner: int) -> int:
        """Bring what is not in host yet; returns the length of the run that has a chance."""
        absent = [page for page in run if page.lease is None]
        missing = {page.key for page in absent} - self._promotions.keys()
        self._demoter.make_room_locked(len(missing), self._owner_of(absent[0], owner))
        pulls: list[Pull] = []
        reach = len(run)
        for index, page in enumerate(run):
            if page.lease is None and not self._join(fetch, index, page, owner, pulls):
                reach = index
                break
        return self._submit(fetch, pulls, reach)

    def _owner_of(self, page: PinnedPage, owner: int) -> int | None:
        """Whose page it is; the pages of one run have one owner."""
        if page.tier is TierName.REMOTE or self._lower is None:
            return owner
        return self._lower.tier.owner_of([page.key])[0]

    def _join(
        self, fetch: TieredFetch, index: int, page: PinnedPage, owner: int, pulls: list[Pull]
    ) -> bool:
        """Wait for the promotion of a page, started now if there is none; False: impossible.

        A new pull is appended to `pulls`, to be submitted.
        """
        promotion = self._promotions.get(page.key)
        if promotion is not None:
            work = promotion.work
            work.deadline = max(work.deadline, fetch.deadline)
            promotion.waiters.append((fetch, index))
            if isinstance(work, Job) and work.background and self._lower is not None:
                self._lower.mover.hasten(work)
            return True
        started: Job | Pull | None
        if page.tier is TierName.REMOTE:
            started = self._neighbours.pull_locked(page.key, owner, fetch.deadline, self._pulled)
            pulls += [started] if started is not None else []
        else:
            started = self._promote(page.key, fetch.deadline, self._promoted)
        if started is None:
            return False
        self._promotions[page.key] = Promotion(started, [(fetch, index)])
        return True

    def _submit(self, fetch: TieredFetch, pulls: list[Pull], reach: int) -> int:
        """Hand the pulls of `fetch` to the remote tier; returns the length of the run that has a
        chance, `reach` or less when some were refused."""
        refused = self._neighbours.submit_locked(pulls)
        for pull in refused:
            # Nobody else can wait for it: the lock has been held since it was made.
            promotion = self._promotions.pop(pull.key)
            reach = min(reach, *(index for _, index in promotion.waiters))
        if refused:
            self._leave(fetch, reach)
        return reach

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
        with self._lock:
            self._room.settle(job.owner, 1)
            if job.outcome is ReadOutcome.OK:
                self._breaker.succeeded()
                self._on_verified(job.key)
            elif job.outcome is ReadOutcome.FAILED:
                self._breaker.failed()
            elif job.outcome is ReadOutcome.CORRUPT and self._lower is not None:
                self._lower.room.removed([job.key], EvictionReason.CORRUPT)
            told = self._deliver(job.key, job.state is JobState.DONE)
        for fetch in told:
            fetch.announce()

    def _pulled(self, pull: Pull) -> None:
        """Like _promoted, for a pull from the remote tier, which has ended."""
        landed = pull.state is PullState.LANDED
        with self._lock:
            self._neighbours.ended_locked(pull)
            told = self._deliver(pull.key, landed)
            if landed:
                self._neighbours.gained_locked([pull.key])
                # Pinned before: what the write policy lets go to make room is not this page.
                self._demoter.landed_locked([pull.key])
        for fetch in told:
            fetch.announce()

    def _deliver(self, key: PageKey, arrived: bool) -> list[TieredFetch]:
        """End a promotion: pin its page for each fetch that waits, or cut them. Returns those,
        to be told with no lock held."""
        promotion = self._promotions.pop(key)
        for fetch, index in promotion.waiters:
            lease = self._pin(key) if arrived else None
            if lease is None:
                self.unpin(fetch.cut(index))
                self._leave(fetch, index)
            elif not fetch.arrived(index, lease):
                self._unpin(key, lease)
        return [fetch for fetch, _ in promotion.waiters]


def _fill(
    found: list[TierName | None],
    keys: Sequence[PageKey],
    holds: Callable[[Sequence[PageKey]], list[bool]],
    tier: TierName,
) -> None:
    """Name `tier` for the keys that nothing faster has and that `holds` knows."""
    absent = [index for index, name in enumerate(found) if name is None]
    if absent:
        there = holds([keys[index] for index in absent])
        for index, held in zip(absent, there, strict=True):
            if held:
                found[index] = tier
