"""EvictionLog: what is remembered of removals, and what bounds it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.support.clock import ManualClock
from tests.support.pages import page_key, page_keys
from tierkv.storage.eviction_log import Eviction, EvictionLog, EvictionReason
from tierkv.storage.types import PageKey, TierName

HOST, NVME = TierName.HOST, TierName.NVME


def test_the_latest_removal_of_each_tier_is_found_newest_first() -> None:
    clock = ManualClock()
    log = EvictionLog(clock)
    log.record(page_keys(1, 2), NVME, EvictionReason.ROOM)
    clock.advance(5)
    log.record(page_keys(1), HOST, EvictionReason.QUOTA)
    clock.advance(5)
    log.record(page_keys(1), NVME, EvictionReason.EXPIRED)
    now = clock.wall()
    assert log.evicted_when(page_key(1)) == [
        Eviction(page_key(1), NVME, now, EvictionReason.EXPIRED),
        Eviction(page_key(1), HOST, now - 5, EvictionReason.QUOTA),
    ]
    assert log.evicted_when(page_key(9)) == []
    log.check()


def test_the_oldest_are_forgotten_and_still_counted() -> None:
    log = EvictionLog(ManualClock(), capacity=3)
    log.record(page_keys(1, 2, 3), NVME, EvictionReason.ROOM)
    log.record(page_keys(1, 4), NVME, EvictionReason.DROPPED)
    log.check()
    assert log.evicted_when(page_key(2)) == []
    assert len(log.evicted_when(page_key(1))) == 1, "its second removal made it young again"
    assert log.counts() == {EvictionReason.ROOM: 3, EvictionReason.DROPPED: 2}


def test_whoever_listens_is_told_of_each_removal_with_no_lock_held() -> None:
    log = EvictionLog(ManualClock())
    told: list[list[PageKey]] = []

    def listen(keys: Sequence[PageKey]) -> None:
        # What is told is in the log already, which answers.
        assert all(log.evicted_when(key) for key in keys)
        told.append(list(keys))

    log.record(page_keys(1), NVME, EvictionReason.ROOM)
    log.listen(listen)
    log.record(page_keys(2, 3), HOST, EvictionReason.QUOTA)
    log.record(page_keys(2), NVME, EvictionReason.CORRUPT)
    assert told == [page_keys(2, 3), page_keys(2)]
    with pytest.raises(AssertionError, match="one listener"):
        log.listen(listen)
