"""One connection of a reader to a peer over UCX.

Owns the endpoint, and what was posted there; the worker is the peer's, and outlives it. Knows no
deadlines and no retries: the peer's thread in ucx_peer.py, the only caller, does. A single receive
cannot be taken back in ucxx, so a read that must end early ends the whole lane: abort(), then
progress until settled.
Invariants: a destination is written to only inside progress(), and never after settled was True;
what was posted is kept alive until then; every tag of a lane is used once.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from tierkv.storage.errors import TierIOError
from tierkv.storage.transport.base import PageOutcome, PageRange
from tierkv.storage.transport.ucx_address import Addresses
from tierkv.storage.transport.ucx_library import TAG_CONTROL, TAGS, UcxRequest, UcxWorker
from tierkv.storage.transport.ucx_wire import (
    LANE_BYTES,
    SLOT_BITS,
    Hello,
    Offer,
    ReadRequest,
    pack_hello,
    pack_read,
    result_bytes,
    unpack_result,
)


def tag_of(nonce: int, number: int, slot: int) -> int:
    """Tag of message `slot` of read `number`; see ucx_wire.py."""
    return (nonce + (number << SLOT_BITS) + slot) % TAGS


@dataclass(slots=True, eq=False)
class Transfer:
    """A read that was posted."""

    number: int
    receives: list[UcxRequest]
    result: UcxRequest
    raw_result: bytearray


class Lane:
    """Opened by its constructor; usable once ready."""

    def __init__(
        self, worker: UcxWorker, addresses: Addresses, offer: Offer, replaces: bytes
    ) -> None:
        """Greets the peer. TierIOError when that cannot even be begun."""
        self._secret = offer.secret
        self.lane = secrets.token_bytes(LANE_BYTES)
        """What the peer knows it by."""
        self._nonce = secrets.randbelow(TAGS)
        self._number = 0
        self._sends: list[tuple[UcxRequest, bytearray]] = []
        self._posted: list[UcxRequest] = []
        self._ready = False
        self.worker = worker
        own = addresses.pack(worker.address())
        self._endpoint = worker.connect(addresses.build(offer.address))
        self._welcome_raw = bytearray(result_bytes(0))
        [self._welcome] = self._receive([self._welcome_raw], 0)
        hello = pack_hello(self._secret, Hello(self.lane, replaces, self._nonce, own))
        self._send(bytearray(hello))

    def _send(self, message: bytearray) -> None:
        [request] = self.worker.send(self._endpoint, [message], TAG_CONTROL)
        self._sends = [entry for entry in self._sends if not entry[0].done]
        self._sends.append((request, message))

    @property
    def alive(self) -> bool:
        """False once UCX knows that the peer is gone."""
        return self._endpoint.alive

    def poll_ready(self) -> bool:
        """Whether the peer has answered the greeting. TierIOError when its answer is none."""
        if not self._ready and self._welcome.done:
            self._check(self._welcome)
            unpack_result(self._secret, bytes(self._welcome_raw), self.lane, 0)
            self._ready = True
        return self._ready

    def post(
        self,
        generation: int,
        ranges: Sequence[PageRange],
        views: Sequence[memoryview],
        timeout_s: float,
    ) -> Transfer:
        """Ask for pages; each is received straight into its view. TierIOError: abort the lane."""
        self._number += 1
        number = self._number
        request = ReadRequest(self.lane, number, generation, timeout_s, ranges)
        # Asked first, received next: nothing arrives before the next progress(), so that no page
        # ever waits in memory of UCX's own, and the peer works meanwhile.
        self._send(pack_read(self._secret, request))
        if not self._endpoint.alive:
            # Sending may find out. What is received on a dead endpoint is never ended by UCX.
            raise TierIOError("connection lost")
        raw = bytearray(result_bytes(len(ranges)))
        result, *receives = self._receive([raw, *views], number)
        return Transfer(number, receives, result, raw)

    def _receive(self, into: Sequence[bytearray | memoryview], number: int) -> Sequence[UcxRequest]:
        requests = self.worker.receive(self._endpoint, into, tag_of(self._nonce, number, 0))
        self._posted.extend(requests)
        return requests

    def collect(self, transfer: Transfer) -> list[PageOutcome] | None:
        """Outcomes of a read all of whose messages are there; None while some are not.

        TierIOError when the peer does not keep to what was agreed: abort the lane.
        """
        receives = transfer.receives
        # Pages come in about the order they were asked for, so the last one is the one to ask.
        if not (receives[-1].done and transfer.result.done and all(r.done for r in receives)):
            return None
        self._check(transfer.result)
        outcomes = unpack_result(
            self._secret, bytes(transfer.raw_result), self.lane, transfer.number
        )
        if len(outcomes) != len(receives):
            raise TierIOError(f"ucx result: {len(outcomes)} outcomes for other pages")
        for at, receive in enumerate(receives):
            if outcomes[at] is PageOutcome.OK and receive.failure() is not None:
                outcomes[at] = PageOutcome.FAILED
        finished = {id(request) for request in (*receives, transfer.result)}
        self._posted = [request for request in self._posted if id(request) not in finished]
        return outcomes

    def _check(self, request: UcxRequest) -> None:
        failure = request.failure()
        if failure is not None:
            raise TierIOError(failure)

    def abort(self) -> None:
        """Break off everything. Then progress() until settled."""
        self._endpoint.abort()

    @property
    def settled(self) -> bool:
        """After abort(): nothing that was posted is written to any more."""
        return all(request.done for request in self._posted)
