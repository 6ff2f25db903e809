"""Copies between real nodes: who gets them, what is acknowledged, what is held meanwhile."""

from __future__ import annotations

import threading
import time
from typing import Any

from tests.support.pages import page_key, page_keys, take_content
from tests.support.pool_nodes import (
    NEVER,
    WAIT_S,
    GatedPeer,
    OffsetClock,
    running_nodes,
    until,
)
from tierkv.storage.errors import TierIOError
from tierkv.storage.pool.messages import Verb, read_request
from tierkv.storage.pool.placement import targets
from tierkv.storage.remote import POOL_OWNER
from tierkv.storage.types import PageKey, TierName


def verb_of(payload: bytes) -> Verb:
    parts = read_request(payload)
    assert parts is not None
    return parts[0].verb


def test_a_committed_page_is_copied_to_its_first_in_rank_order_and_acknowledged() -> None:
    with running_nodes(3) as nodes:
        one, two, three = nodes
        keys = page_keys(*range(20))
        one.put(keys)
        assert one.remote.flush(WAIT_S)
        names = {two.name: two, three.name: three}
        placed = {name: [k for k in keys if targets(k, list(names), 1) == [name]] for name in names}
        for name, node in names.items():
            assert node.store.keys_of(POOL_OWNER, TierName.HOST) == placed[name]
        stats = one.remote.stats()
        assert (stats.pushed, stats.push_failed, stats.push_dropped) == (20, 0, 0)
        assert one.link(two).counts()["pushed"] == len(placed[two.name])
        assert one.store.stats().mover.write_bytes_per_s[TierName.REMOTE] > 0


def test_hot_pages_get_more_copies_and_others_none_before_their_time() -> None:
    with running_nodes(3, copy_after=2, hot_after=3, hot_replicas=2) as nodes:
        one, two, three = nodes
        cold, warm, hot = page_keys(1, 2, 3)
        one.put([cold, warm, hot])
        one.store.touch([warm, hot])
        one.store.touch([hot])
        assert one.remote.flush(WAIT_S)
        held = [
            [node.store.lookup_here([key])[0] for node in (two, three)] for key in (cold, warm, hot)
        ]
        assert [sum(row) for row in held] == [0, 1, 2]


def test_a_page_that_another_member_has_is_not_copied_again() -> None:
    own: list[dict[str, Any]] = [{}, {"copy_after": NEVER, "hot_after": NEVER}]
    with running_nodes(3, own) as nodes:
        one, two, _ = nodes
        keys = page_keys(*range(8))
        two.put(keys)
        until(lambda: one.index(two).known == 8, lambda: one.index(two).known)
        one.put(keys)
        assert one.remote.flush(WAIT_S)
        assert one.remote.stats().pushed == 0


def test_pages_kept_for_others_are_not_offered_on() -> None:
    with running_nodes(3, hot_replicas=1) as nodes:
        one, two, three = nodes
        keys = page_keys(*range(8))
        one.put(keys)
        assert one.remote.flush(WAIT_S)
        assert all(node.remote.wait_quiet(WAIT_S) for node in nodes)
        assert two.remote.stats().pushed == three.remote.stats().pushed == 0


def test_a_full_member_passes_the_copy_to_the_next() -> None:
    full = {"host_share": 0.0}
    with running_nodes(3, [{}, full, {}], host_share=1.0) as nodes:
        one, two, three = nodes
        keys = page_keys(*range(16))
        one.put(keys)
        assert one.remote.flush(WAIT_S)
        assert three.store.lookup_here(keys) == [True] * 16
        assert two.store.lookup_here(keys) == [False] * 16
        assert one.link(two).counts()["store_full"] > 0


def test_c4_copies_that_nobody_takes_are_counted_and_flush_says_so() -> None:
    with running_nodes(3, host_share=0.0) as nodes:
        one = nodes[0]
        one.put(page_keys(*range(5)))
        assert not one.remote.flush(WAIT_S)
        assert one.remote.stats().push_failed == 5
        assert one.remote.flush(WAIT_S), "said once"


def test_what_a_node_takes_from_others_is_bounded_by_its_share() -> None:
    with running_nodes(2, host_pages=40, host_share=0.25) as nodes:
        one, two = nodes
        for start in range(0, 30, 10):
            one.put(page_keys(*range(start, start + 10)))
            one.remote.flush(WAIT_S)
            assert len(two.store.keys_of(POOL_OWNER, TierName.HOST)) <= 10
        assert len(two.store.keys_of(POOL_OWNER, TierName.HOST)) > 0


def test_offers_never_wait_and_a_full_queue_drops_them() -> None:
    with running_nodes(2, push_pages=4, batch_pages=2) as nodes:
        one, two = nodes
        with two.gate.stalled():
            started = time.monotonic()
            one.put(page_keys(*range(40)))
            assert time.monotonic() - started < WAIT_S
            until(lambda: one.remote.stats().push_dropped > 0, lambda: one.remote.stats())
            one.remote.check()
        assert not one.remote.flush(WAIT_S)
        stats = one.remote.stats()
        assert stats.pushed + stats.push_dropped + stats.push_failed == 40


def test_a_page_that_left_before_its_turn_is_no_copy() -> None:
    with running_nodes(2, batch_pages=1) as nodes:
        one, two = nodes
        keys = page_keys(*range(6))
        with two.gate.stalled():
            one.put(keys)
            until(lambda: two.gate.reads == 1, lambda: two.gate.reads)
            # The one under way is held by its lease until the other node has read it.
            one.store.drop(keys[1:], TierName.HOST)
        assert not one.remote.flush(WAIT_S)
        stats = one.remote.stats()
        assert (stats.pushed, stats.push_failed) == (1, 5)
        assert two.store.lookup_here(keys) == [True] + [False] * 5


def test_quarantine_what_a_silent_peer_may_be_reading_stays_where_it_is() -> None:
    clock = OffsetClock()
    with running_nodes(2, [{"clock": clock}], transfer_s=30.0) as nodes:
        one, two = nodes
        (key,) = page_keys(1)

        def unanswered(payload: bytes, timeout_s: float) -> None:
            if verb_of(payload) is Verb.STORE:
                one.gate.before_message = None
                raise TierIOError("no answer came")

        one.gate.before_message = unanswered
        one.put([key])
        assert not one.remote.flush(WAIT_S)

        def leased() -> int:
            return one.store.stats().tiers[0].leased_pages

        assert leased() == 1 and one.remote.quarantined == 1, "it may be read still"
        one.store.drop([key], TierName.HOST)
        assert leased() == 1, "nor may its slot have another page"
        clock.offset_s += 31.0
        # Whatever is copied next lets go of what was held long enough.
        until(lambda: one.link(two).takes_copies, lambda: one.link(two).last_error)
        one.put(page_keys(2))
        assert one.remote.flush(WAIT_S)
        until(lambda: leased() == 0 and one.remote.quarantined == 0, leased)


def test_h2_the_pusher_survives_what_one_batch_does_to_it() -> None:
    with running_nodes(2) as nodes:
        one, two = nodes

        def bug(payload: bytes, timeout_s: float) -> None:
            if verb_of(payload) is Verb.STORE:
                one.gate.before_message = None
                raise RuntimeError("a bug of ours")

        one.gate.before_message = bug
        one.put(page_keys(1))
        assert not one.remote.flush(WAIT_S)
        one.put(page_keys(2))
        assert one.remote.flush(WAIT_S)
        assert one.remote.stats().worker_restarts == 1
        assert two.store.lookup_here(page_keys(1, 2)) == [False, True]


def test_a_damaged_page_is_never_kept_by_another() -> None:
    with running_nodes(2, batch_pages=4) as nodes:
        one, two = nodes
        keys = page_keys(*range(4))
        with two.gate.stalled():
            one.put(keys)
            until(lambda: two.gate.reads == 1, lambda: two.gate.reads)
            with one.store.fetch([keys[2]], WAIT_S, here=True).take(WAIT_S) as lease:
                start = one.store.payload_offset(lease.slots[0])
                with one.store.arena_memory() as memory:
                    memory[start] ^= 1
        assert not one.remote.flush(WAIT_S)
        assert two.store.lookup_here(keys) == [True, True, False, True]
        with one.store.arena_memory() as memory:
            memory[start] ^= 1


def test_what_one_thread_commits_while_others_pull_it_is_always_whole() -> None:
    with running_nodes(3, hot_replicas=2) as nodes:
        one = nodes[0]
        groups = [page_keys(*range(start, start + 8)) for start in range(0, 64, 8)]
        got: list[int] = []

        def follow(node_index: int) -> None:
            node = nodes[node_index]
            got.extend(take_content(node.store, keys) for keys in groups)

        threads = [threading.Thread(target=follow, args=(number,)) for number in (1, 2)]
        for thread in threads:
            thread.start()
        for keys in groups:
            one.put(keys)
        for thread in threads:
            thread.join(WAIT_S)
        assert all(0 <= count <= 8 for count in got) and len(got) == 16
        assert all(node.store.wait_quiet(WAIT_S) for node in nodes)


def test_a_stopped_peers_copies_go_to_the_next() -> None:
    with running_nodes(3) as nodes:
        one, dying, other = nodes
        names = [dying.name, other.name]
        keys: list[PageKey] = [
            key for key in map(page_key, range(200)) if targets(key, names, 1) == [dying.name]
        ][:8]

        def refuse(peer: GatedPeer) -> None:
            raise TierIOError("it dies")

        dying.gate.before_read = refuse
        one.put(keys)
        assert one.remote.flush(WAIT_S)
        assert other.store.lookup_here(keys) == [True] * 8
