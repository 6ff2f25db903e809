"""Keys that are remembered for a while, a bounded number of them.

Owns an ordered map of moments. Knows nothing of what it means that a key is in it. Called by
storage.mooncake.remote. Invariant: never more than `keys_max`; the oldest go first.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable

from tierkv.storage.clock import Clock
from tierkv.storage.types import PageKey


class ExpiringKeys:
    """Thread-safe; never waits."""

    def __init__(self, clock: Clock, keys_max: int, keep_s: float) -> None:
        self._clock = clock
        self._keys_max = keys_max
        self._keep_s = keep_s
        self._lock = threading.Lock()
        # In the order in which they end: all are kept for the same time from their adding.
        self._until: dict[PageKey, float] = {}

    def __contains__(self, key: PageKey) -> bool:
        with self._lock:
            until = self._until.get(key)
        return until is not None and self._clock.monotonic() < until

    def __len__(self) -> int:
        """Keys that are remembered now. Amortised O(1)."""
        with self._lock:
            self._forget_ended(self._clock.monotonic())
            return len(self._until)

    def add(self, keys: Iterable[PageKey]) -> None:
        """Remember `keys` from now on, forgetting the oldest if there is no room."""
        now = self._clock.monotonic()
        with self._lock:
            self._forget_ended(now)
            for key in keys:
                self._until.pop(key, None)
                self._until[key] = now + self._keep_s
                if len(self._until) > self._keys_max:
                    del self._until[next(iter(self._until))]

    def discard(self, keys: Iterable[PageKey]) -> None:
        """Forget `keys`."""
        with self._lock:
            for key in keys:
                self._until.pop(key, None)

    def check(self) -> None:
        """Assert the bound and the order. O(keys)."""
        with self._lock:
            assert len(self._until) <= self._keys_max, len(self._until)
            moments = list(self._until.values())
            assert moments == sorted(moments), "keys out of the order in which they end"

    def _forget_ended(self, now: float) -> None:
        while self._until:
            oldest = next(iter(self._until))
            if self._until[oldest] > now:
                return
            del self._until[oldest]
