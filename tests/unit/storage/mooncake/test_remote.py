"""What the suite of all remote tiers does not ask: copies, wrong values, late and dead masters."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from tests.support.pages import page_content, page_key, page_keys, put_store, take_content
from tests.unit.storage.mooncake.fake_library import Cluster
from tests.unit.storage.mooncake.layout import Node, node_of
from tests.unit.storage.remote_conformance import wait_until
from tierkv.storage.checksum import payload_checksum
from tierkv.storage.mooncake.config import MooncakeConfig
from tierkv.storage.mooncake.values import HEADER_BYTES, ValueHeader, key_text
from tierkv.storage.slot_header import HEADER_BYTES as SLOT_HEADER_BYTES
from tierkv.storage.types import PageKey, TierName

PAGE_BYTES = 5000
WAIT_S = 30.0
CONFIG = MooncakeConfig(
    "127.0.0.1:1", batch_pages=4, push_pages=8, breaker_failures=3, breaker_open_s=600.0
)


def text(key: PageKey) -> str:
    return key_text(key, PAGE_BYTES)


def value_of(key: PageKey, **changes: object) -> bytes:
    content = page_content(key, PAGE_BYTES)
    fields = {"key": key, "payload_bytes": PAGE_BYTES, "checksum": payload_checksum(content)}
    return ValueHeader(**{**fields, **changes}).pack() + content  # type: ignore[arg-type]


@pytest.fixture
def cluster() -> Cluster:
    return Cluster()


@pytest.fixture
def node(cluster: Cluster) -> Iterator[Node]:
    with node_of(cluster, PAGE_BYTES, config=CONFIG) as made:
        yield made


def know(node: Node, keys: list[PageKey]) -> None:
    node.remote.ask(keys, WAIT_S)
    assert all(node.remote.holds(keys))


def test_what_is_committed_is_copied_once_and_proves_itself(node: Node, cluster: Cluster) -> None:
    keys = page_keys(1, 2, 3)
    put_store(node.store, keys)
    assert node.remote.flush(WAIT_S)
    assert {key: cluster.values[text(key)] for key in keys} == {k: value_of(k) for k in keys}
    node.store.touch(keys)
    put_store(node.store, keys)
    assert node.remote.flush(WAIT_S)
    stats = node.remote.stats()
    assert (stats.pushed, stats.push_duplicates, stats.push_failed) == (3, 0, 0)
    assert node.library.calls["put"] == 1
    node.store.check()


def test_what_the_store_has_already_is_not_sent_again(node: Node, cluster: Cluster) -> None:
    keys = page_keys(1, 2)
    cluster.values[text(keys[0])] = value_of(keys[0])
    put_store(node.store, keys)
    assert node.remote.flush(WAIT_S)
    stats = node.remote.stats()
    assert (stats.pushed, stats.push_duplicates) == (1, 1)


def test_a_page_is_copied_after_so_many_uses(cluster: Cluster) -> None:
    config = MooncakeConfig("127.0.0.1:1", copy_after=2)
    with node_of(cluster, PAGE_BYTES, config=config) as node:
        node.remote.offer(page_keys(1, 2), [1, 1], 0)
        assert node.remote.stats().pushes_queued == 0
        put_store(node.store, page_keys(3))
        assert node.remote.flush(WAIT_S)
        assert not cluster.values
        node.remote.offer(page_keys(3), [2], 0)
        assert node.remote.flush(WAIT_S)
        assert list(cluster.values) == [text(page_key(3))]


def test_c4_copies_without_room_or_past_the_queue_are_counted(node: Node, cluster: Cluster) -> None:
    cluster.room = 2
    put_store(node.store, page_keys(1, 2, 3, 4))
    assert not node.remote.flush(WAIT_S)
    assert node.remote.flush(WAIT_S), "what was told of once is not told of again"
    stats = node.remote.stats()
    assert (stats.pushed, stats.push_failed, stats.degraded) == (2, 2, None)
    cluster.room = 1000
    node.library.gate.clear()
    node.library.entered.clear()
    put_store(node.store, page_keys(5))
    assert node.library.entered.wait(WAIT_S)
    put_store(node.store, page_keys(*range(10, 20)))
    node.store.check()
    stats = node.remote.stats()
    assert (stats.pushes_queued, stats.push_dropped) == (9, 2)
    node.library.gate.set()
    assert not node.remote.flush(WAIT_S)
    assert node.remote.stats().pushed == 2 + 9


def test_a_page_that_left_before_its_turn_costs_the_others_nothing(
    node: Node, cluster: Cluster
) -> None:
    node.library.gate.clear()
    put_store(node.store, page_keys(1))
    assert node.library.entered.wait(WAIT_S)
    put_store(node.store, page_keys(2, 3, 4))
    node.store.drop(page_keys(2, 3), TierName.HOST)
    node.library.gate.set()
    assert not node.remote.flush(WAIT_S)
    stats = node.remote.stats()
    assert (stats.pushed, stats.push_failed) == (2, 2)
    assert text(page_key(4)) in cluster.values


def test_h1_pages_are_pinned_while_a_late_put_may_still_read_them(node: Node) -> None:
    node.library.gate.clear()
    put_store(node.store, page_keys(1))
    assert node.library.entered.wait(WAIT_S)
    assert node.store.host.stats().leased_pages == 1
    node.library.gate.set()
    assert node.remote.flush(WAIT_S)
    assert node.store.host.stats().leased_pages == 0


@pytest.mark.parametrize(
    "wrong",
    ["another page", "another length", "another version", "no header", "flipped", "no checksum"],
)
def test_w7_a_value_that_does_not_prove_its_page_is_never_served(
    node: Node, cluster: Cluster, wrong: str
) -> None:
    key, other = page_keys(1, 2)
    good = value_of(key)
    cluster.values[text(key)] = {
        "another page": value_of(other),
        "another length": value_of(key, payload_bytes=PAGE_BYTES - 1),
        "another version": good[:8] + b"\x02\x00" + good[10:],
        "no header": bytes(HEADER_BYTES) + good[HEADER_BYTES:],
        "flipped": good[:-1] + bytes([good[-1] ^ 1]),
        "no checksum": value_of(key, checksum=bytes(16)),
    }[wrong]
    cluster.values[text(other)] = value_of(other)
    know(node, [other, key])
    assert take_content(node.store, [other, key]) == 1
    assert node.store.wait_quiet(WAIT_S)
    stats = node.remote.stats()
    assert (stats.corrupt, stats.landed, stats.failed) == (1, 1, 0)
    # Remembered: neither believed nor asked for again, and replaced by who has the page.
    calls = node.library.calls["get"]
    node.remote.ask([key], WAIT_S)
    assert node.remote.holds([key]) == [False]
    assert take_content(node.store, [key]) == 0
    assert node.library.calls["get"] == calls
    cluster.leased.add(text(key))
    put_store(node.store, [key])
    assert node.remote.flush(WAIT_S)
    assert cluster.values[text(key)] == good
    assert node.remote.holds([key]) == [True]


def test_w7_a_get_never_touches_more_than_the_payload(node: Node, cluster: Cluster) -> None:
    keys = page_keys(1, 2, 3)
    for key in keys:
        cluster.values[text(key)] = value_of(key)
    cluster.values[text(keys[1])] += bytes(4096)
    cluster.values[text(keys[2])] = value_of(keys[2])[:-100]
    know(node, keys)
    before: list[bytes] = []
    with node.store.arena_memory() as memory:
        node.library.on_get = lambda: before.append(bytes(memory))
        assert take_content(node.store, keys[:1]) == 1
        for key in keys[1:]:
            assert take_content(node.store, [key]) == 0
        after = bytes(memory)
    assert node.store.wait_quiet(WAIT_S)
    slots = [node.store.payload_offset(n) for n in range(node.store.arena_geometry().slot_count)]
    changed = {
        start
        for start in slots
        if before[0][start : start + PAGE_BYTES] != after[start : start + PAGE_BYTES]
    }
    assert len(changed) == 1, "one page came"
    # Outside payloads only the headers of slots change, and those are the host tier's own.
    for start in slots:
        tail = slice(start + PAGE_BYTES, start - SLOT_HEADER_BYTES + slots[1] - slots[0])
        assert before[0][tail] == after[tail]


def test_a_broken_transfer_fails_and_is_left_alone_for_a_while(
    node: Node, cluster: Cluster
) -> None:
    keys = page_keys(1, 2)
    for key in keys:
        cluster.values[text(key)] = value_of(key)
    cluster.broken.add(text(keys[1]))
    know(node, keys)
    assert take_content(node.store, keys) == 1
    assert node.store.wait_quiet(WAIT_S)
    stats = node.remote.stats()
    assert (stats.landed, stats.failed, stats.corrupt, stats.missed) == (1, 1, 0, 0)
    assert stats.degraded is None, "the others came: the store is not broken"
    node.remote.ask(keys, WAIT_S)
    assert node.remote.holds(keys) == [True, False]


def test_a_dead_master_opens_the_breaker_and_is_not_asked(node: Node, cluster: Cluster) -> None:
    keys = page_keys(*range(8))
    for key in keys:
        cluster.values[text(key)] = value_of(key)
    know(node, keys)
    cluster.master_lives = False
    assert take_content(node.store, keys[:1]) == 0
    assert node.store.wait_quiet(WAIT_S)
    assert node.remote.stats().failed == 1, "that the master is gone need not be said twice"
    degraded = node.remote.stats().degraded
    assert degraded is not None and "code -900" in degraded and "\n" not in degraded
    assert node.service.status()["breaker_trips"] == 1
    calls = dict(node.library.calls)
    assert node.remote.holds(keys) == [False] * 8
    node.remote.ask(page_keys(50), WAIT_S)
    assert take_content(node.store, keys) == 0
    put_store(node.store, page_keys(60))
    assert node.remote.stats().push_dropped == 1
    assert dict(node.library.calls) == calls


def test_a_failed_copy_tells_of_a_dead_master(node: Node, cluster: Cluster) -> None:
    cluster.master_lives = False
    put_store(node.store, page_keys(1))
    assert not node.remote.flush(WAIT_S)
    degraded = node.service.status()["degraded"]
    assert degraded is not None and "the master is gone" in degraded and "\n" not in degraded


def test_a_store_without_room_is_told_of_until_a_copy_is_made(node: Node, cluster: Cluster) -> None:
    cluster.room = 0
    put_store(node.store, page_keys(1, 2, 3))
    assert not node.remote.flush(WAIT_S)
    told = node.service.status()["degraded"]
    assert "no room for the last 3 copies" in told and "mooncake.segment" in told
    assert node.remote.stats().degraded is None, "it is asked as before"
    cluster.room = 10
    put_store(node.store, page_keys(4))
    node.remote.flush(WAIT_S)
    assert node.service.status()["degraded"] is None


def test_h1_a_late_call_keeps_its_slots_and_nobody_waits_for_it(cluster: Cluster) -> None:
    with node_of(cluster, PAGE_BYTES, host_pages=4, config=CONFIG) as node:
        keys = page_keys(1, 2)
        for key in keys:
            cluster.values[text(key)] = value_of(key)
        know(node, keys)
        node.library.gate.clear()
        fetch = node.store.fetch(keys, 0.05)
        with fetch.take(WAIT_S) as lease:
            assert lease.keys == []
        wait_until(lambda: node.remote.stats().degraded is not None, "it is believed to serve")
        assert node.remote.holds(keys) == [False, False]
        assert not node.remote.quiet and node.store.host.stats().reserved_pages == 2
        # The other half of host serves on, whatever the store does.
        assert len(put_store(node.store, page_keys(10, 11))) == 2
        assert take_content(node.store, page_keys(10, 11)) == 2
        node.store.check()
        assert not node.remote.close(0.05), "its memory may still be written"
        node.library.gate.set()
        assert node.remote.close(WAIT_S)
        assert node.remote.quiet and node.store.host.stats().reserved_pages == 0


def test_h2_a_library_that_raises_ends_no_worker(node: Node, cluster: Cluster) -> None:
    keys = page_keys(1, 2, 3, 4)
    for key in keys:
        cluster.values[text(key)] = value_of(key)
    know(node, keys)
    node.library.raising.append(RuntimeError("surprise in get"))
    assert take_content(node.store, keys[:1]) == 0
    node.library.raising.append(RuntimeError("surprise in look-up"))
    node.remote.ask(page_keys(50), WAIT_S)
    node.library.raising.append(RuntimeError("surprise in copy"))
    put_store(node.store, page_keys(60))
    assert not node.remote.flush(WAIT_S)
    assert node.store.wait_quiet(WAIT_S)
    wait_until(lambda: node.remote.stats().worker_restarts == 3, "a failed round is not counted")
    stats = node.remote.stats()
    assert (stats.failed, stats.push_failed) == (1, 1)
    node.store.check()


def test_no_thread_of_a_caller_is_ever_in_the_library(node: Node, cluster: Cluster) -> None:
    keys = page_keys(1, 2)
    cluster.values[text(keys[0])] = value_of(keys[0])
    node.store.lookup(keys)
    know(node, keys[:1])
    assert take_content(node.store, keys[:1]) == 1
    put_store(node.store, page_keys(3))
    assert node.remote.flush(WAIT_S)
    assert {name.rpartition("-")[0] for name in node.library.threads} <= {
        "tierkv-mooncake",
        "tierkv-mooncake-pull",
    }
    assert threading.current_thread().name not in node.library.threads


def test_l1_what_is_known_is_not_asked_again(node: Node, cluster: Cluster) -> None:
    """Every question renews the lease at the master, and there is no question without that."""
    key, absent = page_keys(1, 2)
    cluster.values[text(key)] = value_of(key)
    know(node, [key])
    for _ in range(10):
        node.remote.ask([key], WAIT_S)
        node.store.lookup([key])
    assert node.library.calls["exist"] == 1
    node.remote.ask([key, absent], WAIT_S)
    assert node.library.calls["exist"] == 2


def test_questions_asked_together_are_one_call_and_a_caller_waits_as_long_as_it_said(
    node: Node, cluster: Cluster
) -> None:
    keys = page_keys(*range(20))
    node.library.gate.clear()
    put_store(node.store, page_keys(100))
    assert node.library.entered.wait(WAIT_S), "a put is stuck, look-ups are not"
    threads = [threading.Thread(target=node.remote.ask, args=(keys, WAIT_S)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
        assert not thread.is_alive()
    assert node.library.calls["exist"] <= 3, "the first took one, the others came together"
    node.library.gate.set()
    assert node.remote.flush(WAIT_S)


def test_register_arena_registers_it_with_the_scratch_and_lets_it_go(cluster: Cluster) -> None:
    config = MooncakeConfig("127.0.0.1:1", register_arena=True, pull_workers=2)
    with node_of(cluster, PAGE_BYTES, config=config) as node:
        with node.store.arena_memory() as memory:
            size = len(memory)
        registered = node.library.registered
        assert sorted(registered.values()) == [HEADER_BYTES * config.batch_pages] * 3 + [size]
        assert node.remote.close(WAIT_S)
        assert not node.library.registered


def test_stores_of_two_page_sizes_share_a_client_and_never_a_page(cluster: Cluster) -> None:
    with node_of(cluster, PAGE_BYTES, config=CONFIG) as first:
        with node_of(cluster, 2 * PAGE_BYTES, config=CONFIG) as second:
            put_store(first.store, page_keys(1))
            assert first.remote.flush(WAIT_S)
            second.remote.ask(page_keys(1), WAIT_S)
            assert second.remote.holds(page_keys(1)) == [False]
        assert first.service.drain(WAIT_S)
        assert take_content(first.store, page_keys(1)) == 1


def test_a_late_page_is_a_failure_for_who_waited_and_known_all_the_same(
    node: Node, cluster: Cluster
) -> None:
    (key,) = page_keys(1)
    cluster.values[text(key)] = value_of(key)
    know(node, [key])
    node.library.gate.clear()
    fetch = node.store.fetch([key], 0.05)
    assert node.library.entered.wait(WAIT_S)
    wait_until(lambda: fetch.done, "the fetch outlives its deadline")
    fetch.cancel()
    node.library.gate.set()
    assert node.store.wait_quiet(WAIT_S)
    assert node.remote.stats().failed == 1
    wait_until(lambda: node.remote.holds([key]) == [True], "it was there")
    assert take_content(node.store, [key]) == 1
