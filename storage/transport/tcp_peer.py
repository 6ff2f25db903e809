"""The asking side of the tcp transport: one connected peer.

Owns the connections to it, the reads that have not ended, and a worker thread for each connection
that reads use. Messages go over connections of their own, in the caller's thread, so that a
lookup never waits behind pages. Invariants: a worker writes to a destination only while its job
is running, and drops the connection before it ends a job that failed; a queued job ends at its
deadline with no worker's help; every accepted job is queued, running or ended exactly once.
Called by tcp.py.

    job state   who holds its views    leaves by
    QUEUED      nobody writes          worker takes it -> RUNNING; deadline, close -> ENDED
    RUNNING     one worker             transferred, failed, deadline -> ENDED
    ENDED       the caller, again      final
"""

from __future__ import annotations

import itertools
import logging
import threading
import traceback
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from enum import Enum

from tierkv.storage.clock import Clock
from tierkv.storage.deadlines import DeadlineWatch
from tierkv.storage.errors import TierClosedError, TierIOError
from tierkv.storage.transport.base import (
    PageOutcome,
    PageRange,
    Peer,
    PeerIdentity,
    PeerRead,
    PeerStats,
    TransportLimits,
    check_read,
)
from tierkv.storage.transport.stream import Stream
from tierkv.storage.transport.wire import (
    HEADER_BYTES,
    Kind,
    answer_bounds,
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

Opener = Callable[[float], tuple[Stream, PeerIdentity]]
"""Connects and greets the peer, by a deadline. TierIOError."""

log = logging.getLogger(__name__)


class _State(Enum):
    QUEUED = "queued"
    RUNNING = "running"
    ENDED = "ended"


class _Job:
    """Consecutive pages of one read, on one connection."""

    __slots__ = ("deadline", "generation", "ranges", "read", "start", "state", "views", "watch")

    def __init__(
        self,
        read: PeerRead,
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


class TcpPeer(Peer):
    """A peer over TCP. Made by TcpTransport.connect()."""

    def __init__(
        self,
        address: str,
        identity: PeerIdentity,
        first: Stream,
        opener: Opener,
        limits: TransportLimits,
        clock: Clock,
    ) -> None:
        """Takes over `first`, which was greeted already."""
        self.address = address
        self.identity = identity
        self._opener = opener
        self._limits = limits
        self._clock = clock
        self._watch = DeadlineWatch(clock)
        self._changed = threading.Condition()
        self._requests = itertools.count(1)
        self._queue: deque[_Job] = deque()
        self._running: set[_Job] = set()
        self._open_reads: dict[PeerRead, int] = {}
        """Jobs that have not ended, by read."""
        self._workers: list[threading.Thread] = []
        self._occupied = 0
        """Workers with a job, or with the callbacks of one: not back for the next."""
        self._streams: set[Stream] = set()
        self._idle: list[Stream] = [first]
        self._streams.add(first)
        self._messages_out = 0
        self._closing = False
        self._lost: str | None = None
        self._answers = answer_bounds(limits)
        self._outcomes = dict.fromkeys(PageOutcome, 0)
        self._counts = dict.fromkeys(("bytes", "messages", "message_failures"), 0)
        self._rejected = 0
        self._restarts = 0

    # Reads

    @property
    def transport(self) -> str:
        return "tcp"

    @property
    def declined(self) -> Mapping[str, str]:
        return {}

    def read(
        self,
        generation: int,
        ranges: Sequence[PageRange],
        into: Sequence[memoryview],
        timeout_s: float,
    ) -> PeerRead:
        check_read(generation, ranges, into, timeout_s, self._limits)
        read = PeerRead(len(ranges))
        deadline = self._clock.monotonic() + timeout_s
        views = [view.cast("B") for view in into]
        jobs = [
            _Job(read, start, ranges[start:end], views[start:end], generation, deadline)
            for start, end in _pieces(ranges, self._limits.read_connections)
        ]
        with self._changed:
            refusal = self._refusal()
            if refusal is None and len(self._open_reads) >= self._limits.queued_reads:
                refusal = f"{len(self._open_reads)} reads are under way, no more are taken"
                self._rejected += 1
            if refusal is None:
                self._open_reads[read] = len(jobs)
                self._queue.extend(jobs)
                self._start_workers()
                # Jobs that an idle worker takes at once need no watch: its socket has the
                # deadline, and waking one more thread would cost as much as a small read.
                busy = len(self._queue) + self._occupied > len(self._workers)
                self._changed.notify_all()
            else:
                self._outcomes[PageOutcome.FAILED] += len(ranges)
        if refusal is not None:
            read.refuse(f"read from peer {self.address}: {refusal}")
            return read
        for job in jobs if busy else ():
            self._watch_deadline(job)
        return read

    def _watch_deadline(self, job: _Job) -> None:
        token = self._watch.add(job.deadline, lambda: self._expire(job))
        with self._changed:
            job.watch = token
            queued = job.state is _State.QUEUED
        if not queued:
            # A worker was faster; its socket has the deadline.
            self._watch.discard(token)

    def _expire(self, job: _Job) -> None:
        """The deadline of a job has passed: it ends here unless a worker has it."""
        with self._changed:
            if job.state is not _State.QUEUED:
                return
            self._queue.remove(job)
            job.state = _State.ENDED
        self._end(job, [], "deadline passed before a connection was free")

    def _start_workers(self) -> None:
        """As many as there are jobs, up to the limit. Under the lock."""
        wanted = min(len(self._queue) + self._occupied, self._limits.read_connections)
        while len(self._workers) < wanted:
            worker = threading.Thread(
                target=self._work,
                name=f"tierkv-read-{self.address}-{len(self._workers)}",
                daemon=True,
            )
            try:
                worker.start()
            except RuntimeError as error:
                # The system gives no more threads: what no worker takes ends at its deadline.
                log.error("peer=%s worker=not started reason=%s", self.address, error)
                return
            self._workers.append(worker)

    def _work(self) -> None:
        """Life of one worker thread, with a connection of its own."""
        stream: Stream | None = None
        while (job := self._take()) is not None:
            outcomes: list[PageOutcome] = []
            error: str | None = None
            try:
                stream = self._usable(stream, job.deadline)
                self._transfer(stream, job, outcomes)
            except TierIOError as failure:
                error = str(failure)
            except Exception as failure:  # noqa: BLE001
                # A bug in one job must not end the thread that all later ones need (lesson H2).
                error = f"{type(failure).__name__}: {failure}"
                log.error("peer=%s %s", self.address, traceback.format_exc())
                with self._changed:
                    self._restarts += 1
            if error is not None:
                self._discard(stream)
                stream = None
            self._end(job, outcomes, error)
            with self._changed:
                self._occupied -= 1
        self._discard(stream)

    def _take(self) -> _Job | None:
        """Wait for a job; None when the peer closes."""
        with self._changed:
            while not self._closing:
                if self._queue:
                    job = self._queue.popleft()
                    job.state = _State.RUNNING
                    self._running.add(job)
                    self._occupied += 1
                    return job
                self._changed.wait(IDLE_WAIT_S)
            return None

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

    def _end(self, job: _Job, outcomes: list[PageOutcome], error: str | None) -> None:
        """Give the views back and tell the reader. Pages without an outcome have FAILED."""
        if job.watch is not None:
            self._watch.discard(job.watch)
        got = sum(
            view.nbytes
            for view, outcome in zip(job.views, outcomes, strict=False)
            if outcome is PageOutcome.OK
        )
        outcomes += [PageOutcome.FAILED] * (len(job.ranges) - len(outcomes))
        with self._changed:
            self._running.discard(job)
            job.state = _State.ENDED
            job.views = []
            self._counts["bytes"] += got
            for outcome in outcomes:
                self._outcomes[outcome] += 1
            self._open_reads[job.read] -= 1
            if not self._open_reads[job.read]:
                del self._open_reads[job.read]
            self._changed.notify_all()
        text = None if error is None else f"read from peer {self.address}: {error}"
        job.read.settle(job.start, outcomes, text)

    # Messages

    def message(self, payload: bytes, timeout_s: float) -> bytes:
        if len(payload) > self._limits.message_bytes or not 0 < timeout_s <= self._limits.wait_s:
            raise ValueError(
                f"message to peer: expected at most {self._limits.message_bytes} bytes and "
                f"{self._limits.wait_s:g} s, got {len(payload)} and {timeout_s}"
            )
        deadline = self._clock.monotonic() + timeout_s
        stream: Stream | None = None
        good = False
        self._begin_message(deadline)
        try:
            with self._changed:
                stream = self._idle.pop() if self._idle else None
            stream = self._usable(stream, deadline)
            kind, body = self._exchange(stream, payload, deadline)
            good = True
        except TierIOError as error:
            raise TierIOError(f"message to peer {self.address}: {error}") from error
        finally:
            self._end_message(stream, good)
        if kind is Kind.ERROR:
            with self._changed:
                self._counts["message_failures"] += 1
            raise TierIOError(f"message to peer {self.address}: it refused: {unpack_error(body)}")
        return bytes(body)

    def _begin_message(self, deadline: float) -> None:
        """Wait for one of the message connections."""
        with self._changed:
            limit = self._limits.message_connections
            left_s = deadline - self._clock.monotonic()
            if not self._changed.wait_for(
                lambda: self._closing or self._messages_out < limit, max(0.0, left_s)
            ):
                self._counts["message_failures"] += 1
                raise TierIOError(
                    f"message to peer {self.address}: {limit} others did not end in time"
                )
            if self._closing:
                raise TierClosedError(f"message to peer {self.address}: it was closed")
            self._messages_out += 1

    def _end_message(self, stream: Stream | None, good: bool) -> None:
        with self._changed:
            self._messages_out -= 1
            self._counts["messages" if good else "message_failures"] += 1
            keep = good and not self._closing and stream is not None
            if keep and stream is not None:
                self._idle.append(stream)
            self._changed.notify_all()
        if not keep:
            self._discard(stream)

    def _exchange(self, stream: Stream, payload: bytes, deadline: float) -> tuple[Kind, bytearray]:
        request = next(self._requests)
        stream.send([pack_frame(Kind.MESSAGE, request, payload)], self._limits.io_s, deadline)
        header = unpack_header(stream.receive_bytes(HEADER_BYTES, deadline), self._answers)
        if header.request not in (request, 0):
            raise TierIOError(f"expected the answer of {request}, got {header.request}")
        return header.kind, stream.receive_bytes(header.length, deadline)

    # Connections

    def _usable(self, stream: Stream | None, deadline: float) -> Stream:
        """`stream`, or a new one when there is none or the peer has closed it meanwhile."""
        if stream is not None:
            if not stream.wait_readable(0.0):
                return stream
            self._discard(stream)
        with self._changed:
            refusal = self._refusal()
        if refusal is not None:
            raise TierIOError(refusal)
        fresh, identity = self._opener(deadline)
        with self._changed:
            if identity.boot_token != self.identity.boot_token:
                self._lost = "it was restarted since it was connected; connect again"
            refusal = self._refusal()
            if refusal is None:
                self._streams.add(fresh)
                return fresh
        fresh.close()
        raise TierIOError(refusal)

    def _discard(self, stream: Stream | None) -> None:
        """Close a connection. By the thread that uses it."""
        if stream is None:
            return
        with self._changed:
            self._streams.discard(stream)
        stream.close()

    def _refusal(self) -> str | None:
        """Why nothing can be asked of this peer any more. Under the lock."""
        return "it was closed" if self._closing else self._lost

    # The rest

    @property
    def closed(self) -> bool:
        """True once close() was called."""
        return self._closing

    def stats(self) -> PeerStats:
        with self._changed:
            return PeerStats(
                connections=len(self._streams),
                open_reads=len(self._open_reads),
                pages_ok=self._outcomes[PageOutcome.OK],
                pages_gone=self._outcomes[PageOutcome.GONE],
                pages_failed=self._outcomes[PageOutcome.FAILED],
                bytes_read=self._counts["bytes"],
                messages=self._counts["messages"],
                messages_failed=self._counts["message_failures"],
                rejected_reads=self._rejected,
                worker_restarts=self._restarts,
            )

    def check(self) -> None:
        with self._changed:
            limits = self._limits
            jobs = len(self._queue) + len(self._running)
            assert all(job.state is _State.QUEUED for job in self._queue)
            assert all(job.state is _State.RUNNING for job in self._running)
            # A job that its deadline ends is in neither for a moment.
            assert jobs <= sum(self._open_reads.values()), (jobs, self._open_reads)
            assert len(self._open_reads) <= limits.queued_reads, len(self._open_reads)
            assert len(self._running) <= self._occupied <= len(self._workers)
            assert len(self._workers) <= limits.read_connections
            assert 0 <= self._messages_out <= limits.message_connections
            assert set(self._idle) <= self._streams, "an idle connection is closed"
            assert len(self._streams) <= limits.read_connections + limits.message_connections
        self._watch.check()

    def close(self) -> None:
        with self._changed:
            self._closing = True
            queued = list(self._queue)
            self._queue.clear()
            for job in queued:
                job.state = _State.ENDED
            idle, self._idle = self._idle, []
            for stream in self._streams:
                stream.interrupt()
            self._changed.notify_all()
        for job in queued:
            self._end(job, [], "it was closed")
        for stream in idle:
            self._discard(stream)
        self._watch.close(STOP_S)
        for worker in self._workers:
            # A read's callback may close the peer.
            if worker is not threading.current_thread():
                worker.join(STOP_S + self._limits.handshake_s)
                if worker.is_alive():
                    log.error("peer=%s worker=%s did not end", self.address, worker.name)


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
