"""Reads of one peer over TCP: from the queue onto a connection, by a worker or by who waits.

Owns the reads that have not ended, the connections that pages come over, and the worker threads.
Does not know how a connection is made. Where a connection is idle the peer is asked at once, in
read(), and looks for the pages while the rest is arranged here. They are received by a worker
thread, so that a read goes on whatever the reader does meanwhile; a reader that calls take()
before a worker has come receives them itself, which saves two changes of thread. So a worker is
woken at once only where nobody takes at once: for a callback, a second piece, a queue.

Invariants: a destination is written to only while its job is running, by the thread that runs it,
and the connection is dropped before a job ends that failed; a queued job ends at its deadline with
no worker's help; every accepted job is queued, running or ended exactly once; jobs begin in the
order in which they came, but those that have a connection before those that wait for one; take()
runs no job whose deadline is after its own.
Called by tcp_peer.py.
"""

from __future__ import annotations

import itertools
import logging
import threading
import traceback
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from tierkv.storage.clock import Clock
from tierkv.storage.deadlines import DeadlineWatch
from tierkv.storage.errors import TierIOError
from tierkv.storage.transport.base import (
    PageOutcome,
    PageRange,
    PeerRead,
    TransportLimits,
)
from tierkv.storage.transport.stream import Stream
from tierkv.storage.transport.tcp_connections import Connections
from tierkv.storage.transport.tcp_jobs import Job, State, TcpRead, pieces, question
from tierkv.storage.transport.wire import (
    HEADER_BYTES,
    Kind,
    page_bounds,
    unpack_error,
    unpack_header,
)

IDLE_WAIT_S = 5.0
STOP_S = 5.0
LOOK_S = 0.002
"""How often an idle worker looks for jobs by itself, for LOOK_FOR_S after the last one came. So
what its taker begins wakes nobody: that would cost 0.1 to 0.3 ms."""
LOOK_FOR_S = 0.1

_OK, _GONE = PageOutcome.OK, PageOutcome.GONE

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ReadCounts:
    """The part of PeerStats that is about reads."""

    open_reads: int
    pages_ok: int
    pages_gone: int
    pages_failed: int
    bytes_read: int
    rejected_reads: int
    worker_restarts: int


class Reads:
    """See the module docstring. Thread-safe."""

    def __init__(
        self,
        address: str,
        connections: Connections,
        requests: itertools.count[int],
        limits: TransportLimits,
        clock: Clock,
    ) -> None:
        self._address = address
        self._connections = connections
        self._requests = requests
        self._limits = limits
        self._clock = clock
        self._watch = DeadlineWatch(clock)
        self._lock = threading.Lock()
        self._ready = threading.Condition(self._lock)
        """For workers: there may be a job that can begin, or the end."""
        self._quiet = threading.Condition(self._lock)
        """For close(): a job has ended."""
        self._queue: deque[Job] = deque()
        self._running: set[Job] = set()
        self._open_reads: dict[PeerRead, int] = {}
        """Jobs that have not ended, by read."""
        self._workers: list[threading.Thread] = []
        self._lanes = 0
        """Jobs that have a connection or are about to."""
        self._pending = 0
        """Jobs whose question read() is sending, not in the queue yet."""
        self._away = 0
        """Workers with a job, or with the callbacks of one: not back for the next."""
        self._looking = False
        """Whether a worker will look at the queue within LOOK_S."""
        self._look_until = 0.0
        self._idle: list[Stream] = []
        """Connections that no job uses; with those that one uses, at most read_connections."""
        self._closing = False
        self._ok = self._gone = self._failed = 0
        self._bytes = 0
        self._rejected = 0
        self._restarts = 0

    def begin(
        self,
        generation: int,
        ranges: Sequence[PageRange],
        views: list[memoryview],
        timeout_s: float,
    ) -> TcpRead:
        """Peer.read(), of arguments that were checked. Never waits."""
        read = TcpRead(len(ranges), self._assist, self._hurry)
        whom = f"read from peer {self._address}"
        deadline = self._clock.monotonic() + timeout_s
        jobs = [
            Job(read, start, ranges[start:end], views[start:end], generation, deadline)
            for start, end in pieces(ranges, self._limits.read_connections)
        ]
        with self._lock:
            refusal = "it was closed" if self._closing else None
            # That is the peer's doing, and no refusal of ours.
            lost = None if self._closing else self._connections.refusal
            if refusal is lost is None and len(self._open_reads) >= self._limits.queued_reads:
                refusal = f"{len(self._open_reads)} reads are under way, no more are taken"
                self._rejected += 1
            if refusal is lost is None:
                self._open_reads[read] = len(jobs)
                lent = self._lend(len(jobs))
            else:
                self._failed += len(ranges)
        if lost is not None:
            read.settle(0, [PageOutcome.FAILED] * len(ranges), f"{whom}: {lost}")
        elif refusal is not None:
            read.refuse(f"{whom}: {refusal}")
        if read.done:
            return read
        for job, stream in zip(jobs, lent, strict=False):
            self._ask_now(job, stream)
        self._enqueue(jobs, len(lent))
        return read

    def _lend(self, count: int) -> list[Stream]:
        """Up to `count` idle connections, to ask on at once if nobody waits. Under the lock."""
        lent: list[Stream] = []
        while not self._queue and self._idle and self._idle[-1].sends_now and len(lent) < count:
            lent.append(self._idle.pop())
        self._lanes += len(lent)
        self._pending += len(lent)
        return lent

    def _ask_now(self, job: Job, stream: Stream) -> None:
        """Send a job's question if that needs no waiting; else it is asked when it is begun."""
        request = next(self._requests)
        asked = False
        try:
            asked = not stream.wait_readable(0.0) and stream.send_now(question(job, request))
        except TierIOError as error:
            # Whoever begins the job opens another connection, and has the time to wait for it.
            log.debug("peer=%s asked=no reason=%s", self._address, error)
        finally:
            if asked:
                job.lane, job.stream, job.request = True, stream, request
            else:
                self._connections.discard(stream)
                with self._lock:
                    self._lanes -= 1

    def _enqueue(self, jobs: list[Job], pending: int) -> None:
        """Hand jobs to workers and takers, and their deadlines to the watch where need be."""
        with self._lock:
            self._pending -= pending
            closed = self._closing
            if not closed:
                for job in jobs:
                    if job.lane:
                        self._queue.appendleft(job)
                    else:
                        self._queue.append(job)
                self._start_workers()
                busy = len(self._queue) > self._at_once()
                self._wake(jobs[0].deadline, len(jobs))
        if closed:
            for job in jobs:
                self._drop(job, "it was closed")
            return
        # Jobs that an idle worker takes at once need no watch: its socket has the deadline, and
        # waking one more thread would cost as much as a small read.
        for job in jobs if busy else ():
            self._watch_deadline(job)

    def _wake(self, deadline: float, count: int) -> None:
        """Have `count` new jobs begun: soon by a worker, unless their taker is faster. Under the
        lock."""
        now = self._clock.monotonic()
        self._look_until = now + LOOK_FOR_S
        if self._looking and len(self._queue) == count and deadline - now > 5 * LOOK_S:
            count -= 1
        self._ready.notify(count)

    def _hurry(self) -> None:
        """Somebody waits for what is queued, and does not begin it."""
        with self._lock:
            if self._queue:
                self._ready.notify()

    def _at_once(self) -> int:
        """How many queued jobs idle workers can begin now. Under the lock.

        A taker begins only what is first in the queue, so it takes no worker's place from a job
        that stands before its own.
        """
        free = self._limits.read_connections - self._lanes
        return min(self._asked() + free, len(self._workers) - self._away - self._pending)

    def _asked(self) -> int:
        """Queued jobs that have a connection: they are the first ones. Under the lock."""
        count = 0
        for job in self._queue:
            if not job.lane:
                break
            count += 1
        return count

    def _watch_deadline(self, job: Job) -> None:
        try:
            token = self._watch.add(job.deadline, lambda: self._expire(job))
        except RuntimeError as error:
            # The system gives no more threads: a job that nothing would end is not kept.
            self._expire(job, f"no thread for its deadline: {error}")
            return
        with self._lock:
            job.watch = token
            queued = job.state is State.QUEUED
        if not queued:
            # Somebody was faster; the socket has the deadline.
            self._watch.discard(token)

    def _expire(self, job: Job, why: str | None = None) -> None:
        """The deadline of a job has passed, or `why`: it ends unless somebody has begun it."""
        with self._lock:
            if job.state is not State.QUEUED:
                return
            self._queue.remove(job)
            job.state = State.ENDED
        free = "a worker" if job.lane else "a connection"
        self._drop(job, why or f"deadline passed before {free} was free")

    def _drop(self, job: Job, error: str) -> None:
        """End a job that nobody runs."""
        self._connections.discard(job.stream)
        self._end(job, [], error, None)

    # --- who runs a job -------------------------------------------------------------------------

    def _start_workers(self) -> None:
        """As many as there are jobs, up to the limit. Under the lock."""
        jobs = len(self._queue) + self._pending + self._away
        wanted = min(jobs, self._limits.read_connections)
        while len(self._workers) < wanted:
            worker = threading.Thread(
                target=self._work,
                name=f"tierkv-read-{self._address}-{len(self._workers)}",
                daemon=True,
            )
            try:
                worker.start()
            except RuntimeError as error:
                # The system gives no more threads: what nobody begins ends at its deadline.
                log.error("peer=%s worker=not started reason=%s", self._address, error)
                return
            self._workers.append(worker)

    def _work(self) -> None:
        """Life of one worker thread."""
        while (begun := self._wait_job()) is not None:
            self._run(*begun)
            with self._lock:
                self._away -= 1

    def _wait_job(self) -> tuple[Job, Stream | None] | None:
        """Wait for a job that can begin; None when the peer closes."""
        with self._lock:
            while not self._closing:
                if self._queue and self._can_begin(self._queue[0]):
                    self._away += 1
                    return self._begin_first()
                look = not self._looking and self._clock.monotonic() < self._look_until
                self._looking |= look
                self._ready.wait(LOOK_S if look else IDLE_WAIT_S)
                self._looking &= not look
            return None

    def _assist(self, read: TcpRead, timeout_s: float) -> float:
        """Run jobs of `read` in the thread that waits for it; returns what is left of its time.

        Only such as are first in the queue, and end before the time is over whatever happens.
        """
        until = self._clock.monotonic() + timeout_s
        begun = self._begin_own(read, until)
        if begun is None:
            self._hurry()
            return timeout_s
        while begun is not None:
            self._run(*begun)
            begun = None if read.done else self._begin_own(read, until)
        return until - self._clock.monotonic()

    def _begin_own(self, read: TcpRead, until: float) -> tuple[Job, Stream | None] | None:
        with self._lock:
            if not self._queue:
                return None
            first = self._queue[0]
            own = first.read is read and first.deadline <= until
            return self._begin_first() if own and self._can_begin(first) else None

    def _can_begin(self, job: Job) -> bool:
        """Whether it has a connection or may have one. Under the lock."""
        return job.lane or self._lanes < self._limits.read_connections

    def _begin_first(self) -> tuple[Job, Stream | None]:
        """The first job of the queue, running now, and its connection or an idle one. Under the
        lock; whoever calls this runs it."""
        job = self._queue.popleft()
        job.state = State.RUNNING
        self._running.add(job)
        if job.lane:
            return job, job.stream
        job.lane = True
        self._lanes += 1
        return job, self._idle.pop() if self._idle else None

    def _run(self, job: Job, stream: Stream | None) -> None:
        """Do a job and end it. Raises nothing but what interrupts a thread that waits."""
        outcomes: list[PageOutcome] = []
        error: str | None = "the thread that read it was interrupted"
        try:
            if stream is None or job.stream is None:
                stream = self._connections.usable(stream, job.deadline)
                self._ask(stream, job)
            self._receive(stream, job, outcomes)
            error = None
        except TierIOError as failure:
            error = str(failure)
        except Exception as failure:  # noqa: BLE001
            # A bug in one job must not end the thread that all later ones need (lesson H2).
            error = f"{type(failure).__name__}: {failure}"
            log.error("peer=%s %s", self._address, traceback.format_exc())
            with self._lock:
                self._restarts += 1
        finally:
            if error is not None:
                self._connections.discard(stream)
                stream = None
            self._end(job, outcomes, error, stream)

    # --- one job --------------------------------------------------------------------------------

    def _ask(self, stream: Stream, job: Job) -> None:
        """Ask for the job's pages."""
        job.request = next(self._requests)
        stream.send([question(job, job.request)], self._limits.io_s, job.deadline)

    def _receive(self, stream: Stream, job: Job, outcomes: list[PageOutcome]) -> None:
        """Receive the job's pages in place; adds one outcome a page."""
        first = bytearray(HEADER_BYTES)
        bounds, length = page_bounds(job.views[0].nbytes), job.views[0].nbytes
        with memoryview(first) as head:
            for view in job.views:
                if view.nbytes != length:
                    bounds, length = page_bounds(view.nbytes), view.nbytes
                stream.receive(head, job.deadline)
                header = unpack_header(first, bounds)
                if header.kind is Kind.ERROR:
                    text = unpack_error(stream.receive_bytes(header.length, job.deadline))
                    raise TierIOError(f"it refused: {text}")
                if header.request != job.request:
                    raise TierIOError(f"expected pages of {job.request}, got {header.request}")
                if header.kind is Kind.GONE:
                    outcomes.append(_GONE)
                    continue
                stream.receive(view, job.deadline)
                outcomes.append(_OK)

    def _end(
        self, job: Job, outcomes: list[PageOutcome], error: str | None, stream: Stream | None
    ) -> None:
        """Give views and connection back, and tell the reader. Pages without an outcome have
        FAILED."""
        if job.watch is not None:
            self._watch.discard(job.watch)
        got = 0
        # Not by its views: nobody may hold one when the reader is told.
        for (_, length), outcome in zip(job.ranges, outcomes, strict=False):
            if outcome is _OK:
                got += length
        if len(outcomes) < len(job.ranges):
            outcomes += [PageOutcome.FAILED] * (len(job.ranges) - len(outcomes))
        ok, gone = outcomes.count(_OK), outcomes.count(_GONE)
        with self._lock:
            self._running.discard(job)
            self._lanes -= job.lane
            job.state = State.ENDED
            job.views, job.stream = [], None
            self._bytes += got
            self._ok += ok
            self._gone += gone
            self._failed += len(outcomes) - ok - gone
            self._open_reads[job.read] -= 1
            if not self._open_reads[job.read]:
                del self._open_reads[job.read]
            if stream is not None and not self._closing:
                self._idle.append(stream)
                stream = None
            if self._queue:
                self._ready.notify()
            if self._closing:
                self._quiet.notify_all()
        self._connections.discard(stream)
        text = None if error is None else f"read from peer {self._address}: {error}"
        job.read.settle(job.start, outcomes, text)

    # --- the rest -------------------------------------------------------------------------------

    def counts(self) -> ReadCounts:
        """Consistent with each other. O(1)."""
        with self._lock:
            return ReadCounts(
                open_reads=len(self._open_reads),
                pages_ok=self._ok,
                pages_gone=self._gone,
                pages_failed=self._failed,
                bytes_read=self._bytes,
                rejected_reads=self._rejected,
                worker_restarts=self._restarts,
            )

    def check(self) -> None:
        """Assert the invariants. O(open reads)."""
        with self._lock:
            limits = self._limits
            jobs = len(self._queue) + len(self._running)
            assert all(job.state is State.QUEUED for job in self._queue)
            assert all(job.state is State.RUNNING for job in self._running)
            # Jobs that are asked for by read(), or are being ended, are in neither.
            between = sum(self._open_reads.values()) - jobs
            assert 0 <= self._pending <= between, (self._pending, between)
            assert len(self._open_reads) <= limits.queued_reads, len(self._open_reads)
            assert 0 <= self._away <= len(self._workers) <= limits.read_connections
            used = len(self._running) + self._asked()
            assert used <= self._lanes <= used + between, (used, self._lanes, between)
            assert self._lanes + len(self._idle) <= limits.read_connections
            assert sum(job.lane for job in self._queue) == self._asked(), "one waits behind others"
            assert self._connections.has(self._idle), "an idle connection is closed"
        self._watch.check()

    def stop(self) -> list[Job]:
        """First half of close(): begin nothing more. The queued jobs, to be given to finish()."""
        with self._lock:
            self._closing = True
            queued = list(self._queue)
            self._queue.clear()
            for job in queued:
                job.state = State.ENDED
            self._ready.notify_all()
            return queued

    def finish(self, queued: list[Job]) -> None:
        """Second half, when connections fail at once: end all jobs. Waits for those running."""
        with self._lock:
            idle, self._idle = self._idle, []
        for job in queued:
            self._drop(job, "it was closed")
        for stream in idle:
            self._connections.discard(stream)
        # A read's callback may close the peer. A worker that does waits for no thread: that one may
        # be doing the same.
        callback = threading.current_thread() in self._workers
        self._watch.close(0.0 if callback else STOP_S)
        limit_s = STOP_S + self._limits.handshake_s
        with self._lock:
            # Takers run jobs too, and after close() nobody writes to a destination.
            if not self._quiet.wait_for(lambda: not self._running, limit_s):
                log.error("peer=%s jobs=%d did not end", self._address, len(self._running))
        for worker in () if callback else self._workers:
            worker.join(limit_s)
            if worker.is_alive():
                log.error("peer=%s worker=%s did not end", self._address, worker.name)
