"""The host tier: pages in one arena of ordinary memory, kept across a death of the process.

Owns an Arena and the table of its slots. Knows neither the mover nor other tiers. Slot headers
in the arena are the truth a restarted process attaches to: COMMITTED is stored there only when
payload and checksum are in place, and taken away before a slot can be reused, so kill -9 at any
moment leaves whole pages or free slots. Copies run outside the lock. Called by storage/store.py
and storage/mover.py.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tierkv.storage.arena import ARENA_HEADER_BYTES, Arena, ArenaGeometry
from tierkv.storage.base import Lease, MappedTier, Reservation, TierStats
from tierkv.storage.checksum import (
    CHECKSUM_BYTES,
    copy_bytes,
    copy_with_checksum,
    payload_checksum,
)
from tierkv.storage.clock import Clock, SystemClock
from tierkv.storage.slot_header import (
    STATE_COMMITTED,
    STATE_FREE,
    SlotHeader,
    parse_header,
    set_last_use,
    set_state,
    slot_bytes_for,
)
from tierkv.storage.tiers.slot_table import QUARANTINED, RecoveredPages, SlotTable
from tierkv.storage.tiers.table_tier import TableTier
from tierkv.storage.tiers.tier_stats import (
    check_keys,
    check_length,
    check_owners,
    known_checksum,
    snapshot,
)
from tierkv.storage.types import Buffer, CommitOutcome, PageKey, ReadOutcome, SlotId, TierName

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Expected:
    """What a leased slot must hold."""

    key: PageKey
    generation: int
    checksum: bytes


class HostTier(TableTier, MappedTier):
    """Fixed-size pages in an arena. See MappedTier for the contract of each method."""

    name = TierName.HOST

    def __init__(
        self,
        path: Path | None,
        page_bytes: int,
        capacity_bytes: int,
        checksums: bool = True,
        clock: Clock | None = None,
        huge_pages: bool = False,
    ) -> None:
        """Attach to the arena file at `path` or make it; None keeps pages in this process only.

        `huge_pages` asks the system for them and makes do without; see huge_bytes().
        With `checksums` off, pages are neither hashed when written nor verified when read,
        except that digests handed over by another tier are kept. Raises what Arena raises.
        """
        self.page_bytes = page_bytes
        self.checksums = checksums
        self.opened_wall_s = (clock or SystemClock()).wall()
        self._arena = Arena(path, page_bytes, capacity_bytes, huge_pages)
        self._lock = threading.Lock()
        self._closed = False
        self._sealed: dict[int, bytes] = {}
        self._table = SlotTable(self._arena.geometry.slot_count, self._arena.geometry.slot_count)
        if self._arena.attached:
            self._recover()

    @staticmethod
    def capacity_for(page_bytes: int, pages: int) -> int:
        """The smallest capacity_bytes that holds `pages`."""
        return ARENA_HEADER_BYTES + pages * slot_bytes_for(page_bytes)

    def arena_geometry(self) -> ArenaGeometry:
        """Where slots and payloads lie in the arena."""
        return self._arena.geometry

    def arena_fd(self) -> int:
        """The arena's open file, borrowed until close(). ConfigError for an anonymous arena."""
        with self._lock:
            self._ensure_open()
            return self._arena.fd()

    def arena_memory(self) -> memoryview:
        """All of the arena, header block included: borrowed until close()."""
        with self._lock:
            self._ensure_open()
            # A view of its own: one that is still held does not keep close() from its work.
            return self._arena.memory[:]

    def huge_bytes(self) -> int:
        """Bytes of the arena that huge pages hold now. Slow: for a status page."""
        with self._lock:
            self._ensure_open()
            return self._arena.huge_bytes()

    # --- life of a page -------------------------------------------------------------------

    def reserve(self, count: int) -> Reservation:
        with self._lock:
            self._ensure_open()
            return Reservation(self, self._table.take(count))

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
        source = check_length(payload, self.page_bytes, "write to the host tier")
        known = known_checksum(checksum)
        out = self.payload(reservation, index)
        if known or not self.checksums:
            copy_bytes(out, source)
        else:
            known = copy_with_checksum(out, source)
        self._seal(reservation, index, known)

    def payload(self, reservation: Reservation, index: int) -> memoryview:
        self._ensure_open()
        assert reservation.open, "the reservation is closed"
        return self._arena.payload_view(reservation.slots[index])

    def seal(self, reservation: Reservation, index: int, checksum: bytes | None = None) -> None:
        known = known_checksum(checksum)
        if not known and self.checksums:
            known = payload_checksum(self.payload(reservation, index))
        self._seal(reservation, index, known)

    def _seal(self, reservation: Reservation, index: int, checksum: bytes) -> None:
        with self._lock:
            self._ensure_open()
            assert reservation.open, "the reservation is closed"
            self._sealed[reservation.slots[index]] = checksum

    def commit(
        self,
        reservation: Reservation,
        keys: Sequence[PageKey],
        owners: Sequence[int] | int = 0,
    ) -> list[CommitOutcome]:
        check_keys(keys, len(reservation))
        tags = check_owners(owners, len(keys))
        with self._lock:
            self._ensure_open()
            assert reservation.open, "the reservation is closed"
            reservation.open = False
            slots = reservation.slots
            outcomes = [
                self._publish(slot, key, owner)
                for slot, key, owner in zip(slots, keys, tags, strict=False)
            ]
            for slot in slots[len(keys) :]:
                self._give_back(slot)
            return outcomes

    def _publish(self, slot: SlotId, key: PageKey, owner: int) -> CommitOutcome:
        table = self._table
        if key in table.index:
            table.counters.duplicates += 1
            self._give_back(slot)
            return CommitOutcome.EXISTS
        checksum = self._sealed.pop(slot, None)
        if checksum is None:
            # Nobody filled this slot: its write failed, or the holder lost it.
            table.counters.rejected += 1
            table.give_back(slot)
            return CommitOutcome.FAILED
        tick = table.next_tick()
        header = SlotHeader(key, self.page_bytes, checksum, tick, last_use=tick, owner=owner)
        header.pack_into(self._arena.memory, self._arena.slot_offset(slot))
        table.publish(slot, key, checksum, tick, owner)
        return CommitOutcome.COMMITTED

    def _give_back(self, slot: SlotId) -> None:
        self._sealed.pop(slot, None)
        self._table.give_back(slot)

    def release(self, held: Reservation | Lease) -> None:
        with self._lock:
            if not held.open:
                return
            held.open = False
            if self._closed:
                return
            if isinstance(held, Lease):
                for slot in held.slots:
                    self._table.unlease(slot)
            else:
                for slot in held.slots:
                    self._give_back(slot)

    # --- reading --------------------------------------------------------------------------

    def lease(self, keys: Sequence[PageKey], *, quiet: bool = False) -> Lease:
        with self._lock:
            self._ensure_open()
            slots = self._table.lease(keys, quiet)
            if not quiet:
                for slot in slots:
                    self._store_last_use(slot)
            checksums = [self._table.checksum_of(slot) for slot in slots]
            owners: list[int] = self._table.owner[slots].tolist()
            return Lease(self, list(keys[: len(slots)]), slots, checksums, owners)

    def read(self, lease: Lease, index: int, out: memoryview) -> ReadOutcome:
        target = check_length(out, self.page_bytes, "read from the host tier")
        expected = self._expect(lease, index)
        if expected is None:
            return ReadOutcome.CORRUPT
        slot = lease.slots[index]
        source = self._arena.payload_view(slot)
        if self.checksums and expected.checksum:
            intact = copy_with_checksum(target, source) == expected.checksum
        else:
            copy_bytes(target, source)
            intact = True
        return self._judge(slot, expected, intact)

    def view(self, lease: Lease, index: int) -> memoryview:
        self._ensure_open()
        assert lease.open, "the lease is closed"
        return self._arena.payload_view(lease.slots[index]).toreadonly()

    def verify(self, lease: Lease, index: int) -> ReadOutcome:
        expected = self._expect(lease, index)
        if expected is None:
            return ReadOutcome.CORRUPT
        slot = lease.slots[index]
        intact = True
        if self.checksums and expected.checksum:
            intact = payload_checksum(self._arena.payload_view(slot)) == expected.checksum
        return self._judge(slot, expected, intact)

    def _expect(self, lease: Lease, index: int) -> _Expected | None:
        """What the leased slot must hold; None when it was found corrupt already."""
        with self._lock:
            self._ensure_open()
            assert lease.open, "the lease is closed"
            slot = lease.slots[index]
            if self._table.state[slot] == QUARANTINED:
                return None
            generation = int(self._table.generation[slot])
            return _Expected(lease.keys[index], generation, lease.checksums[index])

    def _judge(self, slot: SlotId, expected: _Expected, intact: bool) -> ReadOutcome:
        """Check the header against what was committed; quarantine unless all is well."""
        header = parse_header(self._arena.memory, self._arena.slot_offset(slot))
        if (
            intact
            and header is not None
            and header.key == expected.key
            and header.payload_bytes == self.page_bytes
            and header.generation == expected.generation
            and header.checksum == expected.checksum
        ):
            return ReadOutcome.OK
        with self._lock:
            if self._table.state[slot] != QUARANTINED:
                self._table.counters.corrupt += 1
                self._clear_header(slot)
                self._table.quarantine(slot)
        return ReadOutcome.CORRUPT

    # --- making room ----------------------------------------------------------------------

    def evict(self, count: int, owners: Collection[int] | None = None) -> list[PageKey]:
        with self._lock:
            self._ensure_open()
            keys = self._names(self._table.coldest(count, owners))
            for key in keys:
                self._remove(key)
            self._table.counters.evictions += len(keys)
            return keys

    def touch(self, keys: Sequence[PageKey]) -> None:
        with self._lock:
            self._ensure_open()
            for key in keys:
                slot = self._table.index.get(key)
                if slot is not None:
                    self._table.touch(slot)
                    self._store_last_use(slot)

    def drop(self, keys: Sequence[PageKey]) -> int:
        with self._lock:
            self._ensure_open()
            return sum(self._remove(key) for key in keys)

    def _remove(self, key: PageKey) -> bool:
        slot = self._table.index.get(key)
        if slot is None:
            return False
        # Leases read by generation, not by state: the removal holds at once, readers go on.
        self._clear_header(slot)
        self._table.remove(key)
        return True

    def _clear_header(self, slot: int) -> None:
        set_state(self._arena.memory, self._arena.slot_offset(slot), STATE_FREE)

    def _store_last_use(self, slot: int) -> None:
        tick = int(self._table.last_use[slot])
        set_last_use(self._arena.memory, self._arena.slot_offset(slot), tick)

    # --- as a whole -----------------------------------------------------------------------

    def stats(self) -> TierStats:
        with self._lock:
            return snapshot(self, self._table, self._arena.geometry.slot_bytes, degraded=None)

    def check(self) -> None:
        with self._lock:
            self._ensure_open()
            self._table.check()
            for slot in self._sealed:
                assert self._table.keys[slot] is None, f"slot {slot} is sealed and committed"
            for key, slot in self._table.index.items():
                header = parse_header(self._arena.memory, self._arena.slot_offset(slot))
                if header is not None:  # A damaged header is for read() to find and count.
                    assert header.state == STATE_COMMITTED, f"slot {slot} is not published"
                    assert header.key == key, f"slot {slot} is published under another key"
                    assert header.owner == self._table.owner[slot], f"owner of slot {slot}"

    def close(self) -> None:
        with self._lock:
            if not self._closed:
                self._closed = True
                self._arena.close()

    def _recover(self) -> None:
        """Enter the arena's committed pages; every other slot's header is cleared."""
        best: dict[PageKey, tuple[int, SlotHeader]] = {}
        for slot in range(self._table.capacity):
            header = self._recoverable(slot)
            if header is not None:
                rival = best.get(header.key)
                if rival is None or rival[1].generation < header.generation:
                    best[header.key] = (slot, header)
        kept = {slot for slot, _ in best.values()}
        for slot in range(self._table.capacity):
            if slot not in kept:
                self._clear_header(slot)
        self._table.recover(recovered_pages(list(best.values())), self._table.capacity)
        log.info("tier=host arena=%s recovered_pages=%d", self._arena.path, len(best))

    def _recoverable(self, slot: int) -> SlotHeader | None:
        header = parse_header(self._arena.memory, self._arena.slot_offset(slot))
        if header is None or header.state != STATE_COMMITTED:
            return None
        # After a restart of the machine stores may be missing, and only a digest would tell.
        trusted = self._arena.same_boot or bool(header.checksum)
        return header if trusted and header.payload_bytes == self.page_bytes else None


def recovered_pages(found: list[tuple[int, SlotHeader]]) -> RecoveredPages:
    """Rows for SlotTable.recover() from slots and their headers."""
    headers = [header for _, header in found]
    digests = [h.checksum or bytes(CHECKSUM_BYTES) for h in headers]
    return RecoveredPages(
        keys=[h.key for h in headers],
        slots=np.array([slot for slot, _ in found], np.int64),
        generation=np.array([h.generation for h in headers], np.uint64),
        last_use=np.array([max(h.last_use, h.generation) for h in headers], np.uint64),
        checksum=np.array(digests, f"V{CHECKSUM_BYTES}"),
        has_checksum=np.array([bool(h.checksum) for h in headers], np.bool_),
        owner=np.array([h.owner for h in headers], np.uint32),
    )
