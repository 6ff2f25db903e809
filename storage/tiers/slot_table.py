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
ticks are unique and only grow; a key is in the index exactly when its slot is COMMITTED;
`pages_by_owner` counts exactly the pages in the index. Memory is about 55 bytes a slot of arrays
plus the key and its place in the index (under 250 in all).
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tierkv.storage.checksum import CHECKSUM_BYTES
from tierkv.storage.types import PageKey, SlotId

FREE, RESERVED, COMMITTED, DOOMED, QUARANTINED = range(5)

TICK_LIMIT = 2**62
"""Ticks read from a medium at or above this are damage, not time."""

_COLD_BATCH_MIN = 1024
_COLD_SETS_MAX = 8
"""Sets of owners whose coldest pages are remembered between evictions."""


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
    owner: npt.NDArray[np.uint32]


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
        self.owner = np.zeros(capacity, np.uint32)
        self.pages_by_owner: dict[int, int] = {}
        self.reserved = 0
        self.committed = 0
        self.quarantined = 0
        self.leased = 0
        self._tick = 0
        self._free = np.zeros(capacity, np.int32)
        self._free_count = 0
        self._cold: OrderedDict[frozenset[int] | None, deque[tuple[int, int]]] = OrderedDict()
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
        self.owner[slots] = pages.owner
        names, counts = np.unique(pages.owner, return_counts=True)
        self.pages_by_owner = dict(zip(names.tolist(), counts.tolist(), strict=True))
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

    def publish(
        self, slot: int, key: PageKey, checksum: bytes, generation: int, owner: int = 0
    ) -> None:
        """RESERVED to COMMITTED under `key`; `checksum` b"" means there is none."""
        assert self.state[slot] == RESERVED and key not in self.index
        self.reserved -= 1
        self.committed += 1
        self.counters.writes += 1
        self.state[slot] = COMMITTED
        self.keys[slot] = key
        self.owner[slot] = owner
        self._enter(key, slot)
        self.generation[slot] = self.last_use[slot] = generation
        self.has_checksum[slot] = bool(checksum)
        if checksum:
            self.checksum[slot] = np.void(checksum)

    def _enter(self, key: PageKey, slot: int) -> None:
        self.index[key] = slot
        owner = int(self.owner[slot])
        self.pages_by_owner[owner] = self.pages_by_owner.get(owner, 0) + 1

    def _leave(self, key: PageKey) -> int:
        """Out of the index; returns the slot."""
        slot = self.index.pop(key)
        owner = int(self.owner[slot])
        left = self.pages_by_owner[owner] - 1
        if left:
            self.pages_by_owner[owner] = left
        else:
            del self.pages_by_owner[owner]
        return slot

    def owner_of(self, key: PageKey) -> int | None:
        """The owner of a page in the index."""
        slot = self.index.get(key)
        return None if slot is None else int(self.owner[slot])

    def keys_of(self, owner: int | None) -> list[PageKey]:
        """Pages of one owner (None: of all), coldest first. O(capacity)."""
        wanted = self.state == COMMITTED
        if owner is not None:
            wanted &= self.owner == owner
        slots = np.flatnonzero(wanted)
        order = slots[np.argsort(self.last_use[slots])].tolist()
        return [key for slot in order if (key := self.keys[slot]) is not None]

    def checksum_of(self, slot: int) -> bytes:
        """The recorded digest of a page, or b""."""
        return self.checksum[slot].tobytes() if self.has_checksum[slot] else b""

    def lease(self, keys: Sequence[PageKey], quiet: bool = False) -> list[SlotId]:
        """Pin the leading run of `keys`; unless quiet, count it and refresh recency."""
        slots: list[SlotId] = []
        for key in keys:
            slot = self.index.get(key)
            if slot is None:
                break
            if self.leases[slot] == 0:
                self.leased += 1
            self.leases[slot] += 1
            if not quiet:
                self.last_use[slot] = self.next_tick()
            slots.append(SlotId(slot))
        if not quiet:
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
        if key not in self.index:
            return None
        slot = self._leave(key)
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
        self._leave(key)
        self.state[slot] = RESERVED
        self.committed -= 1
        self.reserved += 1
        return key

    def reattach(self, slot: int) -> None:
        """Undo detach(): the removal could not be made durable."""
        key = self.keys[slot]
        assert key is not None and self.state[slot] == RESERVED and key not in self.index
        self._enter(key, slot)
        self.state[slot] = COMMITTED
        self.reserved -= 1
        self.committed += 1
        # A scan meanwhile may have forgotten it as no longer there, old as it is.
        self._cold.clear()

    def quarantine(self, slot: int) -> PageKey | None:
        """Never use this slot again; returns the key that vanished from the index, if any."""
        state = int(self.state[slot])
        assert state in (RESERVED, COMMITTED, DOOMED), f"slot {slot} in state {state}"
        key = self.keys[slot] if state == COMMITTED else None
        if key is not None:
            self._leave(key)
        if state == RESERVED:
            self.reserved -= 1
        else:
            self.committed -= 1
            self.leased -= bool(self.leases[slot])
        self.keys[slot] = None
        self.state[slot] = QUARANTINED
        self.quarantined += 1
        return key

    def coldest(self, count: int, owners: Collection[int] | None = None) -> list[SlotId]:
        """Up to `count` committed slots that nobody leases, least recently used first.

        With `owners`, only slots of their pages. Exact LRU. Amortised O(1) a slot: a batch of
        the coldest is selected in O(capacity) and used up; whatever is touched or committed
        later is hotter than all of the batch. Batches of _COLD_SETS_MAX sets are kept.
        """
        group = self._group(owners)
        eligible = self.committed
        if group is not None:
            eligible = sum(self.pages_by_owner.get(owner, 0) for owner in group)
        wanted = max(0, min(count, eligible))
        if not wanted:
            return []
        cold = self._cold.setdefault(group, deque())
        self._cold.move_to_end(group)
        if len(self._cold) > _COLD_SETS_MAX:
            self._cold.popitem(last=False)
        picked, waiting = self._scan_cold(cold, wanted)
        batch = _COLD_BATCH_MIN
        while len(picked) < wanted and batch < 2 * eligible + _COLD_BATCH_MIN:
            batch = max(batch, 2 * (waiting + wanted), eligible // 16)
            self._select_cold(cold, group, batch)
            picked, waiting = self._scan_cold(cold, wanted)
            batch *= 2
        return picked

    def _group(self, owners: Collection[int] | None) -> frozenset[int] | None:
        """The owners meant that have pages; None when those are all there are."""
        if owners is None:
            return None
        group = frozenset(owner for owner in owners if owner in self.pages_by_owner)
        return None if len(group) == len(self.pages_by_owner) else group

    def _scan_cold(self, cold: deque[tuple[int, int]], wanted: int) -> tuple[list[SlotId], int]:
        """Pick from the batch, forgetting what is no longer as cold as it says."""
        picked: list[SlotId] = []
        seen: list[tuple[int, int]] = []
        while cold and len(picked) < wanted:
            tick, slot = cold.popleft()
            if self.state[slot] != COMMITTED or self.last_use[slot] != tick:
                continue
            seen.append((tick, slot))
            if self.leases[slot] == 0:
                picked.append(SlotId(slot))
        cold.extendleft(reversed(seen))
        return picked, len(seen)

    def _select_cold(
        self, cold: deque[tuple[int, int]], group: frozenset[int] | None, batch: int
    ) -> None:
        wanted = self.state == COMMITTED
        if group is not None:
            wanted &= np.isin(self.owner, np.fromiter(group, np.uint32, len(group)))
        slots = np.flatnonzero(wanted)
        ticks = self.last_use[slots]
        if batch < len(slots):
            part = np.argpartition(ticks, batch - 1)[:batch]
            slots, ticks = slots[part], ticks[part]
        order = np.argsort(ticks)
        cold.clear()
        cold.extend(zip(ticks[order].tolist(), slots[order].tolist(), strict=True))

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
        names, counts = np.unique(self.owner[self.state == COMMITTED], return_counts=True)
        by_owner = dict(zip(names.tolist(), counts.tolist(), strict=True))
        assert self.pages_by_owner == by_owner, "pages by owner"
        assert (self.leases >= 0).all(), "negative lease count"
        live = (self.state == COMMITTED) | (self.state == DOOMED)
        assert self.leased == np.count_nonzero(live & (self.leases > 0)), "leased count"
        idle = (self.state == FREE) | (self.state == RESERVED)
        assert not self.leases[idle].any(), "a slot without a page is leased"
        assert (self.leases[self.state == DOOMED] > 0).all(), "a removed page nobody leases"
        ticks = self.last_use[live]
        assert len(np.unique(ticks)) == len(ticks), "two pages share a tick"
        assert not len(ticks) or ticks.max() <= self._tick, "a tick from the future"
