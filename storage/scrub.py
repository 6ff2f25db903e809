"""The scrubber: rereads pages that nobody reads, so that damage is found before it is needed.

Owns a position in a walk over one tier, coldest pages first. Knows neither the mover nor rates:
the caller (the daemon) decides how often and how much. Reads are quiet: no hits, no recency.
Invariants: a walk reads each page at most once; a page that a promotion read during the walk is
not read again; memory is one reference per page and VERIFIED_MAX keys.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass

from tierkv.storage.base import Tier
from tierkv.storage.device import aligned_buffer
from tierkv.storage.errors import TierError
from tierkv.storage.eviction_log import EvictionReason
from tierkv.storage.room import Room
from tierkv.storage.types import PageKey, ReadOutcome

VERIFIED_MAX = 65536
"""Pages read by promotions that a walk remembers; more are then merely read twice."""
SKIP_PAGES_MAX = 4096
"""Pages that left or were read already, passed over by one step."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ScrubReport:
    """What one step found. Corrupt pages are quarantined and never served again."""

    checked: int
    corrupt: int
    failed: int
    """Pages the device could not read."""
    position: float
    """Share of the current walk that is done, 0 to 1; 1 when the next step starts a new one."""


class Scrubber:
    """See the module docstring. Thread-safe; one step at a time."""

    def __init__(self, tier: Tier, room: Room) -> None:
        self._tier = tier
        self._room = room
        self._stepping = threading.Lock()
        self._lock = threading.Lock()
        self._left: list[PageKey] = []
        self._total = 0
        self._verified: set[PageKey] = set()

    @property
    def busy(self) -> bool:
        """True while a step runs, which may hold one lease."""
        return self._stepping.locked()

    def verified(self, key: PageKey) -> None:
        """Note that a promotion just read and verified this page."""
        with self._lock:
            if self._left and len(self._verified) < VERIFIED_MAX:
                self._verified.add(key)

    def step(self, max_pages: int) -> ScrubReport:
        """Verify up to `max_pages` further pages. Waits for that many reads.

        Checks nothing while another thread is at it. O(capacity) when a walk starts.
        """
        if not self._stepping.acquire(blocking=False):
            return ScrubReport(0, 0, 0, self._position())
        try:
            return self._step(max_pages)
        finally:
            self._stepping.release()

    def _step(self, max_pages: int) -> ScrubReport:
        buffer = aligned_buffer(self._tier.page_bytes)
        outcomes: list[ReadOutcome] = []
        passed = 0
        self._start_walk()
        while len(outcomes) < max_pages and passed < SKIP_PAGES_MAX:
            key = self._next()
            if key is None:
                break
            outcome = self._verify(key, buffer)
            if outcome is None:
                passed += 1
            else:
                outcomes.append(outcome)
        corrupt, failed = outcomes.count(ReadOutcome.CORRUPT), outcomes.count(ReadOutcome.FAILED)
        return ScrubReport(len(outcomes), corrupt, failed, self._position())

    def _start_walk(self) -> None:
        with self._lock:
            if self._left:
                return
        # Listing a million pages takes a while: not with the lock that promotions need.
        left = self._tier.keys_of()[::-1]
        with self._lock:
            self._left, self._total = left, len(left)
            self._verified.clear()

    def _next(self) -> PageKey | None:
        with self._lock:
            while self._left:
                key = self._left.pop()
                if key not in self._verified:
                    return key
            return None

    def _verify(self, key: PageKey, buffer: memoryview) -> ReadOutcome | None:
        """Read one page; None when it is no longer there."""
        try:
            with self._tier.lease([key], quiet=True) as lease:
                if not lease.slots:
                    return None
                outcome = self._tier.read(lease, 0, buffer)
        except (TierError, OSError) as error:
            log.warning("scrub: key=%s error=%s", key.hex(), error)
            return ReadOutcome.FAILED
        if outcome is ReadOutcome.CORRUPT:
            log.warning("scrub: key=%s is corrupt in %s, quarantined", key.hex(), self._tier.name)
            self._room.removed([key], EvictionReason.CORRUPT)
        return outcome

    def _position(self) -> float:
        with self._lock:
            return 1.0 - len(self._left) / self._total if self._total else 1.0

    def check(self) -> None:
        """Assert the bounds. O(1)."""
        with self._lock:
            assert len(self._left) <= self._total, (len(self._left), self._total)
            assert len(self._verified) <= VERIFIED_MAX, len(self._verified)
