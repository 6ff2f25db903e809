"""Who is who: members that move, members that cannot be followed, and a pool that closes."""

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
    Node,
    OffsetClock,
    free_address,
    running_nodes,
    start_node,
    until,
)
from tests.unit.storage.pool.test_pool import ListedMembers
from tierkv.storage.errors import ConfigError, TierIOError
from tierkv.storage.pool.messages import Verb
from tierkv.storage.store import StoreConfig, TieredStore
from tierkv.storage.tiers.host import HostTier
from tierkv.storage.types import TierName

QUIET: dict[str, Any] = {"copy_after": NEVER, "hot_after": NEVER}


def leases(node: Node) -> dict[str, int]:
    found = node.pool.status()["leases"]
    assert isinstance(found, dict)
    return found


def test_a_member_that_moved_gives_and_takes_copies_at_its_new_address(tmp_path: Path) -> None:
    old, new = free_address(), free_address()
    path = tmp_path / "epoch"
    keeper = start_node(free_address(), [old, new], host_share=1.0, **QUIET)
    others = [keeper.config.own_address]
    mover = start_node(old, others, name="mover", epoch=path, host_share=1.0)
    try:
        until(lambda: keeper.link(mover).live, lambda: keeper.link(mover).problem)
        mover.stop()
        mover = start_node(new, others, name="mover", epoch=path, host_share=1.0)
        until(lambda: keeper.link(mover).live, lambda: keeper.link(mover).problem)
        until(lambda: mover.link(keeper).live, lambda: mover.link(keeper).problem)
        keys = page_keys(*range(8))
        mover.put(keys)
        assert mover.remote.flush(WAIT_S), mover.link(keeper).counts()
        assert keeper.store.lookup_here(keys) == [True] * 8
        assert [link.name for link in keeper.pool.links() if link.live] == ["mover"]
        keeper.check()
    finally:
        mover.stop()
        keeper.stop()


def test_an_old_address_that_leaves_the_list_ends_no_lease_of_who_moved(tmp_path: Path) -> None:
    old, new = free_address(), free_address()
    path = tmp_path / "epoch"
    members = ListedMembers()
    holder = start_node(free_address(), [old], membership=members, **QUIET)
    others = [holder.config.own_address]
    mover = start_node(old, others, name="mover", epoch=path, **QUIET)
    try:
        members.set(old, new)
        until(lambda: holder.link(mover).live, lambda: holder.link(mover).problem)
        mover.stop()
        mover = start_node(new, others, name="mover", epoch=path, **QUIET)
        until(lambda: holder.link(mover).live, lambda: holder.link(mover).problem)
        keys = page_keys(1)
        holder.put(keys)
        until(lambda: all(mover.store.lookup(keys)), lambda: mover.pool.status())
        with mover.gate.stalled():
            pull = mover.pull(keys[0])
            until(lambda: leases(holder)["pages"] == 1, lambda: leases(holder))
            members.set(new)
            assert leases(holder)["quarantined_pages"] == 0, "whoever holds it is still here"
        pull.future.result(WAIT_S)
        until(lambda: leases(holder)["pages"] == 0, lambda: leases(holder))
    finally:
        mover.stop()
        holder.stop()


def test_two_members_that_cannot_follow_each_other_do_not_keep_each_other_busy() -> None:
    addresses = [free_address(), free_address()]
    one, two = (
        start_node(address, [other for other in addresses if other != address], **QUIET)
        for address in addresses
    )
    try:
        until(lambda: one.link(two).live and two.link(one).live, lambda: one.link(two).problem)
        greetings = threading.Semaphore(0)

        def no_heartbeat(payload: bytes, timeout_s: float) -> None:
            if payload[6] == Verb.HELLO:
                greetings.release()
            if payload[6] == Verb.SYNC:
                raise TierIOError("a test lets nobody follow")

        one.gate.before_message = two.gate.before_message = no_heartbeat
        until(lambda: not (one.link(two).live or two.link(one).live), lambda: one.link(two).problem)
        tries = [len(node.gate.peers) for node in (one, two)]
        pause = threading.Event()
        pause.wait(2.0)
        made = [len(node.gate.peers) - was for node, was in zip((one, two), tries, strict=True)]
        assert max(made) <= 2.0 / 0.1 + 1, f"{made} connections in 2 s"
        one.gate.before_message = two.gate.before_message = None
        until(lambda: one.link(two).live and two.link(one).live, lambda: one.link(two).problem)
    finally:
        one.stop()
        two.stop()


def test_two_nodes_of_one_name_go_above_each_other_ever_more_rarely() -> None:
    clock = OffsetClock()
    node = start_node(free_address(), [free_address()], clock=clock, **QUIET)
    try:
        for _ in range(300):
            node.pool.fenced(node.pool.own_epoch, "the twin's peer")
            clock.offset_s += 1.1
        fences = node.pool.status()["fences"]
        assert 5 < fences < 15, f"{fences} epochs in five minutes"
        clock.offset_s += 1200.0
        for _ in range(2):
            node.pool.fenced(node.pool.own_epoch, "a peer")
            clock.offset_s += 1.1
        assert node.pool.status()["fences"] == fences + 2, "long ago, it says nothing"
    finally:
        node.stop()


def test_leases_stay_while_memory_cannot_be_unregistered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with running_nodes(2, lease_s=60.0, **QUIET) as nodes:
        reader, holder = nodes
        keys = page_keys(1)
        holder.put(keys)
        nodes.await_known(keys)
        with reader.gate.stalled():
            pull = reader.pull(keys[0])
            until(lambda: leases(holder)["pages"] == 1, lambda: leases(holder))

            def stuck(generation: int) -> None:
                raise TierIOError("unregister: a copy does not end")

            with monkeypatch.context() as patched:
                patched.setattr(holder.gate, "unregister", stuck)
                assert not holder.pool.close(WAIT_S)
                assert leases(holder)["pages"] == 1, "it may be read still"
        assert holder.pool.close(WAIT_S)
        assert leases(holder)["pages"] == 0
        holder.store.close()
        holder.stopped = True
        pull.future.result(WAIT_S)


def test_a_store_that_comes_when_the_pool_has_closed_stays_without_it() -> None:
    node = start_node(free_address(), [free_address()], **QUIET)
    size = 2 * PAGE_BYTES
    late = TieredStore.open(StoreConfig(page_bytes=size, host_bytes=HostTier.capacity_for(size, 8)))
    attached = node.pool.attach(size)
    node.stop()
    try:
        with pytest.raises(ConfigError, match="clos"):
            late.attach_remote(attached)
        with pytest.raises(ConfigError, match="clos"):
            node.pool.attach(size)
        assert all(put_store(late, page_keys(1, 2)))
        assert take_content(late, page_keys(1, 2)) == 2
    finally:
        late.close()


def test_h1_closing_waits_for_all_slow_connections_at_once() -> None:
    with running_nodes(4, **QUIET) as nodes:
        leaving = nodes[0]
        together = threading.Barrier(3)
        for peer in leaving.gate.peers:
            if peer is not None:
                patch_close(peer, together)
        assert leaving.pool.close(WAIT_S)
        assert not together.broken, "one after the other they would take the sum of their times"
        leaving.store.close()
        leaving.stopped = True


def patch_close(peer: Any, together: threading.Barrier) -> None:
    """Let the connection close when all others are closing too."""
    inner, met = peer.inner, threading.Event()
    close = inner.close

    def slow() -> None:
        if not met.is_set():
            met.set()
            together.wait(5.0)
        close()

    inner.close = slow


def test_a_page_that_goes_while_its_store_is_being_attached_is_told_gone() -> None:
    with running_nodes(2, **QUIET) as nodes:
        one, two = nodes
        size = 2 * PAGE_BYTES
        stores = [
            TieredStore.open(
                StoreConfig(page_bytes=size, host_bytes=HostTier.capacity_for(size, 8))
            )
            for _ in nodes
        ]
        try:
            two_end = two.pool.attach(size)
            stores[1].attach_remote(two_end)
            stay, go = page_keys(1, 2)
            put_store(stores[0], [stay, go])
            one_end = one.pool.attach(size)
            bind = one_end.bind

            def heard_and_gone(*arguments: Any) -> None:
                bind(*arguments)
                until(lambda: two_end.holds([go]) == [True], lambda: two_end.stats())
                assert stores[0].drop([go], TierName.HOST) == 1

            one_end.bind = heard_and_gone  # type: ignore[method-assign]
            stores[0].attach_remote(one_end)
            until(lambda: two_end.holds([stay, go]) == [True, False], lambda: two_end.stats())
        finally:
            for store, end in zip(stores, (one_end, two_end), strict=True):
                assert end.close(WAIT_S)
                store.close()
