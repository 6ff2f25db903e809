"""The in-memory half of a tier: which slot holds which page, who leases it, what is coldest.

Owns slot states, the key index, lease counts, recency and the counters. Does no I/O, takes no
lock and knows no medium: the tier that owns a table calls every method with its own lock held.
Both tiers use it, so that a slot's life is written once.

    from         to           by
    FREE         RESERVED     take
    RESERVED     FREE         give_back
    RESERVED     COMMITTED    publish, reattach
    COMMITTED    RESERVED     detach        (eviction under way; only when nobody leases it)
    COMMITTED    FREE         remove        (nobody leases it)
    COMMITTED    DOOMED       remove        (leased: gone from lookup, still readable)
    DOOMED       FREE         unlease       (the last lease ended)
    any but FREE QUARANTINED  quarantine    (for good)

Invariants: free + reserved + committed + quarantined == capacity, DOOMED counted as committed;
ticks are unique and only grow; a key is in the index exactly when its slot is COMMITTED. Memory
is about 50 bytes a slot of arrays plus the key and its place in the index (under 250 in all).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tierkv.storage.checksum import CHECKSUM_BYTES
from tierkv.storage.types import PageKey, SlotId

FREE, RESERVED, COMMITTED, DOOMED, QUARANTINED = range(5)

TICK_LIMIT = 2**62
"""Ticks read from a medium at or above this are damage, not time."""

_COLD_BATCH_MIN = 1024


@dataclass(slots=True)
class TierCounters:
    """Running counts of one tier, as TierStats defines them."""

    hits: int = 0
    misses: int = 0
    writes: int = 0
    duplicates: int = 0
    evictions: int = 0
    corrupt: int = 0
    io_errors: int = 0
    rejected: int = 0
    recovered_pages: int = 0


@dataclass(slots=True)
class RecoveredPages:
    """Pages found when a tier was opened, one row each. Slots and keys are distinct."""

    keys: list[PageKey]
    slots: npt.NDArray[np.int64]
    generation: npt.NDArray[np.uint64]
    last_use: npt.NDArray[np.uint64]
    checksum: npt.NDArray[np.void]
    has_checksum: npt.NDArray[np.bool_]


class SlotTable:
    """Slots of one tier. Not thread-safe: the owner's lock guards it."""

    def __init__(self, capacity: int, usable: int) -> None:
        """`usable` slots, from 0 on, may be taken at once; grow() adds the rest later."""
        assert 0 <= usable <= capacity
        self.capacity = capacity
        self.usable = usable
        self.counters = TierCounters()
        self.index: dict[PageKey, int] = {}
        self.keys: list[PageKey | None] = [None] * capacity
        self.state = np.zeros(capacity, np.uint8)
        self.leases = np.zeros(capacity, np.int32)
        self.last_use = np.zeros(capacity, np.uint64)
        self.generation = np.zeros(capacity, np.uint64)
        self.checksum = np.zeros(capacity, f"V{CHECKSUM_BYTES}")
        self.has_checksum = np.zeros(capacity, np.bool_)
        self.reserved = 0
        self.committed = 0
        self.quarantined = 0
        self.leased = 0
        self._tick = 0
        self._free = np.zeros(capacity, np.int32)
        self._free_count = 0
        self._cold: deque[tuple[int, int]] = deque()
        self._push_free(np.arange(usable - 1, -1, -1, dtype=np.int32))

    def _push_free(self, slots: npt.NDArray[np.int32]) -> None:
        end = self._free_count + len(slots)
        self._free[self._free_count : end] = slots
        self._free_count = end

    @property
    def free(self) -> int:
        """Slots nobody holds, those not usable yet included."""
        return self._free_count + self.capacity - self.usable

    @property
    def ready(self) -> int:
        """Slots that take() can hand out now."""
        return self._free_count

    def next_tick(self) -> int:
        """A number larger than all before: the order of commits and uses."""
        self._tick += 1
        return self._tick

    def recover(self, pages: RecoveredPages, usable: int) -> None:
        """Enter what was found on the medium. Once, before anything else. O(capacity)."""
        assert not self.index and self.free == self.capacity and usable <= self.capacity
        self.usable = usable
        slots = pages.slots
        self.index = dict(zip(pages.keys, slots.tolist(), strict=True))
        assert len(self.index) == len(slots), "recovered keys must be distinct"
        by_slot = np.full(self.capacity, None, object)
        by_slot[slots] = np.array(pages.keys, object)
        self.keys = by_slot.tolist()
        self.state[slots] = COMMITTED
        self.generation[slots] = pages.generation
        self.checksum[slots] = pages.checksum
        self.has_checksum[slots] = pages.has_checksum
        self.committed = self.counters.recovered_pages = len(slots)
        if len(slots):
            self._rank(slots, np.where(pages.last_use < TICK_LIMIT, pages.last_use, 0))
        self._free_count = 0
        empty = np.flatnonzero(self.state[: self.usable] == FREE)[::-1]
        self._push_free(empty.astype(np.int32))

    def _rank(self, slots: npt.NDArray[np.int64], last_use: npt.NDArray[np.uint64]) -> None:
        """Renumber recency: the order found is kept, the numbers become unique and the newest."""
        generation = self.generation[slots]
        known = generation[generation < TICK_LIMIT]
        self._tick = int(max(known.max(initial=0), last_use.max()))
        order = np.argsort(last_use)
        first = self._tick + 1
        self._tick += len(slots)
        self.last_use[slots[order]] = np.arange(first, self._tick + 1, dtype=np.uint64)

    def grow(self, usable: int) -> None:
        """Let slots up to `usable` be taken."""
        assert self.usable <= usable <= self.capacity
        held = self._free[: self._free_count].copy()
        # New slots go under the stack: those that exist already are used up first.
        self._free_count = 0
        self._push_free(np.arange(usable - 1, self.usable - 1, -1, dtype=np.int32))
        self._push_free(held)
        self.usable = usable

    def take(self, count: int) -> list[SlotId]:
        """Reserve up to `count` slots. O(count)."""
        count = min(count, self._free_count)
        start = self._free_count - count
        slots: list[SlotId] = self._free[start : self._free_count][::-1].tolist()
        self._free_count = start
        self.state[slots] = RESERVED
        self.reserved += count
        return slots

    def give_back(self, slot: int) -> None:
        """RESERVED to FREE."""
        assert self.state[slot] == RESERVED, f"slot {slot} is not reserved"
        self.reserved -= 1
        self._set_free(slot)

    def _set_free(self, slot: int) -> None:
        self.state[slot] = FREE
        self.keys[slot] = None
        self._free[self._free_count] = slot
        self._free_count += 1

    def publish(self, slot: int, key: PageKey, checksum: bytes, generation: int) -> None:
        """RESERVED to COMMITTED under `key`; `checksum` b"" means there is none."""
        assert self.state[slot] == RESERVED and key not in self.index
        self.reserved -= 1
        self.committed += 1
        self.counters.writes += 1
        self.state[slot] = COMMITTED
        self.keys[slot] = key
        self.index[key] = slot
        self.generation[slot] = self.last_use[slot] = generation
        self.has_checksum[slot] = bool(checksum)
        if checksum:
            self.checksum[slot] = np.void(checksum)

    def checksum_of(self, slot: int) -> bytes:
        """The recorded digest of a page, or b""."""
        return self.checksum[slot].tobytes() if self.has_checksum[slot] else b""

    def lease(self, keys: Sequence[PageKey]) -> list[SlotId]:
        """Pin the leading run of `keys`; counts hits and misses, refreshes recency."""
        slots: list[SlotId] = []
        for key in keys:
            slot = self.index.get(key)
            if slot is None:
                break
            if self.leases[slot] == 0:
                self.leased += 1
            self.leases[slot] += 1
            self.last_use[slot] = self.next_tick()
            slots.append(SlotId(slot))
        self.counters.hits += len(slots)
        self.counters.misses += len(keys) - len(slots)
        return slots

    def unlease(self, slot: int) -> None:
        """End one lease; frees the slot when it was the last one of a removed page."""
        assert self.leases[slot] > 0, f"slot {slot} released more often than leased"
        self.leases[slot] -= 1
        if self.leases[slot]:
            return
        if self.state[slot] != QUARANTINED:
            self.leased -= 1
        if self.state[slot] == DOOMED:
            self.committed -= 1
            self._set_free(slot)

    def touch(self, slot: int) -> int:
        """Make a page the hottest; returns the tick."""
        self.last_use[slot] = tick = self.next_tick()
        return tick

    def remove(self, key: PageKey) -> SlotId | None:
        """Take a page out of the index; free its slot now or at its last lease's end."""
        slot = self.index.pop(key, None)
        if slot is None:
            return None
        if self.leases[slot]:
            self.state[slot] = DOOMED
        else:
            self.committed -= 1
            self._set_free(slot)
        return SlotId(slot)

    def detach(self, slot: int) -> PageKey:
        """COMMITTED to RESERVED: nobody can lease it while its removal is made durable."""
        key = self.keys[slot]
        assert key is not None and self.state[slot] == COMMITTED and self.leases[slot] == 0
        del self.index[key]
        self.state[slot] = RESERVED
        self.committed -= 1
        self.reserved += 1
        return key

    def reattach(self, slot: int) -> None:
        """Undo detach(): the removal could not be made durable."""
        key = self.keys[slot]
        assert key is not None and self.state[slot] == RESERVED and key not in self.index
        self.index[key] = slot
        self.state[slot] = COMMITTED
        self.reserved -= 1
        self.committed += 1

    def quarantine(self, slot: int) -> PageKey | None:
        """Never use this slot again; returns the key that vanished from the index, if any."""
        state = int(self.state[slot])
        assert state in (RESERVED, COMMITTED, DOOMED), f"slot {slot} in state {state}"
        key = self.keys[slot] if state == COMMITTED else None
        if key is not None:
            del self.index[key]
        if state == RESERVED:
            self.reserved -= 1
        else:
            self.committed -= 1
            self.leased -= bool(self.leases[slot])
        self.keys[slot] = None
        self.state[slot] = QUARANTINED
        self.quarantined += 1
        return key

    def coldest(self, count: int) -> list[SlotId]:
        """Up to `count` committed slots that nobody leases, least recently used first.

        Exact LRU. Amortised O(1) a slot: a batch of the coldest is selected in O(capacity) and
        used up; whatever is touched or committed later is hotter than all of the batch.
        """
        wanted = max(0, min(count, self.committed))
        picked, waiting = self._scan_cold(wanted)
        batch = _COLD_BATCH_MIN
        while len(picked) < wanted and batch < 2 * self.committed + _COLD_BATCH_MIN:
            batch = max(batch, 2 * (waiting + wanted), self.committed // 16)
            self._select_cold(batch)
            picked, waiting = self._scan_cold(wanted)
            batch *= 2
        return picked

    def _scan_cold(self, wanted: int) -> tuple[list[SlotId], int]:
        """Pick from the batch, forgetting what is no longer as cold as it says."""
        picked: list[SlotId] = []
        seen: list[tuple[int, int]] = []
        while self._cold and len(picked) < wanted:
            tick, slot = self._cold.popleft()
            if self.state[slot] != COMMITTED or self.last_use[slot] != tick:
                continue
            seen.append((tick, slot))
            if self.leases[slot] == 0:
                picked.append(SlotId(slot))
        self._cold.extendleft(reversed(seen))
        return picked, len(seen)

    def _select_cold(self, batch: int) -> None:
        slots = np.flatnonzero(self.state == COMMITTED)
        ticks = self.last_use[slots]
        if batch < len(slots):
            part = np.argpartition(ticks, batch - 1)[:batch]
            slots, ticks = slots[part], ticks[part]
        order = np.argsort(ticks)
        self._cold = deque(zip(ticks[order].tolist(), slots[order].tolist(), strict=True))

    def check(self) -> None:
        """Assert every invariant. O(capacity)."""
        counts = np.bincount(self.state, minlength=5)
        assert self.reserved == counts[RESERVED], "reserved count"
        assert self.committed == counts[COMMITTED] + counts[DOOMED], "committed count"
        assert self.quarantined == counts[QUARANTINED], "quarantined count"
        total = self.free + self.reserved + self.committed + self.quarantined
        assert total == self.capacity, f"{total} slots accounted for, {self.capacity} exist"
        stack = self._free[: self._free_count]
        assert len(np.unique(stack)) == self._free_count, "a slot is free twice"
        assert not self._free_count or stack.max() < self.usable, "a free slot lies past the end"
        assert (self.state[stack] == FREE).all(), "a free slot is in use"
        assert (self.state[self.usable :] == FREE).all(), "a slot past the end is in use"
        assert len(self.index) == counts[COMMITTED], "index and slots differ"
        for key, slot in self.index.items():
            assert self.state[slot] == COMMITTED and self.keys[slot] == key, f"index of slot {slot}"
        assert (self.leases >= 0).all(), "negative lease count"
        live = (self.state == COMMITTED) | (self.state == DOOMED)
        assert self.leased == np.count_nonzero(live & (self.leases > 0)), "leased count"
        idle = (self.state == FREE) | (self.state == RESERVED)
        assert not self.leases[idle].any(), "a slot without a page is leased"
        assert (self.leases[self.state == DOOMED] > 0).all(), "a removed page nobody leases"
        ticks = self.last_use[live]
        assert len(np.unique(ticks)) == len(ticks), "two pages share a tick"
        assert not len(ticks) or ticks.max() <= self._tick, "a tick from the future"
