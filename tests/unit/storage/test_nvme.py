"""The nvme tier: the contract, restart, faults, caps, bad input."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import pytest

from tests.support.clock import ManualClock
from tests.support.fault_device import EIO, ENOSPC, SHORT, FaultDevice, flip_bit
from tests.unit.storage.tier_conformance import (
    JOIN_LIMIT_S,
    PAGE_BYTES,
    PAGES,
    TierConformance,
    get,
    page_bytes_of,
    page_key,
    put,
)
from tierkv.storage.base import Tier
from tierkv.storage.checksum import payload_checksum
from tierkv.storage.device import BlockFile, DirectDevice
from tierkv.storage.errors import (
    CapacityError,
    ConfigError,
    DirectoryInUseError,
    FormatVersionError,
    TierFullError,
    TierIOError,
)
from tierkv.storage.slot_header import HEADER_BYTES, SlotHeader, slot_bytes_for
from tierkv.storage.tiers.host import HostTier
from tierkv.storage.tiers.nvme import NvmeTier
from tierkv.storage.tiers.nvme_index import ENTRY, NvmeIndex, pack_entry
from tierkv.storage.types import CommitOutcome, PageKey, ReadOutcome

SLOT = slot_bytes_for(PAGE_BYTES)
RETRY_S = 5.0


def open_nvme(
    root: Path, pages: int = PAGES, page_bytes: int = PAGE_BYTES, **more: Any
) -> NvmeTier:
    """A small tier: three slots a segment, two slots a step."""
    options = {
        "capacity_bytes": NvmeTier.capacity_for(page_bytes, pages),
        "min_free_bytes": 0,
        "retry_s": RETRY_S,
        "segment_bytes": 3 * slot_bytes_for(page_bytes),
        "grow_bytes": 2 * slot_bytes_for(page_bytes),
    }
    return NvmeTier(root, page_bytes, **(options | more))


def class_folder(root: Path) -> Path:
    return root / f"pages-{PAGE_BYTES}"


def segment(root: Path, number: int = 0) -> Path:
    return class_folder(root) / f"segment-{number:05d}.slots"


def tree_bytes(root: Path) -> int:
    return sum(p.stat().st_size for p in root.rglob("*") if p.is_file())


class TestNvme(TierConformance):
    def open_tier(self, folder: Path) -> Tier:
        return open_nvme(folder / "nvme")


class TestNvmeOverFaultDevice(TierConformance):
    def open_tier(self, folder: Path) -> Tier:
        return open_nvme(folder / "nvme", device=FaultDevice())


# --- restart ------------------------------------------------------------------------------


def test_r1_r2_a_restart_finds_pages_order_and_accounting(tmp_path: Path) -> None:
    first = open_nvme(tmp_path)
    put(first, [1, 2, 3, 4])
    first.lease([page_key(2)]).release()
    first.touch([page_key(1)])
    first.evict(1)
    first.close()
    second = open_nvme(tmp_path)
    second.check()
    stats = second.stats()
    assert (stats.recovered_pages, stats.committed_pages, stats.free_pages) == (3, 3, PAGES - 3)
    assert second.victims(9) == [page_key(n) for n in (4, 2, 1)]
    assert [get(second, n) for n in (1, 2, 3, 4)] == [
        page_bytes_of(1),
        page_bytes_of(2),
        None,
        page_bytes_of(4),
    ]
    put(second, [5])
    second.check()
    second.close()


def test_lost_or_damaged_recency_leaves_the_order_of_commits(tmp_path: Path) -> None:
    first = open_nvme(tmp_path)
    put(first, [1, 2, 3])
    first.touch([page_key(1)])
    first.close()
    flip_bit(class_folder(tmp_path) / "recency.bin", 3)
    second = open_nvme(tmp_path)
    second.check()
    assert second.victims(3) == [page_key(n) for n in (1, 2, 3)]
    second.close()


def test_r2_index_entries_that_cannot_be_right_are_dropped_and_counted(tmp_path: Path) -> None:
    tier = open_nvme(tmp_path)
    put(tier, [1, 2, 3])
    tier.close()
    index = NvmeIndex(class_folder(tmp_path) / "index", 1 << 20)
    keys, rows = index.load()
    changed = {key: row.copy() for key, row in zip(keys, rows, strict=True)}
    outside = np.zeros(1, ENTRY)
    outside[0] = changed[page_key(1)]
    outside["slot"] = 4000
    twin = np.zeros(1, ENTRY)
    twin[0] = changed[page_key(2)]
    twin["generation"] = 0
    index.apply([], [(page_key(7), outside.tobytes()), (page_key(8), twin.tobytes())])
    index.close()
    for _ in range(2):
        tier = open_nvme(tmp_path)
        tier.check()
        assert tier.lookup([page_key(n) for n in (1, 2, 3, 7, 8)]) == [True] * 3 + [False] * 2
        assert get(tier, 2) == page_bytes_of(2)
        found = tier.stats().corrupt
        tier.close()
    assert found == 0, "the second opening finds a clean index"


def test_w7_two_keys_on_one_slot_never_serve_the_wrong_page(tmp_path: Path) -> None:
    tier = open_nvme(tmp_path)
    put(tier, [1])
    tier.close()
    index = NvmeIndex(class_folder(tmp_path) / "index", 1 << 20)
    _, rows = index.load()
    younger = rows.copy()
    younger["generation"] = 50
    index.apply([], [(page_key(2), younger.tobytes())])
    index.close()
    tier = open_nvme(tmp_path)
    assert get(tier, 2) is None
    assert tier.stats().corrupt == 2
    tier.check()
    tier.close()


@pytest.mark.parametrize("told", [True, False])
def test_a_key_told_with_the_page_saves_the_second_header(tmp_path: Path, told: bool) -> None:
    device = FaultDevice()
    tier = open_nvme(tmp_path, device=device)
    put(tier, [9])
    before = device.operations["write"]
    with tier.reserve(2) as reservation:
        for index in range(2):
            key = page_key(index) if told else None
            tier.write(reservation, index, page_bytes_of(index), key=key, owner=3)
        assert device.operations["write"] == before + 2
        tier.commit(reservation, [page_key(0), page_key(1)], 3)
    # One more is the block of the order of use.
    assert device.operations["write"] == before + 2 + 1 + (0 if told else 2)
    assert get(tier, 0) == page_bytes_of(0)
    tier.close()


def test_a_page_written_early_and_committed_late_is_the_hottest(tmp_path: Path) -> None:
    tier = open_nvme(tmp_path)
    with tier.reserve(1) as reservation:
        tier.write(reservation, 0, page_bytes_of(1), key=page_key(1))
        put(tier, [2, 3])
        assert tier.victims(1) == [page_key(2)]
        tier.commit(reservation, [page_key(1)])
    tier.check()
    assert tier.victims(9) == [page_key(n) for n in (2, 3, 1)]
    tier.close()
    again = open_nvme(tmp_path)
    assert again.victims(9) == [page_key(n) for n in (2, 3, 1)]
    again.close()


def test_w7_a_rebuild_believes_the_youngest_whole_copy(tmp_path: Path) -> None:
    """A writer lost the race for a key, its slot's payload is torn, and then the index is lost."""
    tier = open_nvme(tmp_path)
    put(tier, [1])
    with tier.reserve(1) as reservation:
        slot = reservation.slots[0]
        tier.write(reservation, 0, page_bytes_of(1), key=page_key(1))
        assert tier.commit(reservation, [page_key(1)]) == [CommitOutcome.EXISTS]
    tier.close()
    torn = class_folder(tmp_path) / "segment-00000.slots"
    with torn.open("r+b") as file:
        file.seek(slot * slot_bytes_for(PAGE_BYTES) + HEADER_BYTES)
        file.write(b"torn")
    (class_folder(tmp_path) / "index" / "data.mdb").unlink()
    again = open_nvme(tmp_path)
    assert get(again, 1) == page_bytes_of(1)
    again.check()
    again.close()


@pytest.mark.parametrize("index_lost", [False, True])
def test_r2_owners_are_recovered_from_the_index_or_the_headers(
    tmp_path: Path, index_lost: bool
) -> None:
    first = open_nvme(tmp_path)
    put(first, [1, 2, 3], [4, 2**32 - 1, 4])
    first.close()
    if index_lost:
        (class_folder(tmp_path) / "index" / "data.mdb").unlink()
    second = open_nvme(tmp_path)
    second.check()
    assert second.owners() == {4: 2, 2**32 - 1: 1}
    assert sorted(second.keys_of(4)) == [page_key(1), page_key(3)]
    second.close()


@pytest.mark.parametrize("loss", ["missing", "empty", "garbage", "truncated"])
def test_r1_a_lost_index_is_rebuilt_from_slot_headers(tmp_path: Path, loss: str) -> None:
    first = open_nvme(tmp_path)
    put(first, [1, 2, 3, 4])
    unsealed = first.reserve(1)
    first.write(unsealed, 0, page_bytes_of(9))
    first.close()
    data = class_folder(tmp_path) / "index" / "data.mdb"
    if loss == "missing":
        data.unlink()
    elif loss == "empty":
        data.write_bytes(b"")
    elif loss == "garbage":
        data.write_bytes(bytes(range(256)) * 128)
    else:
        os.truncate(data, 8192)
    flip_bit(segment(tmp_path), HEADER_BYTES + 99)
    second = open_nvme(tmp_path)
    second.check()
    assert second.stats().recovered_pages == 4
    assert [get(second, n) for n in (1, 2, 3, 4)] == [
        None,
        *(page_bytes_of(n) for n in (2, 3, 4)),
    ]
    second.close()


def test_c1_a_lower_cap_gives_space_back_and_keeps_what_fits(tmp_path: Path) -> None:
    tier = open_nvme(tmp_path)
    put(tier, list(range(PAGES)))
    tier.close()
    capacity = NvmeTier.capacity_for(PAGE_BYTES, 4)
    tier = open_nvme(tmp_path, pages=4)
    tier.check()
    stats = tier.stats()
    assert (stats.capacity_pages, stats.committed_pages) == (4, 4)
    assert all(get(tier, n) == page_bytes_of(n) for n in range(4))
    tier.close()
    assert tree_bytes(tmp_path) <= capacity
    assert not segment(tmp_path, 2).exists()


def test_a_missing_segment_costs_only_its_pages(tmp_path: Path) -> None:
    tier = open_nvme(tmp_path)
    put(tier, list(range(PAGES)))
    tier.close()
    segment(tmp_path, 1).unlink()
    tier = open_nvme(tmp_path)
    tier.check()
    found = [n for n in range(PAGES) if get(tier, n) is not None]
    assert found == [0, 1, 2, 6, 7]
    with tier.reserve(PAGES) as reservation:
        assert len(reservation) == 3
    tier.check()
    tier.close()


# --- damage -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "offset", [0, 17, 50, 57, 73, 81, HEADER_BYTES, HEADER_BYTES + PAGE_BYTES - 1]
)
def test_w7_a_flipped_bit_is_found_counted_and_forgotten(tmp_path: Path, offset: int) -> None:
    tier = open_nvme(tmp_path)
    put(tier, [1, 2])
    flip_bit(segment(tmp_path), offset, bit=3)
    assert get(tier, 1) is None
    tier.check()
    stats = tier.stats()
    assert (stats.corrupt, stats.quarantined_pages) == (1, 1)
    assert get(tier, 1) is None
    assert tier.stats().corrupt == 1, "negative: looked up, not read again"
    assert get(tier, 2) == page_bytes_of(2)
    tier.close()
    tier = open_nvme(tmp_path)
    assert tier.lookup([page_key(1), page_key(2)]) == [False, True]
    tier.close()


def test_w7_a_truncated_file_is_a_failed_read_not_data(tmp_path: Path) -> None:
    tier = open_nvme(tmp_path)
    put(tier, [1, 2])
    os.truncate(segment(tmp_path), SLOT + HEADER_BYTES)
    with tier.lease([page_key(2)]) as lease:
        out = memoryview(bytearray(PAGE_BYTES))
        assert tier.read(lease, 0, out) is ReadOutcome.FAILED
    assert tier.stats().io_errors == 1
    assert tier.lookup([page_key(1), page_key(2)]) == [True, False]
    tier.check()
    tier.close()


def test_a_committed_page_replaces_a_quarantined_one_also_in_the_index(tmp_path: Path) -> None:
    tier = open_nvme(tmp_path)
    put(tier, [1])
    flip_bit(segment(tmp_path), HEADER_BYTES)
    assert get(tier, 1) is None
    assert put(tier, [1]) == [CommitOutcome.COMMITTED]
    tier.close()
    tier = open_nvme(tmp_path)
    assert get(tier, 1) == page_bytes_of(1)
    tier.close()


# --- a failing device ---------------------------------------------------------------------


def test_eio_on_a_read_is_a_miss_and_is_tried_again_after_a_restart(tmp_path: Path) -> None:
    device = FaultDevice()
    tier = open_nvme(tmp_path, device=device)
    put(tier, [1])
    device.fail("read", EIO)
    with tier.lease([page_key(1)]) as lease:
        out = memoryview(bytearray(PAGE_BYTES))
        assert tier.read(lease, 0, out) is ReadOutcome.FAILED
        tier.check()
    assert tier.lookup([page_key(1)]) == [False]
    assert tier.stats().io_errors == 1
    tier.close()
    tier = open_nvme(tmp_path, device=device)
    assert get(tier, 1) == page_bytes_of(1)
    tier.close()


@pytest.mark.parametrize(
    ("code", "error"), [(EIO, TierIOError), (ENOSPC, TierFullError), (SHORT, TierIOError)]
)
def test_c2_c4_a_failed_write_degrades_until_the_retry(
    tmp_path: Path, code: int, error: type[Exception]
) -> None:
    device, clock = FaultDevice(), ManualClock()
    tier = open_nvme(tmp_path, device=device, clock=clock)
    put(tier, [1])
    device.fail("write", code)
    with tier.reserve(1) as reservation:
        with pytest.raises(error):
            tier.write(reservation, 0, page_bytes_of(2))
        tier.check()
    stats = tier.stats()
    assert (stats.io_errors, stats.rejected, stats.free_pages) == (1, 1, PAGES - 1)
    assert stats.degraded is not None
    assert "\n" not in stats.degraded
    with tier.reserve(2) as refused:
        assert len(refused) == 0
    assert tier.stats().rejected == 3, "a refused write is counted"
    assert get(tier, 1) == page_bytes_of(1), "reads go on"
    clock.advance(RETRY_S)
    assert put(tier, [2]) == [CommitOutcome.COMMITTED]
    assert tier.stats().degraded is None
    tier.close()


def test_a_slot_whose_write_failed_can_be_written_again(tmp_path: Path) -> None:
    device = FaultDevice()
    tier = open_nvme(tmp_path, device=device)
    with tier.reserve(1) as reservation:
        device.fail("write", EIO)
        with pytest.raises(TierIOError):
            tier.write(reservation, 0, page_bytes_of(1))
        tier.write(reservation, 0, page_bytes_of(1))
        assert tier.commit(reservation, [page_key(1)]) == [CommitOutcome.COMMITTED]
    tier.check()
    tier.close()


def test_c4_a_failed_sync_fails_the_batch_and_everything_written_before_it(tmp_path: Path) -> None:
    device, clock = FaultDevice(), ManualClock()
    tier = open_nvme(tmp_path, device=device, clock=clock)
    first, second = tier.reserve(1), tier.reserve(1)
    tier.write(first, 0, page_bytes_of(1))
    tier.write(second, 0, page_bytes_of(2))
    device.fail("fdatasync", EIO)
    assert tier.commit(first, [page_key(1)]) == [CommitOutcome.FAILED]
    tier.check()
    # The kernel reports an error once: the next sync says all is well, and it is not.
    assert tier.commit(second, [page_key(2)]) == [CommitOutcome.FAILED]
    tier.check()
    stats = tier.stats()
    assert (stats.quarantined_pages, stats.rejected, stats.committed_pages) == (2, 2, 0)
    assert stats.degraded is not None
    clock.advance(RETRY_S)
    assert put(tier, [1, 2]) == [CommitOutcome.COMMITTED] * 2
    assert tier.stats().degraded is None
    tier.close()
    tier = open_nvme(tmp_path)
    assert get(tier, 1) == page_bytes_of(1)
    tier.close()


def test_c4_a_key_twice_in_a_failed_batch_is_not_said_to_exist(tmp_path: Path) -> None:
    device = FaultDevice()
    tier = open_nvme(tmp_path, device=device)
    device.fail("fdatasync", EIO)
    assert put(tier, [1, 1]) == [CommitOutcome.FAILED] * 2
    stats = tier.stats()
    assert (stats.duplicates, stats.rejected) == (0, 2)
    tier.close()


class _FullIndex:
    """An index whose transactions are refused before they begin."""

    def __init__(self, index: NvmeIndex) -> None:
        self.holds = index.holds

    def apply(self, deletes: Any, puts: Any) -> None:
        raise TierFullError("commit index: its share of the cap is used up")


class _BrokenIndex:
    """Makes the transactions of an index fail."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.broken = False
        begin = lmdb.Environment.begin

        def begin_or_fail(env: lmdb.Environment, *a: Any, **k: Any) -> Any:
            if self.broken:
                raise lmdb.DiskError("no space left on device")
            return begin(env, *a, **k)

        real = lmdb.open

        class Wrapped:
            def __init__(self, env: lmdb.Environment) -> None:
                self._env = env

            def begin(self, *a: Any, **k: Any) -> Any:
                return begin_or_fail(self._env, *a, **k)

            def __getattr__(self, name: str) -> Any:
                return getattr(self._env, name)

        monkeypatch.setattr(lmdb, "open", lambda *a, **k: Wrapped(real(*a, **k)))


def test_c4_an_index_that_fails_degrades_and_nothing_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index, clock = _BrokenIndex(monkeypatch), ManualClock()
    tier = open_nvme(tmp_path, clock=clock)
    put(tier, [1, 2])
    reservation = tier.reserve(1)
    tier.write(reservation, 0, page_bytes_of(3))
    index.broken = True
    assert tier.commit(reservation, [page_key(3)]) == [CommitOutcome.FAILED]
    tier.check()
    assert tier.stats().quarantined_pages == 1, "nobody can say what the index holds"
    assert tier.evict(1) == []
    assert tier.drop([page_key(2)]) == 0
    tier.check()
    assert tier.stats().degraded is not None
    assert tier.lookup([page_key(n) for n in (1, 2, 3)]) == [True, True, False]
    assert get(tier, 1) == page_bytes_of(1)
    index.broken = False
    clock.advance(RETRY_S)
    assert put(tier, [3]) == [CommitOutcome.COMMITTED]
    assert tier.evict(1) == [page_key(2)]
    tier.close()


def test_h1_a_stalled_sync_holds_up_no_reader(tmp_path: Path) -> None:
    device = FaultDevice()
    tier = open_nvme(tmp_path, device=device)
    put(tier, [1])
    stall = device.stall("fdatasync")
    committer = threading.Thread(target=put, args=(tier, [2]))
    committer.start()
    assert stall.reached.wait(JOIN_LIMIT_S)
    assert tier.lookup([page_key(1), page_key(2)]) == [True, False]
    assert get(tier, 1) == page_bytes_of(1)
    with tier.reserve(1) as reservation:
        tier.write(reservation, 0, page_bytes_of(3))
    assert tier.stats().committed_pages == 1
    stall.release()
    committer.join(JOIN_LIMIT_S)
    assert get(tier, 2) == page_bytes_of(2)
    tier.check()
    tier.close()


def test_close_waits_for_a_transfer_under_way(tmp_path: Path) -> None:
    device = FaultDevice()
    tier = open_nvme(tmp_path, device=device)
    reservation = tier.reserve(1)
    stall = device.stall("write")
    writer = threading.Thread(target=tier.write, args=(reservation, 0, page_bytes_of(1)))
    writer.start()
    assert stall.reached.wait(JOIN_LIMIT_S)
    closer = threading.Thread(target=tier.close)
    closer.start()
    with pytest.raises(DirectoryInUseError):
        open_nvme(tmp_path)
    stall.release()
    writer.join(JOIN_LIMIT_S)
    closer.join(JOIN_LIMIT_S)
    assert not closer.is_alive()
    open_nvme(tmp_path).close()


# --- room ---------------------------------------------------------------------------------


def test_c1_the_cap_counts_everything_in_the_folder(tmp_path: Path) -> None:
    capacity = NvmeTier.capacity_for(PAGE_BYTES, 40)
    tier = open_nvme(tmp_path, pages=40, grow_bytes=1 << 30)
    for start in range(0, 400, 8):
        while tier.stats().free_pages < 8:
            tier.evict(8)
        put(tier, list(range(start, start + 8)))
        assert tree_bytes(tmp_path) <= capacity
    tier.close()
    assert tree_bytes(tmp_path) <= capacity


def test_files_grow_as_needed(tmp_path: Path) -> None:
    tier = open_nvme(tmp_path)
    assert not segment(tmp_path).exists()
    put(tier, [1])
    assert segment(tmp_path).stat().st_size == 2 * SLOT
    put(tier, [2, 3, 4, 5])
    assert segment(tmp_path).stat().st_size == 3 * SLOT
    assert segment(tmp_path, 1).stat().st_size == 2 * SLOT
    tier.check()
    tier.close()


def test_c2_the_free_space_guard_stops_growth_and_says_so(tmp_path: Path) -> None:
    device = FaultDevice(free_bytes=1000 + 3 * SLOT)
    tier = open_nvme(tmp_path, device=device, min_free_bytes=1000)
    put(tier, [1, 2])
    device.free = 1000 + SLOT - 1
    with tier.reserve(1) as refused:
        assert len(refused) == 0
    degraded = tier.stats().degraded
    assert degraded is not None
    assert degraded.startswith("free-space guard")
    stats = tier.stats()
    assert (stats.capacity_pages, stats.free_pages) == (2, 0), "what is withheld is no room"
    tier.check()
    tier.evict(1)
    assert put(tier, [3]) == [CommitOutcome.COMMITTED], "the tier goes on at its size"
    device.free = 1 << 30
    put(tier, [4, 5])
    assert tier.stats().degraded is None
    tier.close()


def test_c2_a_full_disk_while_growing_degrades(tmp_path: Path) -> None:
    device = FaultDevice()
    tier = open_nvme(tmp_path, device=device)
    device.fail("allocate", ENOSPC)
    with tier.reserve(1) as refused:
        assert len(refused) == 0
    degraded = tier.stats().degraded
    assert degraded is not None
    assert "No space left on device" in degraded
    tier.check()
    tier.close()


def test_c1_two_models_use_one_root_in_turn_under_one_cap(tmp_path: Path) -> None:
    capacity = NvmeTier.capacity_for(PAGE_BYTES, 100)
    first = open_nvme(tmp_path, capacity_bytes=capacity)
    put(first, [1, 2])
    first.close()
    second = open_nvme(tmp_path, page_bytes=9000, capacity_bytes=capacity)
    put(second, [1])
    assert get(second, 1) == page_bytes_of(1, 9000)
    second.close()
    third = open_nvme(tmp_path, capacity_bytes=capacity)
    assert get(third, 2) == page_bytes_of(2)
    assert third.stats().capacity_pages < 100
    third.close()
    assert tree_bytes(tmp_path) <= capacity


def test_c1_the_longest_unused_size_class_goes_when_it_takes_more_than_half(
    tmp_path: Path,
) -> None:
    capacity = NvmeTier.capacity_for(PAGE_BYTES, 8)
    clock = ManualClock()
    first = open_nvme(tmp_path, capacity_bytes=capacity, clock=clock)
    put(first, list(range(8)))
    first.close()
    clock.advance(1)
    second = open_nvme(tmp_path, page_bytes=9000, capacity_bytes=capacity, clock=clock)
    put(second, [1])
    assert not class_folder(tmp_path).exists()
    assert tree_bytes(tmp_path) <= capacity
    second.close()


def test_an_index_entry_follows_the_format_document() -> None:
    checksum = payload_checksum(bytes(5000))
    header = SlotHeader(page_key(1), 5000, checksum, 7)
    assert pack_entry(header, 3).hex() == (
        "0700000000000000881300000000000003000000010000004f64c6c36836832295929931b75a6d9f"
    )
    owned = SlotHeader(page_key(1), 5000, checksum, 7, owner=0x01020304)
    assert pack_entry(owned, 3)[8:16].hex() == "8813000004030201"


def test_the_index_grows_when_its_map_is_full(tmp_path: Path) -> None:
    index = NvmeIndex(tmp_path, 4 << 20)
    value = bytes(ENTRY.itemsize)
    index.apply([], [(page_key(n), value) for n in range(6000)])
    keys, _ = index.load()
    assert len(keys) == 6000
    index.close()


def test_c4_a_page_the_index_has_no_room_for_fails_and_its_slot_is_free_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = ManualClock()
    tier = open_nvme(tmp_path, clock=clock)
    put(tier, [1])
    with monkeypatch.context() as patch:
        patch.setattr(tier, "_index", _FullIndex(tier._index))
        assert put(tier, [2]) == [CommitOutcome.FAILED]
    stats = tier.stats()
    assert (stats.quarantined_pages, stats.free_pages) == (0, PAGES - 1)
    assert stats.degraded is not None
    clock.advance(RETRY_S)
    assert put(tier, [2]) == [CommitOutcome.COMMITTED]
    tier.close()


def test_c1_the_index_stops_at_its_share_of_the_cap(tmp_path: Path) -> None:
    index = NvmeIndex(tmp_path, 300 << 10)
    with pytest.raises(TierFullError, match="raise the nvme capacity"):
        index.apply([], [(page_key(n), bytes(ENTRY.itemsize)) for n in range(6000)])
    assert index.load()[0] == []
    index.apply([], [(page_key(1), bytes(ENTRY.itemsize))])
    index.close()
    assert (tmp_path / "data.mdb").stat().st_size <= 300 << 10


# --- bad input ----------------------------------------------------------------------------


def test_a_capacity_below_one_page_names_the_number(tmp_path: Path) -> None:
    needed = NvmeTier.capacity_for(PAGE_BYTES, 1)
    with pytest.raises(CapacityError, match=f"nvme capacity to at least {needed}"):
        open_nvme(tmp_path, capacity_bytes=needed - 1)
    open_nvme(tmp_path, capacity_bytes=needed).close()


def test_a_folder_in_use_names_folder_and_process(tmp_path: Path) -> None:
    tier = open_nvme(tmp_path)
    with pytest.raises(DirectoryInUseError, match=f"{tmp_path}: in use by process {os.getpid()}"):
        open_nvme(tmp_path)
    put(tier, [1])
    tier.close()
    open_nvme(tmp_path).close()


@pytest.mark.parametrize("where", ["root", "class"])
def test_another_format_version_is_refused_and_left_as_it_was(tmp_path: Path, where: str) -> None:
    tier = open_nvme(tmp_path)
    put(tier, [1])
    tier.close()
    folder = tmp_path if where == "root" else class_folder(tmp_path)
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(manifest | {"version": 2}))
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    with pytest.raises(FormatVersionError, match="format version 2, this TierKV reads 1"):
        open_nvme(tmp_path)
    before.pop(tmp_path / "LOCK")
    assert all(path.read_bytes() == data for path, data in before.items())


@pytest.mark.parametrize("content", ["{", "[]", '{"version": 1, "slots_per_segment": 0}'])
def test_a_damaged_manifest_is_one_clear_line(tmp_path: Path, content: str) -> None:
    open_nvme(tmp_path).close()
    (class_folder(tmp_path) / "manifest.json").write_text(content)
    with pytest.raises(ConfigError, match=r"manifest\.json") as caught:
        open_nvme(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_root_that_is_a_file_is_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match="choose another"):
        open_nvme(tmp_path / "file")
    with pytest.raises(ConfigError, match="choose another"):
        open_nvme(tmp_path / "file" / "below")


@pytest.mark.skipif(os.geteuid() == 0, reason="the super-user may write anywhere")
def test_an_unwritable_root_is_one_clear_line(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(ConfigError, match="Permission denied"):
        open_nvme(tmp_path / "nvme")


def test_a_device_that_fails_while_opening_leaves_the_root_free(tmp_path: Path) -> None:
    tier = open_nvme(tmp_path)
    put(tier, [1])
    tier.close()
    device = FaultDevice()
    device.fail("open", EIO)
    with pytest.raises(ConfigError, match="Input/output error"):
        open_nvme(tmp_path, device=device)
    tier = open_nvme(tmp_path)
    assert get(tier, 1) == page_bytes_of(1)
    tier.close()


def test_page_bytes_out_of_range_are_refused(tmp_path: Path) -> None:
    for page_bytes in (0, 1 << 30):
        with pytest.raises(ConfigError, match="page_bytes must be"):
            NvmeTier(tmp_path, page_bytes, 1 << 40)


class _CountingDevice(DirectDevice):
    """Notes the addresses that transfers use."""

    def __init__(self) -> None:
        self.addresses: list[int] = []

    def open(self, path: Path, *, create: bool = False) -> BlockFile:
        file = super().open(path, create=create)
        outer = self

        class Noting:
            direct = file.direct

            def __getattr__(self, name: str) -> Any:
                return getattr(file, name)

            def pwritev(self, buffers: Any, offset: int) -> None:
                outer.addresses += [np.frombuffer(b, np.uint8).ctypes.data for b in buffers]
                file.pwritev(buffers, offset)

        return Noting()


def test_an_aligned_page_goes_to_the_device_without_a_copy(tmp_path: Path) -> None:
    device, page = _CountingDevice(), 8192
    host = HostTier(None, page, HostTier.capacity_for(page, 1))
    put(host, [1])
    tier = open_nvme(tmp_path, page_bytes=page, device=device)
    with host.lease([page_key(1)]) as lease, tier.reserve(1) as reservation:
        view = host.view(lease, 0)
        tier.write(reservation, 0, view, lease.checksums[0])
        assert np.frombuffer(view, np.uint8).ctypes.data in device.addresses
        tier.commit(reservation, [PageKey(lease.keys[0])])
    assert get(tier, 1) == page_bytes_of(1, page)
    tier.close()
    host.close()
