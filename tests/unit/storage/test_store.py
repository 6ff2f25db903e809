"""TieredStore: the life of pages across host and nvme, on tier doubles."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from tests.support.clock import ManualClock
from tests.support.memory_tier import Gate, MemoryHostTier, MemoryTier
from tests.support.pages import page_content, page_key, page_keys, put_store, put_tier, take_content
from tierkv.storage.clock import Clock
from tierkv.storage.errors import (
    TierClosedError,
    TierFullError,
    TierIOError,
)
from tierkv.storage.mover import MoverLimits
from tierkv.storage.policy import AdmissionName, WritePolicy
from tierkv.storage.promotion import Verify
from tierkv.storage.store import StoreRules, TieredStore
from tierkv.storage.types import CommitOutcome, PageKey, ReadOutcome, TierName

PAGE_BYTES = 4096
WAIT_S = 20.0
HOST, NVME = TierName.HOST, TierName.NVME

THROUGH = StoreRules(write_policy=WritePolicy.WRITE_THROUGH)
BACK = StoreRules(write_policy=WritePolicy.WRITE_BACK)
SELECTIVE = StoreRules(write_policy=WritePolicy.WRITE_THROUGH_SELECTIVE, selective_hits=2)


class Rig:
    """A store on tier doubles, with the doubles at hand."""

    def __init__(self, host_pages: int, nvme_pages: int, rules: StoreRules, clock: Clock | None):
        self.host = MemoryHostTier(PAGE_BYTES, host_pages)
        self.nvme = MemoryTier(PAGE_BYTES, nvme_pages)
        self.gates: list[Gate] = []
        self.durable: list[PageKey] = []
        self.store = TieredStore(self.host, self.nvme, rules, clock, self.durable.append)

    def hold(self, operation: str) -> Gate:
        gate = self.nvme.hold(operation)
        self.gates.append(gate)
        return gate

    def quiet(self) -> None:
        assert self.store.wait_quiet(WAIT_S)
        self.store.check()

    def only_on_nvme(self, *numbers: int) -> list[PageKey]:
        keys = page_keys(*numbers)
        put_tier(self.nvme, keys)
        return keys


RigMaker = Callable[..., Rig]


@pytest.fixture
def make_rig() -> Iterator[RigMaker]:
    """Rigs whose stores hold nothing when the test ends (lessons H3 and L2)."""
    rigs: list[Rig] = []

    def make(
        rules: StoreRules = THROUGH,
        host_pages: int = 8,
        nvme_pages: int = 32,
        clock: Clock | None = None,
    ) -> Rig:
        rigs.append(Rig(host_pages, nvme_pages, rules, clock))
        return rigs[-1]

    yield make
    for rig in rigs:
        for gate in rig.gates:
            gate.release()
        rig.quiet()
        stats = rig.store.stats()
        assert [(tier.leased_pages, tier.reserved_pages) for tier in stats.tiers] == [(0, 0)] * 2
        rig.store.close()
        rig.store.close()
        assert rig.host.closed and rig.nvme.closed


# --- writing -------------------------------------------------------------------------------


def test_a_committed_page_is_found_and_read_from_host(make_rig: RigMaker) -> None:
    rig = make_rig()
    assert put_store(rig.store, page_keys(1, 2)) == [CommitOutcome.COMMITTED] * 2
    assert rig.store.lookup(page_keys(1, 2, 3)) == [HOST, HOST, None]
    assert take_content(rig.store, page_keys(1, 2, 3)) == 2
    assert rig.store.stats().restored_pages == {HOST: 2}
    assert rig.store.stats().missed_pages == 1


def test_a_second_writer_is_told_that_the_page_exists(make_rig: RigMaker) -> None:
    rig = make_rig()
    put_store(rig.store, page_keys(1))
    outcomes = put_store(rig.store, page_keys(1, 2))
    assert outcomes == [CommitOutcome.EXISTS, CommitOutcome.COMMITTED]


def test_l2_a_reservation_left_without_commit_gives_its_slots_back(make_rig: RigMaker) -> None:
    rig = make_rig()
    with rig.store.reserve(3) as held:
        assert len(held.views) == 3
        rig.store.check()
        assert rig.host.stats().reserved_pages == 3
    held.release()
    rig.store.check()
    assert rig.host.stats().free_pages == 8


def test_slots_past_the_keys_of_a_commit_are_freed(make_rig: RigMaker) -> None:
    rig = make_rig()
    with rig.store.reserve(3) as held:
        held.views[0][:] = page_content(page_key(1), PAGE_BYTES)
        assert held.commit(page_keys(1)) == [CommitOutcome.COMMITTED]
        assert held.views == []
    rig.quiet()
    assert rig.host.stats().free_pages == 7


def test_w7_a_refused_view_is_not_published_and_the_others_are(make_rig: RigMaker) -> None:
    rig = make_rig()
    put_store(rig.store, page_keys(5))
    keys = page_keys(1, 2, 3, 5)
    with rig.store.reserve(4) as held:
        for key, view in zip(keys, held.views, strict=True):
            view[:] = page_content(key, PAGE_BYTES)
        held.refuse([1, 3])
        assert held.commit(keys) == [
            *(CommitOutcome.COMMITTED, CommitOutcome.FAILED, CommitOutcome.COMMITTED),
            CommitOutcome.EXISTS,
        ]
    rig.quiet()
    assert rig.store.lookup(keys) == [HOST, None, HOST, HOST]
    assert rig.host.stats().free_pages == 5 and rig.store.stats().rejected_pages == 1
    assert take_content(rig.store, page_keys(1)) == take_content(rig.store, page_keys(3)) == 1


def test_write_through_copies_each_commit(make_rig: RigMaker) -> None:
    rig = make_rig(THROUGH)
    put_store(rig.store, page_keys(1, 2))
    rig.quiet()
    assert sorted(rig.durable) == sorted(page_keys(1, 2))
    assert rig.nvme.lookup(page_keys(1, 2)) == [True, True]


def test_selective_copies_a_page_at_its_second_hit(make_rig: RigMaker) -> None:
    rig = make_rig(SELECTIVE)
    put_store(rig.store, page_keys(1, 2))
    take_content(rig.store, page_keys(1))
    rig.quiet()
    assert rig.durable == []
    rig.store.touch(page_keys(1))
    rig.quiet()
    assert rig.durable == page_keys(1)


def test_write_back_copies_the_coldest_ahead_of_need(make_rig: RigMaker) -> None:
    rig = make_rig(replace(BACK, host_clean_fraction=0.25))
    for number in range(8):
        put_store(rig.store, page_keys(number))
        rig.quiet()
    # Two of eight slots are to be ready: the two oldest pages are on nvme and in host.
    assert rig.durable == page_keys(0, 1)
    assert rig.store.lookup(page_keys(0, 1)) == [HOST, HOST]
    put_store(rig.store, page_keys(8, 9))
    assert rig.store.lookup(page_keys(0, 1, 2)) == [NVME, NVME, HOST]


def test_write_back_drops_first_what_was_not_used_since_its_copy(make_rig: RigMaker) -> None:
    rig = make_rig(replace(BACK, host_clean_fraction=0.25))
    for number in range(8):
        put_store(rig.store, page_keys(number))
        rig.quiet()
    take_content(rig.store, page_keys(0))
    put_store(rig.store, page_keys(8))
    assert rig.store.lookup(page_keys(0, 1)) == [HOST, NVME]


def test_write_back_checks_that_nvme_still_has_a_page_before_it_drops_it(
    make_rig: RigMaker,
) -> None:
    rig = make_rig(replace(BACK, host_clean_fraction=0.25))
    for number in range(8):
        put_store(rig.store, page_keys(number))
        rig.quiet()
    rig.nvme.drop(page_keys(0, 1))
    gate = rig.hold("write")
    with rig.store.reserve(1) as held:
        # The coldest pages have to be copied again before they can go.
        assert len(held.views) in (0, 1)
        assert all(tier is not None for tier in rig.store.lookup(page_keys(0, 1)))
    gate.release()


def test_c4_reserve_never_waits_and_counts_what_it_could_not_give(make_rig: RigMaker) -> None:
    rig = make_rig(replace(BACK, host_clean_fraction=0.0), host_pages=2)
    put_store(rig.store, page_keys(0, 1))
    gate = rig.hold("write")
    with rig.store.fetch(page_keys(1), WAIT_S).take(WAIT_S):
        with rig.store.reserve(2) as held:
            # One page is pinned by its reader, the other by its copy to nvme.
            assert held.views == []
    assert rig.store.stats().rejected_pages == 2
    gate.release()
    rig.quiet()
    assert len(put_store(rig.store, page_keys(2))) == 1
    assert rig.store.stats().rejected_pages == 2


def test_copies_on_their_way_pin_at_most_half_of_host(make_rig: RigMaker) -> None:
    rig = make_rig(THROUGH, host_pages=8)
    gate = rig.hold("write")
    put_store(rig.store, page_keys(*range(8)))
    assert rig.host.stats().leased_pages == 4
    assert rig.store.stats().mover.dropped == 4
    assert len(put_store(rig.store, page_keys(10, 11, 12, 13))) == 4
    gate.release()


def test_admission_keeps_cold_pages_off_a_full_nvme(make_rig: RigMaker) -> None:
    rig = make_rig(replace(THROUGH, admission=AdmissionName.HOTNESS), nvme_pages=1)
    put_store(rig.store, page_keys(1))
    rig.quiet()
    rig.store.touch(page_keys(1))
    put_store(rig.store, page_keys(2))
    rig.quiet()
    assert rig.nvme.lookup(page_keys(1, 2)) == [True, False]
    assert rig.store.stats().admission_rejected == 1


# --- flush ---------------------------------------------------------------------------------


@pytest.mark.parametrize("rules", [THROUGH, BACK, SELECTIVE], ids=lambda r: r.write_policy.value)
def test_flush_makes_every_host_page_durable(make_rig: RigMaker, rules: StoreRules) -> None:
    rig = make_rig(replace(rules, mover=MoverLimits(demote_queue_pages=2)))
    for number in range(8):
        put_store(rig.store, page_keys(number))
    with rig.store.fetch(page_keys(0), WAIT_S).take(WAIT_S):
        held = [key for key in page_keys(*range(8)) if rig.store.lookup([key]) == [HOST]]
        assert rig.store.flush(WAIT_S)
        assert all(rig.nvme.lookup(held)), "a page that was leased, queued or idle was left out"


def test_flush_does_not_displace_the_copies_of_other_host_pages(make_rig: RigMaker) -> None:
    rig = make_rig(replace(SELECTIVE, selective_hits=99), nvme_pages=3)
    put_store(rig.store, page_keys(0))
    assert rig.store.flush(WAIT_S)
    rig.only_on_nvme(10, 11)
    put_store(rig.store, page_keys(1))
    assert rig.store.flush(WAIT_S)
    assert rig.nvme.lookup(page_keys(0, 1, 10)) == [True, True, False]
    put_store(rig.store, page_keys(2, 3))
    assert not rig.store.flush(WAIT_S), "four host pages cannot be kept on three slots"


def test_h1_flush_gives_up_at_its_deadline(make_rig: RigMaker) -> None:
    rig = make_rig(SELECTIVE)
    put_store(rig.store, page_keys(0, 1))
    rig.hold("write")
    assert not rig.store.flush(0.02)


def test_flush_says_when_a_page_could_not_be_written(make_rig: RigMaker) -> None:
    rig = make_rig(SELECTIVE)
    put_store(rig.store, page_keys(0, 1))
    rig.nvme.fail_next("write", TierIOError("write: EIO"))
    assert not rig.store.flush(WAIT_S)
    assert rig.store.flush(WAIT_S)


def test_flush_counts_copies_that_fail_while_it_waits(make_rig: RigMaker) -> None:
    """The mover holds these pages when flush looks for what it has to copy."""
    rig = make_rig(THROUGH)
    rig.nvme.fail_next("write", *[TierIOError("write: EIO")] * 100)
    writes = rig.hold("write")
    put_store(rig.store, page_keys(0, 1, 2, 3))
    assert writes.entered.wait(WAIT_S)
    looked = rig.hold("touch")
    said: list[bool] = []
    flush = threading.Thread(target=lambda: said.append(rig.store.flush(WAIT_S)))
    flush.start()
    assert looked.entered.wait(WAIT_S)
    writes.release()
    looked.release()
    flush.join(WAIT_S)
    assert rig.nvme.stats().committed_pages == 0
    assert said == [False], "flush said that pages are safe which nvme never got"


def test_c4_a_page_without_room_in_nvme_is_copied_when_it_is_used(make_rig: RigMaker) -> None:
    rig = make_rig(replace(THROUGH, admission=AdmissionName.ALL), nvme_pages=1)
    with rig.nvme.lease(rig.only_on_nvme(9)):
        put_store(rig.store, page_keys(0))
        assert rig.store.wait_quiet(WAIT_S)
        assert rig.store.lookup(page_keys(0, 9)) == [HOST, NVME]
        assert (rig.store.stats().mover.cancelled, rig.store.stats().mover.failed) == (1, 0)
    rig.store.touch(page_keys(0))
    rig.quiet()
    assert rig.durable == page_keys(0)


# --- fetching ------------------------------------------------------------------------------


def test_a_fetch_promotes_what_is_only_on_nvme(make_rig: RigMaker) -> None:
    rig = make_rig()
    put_store(rig.store, page_keys(0))
    rig.only_on_nvme(1, 2)
    put_store(rig.store, page_keys(3))
    keys = page_keys(0, 1, 2, 3)
    with rig.store.fetch(keys, WAIT_S).take(WAIT_S) as lease:
        rig.store.check()
        assert lease.keys == keys
        assert lease.tiers == [HOST, NVME, NVME, HOST]
        assert [bytes(view) for view in lease.views] == [page_content(k, PAGE_BYTES) for k in keys]
        assert all(view.readonly for view in lease.views)
    assert lease.views == []
    lease.release()
    assert rig.store.lookup(keys) == [HOST] * 4
    assert rig.store.stats().restored_pages == {HOST: 2, NVME: 2}


def test_a_fetch_of_host_pages_is_done_at_once(make_rig: RigMaker) -> None:
    rig = make_rig()
    put_store(rig.store, page_keys(0))
    called: list[bool] = []
    fetch = rig.store.fetch(page_keys(0), WAIT_S)
    assert fetch.done
    fetch.add_done_callback(lambda: called.append(True))
    fetch.take(0.0).release()
    assert called == [True]


def test_a_fetch_of_unknown_pages_is_an_empty_run(make_rig: RigMaker) -> None:
    rig = make_rig()
    fetch = rig.store.fetch(page_keys(1, 2), WAIT_S)
    assert fetch.done
    with fetch.take(WAIT_S) as lease:
        assert lease.keys == lease.views == []
    assert rig.store.stats().missed_pages == 2


def test_lookup_has_no_side_effects(make_rig: RigMaker) -> None:
    rig = make_rig()
    put_store(rig.store, page_keys(0, 1))
    rig.quiet()
    before = (rig.host.stats(), rig.nvme.stats(), rig.host.victims(1))
    rig.store.lookup(page_keys(0, 5))
    assert (rig.host.stats(), rig.nvme.stats(), rig.host.victims(1)) == before


def test_p4_completion_is_told_by_a_wake_up(make_rig: RigMaker) -> None:
    rig = make_rig()
    keys = rig.only_on_nvme(0)
    gate = rig.hold("read")
    fetch = rig.store.fetch(keys, WAIT_S)
    told = threading.Event()
    fetch.add_done_callback(told.set)
    assert gate.entered.wait(WAIT_S)
    assert not fetch.done and not told.is_set()
    gate.release()
    assert told.wait(WAIT_S)
    assert fetch.done
    fetch.take(0.0).release()


def test_two_fetches_share_one_read(make_rig: RigMaker) -> None:
    rig = make_rig()
    keys = rig.only_on_nvme(0, 1)
    gate = rig.hold("read")
    first, second = rig.store.fetch(keys, WAIT_S), rig.store.fetch(keys, WAIT_S)
    rig.store.check()
    gate.release()
    with first.take(WAIT_S) as one, second.take(WAIT_S) as other:
        assert one.keys == other.keys == keys
        rig.store.check()
    assert rig.nvme.calls["read"] == 2


def test_h3_cancel_gives_everything_back(make_rig: RigMaker) -> None:
    rig = make_rig()
    put_store(rig.store, page_keys(9))
    rig.quiet()
    keys = [page_key(9), *rig.only_on_nvme(*range(7))]
    gate = rig.hold("read")
    fetch = rig.store.fetch(keys, WAIT_S)
    told = threading.Event()
    fetch.add_done_callback(told.set)
    assert rig.host.stats().reserved_pages == 7
    assert gate.entered.wait(WAIT_S)
    fetch.cancel()
    fetch.cancel()
    assert told.is_set()
    rig.store.check()
    # Four workers may be reading; their slots stay reserved until no read can write into them.
    assert rig.host.stats().reserved_pages <= 4
    assert rig.host.stats().leased_pages == 0
    gate.release()
    rig.quiet()
    assert rig.host.stats().reserved_pages == 0


def test_h3_cancelling_one_of_two_fetches_leaves_the_other_alone(make_rig: RigMaker) -> None:
    rig = make_rig()
    keys = rig.only_on_nvme(*range(6))
    gate = rig.hold("read")
    first, second = rig.store.fetch(keys, WAIT_S), rig.store.fetch(keys, WAIT_S)
    first.cancel()
    rig.store.check()
    gate.release()
    with second.take(WAIT_S) as lease:
        assert lease.keys == keys
    assert rig.nvme.calls["read"] == 6


def test_h1_a_hanging_read_ends_the_run_at_the_deadline(make_rig: RigMaker) -> None:
    rig = make_rig()
    put_store(rig.store, page_keys(0))
    keys = [page_key(0), *rig.only_on_nvme(1), page_key(0)]
    rig.hold("read")
    fetch = rig.store.fetch(keys, 0.02)
    told = threading.Event()
    fetch.add_done_callback(told.set)
    assert told.wait(WAIT_S), "the deadline has to wake its waiters by itself"
    with fetch.take(WAIT_S) as lease:
        assert lease.keys == page_keys(0)
    assert rig.store.stats().late_fetches == 1


def test_h1_take_waits_no_longer_than_its_own_timeout(make_rig: RigMaker) -> None:
    rig = make_rig()
    gate = rig.hold("read")
    fetch = rig.store.fetch(rig.only_on_nvme(1), WAIT_S)
    with fetch.take(0.01) as lease:
        assert lease.keys == []
    assert rig.store.stats().late_fetches == 1
    gate.release()
    rig.quiet()
    # The late page is not lost: it landed in host for the next one.
    assert rig.store.lookup(page_keys(1)) == [HOST]


def test_take_of_what_is_there_is_not_held_against_nvme(make_rig: RigMaker) -> None:
    rig = make_rig()
    rig.hold("read")
    for number in range(5):
        rig.store.fetch(rig.only_on_nvme(number), WAIT_S).take(0.0).release()
    assert rig.store.stats().late_fetches == 0


def test_a_fetch_without_time_reads_nothing_and_blames_nobody(make_rig: RigMaker) -> None:
    rig = make_rig()
    put_store(rig.store, page_keys(0))
    rig.quiet()
    keys = [page_key(0), *rig.only_on_nvme(1)]
    fetch = rig.store.fetch(keys, 0.0)
    assert fetch.done
    with fetch.take(WAIT_S) as lease:
        assert lease.keys == page_keys(0)
    assert rig.nvme.calls["read"] == 0
    assert rig.store.stats().late_fetches == 0


def test_drop_removes_the_copies_of_one_tier(make_rig: RigMaker) -> None:
    rig = make_rig(THROUGH)
    put_store(rig.store, page_keys(0, 1))
    rig.quiet()
    with rig.store.fetch(page_keys(0), WAIT_S).take(WAIT_S) as lease:
        assert rig.store.drop(page_keys(0, 1, 2), HOST) == 2
        assert rig.store.lookup(page_keys(0, 1)) == [NVME, NVME]
        # Its reader goes on with the dropped copy while the key is written again beside it.
        put_store(rig.store, page_keys(0))
        rig.store.check()
        assert bytes(lease.views[0]) == page_content(page_key(0), PAGE_BYTES)
    assert rig.store.drop(page_keys(0, 1), NVME) == 2
    assert rig.store.lookup(page_keys(0, 1)) == [HOST, None]
    with pytest.raises(ValueError, match="no tier remote"):
        rig.store.drop(page_keys(0), TierName.REMOTE)


@pytest.mark.parametrize("outcome", [ReadOutcome.CORRUPT, ReadOutcome.FAILED])
def test_w6_a_page_that_cannot_be_read_ends_the_run(
    make_rig: RigMaker, outcome: ReadOutcome
) -> None:
    rig = make_rig(replace(THROUGH, mover=MoverLimits(promote_threads=1, demote_threads=1)))
    put_store(rig.store, page_keys(0))
    keys = [page_key(0), *rig.only_on_nvme(1, 2)]
    rig.nvme.answer_reads(outcome)
    n = take_content(rig.store, keys)
    # Two workers read: whichever page met the fault ends the run, none after it is served.
    assert n in (1, 2)
    rig.quiet()


def test_w7_a_page_corrupt_in_host_is_a_miss_and_read_from_nvme_next_time(
    make_rig: RigMaker,
) -> None:
    rig = make_rig()
    put_store(rig.store, page_keys(0, 1, 2))
    rig.quiet()
    rig.host.flip_bit(page_key(1))
    assert take_content(rig.store, page_keys(0, 1, 2)) == 1
    rig.store.check()
    assert rig.store.lookup(page_keys(0, 1, 2)) == [HOST, NVME, HOST]
    assert take_content(rig.store, page_keys(0, 1, 2)) == 3
    assert rig.host.stats().quarantined_pages == 1


def test_w7_a_page_corrupt_on_nvme_is_never_served(make_rig: RigMaker) -> None:
    rig = make_rig()
    keys = rig.only_on_nvme(0)
    rig.nvme.flip_bit(keys[0])
    assert take_content(rig.store, keys) == 0
    assert rig.store.lookup(keys) == [None]
    assert take_content(rig.store, keys) == 0
    assert rig.nvme.calls["read"] == 1, "a corrupt page is not retried"


def test_verify_recovered_checks_only_pages_found_at_the_opening(make_rig: RigMaker) -> None:
    host, nvme = MemoryHostTier(PAGE_BYTES, 4), MemoryTier(PAGE_BYTES, 4)
    put_tier(host, page_keys(0))
    store = TieredStore(host, nvme, replace(THROUGH, verify=Verify.RECOVERED))
    put_store(store, page_keys(1))
    for _ in range(2):
        assert take_content(store, page_keys(0, 1)) == 2
    assert host.calls["verify"] == 1
    store.close()


def test_a_run_is_cut_to_what_host_can_hold(make_rig: RigMaker) -> None:
    rig = make_rig(host_pages=4)
    put_store(rig.store, page_keys(20))
    rig.quiet()
    keys = rig.only_on_nvme(*range(6))
    with rig.store.fetch([page_key(20), *keys], WAIT_S).take(WAIT_S) as lease:
        assert lease.keys == [page_key(20), *keys[:3]]
        with rig.store.reserve(1) as held:
            assert held.views == [], "everything is pinned"
    assert take_content(rig.store, keys) == 4


def test_a_page_evicted_between_lookup_and_fetch_ends_the_run(make_rig: RigMaker) -> None:
    rig = make_rig(SELECTIVE)
    put_store(rig.store, page_keys(0, 1, 2))
    assert rig.store.lookup(page_keys(0, 1, 2)) == [HOST] * 3
    rig.host.drop(page_keys(1))
    assert take_content(rig.store, page_keys(0, 1, 2)) == 1


def test_pinned_pages_are_never_evicted(make_rig: RigMaker) -> None:
    rig = make_rig(BACK, host_pages=4)
    put_store(rig.store, page_keys(0, 1))
    assert rig.store.flush(WAIT_S)
    with rig.store.fetch(page_keys(0, 1), WAIT_S).take(WAIT_S) as lease:
        for number in range(10, 20):
            put_store(rig.store, page_keys(number))
            rig.store.check()
        assert [bytes(view) for view in lease.views] == [
            page_content(key, PAGE_BYTES) for key in page_keys(0, 1)
        ]


def test_a_fetch_is_taken_once(make_rig: RigMaker) -> None:
    rig = make_rig()
    fetch = rig.store.fetch(page_keys(0), WAIT_S)
    fetch.take(0.0).release()
    with pytest.raises(AssertionError, match="once"):
        fetch.take(0.0)


def test_trim_evicts_the_coldest_but_what_is_leased(make_rig: RigMaker) -> None:
    rig = make_rig(THROUGH)
    put_store(rig.store, page_keys(0, 1, 2, 3))
    assert rig.store.flush(WAIT_S)
    rig.quiet()
    with rig.store.fetch(page_keys(0), WAIT_S).take(WAIT_S):
        assert rig.store.trim(HOST, 2) == 2
        assert rig.store.lookup(page_keys(0, 1, 2, 3)) == [HOST, NVME, NVME, HOST]
        assert rig.store.trim(HOST, 0) == 1
        assert rig.store.trim(HOST, 0) == 0
        rig.store.check()
    assert rig.store.trim(NVME, 1) == 3
    assert rig.nvme.stats().committed_pages == 1
    with pytest.raises(ValueError, match="no tier gpu"):
        rig.store.trim(TierName.GPU, 0)


# --- a failing nvme ------------------------------------------------------------------------


@pytest.mark.parametrize("error", [TierFullError("disk full"), TierIOError("EIO")])
def test_a_failing_nvme_never_raises_to_the_engine(
    make_rig: RigMaker, error: TierFullError
) -> None:
    rig = make_rig()
    rig.nvme.fail_next("write", *[error] * 4)
    put_store(rig.store, page_keys(0, 1))
    rig.quiet()
    assert rig.store.stats().mover.failed == 2
    assert take_content(rig.store, page_keys(0, 1)) == 2


@pytest.mark.parametrize("rules", [THROUGH, BACK], ids=lambda r: r.write_policy.value)
def test_a_degraded_nvme_leaves_a_host_that_works(make_rig: RigMaker, rules: StoreRules) -> None:
    clock = ManualClock()
    rig = make_rig(rules, host_pages=4, clock=clock)
    rig.nvme.degraded = "no space left on device"
    for number in range(20):
        put_store(rig.store, page_keys(number))
        rig.quiet()
    assert rig.store.lookup(page_keys(19)) == [HOST]
    stats = rig.store.stats()
    assert stats.degraded == "no space left on device"
    # One page was offered, so that the tier could heal; the others were not even queued.
    assert stats.mover.failed == 1
    assert stats.demote_skipped > 0
    rig.nvme.degraded = None
    clock.advance(1)
    put_store(rig.store, page_keys(30))
    assert rig.store.flush(WAIT_S)
    assert rig.nvme.lookup(page_keys(30)) == [True]


def test_the_breaker_stops_asking_and_asks_again_later(make_rig: RigMaker) -> None:
    clock = ManualClock()
    rules = replace(THROUGH, breaker_failures=2, breaker_open_s=5.0)
    rig = make_rig(rules, clock=clock)
    rig.only_on_nvme(0, 1, 2)
    for number in range(2):
        rig.nvme.answer_reads(ReadOutcome.FAILED)
        assert take_content(rig.store, page_keys(number)) == 0
    stats = rig.store.stats()
    assert (stats.breaker_trips, stats.breaker_open) == (1, True)
    assert stats.degraded is not None
    assert rig.store.lookup(page_keys(2)) == [None]
    reads = rig.nvme.calls["read"]
    assert take_content(rig.store, page_keys(2)) == 0
    assert rig.nvme.calls["read"] == reads
    clock.advance(5.1)
    assert take_content(rig.store, page_keys(2)) == 1
    assert not rig.store.stats().breaker_open


def test_late_reads_trip_the_breaker(make_rig: RigMaker) -> None:
    clock = ManualClock()
    rig = make_rig(replace(THROUGH, breaker_failures=2), clock=clock)
    keys = rig.only_on_nvme(0, 1)
    gate = rig.hold("read")
    for key in keys:
        fetch = rig.store.fetch([key], 1.0)
        assert gate.entered.wait(WAIT_S)
        clock.advance(1.5)
        assert fetch.done
        fetch.take(WAIT_S).release()
    assert rig.store.stats().breaker_trips == 1


def test_an_index_that_cannot_be_read_is_a_miss(make_rig: RigMaker) -> None:
    rig = make_rig()
    rig.only_on_nvme(0)
    rig.nvme.fail_next("lookup", TierIOError("index: EIO"))
    assert rig.store.lookup(page_keys(0)) == [None]
    rig.nvme.fail_next("lease", TierIOError("index: EIO"))
    assert take_content(rig.store, page_keys(0)) == 0
    rig.quiet()


# --- closing -------------------------------------------------------------------------------


def test_use_after_close_is_refused(make_rig: RigMaker) -> None:
    rig = make_rig()
    store = TieredStore(MemoryHostTier(PAGE_BYTES, 1))
    store.close()
    for call in (store.lookup, store.touch, lambda keys: store.fetch(keys, 1.0)):
        with pytest.raises(TierClosedError):
            call(page_keys(0))
    with pytest.raises(TierClosedError):
        store.reserve(1)
    rig.quiet()


def test_h1_close_is_bounded_and_leaves_memory_that_a_read_may_still_write(
    make_rig: RigMaker,
) -> None:
    rig = make_rig(replace(THROUGH, close_s=0.02))
    gate = rig.hold("read")
    fetch = rig.store.fetch(rig.only_on_nvme(0), WAIT_S)
    assert gate.entered.wait(WAIT_S)
    rig.store.close()
    assert fetch.done and not rig.host.closed
    fetch.take(0.0).release()


def test_a_store_without_nvme_keeps_what_host_can_hold() -> None:
    store = TieredStore(MemoryHostTier(PAGE_BYTES, 2))
    for number in range(5):
        put_store(store, page_keys(number))
        store.check()
    assert store.lookup(page_keys(2, 3, 4)) == [None, HOST, HOST]
    assert store.flush(0.0)
    assert take_content(store, page_keys(3, 4)) == 2
    assert store.stats().mover.completed == 0
    store.close()
