"""The verbs between members of a pool, as values and as bytes: docs/formats/pool.md.

Owns the body of every request and answer, and the bounds of their counts. Does not know what a
node does about them: serving.py answers, link.py, puller.py and pusher.py ask. No I/O, no state.
Invariants: decoding what was encoded gives the same value; a count above its bound is refused
before anything is made of that size; an answer that does not fit its request is refused.

Asking:      bytes out = write_request(request, own epoch, peer's epoch)
             envelope, answer = read_answer(bytes in, request)      # a Refusal, or what it promises
Answering:   read_request(bytes in); write_answer(verb, answer, own epoch, peer's epoch)
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from enum import IntEnum
from typing import ClassVar, NamedTuple, Protocol, Self, TypeVar

import numpy as np

from tierkv.storage.checksum import CHECKSUM_BYTES
from tierkv.storage.errors import TierIOError
from tierkv.storage.pool.envelope import (
    BodyReader,
    Envelope,
    Fingerprints,
    Status,
    Verb,
    bounded,
    pack,
    pack_bits,
    unpack,
)
from tierkv.storage.transport.base import GENERATION_MAX, PAGE_BYTES_MAX, TransportLimits
from tierkv.storage.types import KEY_BYTES, PageKey

NAME_BYTES_MAX = 255
PAGE_SIZES_MAX = TransportLimits().memories
"""Page sizes one node serves: each is a memory of its transport."""
LOOKUP_KEYS_MAX = 4096
PAGES_MAX = 1024
"""Pages of one LEASE or STORE, and leases of one RELEASE."""
FINGERPRINTS_MAX = 65536
"""Fingerprints of one answer to SYNC, all page sizes together, or of one part of a snapshot."""
WAIT_MS_MAX = 600_000
TEXT_BYTES_MAX = 512
_U64_MAX = (1 << 64) - 1
_OFFSET_MAX = (1 << 63) - 1

_COUNT = struct.Struct("<I")
_U64 = struct.Struct("<Q")
_HELLO = struct.Struct("<QBBH")
_SINCE = struct.Struct("<QQQ")
_SYNC_ANSWER = struct.Struct("<BBHH")
_CHANGES = struct.Struct("<QQQIIB")
_SNAPSHOT = struct.Struct("<QQQQI")
_SNAPSHOT_ANSWER = struct.Struct("<QQQI")
_LOOKUP = struct.Struct("<QI")
_LEASE = struct.Struct("<QIII")
_GRANT = struct.Struct("<QQI")
_LEASED = struct.Struct(f"<Q{CHECKSUM_BYTES}s")
_STORE = struct.Struct("<QQII")
_OFFERED = struct.Struct(f"<{KEY_BYTES}sQ{CHECKSUM_BYTES}s")

_LEAVING, _CHECKSUMS = 1, 2
_MORE, _SNAPSHOT_NEEDED = 1, 2

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


# --- greeting ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Hello:
    """Who a member is. The answer is the other member's own."""

    verb: ClassVar[Verb] = Verb.HELLO
    name: str
    """Printable, 1 to NAME_BYTES_MAX bytes of UTF-8."""
    epoch: int
    page_sizes: tuple[int, ...]
    leaving: bool = False
    checksums: bool = True
    """Whether its pages carry checksums. Those of a node without are of no use to others."""

    def encode(self) -> bytes:
        name = self.name.encode("utf-8")
        assert 1 <= len(name) <= NAME_BYTES_MAX, self.name
        flags = _LEAVING * self.leaving | _CHECKSUMS * self.checksums
        head = _HELLO.pack(self.epoch, flags, len(name), len(self.page_sizes))
        return head + name + _pack_numbers(self.page_sizes)

    @classmethod
    def decode(cls, body: BodyReader) -> Hello:
        epoch, flags, length, count = body.fields(_HELLO)
        bounded("an epoch", epoch, 1, _U64_MAX)
        bounded("flags", flags, 0, _LEAVING | _CHECKSUMS)
        bounded("bytes of a name", length, 1, NAME_BYTES_MAX)
        bounded("page sizes", count, 0, PAGE_SIZES_MAX)
        name = _text(body.blob(length))
        sizes = _read_page_sizes(body, count)
        body.end()
        return cls(name, epoch, sizes, bool(flags & _LEAVING), bool(flags & _CHECKSUMS))

    def read_answer(self, body: BodyReader) -> Hello:
        return Hello.decode(body)


# --- what a node holds ------------------------------------------------------------------------


class Since(NamedTuple):
    """What the asker knows of one page size: changes after `since` of journal `token`."""

    page_bytes: int
    token: int
    """0: nothing is known yet."""
    since: int


@dataclass(frozen=True, slots=True)
class Sync:
    """The heartbeat: what has changed since."""

    verb: ClassVar[Verb] = Verb.SYNC
    wants: tuple[Since, ...]

    def encode(self) -> bytes:
        assert len(self.wants) <= PAGE_SIZES_MAX, len(self.wants)
        return _COUNT.pack(len(self.wants)) + b"".join(_SINCE.pack(*want) for want in self.wants)

    @classmethod
    def decode(cls, body: BodyReader) -> Sync:
        (count,) = body.fields(_COUNT)
        bounded("page sizes", count, 0, PAGE_SIZES_MAX)
        wants = tuple(Since(*fields) for fields in body.records(_SINCE, count))
        body.end()
        for want in wants:
            bounded("page bytes", want.page_bytes, 1, PAGE_BYTES_MAX)
        return cls(wants)

    def read_answer(self, body: BodyReader) -> SyncAnswer:
        answer = SyncAnswer.decode(body)
        asked = {want.page_bytes for want in self.wants}
        for changes in answer.changes:
            if changes.page_bytes not in asked:
                raise TierIOError(
                    f"read pool message: changes of {changes.page_bytes} byte pages, not asked for"
                )
        return answer


@dataclass(frozen=True, slots=True, eq=False)
class Changes:
    """What a node gained and lost, of one page size, up to `seq` of its journal `token`."""

    page_bytes: int
    token: int
    seq: int
    added: Fingerprints
    removed: Fingerprints
    more: bool = False
    """More is known already: ask again at once."""
    snapshot_needed: bool = False
    """The journal does not reach back so far: nothing is said here, ask for a SNAPSHOT."""

    def encode(self) -> bytes:
        """O(changes)."""
        flags = _MORE * self.more | _SNAPSHOT_NEEDED * self.snapshot_needed
        head = _CHANGES.pack(
            self.page_bytes, self.token, self.seq, len(self.added), len(self.removed), flags
        )
        return head + _pack_fingerprints(self.added) + _pack_fingerprints(self.removed)

    @classmethod
    def decode(cls, body: BodyReader, room: int) -> Changes:
        """TierIOError when there are more than `room` fingerprints."""
        page_bytes, token, seq, added, removed, flags = body.fields(_CHANGES)
        bounded("page bytes", page_bytes, 1, PAGE_BYTES_MAX)
        bounded("flags", flags, 0, _MORE | _SNAPSHOT_NEEDED)
        bounded("changes", added + removed, 0, 0 if flags & _SNAPSHOT_NEEDED else room)
        return cls(
            page_bytes,
            token,
            seq,
            body.fingerprints(added),
            body.fingerprints(removed),
            bool(flags & _MORE),
            bool(flags & _SNAPSHOT_NEEDED),
        )


@dataclass(frozen=True, slots=True)
class SyncAnswer:
    """The state of a node, and what changed. A page size asked for may be missing: not served."""

    leaving: bool
    page_sizes: tuple[int, ...]
    """All that are served, asked for or not."""
    changes: tuple[Changes, ...]

    def encode(self) -> bytes:
        """O(changes)."""
        head = _SYNC_ANSWER.pack(self.leaving, 0, len(self.page_sizes), len(self.changes))
        parts = [changes.encode() for changes in self.changes]
        return b"".join((head, _pack_numbers(self.page_sizes), *parts))

    @classmethod
    def decode(cls, body: BodyReader) -> SyncAnswer:
        leaving, zero, sizes, count = body.fields(_SYNC_ANSWER)
        bounded("flags", leaving, 0, _LEAVING)
        bounded("zero", zero, 0, 0)
        bounded("page sizes", sizes, 0, PAGE_SIZES_MAX)
        bounded("page sizes", count, 0, PAGE_SIZES_MAX)
        page_sizes = _read_page_sizes(body, sizes)
        changes: list[Changes] = []
        room = FINGERPRINTS_MAX
        for _ in range(count):
            part = Changes.decode(body, room)
            room -= len(part.added) + len(part.removed)
            changes.append(part)
        body.end()
        return cls(bool(leaving), page_sizes, tuple(changes))


@dataclass(frozen=True, slots=True)
class SnapshotAsk:
    """A part of all that a node holds of one page size."""

    verb: ClassVar[Verb] = Verb.SNAPSHOT
    page_bytes: int
    token: int
    """With `seq`: of the snapshot that is being read, as the first part named it; 0: a new one."""
    seq: int
    start: int
    """Index of the first fingerprint wanted."""
    count: int

    def encode(self) -> bytes:
        assert 1 <= self.count <= FINGERPRINTS_MAX, self.count
        return _SNAPSHOT.pack(self.page_bytes, self.token, self.seq, self.start, self.count)

    @classmethod
    def decode(cls, body: BodyReader) -> SnapshotAsk:
        ask = cls(*body.fields(_SNAPSHOT))
        body.end()
        bounded("page bytes", ask.page_bytes, 1, PAGE_BYTES_MAX)
        bounded("fingerprints", ask.count, 1, FINGERPRINTS_MAX)
        return ask

    def read_answer(self, body: BodyReader) -> SnapshotPart:
        part = SnapshotPart.decode(body)
        begun = (part.token, part.seq) == (self.token, self.seq)
        start = self.start if begun else 0
        expected = min(self.count, max(0, part.total - start))
        bounded("fingerprints of this part", len(part.fingerprints), expected, expected)
        return part


@dataclass(frozen=True, slots=True, eq=False)
class SnapshotPart:
    """Fingerprints from where they were asked, sorted; from 0 where token or seq are not those
    that were asked: another snapshot has begun, and this is its first part."""

    token: int
    seq: int
    total: int
    """Of the whole snapshot."""
    fingerprints: Fingerprints

    def encode(self) -> bytes:
        """O(part)."""
        head = _SNAPSHOT_ANSWER.pack(self.token, self.seq, self.total, len(self.fingerprints))
        return head + _pack_fingerprints(self.fingerprints)

    @classmethod
    def decode(cls, body: BodyReader) -> SnapshotPart:
        token, seq, total, count = body.fields(_SNAPSHOT_ANSWER)
        bounded("fingerprints", count, 0, FINGERPRINTS_MAX)
        part = cls(token, seq, total, body.fingerprints(count))
        body.end()
        return part


@dataclass(frozen=True, slots=True)
class Lookup:
    """Which of these pages are there? Changes nothing there (lesson L1)."""

    verb: ClassVar[Verb] = Verb.LOOKUP
    page_bytes: int
    keys: tuple[PageKey, ...]

    def encode(self) -> bytes:
        assert 1 <= len(self.keys) <= LOOKUP_KEYS_MAX, len(self.keys)
        return _LOOKUP.pack(self.page_bytes, len(self.keys)) + b"".join(self.keys)

    @classmethod
    def decode(cls, body: BodyReader) -> Lookup:
        page_bytes, count = body.fields(_LOOKUP)
        bounded("page bytes", page_bytes, 1, PAGE_BYTES_MAX)
        bounded("keys", count, 1, LOOKUP_KEYS_MAX)
        keys = body.keys(count)
        body.end()
        return cls(page_bytes, keys)

    def read_answer(self, body: BodyReader) -> LookupAnswer:
        answer = LookupAnswer.decode(body)
        bounded("answers", len(answer.found), len(self.keys), len(self.keys))
        return answer


@dataclass(frozen=True, slots=True)
class LookupAnswer:
    """One truth a key."""

    found: tuple[bool, ...]

    def encode(self) -> bytes:
        return _COUNT.pack(len(self.found)) + pack_bits(self.found)

    @classmethod
    def decode(cls, body: BodyReader) -> LookupAnswer:
        (count,) = body.fields(_COUNT)
        bounded("answers", count, 1, LOOKUP_KEYS_MAX)
        found = body.bits(count)
        body.end()
        return cls(found)


# --- reading pages of a node ------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LeaseAsk:
    """Hold these pages still. Not a chain: each key stands for itself."""

    verb: ClassVar[Verb] = Verb.LEASE
    page_bytes: int
    keys: tuple[PageKey, ...]
    hold_ms: int
    """How long the asker may read them, counted at the holder from when it grants."""
    wait_ms: int
    """How long the holder may take to bring pages up from its nvme."""

    def encode(self) -> bytes:
        assert 1 <= len(self.keys) <= PAGES_MAX, len(self.keys)
        head = _LEASE.pack(self.page_bytes, len(self.keys), self.hold_ms, self.wait_ms)
        return head + b"".join(self.keys)

    @classmethod
    def decode(cls, body: BodyReader) -> LeaseAsk:
        page_bytes, count, hold_ms, wait_ms = body.fields(_LEASE)
        bounded("page bytes", page_bytes, 1, PAGE_BYTES_MAX)
        bounded("keys", count, 1, PAGES_MAX)
        bounded("ms to hold", hold_ms, 1, WAIT_MS_MAX)
        bounded("ms to wait", wait_ms, 0, WAIT_MS_MAX)
        keys = body.keys(count)
        body.end()
        return cls(page_bytes, keys, hold_ms, wait_ms)

    def read_answer(self, body: BodyReader) -> LeaseGrant:
        grant = LeaseGrant.decode(body)
        bounded("pages", len(grant.pages), len(self.keys), len(self.keys))
        return grant


class LeasedPage(NamedTuple):
    """Where a page lies in the holder's memory, and the digest recorded at its commit."""

    offset: int
    checksum: bytes


@dataclass(frozen=True, slots=True)
class LeaseGrant:
    """What is held. None: that page is not there."""

    lease: int
    """To be given back by RELEASE; 0 when no page is held."""
    generation: int
    """Of the memory that the offsets are in."""
    pages: tuple[LeasedPage | None, ...]

    def encode(self) -> bytes:
        head = _GRANT.pack(self.lease, self.generation, len(self.pages))
        held = [page for page in self.pages if page is not None]
        there = pack_bits([page is not None for page in self.pages])
        return b"".join((head, there, *(_LEASED.pack(*page) for page in held)))

    @classmethod
    def decode(cls, body: BodyReader) -> LeaseGrant:
        lease, generation, count = body.fields(_GRANT)
        bounded("a generation", generation, 1, GENERATION_MAX)
        bounded("pages", count, 1, PAGES_MAX)
        there = body.bits(count)
        held = [LeasedPage(*fields) for fields in body.records(_LEASED, sum(there))]
        body.end()
        for page in held:
            bounded("an offset", page.offset, 0, _OFFSET_MAX)
        if bool(held) != bool(lease):
            raise TierIOError(f"read pool message: lease {lease} with {len(held)} pages")
        pages = iter(held)
        return cls(lease, generation, tuple(next(pages) if is_held else None for is_held in there))


@dataclass(frozen=True, slots=True)
class ReleaseAsk:
    """Leases that are read through: no byte of them is read any more."""

    verb: ClassVar[Verb] = Verb.RELEASE
    leases: tuple[int, ...]

    def encode(self) -> bytes:
        assert 1 <= len(self.leases) <= PAGES_MAX, len(self.leases)
        return _COUNT.pack(len(self.leases)) + _pack_numbers(self.leases)

    @classmethod
    def decode(cls, body: BodyReader) -> ReleaseAsk:
        (count,) = body.fields(_COUNT)
        bounded("leases", count, 1, PAGES_MAX)
        leases = tuple(body.fingerprints(count).tolist())
        body.end()
        return cls(leases)

    def read_answer(self, body: BodyReader) -> Released:
        released = Released.decode(body)
        bounded("leases", released.count, 0, len(self.leases))
        return released


@dataclass(frozen=True, slots=True)
class Released:
    """How many of them were still held."""

    count: int

    def encode(self) -> bytes:
        return _COUNT.pack(self.count)

    @classmethod
    def decode(cls, body: BodyReader) -> Released:
        (count,) = body.fields(_COUNT)
        body.end()
        return cls(count)


# --- copies to a node -------------------------------------------------------------------------


class OfferedPage(NamedTuple):
    """A page to be copied: where it lies in the sender's memory, and its digest."""

    key: PageKey
    offset: int
    checksum: bytes


@dataclass(frozen=True, slots=True)
class StoreAsk:
    """Read these pages out of my memory and keep them. Answered when they are committed."""

    verb: ClassVar[Verb] = Verb.STORE
    page_bytes: int
    generation: int
    """Of the sender's memory that the offsets are in."""
    pages: tuple[OfferedPage, ...]
    wait_ms: int

    def encode(self) -> bytes:
        assert 1 <= len(self.pages) <= PAGES_MAX, len(self.pages)
        head = _STORE.pack(self.page_bytes, self.generation, len(self.pages), self.wait_ms)
        return head + b"".join(_OFFERED.pack(*page) for page in self.pages)

    @classmethod
    def decode(cls, body: BodyReader) -> StoreAsk:
        page_bytes, generation, count, wait_ms = body.fields(_STORE)
        bounded("page bytes", page_bytes, 1, PAGE_BYTES_MAX)
        bounded("a generation", generation, 1, GENERATION_MAX)
        bounded("pages", count, 1, PAGES_MAX)
        bounded("ms to wait", wait_ms, 1, WAIT_MS_MAX)
        pages = tuple(
            OfferedPage(PageKey(key), bounded("an offset", offset, 0, _OFFSET_MAX), checksum)
            for key, offset, checksum in body.records(_OFFERED, count)
        )
        body.end()
        return cls(page_bytes, generation, pages, wait_ms)

    def read_answer(self, body: BodyReader) -> StoreAnswer:
        answer = StoreAnswer.decode(body)
        bounded("outcomes", len(answer.outcomes), len(self.pages), len(self.pages))
        return answer


class StoreOutcome(IntEnum):
    """What became of one page of a STORE. The number goes over the wire."""

    COMMITTED = 1
    EXISTS = 2
    """It was there already, and was not read."""
    FULL = 3
    CORRUPT = 4
    """The bytes that came are not those of the checksum."""
    FAILED = 5
    """They did not come, or could not be kept."""


@dataclass(frozen=True, slots=True)
class StoreAnswer:
    """One outcome a page."""

    outcomes: tuple[StoreOutcome, ...]

    def encode(self) -> bytes:
        return _COUNT.pack(len(self.outcomes)) + bytes(self.outcomes)

    @classmethod
    def decode(cls, body: BodyReader) -> StoreAnswer:
        (count,) = body.fields(_COUNT)
        bounded("outcomes", count, 1, PAGES_MAX)
        codes = body.blob(count)
        body.end()
        bounded("an outcome", min(codes), StoreOutcome.COMMITTED, StoreOutcome.FAILED)
        bounded("an outcome", max(codes), StoreOutcome.COMMITTED, StoreOutcome.FAILED)
        return cls(tuple(map(StoreOutcome, codes)))


# --- whole messages ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Refusal:
    """An answer that is not OK."""

    status: Status
    epoch: int = 0
    """FENCED: a later epoch of the sender's name. STALE: the answering node's epoch, or 0: greet
    it first."""
    text: str = field(default="")
    """REFUSED: why, one line. A stranger's: printable, for people only."""

    def encode(self) -> bytes:
        if self.status in (Status.FENCED, Status.STALE):
            return _U64.pack(self.epoch)
        if self.status is not Status.REFUSED:
            return b""
        text = " ".join(self.text.split()).encode("utf-8", "replace")[:TEXT_BYTES_MAX]
        text = text.decode("utf-8", "ignore").encode("utf-8")
        return _COUNT.pack(len(text)) + text

    @classmethod
    def decode(cls, status: Status, body: BodyReader) -> Refusal:
        """TierIOError when it is none of this status."""
        epoch, text = 0, ""
        if status in (Status.FENCED, Status.STALE):
            (epoch,) = body.fields(_U64)
        elif status is Status.REFUSED:
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
    bounded("the sender's epoch", envelope.sender_epoch, 1, _U64_MAX)
    known = 0 if envelope.verb is Verb.HELLO else 1
    bounded("the receiver's epoch", envelope.receiver_epoch, known, _U64_MAX)
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


def _pack_numbers(numbers: tuple[int, ...]) -> bytes:
    return np.array(numbers, "<u8").tobytes()


def _pack_fingerprints(fingerprints: Fingerprints) -> bytes:
    return fingerprints.astype("<u8", copy=False).tobytes()


def _read_page_sizes(body: BodyReader, count: int) -> tuple[int, ...]:
    sizes = tuple(body.fingerprints(count).tolist())
    for size in sizes:
        bounded("page bytes", size, 1, PAGE_BYTES_MAX)
    return sizes


def _text(raw: bytes) -> str:
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError:
        raise TierIOError(f"read pool message: the name {raw.hex()} is not UTF-8") from None
    if not text.isprintable():
        raise TierIOError(f"read pool message: the name {text!r} is not printable")
    return text
