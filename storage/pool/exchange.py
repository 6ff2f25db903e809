"""One question to one life of a peer, and its answer.

Owns nothing. Knows bytes and epochs, not what is asked nor what a refusal leads to: link.py acts
on those. Invariants: an answer is given out only if its digest is right, it answers this question,
and whoever sent it was in the life that was asked; anything else is a refusal or raises.
"""

from __future__ import annotations

from typing import NamedTuple, TypeVar, cast

from tierkv.storage.errors import TierClosedError, TierIOError
from tierkv.storage.pool.messages import (
    AnyRequest,
    Refusal,
    Request,
    Status,
    read_answer,
    write_request,
)
from tierkv.storage.transport.base import Peer

_A = TypeVar("_A")


class Session(NamedTuple):
    """One life of a peer, and the connection to it. Leases and offsets belong to a session."""

    peer: Peer
    epoch: int
    """0 before the peer was met: only a HELLO may be asked then."""


def exchange(
    session: Session, request: Request[_A], own_epoch: int, timeout_s: float
) -> _A | Refusal:
    """Send a request and wait for its answer. TierIOError when no sound one came.

    An answer that was given in another life of the peer is none: STALE, with that epoch.
    """
    message = write_request(cast(AnyRequest, request), own_epoch, session.epoch)
    try:
        envelope, answer = read_answer(session.peer.message(message, timeout_s), request)
    except TierClosedError as error:
        raise TierIOError(str(error)) from error
    if isinstance(answer, Refusal):
        if answer.status is Status.DAMAGED:
            raise TierIOError(f"ask {session.peer.address}: the message arrived with flipped bits")
        return answer
    if session.epoch not in (0, envelope.sender_epoch):
        return Refusal(Status.STALE, envelope.sender_epoch)
    return answer


def refusal_text(refusal: Refusal) -> str:
    """What a refusal says, for people."""
    if refusal.status is Status.REFUSED:
        return f"it refused: {refusal.text}"
    if refusal.status is Status.FENCED:
        return f"it knows this node's name with epoch {refusal.epoch}"
    if refusal.status is Status.STALE:
        return f"it is at epoch {refusal.epoch} now" if refusal.epoch else "it was not greeted"
    return f"it answered {refusal.status.name}"
