"""The bytes of the tcp transport, as docs/formats/transport.md shows them. No I/O.

Owns frame headers, the bodies of frames that are not payload, and their bounds. Does not know who
is trusted: handshake.py decides. Invariants: a header is refused by its kind and length before any
of its body is kept; every field is fixed-size, nothing is unpickled. Called by tcp_peer.py,
tcp_server.py and handshake.py.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

from tierkv.storage.errors import TierIOError
from tierkv.storage.transport.base import (
    BOOT_TOKEN_BYTES,
    PAGE_BYTES_MAX,
    PageRange,
    TransportLimits,
)

MAGIC = b"TKVXPORT"
VERSION = 1
NONCE_BYTES = 32
PROOF_BYTES = 32
ERROR_TEXT_BYTES = 512

_HEADER = struct.Struct("<IB3sQ")
_ZEROS = bytes(3)
_GREETING = struct.Struct(f"<8sHBx{NONCE_BYTES}s{BOOT_TOKEN_BYTES}s")
_READ = struct.Struct("<QI")
_RANGE = struct.Struct("<QI")

HEADER_BYTES = _HEADER.size
GREETING_BYTES = _GREETING.size
READ_BYTES = _READ.size
RANGE_BYTES = _RANGE.size


class Kind(IntEnum):
    """What a frame is. The number goes over the wire."""

    HELLO = 1
    WELCOME = 2
    PROOF = 3
    READY = 4
    READ = 5
    PAGE = 6
    GONE = 7
    MESSAGE = 8
    ANSWER = 9
    ERROR = 10


# By number: a tenth of the enum's own call, and every frame needs one.
_KINDS = {kind.value: kind for kind in Kind}


class Header(NamedTuple):
    """The first 16 bytes of a frame. `length` is the body's."""

    length: int
    kind: Kind
    request: int


class Greeting(NamedTuple):
    """Body of HELLO and WELCOME."""

    version: int
    keyed: bool
    """True when the sender proves a key and wants one proved."""
    nonce: bytes
    boot_token: bytes


def pack_header(kind: Kind, length: int, request: int) -> bytes:
    """The 16 bytes before a body of `length` bytes."""
    assert 0 <= length <= PAGE_BYTES_MAX, length
    return _HEADER.pack(length, kind, _ZEROS, request)


def pack_frame(kind: Kind, request: int, body: bytes) -> bytes:
    """A whole frame. O(body)."""
    return pack_header(kind, len(body), request) + body


def unpack_header(data: bytes | bytearray | memoryview, bounds: dict[Kind, range]) -> Header:
    """Header of a frame whose kind is in `bounds` and whose length is in its range.

    TierIOError otherwise: the stream cannot be trusted after it.
    """
    length, number, zeros, request = _HEADER.unpack_from(data)
    try:
        kind = _KINDS[number]
        allowed = bounds[kind]
    except KeyError:
        names = ", ".join(kind.name for kind in bounds)
        raise TierIOError(f"read frame: expected {names}, got kind {number}") from None
    if zeros != _ZEROS:
        raise TierIOError(f"read frame: expected zeros after the kind, got {zeros.hex()}")
    if length not in allowed:
        raise TierIOError(
            f"read frame: expected a {kind.name} of {allowed.start} to {allowed.stop - 1} bytes, "
            f"got {length}"
        )
    return Header(length, kind, request)


def exactly(length: int) -> range:
    """Bounds of a body that has one length."""
    return range(length, length + 1)


def error_bounds() -> range:
    """Bounds of an ERROR body."""
    return range(ERROR_TEXT_BYTES + 1)


def request_bounds(limits: TransportLimits) -> dict[Kind, range]:
    """What a server accepts after the handshake."""
    return {
        Kind.READ: range(
            READ_BYTES + RANGE_BYTES, READ_BYTES + limits.read_pages * RANGE_BYTES + 1
        ),
        Kind.MESSAGE: range(limits.message_bytes + 1),
    }


def page_bounds(length: int) -> dict[Kind, range]:
    """What a client accepts in the place of a page of `length` bytes."""
    return {Kind.PAGE: exactly(length), Kind.GONE: exactly(0), Kind.ERROR: error_bounds()}


def answer_bounds(limits: TransportLimits) -> dict[Kind, range]:
    """What a client accepts in the place of an answer."""
    return {Kind.ANSWER: range(limits.message_bytes + 1), Kind.ERROR: error_bounds()}


def pack_greeting(greeting: Greeting) -> bytes:
    """Body of HELLO and WELCOME."""
    return _GREETING.pack(
        MAGIC, greeting.version, greeting.keyed, greeting.nonce, greeting.boot_token
    )


def unpack_greeting(body: bytes) -> Greeting:
    """TierIOError when these bytes are not from a TierKV."""
    magic, version, keyed, nonce, boot_token = _GREETING.unpack(body)
    if magic != MAGIC or keyed not in (0, 1):
        raise TierIOError("greet peer: it does not speak TierKV's transport; check the address")
    return Greeting(version, bool(keyed), nonce, boot_token)


def pack_read(generation: int, ranges: Sequence[PageRange]) -> bytes:
    """Body of READ. O(ranges)."""
    return _READ.pack(generation, len(ranges)) + b"".join(
        _RANGE.pack(offset, length) for offset, length in ranges
    )


def unpack_read(body: bytes | bytearray | memoryview) -> tuple[int, list[PageRange]]:
    """Generation and ranges of a READ. TierIOError when count and length disagree."""
    generation, count = _READ.unpack_from(body)
    if len(body) != READ_BYTES + count * RANGE_BYTES:
        raise TierIOError(
            f"read frame: {count} ranges need {READ_BYTES + count * RANGE_BYTES} bytes, "
            f"got {len(body)}"
        )
    with memoryview(body) as view, view[READ_BYTES:] as rest:
        return generation, [PageRange(*fields) for fields in _RANGE.iter_unpack(rest)]


def pack_error(request: int, text: str) -> bytes:
    """An ERROR frame. The text is for people, one line, cut to its bound."""
    line = " ".join(text.split()).encode("utf-8")[:ERROR_TEXT_BYTES]
    return pack_frame(Kind.ERROR, request, line)


def unpack_error(body: bytes | bytearray) -> str:
    """The text of an ERROR, made printable: it is a stranger's."""
    text = bytes(body).decode("utf-8", "replace")
    return "".join(char if char.isprintable() else "?" for char in text)
