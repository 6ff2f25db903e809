"""What goes down a tier and when: frequency sketch, admission, write policies.

Owns counters only and does no I/O: the store asks, the mover acts. Knows page keys as opaque
32-byte digests. Invariants: a sketch never grows; its counters stay within COUNTER_MAX; an
estimate never falls below the true count since the last halvings. Called by storage.store's
parts with the store's lock held; nothing here is thread-safe on its own.
"""

from __future__ import annotations

import struct
from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from tierkv.storage.base import Tier
from tierkv.storage.errors import ConfigError
from tierkv.storage.types import KEY_BYTES, PageKey

ROWS = 4
COUNTER_MAX = 255
SAMPLES_PER_PAGE = 10
"""Halve after this many records per page of capacity (TinyLFU's sample size W = 10 C)."""

COUNTERS_PER_PAGE = 4
"""Row width per page: keeps the over-estimate below one for a full tier of distinct pages."""

_KEY_WORDS = struct.Struct("<4Q")
_HALVED = bytes(value >> 1 for value in range(COUNTER_MAX + 1))


class WritePolicy(StrEnum):
    """When a page committed in host is copied to the next lower tier."""

    WRITE_BACK = "write_back"
    """When it leaves host: copied ahead of need while it is among the coldest."""
    WRITE_THROUGH = "write_through"
    """As soon as it is committed."""
    WRITE_THROUGH_SELECTIVE = "write_through_selective"
    """As soon as it was asked for `selective_hits` times after its commit."""


class AdmissionName(StrEnum):
    """The admission classes by the name a configuration uses."""

    ALL = "admit_all"
    HOTNESS = "hotness"


@dataclass(frozen=True, slots=True)
class SketchState:
    """A sketch's counters for saving: ROWS rows of one power-of-two width, a byte a cell."""

    rows: list[bytes]
    sample: int


class FrequencySketch:
    """Decayed count of how often each page was asked for, in bounded memory.

    A count-min sketch (Cormode and Muthukrishnan 2005) with conservative update, aged by halving
    all counters once a sample is full (TinyLFU: Einziger, Friedman and Manes, ACM Transactions
    on Storage 2017). Where we differ: page keys are uniform cryptographic digests, so each row
    takes its own eight bytes of the key as its hash and no seed is needed, which makes estimates
    equal in every process; and counters are bytes, so halving is one table translation.

    `capacity_pages` is the size of the tiers it judges; memory is at most 32 bytes per page.
    With `saved` counts go on, also at another capacity: estimates then only become larger.
    """

    def __init__(self, capacity_pages: int, saved: SketchState | None = None) -> None:
        if capacity_pages < 1:
            raise ConfigError(
                f"frequency sketch: capacity_pages is {capacity_pages}, expected at least 1; "
                "size it for the pages of the tiers it judges"
            )
        width = 1 << max(6, (capacity_pages * COUNTERS_PER_PAGE - 1).bit_length())
        self._mask = width - 1
        self._rows = [bytearray(width) for _ in range(ROWS)]
        self._sample = 0
        self.sample_max = max(64, capacity_pages * SAMPLES_PER_PAGE)
        self.halvings = 0
        if saved is not None:
            self._rows = [bytearray(_resized(row, width)) for row in saved.rows]
            self._sample = min(saved.sample, self.sample_max - 1)

    def state(self) -> SketchState:
        """A copy for saving. O(capacity)."""
        return SketchState([bytes(row) for row in self._rows], self._sample)

    def record(self, key: PageKey) -> int:
        """Count one use of `key` and return the new estimate. Amortised O(1)."""
        cells = self._cells(key)
        low = min(row[cell] for row, cell in zip(self._rows, cells, strict=True))
        if low < COUNTER_MAX:
            for row, cell in zip(self._rows, cells, strict=True):
                if row[cell] == low:
                    row[cell] = low + 1
        self._sample += 1
        if self._sample >= self.sample_max:
            self._halve()
            return self.estimate(key)
        return min(low + 1, COUNTER_MAX)

    def estimate(self, key: PageKey) -> int:
        """Decayed number of uses of `key`, at most COUNTER_MAX. Read-only. O(1)."""
        return min(row[cell] for row, cell in zip(self._rows, self._cells(key), strict=True))

    def check(self) -> None:
        """Assert that memory and sample are within their bounds. O(1)."""
        assert len(self._rows) == ROWS, len(self._rows)
        assert all(len(row) == self._mask + 1 for row in self._rows), "a sketch row grew"
        assert 0 <= self._sample < self.sample_max, (self._sample, self.sample_max)

    def _cells(self, key: PageKey) -> list[int]:
        if len(key) != KEY_BYTES:
            raise ValueError(f"page key: expected {KEY_BYTES} bytes, got {len(key)}")
        return [word & self._mask for word in _KEY_WORDS.unpack(key)]

    def _halve(self) -> None:
        self._rows = [row.translate(_HALVED) for row in self._rows]
        self._sample //= 2
        self.halvings += 1


def _resized(row: bytes, width: int) -> bytes:
    """The row at another power-of-two width: a wider one repeats it, a narrower one folds it."""
    cells = np.frombuffer(row, np.uint8)
    if len(cells) < width:
        cells = np.tile(cells, width // len(cells))
    elif len(cells) > width:
        cells = cells.reshape(-1, width).max(axis=0)
    return cells.tobytes()


class Admission(ABC):
    """Decides whether a page is worth a write to a lower tier. Does no I/O."""

    name: AdmissionName

    @abstractmethod
    def admit(self, key: PageKey, lower: Tier, pending_pages: int) -> bool:
        """Say whether `key` may be written to `lower`, where `pending_pages` are on their way.

        Read-only: asks `lower` only for its sizes and its next victim. O(1).
        """


class AdmitAll(Admission):
    """Every page may go down."""

    name = AdmissionName.ALL

    def admit(self, key: PageKey, lower: Tier, pending_pages: int) -> bool:
        return True


class Hotness(Admission):
    """A page goes down when there is room, or when it is at least as hot as what it displaces.

    The rule of TinyLFU's admission filter, with ties in favour of the newcomer: a page that
    just left host was used more recently than the lower tier's coldest.
    """

    name = AdmissionName.HOTNESS

    def __init__(self, sketch: FrequencySketch) -> None:
        self._sketch = sketch

    def admit(self, key: PageKey, lower: Tier, pending_pages: int) -> bool:
        if lower.stats().free_pages > pending_pages:
            return True
        victims = lower.victims(1)
        if not victims:
            # Everything there is leased: nothing could be displaced for this page.
            return False
        return self._sketch.estimate(key) >= self._sketch.estimate(victims[0])


def make_admission(name: AdmissionName, sketch: FrequencySketch) -> Admission:
    """Build the admission class that a configuration names."""
    if name is AdmissionName.ALL:
        return AdmitAll()
    return Hotness(sketch)
