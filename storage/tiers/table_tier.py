"""What every tier over a SlotTable answers alike: who is there, whose it is, who would go next.

Owns nothing: `_lock`, `_table` and `_closed` are set by the tier's constructor. Subclasses move
bytes and make changes durable; nothing here does I/O.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Sequence

from tierkv.storage.base import Tier
from tierkv.storage.errors import TierClosedError
from tierkv.storage.tiers.slot_table import SlotTable
from tierkv.storage.types import PageKey, SlotId


class TableTier(Tier):
    """The look-ups of host and nvme. See Tier for each method."""

    _lock: threading.Lock
    _table: SlotTable
    _closed: bool

    def lookup(self, keys: Sequence[PageKey]) -> list[bool]:
        with self._lock:
            self._ensure_open()
            return [key in self._table.index for key in keys]

    def victims(self, count: int, owners: Collection[int] | None = None) -> list[PageKey]:
        with self._lock:
            self._ensure_open()
            return self._names(self._table.coldest(count, owners))

    def owner_of(self, keys: Sequence[PageKey]) -> list[int | None]:
        with self._lock:
            self._ensure_open()
            return [self._table.owner_of(key) for key in keys]

    def owners(self) -> dict[int, int]:
        with self._lock:
            self._ensure_open()
            return dict(self._table.pages_by_owner)

    def keys_of(self, owner: int | None = None) -> list[PageKey]:
        with self._lock:
            self._ensure_open()
            return self._table.keys_of(owner)

    def _names(self, slots: list[SlotId]) -> list[PageKey]:
        return [key for slot in slots if (key := self._table.keys[slot]) is not None]

    def _ensure_open(self) -> None:
        if self._closed:
            raise TierClosedError(f"use the {self.name} tier: it was closed; open a new one")
