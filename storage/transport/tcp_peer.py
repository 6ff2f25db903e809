"""The asking side of the tcp transport: one connected peer.

Owns the message connections to it. Reads are tcp_reads.py's, on connections of their own, so that
a lookup never waits behind pages. A message goes in the caller's thread. Invariants: a connection
carries one message at a time, and is dropped unless its answer came whole. Called by tcp.py.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Mapping, Sequence

from tierkv.storage.clock import Clock
from tierkv.storage.errors import TierClosedError, TierIOError
from tierkv.storage.transport.base import (
    PageRange,
    Peer,
    PeerIdentity,
    PeerRead,
    PeerStats,
    TransportLimits,
    check_read,
)
from tierkv.storage.transport.framing import receive_frame
from tierkv.storage.transport.stream import Stream
from tierkv.storage.transport.tcp_connections import Connections, Opener
from tierkv.storage.transport.tcp_reads import Reads
from tierkv.storage.transport.wire import Kind, answer_bounds, pack_frame, unpack_error


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
        self._limits = limits
        self._clock = clock
        self._requests = itertools.count(1)
        self._connections = Connections(identity, first, opener)
        self._reads = Reads(address, self._connections, self._requests, limits, clock)
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._idle: list[Stream] = [first]
        """Message connections that no message uses."""
        self._out = 0
        """Messages that use one, or are about to."""
        self._waiting = 0
        """Callers that wait for one."""
        self._closing = False
        self._messages = 0
        self._failures = 0
        self._answers = answer_bounds(limits)

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
        views = [view.cast("B") for view in into]
        return self._reads.begin(generation, ranges, views, timeout_s)

    # Messages

    def message(self, payload: bytes, timeout_s: float) -> bytes:
        if len(payload) > self._limits.message_bytes or not 0 < timeout_s <= self._limits.wait_s:
            raise ValueError(
                f"message to peer: expected at most {self._limits.message_bytes} bytes and "
                f"{self._limits.wait_s:g} s, got {len(payload)} and {timeout_s}"
            )
        deadline = self._clock.monotonic() + timeout_s
        stream = self._begin_message(deadline)
        whole = answered = False
        try:
            stream = self._connections.usable(stream, deadline)
            kind, body = self._exchange(stream, payload, deadline)
            whole = True
            answered = kind is Kind.ANSWER
        except TierIOError as error:
            raise TierIOError(f"message to peer {self.address}: {error}") from error
        finally:
            self._end_message(stream, whole, answered)
        if not answered:
            raise TierIOError(f"message to peer {self.address}: it refused: {unpack_error(body)}")
        return body

    def _begin_message(self, deadline: float) -> Stream | None:
        """Wait for one of the message connections; None: it is to be opened."""
        with self._lock:
            if self._out >= self._limits.message_connections and not self._closing:
                self._wait_turn(deadline)
            if self._closing:
                raise TierClosedError(f"message to peer {self.address}: it was closed")
            self._out += 1
            return self._idle.pop() if self._idle else None

    def _wait_turn(self, deadline: float) -> None:
        """Until fewer messages are out, or the end. Under the lock. TierIOError past `deadline`."""
        limit = self._limits.message_connections
        left_s = deadline - self._clock.monotonic()
        self._waiting += 1
        try:
            free = self._changed.wait_for(
                lambda: self._closing or self._out < limit, max(0.0, left_s)
            )
        finally:
            self._waiting -= 1
        if not free:
            self._failures += 1
            raise TierIOError(f"message to peer {self.address}: {limit} others did not end in time")

    def _end_message(self, stream: Stream | None, whole: bool, answered: bool) -> None:
        if not whole:
            # Before another message may open one in its place.
            self._connections.discard(stream)
            stream = None
        with self._lock:
            self._out -= 1
            if answered:
                self._messages += 1
            else:
                self._failures += 1
            if stream is not None and not self._closing:
                self._idle.append(stream)
                stream = None
            if self._waiting:
                self._changed.notify()
        self._connections.discard(stream)

    def _exchange(self, stream: Stream, payload: bytes, deadline: float) -> tuple[Kind, bytes]:
        request = next(self._requests)
        stream.send([pack_frame(Kind.MESSAGE, request, payload)], self._limits.io_s, deadline)
        frame = receive_frame(stream, self._answers, deadline)
        if frame is None:
            raise TierIOError("receive from peer: it closed the connection")
        header, body = frame
        if header.request == 0 and header.kind is Kind.ERROR:
            raise TierIOError(f"it refused: {unpack_error(body)}")
        if header.request != request:
            raise TierIOError(f"expected the answer of {request}, got {header.request}")
        return header.kind, body

    # The rest

    @property
    def closed(self) -> bool:
        """True once close() was called."""
        return self._closing

    def stats(self) -> PeerStats:
        reads = self._reads.counts()
        with self._lock:
            return PeerStats(
                connections=self._connections.count,
                open_reads=reads.open_reads,
                pages_ok=reads.pages_ok,
                pages_gone=reads.pages_gone,
                pages_failed=reads.pages_failed,
                bytes_read=reads.bytes_read,
                messages=self._messages,
                messages_failed=self._failures,
                rejected_reads=reads.rejected_reads,
                worker_restarts=reads.worker_restarts,
            )

    def check(self) -> None:
        self._reads.check()
        limits = self._limits
        with self._lock:
            assert 0 <= self._out <= limits.message_connections, self._out
            assert len(self._idle) + self._out <= limits.message_connections
            assert self._connections.has(self._idle), "an idle connection is closed"
        open_max = limits.read_connections + limits.message_connections
        assert self._connections.count <= open_max, self._connections.count

    def close(self) -> None:
        with self._lock:
            self._closing = True
            idle, self._idle = self._idle, []
            self._changed.notify_all()
        queued = self._reads.stop()
        self._connections.close()
        for stream in idle:
            self._connections.discard(stream)
        self._reads.finish(queued)
