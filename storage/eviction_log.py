"""What left a tier lately and why, so that `explain` can say when a page was evicted.

Owns a bounded ring of removals, one entry per page and tier: the latest. Knows neither tiers nor
policies. Invariants: at most `capacity` entries, oldest forgotten first; counts never shrink;
whoever listens is told of every removal. Called by whatever removes pages, from any thread.
"""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from tierkv.storage.clock import Clock
from tierkv.storage.types import PageKey, TierName

CAPACITY = 16384
"""About 4 MiB when full."""


class EvictionReason(StrEnum):
    """Why a page left a tier."""

    ROOM = "room"
    """Colder than what came in its place."""
    QUOTA = "quota"
    """Its owner, or a group of owners, had reached a ceiling."""
    EXPIRED = "expired"
    """Its owner's time to live had passed since its last use."""
    DROPPED = "dropped"
    """Somebody asked for its removal by key or by owner."""
    TRIMMED = "trimmed"
    """Somebody asked for a smaller tier."""
    CORRUPT = "corrupt"
    """It failed its checksum."""


@dataclass(frozen=True, slots=True)
class Eviction:
    """One removal. `wall_s` in seconds since the Unix epoch."""

    key: PageKey
    tier: TierName
    wall_s: float
    reason: EvictionReason


class EvictionLog:
    """See the module docstring. Thread-safe."""

    def __init__(self, clock: Clock, capacity: int = CAPACITY) -> None:
        assert capacity >= 1, capacity
        self._clock = clock
        self._capacity = capacity
        self._lock = threading.Lock()
        self._latest: OrderedDict[tuple[PageKey, TierName], Eviction] = OrderedDict()
        self._counts: Counter[EvictionReason] = Counter()
        self._listener: Callable[[Sequence[PageKey]], None] | None = None

    def listen(self, listener: Callable[[Sequence[PageKey]], None]) -> None:
        """Tell `listener` of the pages of every later removal, in the thread that records it.

        It is called with no lock of the log held and must not wait. One listener at most.
        """
        assert self._listener is None, "the log of removals has one listener"
        self._listener = listener

    def record(self, keys: Sequence[PageKey], tier: TierName, reason: EvictionReason) -> None:
        """Note that these pages left `tier` now. O(pages)."""
        now = self._clock.wall()
        with self._lock:
            self._counts[reason] += len(keys)
            for key in keys:
                self._latest.pop((key, tier), None)
                self._latest[key, tier] = Eviction(key, tier, now, reason)
            while len(self._latest) > self._capacity:
                self._latest.popitem(last=False)
        if self._listener is not None:
            self._listener(keys)

    def evicted_when(self, key: PageKey) -> list[Eviction]:
        """The latest removal of `key` from each tier, newest first; empty when not known. O(1)."""
        with self._lock:
            found = [self._latest.get((key, tier)) for tier in TierName]
        known = [eviction for eviction in found if eviction is not None]
        return sorted(known, key=lambda eviction: eviction.wall_s, reverse=True)

    def counts(self) -> dict[EvictionReason, int]:
        """Pages removed by reason since the store was opened, those forgotten included."""
        with self._lock:
            return dict(self._counts)

    def check(self) -> None:
        """Assert the bound. O(1)."""
        with self._lock:
            assert len(self._latest) <= self._capacity, len(self._latest)
            assert len(self._latest) <= self._counts.total(), "more entries than removals"
