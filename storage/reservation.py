"""Host slots in the hands of a writer; see StoreReservation.

Owns the tier's reservation until it is committed or given back. Does not know write policies or
quotas: the store that made it publishes and accounts. Used by one thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from tierkv.storage.base import MappedTier, Reservation, StoreReservation
from tierkv.storage.checksum import payload_checksum
from tierkv.storage.types import CommitOutcome, PageKey


class ReservationOwner(Protocol):
    """What a reservation needs from the store that made it."""

    def publish(
        self, held: Reservation, keys: Sequence[PageKey], owner: int
    ) -> list[CommitOutcome]:
        """Commit sealed slots in host and apply quotas and write policy."""
        ...

    def closed_slots(self, count: int) -> None:
        """Account for reserved slots that were committed or given back."""
        ...


class TieredReservation(StoreReservation):
    """See StoreReservation."""

    def __init__(self, store: ReservationOwner, host: MappedTier, held: Reservation) -> None:
        self._store = store
        self._host = host
        self._held = held
        self._closed = False
        self._refused: set[int] = set()
        self.views = [host.payload(held, index) for index in range(len(held))]
        self.slots = [int(slot) for slot in held.slots]

    def commit(
        self,
        keys: Sequence[PageKey],
        checksums: Sequence[bytes] | None = None,
        owner: int = 0,
    ) -> list[CommitOutcome]:
        assert not self._closed, "a reservation is committed once"
        assert len(keys) <= len(self.views), (len(keys), len(self.views))
        assert checksums is None or len(checksums) == len(keys), "one checksum a key"
        for index in range(len(keys)):
            if index not in self._refused:
                self._host.seal(self._held, index, None if checksums is None else checksums[index])
        outcomes = self._store.publish(self._held, keys, owner)
        self._close()
        return outcomes

    def refuse(self, indexes: Iterable[int]) -> None:
        """Keep these views from being published: commit() frees their slots and says FAILED, or
        EXISTS of a key that is there already. For a writer whose bytes are not what it said.
        """
        assert not self._closed, "a closed reservation holds no slots"
        self._refused.update(indexes)
        assert self._refused <= set(range(len(self.views))), sorted(self._refused)

    def verify(self, index: int, checksum: bytes) -> bool:
        assert not self._closed, "a closed reservation holds no slots"
        return payload_checksum(self.views[index]) == checksum

    def release(self) -> None:
        if not self._closed:
            self._held.release()
            self._close()

    def _close(self) -> None:
        self._closed = True
        # Whoever still holds a view must not find it here: the slot may be another page's now.
        count, self.views, self.slots = len(self.views), [], []
        self._store.closed_slots(count)
