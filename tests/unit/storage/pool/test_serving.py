"""What a node answers its members: real stores, real TCP between two nodes in one process."""

from __future__ import annotations

import dataclasses
import random
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.clock import ManualClock
from tests.support.pages import page_content, page_key, page_keys, put_store
from tests.support.pool_node import PAGE_BYTES, WAIT_S, PoolNode
from tierkv.storage.checksum import payload_checksum
from tierkv.storage.pool import receiving, serving
from tierkv.storage.pool.holdings import Holdings, fingerprints
from tierkv.storage.pool.messages import (
    Hello,
    LeaseAsk,
    LeaseGrant,
    Lookup,
    LookupAnswer,
    OfferedPage,
    Refusal,
    ReleaseAsk,
    Released,
    Since,
    SnapshotAsk,
    Status,
    StoreAnswer,
    StoreAsk,
    StoreOutcome,
    Sync,
    SyncAnswer,
    Verb,
    read_answer,
    write_request,
)
from tierkv.storage.pool.serving import Served
from tierkv.storage.quota import Quota
from tierkv.storage.remote import POOL_OWNER
from tierkv.storage.store import StoreConfig, TieredStore
from tierkv.storage.tiers.host import HostTier
from tierkv.storage.transport.base import PageOutcome, PageRange, PeerIdentity, PeerRead
from tierkv.storage.types import PageKey, TierName

HOLD_MS = 10_000
COMMITTED, EXISTS, FULL, CORRUPT, FAILED = StoreOutcome
SEED = 20261129


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def holder(clock: ManualClock) -> Iterator[PoolNode]:
    """Node `b` in its epoch 9; its server's time is the clock's."""
    node = PoolNode("b", 9, clock=clock, transfer_s=4.0)
    yield node
    node.close()


@pytest.fixture
def asker(holder: PoolNode) -> Iterator[PoolNode]:
    """Node `a` in its epoch 7, which has met `b`."""
    node = PoolNode("a", 7)
    node.meet(holder)
    yield node
    node.close()


def lease(asker: PoolNode, holder: PoolNode, *keys: PageKey, wait_ms: int = 0) -> LeaseGrant:
    grant = asker.ask(holder, LeaseAsk(PAGE_BYTES, keys, HOLD_MS, wait_ms))
    assert isinstance(grant, LeaseGrant)
    return grant


def store(
    sender: PoolNode, receiver: PoolNode, *pages: OfferedPage, wait_ms: int = 20_000
) -> list[StoreOutcome]:
    ask = StoreAsk(PAGE_BYTES, sender.generation, pages, wait_ms)
    answer = sender.ask(receiver, ask)
    assert isinstance(answer, StoreAnswer)
    return list(answer.outcomes)


def reserved(node: PoolNode) -> int:
    return node.store.stats().tiers[0].reserved_pages


def leased(node: PoolNode) -> int:
    return node.store.stats().tiers[0].leased_pages


def pool_pages(node: PoolNode) -> int:
    usage = node.store.owners().get(POOL_OWNER)
    return 0 if usage is None else usage.pages[TierName.HOST]


# --- who may ask ----------------------------------------------------------------------------------


def test_a_stranger_is_asked_to_greet_first(holder: PoolNode) -> None:
    stranger = PoolNode("c", 3)
    stranger.peers["b"] = stranger.transport.connect(holder.host, holder.port, WAIT_S)
    for request in (Lookup(PAGE_BYTES, (page_key(0),)), Sync(()), ReleaseAsk((1,))):
        assert stranger.ask(holder, request) == Refusal(Status.STALE, 0)
    greeting = stranger.ask(holder, Hello("c", 3, ()), 0)
    assert greeting == Hello("b", 9, (PAGE_BYTES,))
    assert isinstance(stranger.ask(holder, Sync(())), SyncAnswer)
    stranger.close()


def test_a_message_for_an_earlier_life_of_the_node_is_stale(
    asker: PoolNode, holder: PoolNode
) -> None:
    put_store(holder.store, page_keys(0))
    for epoch in (8, 10):
        request = LeaseAsk(PAGE_BYTES, (page_key(0),), HOLD_MS, 0)
        assert asker.ask(holder, request, peer_epoch=epoch) == Refusal(Status.STALE, 9)
        assert asker.ask(holder, Hello("a", 7, ()), epoch) == Refusal(Status.STALE, 9)
    assert leased(holder) == 0


def test_a_message_from_an_earlier_life_of_the_sender_is_fenced(
    asker: PoolNode, holder: PoolNode
) -> None:
    holder.known[asker.transport.boot_token] = ("a", 12)
    put_store(asker.store, page_keys(0))
    ask = StoreAsk(PAGE_BYTES, asker.generation, asker.offer(page_key(0)), 1000)
    assert asker.ask(holder, ask) == Refusal(Status.FENCED, 12)
    assert not holder.holds(page_key(0))


def test_a_sender_with_a_new_epoch_is_asked_to_greet_again(
    asker: PoolNode, holder: PoolNode
) -> None:
    assert asker.ask(holder, Sync(()), own_epoch=8) == Refusal(Status.STALE, 0)


def test_a_greeting_with_two_epochs_is_refused(asker: PoolNode, holder: PoolNode) -> None:
    answer = asker.ask(holder, Hello("a", 8, ()), 0)
    assert answer == Refusal(Status.REFUSED, text="greeting with two epochs")


def test_an_unknown_page_size_is_told_apart_from_a_miss(asker: PoolNode, holder: PoolNode) -> None:
    keys = (page_key(0),)
    for request in (
        Lookup(4096, keys),
        LeaseAsk(4096, keys, HOLD_MS, 0),
        SnapshotAsk(4096, 0, 0, 0, 1),
        StoreAsk(4096, 1, (OfferedPage(keys[0], 0, bytes(16)),), 1000),
    ):
        assert asker.ask(holder, request) == Refusal(Status.NO_CLASS)


# --- messages that are none -----------------------------------------------------------------------


def test_a1_garbage_is_answered_and_counted(asker: PoolNode, holder: PoolNode) -> None:
    print(f"seed={SEED}")
    rng = random.Random(SEED)
    identity = PeerIdentity(asker.transport.boot_token)
    request = Lookup(PAGE_BYTES, (page_key(0),))
    good = write_request(request, 7, 9)
    for _ in range(300):
        message = rng.choice([rng.randbytes(rng.randrange(200)), good[: rng.randrange(len(good))]])
        _, answer = read_answer(holder.server.handle(identity, message), request)
        assert isinstance(answer, Refusal), message
        assert answer.status in (Status.REFUSED, Status.DAMAGED)
    assert holder.server.stats().requests[Verb.UNREAD.name] == 300
    assert holder.server.stats().errors == 0
    holder.server.check()


def test_a_message_of_another_version_is_refused_with_both_numbers(
    asker: PoolNode, holder: PoolNode
) -> None:
    message = bytearray(write_request(Hello("a", 7, ()), 7, 0))
    message[4] = 2
    answer = asker.peers["b"].message(bytes(message), WAIT_S)
    refusal = read_answer(answer, Hello("a", 7, ()))[1]
    assert isinstance(refusal, Refusal)
    assert "version 1 here, 2 there" in refusal.text


def test_every_flipped_bit_of_a_store_is_noticed_before_anything_is_done(
    asker: PoolNode, holder: PoolNode
) -> None:
    put_store(asker.store, page_keys(0))
    ask = StoreAsk(PAGE_BYTES, asker.generation, asker.offer(page_key(0)), 1000)
    good = write_request(ask, 7, 9)
    identity = PeerIdentity(asker.transport.boot_token)
    for bit in range(8 * len(good)):
        message = bytearray(good)
        message[bit // 8] ^= 1 << (bit % 8)
        refusal = read_answer(holder.server.handle(identity, bytes(message)), ask)[1]
        assert isinstance(refusal, Refusal), bit
    assert holder.server.stats().stored == {}
    assert reserved(holder) == 0 and not holder.holds(page_key(0))


def test_h2_a_bug_in_an_answer_ends_neither_thread_nor_connection(
    asker: PoolNode, holder: PoolNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(keys: object) -> list[bool]:
        raise RuntimeError("a bug of ours")

    request = Lookup(PAGE_BYTES, (page_key(0),))
    with monkeypatch.context() as patch:
        patch.setattr(holder.store, "lookup_here", broken)
        answer = asker.ask(holder, request)
        assert isinstance(answer, Refusal) and answer.status is Status.REFUSED
    assert holder.server.stats().errors == 1
    assert asker.ask(holder, request) == LookupAnswer((False,))


# --- LOOKUP ---------------------------------------------------------------------------------------


def test_lookup_says_what_is_here(asker: PoolNode, holder: PoolNode) -> None:
    put_store(holder.store, page_keys(1, 3))
    keys = tuple(page_keys(0, 1, 2, 3, 1))
    answer = asker.ask(holder, Lookup(PAGE_BYTES, keys))
    assert answer == LookupAnswer((False, True, False, True, True))


def test_l1_lookup_renews_nothing_and_touches_no_recency(
    asker: PoolNode, holder: PoolNode, clock: ManualClock
) -> None:
    put_store(holder.store, page_keys(*range(8)))
    lease(asker, holder, page_key(7))
    clock.advance(HOLD_MS / 1000 - 1)
    before = holder.store.stats()
    order = holder.store.keys_of(0, TierName.HOST)
    counts = holder.server.stats().leases
    for _ in range(20):
        asker.ask(holder, Lookup(PAGE_BYTES, (page_key(0), page_key(7), page_key(99))))
    assert holder.store.stats() == before
    assert holder.store.keys_of(0, TierName.HOST) == order
    assert holder.server.stats().leases == counts
    clock.advance(1 + 4)
    assert holder.server.expire() == 1, "the lease ends when it would have ended"
    put_store(holder.store, page_keys(8))
    assert not holder.holds(page_key(0)), "the coldest page is still the coldest"


# --- LEASE ----------------------------------------------------------------------------------------


def test_a_lease_says_where_each_page_lies(asker: PoolNode, holder: PoolNode) -> None:
    keys = page_keys(5, 1, 3)
    put_store(holder.store, keys)
    grant = lease(asker, holder, *keys)
    views = [bytearray(PAGE_BYTES) for _ in keys]
    pages = [page for page in grant.pages if page is not None]
    ranges = [PageRange(page.offset, PAGE_BYTES) for page in pages]
    into = [memoryview(view) for view in views]
    read = asker.peers["b"].read(grant.generation, ranges, into, WAIT_S)
    assert read.take(WAIT_S) == [PageOutcome.OK] * 3
    for key, view, page in zip(keys, views, pages, strict=True):
        assert bytes(view) == page_content(key, PAGE_BYTES)
        assert page.checksum == payload_checksum(bytes(view))
    assert asker.ask(holder, ReleaseAsk((grant.lease, grant.lease + 1))) == Released(1)
    assert leased(holder) == 0


def test_each_key_of_a_lease_stands_for_itself(asker: PoolNode, holder: PoolNode) -> None:
    put_store(holder.store, page_keys(1, 3))
    keys = page_keys(0, 1, 2, 3, 4, 1)
    grant = lease(asker, holder, *keys)
    assert [page is not None for page in grant.pages] == [False, True, False, True, False, True]
    assert grant.pages[1] == grant.pages[5]
    assert leased(holder) == 2
    nothing = lease(asker, holder, *page_keys(0, 2))
    assert nothing == LeaseGrant(0, holder.generation, (None, None))
    assert holder.server.stats().leases.leases == 1


def test_l1_a_leased_page_stays_until_release_or_the_end_of_its_quarantine(
    asker: PoolNode, holder: PoolNode, clock: ManualClock
) -> None:
    put_store(holder.store, page_keys(*range(8)))
    grant = lease(asker, holder, page_key(0))
    put_store(holder.store, page_keys(*range(20, 28)))
    clock.advance(HOLD_MS / 1000 + 3.9)
    asker.ask(holder, Sync(()))
    put_store(holder.store, page_keys(*range(30, 38)))
    assert holder.holds(page_key(0))
    clock.advance(0.2)
    asker.ask(holder, Sync(()))
    assert asker.ask(holder, ReleaseAsk((grant.lease,))) == Released(0)
    put_store(holder.store, page_keys(*range(40, 48)))
    assert not holder.holds(page_key(0))


def test_w7_a_page_that_rotted_in_the_holders_memory_is_not_leased(
    asker: PoolNode, holder: PoolNode
) -> None:
    put_store(holder.store, page_keys(0, 1, 2))
    holder.flip(holder.offer(page_key(1))[0].offset + 77)
    grant = lease(asker, holder, *page_keys(0, 1, 2))
    assert [page is not None for page in grant.pages] == [True, False, True]
    assert holder.store.stats().tiers[0].quarantined_pages == 1
    assert leased(holder) == 2


def test_members_hold_at_most_half_of_an_arena(asker: PoolNode, holder: PoolNode) -> None:
    put_store(holder.store, page_keys(*range(8)))
    grant = lease(asker, holder, *page_keys(*range(4)))
    assert None not in grant.pages
    refused = asker.ask(holder, LeaseAsk(PAGE_BYTES, tuple(page_keys(4, 5, 6, 7)), HOLD_MS, 0))
    assert isinstance(refused, Refusal) and refused.status is Status.REFUSED, "not a miss"
    assert leased(holder) == 4, "what was not granted is not held"
    assert holder.server.stats().leases.refused == 4
    asker.ask(holder, ReleaseAsk((grant.lease,)))
    assert None not in lease(asker, holder, *page_keys(4, 5, 6, 7)).pages


def test_a_member_that_is_gone_gives_its_pages_back_after_the_longest_transfer(
    asker: PoolNode, holder: PoolNode, clock: ManualClock
) -> None:
    put_store(holder.store, page_keys(0))
    lease(asker, holder, page_key(0))
    holder.server.drop_member("a")
    assert (holder.server.expire(), leased(holder)) == (0, 1)
    clock.advance(4)
    assert (holder.server.expire(), leased(holder)) == (1, 0)


def test_a_page_without_a_checksum_is_not_leased(asker: PoolNode) -> None:
    capacity = HostTier.capacity_for(PAGE_BYTES, 4)
    plain = TieredStore(HostTier(None, PAGE_BYTES, capacity, checksums=False))
    holder = PoolNode("p", 1, store=plain)
    asker.meet(holder)
    put_store(plain, page_keys(0))
    assert lease(asker, holder, page_key(0)).pages == (None,)
    assert leased(holder) == 0
    asker.peers["p"].close()
    holder.close()


def test_a_lease_brings_pages_up_from_nvme(asker: PoolNode, tmp_path: Path) -> None:
    below = TieredStore.open(
        StoreConfig(PAGE_BYTES, 8 * 24576 + 65536, nvme_root=tmp_path, nvme_bytes=64 << 20)
    )
    holder = PoolNode("d", 1, store=below)
    asker.meet(holder)
    keys = page_keys(0, 1, 2)
    put_store(below, keys)
    assert below.flush(WAIT_S)
    below.trim(TierName.HOST, 0)
    assert below.lookup(keys) == [TierName.NVME] * 3
    asked = (page_key(9), *keys[:1], page_key(8), *keys[1:])
    grant = lease(asker, holder, *asked, wait_ms=4000)
    assert [page is not None for page in grant.pages] == [False, True, False, True, True]
    for key, page in zip(asked, grant.pages, strict=True):
        if page is not None:
            assert page.checksum == payload_checksum(page_content(key, PAGE_BYTES))
    asker.peers["d"].close()
    holder.close()


# --- SYNC, SNAPSHOT -------------------------------------------------------------------------------


def test_sync_tells_changes_and_says_when_a_snapshot_is_needed(
    asker: PoolNode, holder: PoolNode
) -> None:
    answer = asker.ask(holder, Sync((Since(PAGE_BYTES, 0, 0), Since(4096, 0, 0))))
    assert isinstance(answer, SyncAnswer)
    assert (answer.leaving, answer.page_sizes, len(answer.changes)) == (False, (PAGE_BYTES,), 1)
    (needed,) = answer.changes
    assert needed.snapshot_needed and needed.page_bytes == PAGE_BYTES
    put_store(holder.store, page_keys(0, 1))
    holder.holdings.gained(page_keys(0, 1))
    holder.holdings.lost(page_keys(5))
    (changes,) = asker.ask(holder, Sync((Since(PAGE_BYTES, needed.token, 0),))).changes
    assert sorted(changes.added) == sorted(fingerprints(page_keys(0, 1)))
    assert list(changes.removed) == list(fingerprints(page_keys(5)))
    assert (changes.seq, changes.more, changes.snapshot_needed) == (3, False, False)
    (nothing,) = asker.ask(holder, Sync((Since(PAGE_BYTES, changes.token, 3),))).changes
    assert not len(nothing.added) and not len(nothing.removed)
    holder.leaving = True
    assert asker.ask(holder, Sync(())).leaving


def test_sync_is_cut_where_it_would_be_too_long(
    asker: PoolNode, holder: PoolNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "FINGERPRINTS_MAX", 5)
    put_store(holder.store, page_keys(*range(8)))
    holder.holdings.gained(page_keys(*range(8)))
    want = Since(PAGE_BYTES, holder.holdings.token, 0)
    answer = asker.ask(holder, Sync((want, want)))
    first, second = answer.changes
    assert (len(first.added), first.seq, first.more) == (5, 5, True)
    assert (len(second.added), second.seq, second.more) == (0, 0, True)
    (rest,) = asker.ask(holder, Sync((Since(PAGE_BYTES, first.token, 5),))).changes
    assert (len(rest.added), rest.more) == (3, False)
    told = {*first.added.tolist(), *rest.added.tolist()}
    assert told == set(fingerprints(page_keys(*range(8))).tolist())


def test_all_parts_of_a_snapshot_come_from_one_state(asker: PoolNode, holder: PoolNode) -> None:
    # Every change makes a new snapshot, for whoever begins one.
    holdings = Holdings(holder.store, journal_max=4, snapshot_s=0.0)
    again = PoolNode("e", 1, store=holder.store)
    again.server.remove(PAGE_BYTES, 0)
    again.server.add(dataclasses.replace(again.served, holdings=holdings))
    asker.meet(again)
    put_store(holder.store, page_keys(*range(8)))
    first = asker.ask(again, SnapshotAsk(PAGE_BYTES, 0, 0, 0, 3))
    got = list(first.fingerprints)
    while len(got) < first.total:
        holder.store.drop(page_keys(len(got)), TierName.HOST)
        holdings.lost(page_keys(len(got)))
        part = asker.ask(again, SnapshotAsk(PAGE_BYTES, first.token, first.seq, len(got), 3))
        assert (part.token, part.seq, part.total) == (first.token, first.seq, 8)
        got += list(part.fingerprints)
    assert got == sorted(fingerprints(page_keys(*range(8))).tolist())
    # It was read through: whoever goes on with it is given a new one from its beginning.
    part = asker.ask(again, SnapshotAsk(PAGE_BYTES, first.token, first.seq, 6, 3))
    assert part.seq > first.seq and part.total == 6
    assert (
        list(part.fingerprints) == np.sort(fingerprints(holdings._store.keys_here()))[:3].tolist()
    )
    assert again.server._teller.reading == 1
    again.server.drop_member("a")
    assert again.server._teller.reading == 0
    asker.peers["e"].close()
    again.transport.close()
    assert again.server.close(WAIT_S)


# --- STORE ----------------------------------------------------------------------------------------


def test_stored_pages_are_read_checked_and_kept_for_the_pool(
    asker: PoolNode, holder: PoolNode
) -> None:
    keys = page_keys(0, 1, 2)
    put_store(asker.store, keys)
    assert store(asker, holder, *asker.offer(*keys)) == [COMMITTED] * 3
    assert all(map(holder.holds, keys))
    assert pool_pages(holder) == 3
    assert reserved(holder) == 0
    moved = holder.peers["a"].stats().bytes_read
    assert store(asker, holder, *asker.offer(*keys)) == [EXISTS] * 3
    assert holder.peers["a"].stats().bytes_read == moved, "what is here is not transferred"
    assert holder.server.stats().stored == {"committed": 3, "exists": 3}


def test_w6_bytes_that_changed_after_their_checksum_was_told_are_not_committed(
    asker: PoolNode, holder: PoolNode
) -> None:
    keys = page_keys(0, 1, 2, 3, 4)
    put_store(asker.store, keys)
    offered = asker.offer(*keys)
    for index in (0, 2):
        asker.flip(offered[index].offset + PAGE_BYTES - 1)
    outcomes = store(asker, holder, *offered)
    assert outcomes == [CORRUPT, COMMITTED, CORRUPT, COMMITTED, COMMITTED]
    for key, outcome in zip(keys, outcomes, strict=True):
        assert holder.holds(key) == (outcome is COMMITTED)
    assert reserved(holder) == 0


def test_a_full_receiver_says_so_and_keeps_what_it_has(asker: PoolNode, holder: PoolNode) -> None:
    put_store(holder.store, page_keys(*range(10, 18)))
    put_store(asker.store, page_keys(0, 1))
    with holder.store.fetch(page_keys(*range(10, 17)), 0).take(0) as held:
        assert len(held.keys) == 7
        assert store(asker, holder, *asker.offer(*page_keys(0, 1))) == [COMMITTED, FULL]
        assert reserved(holder) == 0
    assert holder.holds(page_key(0)) and not holder.holds(page_key(1))


def test_a_receiver_that_gives_nothing_reads_nothing(asker: PoolNode) -> None:
    stingy = PoolNode("s", 1, host_share=0.0)
    asker.meet(stingy)
    put_store(asker.store, page_keys(0))
    assert store(asker, stingy, *asker.offer(page_key(0))) == [FULL]
    assert stingy.peers["a"].stats().bytes_read == 0
    asker.peers["s"].close()
    stingy.close()


def test_pages_of_the_pool_stay_within_its_share(asker: PoolNode, holder: PoolNode) -> None:
    slot = holder.store.stats().tiers[0].slot_bytes
    holder.store.set_quota(POOL_OWNER, Quota(ceiling_bytes={TierName.HOST: 2 * slot}))
    put_store(asker.store, page_keys(*range(6)))
    for number in range(6):
        assert store(asker, holder, *asker.offer(page_key(number))) == [COMMITTED]
        assert pool_pages(holder) <= 2
    kept = lease(asker, holder, *page_keys(4, 5))
    assert None not in kept.pages
    put_store(asker.store, page_keys(7))
    assert store(asker, holder, *asker.offer(page_key(7))) == [FULL], "all of its share is held"
    assert not holder.holds(page_key(7))


def test_a_batch_larger_than_the_receivers_half_is_taken_in_turns(asker: PoolNode) -> None:
    small = PoolNode("m", 1, pages=6)
    asker.meet(small)
    put_store(asker.store, page_keys(*range(6)))
    assert store(asker, small, *asker.offer(*page_keys(*range(6)))) == [COMMITTED] * 6
    asker.peers["m"].close()
    small.close()


def test_a_leaving_node_takes_nothing_in_but_is_still_read(
    asker: PoolNode, holder: PoolNode
) -> None:
    put_store(holder.store, page_keys(1))
    put_store(asker.store, page_keys(0))
    holder.leaving = True
    ask = StoreAsk(PAGE_BYTES, asker.generation, asker.offer(page_key(0)), 1000)
    assert asker.ask(holder, ask) == Refusal(Status.LEAVING)
    assert None not in lease(asker, holder, page_key(1)).pages


def test_a_page_size_is_opened_for_the_first_copy(asker: PoolNode, holder: PoolNode) -> None:
    assert holder.server.remove(PAGE_BYTES, WAIT_S)
    assert asker.ask(holder, Lookup(PAGE_BYTES, (page_key(0),))) == Refusal(Status.NO_CLASS)

    def open_class(page_bytes: int) -> Served:
        assert page_bytes == PAGE_BYTES
        holder.server.add(holder.served)
        return holder.served

    holder.on_open = open_class
    put_store(asker.store, page_keys(0))
    assert store(asker, holder, *asker.offer(page_key(0))) == [COMMITTED]
    assert asker.ask(holder, Lookup(PAGE_BYTES, (page_key(0),))) == LookupAnswer((True,))


def test_a_sender_that_cannot_be_read_from_costs_nothing(asker: PoolNode, holder: PoolNode) -> None:
    put_store(asker.store, page_keys(0))
    offered = asker.offer(page_key(0))
    own = holder.peers.pop("a")
    assert store(asker, holder, *offered) == [FAILED]
    stranger = PoolNode("c", 3)
    holder.peers["a"] = holder.transport.connect(stranger.host, stranger.port, WAIT_S)
    assert store(asker, holder, *offered) == [FAILED], "that connection is to another process"
    holder.peers["a"].close()
    stranger.close()
    holder.peers["a"] = own
    wrong = dataclasses.replace(StoreAsk(PAGE_BYTES, 99, offered, 20_000))
    assert asker.ask(holder, wrong).outcomes == (FAILED,), "no such memory"
    assert store(asker, holder, offered[0]._replace(offset=(1 << 62) - 1)) == [FAILED]
    assert reserved(holder) == 0 and not holder.holds(page_key(0))


def test_a_sender_that_dies_before_it_is_read_is_a_failure(holder: PoolNode) -> None:
    dying = PoolNode("x", 1)
    dying.meet(holder)
    put_store(dying.store, page_keys(0, 1))
    ask = StoreAsk(PAGE_BYTES, dying.generation, dying.offer(*page_keys(0, 1)), 2000)
    message = write_request(ask, 1, 9)
    holder.on_reader = dying.transport.close
    identity = PeerIdentity(dying.transport.boot_token)
    answer = read_answer(holder.server.handle(identity, message), ask)[1]
    assert answer == StoreAnswer((FAILED, FAILED))
    assert reserved(holder) == 0
    holder.peers["x"].close()
    dying.close()


class SlowPeer:
    """A connection whose reads end when the test says so."""

    def __init__(self, identity: PeerIdentity) -> None:
        self.identity = identity
        self.address = "slow"
        self.reads: list[PeerRead] = []
        self.into: list[memoryview] = []

    def read(
        self, generation: int, ranges: list[PageRange], into: list[memoryview], timeout_s: float
    ) -> PeerRead:
        self.into += into
        self.reads.append(PeerRead(len(ranges)))
        return self.reads[-1]


def test_slots_are_returned_only_when_a_late_read_is_done(
    asker: PoolNode, holder: PoolNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(receiving, "GRACE_S", 0.01)
    put_store(asker.store, page_keys(0, 1))
    fast = holder.peers["a"]
    slow: Any = SlowPeer(fast.identity)
    holder.peers["a"] = slow
    assert store(asker, holder, *asker.offer(*page_keys(0, 1)), wait_ms=20) == [FAILED] * 2
    assert (reserved(holder), holder.server.stats().late_pages) == (2, 2)
    assert not holder.server.remove(PAGE_BYTES, 0.01), "the store must stay"
    put_store(holder.store, page_keys(*range(10, 18)))
    assert reserved(holder) == 2, "its slots are nobody else's"
    for view in slow.into:
        view[:] = bytes(PAGE_BYTES)
    slow.reads[0].settle(0, [PageOutcome.OK] * 2)
    assert (reserved(holder), holder.server.stats().late_pages) == (0, 0)
    assert holder.server.remove(PAGE_BYTES, 0)
    holder.peers["a"] = fast
    for number in (0, 1):
        assert not holder.holds(page_key(number)), "what came late was committed"


def test_removing_a_page_size_waits_for_its_stores_and_frees_its_leases(
    asker: PoolNode, holder: PoolNode
) -> None:
    put_store(holder.store, page_keys(5))
    lease(asker, holder, page_key(5))
    put_store(asker.store, page_keys(0))
    offered = asker.offer(page_key(0))
    fast = holder.peers["a"]
    slow: Any = SlowPeer(fast.identity)
    begun, outcomes = threading.Event(), []
    read = slow.read

    def signalling(*args: Any) -> PeerRead:
        started: PeerRead = read(*args)
        begun.set()
        return started

    slow.read = signalling
    holder.peers["a"] = slow
    ask = StoreAsk(PAGE_BYTES, asker.generation, offered, 20_000)
    message = write_request(ask, 7, 9)

    def send() -> None:
        payload = asker.peers["b"].message(message, WAIT_S)
        outcomes.append(read_answer(payload, ask)[1])

    sender = threading.Thread(target=send)
    sender.start()
    assert begun.wait(WAIT_S)
    holder.transport.unregister(holder.generation)
    assert not holder.server.remove(PAGE_BYTES, 0.01)
    assert leased(holder) == 1
    assert asker.ask(holder, Lookup(PAGE_BYTES, (page_key(5),))) == Refusal(Status.NO_CLASS)
    slow.into[0][:] = page_content(page_key(0), PAGE_BYTES)
    slow.reads[0].settle(0, [PageOutcome.OK])
    sender.join(WAIT_S)
    assert outcomes == [StoreAnswer((COMMITTED,))]
    assert holder.server.remove(PAGE_BYTES, WAIT_S)
    assert (leased(holder), reserved(holder)) == (0, 0)
    holder.peers["a"] = fast


def test_h1_a_copy_that_could_begin_only_after_its_time_is_not_begun(
    asker: PoolNode, holder: PoolNode, clock: ManualClock
) -> None:
    assert holder.server.remove(PAGE_BYTES, WAIT_S)

    def open_slowly(_: int) -> Served:
        clock.advance(20)
        holder.server.add(holder.served)
        return holder.served

    holder.on_open = open_slowly
    put_store(asker.store, page_keys(0))
    assert store(asker, holder, *asker.offer(page_key(0))) == [FAILED]
    assert holder.peers["a"].stats().bytes_read == 0


def test_l2_slots_are_conserved_when_members_store_and_lease_at_once(
    asker: PoolNode, holder: PoolNode
) -> None:
    print(f"seed={SEED}")
    put_store(asker.store, page_keys(*range(8)))
    offered = asker.offer(*page_keys(*range(8)))
    rotten = offered[7]._replace(checksum=bytes(16))

    def work(seed: int) -> list[StoreOutcome]:
        rng, seen = random.Random(seed), []
        for _ in range(25):
            some = rng.sample([*offered[:7], rotten], rng.randint(1, 3))
            seen += store(asker, holder, *some)
            ask = LeaseAsk(PAGE_BYTES, tuple(page.key for page in some), HOLD_MS, 0)
            grant = asker.ask(holder, ask)
            if isinstance(grant, Refusal):
                assert grant.status is Status.REFUSED, "the others hold as much as they may"
            elif grant.lease:
                assert asker.ask(holder, ReleaseAsk((grant.lease,))) == Released(1)
            if rng.random() < 0.3:
                holder.store.drop([rng.choice(some).key], TierName.HOST)
        return seen

    with ThreadPoolExecutor(4) as pool:
        seen = [*chain.from_iterable(pool.map(work, range(SEED, SEED + 4)))]
    assert {COMMITTED, EXISTS, CORRUPT} <= set(seen) and FAILED not in seen
    assert (leased(holder), reserved(holder)) == (0, 0)
    assert not holder.holds(page_key(7))
    stored = holder.server.stats().stored
    assert sum(stored.values()) == len(seen)
    for number in range(7):
        holder.holds(page_key(number))
