"""When each page was last used, in bounded memory, on a clock that survives restarts.

Owns a sketch of moments, the reading of the store's own clock, and the histogram of reuse gaps.
Knows neither tiers nor what a time to live is for (storage.ttl). Called with the store's lock
held by storage.demotion and storage.promotion; saved by storage.hotness_file.

The clock counts whole seconds while a store is open, by the monotonic clock: a wall clock that
jumps moves nothing. It goes on from the saved reading at the next opening. How long no store was
open is kept apart (`closed_s`, by the wall clock), because a jump across a restart looks the same.

The sketch is a count-min sketch (Cormode and Muthukrishnan 2005) of maxima: each row's cell keeps
the latest use of any page that falls on it, and an answer is the minimum over the rows. Invariant:
an answer is never before the page's last use, so nothing looks older than it is.
"""

from __future__ import annotations

import struct
from array import array
from bisect import bisect_right
from dataclasses import dataclass, field

import numpy as np

from tierkv.storage.clock import Clock
from tierkv.storage.types import PageKey, TierName

ROWS = 2
CELLS_PER_PAGE = 2
"""With both rows, about one page in seven of a full store looks younger than it is."""

OWNERS_MAX = 65536
"""Owners whose last use is remembered; past it the one idle for longest is forgotten."""

REUSE_GAP_BOUNDS_S = (1, 10, 60, 600, 3600, 6 * 3600, 24 * 3600, 7 * 24 * 3600)
"""Upper bounds, exclusive, of the reuse gap's buckets; one more bucket is open above."""

_KEY_WORDS = struct.Struct("<16x2Q")  # The frequency sketch uses all four words; two do here.
_CELL_MAX = 2**32 - 1


@dataclass(slots=True)
class LastUseState:
    """What is saved: see LastUse for each part."""

    rows: list[bytes] = field(default_factory=list)
    """ROWS arrays of little-endian u32, of one power-of-two width."""
    reading_s: int = 0
    wall_s: int = 0
    closed_well: bool = False
    """Set by whoever loads it: nothing was used after it was saved."""
    owners: dict[int, int] = field(default_factory=dict)


class LastUse:
    """See the module docstring. Not thread-safe: the store's lock guards it."""

    def __init__(
        self, capacity_pages: int, clock: Clock, saved: LastUseState | None = None
    ) -> None:
        """Start now, or go on from `saved`. At most 32 bytes per page of capacity.

        After a kill (not closed well) the moments of the last seconds before it are lost: then
        every page counts as used when the state was saved. O(capacity).
        """
        self._clock = clock
        self._opened_s = clock.monotonic()
        self._width = 1 << max(6, (max(1, capacity_pages) * CELLS_PER_PAGE - 1).bit_length())
        self._gaps = {tier: [0] * (len(REUSE_GAP_BOUNDS_S) + 1) for tier in TierName}
        if saved is None:
            self._base_s = int(clock.wall())
            self.known_since_s = self._base_s
            self.closed_s = 0
            self._rows = [array("I", bytes(4 * self._width)) for _ in range(ROWS)]
            self._owners: dict[int, int] = {}
            return
        self._base_s = saved.reading_s
        # A wall clock that went back says that no time passed, not that time is owed.
        self.closed_s = max(0, int(clock.wall()) - saved.wall_s)
        self.known_since_s = 0 if saved.closed_well else saved.reading_s
        self._rows = [array("I", _resized(row, self._width)) for row in saved.rows]
        self._owners = dict(saved.owners)

    @property
    def opened_at_s(self) -> int:
        """The clock's reading when this store was opened."""
        return self._base_s

    def now_s(self) -> int:
        """The clock's reading: seconds that a store was open, plus a constant."""
        elapsed = max(0.0, self._clock.monotonic() - self._opened_s)
        return min(_CELL_MAX, self._base_s + int(elapsed))

    def record(self, key: PageKey, owner: int = 0) -> None:
        """Note a use of `key` now. O(1)."""
        now = self.now_s()
        for row, cell in zip(self._rows, self._cells(key), strict=True):
            row[cell] = max(row[cell], now)
        self._owners.pop(owner, None)
        self._owners[owner] = now
        if len(self._owners) > OWNERS_MAX:
            # Entries are in the order of use, so the first is the one idle for longest.
            del self._owners[next(iter(self._owners))]

    def reused(self, key: PageKey, tier: TierName) -> None:
        """Count the time since the last use of `key`, which is handed out from `tier` now."""
        gap = self.now_s() - self.used_at_s(key)
        self._gaps[tier][bisect_right(REUSE_GAP_BOUNDS_S, gap)] += 1

    def used_at_s(self, key: PageKey) -> int:
        """The clock's reading at the last use of `key`, or somewhat later; never earlier."""
        cells = zip(self._rows, self._cells(key), strict=True)
        return max(self.known_since_s, min(row[cell] for row, cell in cells))

    def owner_wall_s(self, owner: int) -> float:
        """When a page of `owner` was last used, in seconds since the Unix epoch."""
        used = self._owners.get(owner, self.known_since_s)
        idle = self.now_s() - used
        if used < self._base_s:
            idle += self.closed_s
        return max(0.0, self._clock.wall() - idle)

    def reuse_gaps(self) -> dict[TierName, tuple[int, ...]]:
        """Reuses counted per tier and bucket of REUSE_GAP_BOUNDS_S; tiers with none left out."""
        return {tier: tuple(counts) for tier, counts in self._gaps.items() if any(counts)}

    def state(self) -> LastUseState:
        """A copy for saving. O(capacity)."""
        return LastUseState(
            rows=[np.array(row, "<u4").tobytes() for row in self._rows],
            reading_s=self.now_s(),
            wall_s=int(self._clock.wall()),
            owners=dict(self._owners),
        )

    def check(self) -> None:
        """Assert the bounds and that no moment lies in the future. O(capacity)."""
        now = self.now_s()
        for row in self._rows:
            assert len(row) == self._width, "a row grew"
            assert max(row) <= now, (max(row), now)
        assert len(self._owners) <= OWNERS_MAX, len(self._owners)

    def _cells(self, key: PageKey) -> list[int]:
        # The key is a uniform digest: each row takes eight bytes of its own as its hash.
        return [word & (self._width - 1) for word in _KEY_WORDS.unpack(key)]


def _resized(row: bytes, width: int) -> bytes:
    """The row at another power-of-two width, so that no page looks older than before."""
    cells = np.frombuffer(row, "<u4").astype(np.uint32)
    if len(cells) < width:
        cells = np.tile(cells, width // len(cells))
    elif len(cells) > width:
        cells = cells.reshape(-1, width).max(axis=0)
    return cells.tobytes()
