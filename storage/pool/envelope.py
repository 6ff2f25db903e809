"""What every pool message begins with, and the reader of what follows: docs/formats/pool.md.

Owns the envelope (format version, verb, status, epochs, digest) and BodyReader. Does not know what
the verbs say: messages.py does. No I/O, no state. Invariants: nothing of a body is looked at
before the digest was compared; a length is compared with what is there before anything is made of
that length; every field is of fixed size, nothing is unpickled. Called by messages.py, serving.py
and link.py.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from enum import IntEnum
from functools import lru_cache
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tierkv.storage.checksum import header_checksum
from tierkv.storage.errors import TierIOError
from tierkv.storage.transport.base import TransportLimits
from tierkv.storage.types import KEY_BYTES, PageKey

MAGIC = b"TKVP"
VERSION = 1
U64_MAX = (1 << 64) - 1
MESSAGE_BYTES_MAX = TransportLimits().message_bytes

_SIGNED = struct.Struct("<4sHBBQQ")
_DIGEST = struct.Struct("<Q")
_VERSION = struct.Struct("<4sH")
ENVELOPE_BYTES = _SIGNED.size + _DIGEST.size

Fingerprints = npt.NDArray[np.uint64]


class Verb(IntEnum):
    """What a message asks, and its answer answers. The number goes over the wire."""

    UNREAD = 0
    """Only in an answer: the message could not be read."""
    HELLO = 1
    SYNC = 2
    SNAPSHOT = 3
    LOOKUP = 4
    LEASE = 5
    RELEASE = 6
    STORE = 7


class Status(IntEnum):
    """What became of a request. The number goes over the wire."""

    REQUEST = 0
    """Not an answer."""
    OK = 1
    FENCED = 2
    """The receiver knows a later epoch of the sender's name."""
    STALE = 3
    """The sender means another life of the receiver, or has not greeted this one."""
    NO_CLASS = 4
    """The page size is not served here and cannot be opened."""
    LEAVING = 5
    """The receiver takes nothing more in."""
    REFUSED = 6
    """Not to be answered at all; a line says why."""
    DAMAGED = 7
    """The digest is wrong: nothing was done."""


# By number: a look-up takes a tenth of the enum's own call, and every message needs two.
_VERBS = {verb.value: verb for verb in Verb}
_STATUSES = {status.value: status for status in Status}


# The bits of each byte, lowest first. For a few keys, as most messages have, faster than numpy.
_BITS = [tuple(bool(byte >> bit & 1) for bit in range(8)) for byte in range(256)]


class Envelope(NamedTuple):
    """Who speaks to whom, and about what."""

    verb: Verb
    status: Status
    sender_epoch: int
    receiver_epoch: int
    """As the sender knows it; 0 where it knows none, which a HELLO and answers may."""


def pack(envelope: Envelope, body: bytes) -> bytes:
    """A whole message. O(body)."""
    assert len(body) <= MESSAGE_BYTES_MAX - ENVELOPE_BYTES, len(body)
    signed = _SIGNED.pack(MAGIC, VERSION, *envelope)
    return b"".join((signed, _DIGEST.pack(header_checksum(signed + body)), body))


def unpack(message: bytes) -> tuple[Envelope, BodyReader] | None:
    """The envelope and a reader of the body; None when the digest says that bits have flipped.

    TierIOError when it is no message of this format: another version, a verb or status there is
    not, a length out of bounds.
    """
    if not ENVELOPE_BYTES <= len(message) <= MESSAGE_BYTES_MAX:
        raise TierIOError(
            f"read pool message: expected {ENVELOPE_BYTES} to {MESSAGE_BYTES_MAX} bytes, "
            f"got {len(message)}"
        )
    magic, version = _VERSION.unpack_from(message)
    if magic != MAGIC:
        raise TierIOError(f"read pool message: expected it to begin with TKVP, got {magic.hex()}")
    if version != VERSION:
        raise TierIOError(
            f"read pool message: format version {VERSION} here, {version} there; "
            "run the same TierKV on both nodes"
        )
    size = _SIGNED.size
    (digest,) = _DIGEST.unpack_from(message, size)
    if header_checksum(message[:size] + message[ENVELOPE_BYTES:]) != digest:
        return None
    _, _, verb, status, sender, receiver = _SIGNED.unpack_from(message)
    if verb not in _VERBS or status not in _STATUSES:
        raise TierIOError(
            f"read pool message: verb {verb} with status {status} is not of format version "
            f"{VERSION}"
        )
    return Envelope(_VERBS[verb], _STATUSES[status], sender, receiver), BodyReader(message)


class BodyReader:
    """Reads a body front to back. Everything it raises is a TierIOError of one line."""

    __slots__ = ("_at", "_data")

    def __init__(self, message: bytes) -> None:
        self._data = message
        self._at = ENVELOPE_BYTES

    def fields(self, layout: struct.Struct) -> tuple[Any, ...]:
        """The next fixed fields."""
        return layout.unpack_from(self._data, self._advance(layout.size))

    def records(self, layout: struct.Struct, count: int) -> list[tuple[Any, ...]]:
        """The next `count` records of one layout. O(count)."""
        at = self._advance(layout.size * count)
        return list(layout.iter_unpack(self._data[at : self._at]))

    def blob(self, length: int) -> bytes:
        """The next `length` bytes."""
        at = self._advance(length)
        return self._data[at : self._at]

    def keys(self, count: int) -> tuple[PageKey, ...]:
        """The next `count` keys. O(count)."""
        return _keys_layout(count).unpack_from(self._data, self._advance(KEY_BYTES * count))

    def fingerprints(self, count: int) -> Fingerprints:
        """The next `count` numbers of 64 bits, a read-only view of the message."""
        return np.frombuffer(self._data, "<u8", count, self._advance(8 * count))

    def bits(self, count: int) -> tuple[bool, ...]:
        """The next `count` bits, padded with zeros to whole bytes. O(count)."""
        packed = self.blob(-(-count // 8))
        if count % 8 and packed[-1] >> count % 8:
            raise TierIOError(f"read pool message: expected zeros after {count} bits")
        return tuple(chain.from_iterable(map(_BITS.__getitem__, packed)))[:count]

    def end(self) -> None:
        """The body must be read to its end now."""
        if self._at != len(self._data):
            raise TierIOError(
                f"read pool message: {len(self._data) - self._at} bytes too many at its end"
            )

    def _advance(self, length: int) -> int:
        at = self._at
        if length > len(self._data) - at:
            raise TierIOError(
                f"read pool message: {length} bytes expected at {at}, {len(self._data) - at} there"
            )
        self._at = at + length
        return at


@lru_cache(maxsize=64)
def _keys_layout(count: int) -> struct.Struct:
    return struct.Struct(f"{KEY_BYTES}s" * count)


def pack_bits(bits: Sequence[bool]) -> bytes:
    """What BodyReader.bits() reads. O(bits)."""
    return np.packbits(np.frombuffer(bytes(bits), np.uint8), bitorder="little").tobytes()


def pack_numbers(numbers: Sequence[int] | Fingerprints) -> bytes:
    """What BodyReader.fingerprints() reads. O(numbers)."""
    return np.asarray(numbers, "<u8").tobytes()


def bounded(what: str, value: int, low: int, high: int) -> int:
    """`value`; TierIOError naming `what` unless it is in [low, high]."""
    if not low <= value <= high:
        raise TierIOError(f"read pool message: expected {what} from {low} to {high}, got {value}")
    return value
