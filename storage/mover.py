"""The background copier between host and nvme: bounded queues, few threads, one failure rule.

Owns the queues, the worker threads, and from acceptance to the end every lease and reservation
that a job carries. Does not know why a page moves (storage.demotion, storage.promotion decide)
nor what is in it. A page is copied once: nvme is written from the host slot and read into it.

    job state   who holds it              leaves by
    QUEUED      a queue                   worker takes it -> RUNNING; cancel, close -> CANCELLED
    RUNNING     one worker                copied -> DONE; error -> FAILED;
                                          too late, or no room in nvme -> CANCELLED;
                                          batch cut for a waiting promotion -> QUEUED (demote only)
    DONE, FAILED, CANCELLED               final; lease and reservation are back by then

Invariants: every accepted job is queued, running or ended exactly once; a refused one is counted
and never existed; promotions are taken before demotions, background promotions (preload) after
those that requests wait for; a promotion's slot stays reserved while a read may still write into
it, however late. Completion is by callback and condition, no polling.
"""

from __future__ import annotations

import logging
import threading
import traceback
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from enum import Enum

from tierkv.storage.bandwidth import Bandwidth, Way
from tierkv.storage.base import Lease, MappedTier, MoverStats, Reservation, Tier
from tierkv.storage.clock import Clock
from tierkv.storage.errors import ConfigError, TierError
from tierkv.storage.eviction_log import EvictionLog
from tierkv.storage.quota import QuotaBook
from tierkv.storage.room import Room
from tierkv.storage.types import CommitOutcome, PageKey, ReadOutcome

IDLE_WAIT_S = 5.0
"""An idle worker looks around this often even if nobody wakes it: every wait has a deadline."""

log = logging.getLogger(__name__)


class JobState(Enum):
    """See the table at the top."""

    QUEUED = "queued"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


class Refusal(Enum):
    """Why a job was not accepted. Nothing is held for it."""

    QUEUE_FULL = "queue full"
    GONE = "page not in host"
    CLOSING = "mover is closing"
    BUDGET = "write budget is spent"
    """Said by storage.demotion, before the mover is asked."""


class Job:
    """One page on its way. Read-only for everybody but the mover."""

    __slots__ = (
        "background",
        "deadline",
        "ended",
        "future",
        "key",
        "outcome",
        "owner",
        "source",
        "state",
        "target",
    )

    def __init__(
        self,
        key: PageKey,
        deadline: float,
        source: Lease,
        target: Reservation | None,
        background: bool = False,
    ) -> None:
        self.key = key
        self.owner = source.owners[0]
        self.background = background
        """A promotion that no request waits for."""
        self.deadline = deadline
        """In seconds of the mover's clock: a job that starts later than this is cancelled."""
        self.source = source
        self.target = target
        """The host slot of a promotion; None for a demotion."""
        self.state = JobState.QUEUED
        self.outcome: ReadOutcome | None = None
        """What the read of a promotion found; None before it and for a demotion."""
        self.ended = False
        """True once it is in a final state, everything is given back and its callbacks ran."""
        self.future: Future[Job] = Future()


@dataclass(frozen=True, slots=True)
class MoverLimits:
    """Bounds of one mover."""

    demote_queue_pages: int = 1024
    """Queued and running. Each pins its page in host; past it, stores are dropped and counted."""
    promote_queue_pages: int = 1024
    demote_threads: int = 2
    promote_threads: int = 2
    demote_batch_pages: int = 16
    """At most this many pages share one commit, so one data sync and one index transaction."""

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if (value := getattr(self, name)) < 1:
                raise ConfigError(f"mover limits: {name} is {value}, expected at least 1; raise it")


@dataclass(slots=True)
class _Batch:
    """What became of the demotions that one worker took at once, before they end."""

    written: list[Job]
    """In the order of the reservation's slots."""
    failed: list[Job]
    left: list[Job]
    """Not tried: they go back to the queue."""


class Mover:
    """Copies pages host -> nvme (demote) and nvme -> host (promote) in worker threads.

    All methods are thread-safe and none waits for I/O but wait_ended, wait_demote_room and
    close, which take a timeout. Callbacks run in a worker, or in the thread that cancels, with
    no lock of the mover held; they must be quick. What they raise is logged, never propagated.
    """

    def __init__(
        self,
        host: MappedTier,
        nvme: Tier,
        limits: MoverLimits,
        clock: Clock,
        bandwidth: Bandwidth,
        nvme_room: Room | None = None,
    ) -> None:
        """`nvme_room` decides who gets slots there; None: everybody, the coldest go."""
        self._host = host
        self._nvme = nvme
        self._room = nvme_room or Room(nvme, QuotaBook({}), EvictionLog(clock))
        self._limits = limits
        self._clock = clock
        self._bandwidth = bandwidth
        self._nvme_reads = bandwidth.meter(nvme.name, Way.READ)
        self._nvme_writes = bandwidth.meter(nvme.name, Way.WRITE)
        # Batches of all workers together must fit, or one would find every slot reserved.
        share = nvme.stats().capacity_pages // (2 * limits.demote_threads)
        self._batch_pages = max(1, min(limits.demote_batch_pages, share))
        self._changed = threading.Condition()
        self._demotes: deque[Job] = deque()
        self._promotes: deque[Job] = deque()
        self._preloads: deque[Job] = deque()
        self._demote_jobs: dict[PageKey, Job] = {}
        self._promote_jobs: set[Job] = set()
        self._running = 0
        self._accepted = 0
        self._dropped = 0
        self._ended = dict.fromkeys((JobState.DONE, JobState.FAILED, JobState.CANCELLED), 0)
        self._restarts = 0
        self._closing = False
        self._threads = [
            threading.Thread(target=self._work, args=(demotes,), name=name, daemon=True)
            for demotes, name, count in (
                (False, "tierkv-promote", limits.promote_threads),
                (True, "tierkv-demote", limits.demote_threads),
            )
            for _ in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def submit_demote(
        self, key: PageKey, deadline: float, on_end: Callable[[Job], None] | None = None
    ) -> Job | Refusal:
        """Queue a copy of a host page to nvme; the page is leased in host until the job ends.

        A page that is on its way already keeps its job, which is returned; `on_end` is then not
        attached. Counts a refusal by a full queue as dropped.
        """
        with self._changed:
            if (job := self._demote_jobs.get(key)) is not None:
                return job
            if self._closing:
                return Refusal.CLOSING
            if len(self._demote_jobs) >= self._limits.demote_queue_pages:
                self._dropped += 1
                return Refusal.QUEUE_FULL
            source = self._host.lease([key], quiet=True)
            if not source.slots:
                source.release()
                return Refusal.GONE
            job = Job(key, deadline, source, None)
            self._attach(job, on_end)
            self._demote_jobs[key] = job
            self._accept(job, self._demotes)
            return job

    def submit_promote(
        self,
        key: PageKey,
        deadline: float,
        source: Lease,
        target: Reservation,
        on_end: Callable[[Job], None] | None = None,
        background: bool = False,
    ) -> Job | Refusal:
        """Queue a read of a leased nvme page into one reserved host slot.

        Once accepted, `source` and `target` are the mover's to release; after a refusal they
        stay the caller's. A background one is read when no other promotion waits.
        """
        with self._changed:
            queue = self._preloads if background else self._promotes
            if self._closing:
                return Refusal.CLOSING
            if len(queue) >= self._limits.promote_queue_pages:
                self._dropped += 1
                return Refusal.QUEUE_FULL
            job = Job(key, deadline, source, target, background)
            self._attach(job, on_end)
            self._promote_jobs.add(job)
            self._accept(job, queue)
            return job

    def hasten(self, job: Job) -> None:
        """Make a background promotion that is still queued an ordinary one. O(queue)."""
        with self._changed:
            if job.background and job.state is JobState.QUEUED:
                self._preloads.remove(job)
                job.background = False
                self._promotes.append(job)
                self._changed.notify_all()

    def cancel(self, job: Job) -> bool:
        """End a job that is still queued; False when it runs or ended. O(queue).

        A running copy cannot be stopped: it ends by itself and gives everything back then.
        """
        with self._changed:
            if job.state is not JobState.QUEUED:
                return False
            self._queue_of(job).remove(job)
            self._begin(job)
        self._end(job, JobState.CANCELLED)
        return True

    def is_demoting(self, key: PageKey) -> bool:
        """True while a copy of `key` to nvme is queued or running."""
        with self._changed:
            return key in self._demote_jobs

    def demotions(self) -> list[Job]:
        """The demotions that have not ended."""
        with self._changed:
            return list(self._demote_jobs.values())

    def jobs_of(self, owner: int) -> list[Job]:
        """Copies of one owner's pages, in either direction, that have not ended. O(jobs)."""
        with self._changed:
            jobs = [*self._demote_jobs.values(), *self._promote_jobs]
        return [job for job in jobs if job.owner == owner]

    @property
    def demoting_count(self) -> int:
        """How many demotions have not ended."""
        return len(self._demote_jobs)

    @property
    def quiet(self) -> bool:
        """True when no job is queued or running."""
        with self._changed:
            return self._quiet()

    def wait_demote_room(self, timeout_s: float) -> bool:
        """Wait until a demotion would be accepted; False past the timeout or when closing."""
        limit = self._limits.demote_queue_pages
        with self._changed:
            self._changed.wait_for(
                lambda: self._closing or len(self._demote_jobs) < limit, max(0.0, timeout_s)
            )
            return not self._closing and len(self._demote_jobs) < limit

    def wait_ended(self, jobs: Iterable[Job], timeout_s: float) -> bool:
        """Wait until all `jobs` have ended and their callbacks ran; False past the timeout."""
        waiting = list(jobs)
        with self._changed:
            return self._changed.wait_for(
                lambda: all(job.ended for job in waiting), max(0.0, timeout_s)
            )

    def wait_quiet(self, timeout_s: float) -> bool:
        """Wait until no job is queued or running; False past the timeout."""
        with self._changed:
            return self._changed.wait_for(self._quiet, max(0.0, timeout_s))

    def stats(self) -> MoverStats:
        """Counters, queue lengths and moving estimates. O(1)."""
        with self._changed:
            return MoverStats(
                queued=self._queued(),
                in_flight=self._running,
                completed=self._ended[JobState.DONE],
                dropped=self._dropped,
                cancelled=self._ended[JobState.CANCELLED],
                failed=self._ended[JobState.FAILED],
                worker_restarts=self._restarts,
                read_bytes_per_s=self._bandwidth.rates(Way.READ),
                write_bytes_per_s=self._bandwidth.rates(Way.WRITE),
                read_latency_s=self._bandwidth.latencies(Way.READ),
                write_latency_s=self._bandwidth.latencies(Way.WRITE),
            )

    def check(self) -> None:
        """Assert conservation of jobs and of what they hold. O(queued)."""
        with self._changed:
            queued = self._queued()
            ended = sum(self._ended.values())
            assert self._accepted == queued + self._running + ended, (
                f"jobs: {self._accepted} accepted, {queued} queued, "
                f"{self._running} running, {ended} ended"
            )
            demoting = len(self._demote_jobs)
            assert len(self._demotes) <= demoting <= self._limits.demote_queue_pages, demoting
            # Background ones that were hastened come on top, and are bounded the same.
            assert len(self._promotes) <= 2 * self._limits.promote_queue_pages, "promotions"
            assert len(self._preloads) <= self._limits.promote_queue_pages, len(self._preloads)
            for job in self._demotes:
                assert job.state is JobState.QUEUED and job.target is None, job.state
                assert job.source.open, "a queued demotion lost its lease"
                assert self._demote_jobs.get(job.key) is job, "a queued demotion is not indexed"
            for job in [*self._promotes, *self._preloads]:
                assert job.state is JobState.QUEUED and job.target is not None, job.state
                assert job.source.open and job.target.open, "a queued promotion lost its slots"
            jobs = [*self._demote_jobs.values(), *self._promote_jobs]
            assert not any(job.ended for job in jobs), "ended job indexed"
            # A job leaves these shortly before it is counted as ended.
            assert len(jobs) <= queued + self._running, (len(jobs), queued, self._running)

    def close(self, timeout_s: float) -> bool:
        """Cancel what is queued and stop the workers; False when one is still stuck in I/O.

        Idempotent: a later call waits again for what was stuck.
        """
        deadline = self._clock.monotonic() + timeout_s
        with self._changed:
            self._closing = True
            left = [*self._promotes, *self._preloads, *self._demotes]
            self._changed.notify_all()
        for job in left:
            self.cancel(job)
        for thread in self._threads:
            thread.join(max(0.0, deadline - self._clock.monotonic()))
        stuck = [thread.name for thread in self._threads if thread.is_alive()]
        if stuck:
            log.error("mover close: stuck=%s timeout_s=%s", ",".join(stuck), timeout_s)
        return not stuck

    @staticmethod
    def _attach(job: Job, on_end: Callable[[Job], None] | None) -> None:
        if on_end is not None:
            # The library logs what a callback raises and goes on with the next one.
            job.future.add_done_callback(lambda _: on_end(job))

    def _accept(self, job: Job, queue: deque[Job]) -> None:
        self._accepted += 1
        queue.append(job)
        self._changed.notify_all()

    def _queued(self) -> int:
        return len(self._demotes) + len(self._promotes) + len(self._preloads)

    def _quiet(self) -> bool:
        return not (self._running or self._queued())

    def _queue_of(self, job: Job) -> deque[Job]:
        if job.target is None:
            return self._demotes
        return self._preloads if job.background else self._promotes

    def _begin(self, job: Job) -> None:
        job.state = JobState.RUNNING
        self._running += 1

    def _end(self, job: Job, state: JobState) -> None:
        """Give back what the job holds and its place in the queue, tell its callbacks, then count
        it: in that order, so that callbacks find room, and whoever sees no job left also sees
        nothing held and nothing left to be told."""
        job.source.release()
        if job.target is not None:
            job.target.release()
        with self._changed:
            if job.target is None:
                del self._demote_jobs[job.key]
            else:
                self._promote_jobs.remove(job)
        job.state = state
        job.future.set_result(job)
        with self._changed:
            self._running -= 1
            self._ended[state] += 1
            job.ended = True
            self._changed.notify_all()

    def _work(self, demotes: bool) -> None:
        """Life of one worker thread. Demotion workers help with promotions that wait."""
        while (batch := self._take(demotes)) is not None:
            try:
                self._move(batch)
            except Exception as error:  # noqa: BLE001
                # The one supervisor: whatever one job raises, a tier's bug included, must not end
                # the thread that all later jobs need (lesson H2). Counted, logged, jobs failed.
                trace = "".join(traceback.format_exception(error))
                log.error("mover worker: jobs=%d failed error=%s", len(batch), trace)
                with self._changed:
                    self._restarts += 1
                self._abandon(batch)

    def _take(self, demotes: bool) -> list[Job] | None:
        """Wait for work; None when the mover closes."""
        with self._changed:
            while not self._closing:
                batch: list[Job] = []
                if self._promotes:
                    batch.append(self._promotes.popleft())
                elif demotes:
                    while self._demotes and len(batch) < self._batch_pages:
                        batch.append(self._demotes.popleft())
                elif self._preloads:
                    batch.append(self._preloads.popleft())
                for job in batch:
                    self._begin(job)
                if batch:
                    self._changed.notify_all()
                    return batch
                self._changed.wait(IDLE_WAIT_S)
            return None

    def _move(self, batch: list[Job]) -> None:
        now = self._clock.monotonic()
        live = []
        for job in batch:
            if job.deadline <= now:
                self._end(job, JobState.CANCELLED)
            else:
                live.append(job)
        if live and live[0].target is not None:
            self._promote(live[0], live[0].target)
        elif live:
            self._demote(live)

    def _abandon(self, batch: Sequence[Job]) -> None:
        for job in batch:
            if job.state is JobState.RUNNING:
                self._end(job, JobState.FAILED)

    def _promote(self, job: Job, target: Reservation) -> None:
        started, moved = self._nvme_reads.begin(), 0
        try:
            with self._host.payload(target, 0) as out:
                job.outcome = self._nvme.read(job.source, 0, out)
            moved = self._host.page_bytes if job.outcome is ReadOutcome.OK else 0
        except (TierError, OSError) as error:
            job.outcome = ReadOutcome.FAILED
            log.warning("promote: key=%s error=%s", job.key.hex(), error)
        finally:
            self._nvme_reads.end(started, moved)
        if job.outcome is not ReadOutcome.OK:
            self._end(job, JobState.FAILED)
            return
        # The digest written long ago goes along, so the host copy is held against it too.
        self._host.seal(target, 0, job.source.checksums[0])
        (committed,) = self._host.commit(target, [job.key], job.owner)
        failed = committed is CommitOutcome.FAILED
        self._end(job, JobState.FAILED if failed else JobState.DONE)

    def _demote(self, batch: list[Job]) -> None:
        """Write what quotas let in, page by page, then publish it with one commit.

        No job ends and none goes back to the queue before the room held for it is settled:
        whoever sees the mover quiet must not find room held, nor another worker hold it twice.
        """
        batch = [job for job in batch if self._admitted(job)]
        if not batch:
            return
        admitted = Counter(job.owner for job in batch)
        started, moved = self._nvme_writes.begin(), 0
        pages = _Batch([], [], [])
        outcomes: list[CommitOutcome] = []
        try:
            with self._nvme_room(admitted) as reservation:
                roomless = not reservation.slots and self._nvme.stats().degraded is None
                if reservation.slots:
                    pages = self._write(batch, reservation)
                if pages.written:
                    outcomes = self._publish(reservation, pages.written)
            moved = self._host.page_bytes * outcomes.count(CommitOutcome.COMMITTED)
        finally:
            # One measure per batch: its data sync is part of what writing a page costs.
            self._nvme_writes.end(started, moved)
            for owner, count in admitted.items():
                self._room.settle(owner, count)
        if not reservation.slots:
            # Requeueing would spin: nothing there can be reserved or evicted now. With all there
            # leased or reserved by others nothing failed, there is no room; a tier that refuses
            # reservations did.
            state = JobState.CANCELLED if roomless else JobState.FAILED
            for job in batch:
                self._end(job, state)
            return
        self._requeue(pages.left)
        for job in pages.failed:
            self._end(job, JobState.FAILED)
        for job, outcome in zip(pages.written, outcomes, strict=True):
            failed = outcome is CommitOutcome.FAILED
            self._end(job, JobState.FAILED if failed else JobState.DONE)

    def _admitted(self, job: Job) -> bool:
        """Ask for one page of room below its owner's ceiling; a job without it is cancelled."""
        try:
            if self._room.admit(job.owner, 1):
                return True
        except (TierError, OSError) as error:
            log.warning("demote: key=%s evicting=own error=%s", job.key.hex(), error)
        self._end(job, JobState.CANCELLED)
        return False

    def _publish(self, reservation: Reservation, written: list[Job]) -> list[CommitOutcome]:
        try:
            owners = [job.owner for job in written]
            return self._nvme.commit(reservation, [job.key for job in written], owners)
        except (TierError, OSError) as error:
            log.warning("demote commit: pages=%d error=%s", len(written), error)
            return [CommitOutcome.FAILED] * len(written)

    def _write(self, batch: list[Job], reservation: Reservation) -> _Batch:
        """Copy what fits into `reservation`, which has a slot at least; ends no job."""
        pages = _Batch([], [], [])
        for index, job in enumerate(batch):
            count = len(pages.written)
            if count == len(reservation) or self._must_cut(pages.written):
                pages.left += batch[index:]
                break
            try:
                with self._host.view(job.source, 0) as payload:
                    self._nvme.write(
                        reservation,
                        count,
                        payload,
                        job.source.checksums[0],
                        key=job.key,
                        owner=job.owner,
                    )
            except (TierError, OSError) as error:
                log.warning("demote: key=%s error=%s", job.key.hex(), error)
                pages.failed.append(job)
            else:
                pages.written.append(job)
        return pages

    def _must_cut(self, written: list[Job]) -> bool:
        """A batch ends early for a promotion that found no free worker, but not before one page."""
        with self._changed:
            return bool(written) and (bool(self._promotes) or self._closing)

    def _requeue(self, jobs: Sequence[Job]) -> None:
        with self._changed:
            closing = self._closing
            if not closing:
                for job in reversed(jobs):
                    job.state = JobState.QUEUED
                    self._running -= 1
                    self._demotes.appendleft(job)
        if closing:
            for job in jobs:
                self._end(job, JobState.CANCELLED)

    def _nvme_room(self, wanted: Counter[int]) -> Reservation:
        """Reserve slots for so many pages by owner, evicting colder pages there for the rest."""
        count = wanted.total()
        reservation = self._nvme.reserve(count)
        short = count - len(reservation)
        if short == 0:
            return reservation
        # A degraded tier holds back free slots, but when it is full only an eviction can let the
        # one write through that would heal it.
        stats = self._nvme.stats()
        if stats.degraded is not None:
            if stats.free_pages >= short:
                return reservation
            short = 1
        reservation.release()
        try:
            for owner, pages in wanted.items():
                short -= len(self._room.evict(min(short, pages), owner))
        except (TierError, OSError) as error:
            log.warning("demote: evicting=%d error=%s", short, error)
        return self._nvme.reserve(count)
