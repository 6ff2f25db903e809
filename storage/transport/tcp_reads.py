"""Reads of one peer over TCP: from the queue onto a connection, by a worker or by who waits.

Owns the reads that have not ended, the connections that pages come over, and the worker threads.
Does not know how a connection is made. A read is begun by a worker thread, so that it goes on
whatever the reader does meanwhile; a reader that calls take() before a worker has come does the
transfer itself, which saves two changes of thread: for one page of 1 MiB, a third of its time.

Invariants: a destination is written to only while its job is running, by the thread that runs it,
and the connection is dropped before a job ends that failed; a queued job ends at its deadline with
no worker's help; every accepted job is queued, running or ended exactly once; jobs begin in the
order in which they were asked for; take() runs no job whose deadline is after its own.
Called by tcp_peer.py.

    job state   who holds its views    leaves by
    QUEUED      nobody writes          worker or taker begins -> RUNNING; deadline, close -> ENDED
    RUNNING     that thread            transferred, failed, deadline -> ENDED
    ENDED       the caller, again      final
"""

from __future__ import annotations

import itertools
import logging
import threading
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

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
from tierkv.storage.transport.wire import (
    HEADER_BYTES,
    Kind,
    pack_frame,
    pack_read,
    page_bounds,
    unpack_error,
    unpack_header,
)

PIECE_BYTES = 8 << 20
"""A read is cut for several connections only into pieces of at least so much."""
IDLE_WAIT_S = 5.0
STOP_S = 5.0

log = logging.getLogger(__name__)


class _State(Enum):
    QUEUED = "queued"
    RUNNING = "running"
    ENDED = "ended"


class TcpRead(PeerRead):
    """A read whose taker may do the transfer."""

    def __init__(self, pages: int, assist: Callable[[TcpRead, float], float]) -> None:
        super().__init__(pages)
        self._assist = assist

    def take(self, timeout_s: float) -> list[PageOutcome]:
        return super().take(timeout_s if self.done else self._assist(self, timeout_s))


class _Job:
    """Consecutive pages of one read, on one connection."""

    __slots__ = ("deadline", "generation", "ranges", "read", "start", "state", "views", "watch")

    def __init__(
        self,
        read: TcpRead,
        start: int,
        ranges: Sequence[PageRange],
        views: list[memoryview],
        generation: int,
        deadline: float,
    ) -> None:
        self.read = read
        self.start = start
        self.ranges = ranges
        self.views = views
        self.generation = generation
        self.deadline = deadline
        self.state = _State.QUEUED
        self.watch: int | None = None


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
        self._queue: deque[_Job] = deque()
        self._running: set[_Job] = set()
        self._open_reads: dict[PeerRead, int] = {}
        """Jobs that have not ended, by read."""
        self._workers: list[threading.Thread] = []
        self._away = 0
        """Workers with a job, or with the callbacks of one: not back for the next."""
        self._idle: list[Stream] = []
        """Connections that no job uses; with those that one uses, at most read_connections."""
        self._closing = False
        self._outcomes = dict.fromkeys(PageOutcome, 0)
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
        read = TcpRead(len(ranges), self._assist)
        deadline = self._clock.monotonic() + timeout_s
        jobs = [
            _Job(read, start, ranges[start:end], views[start:end], generation, deadline)
            for start, end in _pieces(ranges, self._limits.read_connections)
        ]
        with self._lock:
            refusal = "it was closed" if self._closing else self._connections.refusal
            if refusal is None and len(self._open_reads) >= self._limits.queued_reads:
                refusal = f"{len(self._open_reads)} reads are under way, no more are taken"
                self._rejected += 1
            if refusal is None:
                self._open_reads[read] = len(jobs)
                self._queue.extend(jobs)
                self._start_workers()
                busy = len(self._queue) > self._at_once()
                self._ready.notify(len(jobs))
            else:
                self._outcomes[PageOutcome.FAILED] += len(ranges)
        if refusal is not None:
            read.refuse(f"read from peer {self._address}: {refusal}")
            return read
        # Jobs that an idle worker takes at once need no watch: its socket has the deadline, and
        # waking one more thread would cost as much as a small read.
        for job in jobs if busy else ():
            self._watch_deadline(job)
        return read

    def _at_once(self) -> int:
        """How many queued jobs idle workers can begin now. Under the lock.

        A taker begins only what is first in the queue, so it takes no worker's place from a job
        that stands before its own.
        """
        free = self._limits.read_connections - len(self._running)
        return min(free, len(self._workers) - self._away)

    def _watch_deadline(self, job: _Job) -> None:
        token = self._watch.add(job.deadline, lambda: self._expire(job))
        with self._lock:
            job.watch = token
            queued = job.state is _State.QUEUED
        if not queued:
            # Somebody was faster; the socket has the deadline.
            self._watch.discard(token)

    def _expire(self, job: _Job) -> None:
        """The deadline of a job has passed: it ends here unless somebody has begun it."""
        with self._lock:
            if job.state is not _State.QUEUED:
                return
            self._queue.remove(job)
            job.state = _State.ENDED
        self._end(job, [], "deadline passed before a connection was free", None)

    # --- who runs a job -------------------------------------------------------------------------

    def _start_workers(self) -> None:
        """As many as there are jobs, up to the limit. Under the lock."""
        wanted = min(len(self._queue) + self._away, self._limits.read_connections)
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

    def _wait_job(self) -> tuple[_Job, Stream | None] | None:
        """Wait for a job that can begin; None when the peer closes."""
        with self._lock:
            while not self._closing:
                if self._queue and len(self._running) < self._limits.read_connections:
                    self._away += 1
                    return self._begin_first()
                self._ready.wait(IDLE_WAIT_S)
            return None

    def _assist(self, read: TcpRead, timeout_s: float) -> float:
        """Run jobs of `read` in the thread that waits for it; returns what is left of its time.

        Only such as are first in the queue, and end before the time is over whatever happens.
        """
        until = self._clock.monotonic() + timeout_s
        begun = self._begin_own(read, until)
        if begun is None:
            return timeout_s
        while begun is not None:
            self._run(*begun)
            begun = self._begin_own(read, until)
        return until - self._clock.monotonic()

    def _begin_own(self, read: TcpRead, until: float) -> tuple[_Job, Stream | None] | None:
        with self._lock:
            if not self._queue or len(self._running) >= self._limits.read_connections:
                return None
            first = self._queue[0]
            return self._begin_first() if first.read is read and first.deadline <= until else None

    def _begin_first(self) -> tuple[_Job, Stream | None]:
        """The first job of the queue, running now, and a connection if one is idle. Under the
        lock; whoever calls this runs it."""
        job = self._queue.popleft()
        job.state = _State.RUNNING
        self._running.add(job)
        return job, self._idle.pop() if self._idle else None

    def _run(self, job: _Job, stream: Stream | None) -> None:
        """Do a job and end it. Raises nothing but what interrupts a thread that waits."""
        outcomes: list[PageOutcome] = []
        error: str | None = "the thread that read it was interrupted"
        try:
            stream = self._connections.usable(stream, job.deadline)
            self._transfer(stream, job, outcomes)
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

    def _transfer(self, stream: Stream, job: _Job, outcomes: list[PageOutcome]) -> None:
        """Ask for the job's pages and receive them in place; adds one outcome a page."""
        request = next(self._requests)
        body = pack_read(job.generation, job.ranges)
        stream.send([pack_frame(Kind.READ, request, body)], self._limits.io_s, job.deadline)
        first = bytearray(HEADER_BYTES)
        with memoryview(first) as head:
            for view in job.views:
                stream.receive(head, job.deadline)
                header = unpack_header(first, page_bounds(view.nbytes))
                if header.kind is Kind.ERROR:
                    text = unpack_error(stream.receive_bytes(header.length, job.deadline))
                    raise TierIOError(f"it refused: {text}")
                if header.request != request:
                    raise TierIOError(f"expected pages of {request}, got {header.request}")
                if header.kind is Kind.GONE:
                    outcomes.append(PageOutcome.GONE)
                    continue
                stream.receive(view, job.deadline)
                outcomes.append(PageOutcome.OK)

    def _end(
        self, job: _Job, outcomes: list[PageOutcome], error: str | None, stream: Stream | None
    ) -> None:
        """Give views and connection back, and tell the reader. Pages without an outcome have
        FAILED."""
        if job.watch is not None:
            self._watch.discard(job.watch)
        got = sum(
            view.nbytes
            for view, outcome in zip(job.views, outcomes, strict=False)
            if outcome is PageOutcome.OK
        )
        outcomes += [PageOutcome.FAILED] * (len(job.ranges) - len(outcomes))
        with self._lock:
            self._running.discard(job)
            job.state = _State.ENDED
            job.views = []
            self._bytes += got
            for outcome in outcomes:
                self._outcomes[outcome] += 1
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
                pages_ok=self._outcomes[PageOutcome.OK],
                pages_gone=self._outcomes[PageOutcome.GONE],
                pages_failed=self._outcomes[PageOutcome.FAILED],
                bytes_read=self._bytes,
                rejected_reads=self._rejected,
                worker_restarts=self._restarts,
            )

    def check(self) -> None:
        """Assert the invariants. O(open reads)."""
        with self._lock:
            limits = self._limits
            jobs = len(self._queue) + len(self._running)
            assert all(job.state is _State.QUEUED for job in self._queue)
            assert all(job.state is _State.RUNNING for job in self._running)
            # A job that its deadline ends is in neither for a moment.
            assert jobs <= sum(self._open_reads.values()), (jobs, self._open_reads)
            assert len(self._open_reads) <= limits.queued_reads, len(self._open_reads)
            assert 0 <= self._away <= len(self._workers) <= limits.read_connections
            assert len(self._running) + len(self._idle) <= limits.read_connections
            assert self._connections.has(self._idle), "an idle connection is closed"
        self._watch.check()

    def stop(self) -> list[_Job]:
        """First half of close(): begin nothing more. The queued jobs, to be given to finish()."""
        with self._lock:
            self._closing = True
            queued = list(self._queue)
            self._queue.clear()
            for job in queued:
                job.state = _State.ENDED
            self._ready.notify_all()
            return queued

    def finish(self, queued: list[_Job]) -> None:
        """Second half, when connections fail at once: end all jobs. Waits for those running."""
        with self._lock:
            idle, self._idle = self._idle, []
        for job in queued:
            self._end(job, [], "it was closed", None)
        for stream in idle:
            self._connections.discard(stream)
        self._watch.close(STOP_S)
        limit_s = STOP_S + self._limits.handshake_s
        with self._lock:
            # Takers run jobs too, and after close() nobody writes to a destination.
            if not self._quiet.wait_for(lambda: not self._running, limit_s):
                log.error("peer=%s jobs=%d did not end", self._address, len(self._running))
        for worker in self._workers:
            # A read's callback may close the peer.
            if worker is not threading.current_thread():
                worker.join(limit_s)
                if worker.is_alive():
                    log.error("peer=%s worker=%s did not end", self._address, worker.name)


def _pieces(ranges: Sequence[PageRange], connections: int) -> list[tuple[int, int]]:
    """Cut ranges into runs [start, end) of about equal bytes, one a connection at most."""
    total = sum(length for _, length in ranges)
    count = max(1, min(connections, len(ranges), total // PIECE_BYTES))
    pieces: list[tuple[int, int]] = []
    start = done = 0
    for index, (_, length) in enumerate(ranges):
        done += length
        if done * count >= total * (len(pieces) + 1):
            pieces.append((start, index + 1))
            start = index + 1
    return pieces
