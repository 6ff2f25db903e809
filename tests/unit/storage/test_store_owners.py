"""TieredStore: slots and checksums for daemons, owners and what is done about them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.clock import ManualClock
from tests.support.memory_tier import MemoryHostTier, MemoryTier
from tests.support.pages import page_content, page_key, page_keys, take_content
from tierkv.storage.checksum import payload_checksum
from tierkv.storage.clock import Clock
from tierkv.storage.errors import CapacityError, ConfigError
from tierkv.storage.eviction_log import EvictionReason
from tierkv.storage.mover import MoverLimits
from tierkv.storage.policy import WritePolicy
from tierkv.storage.quota import Quota
from tierkv.storage.store import StoreConfig, StoreRules, TieredStore
from tierkv.storage.tiers.host import HostTier
from tierkv.storage.tiers.nvme import NvmeTier
from tierkv.storage.types import CommitOutcome, PageKey, TierName

PAGE_BYTES = 4096
WAIT_S = 20.0
HOST, NVME = TierName.HOST, TierName.NVME
COMMITTED, EXISTS, FAILED = CommitOutcome.COMMITTED, CommitOutcome.EXISTS, CommitOutcome.FAILED


class Rig:
    """A store on tier doubles, with the doubles at hand."""

    def __init__(self, host_pages: int, nvme_pages: int, rules: StoreRules, clock: Clock | None):
        self.host = MemoryHostTier(PAGE_BYTES, host_pages)
        self.nvme = MemoryTier(PAGE_BYTES, nvme_pages)
        self.store = TieredStore(self.host, self.nvme, rules, clock)

    def put(self, owner: int, *numbers: int) -> list[CommitOutcome]:
        outcomes = put_owned(self.store, owner, page_keys(*numbers))
        self.quiet()
        return outcomes

    def quiet(self) -> None:
        assert self.store.wait_quiet(WAIT_S)
        self.store.check()


RigMaker = Callable[..., Rig]


def put_owned(store: TieredStore, owner: int, keys: list[PageKey]) -> list[CommitOutcome]:
    with store.reserve(len(keys), owner) as held:
        for key, view in zip(keys, held.views, strict=False):
            view[:] = page_content(key, PAGE_BYTES)
        return held.commit(keys[: len(held.views)], owner=owner)


@pytest.fixture
def make_rig() -> Iterator[RigMaker]:
    rigs: list[Rig] = []

    def make(
        rules: StoreRules | None = None,
        host_pages: int = 8,
        nvme_pages: int = 32,
        clock: Clock | None = None,
    ) -> Rig:
        rigs.append(Rig(host_pages, nvme_pages, rules or StoreRules(), clock))
        return rigs[-1]

    yield make
    for rig in rigs:
        rig.quiet()
        stats = rig.store.stats()
        assert [(tier.leased_pages, tier.reserved_pages) for tier in stats.tiers] == [(0, 0)] * 2
        rig.store.close()


def quota(tier: TierName, floor: int = 0, ceiling: int | None = None) -> Quota:
    ceilings = {} if ceiling is None else {tier: ceiling * PAGE_BYTES}
    return Quota({tier: floor * PAGE_BYTES}, ceilings)


def real_config(folder: Path, rules: StoreRules | None = None) -> StoreConfig:
    return StoreConfig(
        page_bytes=PAGE_BYTES,
        host_bytes=HostTier.capacity_for(PAGE_BYTES, 8),
        host_arena_path=folder / "arena",
        nvme_root=folder / "nvme",
        nvme_bytes=NvmeTier.capacity_for(PAGE_BYTES, 32),
        nvme_min_free_bytes=0,
        rules=rules or StoreRules(),
    )


# --- slots and checksums ---------------------------------------------------------------------


def test_a_client_writes_and_reads_by_slot_in_its_own_mapping(tmp_path: Path) -> None:
    store = TieredStore.open(real_config(tmp_path))
    geometry = store.arena_geometry()
    content = page_content(page_key(1), PAGE_BYTES)
    with (tmp_path / "arena").open("r+b", buffering=0) as arena, store.reserve(2) as held:
        assert len(set(held.slots)) == 2
        start = geometry.first_slot + held.slots[0] * geometry.slot_bytes
        arena.seek(start + geometry.payload_offset)
        arena.write(content)
        assert held.verify(0, payload_checksum(content))
        assert not held.verify(0, payload_checksum(b"other"))
        assert held.commit(page_keys(1), [payload_checksum(content)]) == [COMMITTED]
        assert held.slots == []
    with store.fetch(page_keys(1), WAIT_S).take(WAIT_S) as lease:
        start = geometry.first_slot + lease.slots[0] * geometry.slot_bytes
        with (tmp_path / "arena").open("rb") as arena:
            arena.seek(start + geometry.payload_offset)
            assert arena.read(PAGE_BYTES) == content
        assert lease.checksums == [payload_checksum(content)]
        assert store.arena_fd() >= 0
    assert lease.slots == []
    store.check()
    store.close()


def test_w6_a_checksum_that_lies_is_found_by_the_next_verified_fetch(tmp_path: Path) -> None:
    store = TieredStore.open(real_config(tmp_path))
    with store.reserve(1) as held:
        held.views[0][:] = page_content(page_key(1), PAGE_BYTES)
        held.commit(page_keys(1), [payload_checksum(b"something else")])
    with store.fetch(page_keys(1), WAIT_S, verify=False).take(WAIT_S) as lease:
        assert len(lease.keys) == 1, "the caller said it does not want to know"
    with store.fetch(page_keys(1), WAIT_S, verify=True).take(WAIT_S) as lease:
        assert lease.keys == []
    store.check()
    store.close()


def test_a_checksum_of_the_wrong_length_is_refused(tmp_path: Path) -> None:
    store = TieredStore.open(real_config(tmp_path))
    with store.reserve(1) as held, pytest.raises(ValueError, match="16 bytes"):
        held.commit(page_keys(1), [b"short"])
    store.check()
    store.close()


def test_an_anonymous_arena_has_no_descriptor(tmp_path: Path, make_rig: RigMaker) -> None:
    store = TieredStore.open(replace(real_config(tmp_path), host_arena_path=None))
    with pytest.raises(ConfigError, match="arena"):
        store.arena_fd()
    store.close()
    with pytest.raises(ConfigError, match="no arena"):
        make_rig().store.arena_geometry()


# --- owners ----------------------------------------------------------------------------------


def test_owners_travel_down_and_up_with_their_pages(make_rig: RigMaker) -> None:
    clock = ManualClock()
    rig = make_rig(clock=clock)
    rig.put(7, 1, 2)
    clock.advance(60)
    rig.put(9, 3)
    rig.store.trim(HOST, 0)
    assert rig.store.keys_of(7, NVME) == page_keys(1, 2)
    assert rig.store.keys_of(7, HOST) == []
    assert take_content(rig.store, page_keys(1)) == 1
    rig.quiet()
    usage = rig.store.owners()
    assert usage[7].pages == {HOST: 1, NVME: 2}
    assert usage[9].pages == {HOST: 0, NVME: 1}
    assert usage[7].bytes == {HOST: PAGE_BYTES, NVME: 2 * PAGE_BYTES}
    assert usage[7].last_use == clock.wall()


def test_owners_are_found_again_after_a_restart(tmp_path: Path) -> None:
    config = real_config(tmp_path)
    store = TieredStore.open(config)
    put_owned(store, 5, page_keys(1, 2))
    assert store.flush(WAIT_S)
    store.close()
    (tmp_path / "arena").unlink()
    store = TieredStore.open(config)
    assert store.owners()[5].pages == {HOST: 0, NVME: 2}
    assert take_content(store, page_keys(1, 2)) == 2
    assert store.owners()[5].pages == {HOST: 2, NVME: 2}
    store.check()
    store.close()


def test_w4_drop_owner_removes_every_copy_and_nothing_else(make_rig: RigMaker) -> None:
    rig = make_rig()
    rig.put(1, 1, 2, 3)
    rig.put(2, 4)
    with rig.store.fetch(page_keys(1), WAIT_S).take(WAIT_S) as lease:
        assert rig.store.drop_owner(1) == 3
        assert rig.store.lookup(page_keys(1, 2, 3, 4)) == [None, None, None, HOST]
        assert bytes(lease.views[0]) == page_content(page_key(1), PAGE_BYTES)
    assert rig.store.drop_owner(1) == 0
    assert list(rig.store.owners()) == [2]
    assert rig.store.evicted_when(page_key(2))[0].reason is EvictionReason.DROPPED


def test_drop_owner_outruns_copies_under_way(make_rig: RigMaker) -> None:
    rig = make_rig(StoreRules(mover=MoverLimits(demote_batch_pages=1)))
    gate = rig.nvme.hold("write")
    put_owned(rig.store, 1, page_keys(1, 2, 3, 4))
    assert gate.entered.wait(WAIT_S)
    rig.nvme.calls.clear()
    gate.release()
    rig.store.drop_owner(1)
    rig.quiet()
    assert rig.store.drop_owner(1) == 0
    assert rig.store.lookup(page_keys(1, 2, 3, 4)) == [None] * 4


# --- quotas ----------------------------------------------------------------------------------


def test_a_host_ceiling_rotates_the_owners_own_pages(make_rig: RigMaker) -> None:
    rig = make_rig()
    rig.store.set_quota(1, quota(HOST, ceiling=2))
    rig.put(2, 20)
    assert rig.put(1, 1, 2) == [COMMITTED] * 2
    assert rig.put(1, 3) == [COMMITTED]
    assert rig.store.lookup(page_keys(1, 2, 3, 20)) == [NVME, HOST, HOST, HOST]
    assert rig.store.stats().evictions == {"quota": 1}


def test_c4_the_tail_of_a_commit_over_the_ceiling_is_refused(make_rig: RigMaker) -> None:
    rig = make_rig()
    rig.store.set_quota(1, quota(HOST, ceiling=2))
    rig.put(1, 1)
    with rig.store.fetch(page_keys(1), WAIT_S).take(WAIT_S):
        # The page that is being read cannot make room, so one of three new ones fits.
        assert rig.put(1, 2, 1, 3, 4) == [COMMITTED, EXISTS, FAILED, FAILED]
    assert rig.store.owners()[1].pages[HOST] == 2
    assert rig.store.stats().quota_refused == {HOST: 2}
    assert rig.store.stats().rejected_pages == 2
    assert rig.host.stats().reserved_pages == 0


def test_an_nvme_ceiling_holds_for_demotions(make_rig: RigMaker) -> None:
    rig = make_rig()
    rig.store.set_quota(1, quota(NVME, ceiling=3))
    for number in range(8):
        rig.put(1, number)
    assert rig.store.owners()[1].pages[NVME] == 3
    rig.store.set_quota(1, quota(NVME, ceiling=0))
    assert rig.store.owners()[1].pages == {HOST: 8, NVME: 0}
    rig.put(1, 100)
    assert rig.store.stats().quota_refused == {NVME: 1}


def test_a_promotion_respects_the_host_ceiling(make_rig: RigMaker) -> None:
    rig = make_rig()
    rig.put(1, 1, 2, 3, 4)
    rig.store.trim(HOST, 0)
    rig.store.set_quota(1, quota(HOST, ceiling=2))
    assert take_content(rig.store, page_keys(1, 2, 3, 4)) <= 2
    rig.quiet()
    assert rig.store.owners()[1].pages[HOST] <= 2
    assert take_content(rig.store, page_keys(3, 4)) == 2


@pytest.mark.parametrize("policy", list(WritePolicy))
def test_a_host_floor_survives_a_flood(make_rig: RigMaker, policy: WritePolicy) -> None:
    rig = make_rig(StoreRules(write_policy=policy), host_pages=6, nvme_pages=64)
    rig.store.set_quota(1, quota(HOST, floor=3))
    rig.put(1, 1, 2, 3)
    for number in range(20, 40):
        rig.put(2, number)
    assert rig.store.lookup(page_keys(1, 2, 3)) == [HOST] * 3
    assert rig.store.owners()[2].pages[HOST] == 3


def test_a_floor_over_all_of_host_lets_its_owner_go_on(make_rig: RigMaker) -> None:
    rig = make_rig(host_pages=4)
    rig.store.set_quota(1, quota(HOST, floor=4))
    for number in range(8):
        assert rig.put(1, number) == [COMMITTED]
    assert rig.put(2, 20) == []
    assert take_content(rig.store, page_keys(0)) == 1, "its own promotion finds room too"
    assert rig.store.stats().rejected_pages == 1


def test_a_group_shares_one_ceiling(make_rig: RigMaker) -> None:
    rig = make_rig()
    rig.store.set_group_quota("tenant", [1, 2], quota(HOST, ceiling=3))
    for number in range(3):
        rig.put(1, number)
        rig.put(2, 100 + number)
    usage = rig.store.owners()
    assert usage[1].pages[HOST] + usage[2].pages[HOST] == 3
    rig.store.set_group_quota("tenant", [], None)


def test_floors_that_do_not_fit_are_refused(make_rig: RigMaker) -> None:
    with pytest.raises(CapacityError, match="8"):
        make_rig().store.set_quota(1, quota(HOST, floor=9))


# --- time to live, budget, hotness -----------------------------------------------------------


def test_expire_removes_idle_pages_from_every_tier(make_rig: RigMaker) -> None:
    clock = ManualClock()
    rig = make_rig(clock=clock)
    rig.put(1, 1, 2)
    rig.put(2, 3)
    rig.store.set_ttl(1, 100)
    clock.advance(60)
    rig.store.touch(page_keys(2))
    assert rig.store.expire() == 0
    clock.advance(50)
    assert rig.store.expire() == 2, "one page, from both tiers"
    assert rig.store.lookup(page_keys(1, 2, 3)) == [None, HOST, HOST]
    assert rig.store.evicted_when(page_key(1))[0].reason is EvictionReason.EXPIRED
    rig.store.set_ttl(1, None)
    clock.advance(1000)
    assert rig.store.expire() == 0


def test_a_spent_budget_skips_copies_until_they_are_worth_it(make_rig: RigMaker) -> None:
    clock = ManualClock()
    # Room for four pages at once, two of them for any page.
    rules = StoreRules(nvme_write_bytes_per_day=16 * PAGE_BYTES)
    rig = make_rig(rules, clock=clock)
    for number in range(6):
        rig.put(1, number)
    assert sum(rig.nvme.lookup(page_keys(*range(6)))) == 3
    assert rig.store.stats().budget_skipped == 3
    assert take_content(rig.store, page_keys(3)) == 1
    rig.quiet()
    clock.advance(86400)
    rig.store.touch(page_keys(5))
    rig.quiet()
    assert rig.nvme.lookup(page_keys(5)) == [True], "what is owed a copy gets it when used"
    assert rig.store.flush(WAIT_S), "an order to flush is not refused"
    assert all(rig.nvme.lookup(page_keys(*range(6))))


def test_a_copy_that_fails_gives_its_bytes_back(make_rig: RigMaker) -> None:
    rules = StoreRules(nvme_write_bytes_per_day=16 * PAGE_BYTES)
    rig = make_rig(rules, clock=ManualClock())
    rig.nvme.degraded = "full"
    rig.put(1, 1)
    assert rig.store.stats().budget_left_bytes == 4 * PAGE_BYTES
    rig.nvme.degraded = None


def test_write_through_copies_later_what_a_full_queue_refused(make_rig: RigMaker) -> None:
    rig = make_rig(StoreRules(mover=MoverLimits(demote_queue_pages=1)))
    gate = rig.nvme.hold("write")
    put_owned(rig.store, 1, page_keys(1, 2, 3, 4))
    assert rig.store.stats().mover.dropped == 3
    gate.release()
    rig.quiet()
    assert rig.nvme.lookup(page_keys(1, 2, 3, 4)) == [True] * 4


def test_r1_hotness_and_budget_survive_a_restart(tmp_path: Path) -> None:
    config = real_config(tmp_path, StoreRules(nvme_write_bytes_per_day=1000 * PAGE_BYTES))
    clock = ManualClock()
    store = TieredStore.open(config, clock)
    put_owned(store, 3, page_keys(1, 2))
    assert store.flush(WAIT_S)
    for _ in range(5):
        assert take_content(store, page_keys(1)) == 1
    used = store.owners()[3].last_use
    left = store.stats().budget_left_bytes
    store.close()
    (tmp_path / "arena").unlink()
    store = TieredStore.open(config, clock)
    assert store.owners()[3].last_use == used
    assert store.stats().budget_left_bytes == left
    preload = store.preload(2)
    assert preload.wait(WAIT_S)
    assert store.lookup(page_keys(1, 2)) == [HOST, HOST]
    assert store.keys_of(3, HOST) == page_keys(2, 1), "the most used one is the last to go"
    assert store.save_state()
    store.close()


def test_p4_reuse_gaps_are_counted_by_the_tier_a_page_came_from(make_rig: RigMaker) -> None:
    clock = ManualClock()
    rig = make_rig(clock=clock)
    rig.put(1, 1)
    clock.advance(30)
    take_content(rig.store, page_keys(1))
    rig.store.trim(HOST, 0)
    clock.advance(7200)
    take_content(rig.store, page_keys(1))
    gaps = rig.store.stats().reuse_gaps
    assert gaps[HOST] == (0, 0, 1, 0, 0, 0, 0, 0, 0)
    assert gaps[NVME] == (0, 0, 0, 0, 0, 1, 0, 0, 0)
    reasons = [eviction.reason for eviction in rig.store.evicted_when(page_key(1))]
    assert reasons == [EvictionReason.TRIMMED]


def test_p4_copies_do_not_count_as_hits(make_rig: RigMaker) -> None:
    rig = make_rig()
    rig.put(1, 1, 2)
    assert rig.store.flush(WAIT_S)
    assert rig.host.stats().hits == 0
