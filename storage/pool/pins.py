"""How many host pages copies may hold still at once, all peers together.

Owns a count. Knows neither pages nor peers. A page is held while its copy is being made, and for
the longest transfer more when the peer did not answer: many silent peers must not take a small
arena away from the node's own work. Invariant: what was taken and not given is within the bound.
Made by remote.py, used by pusher.py.
"""

from __future__ import annotations

import threading


class Pins:
    """Thread-safe; never waits."""

    def __init__(self, pages_max: int) -> None:
        assert pages_max >= 1, "copies hold something"
        self._pages_max = pages_max
        self._lock = threading.Lock()
        self._taken = 0

    def take(self, count: int) -> int:
        """Hold up to `count` pages more; returns how many may be."""
        with self._lock:
            count = min(count, self._pages_max - self._taken)
            self._taken += count
            return count

    def give(self, count: int) -> None:
        """Hold so many less."""
        with self._lock:
            self._taken -= count
            assert self._taken >= 0, "more was given than taken"

    @property
    def taken(self) -> int:
        """Pages held now, or about to be."""
        return self._taken

    def check(self) -> None:
        """Assert the invariant. O(1)."""
        with self._lock:
            assert 0 <= self._taken <= self._pages_max, (self._taken, self._pages_max)
