"""What members of a pool say to each other, as values and as bytes: docs/formats/pool.md.

Owns whole messages: an envelope around the body of one verb, and refusals. The verbs themselves
are index_verbs.py's and page_verbs.py's, and are found here too. Does not know what a node does
about them: serving.py answers, link.py, puller.py and pusher.py ask. No I/O, no state.

Asking:      bytes out = write_request(request, own epoch, peer's epoch)
             envelope, answer = read_answer(bytes in, request)      # a Refusal, or what it promises
Answering:   read_request(bytes in); write_answer(verb, answer, own epoch, peer's epoch)
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import ClassVar, Protocol, Self, TypeVar

from tierkv.storage.errors import TierIOError
from tierkv.storage.pool.envelope import (
    U64_MAX,
    BodyReader,
    Envelope,
    Status,
    Verb,
    bounded,
    pack,
    unpack,
)
from tierkv.storage.pool.index_verbs import (
    ADDRESS_BYTES_MAX,
    FINGERPRINTS_MAX,
    LOOKUP_KEYS_MAX,
    NAME_BYTES_MAX,
    PAGE_SIZES_MAX,
    Changes,
    Hello,
    Lookup,
    LookupAnswer,
    Since,
    SnapshotAsk,
    SnapshotPart,
    Sync,
    SyncAnswer,
)
from tierkv.storage.pool.page_verbs import (
    OFFSET_MAX,
    PAGES_MAX,
    WAIT_MS_MAX,
    LeaseAsk,
    LeasedPage,
    LeaseGrant,
    OfferedPage,
    ReleaseAsk,
    Released,
    StoreAnswer,
    StoreAsk,
    StoreOutcome,
)

__all__ = [
    "ADDRESS_BYTES_MAX",
    "Answer",
    "AnyRequest",
    "Changes",
    "Envelope",
    "FINGERPRINTS_MAX",
    "Hello",
    "LOOKUP_KEYS_MAX",
    "LeaseAsk",
    "LeaseGrant",
    "LeasedPage",
    "Lookup",
    "LookupAnswer",
    "NAME_BYTES_MAX",
    "OFFSET_MAX",
    "OfferedPage",
    "PAGES_MAX",
    "PAGE_SIZES_MAX",
    "Refusal",
    "ReleaseAsk",
    "Released",
    "Request",
    "Since",
    "SnapshotAsk",
    "SnapshotPart",
    "Status",
    "StoreAnswer",
    "StoreAsk",
    "StoreOutcome",
    "Sync",
    "SyncAnswer",
    "Verb",
    "WAIT_MS_MAX",
    "read_answer",
    "read_request",
    "write_answer",
    "write_request",
]

TEXT_BYTES_MAX = 512

_COUNT = struct.Struct("<I")
_U64 = struct.Struct("<Q")

AnswerT = TypeVar("AnswerT", covariant=True)


class Request(Protocol[AnswerT]):
    """What can be asked."""

    verb: ClassVar[Verb]

    def encode(self) -> bytes:
        """The body."""
        ...

    @classmethod
    def decode(cls, body: BodyReader) -> Self:
        """Read a body. TierIOError when it is not one."""
        ...

    def read_answer(self, body: BodyReader) -> AnswerT:
        """Read the body of an answer to this very request. TierIOError when it is not one."""
        ...


class Answer(Protocol):
    """What can be answered, OK."""

    def encode(self) -> bytes:
        """The body."""
        ...


@dataclass(frozen=True, slots=True)
class Refusal:
    """An answer that is not OK."""

    status: Status
    epoch: int = 0
    """FENCED: a later epoch of the sender's name. STALE: the answering node's epoch, or 0: greet
    it first."""
    text: str = ""
    """REFUSED: why, one line. FENCED: where the node of that epoch says it is. A stranger's:
    printable, for people only."""

    def encode(self) -> bytes:
        fields = _U64.pack(self.epoch) if self.status in (Status.FENCED, Status.STALE) else b""
        if self.status not in (Status.FENCED, Status.REFUSED):
            return fields
        text = " ".join(self.text.split()).encode("utf-8", "replace")[:TEXT_BYTES_MAX]
        text = text.decode("utf-8", "ignore").encode("utf-8")
        return fields + _COUNT.pack(len(text)) + text

    @classmethod
    def decode(cls, status: Status, body: BodyReader) -> Refusal:
        """TierIOError when it is none of this status."""
        epoch, text = 0, ""
        if status in (Status.FENCED, Status.STALE):
            (epoch,) = body.fields(_U64)
        if status in (Status.FENCED, Status.REFUSED):
            (length,) = body.fields(_COUNT)
            raw = body.blob(bounded("bytes of text", length, 0, TEXT_BYTES_MAX))
            text = "".join(c if c.isprintable() else "?" for c in raw.decode("utf-8", "replace"))
        body.end()
        return cls(status, epoch, text)


AnyRequest = Hello | Sync | SnapshotAsk | Lookup | LeaseAsk | ReleaseAsk | StoreAsk

_REQUESTS: dict[Verb, type[AnyRequest]] = {
    kind.verb: kind for kind in (Hello, Sync, SnapshotAsk, Lookup, LeaseAsk, ReleaseAsk, StoreAsk)
}
_A = TypeVar("_A")


def write_request(request: AnyRequest, own_epoch: int, peer_epoch: int) -> bytes:
    """A whole message. `peer_epoch` is 0 only for a Hello to a node never met. O(size)."""
    assert own_epoch > 0 and (peer_epoch > 0 or request.verb is Verb.HELLO), (own_epoch, request)
    return pack(Envelope(request.verb, Status.REQUEST, own_epoch, peer_epoch), request.encode())


def read_request(message: bytes) -> tuple[Envelope, AnyRequest] | None:
    """Inverse of write_request(); None when the digest is wrong. TierIOError for anything that
    is no request of this format, in one line."""
    parts = unpack(message)
    if parts is None:
        return None
    envelope, body = parts
    if envelope.status is not Status.REQUEST or envelope.verb not in _REQUESTS:
        raise TierIOError(
            f"read pool message: {envelope.verb.name} with status {envelope.status.name} "
            "is no request"
        )
    bounded("the sender's epoch", envelope.sender_epoch, 1, U64_MAX)
    known = 0 if envelope.verb is Verb.HELLO else 1
    bounded("the receiver's epoch", envelope.receiver_epoch, known, U64_MAX)
    return envelope, _REQUESTS[envelope.verb].decode(body)


def write_answer(verb: Verb, answer: Answer | Refusal, own_epoch: int, peer_epoch: int) -> bytes:
    """A whole answer. `peer_epoch`: the asker's, 0 where it could not be read. O(size)."""
    status = answer.status if isinstance(answer, Refusal) else Status.OK
    return pack(Envelope(verb, status, own_epoch, peer_epoch), answer.encode())


def read_answer(message: bytes, request: Request[_A]) -> tuple[Envelope, _A | Refusal]:
    """Inverse of write_answer(), for the answer to `request`. TierIOError when the digest is
    wrong or this cannot be its answer. Comparing the epochs is the caller's."""
    parts = unpack(message)
    if parts is None:
        raise TierIOError("read pool message: the answer's digest is wrong, bits have flipped")
    envelope, body = parts
    refusal = envelope.status is not Status.OK
    unread = envelope.verb is Verb.UNREAD and refusal
    if envelope.status is Status.REQUEST or not (envelope.verb is request.verb or unread):
        raise TierIOError(
            f"read pool message: {envelope.verb.name} with status {envelope.status.name} "
            f"does not answer {request.verb.name}"
        )
    if refusal:
        return envelope, Refusal.decode(envelope.status, body)
    return envelope, request.read_answer(body)
