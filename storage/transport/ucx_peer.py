"""The asking side of the ucx plane: one peer, and whoever moves its pages.

Owns the reads of one peer, a UCX worker, and the lane, the connection they go over. Who holds
`_drive` touches worker and lane, nobody else. That is the peer's thread, which opens a lane for the
first read, replaces it when it broke and sees to deadlines; but where nobody drives, read() asks
the peer itself, and who takes the only read under way moves its bytes itself. That saves two
changes of thread. The thread sleeps meanwhile and looks every LOOK_S, so that a read goes on though
nobody takes it. The worker stays when a lane goes, since ucxx never frees one in which a transfer
was broken off half way.

Invariants: every accepted job is queued, posted or ended exactly once; a posted job ends only when
the lane said that its pages are complete, or was aborted and settled; a job that was posted on a
lane which others broke is asked for again on the next; while something is posted or queued and
nobody drives, the thread watches the worker, or will look within LOOK_S, and it wakes before each
deadline; a taker drives for no longer than it may wait, and no longer than its read is the only
one; lanes are opened and dropped by the thread alone. Called by ucx.py.

    job state   who writes to its views   leaves by
    QUEUED      nobody                    posted -> POSTED; deadline, close, no lane -> ENDED
    POSTED      UCX, in who drives        collected -> ENDED; lane aborted and settled: deadline
                                          passed or second lane broken -> ENDED, else -> QUEUED
    ENDED       the caller, again         final
"""

from __future__ import annotations

import logging
import math
import threading
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from tierkv.storage.clock import Clock
from tierkv.storage.errors import TierIOError
from tierkv.storage.transport.base import PageOutcome, PageRange, PeerRead, TransportLimits
from tierkv.storage.transport.plane import PlanePeer, PlanePeerStats
from tierkv.storage.transport.ucx_lane import Lane
from tierkv.storage.transport.ucx_library import UcxWorker, Waker, Watcher
from tierkv.storage.transport.ucx_reads import Job, UcxRead
from tierkv.storage.transport.ucx_wire import NO_LANE, Offer

POSTED_MAX = 4
"""Reads under way at once: enough that the peer never waits for the next request."""
LANES_MAX = 2
"""Lanes that may break under a read before it is given up."""
BUSY_WAIT_S = 0.1
"""UCX may miss a wake-up; while something is under way it is asked so often all the same."""
LOOK_S = 0.005
"""How often the thread looks, for LOOK_FOR_S after the last read, whether there is one that nobody
takes. So a read wakes nobody: a thread that is woken gets in its taker's way."""
LOOK_FOR_S = 0.1
SETTLE_WAIT_S = 0.01
IDLE_WAIT_S = 5.0
STOP_S = 5.0


class Workers(Protocol):
    """Where a peer gets its worker from, and gives it back to."""

    def take(self) -> tuple[UcxWorker, bytes]:
        """A worker, and the lane that it had last. TierIOError."""

    def give(self, worker: UcxWorker, last: bytes, *, spoilt: bool) -> None:
        """`spoilt`: a transfer was broken off in it, so that ucxx would never free it."""


LaneOpener = Callable[[UcxWorker, Offer, bytes], Lane]
"""The last is the lane that is replaced."""
OfferReader = Callable[[bytes], Offer]

log = logging.getLogger(__name__)

_left: list[object] = []
"""Lanes and workers that may not be freed."""


_Result = TypeVar("_Result")


class UcxPeer(PlanePeer):
    """A peer over UCX. Made by UcxPlane.connect()."""

    name = "ucx"

    def __init__(
        self,
        peer_name: str,
        offer: Offer,
        workers: Workers,
        opener: LaneOpener,
        reader: OfferReader,
        limits: TransportLimits,
        clock: Clock,
    ) -> None:
        self.peer_name = peer_name
        self._offer = offer
        self._workers = workers
        self._opener = opener
        self._worker: UcxWorker | None = None
        self._spoilt = False
        self._reader = reader
        self._limits = limits
        self._clock = clock
        self._drive = threading.Lock()
        """Who holds it touches worker and lane. Taken before `_changed`, never after."""
        self._waker = Watcher()
        """Ends the thread's sleep."""
        self._call_off = Waker()
        """Ends a taker's."""
        self._takers: set[int] = set()
        """Threads that drive, or tell of a read that they have driven."""
        self._fault: str | None = None
        """What broke the lane. The thread deals with it."""
        self._driven = False
        """Whether it is a taker who drives."""
        self._expect_until = -math.inf
        """Until then somebody may still come to take the only read."""
        self._turn_due = 0.0
        """When the worker is looked at though nothing is under way."""
        self._wakes_at = math.inf
        """When the thread's sleep ends by itself."""
        self._changed = threading.Condition()
        self._queue: deque[Job] = deque()
        self._posted: list[Job] = []
        self._lane: Lane | None = None
        self._lane_ready = False
        self._replaced = NO_LANE
        self._lane_due = 0.0
        """When a greeting that is not answered yet is given up."""
        self._lane_used = 0.0
        self._wanted = True
        """A lane is wanted without a read: for the first greeting."""
        self._greeted = False
        self._broken: str | None = None
        self._open = 0
        self._due = math.inf
        """No read has an earlier deadline."""
        self._closing = False
        self._outcomes = dict.fromkeys(PageOutcome, 0)
        self._bytes = self._rejected = self._restarts = 0
        self._thread = threading.Thread(
            target=self._run, name=f"tierkv-ucx-{peer_name}", daemon=True
        )
        self._thread.start()

    # By callers

    def wait_greeted(self, timeout_s: float) -> None:
        """Until the peer has answered once. TierIOError when it does not."""
        with self._changed:
            self._changed.wait_for(lambda: self._greeted or self._broken, timeout_s)
            if not self._greeted:
                reason = self._broken or f"no answer to the greeting in {timeout_s:g} s"
                raise TierIOError(f"connect peer {self.peer_name} over ucx: {reason}")

    @property
    def broken(self) -> str | None:
        return "it was closed" if self._closing else self._broken

    @property
    def running(self) -> bool:
        """False once it was closed and has ended."""
        return self._thread.is_alive()

    def knows(self, generation: int) -> bool:
        return generation in self._offer.sizes

    def read(
        self,
        generation: int,
        ranges: Sequence[PageRange],
        into: Sequence[memoryview],
        timeout_s: float,
    ) -> PeerRead:
        read = UcxRead(len(ranges), self._assist)
        job = Job(
            read,
            generation,
            list(ranges),
            [view.cast("B") for view in into],
            self._clock.monotonic() + timeout_s,
        )
        with self._changed:
            outcome, refusal = self._answer_locked(generation, ranges)
            if outcome is None:
                self._open += 1
                self._due = min(self._due, job.deadline)
                self._queue.append(job)
            else:
                self._outcomes[outcome] += len(ranges)
        if outcome is None:
            self._begin(job)
        elif refusal is None:
            read.settle(0, [outcome] * len(ranges))
        else:
            read.refuse(f"read from peer {self.peer_name}: {refusal}")
        return read

    def _begin(self, job: Job) -> None:
        """Ask for a job at once if nobody drives, else have the thread do it."""
        begun = None
        if self._drive.acquire(blocking=False):
            try:
                begun = self._guard(lambda: self._begin_first(job))
            finally:
                self._drive.release()
        if not begun or self._queue:
            self._call_thread()
            self._call_off.wake()

    def _call_thread(self) -> None:
        """Have the thread drive, at once."""
        self._expect_until = -math.inf
        self._waker.wake()

    def _begin_first(self, job: Job) -> bool:
        """Ask for a job that waits for no other. False when the thread is to be woken."""
        lane, now = self._lane, self._clock.monotonic()
        with self._changed:
            usable = self._lane_ready and self._fault is None and not self._closing
            first = len(self._queue) == 1 and self._queue[0] is job
            asleep = self._wakes_at > min(now + LOOK_S, job.deadline)
            alone, full = not self._posted, len(self._posted) >= POSTED_MAX
        if lane is None or not usable or not first or full:
            return False
        self._post(lane, now)
        if alone:
            self._expect_until = min(now + LOOK_S, job.deadline)
        if asleep:
            self._waker.wake()
        return alone

    def _assist(self, read: UcxRead, timeout_s: float) -> float:
        """Move the bytes of `read` in the thread that waits for it, if it is the only one under
        way; returns what is left of its time."""
        me, until = threading.get_ident(), self._clock.monotonic() + timeout_s
        # Who takes in a callback, and so holds up what is to be told, leaves it to the thread.
        if timeout_s <= 0 or me in self._takers or not self._drive.acquire(blocking=False):
            return timeout_s
        job, outcomes = None, None
        try:
            job = self._only_job(read, me)
            if job is not None:
                self._driven = True
                self._waker.watch(None)
                outcomes = self._guard(lambda: self._drive_job(job, until))
        finally:
            self._driven = False
            self._drive.release()
            if job is not None and (outcomes is None or self._posted or self._queue):
                self._call_thread()
        if job is not None:
            try:
                if outcomes is not None:
                    self._tell(job, outcomes, None)
            finally:
                with self._changed:
                    self._takers.discard(me)
                    self._changed.notify_all()
        return until - self._clock.monotonic()

    def _only_job(self, read: UcxRead, taker: int) -> Job | None:
        """The job of a read, posted and alone, with its taker noted. Driving."""
        with self._changed:
            if self._fault is not None or self._closing or self._queue or len(self._posted) != 1:
                return None
            job = self._posted[0]
            if job.read is not read:
                return None
            self._takers.add(taker)
            return job

    def _drive_job(self, job: Job, until: float) -> list[PageOutcome] | None:
        """Move bytes until a job has ended; None when it has not, and the thread is to go on."""
        lane, until = self._lane, min(until, job.deadline)
        transfer = job.transfer
        assert lane is not None and transfer is not None, "it is posted"
        # Some twenty times a read: names that are looked up here are not looked up in the loop.
        worker, wait, monotonic = lane.worker, self._call_off.wait, self._clock.monotonic
        while True:
            moved = worker.progress()
            outcomes = lane.collect(transfer)
            if outcomes is not None:
                self._take_out(job, outcomes)
                return outcomes
            if not lane.alive:
                raise TierIOError("connection lost")
            left_s = until - monotonic()
            if self._queue or self._closing or left_s <= 0:
                return None
            if not moved and worker.arm():
                wait(worker, BUSY_WAIT_S if left_s > BUSY_WAIT_S else left_s)

    def _guard(self, step: Callable[[], _Result]) -> _Result | None:
        """Run a step of whoever drives; what it raises breaks the lane. None then."""
        fault: str | None = "the thread that moved its bytes was interrupted"
        try:
            result = step()
            fault = None
            return result
        except TierIOError as error:
            fault = str(error)
        except Exception as error:  # noqa: BLE001
            # A bug in one read must not end the thread that all later ones need (lesson H2).
            fault = f"{type(error).__name__}: {error}"
            log.error("peer=%s %s", self.peer_name, traceback.format_exc())
            with self._changed:
                self._restarts += 1
        finally:
            if fault is not None:
                self._fault = fault
        return None

    def _answer_locked(
        self, generation: int, ranges: Sequence[PageRange]
    ) -> tuple[PageOutcome | None, str | None]:
        """The outcome that is known without asking the peer, and why. None: ask it."""
        if self._closing or self._broken is not None:
            return PageOutcome.FAILED, self._broken or "it was closed"
        size = self._offer.sizes.get(generation)
        if size is None:
            return PageOutcome.GONE, None
        if any(offset + length > size for offset, length in ranges):
            return PageOutcome.FAILED, f"a range lies outside its memory of {size} bytes"
        if self._open >= self._limits.queued_reads:
            self._rejected += 1
            return PageOutcome.FAILED, f"{self._open} reads are under way, no more are taken"
        return None, None

    def refresh(self, offer: bytes) -> None:
        fresh = self._reader(offer)
        with self._changed:
            known = self._offer
            if (fresh.secret, fresh.address) != (known.secret, known.address):
                raise TierIOError(
                    f"refresh peer {self.peer_name} over ucx: the offer is of another process; "
                    "connect again"
                )
            self._offer = fresh

    def stats(self) -> PlanePeerStats:
        with self._changed:
            return PlanePeerStats(
                open_reads=self._open,
                pages_ok=self._outcomes[PageOutcome.OK],
                pages_gone=self._outcomes[PageOutcome.GONE],
                pages_failed=self._outcomes[PageOutcome.FAILED],
                bytes_read=self._bytes,
                rejected_reads=self._rejected,
                worker_restarts=self._restarts,
            )

    def check(self) -> None:
        with self._changed:
            queued, posted = len(self._queue), len(self._posted)
            assert queued + posted == self._open <= self._limits.queued_reads
            assert posted <= POSTED_MAX
            assert all(job.transfer is None for job in self._queue)
            due = min((job.deadline for job in (*self._queue, *self._posted)), default=math.inf)
            # Earlier, and the thread would sleep badly; later, and a read would end late.
            assert self._due == due, (self._due, due)
            assert all(job.transfer is not None for job in self._posted)
            assert self._open == 0 or self._thread.is_alive(), "reads that nobody will end"

    def close(self) -> None:
        with self._changed:
            self._closing = True
        self._waker.wake()
        self._call_off.wake()
        if self._thread is threading.current_thread():
            return
        self._thread.join(STOP_S + self._limits.io_s)
        if self._thread.is_alive():
            log.error("peer=%s thread=%s did not end", self.peer_name, self._thread.name)
        me = {threading.get_ident()}
        with self._changed:
            # They tell of reads that have ended.
            self._changed.wait_for(lambda: self._takers <= me, STOP_S)

    # By the thread

    def _run(self) -> None:
        while not self._closing:
            self._round()
        if not self._drive.acquire(timeout=STOP_S + self._limits.io_s):
            log.error("peer=%s its bytes are being moved for ever", self.peer_name)
            return
        try:
            self._guard(self._drop_lane)
            with self._changed:
                left = [*self._posted, *self._queue]
            for job in left:
                self._end(job, None, "it was closed")
            self._drop_worker()
        finally:
            self._drive.release()
        self._waker.close()
        self._call_off.close()

    def _round(self) -> None:
        """Drive once, then sleep; or sleep on, where a taker drives, or is still to be expected,
        or nothing is under way and the worker had its turn not long ago."""
        now = self._clock.monotonic()
        quiet = self._lane_ready and not self._posted and now < min(self._turn_due, self._due)
        others = self._driven or now < self._expect_until
        if self._fault is None and not self._queue and (quiet or others):
            self._waker.sleep(self._pause_s(LOOK_S))
            return
        if not self._drive.acquire(blocking=False):
            self._waker.sleep(self._pause_s(LOOK_S))
            return
        self._turn_due = now + BUSY_WAIT_S
        ended: list[tuple[Job, list[PageOutcome]]] = []
        try:
            rest = self._guard(lambda: self._turn(ended))
            pause_s = self._pause_s(BUSY_WAIT_S if self._posted else LOOK_S) if rest else 0.0
        finally:
            self._drive.release()
        for job, outcomes in ended:
            # With the drive free: who is told may read again at once.
            self._tell(job, outcomes, None)
        if rest:
            self._waker.sleep(pause_s)

    def _turn(self, ended: list[tuple[Job, list[PageOutcome]]]) -> bool:
        """One round: begin what can begin, move bytes, take out what is complete, to be told of.
        True: then sleep."""
        now = self._clock.monotonic()
        fault, self._fault = self._fault, None
        if fault is not None:
            self._break_lane(fault)
        if self._due <= now:
            self._expire(now)
        lane = self._lane
        if lane is None and (self._queue or self._wanted):
            lane = self._open_lane(now)
        if lane is None:
            self._waker.watch(None)
            return True
        self._advance(lane, now)
        moved = lane.worker.progress()
        for job in list(self._posted):
            assert job.transfer is not None
            outcomes = lane.collect(job.transfer)
            if outcomes is not None:
                self._take_out(job, outcomes)
                ended.append((job, outcomes))
        if not lane.alive:
            raise TierIOError("connection lost")
        if ended and not self._posted and not self._queue:
            # What is left to do has time until the next turn; a reader would find us driving.
            self._waker.watch(None)
            return True
        return not moved and self._may_rest(lane, now)

    def _advance(self, lane: Lane, now: float) -> None:
        """Ask for what is queued, once the lane was greeted."""
        if self._lane_ready:
            if self._queue:
                self._post(lane, now)
        elif lane.poll_ready():
            with self._changed:
                self._lane_ready = self._greeted = True
                self._changed.notify_all()
            self._post(lane, now)
        elif self._lane_due <= now:
            raise TierIOError(f"no answer to the greeting in {self._limits.handshake_s:g} s")

    def _may_rest(self, lane: Lane, now: float) -> bool:
        """Whether the worker has nothing to do; it will end the thread's sleep when it has."""
        lane.worker.take_messages()
        busy = self._posted or not self._lane_ready
        if not busy and now - self._lane_used > self._limits.idle_s / 2:
            # Before the peer does.
            self._drop_lane()
            self._drop_worker()
            return True
        # Otherwise the next read has to wake nobody, and its taker meets nobody.
        self._waker.watch(lane.worker if busy else None)
        return lane.worker.arm()

    def _pause_s(self, busy_s: float) -> float:
        """How long the thread may sleep; at most `busy_s` while reads come."""
        now = self._clock.monotonic()
        with self._changed:
            pause_s = IDLE_WAIT_S
            if self._lane is not None:
                reading = bool(self._posted) or now - self._lane_used < LOOK_FOR_S
                pause_s = busy_s if reading else pause_s
                pause_s = pause_s if self._lane_ready else BUSY_WAIT_S
            self._wakes_at = min(now + pause_s, self._due)
            return self._wakes_at - now

    def _open_lane(self, now: float) -> Lane:
        self._wanted = False
        self._lane_due = now + self._limits.handshake_s
        self._lane_used = now
        with self._changed:
            offer = self._offer
        if self._worker is None:
            self._worker, self._replaced = self._workers.take()
            # It may have been another peer's before.
            self._spoilt = self._replaced != NO_LANE
        self._lane = self._opener(self._worker, offer, self._replaced)
        return self._lane

    def _post(self, lane: Lane, now: float) -> None:
        while len(self._posted) < POSTED_MAX:
            with self._changed:
                if not self._queue:
                    return
                job = self._queue[0]
            job.attempts += 1
            left_s = max(0.001, job.deadline - now)
            transfer = lane.post(job.generation, job.ranges, job.views, left_s)
            self._lane_used = now
            with self._changed:
                self._queue.popleft()
                job.transfer = transfer
                self._posted.append(job)

    def _expire(self, now: float) -> None:
        """End what is past its deadline. A posted read costs the lane."""
        with self._changed:
            queued = [job for job in self._queue if job.deadline <= now]
            posted = list(self._posted)
        for job in queued:
            self._end(job, None, "deadline passed before it was asked for")
        if any(job.deadline <= now for job in posted):
            self._drop_lane()
            for job in posted:
                if job.deadline <= now:
                    self._end(job, None, "deadline passed")
                else:
                    # The lane did not break under it: that attempt does not count.
                    job.attempts -= 1
                    self._requeue(job)
        with self._changed:
            self._set_due_locked()

    def _set_due_locked(self) -> None:
        left = (job.deadline for job in (*self._queue, *self._posted))
        self._due = min(left, default=math.inf)

    def _break_lane(self, reason: str) -> None:
        """The lane, or the attempt to open one, has failed. Reads that may succeed on another
        lane are asked for again; when not even a lane could be had, all fail."""
        was_ready, self._wanted = self._lane_ready, False
        self._drop_lane()
        log.info("peer=%s lane=broken reason=%s", self.peer_name, reason)
        with self._changed:
            if not was_ready:
                # A peer that does not even greet is gone, or has become another process.
                self._broken = reason
                self._changed.notify_all()
            jobs = [*self._posted, *self._queue]
        for job in jobs:
            if not was_ready or job.attempts >= LANES_MAX:
                self._end(job, None, reason)
            elif job.transfer is not None:
                self._requeue(job)

    def _requeue(self, job: Job) -> None:
        with self._changed:
            self._posted.remove(job)
            job.transfer = None
            self._queue.append(job)

    def _drop_lane(self) -> None:
        """Abort the lane; returns when nothing is written to posted memory any more."""
        lane, self._lane, self._lane_ready = self._lane, None, False
        if lane is None:
            return
        self._replaced = lane.lane
        self._spoilt = self._spoilt or not lane.settled
        late = self._clock.monotonic() + self._limits.io_s
        try:
            lane.abort()
            while not lane.settled and self._clock.monotonic() < late:
                if not lane.worker.progress() and lane.worker.arm():
                    self._waker.wait(lane.worker, SETTLE_WAIT_S)
        finally:
            if not lane.settled:
                # The endpoint is closed, and bytes move only inside progress() of this worker,
                # which nobody calls any more: so nothing that was posted is written to either. It
                # is not freed, since that would be one more progress().
                log.error("peer=%s lane=aborted but not settled, worker left", self.peer_name)
                _left.append((lane, self._worker))
                self._forget_worker()

    def _forget_worker(self) -> None:
        self._worker = None
        self._waker.watch(None)

    def _drop_worker(self) -> None:
        worker = self._worker
        self._forget_worker()
        if worker is not None:
            self._workers.give(worker, self._replaced, spoilt=self._spoilt)

    def _end(self, job: Job, outcomes: list[PageOutcome] | None, error: str | None) -> None:
        """Give the views back and tell the reader."""
        if outcomes is None:
            outcomes = [PageOutcome.FAILED] * len(job.ranges)
        self._take_out(job, outcomes)
        self._tell(job, outcomes, error)

    def _take_out(self, job: Job, outcomes: list[PageOutcome]) -> None:
        """A job has ended: nothing is written to its views any more."""
        got = 0
        for outcome, (_, length) in zip(outcomes, job.ranges, strict=True):
            got += length if outcome is PageOutcome.OK else 0
        with self._changed:
            if job.transfer is None:
                self._queue.remove(job)
            else:
                self._posted.remove(job)
            job.views, job.transfer = [], None
            self._open -= 1
            if job.deadline <= self._due:
                self._set_due_locked()
            self._bytes += got
            for outcome in self._outcomes:
                self._outcomes[outcome] += outcomes.count(outcome)

    def _tell(self, job: Job, outcomes: list[PageOutcome], error: str | None) -> None:
        failed = PageOutcome.FAILED in outcomes
        text = error or ("the peer did not send all pages" if failed else None)
        job.read.settle(
            0, outcomes, None if text is None else f"read from peer {self.peer_name}: {text}"
        )
