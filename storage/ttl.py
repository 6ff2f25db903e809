"""Time to live: pages of an owner that nobody used for long enough are removed.

Owns each owner's limit and the walk over pages under way. Removes through the store, a bounded
batch at a time; when a page was used is storage.last_use's knowledge. Called by the daemon now
and then through TieredStore.expire().

What counts as time, so that a clock that jumps cannot empty a store:
- While a store is open, seconds of the monotonic clock. A jump of the wall clock changes nothing.
- While none was open, seconds of the wall clock, but at most half of the owner's limit, and only
  for pages not used since: a jump across a restart, or a weekend switched off, can only expire
  what had been idle for half its limit before.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tierkv.storage.errors import ConfigError
from tierkv.storage.last_use import LastUse
from tierkv.storage.types import PageKey, TierName

REMOVE_PAGES_MAX = 1024
"""Removed by one call; on nvme each batch is one index transaction."""
EXAMINE_PAGES_MAX = 8192
"""Looked at by one call."""
WALK_COST_PAGES = 1024
"""Listing one owner's pages counts as looking at this many: it is O(capacity) all the same."""
LIMITS_MAX = 65536


@dataclass(slots=True)
class _Walk:
    """Pages of one owner in one tier still to be looked at, coldest last."""

    tier: TierName
    owner: int
    keys: list[PageKey] = field(default_factory=list)


class TimeToLive:
    """See the module docstring. Thread-safe; expire() runs in one thread at a time.

    `keys_of(owner, tier)` lists pages coldest first; `remove(keys, tier)` removes them and
    returns how many; `lock` is the store's and guards `last_use`.
    """

    def __init__(
        self,
        last_use: LastUse,
        lock: threading.RLock,
        tiers: Sequence[TierName],
        keys_of: Callable[[int, TierName], list[PageKey]],
        remove: Callable[[list[PageKey], TierName], int],
    ) -> None:
        self._last_use = last_use
        self._lock = lock
        self._tiers = list(tiers)
        self._keys_of = keys_of
        self._remove = remove
        self._limits: dict[int, float] = {}
        self._walks: list[_Walk] = []
        self._running = threading.Lock()

    def set_limit(self, owner: int, seconds: float | None) -> None:
        """Expire pages of `owner` this long after their last use; None: never.

        ConfigError when it is not above 0, or too many owners have one.
        """
        if seconds is not None and not seconds > 0:
            raise ConfigError(
                f"set ttl: owner {owner}: {seconds} s, expected above 0; leave it out for no limit"
            )
        with self._lock:
            if seconds is None:
                self._limits.pop(owner, None)
                return
            if owner not in self._limits and len(self._limits) >= LIMITS_MAX:
                raise ConfigError(
                    f"set ttl: {LIMITS_MAX} owners have one already; clear one of theirs first"
                )
            self._limits[owner] = seconds

    def limits(self) -> dict[int, float]:
        """Seconds by owner."""
        with self._lock:
            return dict(self._limits)

    def expire(self) -> int:
        """Remove the next batch of expired pages; returns how many, from all tiers together.

        Looks at up to EXAMINE_PAGES_MAX pages and removes up to REMOVE_PAGES_MAX; goes on where
        the last call stopped and starts anew when it has seen all. 0 while another thread is at
        it. O(pages of one owner) when a walk starts.
        """
        if not self._running.acquire(blocking=False):
            return 0
        try:
            return self._expire()
        finally:
            self._running.release()

    def _expire(self) -> int:
        if not self._walks:
            owners = sorted(self.limits())
            self._walks = [_Walk(tier, owner) for owner in owners for tier in self._tiers]
            self._start_walk()
        examined = removed = 0
        while self._walks and examined < EXAMINE_PAGES_MAX and removed < REMOVE_PAGES_MAX:
            walk = self._walks[-1]
            room = min(EXAMINE_PAGES_MAX - examined, REMOVE_PAGES_MAX - removed)
            batch = [walk.keys.pop() for _ in range(min(room, len(walk.keys)))]
            examined += len(batch)
            old = self._expired(batch, walk.owner)
            removed += self._remove(old, walk.tier) if old else 0
            if not walk.keys:
                self._walks.pop()
                self._start_walk()
                examined += WALK_COST_PAGES
        return removed

    def _start_walk(self) -> None:
        """List the pages of the walk that is next; only one walk's keys are held at a time."""
        if self._walks:
            walk = self._walks[-1]
            walk.keys = self._keys_of(walk.owner, walk.tier)[::-1]

    def _expired(self, keys: list[PageKey], owner: int) -> list[PageKey]:
        with self._lock:
            limit = self._limits.get(owner)
            if limit is None:
                return []
            now, opened = self._last_use.now_s(), self._last_use.opened_at_s
            closed_s = min(self._last_use.closed_s, limit / 2)
            found = []
            for key in keys:
                used = self._last_use.used_at_s(key)
                idle = now - used + (closed_s if used < opened else 0)
                if idle >= limit:
                    found.append(key)
            return found

    def check(self) -> None:
        """Assert the bounds. O(owners)."""
        with self._lock:
            assert len(self._limits) <= LIMITS_MAX, len(self._limits)
            assert all(seconds > 0 for seconds in self._limits.values()), "a limit of nothing"
