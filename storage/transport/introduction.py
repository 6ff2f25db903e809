"""How two nodes tell each other which data planes they have. docs/formats/transport.md shows it.

Owns the prefix that keeps the transport's own messages apart from the application's, and the
bytes of an introduction. No I/O. Everything is a peer's and is checked: numbers and lengths before
anything is kept. Called by planes.py and negotiated_peer.py.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tierkv.storage.errors import TierIOError
from tierkv.storage.transport.plane import OFFER_BYTES_MAX

APPLICATION = b"\x00"
"""First byte of a message that is the application's."""
INTRODUCE = b"\x01"
"""First byte of a question for offers."""
PLANES_MAX = 4
NAME_BYTES_MAX = 32
REASON_BYTES_MAX = 512
DIGEST_BYTES = 32
ANSWER_BYTES_MAX = 1 + DIGEST_BYTES + PLANES_MAX * (NAME_BYTES_MAX + 6 + OFFER_BYTES_MAX)
PROBE_GENERATION = 1 << 62
"""Of the memory that every plane offers for probing. No register() gets so far."""
PROBE_BYTES = 4096

_ENTRY = struct.Struct("<BI")
_LENGTH = struct.Struct("<B")


@dataclass(frozen=True, slots=True)
class Introduction:
    """What a node answers."""

    digest: bytes
    """SHA-256 of its probe area."""
    offers: Mapping[str, bytes]
    """By name of the plane."""
    refusals: Mapping[str, str]
    """Planes that were asked for and cannot be had: why, one line."""


def pack_question(names: Sequence[str]) -> bytes:
    """The message that asks for the offers of these planes."""
    assert len(names) <= PLANES_MAX, names
    return INTRODUCE + _LENGTH.pack(len(names)) + b"".join(_pack_name(name) for name in names)


def unpack_question(message: bytes) -> list[str]:
    """Names asked for. TierIOError when the message is none."""
    reader = _Reader(message[1:], "read question for offers")
    names = [reader.name() for _ in range(reader.count())]
    reader.end()
    return names


def pack_introduction(introduction: Introduction) -> bytes:
    """The answer. O(offers)."""
    parts = [introduction.digest, _LENGTH.pack(len(introduction.offers))]
    for name, offer in introduction.offers.items():
        parts += [_pack_name(name), _ENTRY.pack(1, len(offer)), offer]
    parts[1] = _LENGTH.pack(len(introduction.offers) + len(introduction.refusals))
    for name, reason in introduction.refusals.items():
        line = " ".join(reason.split()).encode()[:REASON_BYTES_MAX]
        parts += [_pack_name(name), _ENTRY.pack(0, len(line)), line]
    return b"".join(parts)


def unpack_introduction(answer: bytes) -> Introduction:
    """TierIOError when the answer cannot be one. O(answer)."""
    reader = _Reader(answer, "read offers of peer")
    digest = reader.take(DIGEST_BYTES)
    offers: dict[str, bytes] = {}
    refusals: dict[str, str] = {}
    for _ in range(reader.count()):
        name = reader.name()
        offered, length = _ENTRY.unpack(reader.take(_ENTRY.size))
        if offered not in (0, 1) or length > (OFFER_BYTES_MAX if offered else REASON_BYTES_MAX):
            raise TierIOError(f"read offers of peer: {length} bytes of kind {offered} for {name}")
        data = reader.take(length)
        if offered:
            offers[name] = data
        else:
            text = data.decode("utf-8", "replace")
            refusals[name] = "".join(char if char.isprintable() else "?" for char in text)
    reader.end()
    return Introduction(digest, offers, refusals)


def _pack_name(name: str) -> bytes:
    data = name.encode("ascii")
    assert 0 < len(data) <= NAME_BYTES_MAX, name
    return _LENGTH.pack(len(data)) + data


class _Reader:
    """Takes bytes from the front."""

    def __init__(self, data: bytes, what: str) -> None:
        self._data = data
        self._what = what
        self._at = 0

    def take(self, length: int) -> bytes:
        taken = self._data[self._at : self._at + length]
        if len(taken) != length:
            raise TierIOError(f"{self._what}: it ends after {len(self._data)} bytes")
        self._at += length
        return taken

    def count(self) -> int:
        count = self.take(1)[0]
        if count > PLANES_MAX:
            raise TierIOError(f"{self._what}: {count} planes, at most {PLANES_MAX}")
        return count

    def name(self) -> str:
        length = self.take(1)[0]
        data = self.take(min(length, NAME_BYTES_MAX + 1))
        if not 0 < length <= NAME_BYTES_MAX or not data.isalnum():
            raise TierIOError(f"{self._what}: {data!r} is no name of a plane")
        return data.decode("ascii")

    def end(self) -> None:
        if self._at != len(self._data):
            raise TierIOError(f"{self._what}: {len(self._data) - self._at} bytes too many")
