"""The verbs that move pages between members: docs/formats/pool.md.

Owns the bodies of LEASE, RELEASE and STORE and the bounds of their counts. Does not know what a
node does about them. No I/O, no state. Invariants: as in index_verbs.py. Called through
messages.py.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import ClassVar, NamedTuple

from tierkv.storage.checksum import CHECKSUM_BYTES
from tierkv.storage.errors import TierIOError
from tierkv.storage.pool.envelope import BodyReader, Verb, bounded, pack_bits, pack_numbers
from tierkv.storage.transport.base import GENERATION_MAX, PAGE_BYTES_MAX
from tierkv.storage.types import KEY_BYTES, PageKey

PAGES_MAX = 1024
"""Pages of one LEASE or STORE, and leases of one RELEASE."""
WAIT_MS_MAX = 600_000
OFFSET_MAX = (1 << 62) - 1
"""So that offset plus length is a number of 63 bits, whatever a peer says."""

_COUNT = struct.Struct("<I")
_LEASE = struct.Struct("<QIII")
_GRANT = struct.Struct("<QQI")
_LEASED = struct.Struct(f"<Q{CHECKSUM_BYTES}s")
_STORE = struct.Struct("<QQII")
_OFFERED = struct.Struct(f"<{KEY_BYTES}sQ{CHECKSUM_BYTES}s")


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
            bounded("an offset", page.offset, 0, OFFSET_MAX)
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
        return _COUNT.pack(len(self.leases)) + pack_numbers(self.leases)

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
            OfferedPage(PageKey(key), bounded("an offset", offset, 0, OFFSET_MAX), checksum)
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
