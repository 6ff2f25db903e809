"""Copies: what is said of them is true, and none is forgotten because a peer was slow once."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from tests.support.pages import page_keys, put_store, take_content
from tests.support.pool_nodes import (
    NEVER,
    PAGE_BYTES,
    WAIT_S,
    free_address,
    running_nodes,
    start_node,
    until,
)
from tests.unit.storage.pool.test_pool import add_size
from tierkv.storage.pool.remote import PoolRemote
from tierkv.storage.store import TieredStore

QUIET: dict[str, Any] = {"copy_after": NEVER, "hot_after": NEVER}
NO_THREADS = "can't start new thread"


def test_c4_a_copy_that_nobody_may_be_asked_for_is_said_and_tried_again() -> None:
    with running_nodes(2, breaker_failures=1, breaker_open_s=600.0, host_share=1.0) as nodes:
        one, two = nodes
        one.link(two).breaker.failed()
        assert one.link(two).live and not one.link(two).takes_copies
        keys = page_keys(*range(4))
        one.put(keys)
        assert not one.remote.flush(WAIT_S), "four pages have no copy"
        assert two.store.lookup_here(keys) == [False] * 4
        # Its next use asks for the copy again, now that there is somebody.
        one.link(two).breaker = type(one.link(two).breaker)(one.clock, 3, 0.5)
        assert take_content(one.store, keys) == 4
        assert one.remote.flush(WAIT_S)
        assert two.store.lookup_here(keys) == [True] * 4


def test_too_few_members_for_hot_pages_is_no_failure() -> None:
    with running_nodes(2, replicas=2, hot_replicas=5, host_share=1.0) as nodes:
        nodes[0].put(page_keys(1, 2))
        assert nodes[0].remote.flush(WAIT_S), "there is one other member, and it has them"
        assert nodes[1].store.lookup_here(page_keys(1, 2)) == [True, True]


def test_balance_goes_on_after_a_peer_was_slow_for_longer_than_a_store_may_take() -> None:
    settings = {**QUIET, "copy_after": 1, "suspect_s": 0.2, "host_share": 1.0, "batch_pages": 1}
    settings |= {"rebalance_bytes_per_s": 1 << 30, "store_s": 0.5, "breaker_failures": 1000}
    with running_nodes(2, [{}, {}], **settings) as nodes:
        one, two = nodes
        keys = page_keys(*range(40))
        # Nobody takes copies at first, so that all of them are for balance.
        one.pool._leaving = two.pool._leaving = True
        until(lambda: one.link(two).leaving, lambda: one.link(two).leaving)
        one.put(keys)
        assert not one.remote.flush(WAIT_S)
        with two.gate.stalled():
            one.pool._leaving = two.pool._leaving = False
            until(lambda: one.remote.rebalanced > 0, lambda: one.remote.rebalanced)
            until(lambda: one.link(two).counts()["failures"] > 2, lambda: one.link(two).counts())
        until(
            lambda: all(two.store.lookup_here(keys)),
            lambda: (sum(two.store.lookup_here(keys)), one.remote.rebalanced),
        )


def test_balance_without_a_thread_is_tried_again_and_closes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with running_nodes(2, rebalance_bytes_per_s=1 << 20, suspect_s=0.2, **QUIET) as nodes:
        balance = nodes[0].remote._balance
        until(lambda: balance.passes > 0, lambda: balance.passes)
        assert balance.close(WAIT_S)
        balance._thread, balance._closing = None, False
        start = threading.Thread.start

        def refuse(thread: threading.Thread) -> None:
            if thread.name.startswith("tierkv-balance"):
                raise RuntimeError(NO_THREADS)
            start(thread)

        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", refuse)
            balance.members_changed()
        assert balance.close(WAIT_S), "there is nothing to wait for"
        balance._closing = False
        passes = balance.passes
        balance.members_changed()
        until(lambda: balance.passes > passes, lambda: balance.passes)


def test_balance_of_cold_pages_leaves_the_hot_ones_where_they_are(tmp_path: Path) -> None:
    settings = {"suspect_s": 0.2, "host_share": 1.0, "nvme_share": 1.0}
    settings |= {"rebalance_bytes_per_s": 1 << 30, "batch_pages": 4}
    addresses = [free_address(), free_address()]
    one = start_node(
        addresses[0], [addresses[1]], folder=tmp_path, host_pages=32, nvme_pages=160, **settings
    )
    keys = page_keys(*range(100))
    for start in range(0, 100, 10):
        one.put(keys[start : start + 10])
        assert one.store.flush(WAIT_S)
    hot = keys[:16]
    for key in hot:
        assert take_content(one.store, [key]) == 1
    order = [key for key in one.store.host.keys_of() if key in hot]
    assert len(order) == 16
    two = start_node(addresses[1], [addresses[0]], host_pages=120, **settings)
    try:
        until(lambda: all(two.store.lookup_here(keys)), lambda: sum(two.store.lookup_here(keys)))
        assert one.remote.wait_quiet(WAIT_S)
        assert [key for key in one.store.host.keys_of() if key in hot] == order
        assert one.store.host.keys_of()[-16:] == order, "what was read to be copied is colder"
        assert one.store.lookup_here(keys) == [True] * 100
        one.check()
    finally:
        one.stop()
        two.stop()


def test_a_page_size_that_opens_late_is_drained_at_the_first_try() -> None:
    size = 2 * PAGE_BYTES
    late: list[tuple[TieredStore, PoolRemote]] = []

    def open_there(page_bytes: int, timeout_s: float) -> bool:
        late.append(add_size(two, page_bytes))
        return True

    with running_nodes(
        2, [{}, {"open_class": open_there}], heartbeat_s=0.4, host_share=1.0, **QUIET
    ) as nodes:
        one, two = nodes
        store, remote = add_size(one, size)
        try:
            put_store(store, page_keys(*range(6)))
            until(lambda: one.link(two).index(size) is not None, lambda: one.link(two).state)
            rounds: list[float] = []
            wait_for = threading.Condition.wait_for
            assert one.remote.drain(WAIT_S)
            balance = remote._balance

            class Counted(threading.Condition):
                def wait_for(self, predicate: Any, timeout: float | None = None) -> bool:
                    rounds.append(timeout or 0.0)
                    return wait_for(self, predicate, timeout)

            balance._changed = Counted()
            assert remote.drain(WAIT_S)
            assert rounds == [], "no heartbeat was waited for"
            assert late and late[0][0].lookup_here(page_keys(*range(6))) == [True] * 6
        finally:
            for opened, end in [(store, remote), *late]:
                assert end.close(WAIT_S)
                opened.close()


def test_peers_that_do_not_answer_leave_this_node_room_for_its_own_work() -> None:
    with running_nodes(
        4, replicas=3, hot_replicas=3, host_pages=16, batch_pages=16, store_s=20.0, host_share=1.0
    ) as nodes:
        one, *others = nodes
        for other in others:
            other.gate.open.clear()
        one.put(page_keys(*range(16)))
        until(
            lambda: any(other.gate.reads for other in others),
            lambda: [other.gate.reads for other in others],
        )
        for start in range(100, 148, 6):
            assert len(put_store(one.store, page_keys(*range(start, start + 6)))) == 6, start
        assert one.store.stats().tiers[0].leased_pages <= 4
        for other in others:
            other.gate.open.set()
        assert one.store.wait_quiet(WAIT_S)
        until(lambda: one.remote._pins.taken == 0, lambda: one.remote._pins.taken)
