"""The verbs by which members learn of each other and of what they hold: docs/formats/pool.md.

Owns the bodies of HELLO, SYNC, SNAPSHOT and LOOKUP and the bounds of their counts. Does not know
what a node does about them. No I/O, no state. Invariants: decoding what was encoded gives the same
value; a count above its bound is refused before anything is made of that size; an answer that does
not fit its request is refused. Called through messages.py.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from tierkv.storage.errors import TierIOError
from tierkv.storage.pool.envelope import (
    U64_MAX,
    BodyReader,
    Fingerprints,
    Verb,
    bounded,
    pack_bits,
    pack_numbers,
)
from tierkv.storage.transport.base import PAGE_BYTES_MAX, TransportLimits
from tierkv.storage.types import PageKey

NAME_BYTES_MAX = 255
ADDRESS_BYTES_MAX = 255
PAGE_SIZES_MAX = TransportLimits().memories
"""Page sizes one node serves: each is a memory of its transport."""
LOOKUP_KEYS_MAX = 4096
FINGERPRINTS_MAX = 65536
"""Fingerprints of one answer to SYNC, all page sizes together, or of one part of a snapshot."""

_COUNT = struct.Struct("<I")
_HELLO = struct.Struct("<QBBBH")
_SINCE = struct.Struct("<QQQ")
_SYNC_ANSWER = struct.Struct("<BBHH")
_CHANGES = struct.Struct("<QQQIIB")
_SNAPSHOT = struct.Struct("<QQQQI")
_SNAPSHOT_ANSWER = struct.Struct("<QQQI")
_LOOKUP = struct.Struct("<QI")

_LEAVING, _CHECKSUMS = 1, 2
_MORE, _SNAPSHOT_NEEDED = 1, 2


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
    address: str = ""
    """Where it says that it is reached, for people only; up to ADDRESS_BYTES_MAX bytes."""

    def encode(self) -> bytes:
        name = self.name.encode("utf-8")
        assert 1 <= len(name) <= NAME_BYTES_MAX, self.name
        flags = _LEAVING * self.leaving | _CHECKSUMS * self.checksums
        address = self.address.encode("utf-8")
        assert len(address) <= ADDRESS_BYTES_MAX, self.address
        head = _HELLO.pack(self.epoch, flags, len(name), len(address), len(self.page_sizes))
        return head + name + address + pack_numbers(self.page_sizes)

    @classmethod
    def decode(cls, body: BodyReader) -> Hello:
        epoch, flags, length, address_length, count = body.fields(_HELLO)
        bounded("an epoch", epoch, 1, U64_MAX)
        bounded("flags", flags, 0, _LEAVING | _CHECKSUMS)
        bounded("bytes of a name", length, 1, NAME_BYTES_MAX)
        bounded("bytes of an address", address_length, 0, ADDRESS_BYTES_MAX)
        bounded("page sizes", count, 0, PAGE_SIZES_MAX)
        name, address = _text(body.blob(length)), _text(body.blob(address_length))
        sizes = _read_page_sizes(body, count)
        body.end()
        leaving, checksums = bool(flags & _LEAVING), bool(flags & _CHECKSUMS)
        return cls(name, epoch, sizes, leaving, checksums, address)

    def read_answer(self, body: BodyReader) -> Hello:
        return Hello.decode(body)


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
        return head + pack_numbers(self.added) + pack_numbers(self.removed)

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
        return b"".join((head, pack_numbers(self.page_sizes), *parts))

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
        return head + pack_numbers(self.fingerprints)

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


def _read_page_sizes(body: BodyReader, count: int) -> tuple[int, ...]:
    sizes = tuple(body.fingerprints(count).tolist())
    for size in sizes:
        bounded("page bytes", size, 1, PAGE_BYTES_MAX)
    return sizes


def _text(raw: bytes) -> str:
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError:
        raise TierIOError(f"read pool message: the text {raw.hex()} is not UTF-8") from None
    if not text.isprintable():
        raise TierIOError(f"read pool message: the text {text!r} is not printable")
    return text
