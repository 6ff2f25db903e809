"""What each owner has in a store, and what a manager does about it: quota, time to live, removal.

Owns the time-to-live walk. Knows owners as numbers: what a namespace or tenant is, the daemon
knows. Called by storage.store. Nothing here runs on the path of a request: listing an owner's
pages is O(capacity), and removals from nvme wait until they are durable.

Lock order: the store's lock, then a tier's. Never held over I/O.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

from tierkv.storage.base import MappedTier, OwnerUsage, Tier
from tierkv.storage.clock import Clock
from tierkv.storage.demotion import Demoter, Lower
from tierkv.storage.eviction_log import EvictionReason
from tierkv.storage.last_use import LastUse
from tierkv.storage.quota import Quota, QuotaBook
from tierkv.storage.room import Room
from tierkv.storage.ttl import TimeToLive
from tierkv.storage.types import PageKey, TierName

DROP_BATCH_PAGES = 1024
"""Removed from nvme by one index transaction."""
DROP_ROUNDS_MAX = 4
"""Copies under way can bring a dropped page back; each round waits for them and looks again."""


class Owners:
    """See the module docstring. `lock` is the store's. Thread-safe."""

    def __init__(
        self,
        host: MappedTier,
        lower: Lower | None,
        room: Room,
        demoter: Demoter,
        book: QuotaBook,
        last_use: LastUse,
        lock: threading.RLock,
        clock: Clock,
        end_pulls: Callable[[int, float], None],
    ) -> None:
        """`end_pulls(owner, timeout_s)` ends what of the owner is on its way from elsewhere."""
        self._end_pulls = end_pulls
        self._host = host
        self._lower = lower
        self._room = room
        self._demoter = demoter
        self._book = book
        self._last_use = last_use
        self._lock = lock
        self._clock = clock
        self.ttl = TimeToLive(last_use, lock, [*self._tiers()], self.keys_of, self._expire)

    def usage(self) -> dict[int, OwnerUsage]:
        """Every owner that has a page somewhere. O(owners)."""
        counts = {name: tier.owners() for name, tier in self._tiers().items()}
        slot_bytes = {name: tier.stats().slot_bytes for name, tier in self._tiers().items()}
        found: dict[int, OwnerUsage] = {}
        with self._lock:
            for owner in sorted(set[int]().union(*counts.values())):
                pages = {name: count.get(owner, 0) for name, count in counts.items()}
                sizes = {name: count * slot_bytes[name] for name, count in pages.items()}
                found[owner] = OwnerUsage(pages, sizes, self._last_use.owner_wall_s(owner))
        return found

    def keys_of(self, owner: int, tier: TierName) -> list[PageKey]:
        """The owner's pages in one tier, coldest first. O(capacity). Empty without that tier."""
        found = self._tiers().get(tier)
        if found is None or owner not in found.owners():
            return []
        return found.keys_of(owner)

    def drop(self, owner: int, timeout_s: float) -> int:
        """Remove all pages of `owner` from every tier; returns how many pages there were.

        Leased ones go when their last lease ends. Waits until the removal is durable, and up to
        `timeout_s` for copies between tiers that could bring one back. What a remote tier has
        stays there.
        """
        deadline = self._clock.monotonic() + timeout_s
        self._end_pulls(owner, timeout_s)
        gone: set[PageKey] = set()
        for _ in range(DROP_ROUNDS_MAX):
            keys = {name: self.keys_of(owner, name) for name in self._tiers()}
            if not any(keys.values()):
                break
            for name, listed in keys.items():
                gone.update(listed)
                self.remove(listed, name, EvictionReason.DROPPED)
            if self._lower is None:
                break
            mover = self._lower.mover
            jobs = mover.jobs_of(owner)
            for job in jobs:
                mover.cancel(job)
            mover.wait_ended(jobs, deadline - self._clock.monotonic())
        return len(gone)

    def remove(self, keys: list[PageKey], tier: TierName, reason: EvictionReason) -> int:
        """Remove pages from one tier, in bounded batches; returns how many."""
        if tier is TierName.HOST:
            with self._lock:
                self._demoter.gone_locked(keys)
                there = self._present(self._host, keys)
                removed = self._host.drop(there)
            self._room.removed(there, reason)
            return removed
        assert self._lower is not None and tier is self._lower.tier.name, tier
        removed = 0
        for start in range(0, len(keys), DROP_BATCH_PAGES):
            there = self._present(self._lower.tier, keys[start : start + DROP_BATCH_PAGES])
            count = self._lower.tier.drop(there)
            if count:
                self._lower.room.removed(there, reason)
            removed += count
        return removed

    def set_quota(self, owner: int, quota: Quota | None) -> None:
        """Set or clear one owner's quota and evict what exceeds it; see QuotaBook.set_owner."""
        self._book.set_owner(owner, quota)
        self._shrink(owner)

    def set_group_quota(self, name: str, owners: Iterable[int], quota: Quota | None) -> None:
        """Set or clear the quota of several owners together; see QuotaBook.set_group."""
        members = list(owners)
        self._book.set_group(name, members, quota)
        if members:
            self._shrink(members[0])

    def _shrink(self, owner: int) -> None:
        with self._lock:
            self._room.shrink(owner)
        if self._lower is not None:
            self._lower.room.shrink(owner)

    def _expire(self, keys: list[PageKey], tier: TierName) -> int:
        return self.remove(keys, tier, EvictionReason.EXPIRED)

    @staticmethod
    def _present(tier: Tier, keys: list[PageKey]) -> list[PageKey]:
        return [key for key, there in zip(keys, tier.lookup(keys), strict=True) if there]

    def _tiers(self) -> dict[TierName, Tier]:
        tiers: dict[TierName, Tier] = {self._host.name: self._host}
        if self._lower is not None:
            tiers[self._lower.tier.name] = self._lower.tier
        return tiers
