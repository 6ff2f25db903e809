"""The serving side of the tcp transport: a listener and a thread a connection.

Owns the listening socket, the connections that peers opened, and the right to read the registered
memories. Invariants: nothing of them leaves before a peer has proved itself; a range is checked
against its memory before it is sliced; bytes go from the memory to the socket with no copy of
ours; after unregister() no thread reads that memory; no peer can end another's connection, nor
the listener. Called by tcp.py.
"""

from __future__ import annotations

import logging
import socket
import ssl
import threading
import traceback
from collections.abc import Callable

from tierkv.storage.clock import Clock
from tierkv.storage.errors import ConfigError, TierIOError, TierKVError
from tierkv.storage.transport.base import (
    Handler,
    PageRange,
    PeerIdentity,
    TransportLimits,
    TransportStats,
)
from tierkv.storage.transport.framing import receive_frame
from tierkv.storage.transport.handshake import Credentials, greet_client, refuse
from tierkv.storage.transport.stream import Stream, wrap
from tierkv.storage.transport.tcp_refusals import RefusalLog
from tierkv.storage.transport.wire import (
    Header,
    Kind,
    pack_error,
    pack_frame,
    pack_header,
    request_bounds,
    unpack_read,
)

BACKLOG = 64
ACCEPT_PAUSE_S = 0.1
"""After accept() failed for want of descriptors: at once again would be a busy loop."""
BATCH_BYTES = 4 << 20
"""Pages whose bytes are handed to one send()."""
STOP_S = 5.0
ROOM_S = 0.5
"""For a stranger whose place is wanted to leave it. It does so at once."""

log = logging.getLogger(__name__)


class Exports:
    """The memories that peers may read, and who is reading which. Thread-safe."""

    def __init__(self, limits: TransportLimits) -> None:
        self._limits = limits
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._memories: dict[int, memoryview] = {}
        self._last = 0
        """The newest generation."""
        self._reading: dict[Stream, int] = {}

    def register(self, memory: memoryview) -> int:
        """See Transport.register()."""
        if not memory.c_contiguous or not memory.nbytes:
            raise ConfigError(
                f"register memory: expected a contiguous run of bytes, got {memory.nbytes} bytes, "
                f"contiguous={memory.c_contiguous}"
            )
        with self._lock:
            if len(self._memories) >= self._limits.memories:
                raise ConfigError(
                    f"register memory: {len(self._memories)} are registered, no more are taken; "
                    "unregister one first"
                )
            self._last += 1
            self._memories[self._last] = memory.toreadonly().cast("B")
            return self._last

    def unregister(self, generation: int) -> None:
        """See Transport.unregister()."""
        with self._lock:
            self._memories.pop(generation, None)
            for stream, wanted in self._reading.items():
                if wanted == generation:
                    stream.interrupt()
            limit_s = self._limits.io_s
            if not self._changed.wait_for(
                lambda: generation not in self._reading.values(), limit_s
            ):
                raise TierIOError(
                    f"unregister memory {generation}: copies of it did not end in {limit_s:g} s"
                )

    def close(self) -> None:
        """Unregister all. TierIOError as there, when all have been tried."""
        with self._lock:
            generations = set(self._memories) | set(self._reading.values())
        stuck: list[TierIOError] = []
        for generation in generations:
            try:
                self.unregister(generation)
            except TierIOError as error:
                stuck.append(error)
        if stuck:
            raise stuck[0]

    def begin(self, stream: Stream, generation: int) -> memoryview | None:
        """A view of the memory, to be released before end(); None when it is not registered."""
        with self._lock:
            memory = self._memories.get(generation)
            if memory is None:
                return None
            assert stream not in self._reading, "one read a connection"
            self._reading[stream] = generation
            return memory[:]

    def end(self, stream: Stream) -> None:
        """This connection reads no more of it."""
        with self._lock:
            self._reading.pop(stream, None)
            self._changed.notify_all()

    @property
    def reading(self) -> int:
        """Connections that read a memory now."""
        return len(self._reading)

    def check(self) -> None:
        """Assert that generations are what was given out, within the bound. O(memories)."""
        with self._lock:
            assert len(self._memories) <= self._limits.memories, len(self._memories)
            assert all(1 <= generation <= self._last for generation in self._memories)


class Server:
    """Accepts peers and answers them until close()."""

    def __init__(
        self,
        credentials: Credentials,
        boot_token: bytes,
        exports: Exports,
        limits: TransportLimits,
        clock: Clock,
        tls: ssl.SSLContext | None,
    ) -> None:
        self._credentials = credentials
        self._boot_token = boot_token
        self._exports = exports
        self._limits = limits
        self._clock = clock
        self._tls = tls
        self._bounds = request_bounds(limits)
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._closing = threading.Event()
        self._listener: socket.socket | None = None
        self._acceptor: threading.Thread | None = None
        self._connections: dict[threading.Thread, Stream | None] = {}
        self._strangers: dict[threading.Thread, None] = {}
        """Connections that have proved nothing yet, the oldest first."""
        self._refusals = RefusalLog(clock)
        self._counts = dict.fromkeys(
            ("pages", "bytes", "messages", "gone", "refused", "broken", "restarts"), 0
        )

    def start(self, listener: socket.socket, handler: Handler) -> None:
        """Serve on a listening socket, which is this object's from now on. RuntimeError, and it is
        not, when the system gives no thread."""
        assert self._listener is None, "a server listens once"
        acceptor = threading.Thread(
            target=self._supervise,
            args=(lambda: self._accept(listener, handler),),
            name="tierkv-transport-accept",
            daemon=True,
        )
        acceptor.start()
        self._listener, self._acceptor = listener, acceptor

    def stats(self) -> TransportStats:
        """Counters. O(1)."""
        with self._lock:
            counts = self._counts
            return TransportStats(
                connections=len(self._connections),
                served_pages=counts["pages"],
                served_bytes=counts["bytes"],
                served_messages=counts["messages"],
                gone_pages=counts["gone"],
                refused_connections=counts["refused"],
                broken_connections=counts["broken"],
                thread_restarts=counts["restarts"],
            )

    def check(self) -> None:
        """Assert that nobody reads who is not connected, and that the bound holds. O(1)."""
        with self._lock:
            connections = len(self._connections)
            assert connections <= self._limits.peer_connections, connections
            assert self._exports.reading <= connections, (self._exports.reading, connections)
            assert self._strangers.keys() <= self._connections.keys(), "who left has no place"
        self._refusals.check()

    def close(self) -> None:
        """Stop accepting, end every connection. Idempotent; TierIOError if a handler hangs."""
        self._closing.set()
        if self._listener is not None:
            try:
                # Wakes the thread in accept(); closing the descriptor alone would not.
                self._listener.shutdown(socket.SHUT_RDWR)
            except OSError as error:
                log.debug("listener=shut reason=%s", error)
            self._listener.close()
        with self._lock:
            for stream in self._connections.values():
                if stream is not None:
                    stream.interrupt()
            # A handler may be at work.
            limit_s = STOP_S + self._limits.handshake_s
            ended = self._changed.wait_for(lambda: not self._connections, limit_s)
            left = len(self._connections)
        if self._acceptor is not None and self._acceptor is not threading.current_thread():
            self._acceptor.join(STOP_S)
        if not ended:
            raise TierIOError(f"close transport: {left} connections did not end in {limit_s:g} s")

    def _count(self, name: str, by: int = 1) -> None:
        with self._lock:
            self._counts[name] += by

    def _supervise(self, work: Callable[[], None]) -> None:
        while not self._closing.is_set():
            try:
                work()
            except Exception as error:  # noqa: BLE001
                # Whatever one connection's beginning raises, the listener serves on (lesson H2).
                log.error("transport: %s", "".join(traceback.format_exception(error)))
                self._count("restarts")
                self._closing.wait(ACCEPT_PAUSE_S)

    def _accept(self, listener: socket.socket, handler: Handler) -> None:
        """Take connections until the listener is closed."""
        while not self._closing.is_set():
            try:
                sock, address = listener.accept()
            except OSError as error:
                if not self._closing.is_set():
                    self._refusals.note("anybody:", f"accept failed: {error}")
                    self._closing.wait(ACCEPT_PAUSE_S)
                continue
            name = f"{address[0]}:{address[1]}"
            thread = threading.Thread(
                target=self._run,
                args=(sock, name, handler),
                name=f"tierkv-transport-{name}",
                daemon=True,
            )
            with self._lock:
                self._make_room()
                full = len(self._connections) >= self._limits.peer_connections
                if not full and not self._closing.is_set():
                    self._connections[thread] = self._strangers[thread] = None
            if full or self._closing.is_set():
                self._turn_away(sock, name)
                self._forget(thread)
                continue
            try:
                thread.start()
            except RuntimeError:
                # The system gives no more threads: this peer is not served, others are.
                self._forget(thread)
                self._turn_away(sock, name)

    def _make_room(self) -> None:
        """Where all places are taken, have the stranger leave that has been greeted for longest:
        who has the key needs milliseconds. Under the lock; waits ROOM_S at most."""
        limit = self._limits.peer_connections
        if len(self._connections) < limit:
            return
        for thread in self._strangers:
            stream = self._connections[thread]
            if stream is not None:
                stream.interrupt()
                self._changed.wait_for(lambda: len(self._connections) < limit, ROOM_S)
                return

    def _turn_away(self, sock: socket.socket, name: str) -> None:
        """Close a connection that there is no room for. Never waits for the peer."""
        self._refused(name, "too many connections")
        sock.close()

    def _refused(self, name: str, reason: object) -> None:
        self._count("refused")
        self._refusals.note(name, reason)

    def _forget(self, thread: threading.Thread) -> None:
        with self._lock:
            self._connections.pop(thread, None)
            self._strangers.pop(thread, None)
            self._changed.notify_all()

    def _run(self, sock: socket.socket, name: str, handler: Handler) -> None:
        """Life of one connection's thread."""
        thread = threading.current_thread()
        stream: Stream | None = None
        try:
            stream = self._open(sock, thread, name)
            if stream is not None:
                self._greet_and_serve(stream, thread, name, handler)
        except Exception as error:  # noqa: BLE001
            # A bug while serving one peer costs that connection and is counted (lesson H2).
            log.error("peer=%s %s", name, "".join(traceback.format_exception(error)))
            self._count("restarts")
        finally:
            # Forgotten first, so that nobody interrupts a descriptor that has another owner.
            self._forget(thread)
            sock.close()
            if stream is not None:
                stream.close()

    def _open(self, sock: socket.socket, thread: threading.Thread, name: str) -> Stream | None:
        try:
            stream = wrap(sock, self._clock, self._tls, server_side=True, hostname=None)
        except TierIOError as error:
            self._refused(name, error)
            return None
        with self._lock:
            if self._closing.is_set():
                stream.interrupt()
            self._connections[thread] = stream
        return stream

    def _greet_and_serve(
        self, stream: Stream, thread: threading.Thread, name: str, handler: Handler
    ) -> None:
        deadline = self._clock.monotonic() + self._limits.handshake_s
        try:
            stream.shake_hands(deadline)
            peer = greet_client(stream, self._credentials, self._boot_token, deadline)
        except TierIOError as error:
            self._refused(name, error)
            return
        with self._lock:
            self._strangers.pop(thread, None)
        log.debug("peer=%s connected", name)
        try:
            while self._serve_one(stream, peer, handler):
                pass
        except TierIOError as error:
            if not self._closing.is_set():
                self._count("broken")
                log.info("peer=%s broken=%s", name, error)

    def _serve_one(self, stream: Stream, peer: PeerIdentity, handler: Handler) -> bool:
        """One request. False when the peer has closed, or asked nothing for idle_s."""
        if not stream.wait_readable(self._limits.idle_s):
            return False
        deadline = self._clock.monotonic() + self._limits.io_s
        try:
            frame = receive_frame(stream, self._bounds, deadline, ready=True)
            if frame is None:
                return False
            header, body = frame
            read = unpack_read(body) if header.kind is Kind.READ else None
        except TierIOError as error:
            # Only here, between two answers: in the middle of a page it would be taken for bytes.
            refuse(stream, str(error))
            raise
        if read is not None:
            self._serve_read(stream, header, *read)
        else:
            self._serve_message(stream, header, body, peer, handler)
        return True

    def _serve_read(
        self, stream: Stream, header: Header, generation: int, ranges: list[PageRange]
    ) -> None:
        memory = self._exports.begin(stream, generation)
        if memory is None:
            self._count("gone", len(ranges))
            gone = pack_header(Kind.GONE, 0, header.request)
            stream.send([gone * len(ranges)], self._limits.io_s)
            return
        broken: str | None = None
        try:
            with memory:
                problem = _outside(ranges, memory.nbytes, self._limits)
                if problem is None:
                    self._send_pages(stream, header.request, ranges, memory)
        except TierIOError as error:
            # Not kept: its frames hold views of memory that is its owner's again after end().
            broken = str(error)
        finally:
            self._exports.end(stream)
        if broken is not None:
            raise TierIOError(broken)
        if problem is not None:
            # The peer counts wrongly or is hostile: this connection is not trusted any more.
            stream.send([pack_error(header.request, f"read: {problem}")], STOP_S)
            raise TierIOError(f"serve read: {problem}")

    def _send_pages(
        self, stream: Stream, request: int, ranges: list[PageRange], memory: memoryview
    ) -> None:
        batch: list[bytes | bytearray | memoryview] = []
        size, first = 0, 0
        for index, (offset, length) in enumerate(ranges):
            batch.append(pack_header(Kind.PAGE, length, request))
            batch.append(memory[offset : offset + length])
            size += length
            if size >= BATCH_BYTES or index + 1 == len(ranges):
                stream.send(batch, self._limits.io_s)
                with self._lock:
                    self._counts["pages"] += index + 1 - first
                    self._counts["bytes"] += size
                batch, size, first = [], 0, index + 1

    def _serve_message(
        self, stream: Stream, header: Header, body: bytes, peer: PeerIdentity, handler: Handler
    ) -> None:
        try:
            answer = handler(peer, body)
        except TierKVError as error:
            stream.send([pack_error(header.request, str(error))], self._limits.io_s)
            return
        if len(answer) > self._limits.message_bytes:
            text = f"answer of {len(answer)} bytes, at most {self._limits.message_bytes}"
            stream.send([pack_error(header.request, text)], self._limits.io_s)
            return
        self._count("messages")
        stream.send([pack_frame(Kind.ANSWER, header.request, answer)], self._limits.io_s)


def _outside(ranges: list[PageRange], total_bytes: int, limits: TransportLimits) -> str | None:
    """The first range that may not be read; None when all may."""
    for offset, length in ranges:
        if not 1 <= length <= limits.page_bytes or offset + length > total_bytes:
            return f"{length} bytes at {offset} are outside a memory of {total_bytes} bytes"
    return None
