"""Pulls between real nodes: what is landed, what is thrown away, and who is asked next."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from tests.support.clock import ManualClock
from tests.support.memory_tier import MemoryTier
from tests.support.pages import page_content, page_keys, take_content
from tests.support.pool_nodes import (
    NEVER,
    PAGE_BYTES,
    WAIT_S,
    GatedPeer,
    Node,
    OffsetClock,
    running_nodes,
    until,
)
from tierkv.storage.errors import TierIOError
from tierkv.storage.pool.borrow import Borrow
from tierkv.storage.pool.holdings import fingerprint
from tierkv.storage.pool.messages import (
    LeaseAsk,
    LeasedPage,
    LeaseGrant,
    Verb,
    read_answer,
    read_request,
    write_answer,
)
from tierkv.storage.remote import Pull, PullState
from tierkv.storage.transport.base import PageOutcome, PageRange
from tierkv.storage.types import PageKey, TierName

QUIET: dict[str, Any] = {"copy_after": NEVER, "hot_after": NEVER}
"""No copies: pages are where the test put them."""


def damage(node: Node, key: PageKey) -> None:
    """Flip a bit of a page in a node's host arena."""
    with node.store.fetch([key], WAIT_S, here=True).take(WAIT_S) as lease:
        start = node.store.payload_offset(lease.slots[0])
    with node.store.arena_memory() as memory:
        memory[start + PAGE_BYTES // 2] ^= 0x10


def ended(*pulls: Pull) -> list[PullState]:
    return [pull.future.result(WAIT_S).state for pull in pulls]


# --- what a lease is worth ------------------------------------------------------------------


def borrowed(clock: ManualClock, hold_s: float = 10.0) -> tuple[Borrow, list[Pull]]:
    host = MemoryTier(8, 16)
    pulls = [
        Pull(key, 0, clock.monotonic() + 60, host.reserve(1), lambda _: None)
        for key in page_keys(1, 2, 3, 4)
    ]
    borrow = Borrow(pulls, hold_s, clock)
    grant = LeaseGrant(1, 1, (*(LeasedPage(n, bytes([n] * 16)) for n in range(3)), None))
    assert borrow.granted(grant) == [pulls[3]], "what is not there is said at once"
    assert borrow.ranges(8) == [PageRange(n, 8) for n in range(3)]
    return borrow, pulls


def test_what_arrived_while_the_lease_was_believed_may_be_landed() -> None:
    clock = ManualClock()
    borrow, pulls = borrowed(clock)
    clock.advance(9.9)
    verdict = borrow.judge([PageOutcome.OK, PageOutcome.GONE, PageOutcome.FAILED])
    assert verdict.arrived == [(pulls[0], bytes(16))]
    assert verdict.lost == [(pulls[1], PullState.MISSED), (pulls[2], PullState.FAILED)]
    assert not verdict.expired


def test_l1_all_pages_of_a_lease_that_ended_first_are_thrown_away() -> None:
    clock = ManualClock()
    borrow, pulls = borrowed(clock)
    clock.advance(10.0)
    verdict = borrow.judge([PageOutcome.OK] * 3)
    assert verdict.expired and not verdict.arrived
    assert verdict.lost == [(pull, PullState.FAILED) for pull in pulls[:3]]


def test_l1_time_counts_from_before_the_lease_was_asked_for() -> None:
    clock = ManualClock()
    host = MemoryTier(8, 4)
    pull = Pull(page_keys(1)[0], 0, clock.monotonic() + 60, host.reserve(1), lambda _: None)
    borrow = Borrow([pull], 10.0, clock)
    clock.advance(8.0)
    # The answer took 8 s: the holder counts from now, the reader from before.
    borrow.granted(LeaseGrant(1, 1, (LeasedPage(0, bytes(16)),)))
    assert borrow.left_s == pytest.approx(2.0)


def test_l1_a_batch_whose_lease_ends_during_the_transfer_lands_nothing() -> None:
    clock = OffsetClock()
    with running_nodes(2, [{"clock": clock}], lease_s=10.0, **QUIET) as nodes:
        near, far = nodes
        keys = page_keys(*range(6))
        far.put(keys)
        nodes.await_known(keys)
        expired = near.link(far).counts()["expired"]

        def outlast(peer: GatedPeer) -> None:
            near.gate.before_read = None
            clock.offset_s += 60.0

        near.gate.before_read = outlast
        pulls = [near.pull(key, 600.0) for key in keys[:1]]
        assert ended(*pulls) == [PullState.FAILED]
        assert near.store.lookup_here(keys) == [False] * 6
        assert near.link(far).counts()["expired"] == expired + 1
        until(lambda: near.link(far).askable, lambda: near.link(far).problem)
        assert take_content(near.store, keys) == 6, "the next lease is a new one"


# --- the way of a page ----------------------------------------------------------------------


def test_a_lease_is_given_back_when_its_pages_are_here() -> None:
    with running_nodes(2, batch_pages=4, **QUIET) as nodes:
        near, far = nodes
        keys = page_keys(*range(20))
        far.put(keys)
        nodes.await_known(keys)
        assert take_content(near.store, keys) == 20
        until(lambda: far.pool.status()["leases"]["held"] == 0, lambda: far.pool.status()["leases"])
        assert far.pool.status()["leases"]["granted_pages"] == 20
        assert far.pool.status()["leases"]["expired_pages"] == 0
        counts = near.link(far).counts()
        assert (counts["pulled"], counts["pulled_bytes"]) == (20, 20 * PAGE_BYTES)


def test_a_page_on_the_holders_nvme_is_brought_up_and_read(tmp_path: Path) -> None:
    own: list[dict[str, Any]] = [{}, {"folder": tmp_path / "nvme", "nvme_pages": 64}]
    with running_nodes(2, own, **QUIET) as nodes:
        near, far = nodes
        keys = page_keys(*range(8))
        far.put(keys)
        assert far.store.flush(WAIT_S)
        far.store.drop(keys, TierName.HOST)
        nodes.await_known(keys)
        assert take_content(near.store, keys) == 8


def test_pages_of_several_holders_are_pulled_from_each() -> None:
    with running_nodes(3, **QUIET) as nodes:
        near = nodes[0]
        keys = page_keys(*range(8))
        nodes[1].put(keys[:4])
        nodes[2].put(keys[4:])
        nodes.await_known(keys)
        assert take_content(near.store, keys) == 8
        assert [near.link(nodes[n]).counts()["pulled"] for n in (1, 2)] == [4, 4]


def test_times_of_any_length_are_within_what_messages_and_transports_allow() -> None:
    longest = {"lease_s": 600.0, "transfer_s": 600.0, "store_s": 600.0, "suspect_s": 600.0}
    with running_nodes(2, **longest) as nodes:
        near, far = nodes
        keys = page_keys(*range(4))
        far.put(keys)
        assert far.remote.flush(WAIT_S)
        near.store.drop(keys, TierName.HOST)
        pulls = [near.pull(key, 1e6) for key in keys]
        assert ended(*pulls) == [PullState.LANDED] * 4
        assert near.remote.stats().worker_restarts == far.remote.stats().worker_restarts == 0


def test_after_a_refused_lease_another_holder_is_asked() -> None:
    with running_nodes(3, **QUIET) as nodes:
        near, empty, full = nodes
        keys = page_keys(*range(16))
        full.put(keys)
        nodes.await_known(keys)
        for key in keys:
            # As if the journal had not yet said that these pages are gone there.
            near.index(empty).note(fingerprint(key))
        pulls = [near.pull(key) for key in keys]
        assert ended(*pulls) == [PullState.LANDED] * 16
        assert near.remote.stats().missed == 0, "a refusal is no miss while somebody has the page"


def test_w7_where_one_holders_copy_is_damaged_the_others_is_read() -> None:
    with running_nodes(3, **QUIET) as nodes:
        near, bad, good = nodes
        keys = page_keys(*range(12))
        bad.put(keys)
        good.put(keys)
        nodes.await_known(keys)
        until(lambda: near.index(good).known == near.index(bad).known == 12, lambda: "unknown")
        for key in keys:
            damage(bad, key)
        pulls = [near.pull(key) for key in keys]
        assert ended(*pulls) == [PullState.LANDED] * 12
        with near.store.fetch(keys, WAIT_S, here=True).take(WAIT_S) as lease:
            assert [bytes(view) for view in lease.views] == [
                page_content(key, PAGE_BYTES) for key in keys
            ]


def test_h1_a_holder_that_never_answers_costs_its_part_of_the_deadline_then_its_breaker() -> None:
    with running_nodes(3, batch_pages=1, breaker_open_s=600.0, **QUIET) as nodes:
        near, silent, good = nodes
        keys = page_keys(*range(6))
        silent.put(keys)
        good.put(keys)
        until(lambda: near.index(good).known == near.index(silent).known == 6, lambda: "unknown")
        waits: list[float] = []

        def swallow(payload: bytes, timeout_s: float) -> None:
            parts = read_request(payload)
            assert parts is not None
            if parts[0].verb is Verb.LEASE and parts[0].receiver_epoch == silent.pool.own_epoch:
                waits.append(timeout_s)
                threading.Event().wait(min(timeout_s, WAIT_S))
                raise TierIOError("no answer came")

        near.gate.before_message = swallow
        # From the silent one only, by what is known, so that it is asked.
        pulls = [near.pull(key, 1.0) for key in keys]
        assert ended(*pulls) == [PullState.LANDED] * 6
        assert waits and all(wait_s <= 0.5 for wait_s in waits), "half of the time is the other's"
        near.gate.before_message = None
        assert near.link(silent).counts()["failures"] >= 1


def test_the_breaker_opens_after_a_few_failures_and_its_peer_is_not_asked() -> None:
    with running_nodes(
        2, batch_pages=1, breaker_failures=3, breaker_open_s=600.0, **QUIET
    ) as nodes:
        near, far = nodes
        keys = page_keys(*range(4))
        far.put(keys)
        nodes.await_known(keys)

        def fail(peer: GatedPeer) -> None:
            raise TierIOError("the cable is out")

        near.gate.before_read = fail
        for key in keys[:3]:
            assert ended(near.pull(key)) == [PullState.FAILED]
        assert not near.link(far).askable and near.link(far).live
        assert near.remote.holds(keys) == [False] * 4
        assert near.store.lookup(keys) == [None] * 4


def test_h2_a_worker_survives_what_one_batch_does_to_it() -> None:
    with running_nodes(2, **QUIET) as nodes:
        near, far = nodes
        keys = page_keys(1, 2)
        far.put(keys)
        nodes.await_known(keys)

        def bug(peer: GatedPeer) -> None:
            near.gate.before_read = None
            raise RuntimeError("a bug of ours")

        near.gate.before_read = bug
        assert ended(near.pull(keys[0])) == [PullState.FAILED]
        assert ended(near.pull(keys[0])) == [PullState.LANDED]
        assert near.remote.stats().worker_restarts == 1


def test_a_holder_that_lies_about_its_memory_costs_the_page_only() -> None:
    with running_nodes(2, **QUIET) as nodes:
        near, far = nodes
        keys = page_keys(1, 2)
        far.put(keys)
        nodes.await_known(keys)
        lies = iter([(1 << 62) + 1, 1 << 40])

        def lie(payload: bytes, answer: bytes) -> bytes:
            parts = read_request(payload)
            assert parts is not None
            envelope, request = parts
            if not isinstance(request, LeaseAsk):
                return answer
            sender, grant = read_answer(answer, request)
            assert isinstance(grant, LeaseGrant)
            offset = next(lies)
            pages = tuple(
                None if page is None else LeasedPage(offset, page.checksum) for page in grant.pages
            )
            told = LeaseGrant(grant.lease, grant.generation, pages)
            return write_answer(envelope.verb, told, sender.sender_epoch, sender.receiver_epoch)

        near.gate.change_answer = lie
        assert ended(near.pull(keys[0])) == [PullState.FAILED]
        assert ended(near.pull(keys[1])) == [PullState.FAILED]
        near.gate.change_answer = None
        until(lambda: near.link(far).askable, lambda: near.link(far).last_error)
        assert ended(near.pull(keys[0])) == [PullState.LANDED]


def test_a_pull_whose_only_holder_dies_fails_and_one_with_another_lands() -> None:
    with running_nodes(3, **QUIET) as nodes:
        near, dying, other = nodes
        alone, shared = page_keys(1), page_keys(2)
        dying.put(alone + shared)
        other.put(shared)
        nodes.await_known(alone + shared)
        until(lambda: near.index(other).known == 1, lambda: near.index(other).known)
        with near.gate.stalled():
            pulls = [near.pull(key) for key in alone + shared]
            until(lambda: near.remote.stats().running > 0, lambda: near.remote.stats())
            dying.stop()
            until(lambda: not near.link(dying).live, lambda: near.link(dying).state)
        states = ended(*pulls)
        assert states[0] in (PullState.FAILED, PullState.MISSED)
        assert states[1] is PullState.LANDED
