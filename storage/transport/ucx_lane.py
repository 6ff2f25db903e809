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
from collections import deque
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
    pages: int
    result: UcxRequest
    raw_result: bytearray
    receives: deque[UcxRequest]
    """Those of the last pages. The others are there, and are let go of as they come."""
    outcomes: list[PageOutcome] | None = None
    """What the RESULT says, once it is there."""


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
        self._transfers: list[Transfer] = []
        self._ready = False
        self.worker = worker
        own = addresses.pack(worker.address())
        self._endpoint = worker.connect(addresses.build(offer.address))
        self._welcome_raw = bytearray(result_bytes(0))
        tag = tag_of(self._nonce, 0, 0)
        [self._welcome] = worker.receive(self._endpoint, [self._welcome_raw], tag)
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
        tag = tag_of(self._nonce, number, 0)
        requests = deque(self.worker.receive(self._endpoint, [raw, *views], tag))
        transfer = Transfer(number, len(ranges), requests.popleft(), raw, requests)
        self._transfers.append(transfer)
        return transfer

    def collect(self, transfer: Transfer) -> list[PageOutcome] | None:
        """Outcomes of a read all of whose messages are there; None while some are not.

        TierIOError when the peer does not keep to what was agreed: abort the lane.
        """
        # As they come, so that little is left to do when the last one has.
        outcomes = transfer.outcomes
        if outcomes is None:
            if not transfer.result.done:
                return None
            outcomes = transfer.outcomes = self._outcomes(transfer)
        receives = transfer.receives
        while receives and receives[0].done:
            page = transfer.pages - len(receives)
            if receives.popleft().failure() is not None and outcomes[page] is PageOutcome.OK:
                outcomes[page] = PageOutcome.FAILED
        if receives:
            return None
        self._transfers.remove(transfer)
        return outcomes

    def _outcomes(self, transfer: Transfer) -> list[PageOutcome]:
        self._check(transfer.result)
        raw = bytes(transfer.raw_result)
        outcomes = unpack_result(self._secret, raw, self.lane, transfer.number)
        if len(outcomes) != transfer.pages:
            raise TierIOError(f"ucx result: {len(outcomes)} outcomes for other pages")
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
        return self._welcome.done and all(
            transfer.result.done and all(receive.done for receive in transfer.receives)
            for transfer in self._transfers
        )
