"""Tier doubles in plain memory, with failures on order and gates that hold an operation.

MemoryTier stands for any lower tier, MemoryHostTier for a mapped one. Both obey the contracts of
storage/base.py in the simplest way there is: a dict in order of recency under one lock.
"""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from tierkv.storage.base import Lease, MappedTier, Reservation, Tier, TierStats
from tierkv.storage.checksum import payload_checksum
from tierkv.storage.types import Buffer, CommitOutcome, PageKey, ReadOutcome, SlotId, TierName

GATE_TIMEOUT_S = 30.0


class Gate:
    """Holds every call of one operation until release(); `entered` is set by the first."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self._open = threading.Event()

    def release(self) -> None:
        self._open.set()

    def pass_through(self) -> None:
        self.entered.set()
        assert self._open.wait(GATE_TIMEOUT_S), "a test left its gate shut"


@dataclass
class _Page:
    key: PageKey
    slot: SlotId
    checksum: bytes
    owner: int
    leases: int = 0
    doomed: bool = False


@dataclass
class _Faults:
    """Per operation name: what the next calls raise or return, and the gate they pass."""

    raising: dict[str, list[Exception]] = field(default_factory=dict)
    reads: list[ReadOutcome] = field(default_factory=list)
    gates: dict[str, Gate] = field(default_factory=dict)


class MemoryTier(Tier):
    """A lower tier in memory. `calls` counts operations; `degraded` refuses reservations."""

    name = TierName.NVME

    def __init__(self, page_bytes: int, capacity_pages: int) -> None:
        self.page_bytes = page_bytes
        self.capacity_pages = capacity_pages
        self.degraded: str | None = None
        self.closed = False
        self.calls: Counter[str] = Counter()
        self.memory = [bytearray(page_bytes) for _ in range(capacity_pages)]
        self._lock = threading.RLock()
        self._free = [SlotId(slot) for slot in reversed(range(capacity_pages))]
        self._reserved: set[SlotId] = set()
        self._sealed: dict[SlotId, bytes] = {}
        self._pages: OrderedDict[PageKey, _Page] = OrderedDict()
        self._by_slot: dict[SlotId, _Page] = {}
        self._quarantined: set[SlotId] = set()
        self._counts: Counter[str] = Counter()
        self._faults = _Faults()

    # --- what tests order ---

    def fail_next(self, operation: str, *errors: Exception) -> None:
        """The next calls of `operation` raise these, one each."""
        self._faults.raising.setdefault(operation, []).extend(errors)

    def answer_reads(self, *outcomes: ReadOutcome) -> None:
        """The next reads end like this; CORRUPT quarantines as a real tier does."""
        self._faults.reads.extend(outcomes)

    def hold(self, operation: str) -> Gate:
        """Calls of `operation` wait at the returned gate from now on."""
        self._faults.gates[operation] = gate = Gate()
        return gate

    def flip_bit(self, key: PageKey) -> None:
        """Damage the stored payload of `key`."""
        self.memory[self._pages[key].slot][0] ^= 1

    def _arrive(self, operation: str) -> None:
        with self._lock:
            self.calls[operation] += 1
            gate = self._faults.gates.get(operation)
            errors = self._faults.raising.get(operation)
            error = errors.pop(0) if errors else None
        if gate is not None:
            gate.pass_through()
        if error is not None:
            raise error

    # --- the contract ---

    def lookup(self, keys: Sequence[PageKey]) -> list[bool]:
        self._arrive("lookup")
        with self._lock:
            return [key in self._pages for key in keys]

    def reserve(self, count: int) -> Reservation:
        self._arrive("reserve")
        with self._lock:
            count = 0 if self.degraded else min(count, len(self._free))
            slots = [self._free.pop() for _ in range(count)]
            self._reserved.update(slots)
            return Reservation(self, slots)

    def write(
        self,
        reservation: Reservation,
        index: int,
        payload: Buffer,
        checksum: bytes | None = None,
        *,
        key: PageKey | None = None,
        owner: int = 0,
    ) -> None:
        self._arrive("write")
        assert reservation.open and len(payload) == self.page_bytes
        slot = reservation.slots[index]
        self.memory[slot][:] = payload
        self._sealed[slot] = checksum or _digest(payload)

    def commit(
        self,
        reservation: Reservation,
        keys: Sequence[PageKey],
        owners: Sequence[int] | int = 0,
    ) -> list[CommitOutcome]:
        self._arrive("commit")
        tags = [owners] * len(keys) if isinstance(owners, int) else list(owners)
        assert len(tags) == len(keys), "one owner per key"
        with self._lock:
            assert reservation.open and len(keys) <= len(reservation.slots)
            reservation.open = False
            slots = reservation.slots
            outcomes = [
                self._publish(slot, key, owner)
                for slot, key, owner in zip(slots, keys, tags, strict=False)
            ]
            for slot in slots[len(keys) :]:
                self._free_reserved(slot)
            return outcomes

    def _publish(self, slot: SlotId, key: PageKey, owner: int) -> CommitOutcome:
        if key in self._pages:
            self._counts["duplicates"] += 1
            self._free_reserved(slot)
            return CommitOutcome.EXISTS
        checksum = self._sealed.pop(slot, None)
        if checksum is None:
            self._free_reserved(slot)
            return CommitOutcome.FAILED
        self._reserved.discard(slot)
        page = _Page(key, slot, checksum, owner)
        self._pages[key] = self._by_slot[slot] = page
        self._counts["writes"] += 1
        return CommitOutcome.COMMITTED

    def _free_reserved(self, slot: SlotId) -> None:
        self._reserved.remove(slot)
        self._sealed.pop(slot, None)
        self._free.append(slot)

    def lease(self, keys: Sequence[PageKey], *, quiet: bool = False) -> Lease:
        self._arrive("lease")
        with self._lock:
            pages = []
            for key in keys:
                if (page := self._pages.get(key)) is None:
                    break
                page.leases += 1
                if not quiet:
                    self._pages.move_to_end(key)
                pages.append(page)
            if not quiet:
                self._counts["hits"] += len(pages)
                self._counts["misses"] += len(keys) - len(pages)
            return Lease(
                self,
                list(keys[: len(pages)]),
                [page.slot for page in pages],
                [page.checksum for page in pages],
                [page.owner for page in pages],
            )

    def read(self, lease: Lease, index: int, out: memoryview) -> ReadOutcome:
        self._arrive("read")
        assert lease.open and len(out) == self.page_bytes
        ordered = self._faults.reads.pop(0) if self._faults.reads else None
        if ordered is ReadOutcome.FAILED:
            self._counts["io_errors"] += 1
            return ordered
        out[:] = self.memory[lease.slots[index]]
        return self._judge(lease, index, ordered)

    def _judge(self, lease: Lease, index: int, ordered: ReadOutcome | None = None) -> ReadOutcome:
        slot = lease.slots[index]
        if ordered is None and _digest(self.memory[slot]) == lease.checksums[index]:
            return ReadOutcome.OK
        with self._lock:
            self._counts["corrupt"] += 1
            page = self._by_slot.get(slot)
            if page is not None and page.key == lease.keys[index] and not page.doomed:
                del self._pages[page.key]
                page.doomed = True
                self._quarantined.add(slot)
        return ReadOutcome.CORRUPT

    def release(self, held: Reservation | Lease) -> None:
        self._arrive("release")
        with self._lock:
            if not held.open:
                return
            held.open = False
            if isinstance(held, Reservation):
                for slot in held.slots:
                    self._free_reserved(slot)
                return
            for slot in held.slots:
                page = self._by_slot[slot]
                page.leases -= 1
                assert page.leases >= 0, "released more often than leased"
                if page.leases == 0 and page.doomed:
                    del self._by_slot[slot]
                    if slot not in self._quarantined:
                        self._free.append(slot)

    def evict(self, count: int, owners: Collection[int] | None = None) -> list[PageKey]:
        self._arrive("evict")
        with self._lock:
            keys = self._coldest(count, owners)
            for key in keys:
                self._remove(key)
            self._counts["evictions"] += len(keys)
            return keys

    def victims(self, count: int, owners: Collection[int] | None = None) -> list[PageKey]:
        self._arrive("victims")
        with self._lock:
            return self._coldest(count, owners)

    def _coldest(self, count: int, owners: Collection[int] | None) -> list[PageKey]:
        return [
            key
            for key, page in self._pages.items()
            if page.leases == 0 and (owners is None or page.owner in owners)
        ][:count]

    def owner_of(self, keys: Sequence[PageKey]) -> list[int | None]:
        self._arrive("owner_of")
        with self._lock:
            return [page.owner if (page := self._pages.get(key)) else None for key in keys]

    def owners(self) -> dict[int, int]:
        self._arrive("owners")
        with self._lock:
            return dict(Counter(page.owner for page in self._pages.values()))

    def keys_of(self, owner: int | None = None) -> list[PageKey]:
        self._arrive("keys_of")
        with self._lock:
            return [k for k, page in self._pages.items() if owner is None or page.owner == owner]

    def _remove(self, key: PageKey) -> bool:
        page = self._pages.pop(key, None)
        if page is None:
            return False
        page.doomed = True
        if page.leases == 0:
            del self._by_slot[page.slot]
            self._free.append(page.slot)
        return True

    def touch(self, keys: Sequence[PageKey]) -> None:
        self._arrive("touch")
        with self._lock:
            for key in keys:
                if key in self._pages:
                    self._pages.move_to_end(key)

    def drop(self, keys: Sequence[PageKey]) -> int:
        self._arrive("drop")
        with self._lock:
            return sum(self._remove(key) for key in keys)

    def stats(self) -> TierStats:
        with self._lock:
            live = [page for page in self._by_slot.values() if page.slot not in self._quarantined]
            return TierStats(
                name=self.name,
                page_bytes=self.page_bytes,
                slot_bytes=self.page_bytes,
                capacity_pages=self.capacity_pages,
                free_pages=len(self._free),
                reserved_pages=len(self._reserved),
                committed_pages=len(live),
                leased_pages=sum(page.leases > 0 for page in live),
                quarantined_pages=len(self._quarantined),
                hits=self._counts["hits"],
                misses=self._counts["misses"],
                writes=self._counts["writes"],
                duplicates=self._counts["duplicates"],
                evictions=self._counts["evictions"],
                corrupt=self._counts["corrupt"],
                io_errors=self._counts["io_errors"],
                rejected=0,
                recovered_pages=0,
                degraded=self.degraded,
            )

    def check(self) -> None:
        with self._lock:
            stats = self.stats()
            total = stats.free_pages + stats.reserved_pages + stats.committed_pages
            assert total + stats.quarantined_pages == self.capacity_pages, stats
            assert len(set(self._free)) == len(self._free), "a slot is free twice"
            assert all(page.leases >= 0 for page in self._by_slot.values())

    def close(self) -> None:
        self.closed = True


class MemoryHostTier(MemoryTier, MappedTier):
    """A mapped tier in memory."""

    name = TierName.HOST

    def payload(self, reservation: Reservation, index: int) -> memoryview:
        assert reservation.open
        return memoryview(self.memory[reservation.slots[index]])

    def seal(self, reservation: Reservation, index: int, checksum: bytes | None = None) -> None:
        self._arrive("seal")
        slot = reservation.slots[index]
        self._sealed[slot] = checksum or _digest(self.memory[slot])

    def view(self, lease: Lease, index: int) -> memoryview:
        assert lease.open
        return memoryview(self.memory[lease.slots[index]]).toreadonly()

    def verify(self, lease: Lease, index: int) -> ReadOutcome:
        self._arrive("verify")
        return self._judge(lease, index)


def _digest(payload: Buffer) -> bytes:
    return payload_checksum(payload)
