"""TieredStore with a remote tier: runs over three tiers, every fault at every page of them."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator, Sequence
from itertools import product

import pytest

from tests.support.memory_remote import Fault, Medium, MemoryRemote
from tests.support.memory_tier import Gate, MemoryHostTier, MemoryTier
from tests.support.pages import page_content, page_key, page_keys, put_store, put_tier, take_content
from tests.unit.storage.remote_conformance import run_threads, wait_until
from tierkv.storage.bandwidth import TransferMeter
from tierkv.storage.checksum import payload_checksum
from tierkv.storage.errors import ConfigError
from tierkv.storage.policy import AdmissionName, WritePolicy
from tierkv.storage.quota import Quota
from tierkv.storage.remote import POOL_OWNER, LocalStore
from tierkv.storage.store import StoreConfig, StoreRules, TieredStore
from tierkv.storage.tiers.host import HostTier
from tierkv.storage.types import PageKey, ReadOutcome, TierName

PAGE_BYTES = 4096
WAIT_S = 20.0
SHORT_S = 0.05
HOST, NVME, REMOTE = TierName.HOST, TierName.NVME, TierName.REMOTE
TIER_OF = {"H": HOST, "N": NVME, "R": REMOTE}
KEEP = StoreRules(write_policy=WritePolicy.WRITE_THROUGH_SELECTIVE, selective_hits=99)
"""Nothing is copied down, so that a page stays where the test put it."""


class Rig:
    """A store on tier doubles and a remote in memory, with all of them at hand."""

    def __init__(
        self, rules: StoreRules, host_pages: int, nvme_pages: int, remote: MemoryRemote
    ) -> None:
        self.host = MemoryHostTier(PAGE_BYTES, host_pages)
        self.nvme = MemoryTier(PAGE_BYTES, nvme_pages) if nvme_pages else None
        self.remote = remote
        self.medium = remote.medium
        self.gates: list[Gate] = []
        self.store = TieredStore(self.host, self.nvme, rules)
        self.store.attach_remote(remote)

    def elsewhere(self, *numbers: int) -> list[PageKey]:
        """Put pages into the medium."""
        keys = page_keys(*numbers)
        for key in keys:
            content = page_content(key, PAGE_BYTES)
            self.medium.put(key, content, payload_checksum(content))
        return keys

    def laid_out(self, pattern: str) -> list[PageKey]:
        """A run whose pages are where `pattern` says, one letter a page."""
        keys = page_keys(*range(len(pattern)))
        for number, where in enumerate(pattern):
            if where == "H":
                put_store(self.store, keys[number : number + 1])
            elif where == "N":
                assert self.nvme is not None
                put_tier(self.nvme, keys[number : number + 1])
            else:
                self.elsewhere(number)
        return keys

    def hold_reads(self) -> Gate:
        assert self.nvme is not None
        gate = self.nvme.hold("read")
        self.gates.append(gate)
        return gate

    def quiet(self) -> None:
        assert self.store.wait_quiet(WAIT_S)
        self.store.check()


RigMaker = Callable[..., Rig]


@pytest.fixture
def make_rig() -> Iterator[RigMaker]:
    """Rigs whose stores hold nothing when the test ends (lessons H3 and L2)."""
    rigs: list[Rig] = []

    def make(
        rules: StoreRules = KEEP,
        host_pages: int = 8,
        nvme_pages: int = 16,
        pages_max: int = 64,
        lookup_waits: bool = False,
        copies: bool = False,
    ) -> Rig:
        remote = MemoryRemote(
            Medium(), pages_max=pages_max, lookup_waits=lookup_waits, copies=copies
        )
        rigs.append(Rig(rules, host_pages, nvme_pages, remote))
        return rigs[-1]

    yield make
    for rig in rigs:
        rig.remote.release()
        for gate in rig.gates:
            gate.release()
        if not rig.store._closed:
            rig.quiet()
        for tier in (rig.host, rig.nvme):
            if tier is not None:
                stats = tier.stats()
                assert (stats.leased_pages, stats.reserved_pages) == (0, 0), stats
        assert rig.remote.quiet
        rig.store.close()
        assert rig.host.closed and not any(thread.is_alive() for thread in rig.remote._threads)


# --- runs ----------------------------------------------------------------------------------


@pytest.mark.parametrize("pattern", ["".join(each) for each in product("HNR", repeat=3)])
def test_a_run_comes_whole_from_any_mix_of_tiers(make_rig: RigMaker, pattern: str) -> None:
    rig = make_rig()
    keys = rig.laid_out(pattern)
    where = [TIER_OF[letter] for letter in pattern]
    assert rig.store.lookup([*keys, page_key(99)]) == [*where, None]
    with rig.store.fetch([*keys, page_key(99)], WAIT_S).take(WAIT_S) as lease:
        assert (lease.keys, lease.tiers) == (keys, where)
        assert [bytes(v) for v in lease.views] == [page_content(k, PAGE_BYTES) for k in keys]
        rig.store.check()
    assert rig.store.lookup(keys) == [HOST] * 3
    stats = rig.store.stats()
    assert stats.restored_pages == {tier: where.count(tier) for tier in set(where)}
    assert stats.missed_pages == 1
    # One call to the remote for the whole run.
    pulled = [key for key, tier in zip(keys, where, strict=True) if tier is REMOTE]
    assert rig.remote.submits == ([pulled] if pulled else [])


@pytest.mark.parametrize("pattern", ["RRRR", "HRNR", "RNRH", "NRRN"])
@pytest.mark.parametrize("fault", [Fault.FAIL, Fault.FLIP, Fault.MISS, Fault.LATE])
def test_w6_w7_every_fault_at_every_page_ends_the_run_there(
    make_rig: RigMaker, pattern: str, fault: Fault
) -> None:
    for index in (i for i, letter in enumerate(pattern) if letter == "R"):
        rig = make_rig()
        keys = rig.laid_out(pattern)
        rig.remote.faults[keys[index]] = fault
        deadline_s = 0.2 if fault is Fault.LATE else WAIT_S
        assert take_content(rig.store, keys, deadline_s) == index
        rig.quiet()
        stats = rig.store.stats()
        assert stats.remote is not None
        ended = {
            Fault.FAIL: stats.remote.failed,
            Fault.FLIP: stats.remote.corrupt,
            Fault.MISS: stats.remote.missed,
            Fault.LATE: stats.remote.failed,
        }
        assert ended[fault] >= 1
        assert stats.breaker_trips == 0, "nvme is blamed for what the remote did"
        assert not rig.store.lookup_here(keys[index : index + 1])[0]
        # The trouble is over: the rest comes as if nothing had been.
        rig.remote.faults.clear()
        assert take_content(rig.store, keys, WAIT_S) == len(keys)


@pytest.mark.parametrize("pattern", ["RRRR", "HRNR", "NRRN"])
def test_h1_a_stalled_page_ends_the_run_in_time_and_keeps_its_slot(
    make_rig: RigMaker, pattern: str
) -> None:
    for index in (i for i, letter in enumerate(pattern) if letter == "R"):
        rig = make_rig()
        keys = rig.laid_out(pattern)
        rig.remote.faults[keys[index]] = Fault.STALL
        before = pattern[:index].count("R")
        fetch = rig.store.fetch(keys, WAIT_S)
        wait_until(
            lambda: rig.remote.stats().landed == before and rig.remote.queue.running > 0,  # noqa: B023
            "what goes before the stalled page did not land",
        )
        assert rig.store._lower is None or rig.store._lower.mover.wait_quiet(WAIT_S)
        with fetch.take(SHORT_S) as lease:
            assert lease.keys == keys[:index]
        rig.store.check()
        assert not rig.remote.quiet
        assert rig.host.stats().reserved_pages >= 1, "a slot was freed under a transfer"
        assert rig.store.stats().late_fetches == 1
        rig.remote.release()
        rig.quiet()
        assert rig.host.stats().reserved_pages == 0
        assert rig.store.stats().breaker_trips == 0


def test_a_fetch_of_what_is_here_never_asks_the_remote(make_rig: RigMaker) -> None:
    rig = make_rig()
    keys = rig.laid_out("HNRH")
    with rig.store.fetch(keys, WAIT_S, here=True).take(WAIT_S) as lease:
        assert lease.keys == keys[:2]
    assert rig.remote.submits == [] and rig.remote.asked == []


def test_a_fetch_without_time_pulls_nothing(make_rig: RigMaker) -> None:
    rig = make_rig()
    keys = rig.laid_out("HR")
    assert take_content(rig.store, keys, deadline_s=0.0) <= 1
    assert rig.remote.submits == []


def test_a_page_that_nvme_fails_to_give_is_a_miss_though_the_remote_has_it(
    make_rig: RigMaker,
) -> None:
    rig = make_rig(StoreRules(breaker_failures=1, breaker_open_s=60.0))
    keys = rig.laid_out("NN")
    rig.elsewhere(0, 1)
    assert rig.nvme is not None
    rig.nvme.answer_reads(ReadOutcome.FAILED)
    assert take_content(rig.store, keys) == 0
    rig.quiet()
    # Its breaker is open now, so the remote is who holds them.
    assert rig.store.stats().breaker_open
    assert rig.store.lookup(keys)[0] is REMOTE
    assert take_content(rig.store, keys) == 2


def test_a_page_committed_here_while_it_is_pulled_serves_both(make_rig: RigMaker) -> None:
    rig = make_rig()
    keys = rig.elsewhere(1)
    rig.remote.stall()
    fetch = rig.store.fetch(keys, WAIT_S)
    put_store(rig.store, keys)
    rig.remote.release()
    with fetch.take(WAIT_S) as lease:
        assert lease.keys == keys
    rig.quiet()
    assert rig.host.stats().committed_pages == 1


def test_what_landed_is_written_through_to_nvme(make_rig: RigMaker) -> None:
    rig = make_rig(StoreRules(write_policy=WritePolicy.WRITE_THROUGH))
    keys = rig.elsewhere(1, 2)
    assert take_content(rig.store, keys) == 2
    rig.quiet()
    assert rig.nvme is not None and rig.nvme.lookup(keys) == [True, True]


# --- several fetches, cancelling, closing -----------------------------------------------------


def test_two_fetches_of_one_page_share_one_pull(make_rig: RigMaker) -> None:
    rig = make_rig()
    keys = rig.elsewhere(1, 2)
    rig.remote.stall()
    first = rig.store.fetch(keys, WAIT_S)
    second = rig.store.fetch(keys[:1], WAIT_S)
    rig.store.check()
    rig.remote.release()
    for fetch, count in ((first, 2), (second, 1)):
        with fetch.take(WAIT_S) as lease:
            assert len(lease.keys) == count
    assert rig.remote.submits == [keys]
    assert rig.remote.stats().landed == 2


def test_a_second_fetch_that_has_longer_gives_the_pull_its_time(make_rig: RigMaker) -> None:
    rig = make_rig()
    blocker, wanted = rig.elsewhere(1, 2, 3)[:2], page_keys(4)
    rig.elsewhere(4)
    rig.remote.stall()
    # The worker takes two at a time: the third stays queued behind them.
    ahead = rig.store.fetch(blocker, WAIT_S)
    wait_until(lambda: rig.remote.queue.running == 2, "the worker never came")
    first = rig.store.fetch(wanted, SHORT_S)
    second = rig.store.fetch(wanted, WAIT_S)
    with first.take(WAIT_S) as lease:
        assert lease.keys == []
    rig.remote.release()
    with second.take(WAIT_S) as lease:
        assert lease.keys == wanted
    ahead.cancel()


def test_h3_cancel_ends_queued_pulls_and_leaves_those_of_others(make_rig: RigMaker) -> None:
    rig = make_rig(host_pages=16)
    keys = rig.elsewhere(*range(6))
    rig.remote.stall()
    one = rig.store.fetch(keys, WAIT_S)
    wait_until(lambda: rig.remote.queue.running == 2, "the worker never came")
    other = rig.store.fetch(keys[:4], WAIT_S)
    one.cancel()
    rig.store.check()
    stats = rig.remote.stats()
    assert (stats.cancelled, stats.queued, stats.running) == (2, 2, 2)
    assert rig.host.stats().reserved_pages == 4
    other.cancel()
    rig.store.check()
    assert rig.remote.stats().cancelled == 4
    assert rig.host.stats().reserved_pages == 2, "only what runs keeps its slot"
    rig.remote.release()
    rig.quiet()
    # What ran landed all the same, for whoever comes next.
    assert rig.store.lookup(keys) == [HOST, HOST, *[REMOTE] * 4]


def test_h3_a_hundred_aborted_fetches_leave_nothing_behind(make_rig: RigMaker) -> None:
    rig = make_rig(host_pages=16)
    keys = rig.elsewhere(*range(8))
    for turn in range(100):
        rig.remote.faults = {keys[turn % 8]: Fault.MISS}
        fetch = rig.store.fetch(keys, WAIT_S)
        if turn % 2:
            fetch.take(0.0).release()
        else:
            fetch.cancel()
        rig.store.check()
    rig.quiet()
    rig.store.trim(HOST, 0)
    rig.remote.faults.clear()
    assert take_content(rig.store, keys) == 8


def test_callbacks_run_once_and_with_no_lock_held(make_rig: RigMaker) -> None:
    rig = make_rig()
    keys = rig.elsewhere(1, 2)
    rig.remote.faults[keys[1]] = Fault.FAIL
    rig.remote.stall()
    told: list[bool] = []

    def done() -> None:
        other = threading.Thread(target=rig.store.stats)
        other.start()
        other.join(WAIT_S)
        told.append(not other.is_alive())

    fetch = rig.store.fetch(keys, WAIT_S)
    fetch.add_done_callback(done)
    rig.remote.release()
    with fetch.take(WAIT_S) as lease:
        assert lease.keys == keys[:1]
    wait_until(lambda: bool(told), "nobody was told")
    rig.quiet()
    assert told == [True]


def test_h1_close_is_bounded_and_leaves_memory_that_a_pull_may_still_write(
    make_rig: RigMaker,
) -> None:
    rig = make_rig(StoreRules(close_s=0.2), host_pages=16)
    keys = rig.elsewhere(*range(5))
    rig.remote.stall()
    fetch = rig.store.fetch(keys, WAIT_S)
    wait_until(lambda: rig.remote.queue.running == 2, "the worker never came")
    rig.store.close()
    assert fetch.done and fetch.take(WAIT_S).keys == []
    assert not rig.host.closed, "the arena went away under a transfer"
    assert rig.remote.stats().cancelled == 3
    rig.remote.release()
    assert rig.remote.wait_quiet(WAIT_S)
    rig.store.close()
    assert rig.host.closed


def test_drop_owner_ends_pulls_that_would_bring_pages_back(make_rig: RigMaker) -> None:
    rig = make_rig(host_pages=16)
    keys = rig.elsewhere(*range(4))
    rig.remote.stall()
    fetch = rig.store.fetch(keys, WAIT_S, owner=5)
    other = rig.store.fetch(rig.elsewhere(9), WAIT_S, owner=6)
    wait_until(lambda: rig.remote.queue.running == 2, "the worker never came")
    dropping = threading.Thread(target=rig.store.drop_owner, args=(5,))
    dropping.start()
    wait_until(lambda: rig.remote.stats().cancelled == 2, "queued pulls were not cancelled")
    rig.remote.release()
    dropping.join(WAIT_S)
    assert not dropping.is_alive()
    assert 5 not in rig.store.owners()
    with other.take(WAIT_S) as lease:
        assert len(lease.keys) == 1
    fetch.cancel()


def test_h1_threads_that_write_read_and_remove_at_once_never_lock_each_other_out(
    make_rig: RigMaker,
) -> None:
    """Removals are told from every thread there is: movers, the remote's, and these."""
    rules = StoreRules(write_policy=WritePolicy.WRITE_BACK, admission=AdmissionName.ALL)
    rig = make_rig(rules, host_pages=12, nvme_pages=8, copies=True)
    rig.store.set_quota(1, Quota(ceiling_bytes={HOST: 6 * PAGE_BYTES, NVME: 4 * PAGE_BYTES}))
    keys = page_keys(*range(24))

    def work(number: int) -> None:
        rng = random.Random(number)
        for _ in range(60):
            start = rng.randrange(20)
            run = keys[start : start + 4]
            match rng.randrange(6):
                case 0 | 1:
                    with rig.store.reserve(len(run), number % 2) as held:
                        run = run[: len(held.views)]
                        for key, view in zip(run, held.views, strict=True):
                            view[:] = page_content(key, PAGE_BYTES)
                        held.commit(run, owner=number % 2)
                case 2 | 3:
                    fetch = rig.store.fetch(run, WAIT_S, owner=number % 2)
                    with fetch.take(WAIT_S) as lease:
                        for key, view in zip(lease.keys, lease.views, strict=True):
                            if bytes(view) != page_content(key, PAGE_BYTES):
                                wrong.append(key)
                case 4:
                    rig.store.trim(rng.choice([HOST, NVME]), 3)
                case _:
                    rig.store.drop(run, rng.choice([HOST, NVME]))

    wrong: list[PageKey] = []
    run_threads([threading.Thread(target=work, args=(number,)) for number in range(4)])
    assert not wrong
    rig.quiet()
    # Told in the order in which it happened: nothing is believed to be here that is gone.
    assert rig.remote.here <= set(rig.store.keys_here())


# --- bounds ---------------------------------------------------------------------------------


def test_a_full_queue_cuts_the_run_and_counts_what_it_refused(make_rig: RigMaker) -> None:
    rig = make_rig(pages_max=2, host_pages=16)
    keys = rig.laid_out("RRRRN")
    gate = rig.hold_reads()
    fetch = rig.store.fetch(keys, WAIT_S)
    gate.release()
    with fetch.take(WAIT_S) as lease:
        assert lease.keys == keys[:2]
    rig.quiet()
    stats = rig.store.stats()
    assert stats.remote is not None and stats.remote.refused == 2
    assert stats.missed_pages == 3


def test_a_run_is_cut_to_what_host_can_hold(make_rig: RigMaker) -> None:
    rig = make_rig(host_pages=3)
    keys = rig.elsewhere(*range(5))
    assert take_content(rig.store, keys) == 3


def test_quotas_bound_what_is_pulled_for_an_owner(make_rig: RigMaker) -> None:
    rig = make_rig(host_pages=8)
    keys = rig.elsewhere(*range(6))
    rig.store.set_quota(3, Quota(ceiling_bytes={HOST: 2 * PAGE_BYTES}))
    with rig.store.fetch(keys[:4], WAIT_S, owner=3).take(WAIT_S) as lease:
        assert lease.keys == keys[:2]
        assert rig.store.owners()[3].pages[HOST] == 2
    rig.quiet()
    assert rig.store.stats().quota_refused == {HOST: 1}
    # Its own coldest go for others of its own; another owner is not bound by it.
    with rig.store.fetch(keys[4:], WAIT_S, owner=3).take(WAIT_S) as lease:
        assert lease.keys == keys[4:]
    assert rig.store.lookup(keys[:2]) == [REMOTE, REMOTE]
    with rig.store.fetch(keys[:4], WAIT_S, owner=4).take(WAIT_S) as lease:
        assert lease.keys == keys[:4]
    assert {o: u.pages[HOST] for o, u in rig.store.owners().items()} == {3: 2, 4: 4}


@pytest.mark.parametrize("waits_for_nvme", [False, True])
def test_a_late_fetch_blames_nvme_only_when_it_waited_for_it(
    make_rig: RigMaker, waits_for_nvme: bool
) -> None:
    rig = make_rig(StoreRules(breaker_failures=1, breaker_open_s=60.0))
    keys = rig.laid_out("RN")
    rig.remote.stall()
    gate = rig.hold_reads() if waits_for_nvme else None
    fetch = rig.store.fetch(keys, WAIT_S)
    if gate is None:
        assert rig.store._lower is not None and rig.store._lower.mover.wait_quiet(WAIT_S)
    fetch.take(SHORT_S).release()
    stats = rig.store.stats()
    assert (stats.late_fetches, stats.breaker_open) == (1, waits_for_nvme)


# --- looking up -----------------------------------------------------------------------------


def test_lookup_names_the_remote_only_for_what_nothing_nearer_has(make_rig: RigMaker) -> None:
    rig = make_rig()
    keys = rig.laid_out("HNR")
    rig.elsewhere(0, 1)
    assert rig.store.lookup(keys) == [HOST, NVME, REMOTE]
    rig.remote.reachable = False
    assert rig.store.lookup(keys) == [HOST, NVME, None]
    assert rig.store.stats().degraded == "remote: nobody answers"
    assert rig.remote.asked == [], "it knows without being asked"


def test_a_remote_that_must_be_asked_is_asked_with_no_lock_held(make_rig: RigMaker) -> None:
    rig = make_rig(lookup_waits=True)
    keys = rig.laid_out("HNRR")
    assert rig.store.lookup_waits
    answered: list[float] = []

    class Watching(MemoryRemote):
        def ask(self, keys: Sequence[PageKey], timeout_s: float) -> None:
            other = threading.Thread(target=rig.store.stats)
            other.start()
            other.join(WAIT_S)
            assert not other.is_alive(), "lookup asks with the store's lock held"
            answered.append(timeout_s)
            super().ask(keys, timeout_s)

    rig.remote.__class__ = Watching
    assert rig.store.lookup(keys) == [HOST, NVME, REMOTE, REMOTE]
    assert rig.remote.asked == keys[2:], "only what is not here is asked for"
    assert answered == [KEEP.remote_lookup_s]
    assert take_content(rig.store, keys) == 4
    assert answered == [KEEP.remote_lookup_s], "a fetch asks nobody"


def test_a_store_without_a_remote_says_so() -> None:
    store = TieredStore(MemoryHostTier(PAGE_BYTES, 4))
    assert store.stats().remote is None and not store.lookup_waits
    assert store.lookup(page_keys(1)) == [None]
    assert take_content(store, page_keys(1)) == 0
    store.close()


@pytest.mark.parametrize("nvme_pages", [0, 8])
def test_rates_of_the_remote_are_told_with_and_without_nvme(
    make_rig: RigMaker, nvme_pages: int
) -> None:
    rig = make_rig(nvme_pages=nvme_pages, copies=True)
    assert REMOTE not in rig.store.stats().mover.read_bytes_per_s
    assert take_content(rig.store, rig.elsewhere(1, 2)) == 2
    put_store(rig.store, page_keys(8))
    rig.quiet()
    mover = rig.store.stats().mover
    for estimate in (
        mover.read_bytes_per_s,
        mover.read_latency_s,
        mover.write_bytes_per_s,
        mover.write_latency_s,
    ):
        assert estimate[REMOTE] > 0


# --- what the remote is told -----------------------------------------------------------------


def test_commits_and_uses_are_offered_with_their_owner_and_count(make_rig: RigMaker) -> None:
    rig = make_rig()
    for owner in (0, 3, POOL_OWNER):
        with rig.store.reserve(1, owner) as held:
            key = page_key(owner)
            held.views[0][:] = page_content(key, PAGE_BYTES)
            held.commit([key], owner=owner)
    assert rig.remote.offered == [(page_key(0), 1, 0), (page_key(3), 1, 3)]
    assert rig.remote.here == set(page_keys(0, 3, POOL_OWNER))
    rig.remote.offered.clear()
    assert take_content(rig.store, page_keys(0, 3, POOL_OWNER)) == 3
    rig.store.touch(page_keys(3, POOL_OWNER, 44))
    assert rig.remote.offered == [(page_key(0), 2, 0), (page_key(3), 2, 3), (page_key(3), 3, 3)]


def test_a_page_that_is_only_on_nvme_is_not_offered(make_rig: RigMaker) -> None:
    rig = make_rig()
    rig.store.touch(rig.laid_out("N"))
    assert rig.remote.offered == []


def test_copies_are_made_of_what_is_offered(make_rig: RigMaker) -> None:
    rig = make_rig(copies=True)
    keys = page_keys(1, 2)
    put_store(rig.store, keys)
    assert rig.remote.flush(WAIT_S)
    assert set(rig.medium.keys()) == set(keys)
    rig.quiet()
    assert rig.remote.stats().pushed == 2
    # What the remote read for its copies is no use: nothing was offered again for it.
    assert rig.remote.offered == [(key, 1, 0) for key in keys]
    stats = rig.store.stats()
    assert (stats.restored_pages, stats.missed_pages, stats.reuse_gaps) == ({}, 0, {})


@pytest.mark.parametrize("how", ["evict", "trim", "drop", "quota", "corrupt", "owner"])
def test_every_removal_is_told(make_rig: RigMaker, how: str) -> None:
    rig = make_rig(host_pages=4, nvme_pages=0)
    keys = page_keys(*range(4))
    with rig.store.reserve(4, 2) as held:
        for key, view in zip(keys, held.views, strict=True):
            view[:] = page_content(key, PAGE_BYTES)
        held.commit(keys, owner=2)
    assert rig.remote.here == set(keys)
    if how == "evict":
        put_store(rig.store, page_keys(8, 9))
    elif how == "trim":
        rig.store.trim(HOST, 1)
    elif how == "drop":
        rig.store.drop(keys[:2], HOST)
    elif how == "quota":
        rig.store.set_quota(2, Quota(ceiling_bytes={HOST: 2 * PAGE_BYTES}))
    elif how == "owner":
        rig.store.drop_owner(2)
    else:
        rig.host.flip_bit(keys[2])
        assert take_content(rig.store, keys) == 2
    assert rig.remote.here == set(rig.store.keys_here())
    assert not set(keys) <= rig.remote.here


@pytest.mark.parametrize("how", ["drop", "trim", "corrupt"])
def test_every_removal_from_nvme_is_told(make_rig: RigMaker, how: str) -> None:
    rig = make_rig()
    keys = rig.laid_out("NNN")
    rig.remote.gained(keys)
    assert rig.nvme is not None
    if how == "drop":
        rig.store.drop(keys[:1], NVME)
    elif how == "trim":
        rig.store.trim(NVME, 2)
    else:
        rig.nvme.flip_bit(keys[0])
        assert take_content(rig.store, keys) == 0
        rig.quiet()
    assert rig.remote.here == set(keys[1:])
    assert rig.store.lookup_here(keys) == [False, True, True]


def test_what_lands_is_told_as_gained(make_rig: RigMaker) -> None:
    rig = make_rig()
    keys = rig.elsewhere(1, 2)
    rig.remote.faults[keys[1]] = Fault.FAIL
    assert take_content(rig.store, keys) == 1
    assert rig.remote.here == {keys[0]}


# --- attaching ------------------------------------------------------------------------------


def test_a_remote_that_cannot_be_bound_leaves_the_store_as_it_was() -> None:
    store = TieredStore(MemoryHostTier(PAGE_BYTES, 4))
    broken = MemoryRemote(Medium())
    broken.bind_error = ConfigError("bind: the port is taken; choose another")
    with pytest.raises(ConfigError, match="the port is taken"):
        store.attach_remote(broken)
    assert store.stats().remote is None
    put_store(store, page_keys(1))
    assert take_content(store, page_keys(1)) == 1
    store.attach_remote(MemoryRemote(Medium()))
    assert store.stats().remote is not None
    store.check()
    store.close()


def test_a_store_has_one_remote() -> None:
    store = TieredStore(MemoryHostTier(PAGE_BYTES, 4))
    store.attach_remote(MemoryRemote(Medium()))
    with pytest.raises(AssertionError, match="one remote"):
        store.attach_remote(MemoryRemote(Medium()))
    store.close()


def test_a_remote_attached_to_a_store_in_use_hears_of_what_came_meanwhile() -> None:
    store = TieredStore(MemoryHostTier(PAGE_BYTES, 4))
    put_store(store, page_keys(1))

    class Slow(MemoryRemote):
        def bind(self, store: LocalStore, reads: TransferMeter, writes: TransferMeter) -> None:
            self.here.update(store.keys_here())
            # Another thread commits before the binding is through.
            put_store(self.mate, page_keys(2))
            super().bind(store, reads, writes)

        mate = store

    remote = Slow(Medium())
    store.attach_remote(remote)
    assert remote.here == set(page_keys(1, 2)) == set(store.keys_here())
    store.close()


# --- what the remote may ask of the store -----------------------------------------------------


def test_arena_memory_and_offsets_lead_to_the_bytes_of_a_page() -> None:
    host_bytes = HostTier.capacity_for(5000, 4)
    with_arena = TieredStore.open(StoreConfig(page_bytes=5000, host_bytes=host_bytes))
    keys = page_keys(1, 2)
    put_store(with_arena, keys)
    memory = with_arena.arena_memory()
    with with_arena.fetch(keys, WAIT_S).take(WAIT_S) as lease:
        for key, slot in zip(lease.keys, lease.slots, strict=True):
            start = with_arena.payload_offset(slot)
            assert memory[start : start + 5000] == page_content(key, 5000)
    assert with_arena.host is with_arena._host
    with_arena.close()
    # Whoever still holds the view does not keep the store from closing.
    memory.release()


def test_a_host_that_is_no_arena_says_so() -> None:
    store = TieredStore(MemoryHostTier(PAGE_BYTES, 4))
    with pytest.raises(ConfigError, match="no arena"):
        store.arena_memory()
    store.close()


def test_keys_here_names_each_page_once(make_rig: RigMaker) -> None:
    rig = make_rig()
    keys = rig.laid_out("HNR")
    assert rig.nvme is not None
    put_tier(rig.nvme, keys[:1])
    assert sorted(rig.store.keys_here()) == sorted(keys[:2])
    assert rig.store.lookup_here(keys) == [True, True, False]


def test_pages_kept_for_others_stay_below_the_pools_share(make_rig: RigMaker) -> None:
    rig = make_rig()
    rig.store.set_quota(POOL_OWNER, Quota(ceiling_bytes={HOST: 2 * PAGE_BYTES}))
    for number in range(5):
        with rig.store.reserve(1, POOL_OWNER) as held:
            key = page_key(number)
            held.views[0][:] = page_content(key, PAGE_BYTES)
            held.commit([key], [payload_checksum(held.views[0])], POOL_OWNER)
        rig.store.check()
    assert rig.store.keys_of(POOL_OWNER, HOST) == page_keys(3, 4)
    assert rig.remote.here == set(page_keys(3, 4))
