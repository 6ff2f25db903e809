"""Host memory that the device may read and write itself: registered in chunks, once.

Owns which address ranges are registered; keeps no reference to the memory, so that its owner can
unmap it after close(). Knows CUDA only as two functions that are handed in. Chunks end on a
unit's border (a slot of the arena), because a copy may not span two registrations. A chunk that
is refused leaves the others usable: its pages go through the bounce buffer. Called by cuda.py.
"""

from __future__ import annotations

import bisect
import logging
import resource
from collections.abc import Callable
from pathlib import Path

from tierkv.storage.device import address_of

CHUNK_BYTES_MAX = 16 << 30
"""One huge registration has been seen to fail where the same memory in pieces went through."""

log = logging.getLogger(__name__)


class PinnedRanges:
    """Registered ranges, apart from each other. Not thread-safe: changed at start and at close."""

    def __init__(
        self,
        register: Callable[[int, int], str | None],
        unregister: Callable[[int], str | None],
        chunk_bytes_max: int = CHUNK_BYTES_MAX,
    ) -> None:
        """`register(address, bytes)` and `unregister(address)` return None, or why not."""
        self._register = register
        self._unregister = unregister
        self._chunk_bytes_max = chunk_bytes_max
        self._starts: list[int] = []
        self._ends: list[int] = []

    @property
    def nbytes(self) -> int:
        """Bytes registered now."""
        return sum(self._ends) - sum(self._starts)

    def add(self, memory: memoryview, *, unit_bytes: int, first_bytes: int = 0) -> int:
        """Register `memory`: [0, first_bytes) with the first chunk, then whole units.

        Returns how many bytes could be; past a refusal nothing more is tried, and one warning
        says what to change.
        """
        assert unit_bytes > 0 and 0 <= first_bytes <= memory.nbytes
        base = address_of(memory)
        start, pinned = 0, 0
        while start < memory.nbytes:
            head = first_bytes if start == 0 else 0
            units = max(1, (self._chunk_bytes_max - head) // unit_bytes)
            end = min(memory.nbytes, start + head + units * unit_bytes)
            reason = self._register(base + start, end - start)
            if reason is not None:
                log.warning("%s", refusal(memory.nbytes, pinned, reason))
                break
            at = bisect.bisect(self._starts, base + start)
            self._starts.insert(at, base + start)
            self._ends.insert(at, base + end)
            pinned += end - start
            start = end
        self.check()
        return pinned

    def covers(self, address: int, nbytes: int) -> bool:
        """True when [address, address + nbytes) lies in one registration. O(log ranges)."""
        at = bisect.bisect(self._starts, address) - 1
        return at >= 0 and address + nbytes <= self._ends[at]

    def close(self) -> None:
        """Unregister everything. Idempotent."""
        for start in self._starts:
            reason = self._unregister(start)
            if reason is not None:
                log.warning("unregister host memory: address=%#x reason=%s", start, reason)
        self._starts, self._ends = [], []

    def check(self) -> None:
        """Assert that ranges are sorted and apart. O(ranges)."""
        assert len(self._starts) == len(self._ends)
        bounds = [b for pair in zip(self._starts, self._ends, strict=True) for b in pair]
        assert bounds == sorted(bounds), "registered ranges overlap"


def refusal(wanted: int, pinned: int, reason: str) -> str:
    """One line for the user: what could not be registered, why, and what to change."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    limit = "unlimited" if soft == resource.RLIM_INFINITY else f"{soft} bytes"
    return (
        f"register host memory with the GPU: {pinned} of {wanted} bytes ({reason}); the rest goes "
        f"through a buffer, one copy more. Lockable memory is {limit} (ulimit -l), "
        f"{_available()} available: raise the limit or lower the host capacity"
    )


def _available() -> str:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return "an unknown amount"
    found = next((line for line in lines if line.startswith("MemAvailable:")), None)
    return f"{int(found.split()[1]) * 1024} bytes" if found else "an unknown amount"
