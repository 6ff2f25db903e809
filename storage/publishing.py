"""Host slots for writers, and the commit that makes their pages visible.

Owns the counts of slots in writers' hands and of pages refused. Asks storage.demotion for room and
tells it what was committed; quotas are storage.room's. Called by storage.store and by the
reservations made here.

Invariants: an owner's commits never exceed its ceilings; what is refused is counted.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

from tierkv.storage.base import MappedTier, Reservation
from tierkv.storage.demotion import Demoter
from tierkv.storage.neighbours import Neighbours
from tierkv.storage.quota import QuotaBook
from tierkv.storage.reservation import TieredReservation
from tierkv.storage.room import Room
from tierkv.storage.types import CommitOutcome, PageKey


class Publisher:
    """See the module docstring. `lock` is the store's and guards the counts."""

    def __init__(
        self,
        host: MappedTier,
        room: Room,
        book: QuotaBook,
        demoter: Demoter,
        neighbours: Neighbours,
        lock: threading.RLock,
    ) -> None:
        self._host = host
        self._room = room
        self._book = book
        self._demoter = demoter
        self._neighbours = neighbours
        self._lock = lock
        self.open_slots = 0
        """Reserved and neither committed nor given back."""
        self.rejected = 0
        """Slots asked for and not given, plus pages whose commit failed."""

    def reserve(self, count: int, owner: int) -> TieredReservation:
        """PageStore.reserve."""
        with self._lock:
            self._demoter.make_room_locked(count, owner)
            held = self._host.reserve(count)
            self.open_slots += len(held)
            self.rejected += count - len(held)
        return TieredReservation(self, self._host, held)

    def publish(
        self, held: Reservation, keys: Sequence[PageKey], owner: int
    ) -> list[CommitOutcome]:
        """Commit sealed host slots, as far as the owner's ceilings allow, and apply the write
        policy. By TieredReservation only.
        """
        if self._book.limits(self._host.name, owner):
            with self._lock:
                outcomes = self._publish_limited(held, keys, owner)
        else:
            outcomes = self._host.commit(held, keys, owner)
        pairs = list(zip(keys, outcomes, strict=True))
        new = [key for key, was in pairs if was is CommitOutcome.COMMITTED]
        again = [key for key, was in pairs if was is CommitOutcome.EXISTS]
        with self._lock:
            self.rejected += outcomes.count(CommitOutcome.FAILED)
            self._host.touch(again)
            self._neighbours.gained_locked(new)
            self._demoter.committed_locked(new, owner)
        return outcomes

    def closed_slots(self, count: int) -> None:
        """Account for reserved slots that were committed or given back."""
        with self._lock:
            self.open_slots -= count

    def _publish_limited(
        self, held: Reservation, keys: Sequence[PageKey], owner: int
    ) -> list[CommitOutcome]:
        """Commit the leading keys that fit below the owner's ceilings; refuse the others.

        The tail is refused because a page is worth nothing without those before it.
        """
        absent = [not there for there in self._host.lookup(keys)]
        admitted = self._room.admit(owner, sum(absent))
        try:
            fits = bisect_right(list(accumulate(absent)), admitted)
            outcomes = self._host.commit(held, keys[:fits], owner)
        finally:
            self._room.settle(owner, admitted)
        # A page may have left between the look and the commit: then one came in too many.
        self._room.shrink(owner)
        for there in self._host.lookup(keys[fits:]):
            outcomes.append(CommitOutcome.EXISTS if there else CommitOutcome.FAILED)
        return outcomes
