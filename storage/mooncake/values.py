"""The value under a key in a Mooncake Store, and the key's text: docs/formats/mooncake.md.

Owns the byte layout of the value's header, and the scratch memory for headers. No I/O. Called by
storage.mooncake's puller and pusher. Invariant: a header that parses names its page, its length
and its digest, so that a reader believes nothing of whoever wrote it but the bytes themselves.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np

from tierkv.storage.checksum import CHECKSUM_BYTES, header_checksum
from tierkv.storage.types import KEY_BYTES, Buffer, PageKey

FORMAT_VERSION = 1
MAGIC = b"TKVMOON\x00"
HEADER_BYTES = 128

# magic, version, flags, payload bytes, page key, payload checksum
_FIELDS = struct.Struct(f"<8sHHI{KEY_BYTES}s{CHECKSUM_BYTES}s")
_SEAL = struct.Struct("<Q")
assert _FIELDS.size + _SEAL.size <= HEADER_BYTES


@dataclass(frozen=True, slots=True)
class ValueHeader:
    """What stands before the payload in a value."""

    key: PageKey
    payload_bytes: int
    checksum: bytes
    """xxh3_128 of the payload, 16 bytes."""

    def pack(self) -> bytes:
        """HEADER_BYTES bytes; those after the seal are zero."""
        assert len(self.key) == KEY_BYTES and len(self.checksum) == CHECKSUM_BYTES
        fields = _FIELDS.pack(MAGIC, FORMAT_VERSION, 0, self.payload_bytes, self.key, self.checksum)
        return (fields + _SEAL.pack(header_checksum(fields))).ljust(HEADER_BYTES, b"\0")


def parse_header(block: Buffer) -> ValueHeader | None:
    """Read a header; None when it is not an intact one of this version. Never raises."""
    if len(block) < _FIELDS.size + _SEAL.size:
        return None
    magic, version, flags, payload_bytes, key, checksum = _FIELDS.unpack_from(block)
    if (magic, version, flags) != (MAGIC, FORMAT_VERSION, 0):
        return None
    if _SEAL.unpack_from(block, _FIELDS.size)[0] != header_checksum(block[: _FIELDS.size]):
        return None
    return ValueHeader(PageKey(key), payload_bytes, checksum)


def key_text(key: PageKey, page_bytes: int) -> str:
    """The key under which a page of `page_bytes` is stored, as text."""
    return f"tierkv/{FORMAT_VERSION}/{page_bytes}/{key.hex()}"


class HeaderScratch:
    """Room for the headers of one batch, outside the arena. Owned by one thread."""

    def __init__(self, count: int) -> None:
        self._bytes = np.zeros(count * HEADER_BYTES, np.uint8)

    def __len__(self) -> int:
        return len(self._bytes) // HEADER_BYTES

    def block(self, index: int) -> memoryview:
        """The writable block at `index`, HEADER_BYTES long."""
        start = index * HEADER_BYTES
        return self._bytes[start : start + HEADER_BYTES].data

    def address(self, index: int) -> int:
        """Where that block lies. Valid while the scratch lives."""
        return int(self._bytes.ctypes.data) + index * HEADER_BYTES

    def clear(self) -> None:
        """Zero every block, so that no header of an earlier batch can be taken for a new one."""
        self._bytes[:] = 0
