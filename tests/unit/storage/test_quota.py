"""QuotaBook and Room: floors, ceilings and groups of owners, on a tier double."""

from __future__ import annotations

import random

import pytest

from tests.support.clock import ManualClock
from tests.support.memory_tier import MemoryTier
from tests.support.pages import page_content, page_key, page_keys
from tierkv.storage.errors import CapacityError, ConfigError, TierIOError
from tierkv.storage.eviction_log import EvictionLog, EvictionReason
from tierkv.storage.quota import Quota, QuotaBook, TierSize
from tierkv.storage.room import Room
from tierkv.storage.types import CommitOutcome, PageKey, TierName

PAGE_BYTES = 64
NVME = TierName.NVME


class Rig:
    """One tier, its room and book, and a writer that goes through them."""

    def __init__(self, pages: int) -> None:
        self.tier = MemoryTier(PAGE_BYTES, pages)
        self.book = QuotaBook({NVME: TierSize(PAGE_BYTES, pages)})
        self.log = EvictionLog(ManualClock())
        self.room = Room(self.tier, self.book, self.log)

    def limit(self, owner: int, floor: int = 0, ceiling: int | None = None) -> None:
        self.book.set_owner(owner, quota(floor, ceiling))

    def put(self, owner: int, *numbers: int) -> int:
        """Write pages one by one as the mover does; returns how many came in."""
        return sum(self._put_one(owner, page_key(number)) for number in numbers)

    def _put_one(self, owner: int, key: PageKey) -> bool:
        if not self.room.admit(owner, 1):
            return False
        try:
            if self.tier.stats().free_pages == 0:
                self.room.evict(1, owner)
            with self.tier.reserve(1) as held:
                if not held.slots:
                    return False
                self.tier.write(held, 0, page_content(key, PAGE_BYTES))
                return self.tier.commit(held, [key], owner) == [CommitOutcome.COMMITTED]
        finally:
            self.room.settle(owner, 1)

    def check(self) -> None:
        self.tier.check()
        self.book.check()
        self.log.check()
        assert self.book.held_pages == 0


def quota(floor: int = 0, ceiling: int | None = None) -> Quota:
    limits = {} if ceiling is None else {NVME: ceiling * PAGE_BYTES}
    return Quota({NVME: floor * PAGE_BYTES}, limits)


def test_over_its_ceiling_an_owner_loses_its_own_coldest_page() -> None:
    rig = Rig(8)
    rig.limit(1, ceiling=2)
    assert rig.put(2, 20, 21) == 2
    assert rig.put(1, 10, 11, 12) == 3
    assert rig.tier.lookup(page_keys(10, 11, 12, 20, 21)) == [False, True, True, True, True]
    assert rig.log.evicted_when(page_key(10))[0].reason is EvictionReason.QUOTA
    rig.check()


def test_c4_a_page_without_room_is_refused_and_counted() -> None:
    rig = Rig(8)
    rig.limit(1, ceiling=2)
    rig.put(1, 10, 11)
    with rig.tier.lease(page_keys(10, 11)):
        assert rig.put(1, 12) == 0
    assert rig.room.refused == 1
    assert rig.put(1, 12) == 1
    rig.check()


def test_a_ceiling_of_nothing_keeps_every_page_out() -> None:
    rig = Rig(8)
    rig.limit(1, ceiling=0)
    assert rig.put(1, 10) == 0
    assert rig.room.refused == 1


def test_pages_at_a_floor_are_not_evicted_for_others() -> None:
    rig = Rig(4)
    rig.limit(1, floor=2)
    rig.put(1, 10, 11, 12)
    rig.put(2, 20, 21, 22, 23)
    assert rig.tier.owners() == {1: 2, 2: 2}
    assert rig.tier.lookup(page_keys(10)) == [False], "above its floor the coldest goes"
    rig.check()


def test_an_owner_at_its_floor_can_still_renew_its_pages() -> None:
    rig = Rig(4)
    rig.limit(1, floor=4)
    assert rig.put(1, 10, 11, 12, 13, 14, 15) == 6
    assert rig.put(2, 20) == 0
    assert rig.tier.owners() == {1: 4}
    assert rig.room.victims(4) == []
    assert rig.room.victims(2, for_owner=1) == page_keys(12, 13)


def test_a_group_shares_a_ceiling_and_a_floor() -> None:
    rig = Rig(6)
    rig.book.set_group("tenant", [1, 2], quota(floor=3, ceiling=4))
    rig.put(1, 10, 11, 12)
    rig.put(2, 20, 21)
    assert rig.tier.owners() == {1: 2, 2: 2}
    rig.put(3, 30, 31, 32, 33)
    assert rig.tier.owners() == {1: 1, 2: 2, 3: 3}
    rig.check()


def test_pages_on_their_way_count_against_the_ceiling() -> None:
    rig = Rig(8)
    rig.limit(1, ceiling=2)
    assert rig.room.admit(1, 3) == 2
    assert rig.room.admit(1, 1) == 0
    rig.room.settle(1, 2)
    assert rig.room.admit(1, 1) == 1
    rig.room.settle(1, 1)
    rig.check()


def test_an_eviction_that_fails_holds_nothing() -> None:
    rig = Rig(8)
    rig.limit(1, ceiling=1)
    rig.put(1, 10)
    rig.tier.fail_next("evict", TierIOError("evict: EIO"))
    with pytest.raises(TierIOError):
        rig.room.admit(1, 1)
    rig.check()


def test_a_lowered_ceiling_is_enforced_by_shrink() -> None:
    rig = Rig(8)
    rig.put(1, 10, 11, 12)
    rig.limit(1, ceiling=1)
    assert rig.room.shrink(1) == 2
    assert rig.tier.lookup(page_keys(10, 11, 12)) == [False, False, True]


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (Quota({NVME: -1}), "at least 0"),
        (Quota({TierName.HOST: 1}), "expected at least 0 bytes of one of nvme"),
        (Quota({NVME: 128}, {NVME: 64}), "ceiling is 1 pages, the floor 2"),
    ],
)
def test_limits_that_cannot_be_are_refused(bad: Quota, message: str) -> None:
    rig = Rig(8)
    with pytest.raises(ConfigError, match=message):
        rig.book.set_owner(1, bad)
    rig.check()


def test_floors_have_to_fit_into_the_tier() -> None:
    rig = Rig(8)
    rig.limit(1, floor=5)
    with pytest.raises(CapacityError, match="8"):
        rig.limit(2, floor=4)
    rig.limit(1, floor=4)
    rig.limit(2, floor=4)
    rig.check()


def test_an_owner_is_in_one_group_at_most() -> None:
    rig = Rig(8)
    rig.book.set_group("a", [1, 2], quota(ceiling=4))
    with pytest.raises(ConfigError, match="one group"):
        rig.book.set_group("b", [2], quota(ceiling=4))
    rig.book.set_group("a", [1], quota(ceiling=4))
    rig.book.set_group("b", [2], quota(ceiling=4))
    rig.book.set_group("a", [], None)
    rig.check()


@pytest.mark.parametrize("seed", [1, 2, 3, 4, 5, 6])
def test_random_writers_never_break_a_limit(seed: int) -> None:
    rng = random.Random(seed)
    pages = rng.randint(4, 24)
    rig = Rig(pages)
    floors = {1: rng.randint(0, pages // 3), 2: rng.randint(0, pages // 3)}
    ceilings = {1: floors[1] + rng.randint(0, 4), 3: rng.randint(0, pages // 2)}
    for owner in (1, 2, 3):
        rig.limit(owner, floors.get(owner, 0), ceilings.get(owner))
    group_ceiling = rng.randint(2, pages)
    rig.book.set_group("g", [3, 4], quota(ceiling=group_ceiling))
    for step in range(1500):
        before = rig.tier.owners()
        owner = rng.randint(1, 5)
        action = rng.random()
        if action < 0.8:
            rig.put(owner, 1000 + step)
        elif action < 0.9:
            rig.room.evict(rng.randint(1, 4), for_owner=owner)
        else:
            rig.tier.touch(rig.tier.victims(pages)[: rng.randint(0, 3)])
        rig.check()
        after = rig.tier.owners()
        where = f"seed={seed} step={step} owner={owner} before={before} after={after}"
        for limited, ceiling in ceilings.items():
            assert after.get(limited, 0) <= ceiling, where
        assert after.get(3, 0) + after.get(4, 0) <= group_ceiling, where
        for guarded, floor in floors.items():
            if guarded != owner:
                assert after.get(guarded, 0) >= min(floor, before.get(guarded, 0)), where
        assert sum(after.values()) <= pages, where
