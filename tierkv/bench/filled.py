"""Memory and keys for benchmarks that move pages. No state."""

from __future__ import annotations

import numpy as np

from tierkv.storage.device import aligned_buffer
from tierkv.storage.types import KEY_BYTES, PageKey


def filled(nbytes: int) -> memoryview:
    """Warm aligned memory with content that no device can compress; `nbytes` a multiple of 8."""
    buffer = aligned_buffer(nbytes)
    words = np.frombuffer(buffer, np.uint64)
    words[:] = np.random.default_rng(1).integers(0, 2**64, words.size, np.uint64)
    return buffer


def pages_of(buffer: memoryview, page_bytes: int) -> list[memoryview]:
    """`buffer` cut into pages."""
    return [buffer[at : at + page_bytes] for at in range(0, len(buffer), page_bytes)]


def numbered_keys(first: int, count: int) -> list[PageKey]:
    """Keys that spell the numbers from `first` on, least significant byte first."""
    return [PageKey(n.to_bytes(KEY_BYTES, "little")) for n in range(first, first + count)]
