"""The messages of the ucx plane, and the offer that travels over the control channel.

Owns their layout and their proof. Pages travel as messages of their own, raw, under a tag that
only the two sides know. Invariants: every length is checked before anything is allocated for it;
every message carries a MAC by the secret of the offer, which itself never crosses the ucx
network; nothing is unpickled. All numbers are little-endian. Called by ucx.py, ucx_lane.py
and ucx_server.py.

    offer    "TKVUCX" | version 2 | UCX major 2, minor 2 | secret 32 | address length 2 | count 2
             | address | (generation 8, bytes 8) each
    HELLO    1 | lane 16 | lane that it replaces 16 | nonce 8 | address     client's first message
    READ     2 | lane 16 | number 8 | generation 8 | milliseconds 4 | count 4 | (offset 8, length 4)
    RESULT   3 | lane 16 | number 8 | count 4 | outcome 1 each   number 0 answers the HELLO

    proof    BLAKE2b-256(message; key: secret, person: "tkv-ucx1-client" or "-server"), appended

A lane is one connection of a reader. Message k of read n has the tag nonce + n * 2^20 + k: 0 is
the RESULT, page i comes as k = i + 1. Each page that was asked for gets exactly one message: its
bytes, or an empty one when it is not sent. Only the RESULT, which is sent first, says which.
"""

from __future__ import annotations

import hmac
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from hashlib import blake2b
from itertools import chain

from tierkv.storage.errors import TierIOError
from tierkv.storage.transport.base import PageOutcome, PageRange
from tierkv.storage.transport.ucx_address import ADDRESS_BYTES_MAX

VERSION = 1
SECRET_BYTES = 32
LANE_BYTES = 16
NO_LANE = bytes(LANE_BYTES)
PROOF_BYTES = 32
SLOT_BITS = 20
MARKER = b""
"""In the place of a page that is not sent: ends the receive, and leaves its memory alone."""

_OFFER = struct.Struct("<6sHHH32sHH")
_MAGIC = b"TKVUCX"
_MEMORY = struct.Struct("<QQ")
_HELLO = struct.Struct("<B16s16sQ")
_READ = struct.Struct("<B16sQQII")
_RANGE = struct.Struct("<QI")
_RESULT = struct.Struct("<B16sQI")
_OUTCOMES = (PageOutcome.OK, PageOutcome.GONE, PageOutcome.FAILED)


class Kind(IntEnum):
    """First byte of a message."""

    HELLO = 1
    READ = 2
    RESULT = 3


class Side:
    """Who made a proof."""

    CLIENT = b"tkv-ucx1-client"
    SERVER = b"tkv-ucx1-server"


@dataclass(frozen=True, slots=True)
class Offer:
    """What a node tells the others."""

    version: tuple[int, int]
    secret: bytes
    address: bytes
    """As Addresses.pack() made it."""
    sizes: Mapping[int, int]
    """Bytes of each memory, by generation."""


@dataclass(frozen=True, slots=True)
class Hello:
    """A reader greets."""

    lane: bytes
    replaces: bytes
    """A lane that the reader gave up; NO_LANE for its first."""
    nonce: int
    address: bytes


@dataclass(frozen=True, slots=True)
class ReadRequest:
    """A reader asks for pages."""

    lane: bytes
    number: int
    generation: int
    timeout_s: float
    ranges: Sequence[PageRange]


def pack_offer(offer: Offer) -> bytes:
    """O(memories)."""
    major, minor = offer.version
    head = _OFFER.pack(
        _MAGIC, VERSION, major, minor, offer.secret, len(offer.address), len(offer.sizes)
    )
    memories = b"".join(_MEMORY.pack(*entry) for entry in offer.sizes.items())
    return head + offer.address + memories


def unpack_offer(raw: bytes, memories: int) -> Offer:
    """An offer of at most `memories` memories. TierIOError when it is none."""
    if len(raw) < _OFFER.size:
        raise TierIOError(f"ucx offer: expected {_OFFER.size} bytes or more, got {len(raw)}")
    magic, version, major, minor, secret, length, count = _OFFER.unpack_from(raw)
    if magic != _MAGIC or version != VERSION:
        raise TierIOError(f"ucx offer: expected {_MAGIC!r} {VERSION}, got {magic!r} {version}")
    start = _OFFER.size + length
    if count > memories or len(raw) != start + count * _MEMORY.size:
        raise TierIOError(
            f"ucx offer: expected an address of {length} bytes and at most {memories} memories, "
            f"got {count} memories in {len(raw)} bytes"
        )
    sizes = dict(_MEMORY.iter_unpack(raw[start:]))
    if len(sizes) != count or 0 in sizes or 0 in sizes.values():
        raise TierIOError("ucx offer: a generation is there twice, is 0 or has no bytes")
    return Offer((major, minor), secret, raw[_OFFER.size : start], sizes)


def pack_hello(secret: bytes, hello: Hello) -> bytes:
    """Message of a reader that connects."""
    body = _HELLO.pack(Kind.HELLO, hello.lane, hello.replaces, hello.nonce) + hello.address
    return _seal(secret, Side.CLIENT, body)


def pack_read(secret: bytes, read: ReadRequest) -> bytearray:
    """Message that asks for pages. O(pages)."""
    milliseconds = min(0xFFFFFFFF, max(1, int(read.timeout_s * 1e3)))
    count = len(read.ranges)
    body = bytearray(
        _READ.pack(Kind.READ, read.lane, read.number, read.generation, milliseconds, count)
    )
    # One call for all of them: a call a range took most of the time.
    body += struct.pack("<" + "QI" * count, *chain.from_iterable(read.ranges))
    body += _proof(secret, Side.CLIENT, body)
    return body


def request_bytes_max(read_pages: int) -> int:
    """Longest message that a server reads."""
    read = _READ.size + read_pages * _RANGE.size
    return max(read, _HELLO.size + ADDRESS_BYTES_MAX) + PROOF_BYTES


def unpack_request(secret: bytes, raw: bytes) -> Hello | ReadRequest:
    """What a reader sent. TierIOError when it is not what a reader of ours sends."""
    body = _open(secret, Side.CLIENT, raw)
    kind = body[0] if body else 0
    if kind == Kind.HELLO and len(body) > _HELLO.size:
        _, lane, replaces, nonce = _HELLO.unpack_from(body)
        return Hello(lane, replaces, nonce, body[_HELLO.size :])
    if kind == Kind.READ and len(body) >= _READ.size:
        _, lane, number, generation, milliseconds, count = _READ.unpack_from(body)
        if count and len(body) == _READ.size + count * _RANGE.size:
            ranges = list(map(PageRange._make, _RANGE.iter_unpack(body[_READ.size :])))
            return ReadRequest(lane, number, generation, milliseconds / 1e3, ranges)
    raise TierIOError(f"ucx request: kind {kind} does not have {len(body)} bytes")


def pack_result(secret: bytes, lane: bytes, number: int, outcomes: Sequence[PageOutcome]) -> bytes:
    """Message that ends a read. O(pages)."""
    body = _RESULT.pack(Kind.RESULT, lane, number, len(outcomes))
    return _seal(secret, Side.SERVER, body + bytes(map(_OUTCOMES.index, outcomes)))


def result_bytes(pages: int) -> int:
    """Length of a RESULT."""
    return _RESULT.size + pages + PROOF_BYTES


def unpack_result(secret: bytes, raw: bytes, lane: bytes, number: int) -> list[PageOutcome]:
    """Outcome of each page of this read. TierIOError when it is not its result. O(pages)."""
    body = _open(secret, Side.SERVER, raw)
    codes = body[_RESULT.size :]
    if len(body) < _RESULT.size or _RESULT.unpack_from(body) != (
        Kind.RESULT,
        lane,
        number,
        len(codes),
    ):
        raise TierIOError(f"ucx result: expected that of read {number}, got another message")
    if any(code >= len(_OUTCOMES) for code in codes):
        raise TierIOError(f"ucx result: expected outcomes below {len(_OUTCOMES)}")
    return [_OUTCOMES[code] for code in codes]


def _proof(secret: bytes, side: bytes, body: bytes | bytearray) -> bytes:
    # Keyed BLAKE2b is a MAC by itself, and twenty times as quick as HMAC on so few bytes.
    return blake2b(body, key=secret, person=side, digest_size=PROOF_BYTES).digest()


def _seal(secret: bytes, side: bytes, body: bytes) -> bytes:
    return body + _proof(secret, side, body)


def _open(secret: bytes, side: bytes, raw: bytes) -> bytes:
    body, proof = raw[:-PROOF_BYTES], raw[-PROOF_BYTES:]
    if not hmac.compare_digest(proof, _proof(secret, side, body)):
        raise TierIOError("ucx message: its proof is wrong; the sender does not know the offer")
    return body
