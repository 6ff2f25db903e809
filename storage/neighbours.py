"""A store's side of its remote tier: what it tells it, asks of it, and holds for it meanwhile.

Owns the binding and, until a pull has ended, the room in host that was admitted for its page.
Does not know which pages a request wants (storage.promotion does), nor where they come from.
Without a remote tier every method returns at once. Called by storage.store, storage.promotion,
storage.demotion, storage.publishing and, through the log of removals, by whatever removes pages.

Lock order: the store's lock, then the remote's own. Nothing here waits with the store's lock held.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from itertools import groupby

from tierkv.storage.bandwidth import Bandwidth, Way
from tierkv.storage.base import MappedTier, RemoteStats
from tierkv.storage.eviction_log import EvictionLog
from tierkv.storage.remote import POOL_OWNER, LocalStore, Pull, Remote
from tierkv.storage.room import Room
from tierkv.storage.types import PageKey, TierName


class Neighbours:
    """See the module docstring. `lock` is the store's; methods named _locked need it held."""

    def __init__(
        self, host: MappedTier, room: Room, evictions: EvictionLog, lock: threading.RLock
    ) -> None:
        """`room` is host's."""
        self._host = host
        self._room = room
        self._evictions = evictions
        self._lock = lock
        self._remote: Remote | None = None
        self._early: list[PageKey] | None = None
        """Pages that became visible while the remote was binding: it has not heard of them."""
        self._early_lost: list[PageKey] = []
        """Pages that left meanwhile: what it has told others already may name them."""
        self._listening = False

    def attach(
        self, remote: Remote, store: LocalStore, bandwidth: Bandwidth, lookup_s: float
    ) -> None:
        """Bind `remote`, once. Raises what bind raises; then there is still no remote tier.

        `lookup_s` bounds what ask() waits. Waits as long as bind does, without the lock.
        """
        with self._lock:
            assert self._remote is None and self._early is None, "a store has one remote tier"
            self._early, self._early_lost = [], []
            if not self._listening:
                self._listening = True
                self._evictions.listen(self._lost)
        try:
            read, write = (bandwidth.meter(TierName.REMOTE, way) for way in (Way.READ, Way.WRITE))
            remote.bind(store, read, write)
        except BaseException:
            with self._lock:
                self._early = None
            raise
        with self._lock:
            early, self._early = self._early, None
            lost, self._early_lost = self._early_lost, []
            self._lookup_s = lookup_s
            self._remote = remote
            if lost:
                remote.lost(lost)
            self.gained_locked(early or [])

    @property
    def attached(self) -> bool:
        """True once a remote tier is bound."""
        return self._remote is not None

    # --- reading --------------------------------------------------------------------------

    def holds(self, keys: Sequence[PageKey]) -> list[bool]:
        """Remote.holds; nothing without a remote tier."""
        if self._remote is None or not keys:
            return [False] * len(keys)
        return self._remote.holds(keys)

    @property
    def lookup_waits(self) -> bool:
        """Whether refresh() may wait."""
        return self._remote is not None and self._remote.lookup_waits

    def refresh(self, keys: Sequence[PageKey]) -> None:
        """Let the remote find out about `keys` where it cannot know by itself. Waits, bounded:
        with no lock held."""
        if self._remote is not None and self._remote.lookup_waits and keys:
            self._remote.ask(keys, self._lookup_s)

    def pull_locked(
        self, key: PageKey, owner: int, deadline: float, on_end: Callable[[Pull], None]
    ) -> Pull | None:
        """Make a pull with its host slot and its owner's room; None when there is none.

        Ends by `on_end`, once submitted and accepted; whoever is called so calls ended_locked().
        """
        target = self._host.reserve(1)
        if not target.slots or not self._room.admit(owner, 1):
            target.release()
            return None
        return Pull(key, owner, deadline, target, on_end)

    def submit_locked(self, pulls: Sequence[Pull]) -> list[Pull]:
        """Hand over the pulls of one request; returns those refused, which hold nothing more.

        `on_end` of a pull may run before this returns, in this thread.
        """
        if not pulls:
            return []
        assert self._remote is not None, "a pull without a remote tier"
        refused = list(pulls[self._remote.submit(pulls) :])
        for pull in refused:
            pull.target.release()
            self.ended_locked(pull)
        return refused

    def ended_locked(self, pull: Pull) -> None:
        """Give back the room that was admitted for a pull, whose page has come or will not."""
        self._room.settle(pull.owner, 1)

    def cancel(self, pull: Pull) -> bool:
        """Remote.cancel. With the store's lock held or without: then waiters are told unlocked."""
        assert self._remote is not None, "a pull without a remote tier"
        return self._remote.cancel(pull)

    # --- telling --------------------------------------------------------------------------

    def gained_locked(self, keys: Sequence[PageKey]) -> None:
        """Tell of pages that became visible in host, as far as they are still there."""
        if self._early is not None:
            self._early += keys
        if self._remote is None or not keys:
            return
        # Removals are told with the lock held as well: what is here now has not been told gone.
        there = zip(keys, self._host.lookup(keys), strict=True)
        self._remote.gained([key for key, found in there if found])

    def used_locked(
        self, keys: Sequence[PageKey], uses: Sequence[int], owners: Sequence[int | None]
    ) -> None:
        """Offer pages that were committed or used, each used so often, to be copied elsewhere.

        Pages that are not in host are passed over, and those kept for others.
        """
        if self._remote is None or not keys:
            return
        there = zip(keys, uses, owners, self._host.lookup(keys), strict=True)
        offered = [(key, count, owner) for key, count, owner, found in there if found]
        for owner, group in groupby(offered, key=lambda page: page[2]):
            if owner is not None and owner != POOL_OWNER:
                pages = list(group)
                self._remote.offer([p[0] for p in pages], [p[1] for p in pages], owner)

    def _lost(self, keys: Sequence[PageKey]) -> None:
        """Tell of pages that left host or nvme. From any thread."""
        with self._lock:
            if self._remote is not None and keys:
                self._remote.lost(keys)
            elif self._early is not None:
                self._early_lost += keys

    # --- as a whole -----------------------------------------------------------------------

    @property
    def quiet(self) -> bool:
        """True when no pull is under way and no slot is held for one."""
        return self._remote is None or self._remote.quiet

    def wait_quiet(self, timeout_s: float) -> bool:
        """Wait until no pull and no copy to elsewhere is under way; False past the timeout."""
        return self._remote is None or self._remote.wait_quiet(max(0.0, timeout_s))

    def stats(self) -> RemoteStats | None:
        """None without a remote tier. O(1)."""
        return None if self._remote is None else self._remote.stats()

    def check(self) -> None:
        """Assert the remote tier's invariants. O(queued)."""
        if self._remote is not None:
            self._remote.check()

    def close(self, timeout_s: float) -> bool:
        """Remote.close: False when something may still reach into the host arena."""
        return self._remote is None or self._remote.close(max(0.0, timeout_s))
