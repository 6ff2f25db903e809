"""The nvme tier: pages in slot files on a disk, found again after a power loss.

Owns the state of every slot and the order of writes. Files of pages are segments.py's, the index
nvme_index.py's, the folder nvme_layout.py's. Knows neither the mover nor other tiers. Called by
storage/store.py and storage/mover.py, from several threads: concurrency is the caller's.

Order of a write: payload and header -> fdatasync -> one index transaction -> visible. A header
that could not be complete yet, since the key was not told with the payload, goes out in between.
Order of a removal: out of lookup -> index delete durable -> slot reusable.
So no crash shows a torn page, and the header's checksum is the second line.

Locks: `_lock` guards the table and is never held over I/O. `_publish_lock` serialises commits,
evictions and drops, and is held over fdatasync and the index transaction: LMDB has one writer
anyway, and a sync error must not be consumed by somebody else's sync. lookup, lease, read, write,
release and touch never take it. `_grow_lock` is held while files are extended.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tierkv.storage.base import Lease, Reservation, TierStats
from tierkv.storage.checksum import payload_checksum
from tierkv.storage.clock import Clock, SystemClock
from tierkv.storage.device import Device, DirectDevice
from tierkv.storage.errors import TierError
from tierkv.storage.slot_header import (
    NO_KEY,
    STATE_COMMITTED,
    STATE_WRITTEN,
    SlotHeader,
    parse_header,
)
from tierkv.storage.tiers.health import WriteHealth
from tierkv.storage.tiers.nvme_index import pack_entry
from tierkv.storage.tiers.nvme_layout import NvmeRoot, capacity_for
from tierkv.storage.tiers.nvme_open import open_parts
from tierkv.storage.tiers.slot_table import QUARANTINED
from tierkv.storage.tiers.table_tier import TableTier
from tierkv.storage.tiers.tier_stats import (
    check_keys,
    check_length,
    check_owners,
    known_checksum,
    snapshot,
)
from tierkv.storage.types import Buffer, CommitOutcome, PageKey, ReadOutcome, SlotId, TierName

SEGMENT_BYTES = 1 << 30
GROW_BYTES = 64 << 20
MIN_FREE_BYTES = 1 << 30
RETRY_S = 5.0
CLOSE_WAIT_S = 30.0

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Staged:
    """A reserved slot whose payload is on the device, not yet durable."""

    checksum: bytes
    sync_failures: int
    """How many syncs had failed before it was written: a later failure makes it worthless."""
    header: SlotHeader
    """What lies on the device in front of the payload."""


@dataclass(slots=True)
class _Entry:
    """One page of a batch being committed."""

    position: int
    slot: SlotId
    header: SlotHeader
    header_written: bool


@dataclass(slots=True)
class _Batch:
    """What one commit() makes durable in one step."""

    outcomes: list[CommitOutcome]
    entries: list[_Entry]
    twins: list[int]
    """Positions whose key another position of the same batch publishes."""


class NvmeTier(TableTier):
    """Fixed-size pages on a disk. See Tier for the contract of each method."""

    name = TierName.NVME

    def __init__(
        self,
        root: Path,
        page_bytes: int,
        capacity_bytes: int,
        device: Device | None = None,
        checksums: bool = True,
        clock: Clock | None = None,
        min_free_bytes: int = MIN_FREE_BYTES,
        retry_s: float = RETRY_S,
        segment_bytes: int = SEGMENT_BYTES,
        grow_bytes: int = GROW_BYTES,
    ) -> None:
        """Open the tier in `root`, or make it; pages committed earlier are there again.

        `capacity_bytes` caps everything under `root`, the index included. Files are extended by
        `grow_bytes` at a time, and only while the file system keeps `min_free_bytes` free.
        After a failed write, reserve() is empty for `retry_s`. Raises what NvmeRoot raises.
        O(pages), about 1.5 us each; O(slots) reads when the index is lost.
        """
        self.page_bytes = page_bytes
        self.checksums = checksums
        clock = clock or SystemClock()
        self._device = device or DirectDevice()
        self._min_free_bytes = min_free_bytes
        self._grow_bytes = grow_bytes
        self._lock = threading.Lock()
        self._publish_lock = threading.Lock()
        self._grow_lock = threading.Lock()
        self._closed = False
        self._idle = threading.Condition(self._lock)
        self._in_flight = 0
        self._staged: dict[int, _Staged | None] = {}
        self._sync_failures = 0
        self._forgotten: set[PageKey] = set()
        self._guard_line: str | None = None
        self._health = WriteHealth(clock, retry_s, f"nvme:{root}")
        self._root = NvmeRoot(root, page_bytes, capacity_bytes, segment_bytes, clock)
        parts = open_parts(self._root, self._device)
        self._segments = parts.segments
        self._index = parts.index
        self._recency = parts.recency
        self._table = parts.table

    @staticmethod
    def capacity_for(page_bytes: int, pages: int) -> int:
        """The smallest capacity_bytes that holds `pages`, index and control files included."""
        return capacity_for(page_bytes, pages)

    @property
    def direct(self) -> bool:
        """True when pages bypass the page cache (O_DIRECT)."""
        return self._segments.direct

    # --- life of a page -------------------------------------------------------------------

    def reserve(self, count: int) -> Reservation:
        with self._lock:
            self._ensure_open()
            if not self._health.writable():
                self._table.counters.rejected += count
                return Reservation(self, [])
            short = count > self._table.ready and self._table.usable < self._table.capacity
        if short:
            self._grow(count)
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
        source = check_length(payload, self.page_bytes, "write to the nvme tier")
        known = known_checksum(checksum)
        with self._lock:
            self._ensure_open()
            assert reservation.open, "the reservation is closed"
            slot = reservation.slots[index]
            self._staged.pop(slot, None)
            failures = self._sync_failures
            self._in_flight += 1
        staged: _Staged | None = None
        try:
            if not known and self.checksums:
                known = payload_checksum(source)
            header = self._first_header(known, key, owner)
            self._segments.write(slot, header.pack(), source)
            staged = _Staged(known, failures, header)
        except TierError as error:
            with self._lock:
                self._table.counters.io_errors += 1
                self._table.counters.rejected += 1
                self._health.fail(str(error))
            raise
        finally:
            with self._lock:
                self._staged[slot] = staged
                self._leave_locked()

    def _first_header(self, checksum: bytes, key: PageKey | None, owner: int) -> SlotHeader:
        """The header that goes out with a payload: complete when the key is known already.

        Complete headers without a checksum are not made: if the index were lost before the
        commit, nothing could tell a payload that was cut short.
        """
        if key is None or not checksum:
            return SlotHeader(NO_KEY, self.page_bytes, checksum, 0, state=STATE_WRITTEN)
        check_keys([key], 1)
        check_owners(owner, 1)
        with self._lock:
            tick = self._table.next_tick()
        return SlotHeader(key, self.page_bytes, checksum, tick, last_use=tick, owner=owner)

    def _leave_locked(self) -> None:
        """A transfer ended; close() waits for the last."""
        self._in_flight -= 1
        if not self._in_flight:
            self._idle.notify_all()

    def commit(
        self,
        reservation: Reservation,
        keys: Sequence[PageKey],
        owners: Sequence[int] | int = 0,
    ) -> list[CommitOutcome]:
        check_keys(keys, len(reservation))
        tags = check_owners(owners, len(keys))
        with self._publish_lock:
            with self._lock:
                self._ensure_open()
                batch = self._plan_locked(reservation, keys, tags)
            if batch.entries:
                self._publish(batch)
            return batch.outcomes

    def _plan_locked(
        self, reservation: Reservation, keys: Sequence[PageKey], owners: Sequence[int]
    ) -> _Batch:
        """Close the reservation and say of each slot what can become of it."""
        assert reservation.open, "the reservation is closed"
        reservation.open = False
        batch = _Batch([CommitOutcome.FAILED] * len(keys), [], [])
        fresh: set[PageKey] = set()
        for position, (slot, key) in enumerate(zip(reservation.slots, keys, strict=False)):
            untouched = slot not in self._staged
            staged = self._staged.pop(slot, None)
            if key in self._table.index or key in fresh:
                batch.outcomes[position] = CommitOutcome.EXISTS
                self._table.counters.duplicates += 1
                self._table.give_back(slot)
                if key in fresh:
                    batch.twins.append(position)
            elif staged is None:
                # Its write failed and was counted then, or nobody wrote it.
                self._table.counters.rejected += untouched
                self._table.give_back(slot)
            elif staged.sync_failures != self._sync_failures:
                self._table.counters.rejected += 1
                self._table.quarantine(slot)
            else:
                batch.entries.append(self._entry(position, slot, staged, key, owners[position]))
                fresh.add(key)
        for slot in reservation.slots[len(keys) :]:
            self._give_back(slot)
        return batch

    def _entry(
        self, position: int, slot: SlotId, staged: _Staged, key: PageKey, owner: int
    ) -> _Entry:
        header = staged.header
        if header.key == key and header.owner == owner and header.state == STATE_COMMITTED:
            return _Entry(position, slot, header, header_written=True)
        tick = self._table.next_tick()
        header = SlotHeader(key, self.page_bytes, staged.checksum, tick, last_use=tick, owner=owner)
        return _Entry(position, slot, header, header_written=False)

    def _publish(self, batch: _Batch) -> None:
        """Headers, fdatasync, index, table. Holds `_publish_lock`."""
        slots = [entry.slot for entry in batch.entries]
        try:
            for entry in batch.entries:
                if not entry.header_written:
                    self._segments.write_header(entry.slot, entry.header.pack())
        except TierError as error:
            self._fail(batch, error, suspect=[False] * len(slots))
            return
        try:
            self._sync(slots)
        except TierError as error:
            self._fail(batch, error, suspect=[True] * len(slots))
            return
        try:
            self._apply([(e.header.key, pack_entry(e.header, e.slot)) for e in batch.entries])
        except TierError as error:
            self._fail(batch, error, suspect=self._maybe_indexed(batch))
            return
        with self._lock:
            for entry in batch.entries:
                header = entry.header
                self._table.publish(
                    entry.slot, header.key, header.checksum, header.generation, header.owner
                )
                # Its generation may date from the write; as a use it is the newest.
                self._table.touch(entry.slot)
                batch.outcomes[entry.position] = CommitOutcome.COMMITTED
            self._health.succeed()
            self._recency.mark(slots)
        self._store_recency()

    def _sync(self, slots: Sequence[SlotId]) -> None:
        """fdatasync. An error condemns every page written and not yet committed."""
        try:
            self._segments.sync(slots)
        except TierError:
            with self._lock:
                self._sync_failures += 1
            raise

    def _apply(
        self, puts: Sequence[tuple[PageKey, bytes]], deletes: Sequence[PageKey] = ()
    ) -> None:
        """One index transaction; pages found bad since the last one leave the index with it."""
        with self._lock:
            forgotten = set(self._forgotten)
        self._index.apply([*forgotten, *deletes], puts)
        with self._lock:
            self._forgotten -= forgotten

    def _maybe_indexed(self, batch: _Batch) -> list[bool]:
        """After a failed transaction: which pages the index may name all the same."""
        try:
            return self._index.holds([entry.header.key for entry in batch.entries])
        except TierError:
            # An index that cannot be read any more says nothing: suppose that it has them all.
            log.warning("nvme root=%s index=unreadable", self._root.root)
            return [True] * len(batch.entries)

    def _fail(self, batch: _Batch, error: TierError, suspect: Sequence[bool]) -> None:
        """Say FAILED of the whole batch; suspect slots stay unused, the others are free again."""
        with self._lock:
            counters = self._table.counters
            counters.io_errors += 1
            counters.rejected += len(batch.entries) + len(batch.twins)
            counters.duplicates -= len(batch.twins)
            for position in batch.twins:
                batch.outcomes[position] = CommitOutcome.FAILED
            for entry, doubtful in zip(batch.entries, suspect, strict=True):
                if doubtful:
                    self._table.quarantine(entry.slot)
                else:
                    self._table.give_back(entry.slot)
            self._health.fail(str(error))

    def release(self, held: Reservation | Lease) -> None:
        with self._lock:
            if not held.open:
                return
            held.open = False
            if self._closed:
                return
            for slot in held.slots:
                if isinstance(held, Lease):
                    self._table.unlease(slot)
                else:
                    self._give_back(slot)

    def _give_back(self, slot: SlotId) -> None:
        self._staged.pop(slot, None)
        self._table.give_back(slot)

    # --- reading --------------------------------------------------------------------------

    def lease(self, keys: Sequence[PageKey], *, quiet: bool = False) -> Lease:
        with self._lock:
            self._ensure_open()
            slots = self._table.lease(keys, quiet)
            if not quiet:
                self._recency.mark(slots)
            checksums = [self._table.checksum_of(slot) for slot in slots]
            owners: list[int] = self._table.owner[slots].tolist()
            return Lease(self, list(keys[: len(slots)]), slots, checksums, owners)

    def read(self, lease: Lease, index: int, out: memoryview) -> ReadOutcome:
        target = check_length(out, self.page_bytes, "read from the nvme tier")
        with self._lock:
            self._ensure_open()
            assert lease.open, "the lease is closed"
            slot = lease.slots[index]
            if self._table.state[slot] == QUARANTINED:
                return ReadOutcome.CORRUPT
            generation = int(self._table.generation[slot])
            self._in_flight += 1
        try:
            header = parse_header(self._segments.read(slot, target))
        except TierError as error:
            log.warning("nvme root=%s read=failed reason=%s", self._root.root, error)
            self._condemn(slot, ReadOutcome.FAILED)
            return ReadOutcome.FAILED
        finally:
            with self._lock:
                self._leave_locked()
        checksum = lease.checksums[index]
        if (
            header is None
            or header.key != lease.keys[index]
            or header.payload_bytes != self.page_bytes
            or header.generation != generation
            or header.checksum != checksum
            or (self.checksums and checksum and payload_checksum(target) != checksum)
        ):
            self._condemn(slot, ReadOutcome.CORRUPT)
            return ReadOutcome.CORRUPT
        return ReadOutcome.OK

    def _condemn(self, slot: SlotId, outcome: ReadOutcome) -> None:
        """Take a page that could not be read out of use.

        A corrupt page leaves the index with the next transaction; until then a restart finds it
        and verifies it anew. One the device could not read stays in the index: after a restart
        the device may be well again.
        """
        with self._lock:
            counters = self._table.counters
            counters.io_errors += outcome is ReadOutcome.FAILED
            if self._table.state[slot] == QUARANTINED:
                return
            counters.corrupt += outcome is ReadOutcome.CORRUPT
            key = self._table.quarantine(slot)
            if key is not None and outcome is ReadOutcome.CORRUPT:
                self._forgotten.add(key)

    # --- making room ----------------------------------------------------------------------

    def evict(self, count: int, owners: Collection[int] | None = None) -> list[PageKey]:
        with self._publish_lock:
            with self._lock:
                self._ensure_open()
                slots = self._table.coldest(count, owners)
                keys = [self._table.detach(slot) for slot in slots]
            if not self._removed(keys):
                with self._lock:
                    for slot in slots:
                        self._table.reattach(slot)
                return []
            with self._lock:
                for slot in slots:
                    self._table.give_back(slot)
                self._table.counters.evictions += len(slots)
            return keys

    def drop(self, keys: Sequence[PageKey]) -> int:
        with self._publish_lock:
            with self._lock:
                self._ensure_open()
                present = [key for key in dict.fromkeys(keys) if key in self._table.index]
            if not self._removed(present):
                return 0
            with self._lock:
                # A page may have failed a read meanwhile: then it is gone already.
                return sum(self._table.remove(key) is not None for key in present)

    def _removed(self, keys: Sequence[PageKey]) -> bool:
        """Make the removal of these pages durable. False, and degraded, when that fails."""
        if not keys:
            return True
        try:
            self._apply([], deletes=keys)
        except TierError as error:
            with self._lock:
                self._table.counters.io_errors += 1
                self._health.fail(str(error))
            return False
        return True

    def touch(self, keys: Sequence[PageKey]) -> None:
        with self._lock:
            self._ensure_open()
            slots = [s for key in keys if (s := self._table.index.get(key)) is not None]
            for slot in slots:
                self._table.touch(slot)
            self._recency.mark(slots)

    # --- as a whole -----------------------------------------------------------------------

    def stats(self) -> TierStats:
        with self._lock:
            degraded = self._health.degraded or self._guard_line
            found = snapshot(self, self._table, self._root.geometry.slot_bytes, degraded)
            if self._guard_line is not None:
                # Slots that the guard withholds are no room: whoever needs some must evict.
                found = replace(
                    found, capacity_pages=self._table.usable, free_pages=self._table.ready
                )
            return found

    def check(self) -> None:
        with self._publish_lock, self._lock:
            self._ensure_open()
            self._table.check()
            for slot in self._staged:
                assert self._table.keys[slot] is None, f"slot {slot} is staged and committed"
            assert self._table.usable <= self._segments.slot_count, "usable slots past the files"

    def close(self) -> None:
        """Wait for transfers under way, at most CLOSE_WAIT_S each, then close everything.

        What a stalled device still holds past that keeps its files, and the root's lock, open
        until the process ends: closing them would let the transfer hit another file.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = True
            idle = self._idle.wait_for(lambda: not self._in_flight, CLOSE_WAIT_S)
        if not (idle and self._publish_lock.acquire(timeout=CLOSE_WAIT_S)):
            log.error("nvme root=%s close=abandoned reason=device_stalled", self._root.root)
            return
        try:
            if not self._grow_lock.acquire(timeout=CLOSE_WAIT_S):
                log.error("nvme root=%s close=abandoned reason=device_stalled", self._root.root)
                return
            try:
                self._close_files()
            finally:
                self._grow_lock.release()
        finally:
            self._publish_lock.release()

    def _close_files(self) -> None:
        """The last writes and the end. Holds `_publish_lock` and `_grow_lock`."""
        self._store_recency()
        try:
            if self._forgotten:
                self._index.apply(self._forgotten, [])
        except TierError as error:
            log.warning("nvme root=%s close=incomplete reason=%s", self._root.root, error)
        self._index.close()
        try:
            self._recency.close()
        except TierError as error:
            log.warning("nvme root=%s recency=lost reason=%s", self._root.root, error)
        self._segments.close()
        self._root.close()

    def _store_recency(self) -> None:
        """Write what changed of the order of use. Holds `_publish_lock`. Losing it is no harm."""
        with self._lock:
            blocks = self._recency.collect(self._table.last_use)
        try:
            self._recency.store(blocks)
        except TierError as error:
            log.warning("nvme root=%s recency=lost reason=%s", self._root.root, error)
            with self._lock:
                self._table.counters.io_errors += 1

    # --- room on the device ---------------------------------------------------------------

    def _grow(self, count: int) -> None:
        """Extend the files for `count` more slots, if the free-space guard lets us."""
        with self._grow_lock:
            with self._lock:
                usable = self._table.usable
                missing = count - self._table.ready
            geometry = self._root.geometry
            step = max(missing, self._grow_bytes // geometry.slot_bytes, 1)
            target = min(usable + step, geometry.slot_count)
            if missing <= 0 or target <= usable:
                return
            try:
                room = self._room_slots()
                if room:
                    target = min(target, usable + room)
                    self._segments.grow(target)
            except TierError as error:
                with self._lock:
                    self._table.counters.io_errors += 1
                    self._health.fail(str(error))
                return
            with self._lock:
                self._ensure_open()
                if room:
                    self._table.grow(target)
                    self._guard_line = None
                else:
                    self._guard_line = (
                        f"free-space guard: less than {self._min_free_bytes} bytes would stay "
                        f"free; the tier stays at {usable} pages"
                    )

    def _room_slots(self) -> int:
        """Slots the file system can take without going below the guard."""
        free = self._device.free_bytes(self._root.folder) - self._min_free_bytes
        return max(0, free // self._root.geometry.slot_bytes)
