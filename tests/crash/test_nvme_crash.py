"""Power loss at every write and sync of a scripted workload on the nvme tier.

At each point the folder is copied as the disk could show it: unsynced bytes dropped, kept, or
torn at 4 KiB or 512 B. LMDB syncs its own files inside its transaction, which no point lies in,
so the index folder is copied as it is at that moment: points before a transaction have the old
index, points after it the new one. The copy is opened and must hold every page whose commit was
acknowledged, and serve nothing that is not right.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.clock import ManualClock
from tests.support.fault_device import EIO, FaultDevice
from tests.unit.storage.tier_conformance import PAGE_BYTES, get, page_bytes_of, page_key
from tierkv.storage.slot_header import slot_bytes_for
from tierkv.storage.tiers.nvme import NvmeTier
from tierkv.storage.types import CommitOutcome

PAGES = 6
NUMBERS = range(12)
SEED = 20261129
CAPACITY = NvmeTier.capacity_for(PAGE_BYTES, PAGES)
RETRY_S = 5.0


def open_nvme(
    root: Path, device: FaultDevice | None = None, clock: ManualClock | None = None
) -> NvmeTier:
    return NvmeTier(
        root,
        PAGE_BYTES,
        CAPACITY,
        device=device,
        clock=clock,
        min_free_bytes=0,
        retry_s=RETRY_S,
        segment_bytes=3 * slot_bytes_for(PAGE_BYTES),
        grow_bytes=2 * slot_bytes_for(PAGE_BYTES),
    )


class Workload:
    """Drives a tier and keeps what it was told: which pages must survive a power loss now."""

    def __init__(
        self, root: Path, on_point: Callable[[str], None], keys_told: bool = False
    ) -> None:
        self.root = root
        self.keys_told = keys_told
        self.clock = ManualClock()
        self.device = FaultDevice(on_point=on_point)
        self.certain: set[int] = set()
        self.tier = open_nvme(root, self.device, self.clock)

    def put(self, *numbers: int) -> list[CommitOutcome]:
        with self.tier.reserve(len(numbers)) as reservation:
            assert len(reservation) == len(numbers)
            for index, number in enumerate(numbers):
                key = page_key(number) if self.keys_told else None
                self.tier.write(reservation, index, page_bytes_of(number), key=key)
            outcomes = self.tier.commit(reservation, [page_key(n) for n in numbers])
        stored = (CommitOutcome.COMMITTED, CommitOutcome.EXISTS)
        pairs = zip(numbers, outcomes, strict=True)
        self.certain |= {number for number, outcome in pairs if outcome in stored}
        self.tier.check()
        return outcomes

    def evict(self, count: int) -> None:
        self.certain -= {int.from_bytes(key, "big") for key in self.tier.victims(count)}
        self.tier.evict(count)
        self.tier.check()

    def drop(self, *numbers: int) -> None:
        self.certain -= set(numbers)
        self.tier.drop([page_key(n) for n in numbers])
        self.tier.check()

    def read(self, *numbers: int) -> None:
        for number in numbers:
            assert get(self.tier, number) == page_bytes_of(number)

    def script(self) -> None:
        """Fills, overwrites evicted slots, meets a failing sync, goes on."""
        self.put(0, 1, 2)
        self.put(3, 4)
        self.read(0, 3)
        self.evict(2)
        self.put(5, 6, 0)
        # Written again though it is there: the loser's slot must never win over the page's.
        self.drop(6)
        self.put(5)
        self.drop(4)
        self.put(7, 1)
        self.evict(1)
        self.device.fail("fdatasync", EIO)
        assert self.put(8) == [CommitOutcome.FAILED]
        self.clock.advance(RETRY_S)
        self.evict(1)
        self.put(8)
        self.tier.close()


def judge(root: Path, certain: set[int], whole_index: bool) -> None:
    """Open what a power loss left and compare with what was acknowledged."""
    tier = open_nvme(root)
    tier.check()
    there = {n for n in NUMBERS if tier.lookup([page_key(n)]) == [True]}
    assert certain <= there, f"acknowledged pages lost: {sorted(certain - there)}"
    for number in sorted(there):
        found = get(tier, number)
        if found is None:
            assert number not in certain, f"acknowledged page {number} does not verify"
            assert not whole_index, f"the index promised page {number} before it was durable"
        else:
            assert found == page_bytes_of(number), f"page {number} is wrong"
    tier.check()
    stats = tier.stats()
    assert stats.recovered_pages == len(there)
    # The recovered accounting is what is there: what is left can be written, and no more.
    with tier.reserve(PAGES + 1) as reservation:
        assert len(reservation) == stats.free_pages
    tier.close()
    assert sum(p.stat().st_size for p in root.rglob("*") if p.is_file()) <= CAPACITY


@pytest.mark.parametrize("mode", ["drop", "keep", "torn4096", "torn512"])
@pytest.mark.parametrize("whole_index", [True, False], ids=["index", "index_lost"])
@pytest.mark.parametrize("keys_told", [False, True], ids=["key_at_commit", "key_at_write"])
def test_r2_w7_c4_power_loss_at_every_write_and_sync(
    tmp_path: Path, mode: str, whole_index: bool, keys_told: bool
) -> None:
    points = 0
    scratch = tmp_path / "after"
    workload: Workload | None = None

    def cut(name: str) -> None:
        nonlocal points
        if workload is None:
            return
        points += 1
        seed = SEED + points
        workload.device.power_loss_copy(workload.root, scratch, mode, seed)
        if not whole_index:
            shutil.rmtree(next(scratch.glob("pages-*")) / "index")
        try:
            judge(scratch, workload.certain, whole_index)
        except AssertionError as error:
            raise AssertionError(f"point {points} {name} mode={mode} seed={seed}") from error
        shutil.rmtree(scratch)

    workload = Workload(tmp_path / "nvme", cut, keys_told)
    workload.script()
    assert points > 40, f"only {points} points met"
    judge(tmp_path / "nvme", workload.certain, whole_index=True)


def test_c4_a_batch_whose_sync_failed_is_not_there_after_a_power_loss(tmp_path: Path) -> None:
    device = FaultDevice()
    tier = open_nvme(tmp_path / "nvme", device)
    device.fail("fdatasync", EIO)
    with tier.reserve(1) as reservation:
        tier.write(reservation, 0, page_bytes_of(1))
        assert tier.commit(reservation, [page_key(1)]) == [CommitOutcome.FAILED]
    device.power_loss_copy(tmp_path / "nvme", tmp_path / "after", "keep")
    tier.close()
    judge(tmp_path / "after", set(), whole_index=True)


def test_r1_recency_at_the_last_commit_survives_kill_9(tmp_path: Path) -> None:
    device = FaultDevice()
    tier = open_nvme(tmp_path / "nvme", device)
    for numbers in ([0, 1, 2], [3]):
        with tier.reserve(len(numbers)) as reservation:
            for index, number in enumerate(numbers):
                tier.write(reservation, index, page_bytes_of(number))
            tier.commit(reservation, [page_key(n) for n in numbers])
        tier.touch([page_key(0)])
    shutil.copytree(tmp_path / "nvme", tmp_path / "after")
    tier.close()
    after = open_nvme(tmp_path / "after")
    assert after.victims(4) == [page_key(n) for n in (1, 2, 0, 3)]
    after.close()


@pytest.mark.parametrize("cut", range(4))
def test_c2_dying_while_the_index_is_rebuilt_loses_nothing(tmp_path: Path, cut: int) -> None:
    """A rebuild that was cut short left index.new behind; the next opening starts over."""
    tier = open_nvme(tmp_path)
    with tier.reserve(2) as reservation:
        for number in range(2):
            tier.write(reservation, number, page_bytes_of(number))
        tier.commit(reservation, [page_key(0), page_key(1)])
    tier.close()
    index = next(tmp_path.glob("pages-*")) / "index"
    fresh = index.with_name("index.new")
    if cut == 0:
        fresh.mkdir()
    elif cut == 1:
        shutil.copytree(index, fresh)
    elif cut == 2:
        index.replace(fresh)
    else:
        shutil.rmtree(index)
        index.mkdir()
    judge(tmp_path, {0, 1}, whole_index=True)
