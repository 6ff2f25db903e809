"""One live connection inside an event loop: requests out, answers matched by id.

Owns the transport and the futures of what is in flight. The loop's counterpart of link.py; all of
it runs on the loop's thread. Called by client.async_client.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from tierkv.client.errors import DaemonAwayError, RefusedError
from tierkv.client.handshake import Session
from tierkv.protocol.errors import ProtocolError
from tierkv.protocol.frames import Frame, encode_request
from tierkv.protocol.messages import Verb

Reply = asyncio.Future[dict[str, Any]]


class AsyncLink(asyncio.Protocol):
    """See the module. `on_lost` is called once."""

    def __init__(self, session: Session, on_lost: Callable[[], None]) -> None:
        self.session = session
        self.limits = session.limits
        self.leases: set[int] = set()
        self._on_lost = on_lost
        self._lost: str | None = None
        self._replies: dict[int, Reply | None] = {}
        self._next_id = 1
        self._room = asyncio.Semaphore(session.limits.in_flight // 2)
        """Half of what the daemon allows: the other half is for answers that nobody waits for."""
        self._transport: asyncio.Transport | None = None
        self._late: dict[int, Callable[[dict[str, Any]], None]] = {}

    @property
    def lost(self) -> str | None:
        """Why the connection is no more; None while it is."""
        return self._lost

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        try:
            for frame in self.session.reader.feed(data):
                self._deliver(frame)
        except ProtocolError as error:
            self.fail(str(error))

    def connection_lost(self, error: Exception | None) -> None:
        self.fail("the daemon closed the connection" if error is None else str(error))

    async def ask(
        self,
        verb: Verb,
        fields: Mapping[str, object],
        timeout_s: float,
        on_late: Callable[[dict[str, Any]], None] | None = None,
    ) -> dict[str, Any]:
        """The fields of one answer. Raises DaemonAwayError or RefusedError.

        `on_late` gets an answer that comes after the time was up, or after the caller was
        cancelled: what it grants must be given back.
        """
        try:
            async with asyncio.timeout(timeout_s), self._room:
                request_id, reply = self._send(verb, fields)
                try:
                    return await reply
                finally:
                    if not reply.done() or reply.cancelled():
                        self._abandon(request_id, on_late)
        except TimeoutError:
            raise DaemonAwayError(f"{verb}: no answer within {timeout_s:.1f} s") from None

    def post(self, verb: Verb, fields: Mapping[str, object]) -> None:
        """Send one request whose answer does not matter."""
        if self._lost is None:
            request_id, _ = self._send(verb, fields)
            self._abandon(request_id, None)

    def fail(self, reason: str) -> None:
        """The connection is over: everything in flight ends with an error. Idempotent."""
        if self._lost is not None:
            return
        self._lost = reason
        replies, self._replies = self._replies, {}
        self._late.clear()
        for reply in replies.values():
            if reply is not None and not reply.done():
                reply.set_exception(DaemonAwayError(f"daemon: {reason}"))
        if self._transport is not None:
            self._transport.abort()
        self._on_lost()

    def check(self) -> None:
        """Assert the invariants. O(requests in flight)."""
        assert self._lost is None or not self._replies
        assert self._late.keys() <= self._replies.keys()

    def _send(self, verb: Verb, fields: Mapping[str, object]) -> tuple[int, Reply]:
        if self._lost is not None or self._transport is None:
            raise DaemonAwayError(f"{verb}: {self._lost or 'not connected'}")
        reply: Reply = asyncio.get_running_loop().create_future()
        request_id = self._next_id
        self._next_id += 1
        self._replies[request_id] = reply
        self._transport.write(encode_request(request_id, verb, fields))
        return request_id, reply

    def _abandon(self, request_id: int, on_late: Callable[[dict[str, Any]], None] | None) -> None:
        if request_id in self._replies:
            self._replies[request_id] = None
            if on_late is not None:
                self._late[request_id] = on_late

    def _deliver(self, frame: Frame) -> None:
        if frame.request_id not in self._replies:
            if self._lost is None:
                self.fail(f"answer to unknown request {frame.request_id}")
            return
        reply = self._replies.pop(frame.request_id)
        late = self._late.pop(frame.request_id, None)
        if reply is None or reply.done():
            if late is not None and not frame.name:
                late(frame.fields)
        elif frame.name:
            message = str(frame.fields.get("message", ""))[:300]
            code = frame.name[:64]
            reply.set_exception(RefusedError(code, f"daemon: {message} ({code})"))
        else:
            reply.set_result(frame.fields)
