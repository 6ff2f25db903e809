"""Digests of pages, and copies that compute one on the way.

Owns the choice of the digest (xxh3, 128 bits: found fast, not cryptographic - it guards against
faults, and page keys guard against mix-ups). No state. Every function releases the GIL for the
bulk of its work: numpy.copyto and xxhash both do (measured), slice assignment does not.
"""

from __future__ import annotations

import numpy as np
import xxhash

from tierkv.storage.types import Buffer

CHECKSUM_BYTES = 16

COPY_CHUNK_BYTES = 1 << 20
"""Copy, then hash, in pieces that stay in the second-level cache between the two. Measured for
4 MiB pages: whole page 5.6 GB/s, 1 MiB 6.3, 256 KiB 6.9. Smaller pieces take the GIL back more
often, and each time a busy interpreter may make them wait, hence not the smallest."""


def payload_checksum(payload: Buffer) -> bytes:
    """The 16-byte xxh3_128 digest, canonical byte order. O(n), about 13 GB/s."""
    return xxhash.xxh3_128_digest(payload)


def header_checksum(header: Buffer) -> int:
    """The 64-bit xxh3 of a header's fields."""
    return xxhash.xxh3_64_intdigest(header)


def copy_bytes(out: memoryview, source: Buffer) -> None:
    """Copy `source` into `out` of the same length. O(n)."""
    np.copyto(np.frombuffer(out, np.uint8), np.frombuffer(source, np.uint8))


def copy_with_checksum(out: memoryview, source: Buffer) -> bytes:
    """Copy `source` into `out` and return the digest of what is then in `out`. O(n).

    The destination is hashed, not the source: whatever the copy did, the digest is of the bytes
    that the reader of `out` will see.
    """
    target, origin = np.frombuffer(out, np.uint8), np.frombuffer(source, np.uint8)
    if target.size <= COPY_CHUNK_BYTES:
        np.copyto(target, origin)
        return xxhash.xxh3_128_digest(out)
    digest = xxhash.xxh3_128()
    for start in range(0, target.size, COPY_CHUNK_BYTES):
        piece = target[start : start + COPY_CHUNK_BYTES]
        np.copyto(piece, origin[start : start + COPY_CHUNK_BYTES])
        digest.update(piece.data)
    return digest.digest()
