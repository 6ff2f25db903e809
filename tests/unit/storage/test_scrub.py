"""Scrubber: damage on nvme is found before it is asked for, without pretending demand."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.memory_tier import MemoryHostTier, MemoryTier
from tests.support.pages import page_key, page_keys, put_store, put_tier, take_content
from tierkv.storage.errors import TierIOError
from tierkv.storage.eviction_log import EvictionReason
from tierkv.storage.scrub import ScrubReport
from tierkv.storage.store import StoreConfig, TieredStore
from tierkv.storage.tiers.host import HostTier
from tierkv.storage.tiers.nvme import NvmeTier
from tierkv.storage.types import ReadOutcome

PAGE_BYTES = 4096
WAIT_S = 20.0


class Rig:
    """A store with ten pages on nvme only."""

    def __init__(self) -> None:
        self.host = MemoryHostTier(PAGE_BYTES, 8)
        self.nvme = MemoryTier(PAGE_BYTES, 32)
        put_tier(self.nvme, page_keys(*range(10)))
        self.store = TieredStore(self.host, self.nvme)


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig()
    yield made
    made.store.check()
    made.store.close()


def test_steps_cover_each_page_once_and_start_again(rig: Rig) -> None:
    reports = [rig.store.scrub_step(4) for _ in range(3)]
    assert [report.checked for report in reports] == [4, 4, 2]
    assert [report.position for report in reports] == pytest.approx([0.4, 0.8, 1.0])
    assert rig.store.scrub_step(100) == ScrubReport(10, 0, 0, 1.0)
    assert rig.nvme.calls["read"] == 20


def test_w7_a_corrupt_page_is_quarantined_and_logged(rig: Rig) -> None:
    rig.nvme.flip_bit(page_key(3))
    report = rig.store.scrub_step(100)
    assert (report.checked, report.corrupt, report.failed) == (10, 1, 0)
    assert rig.store.lookup(page_keys(3)) == [None]
    (eviction,) = rig.store.evicted_when(page_key(3))
    assert eviction.reason is EvictionReason.CORRUPT
    assert rig.nvme.stats().quarantined_pages == 1


def test_a_device_that_fails_is_counted(rig: Rig) -> None:
    rig.nvme.answer_reads(ReadOutcome.FAILED)
    rig.nvme.fail_next("lease", TierIOError("lease: EIO"))
    report = rig.store.scrub_step(100)
    assert (report.corrupt, report.failed) == (0, 2)


def test_scrubbing_is_no_demand(rig: Rig) -> None:
    before, cold = rig.nvme.stats(), rig.nvme.victims(10)
    rig.store.scrub_step(100)
    assert rig.nvme.stats() == before
    assert rig.nvme.victims(10) == cold


def test_the_coldest_come_first_and_pages_just_read_are_left_out(rig: Rig) -> None:
    rig.store.scrub_step(1)
    assert take_content(rig.store, page_keys(8, 9)) == 2
    assert rig.store.wait_quiet(WAIT_S)
    assert rig.store.scrub_step(100).checked == 7


def test_pages_that_left_meanwhile_are_passed_over(rig: Rig) -> None:
    rig.store.scrub_step(1)
    rig.nvme.drop(page_keys(1, 2, 3))
    assert rig.store.scrub_step(100) == ScrubReport(6, 0, 0, 1.0)


def test_an_empty_tier_and_no_tier_are_done_at_once(rig: Rig) -> None:
    rig.nvme.drop(page_keys(*range(10)))
    assert rig.store.scrub_step(4) == ScrubReport(0, 0, 0, 1.0)
    alone = TieredStore(MemoryHostTier(PAGE_BYTES, 4))
    assert alone.scrub_step(4) == ScrubReport(0, 0, 0, 1.0)
    alone.close()


def test_w7_a_flipped_bit_on_the_real_tier_is_found(tmp_path: Path) -> None:
    config = StoreConfig(
        page_bytes=PAGE_BYTES,
        host_bytes=HostTier.capacity_for(PAGE_BYTES, 8),
        nvme_root=tmp_path / "nvme",
        nvme_bytes=NvmeTier.capacity_for(PAGE_BYTES, 16),
        nvme_min_free_bytes=0,
    )
    store = TieredStore.open(config)
    keys = page_keys(*range(4))
    put_store(store, keys)
    assert store.flush(WAIT_S)
    store.close()
    (segment,) = (tmp_path / "nvme").rglob("segment-*.slots")
    data = bytearray(segment.read_bytes())
    data[2 * PAGE_BYTES - 1] ^= 1
    segment.write_bytes(data)
    store = TieredStore.open(config)
    report = store.scrub_step(100)
    assert (report.checked, report.corrupt) == (4, 1)
    assert sum(tier is None for tier in store.lookup(keys)) == 1
    store.check()
    store.close()
