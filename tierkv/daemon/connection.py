"""One connection: bytes to requests, requests to answers, in both directions with a bound.

Owns the socket's transport, the frames under way and the session. Does not know what verbs do.
Whatever goes wrong in one request ends in its answer; the connection ends only where going on
would be unsafe: a broken frame, another protocol version, a peer that may not be here. Called by
the event loop.

Invariants: at most `in_flight` requests of the client wait for an answer, and reading stops while
more came or the client does not read; answers made in one turn leave in one write.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Coroutine, Iterator
from typing import Any, cast

from tierkv.daemon.greeting import answer_fields, arena_fd, greet
from tierkv.daemon.peers import Peer
from tierkv.daemon.service import Service
from tierkv.daemon.session import Session
from tierkv.daemon.verbs import HANDLERS, WHILE_CLOSING
from tierkv.protocol.errors import FrameError, ProtocolError
from tierkv.protocol.frames import (
    Frame,
    FrameReader,
    encode_answer,
    encode_error,
    request_bounds,
)
from tierkv.protocol.messages import Mode, Verb, WireCode
from tierkv.protocol.requests import Hello, Request, parse_request
from tierkv.storage.errors import TierKVError

HELLO_S = 10.0
"""A connection that has not greeted by then is closed."""
WRITE_HIGH_BYTES = 1 << 20
"""Answers that the client has not read yet, past which nothing of it is served."""
CLIENTS_REFUSED_MAX = 64
"""Connections past clients_max that are told so; further ones are just closed."""

_FATAL = frozenset((WireCode.FRAME, WireCode.VERSION, WireCode.PEER))

log = logging.getLogger(__name__)


class Connection(asyncio.Protocol):
    """See the module docstring."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._loop = service.loop
        self._limits = service.config.limits
        self._reader = FrameReader(request_bounds(self._limits))
        self._frames: Iterator[Frame] = iter(())
        self._out: list[bytes] = []
        self._flush_due = False
        self._in_flight = 0
        self._writing_paused = False
        self._reading_paused = False
        self._greeting = False
        self._closed = False
        self._refusal: ProtocolError | None = None
        self._session: Session | None = None
        self._transport: asyncio.Transport
        self._peer: Peer
        self._hello_timer: asyncio.TimerHandle | None = None

    # --- the loop's calls -----------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        service = self._service
        service.connected += 1
        service.counts.connections += 1
        try:
            with self._socket() as connected:
                self._peer = Peer.of(connected)
        except OSError as error:
            log.warning("accept: error=%s", error)
            self._peer = Peer(0, -1, -1)
            self._transport.abort()
            return
        self._refusal = self._refuse_peer()
        if self._refusal is not None:
            service.counts.refused_connections += 1
            log.warning("refused pid=%d uid=%d: %s", self._peer.pid, self._peer.uid, self._refusal)
            if service.connected > service.config.clients_max + CLIENTS_REFUSED_MAX:
                self._transport.abort()
                return
        self._transport.set_write_buffer_limits(high=WRITE_HIGH_BYTES)
        self._hello_timer = self._loop.call_later(HELLO_S, self._no_hello)
        service.connections.add(self)

    def data_received(self, data: bytes) -> None:
        try:
            self._frames = self._reader.feed(data)
        except FrameError:
            return  # It was answered; what comes after it is not read.
        self._pump()

    def pause_writing(self) -> None:
        self._writing_paused = True

    def resume_writing(self) -> None:
        self._writing_paused = False
        self._go_on()

    def connection_lost(self, error: Exception | None) -> None:
        self._closed = True
        self._service.connected -= 1
        self._service.connections.discard(self)
        if self._hello_timer is not None:
            self._hello_timer.cancel()
        if self._session is not None:
            self._service.sessions.pop(self._session.number, None)
            self._session.close()
        self._service.quarantine.leave(self._peer)

    def close(self) -> None:
        """End the connection after what was answered has been sent."""
        self._flush()
        self._transport.close()

    def abort(self) -> None:
        """End the connection now."""
        self._transport.abort()

    # --- requests -------------------------------------------------------------------------

    @property
    def _blocked(self) -> bool:
        return self._in_flight >= self._limits.in_flight or self._writing_paused or self._greeting

    def _pump(self) -> None:
        """Serve the frames that are there, until there are none or the client must wait."""
        try:
            while not self._closed and not self._blocked:
                frame = next(self._frames, None)
                if frame is None:
                    break
                self._serve(frame)
        except FrameError as error:
            self._end_with(0, error)
        self._flush()
        if self._blocked and not self._reading_paused and not self._closed:
            self._reading_paused = True
            self._transport.pause_reading()

    def _go_on(self) -> None:
        """Serve what had to wait, and read again."""
        if self._closed or self._blocked:
            return
        try:
            self._frames = self._reader.feed(b"")
        except FrameError:
            return
        if self._reading_paused:
            self._reading_paused = False
            self._transport.resume_reading()
        self._pump()

    def _serve(self, frame: Frame) -> None:
        started = self._service.clock.monotonic()
        try:
            if self._refusal is not None:
                raise self._refusal
            request = parse_request(frame, self._limits)
            result = self._start(request)
        except Exception as error:  # noqa: BLE001 - the supervisor: see _failed
            self._failed(frame, started, error)
            return
        if isinstance(result, (dict, bytes)):
            self._answer(frame, started, result)
            return
        self._in_flight += 1
        task = self._loop.create_task(self._finish(frame, started, result))
        self._service.tasks.add(task)
        task.add_done_callback(self._service.tasks.discard)

    def _start(self, request: Request) -> dict[str, Any] | bytes | Coroutine[Any, Any, Any]:
        if self._service.closing and request.verb not in WHILE_CLOSING:
            raise ProtocolError(WireCode.CLOSING, f"{request.verb}: the daemon is stopping")
        if isinstance(request.body, Hello):
            if self._session is not None:
                raise ProtocolError(WireCode.ORDER, "hello: it came twice; open a new connection")
            self._greeting = True
            return self._greet(request.request_id, request.body)
        if self._session is None:
            raise ProtocolError(WireCode.ORDER, f"{request.verb}: the first request must be hello")
        return HANDLERS[request.verb](self._service, self._session, request)

    async def _finish(
        self, frame: Frame, started: float, work: Coroutine[Any, Any, dict[str, Any] | bytes]
    ) -> None:
        try:
            result = await work
        except Exception as error:  # noqa: BLE001 - the supervisor: see _failed
            self._failed(frame, started, error)
        else:
            self._answer(frame, started, result)
        self._in_flight -= 1
        self._flush_soon()

    def _failed(self, frame: Frame, started: float, error: Exception) -> None:
        """The one place where any exception of a request ends: it becomes that request's answer.

        What was not raised on purpose is a bug: counted and logged with its traceback, and neither
        this client nor another loses its connection for it (lesson H2).
        """
        if isinstance(error, TierKVError):
            code, message = str(error.code), str(error)
        else:
            self._service.counts.internal_errors += 1
            log.error("verb=%s: a bug", frame.name[:32], exc_info=error)
            code, message = WireCode.INTERNAL.value, f"{frame.name[:32]}: a bug of the daemon"
        self._count(frame, code, started)
        self._out.append(encode_error(frame.request_id, code, message))
        if (code in _FATAL or self._refusal is not None) and not self._closed:
            self.close()
            self._closed = True

    def _answer(self, frame: Frame, started: float, result: dict[str, Any] | bytes) -> None:
        self._count(frame, "", started)
        if not isinstance(result, bytes):
            result = encode_answer(frame.request_id, result)
        if result:
            self._out.append(result)

    def _count(self, frame: Frame, code: str, started: float) -> None:
        counts = self._service.counts
        # A client chooses the name: only known ones may make an entry.
        verb = frame.name if frame.name in _VERBS else "other"
        counts.answered[verb, code] += 1
        counts.seconds[verb] += self._service.clock.monotonic() - started

    def _flush_soon(self) -> None:
        if not self._flush_due:
            self._flush_due = True
            self._loop.call_soon(self._flush_and_go_on)

    def _flush_and_go_on(self) -> None:
        self._flush_due = False
        self._flush()
        self._go_on()

    def _flush(self) -> None:
        if self._out and not self._transport.is_closing():
            out, self._out = self._out, []
            self._transport.write(b"".join(out) if len(out) > 1 else out[0])

    def _end_with(self, request_id: int, error: ProtocolError) -> None:
        self._service.counts.answered["other", str(error.code)] += 1
        self._out.append(encode_error(request_id, str(error.code), str(error)))
        self.close()
        self._closed = True

    # --- hello ----------------------------------------------------------------------------

    async def _greet(self, request_id: int, hello: Hello) -> bytes:
        try:
            session = await greet(self._service, self._peer, hello)
            if self._transport.is_closing():
                return b""
            self._session = session
            self._service.sessions[session.number] = session
        finally:
            self._greeting = False
        if self._hello_timer is not None:
            self._hello_timer.cancel()
        if session.mode is Mode.STREAM and session.page_class is not None:
            bounds = request_bounds(self._limits)
            self._reader.bounds = bounds.with_payload(session.page_class.page_bytes)
        encoded = encode_answer(request_id, answer_fields(self._service, session))
        descriptor = arena_fd(session)
        return encoded if descriptor is None else self._send_with(encoded, descriptor)

    def _send_with(self, encoded: bytes, descriptor: int) -> bytes:
        """Send the answer's first bytes with the descriptor; returns the bytes left to send."""
        self._flush()
        assert self._transport.get_write_buffer_size() == 0, "nothing is sent before hello"
        with self._socket() as connected:
            sent = socket.send_fds(connected, [encoded], [descriptor])
        return encoded[sent:]

    def _socket(self) -> socket.socket:
        """A socket object of our own over the transport's: the transport's may be a stand-in."""
        return socket.socket(fileno=os.dup(self._transport.get_extra_info("socket").fileno()))

    def _refuse_peer(self) -> ProtocolError | None:
        config = self._service.config
        if self._peer.uid not in config.allowed_uids:
            return ProtocolError(
                WireCode.PEER, f"hello: uid {self._peer.uid} may not use this daemon"
            )
        if self._service.connected > config.clients_max:
            return ProtocolError(
                WireCode.LIMIT,
                f"hello: {config.clients_max} clients are connected already; try again later",
            )
        return None

    def _no_hello(self) -> None:
        if self._session is None and not self._greeting:
            self._end_with(0, ProtocolError(WireCode.ORDER, "no hello came in time"))


_VERBS = frozenset(verb.value for verb in Verb)
