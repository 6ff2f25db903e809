"""Flush: every host page that nvme lacks is copied there, and waited for.

Owns nothing. Copies through storage.demotion, past admission. Called by TieredStore.flush, in the
caller's thread, which waits with no lock held.
"""

from __future__ import annotations

import threading

from tierkv.storage.base import MappedTier
from tierkv.storage.clock import Clock
from tierkv.storage.demotion import Demoter, Lower
from tierkv.storage.mover import Refusal
from tierkv.storage.types import PageKey


class Flusher:
    """See the module docstring. `lock` is the store's."""

    def __init__(
        self,
        host: MappedTier,
        lower: Lower,
        demoter: Demoter,
        lock: threading.RLock,
        clock: Clock,
    ) -> None:
        self._host = host
        self._lower = lower
        self._demoter = demoter
        self._lock = lock
        self._clock = clock

    def flush(self, deadline_s: float) -> bool:
        """False when the deadline passed first, or a page could not be written or kept there.

        O(host pages).
        """
        lower = self._lower
        deadline = self._clock.monotonic() + deadline_s
        # Leased pages too: a copy that is under way now may fail yet.
        keys = self._host.keys_of()
        there = lower.holds(keys)
        # What is written now must not displace the copies that host pages have there already.
        lower.tier.touch([key for key, found in zip(keys, there, strict=True) if found])
        for key, found in zip(keys, there, strict=True):
            if not found and not self._queue(key, deadline):
                return False
        left = deadline - self._clock.monotonic()
        if not lower.mover.wait_ended(lower.mover.demotions(), left):
            return False
        safe = zip(lower.holds(keys), self._host.lookup(keys), strict=True)
        return all(found or not in_host for found, in_host in safe)

    def _queue(self, key: PageKey, deadline: float) -> bool:
        """Queue one page, waiting for room in the queue; False when it cannot be before then."""
        while self._lower.mover.wait_demote_room(deadline - self._clock.monotonic()):
            with self._lock:
                queued = self._demoter.queue_locked(key, deadline)
            # Another thread may have taken the room; a page that left host needs no copy.
            if queued is not Refusal.QUEUE_FULL:
                return queued is not Refusal.CLOSING
        return False
