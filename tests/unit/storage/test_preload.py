"""Preload: what comes back to host after a reboot, in which order, behind whom."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest

from tests.support.clock import ManualClock
from tests.support.memory_tier import MemoryHostTier, MemoryTier
from tests.support.pages import page_keys, put_store, put_tier, take_content
from tierkv.storage.base import Lease
from tierkv.storage.clock import Clock
from tierkv.storage.policy import FrequencySketch
from tierkv.storage.preload import WIDTH, Preload, PreloadStart, hottest_first
from tierkv.storage.store import StoreRules, TieredStore
from tierkv.storage.types import PageKey, ReadOutcome, TierName

PAGE_BYTES = 4096
WAIT_S = 20.0
HOST, NVME = TierName.HOST, TierName.NVME


class RecordingTier(MemoryTier):
    """Remembers in which order pages began to be read."""

    def __init__(self, page_bytes: int, capacity_pages: int) -> None:
        super().__init__(page_bytes, capacity_pages)
        self.reads: list[PageKey] = []

    def read(self, lease: Lease, index: int, out: memoryview) -> ReadOutcome:
        self.reads.append(lease.keys[index])
        return super().read(lease, index, out)


class Rig:
    """A store whose host is empty and whose nvme holds pages 0 to 9, 9 the most recent."""

    def __init__(self, host_pages: int = 8, clock: Clock | None = None) -> None:
        self.host = MemoryHostTier(PAGE_BYTES, host_pages)
        self.nvme = RecordingTier(PAGE_BYTES, 32)
        put_tier(self.nvme, page_keys(*range(10)))
        self.store = TieredStore(self.host, self.nvme, StoreRules(), clock)


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig()
    yield made
    assert made.store.wait_quiet(WAIT_S)
    made.store.check()
    made.store.close()


def test_r1_the_most_recent_pages_come_back(rig: Rig) -> None:
    preload = rig.store.preload(3)
    assert preload.wait(WAIT_S)
    assert rig.store.lookup(page_keys(6, 7, 8, 9)) == [NVME, HOST, HOST, HOST]
    progress = preload.progress()
    assert (progress.done_pages, progress.total_pages, progress.finished) == (3, 3, True)
    assert progress.bytes == 3 * PAGE_BYTES
    assert take_content(rig.store, page_keys(7, 8, 9)) == 3


def test_the_default_budget_is_a_share_of_host(rig: Rig) -> None:
    put_store(rig.store, page_keys(20))
    preload = rig.store.preload()
    assert preload.wait(WAIT_S)
    assert preload.progress().done_pages == 3
    assert rig.host.stats().committed_pages == 4


def test_preload_is_no_demand_and_evicts_nothing(rig: Rig) -> None:
    put_store(rig.store, page_keys(*range(20, 26)))
    assert rig.store.wait_quiet(WAIT_S)
    before = rig.nvme.stats().hits
    preload = rig.store.preload(8)
    assert preload.wait(WAIT_S)
    assert preload.progress().done_pages == 2
    assert rig.nvme.stats().hits == before
    assert rig.host.stats().evictions == 0
    assert rig.store.lookup(page_keys(*range(20, 26))) == [HOST] * 6


def test_most_used_first_then_most_recent() -> None:
    sketch = FrequencySketch(16)
    keys = page_keys(4, 3, 2, 1)
    sketch.record(keys[2])
    assert hottest_first(keys, sketch, threading.RLock()) == page_keys(2, 4, 3, 1)


def test_a_request_is_read_before_preloaded_pages_that_wait(rig: Rig) -> None:
    gate = rig.nvme.hold("read")
    preload = rig.store.preload(6)
    assert gate.entered.wait(WAIT_S)
    fetch = rig.store.fetch(page_keys(0, 1), WAIT_S)
    gate.release()
    fetch.take(WAIT_S).release()
    assert preload.wait(WAIT_S)
    # The gate held the first reads until the request's were queued.
    assert set(page_keys(0, 1)) < set(rig.nvme.reads[: WIDTH + 2])


def test_a_request_can_wait_for_a_page_that_preload_brings(rig: Rig) -> None:
    gate = rig.nvme.hold("read")
    preload = rig.store.preload(2)
    assert gate.entered.wait(WAIT_S)
    fetch = rig.store.fetch(page_keys(8, 9), WAIT_S)
    gate.release()
    with fetch.take(WAIT_S) as lease:
        assert lease.keys == page_keys(8, 9)
    assert preload.wait(WAIT_S)
    assert rig.nvme.calls["read"] == 2, "each page was read once"


def test_what_was_preloaded_goes_before_what_was_asked_for() -> None:
    clock = ManualClock()
    rig = Rig(clock=clock)
    put_store(rig.store, page_keys(20))
    gate = rig.nvme.hold("read")
    preload = rig.store.preload(4)
    assert gate.entered.wait(WAIT_S)
    clock.advance(2)
    fetch = rig.store.fetch(page_keys(9), WAIT_S)
    gate.release()
    fetch.take(WAIT_S).release()
    assert preload.wait(WAIT_S)
    take_content(rig.store, page_keys(20))
    assert set(rig.host.victims(3)) == set(page_keys(6, 7, 8))
    assert rig.store.wait_quiet(WAIT_S)
    rig.store.close()


def test_cancel_ends_it_with_what_is_under_way(rig: Rig) -> None:
    gate = rig.nvme.hold("read")
    preload = rig.store.preload(8)
    assert gate.entered.wait(WAIT_S)
    preload.cancel()
    gate.release()
    assert preload.wait(WAIT_S)
    assert preload.progress().done_pages <= WIDTH
    assert preload.progress().finished


def test_h1_wait_ends_at_its_timeout(rig: Rig) -> None:
    gate = rig.nvme.hold("read")
    preload = rig.store.preload(2)
    assert not preload.wait(0.01)
    gate.release()
    assert preload.wait(WAIT_S)


def test_closing_the_store_ends_it() -> None:
    rig = Rig()
    gate = rig.nvme.hold("read")
    preload = rig.store.preload(8)
    assert gate.entered.wait(WAIT_S)
    gate.release()
    rig.store.close()
    assert preload.wait(WAIT_S)
    assert rig.host.closed


def test_without_nvme_there_is_nothing_to_bring() -> None:
    store = TieredStore(MemoryHostTier(PAGE_BYTES, 4))
    assert store.preload().progress().finished
    store.close()


def test_pages_that_cannot_come_are_passed_over() -> None:
    asked: list[PageKey] = []

    def start(key: PageKey, on_end: Callable[[bool], None]) -> PreloadStart:
        asked.append(key)
        if len(asked) == 3:
            return PreloadStart.STOP
        if len(asked) == 1:
            return PreloadStart.SKIPPED
        on_end(True)
        return PreloadStart.STARTED

    preload = Preload(page_keys(1, 2, 3, 4), PAGE_BYTES, start)
    preload.begin()
    preload.check()
    assert asked == page_keys(1, 2, 3)
    assert preload.progress().done_pages == 1
    assert preload.progress().finished
