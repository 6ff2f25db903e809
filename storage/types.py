"""Values that every floor shares: names, keys and small frozen results.

Owns no state and does no I/O. Words have the meanings of ARCHITECTURE.md, "Vocabulary".
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum, StrEnum
from typing import NewType

import numpy as np

PageKey = NewType("PageKey", bytes)
"""32-byte chained digest that names a page by namespace and all tokens up to its end."""

NamespaceId = NewType("NamespaceId", bytes)
"""32-byte digest over everything that must be equal for KV to be reusable."""

SlotId = NewType("SlotId", int)
"""Index of one page's place in one tier's pool, from 0."""

PackedTokens = NewType("PackedTokens", bytes)
"""Token ids as little-endian u32, 4 bytes each: the form that is hashed and compared."""

KEY_BYTES = 32
TOKEN_BYTES = 4
TOKEN_ID_MAX = 2**31 - 1

Buffer = bytes | bytearray | memoryview
"""Bytes-like objects that the tiers accept: C-contiguous, itemsize 1 after `.cast("B")`."""


class TierName(StrEnum):
    """Where a replica of a page can live, fastest first."""

    GPU = "gpu"
    HOST = "host"
    NVME = "nvme"
    REMOTE = "remote"


class CommitOutcome(Enum):
    """What became of one reserved slot when it was committed."""

    COMMITTED = "committed"
    """The page is visible under its key from now on."""
    EXISTS = "exists"
    """Another writer was first; the slot was freed and the older copy stays."""
    FAILED = "failed"
    """The tier could not make the page durable; the slot was freed or quarantined, and counted."""


class ReadOutcome(Enum):
    """What became of one read. Everything but OK is a miss for the caller."""

    OK = "ok"
    CORRUPT = "corrupt"
    """Key, length or checksum did not match; the page is quarantined and never served again."""
    FAILED = "failed"
    """The device returned an error or too few bytes; counted against the tier."""


def pack_tokens(ids: Iterable[int]) -> PackedTokens:
    """Pack token ids as little-endian u32.

    Raises ValueError when an id is negative or above TOKEN_ID_MAX. O(n).
    """
    array = np.asarray(ids if isinstance(ids, (list, tuple, np.ndarray)) else list(ids))
    if array.size == 0:
        return PackedTokens(b"")
    if array.dtype.kind not in "iu" or array.ndim != 1:
        raise ValueError(f"token ids: expected a flat list of integers, got dtype {array.dtype}")
    low, high = int(array.min()), int(array.max())
    if low < 0 or high > TOKEN_ID_MAX:
        raise ValueError(f"token ids: expected 0 to {TOKEN_ID_MAX}, got {low} to {high}")
    return PackedTokens(array.astype("<u4").tobytes())


def unpack_tokens(packed: PackedTokens) -> list[int]:
    """Inverse of pack_tokens. O(n)."""
    ids: list[int] = np.frombuffer(packed, dtype="<u4").tolist()
    return ids
