"""The pool as a whole: who belongs to it, lives and epochs, leaving, balance, and bad input."""

from __future__ import annotations

import itertools
import random
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.pages import page_content, page_keys, put_store, take_content
from tests.support.pool_nodes import (
    HOST_PAGES,
    NEVER,
    PAGE_BYTES,
    WAIT_S,
    Node,
    Nodes,
    OffsetClock,
    free_address,
    running_nodes,
    start_node,
    until,
)
from tests.unit.storage.remote_conformance import run_threads
from tierkv.storage.errors import ConfigError
from tierkv.storage.pool import copies, remote
from tierkv.storage.pool.config import Address
from tierkv.storage.pool.holdings import fingerprints
from tierkv.storage.pool.link import LinkState
from tierkv.storage.pool.members import Membership
from tierkv.storage.pool.messages import Verb, read_request
from tierkv.storage.pool.remote import PoolRemote
from tierkv.storage.remote import POOL_OWNER, PullState
from tierkv.storage.store import StoreConfig, TieredStore
from tierkv.storage.tiers.host import HostTier
from tierkv.storage.types import CommitOutcome, PageKey, TierName

QUIET: dict[str, Any] = {"copy_after": NEVER, "hot_after": NEVER}
SEED = 20261129


class ListedMembers(Membership):
    """A list that the test changes."""

    name = "listed"

    def __init__(self) -> None:
        self.listed: tuple[Address, ...] = ()
        self.joined: list[int] = []

    def start(
        self,
        on_change: Callable[[], None],
        on_later_epoch: Callable[[int], None] | None = None,
    ) -> None:
        self._on_change = on_change
        self.on_later_epoch = on_later_epoch

    def set(self, *addresses: Address) -> None:
        self.listed = addresses
        self._on_change()

    def members(self) -> tuple[Address, ...]:
        return self.listed

    def join(self, own: Address, name: str, epoch: int) -> None:
        self.joined.append(epoch)

    def leave(self) -> None:
        self.joined.append(0)

    def problem(self) -> str | None:
        return None

    def close(self) -> None:
        pass


def restart(nodes: Nodes, number: int, others: list[Node], **arguments: Any) -> Node:
    """Start a stopped node again, at the same address."""
    old = nodes[number]
    fresh = start_node(
        old.config.own_address, [other.config.own_address for other in others], **arguments
    )
    nodes.nodes[number] = fresh
    return fresh


# --- bad input ------------------------------------------------------------------------------


def test_a_port_that_is_taken_is_one_clear_line() -> None:
    address = free_address()
    with socket.create_server((address.host, address.port)):
        with pytest.raises(ConfigError) as error:
            start_node(address, [free_address()])
    assert address.host in str(error.value) and "\n" not in str(error.value)


def test_a_second_store_of_one_page_size_is_refused() -> None:
    with running_nodes(2) as nodes, pytest.raises(ConfigError, match="a store already"):
        nodes[0].pool.attach(PAGE_BYTES)


def test_two_nodes_of_one_name_refuse_each_other_and_serve_on() -> None:
    addresses = [free_address(), free_address()]
    one, two = (
        start_node(address, [other for other in addresses if other != address], name="twin")
        for address in addresses
    )
    try:
        until(
            lambda: "two nodes are called twin" in (one.link(two).problem or ""),
            lambda: one.link(two).problem,
        )
        assert one.link(two).state is LinkState.REFUSED and not one.link(two).live
        one.put(page_keys(1))
        assert take_content(one.store, page_keys(1)) == 1
        assert "two nodes" in (one.remote.stats().degraded or "")
        assert "two nodes" in one.pool.status()["problem"]
    finally:
        one.stop()
        two.stop()


def test_a_member_listed_under_two_addresses_is_met_once() -> None:
    near, far = free_address(), free_address()
    node = start_node(far, [near])
    alias = Address("localhost", far.port)
    members = ListedMembers()
    other = start_node(near, [far], membership=members)
    try:
        members.set(far, Address(far.host, far.port))
        until(lambda: other.link(node).live, lambda: other.link(node).problem)
        relayed = relay(far)
        members.set(far, relayed)
        extra = next(link for link in other.pool.links() if link.address == relayed)
        until(lambda: "list each member once" in (extra.problem or ""), lambda: extra.problem)
        assert other.link(node).live and not extra.live and alias != far
    finally:
        other.stop()
        node.stop()


def relay(target: Address) -> Address:
    """Another address of the same node: a socket that passes bytes on, both ways."""
    server = socket.create_server(("127.0.0.1", 0))

    def pump(source: socket.socket, sink: socket.socket) -> None:
        with source, sink:
            try:
                while data := source.recv(65536):
                    sink.sendall(data)
            except OSError:
                return

    def accept() -> None:
        while True:
            try:
                inner, _ = server.accept()
            except OSError:
                return
            outer = socket.create_connection((target.host, target.port))
            for pair in ((inner, outer), (outer, inner)):
                threading.Thread(target=pump, args=pair, daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    return Address("127.0.0.1", int(server.getsockname()[1]))


def test_a_member_with_another_key_is_told_apart_and_not_asked() -> None:
    addresses = [free_address(), free_address()]
    one = start_node(addresses[0], [addresses[1]])
    two = start_node(addresses[1], [addresses[0]], key=b"another key, as long")
    try:
        until(lambda: "key" in (one.link(two).problem or ""), lambda: one.link(two).problem)
        assert one.remote.holds(page_keys(1)) == [False]
        assert one.pool.status()["members"][0]["live"] is False
    finally:
        one.stop()
        two.stop()


def test_unequal_format_versions_are_said_with_both() -> None:
    with running_nodes(2) as nodes:
        near, far = nodes

        def newer(payload: bytes, answer: bytes) -> bytes:
            return answer[:4] + (2).to_bytes(2, "little") + answer[6:]

        near.gate.change_answer = newer
        until(
            lambda: "format version 1 here, 2 there" in (near.link(far).problem or ""),
            lambda: near.link(far).problem,
        )
        near.gate.change_answer = None
        nodes.await_live()


# --- nobody there ---------------------------------------------------------------------------


def test_a_dead_pool_computes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(keys: object) -> None:
        raise AssertionError("no live peer, yet fingerprints were computed")

    node = start_node(free_address(), [free_address(), free_address()])
    try:
        monkeypatch.setattr(remote, "fingerprints", never)
        monkeypatch.setattr(copies, "fingerprints", never)
        keys = page_keys(*range(8))
        node.put(keys)
        assert node.remote.holds(page_keys(50)) == [False]
        assert node.store.lookup(page_keys(50)) == [None]
        assert take_content(node.store, keys + page_keys(50)) == 8
        assert node.remote.stats().pushes_queued == 0
        assert "none of 2 members can be asked" in (node.remote.stats().degraded or "")
        assert not node.remote.flush(WAIT_S), "copies were wanted and not made"
        node.check()
    finally:
        node.stop()


def test_h1_closing_with_members_that_are_not_there_ends_in_time() -> None:
    node = start_node(free_address(), [free_address() for _ in range(5)])
    assert node.pool.close(WAIT_S)
    assert node.pool.close(WAIT_S), "again"
    node.store.close()


# --- silence --------------------------------------------------------------------------------


def test_a_silent_member_is_not_asked_and_heard_again_it_is() -> None:
    clock = OffsetClock()
    with running_nodes(2, [{"clock": clock}], heartbeat_s=0.05, **QUIET) as nodes:
        near, far = nodes
        keys = page_keys(1)
        far.put(keys)
        nodes.await_known(keys)
        clock.offset_s += 5.0
        heard = near.link(far).live
        until(lambda: near.link(far).live, lambda: near.link(far).problem)
        assert not heard or near.remote.holds(keys) == [True]
        until(lambda: near.remote.holds(keys) == [True], lambda: near.link(far).problem)


def test_h4_a_restarted_member_is_greeted_anew_and_found_with_what_it_kept(tmp_path: Path) -> None:
    arena = tmp_path / "arena"
    with running_nodes(2, [{}, {"arena": arena, "epoch": tmp_path / "epoch"}], **QUIET) as nodes:
        near, far = nodes
        keys = page_keys(*range(6))
        far.put(keys)
        nodes.await_known(keys)
        before = near.link(far).epoch
        far.stop()
        until(lambda: not near.link(far).live, lambda: near.link(far).state)
        assert near.remote.holds(keys) == [False] * 6
        assert take_content(near.store, keys) == 0
        far = restart(nodes, 1, [near], arena=arena, epoch=tmp_path / "epoch", **QUIET)
        nodes.await_known(keys)
        assert near.link(far).epoch == before + 1
        assert take_content(near.store, keys) == 6


def test_pages_a_former_life_had_are_not_believed_of_the_next(tmp_path: Path) -> None:
    epoch = tmp_path / "epoch"
    with running_nodes(2, [{}, {"epoch": epoch}], **QUIET) as nodes:
        near, far = nodes
        keys = page_keys(*range(6))
        far.put(keys)
        nodes.await_known(keys)
        far.stop()
        far = restart(nodes, 1, [near], epoch=epoch, **QUIET)
        until(
            lambda: near.link(far).live and near.link(far).epoch == far.pool.own_epoch,
            lambda: near.link(far).epoch,
        )
        until(lambda: near.index(far).token != 0, lambda: near.index(far).token)
        assert near.index(far).known == 0
        assert near.store.lookup(keys) == [None] * 6


# --- epochs ---------------------------------------------------------------------------------


def test_a_node_with_an_old_epoch_is_fenced_takes_a_later_one_and_joins(tmp_path: Path) -> None:
    path = tmp_path / "epoch"
    with running_nodes(3, [{}, {}, {"epoch": path}], **QUIET) as nodes:
        one, two, back = nodes
        backup = path.read_bytes()
        back.stop()
        back = restart(nodes, 2, [one, two], epoch=path, **QUIET)
        nodes.await_live()
        latest = back.pool.own_epoch
        back.stop()
        # Its disk is set back to before its last life.
        path.write_bytes(backup)
        back = restart(nodes, 2, [one, two], epoch=path, **QUIET)
        nodes.await_live()
        assert back.pool.own_epoch > latest
        assert back.pool.status()["fences"] >= 1
        assert all(node.link(back).epoch == back.pool.own_epoch for node in (one, two))
        keys = page_keys(*range(4))
        back.put(keys)
        nodes.await_known(keys)
        assert take_content(one.store, keys) == 4
        saved = back.pool.own_epoch
        back.stop()
        back = restart(nodes, 2, [one, two], epoch=path, **QUIET)
        assert back.pool.own_epoch == saved + 1, "the later epoch was made durable"
        nodes.await_live()


def test_a_later_epoch_in_the_list_of_members_is_one_to_go_above(tmp_path: Path) -> None:
    members = ListedMembers()
    node = start_node(free_address(), [free_address()], membership=members)
    try:
        assert members.joined == [node.pool.own_epoch] and members.on_later_epoch is not None
        before = node.pool.own_epoch
        members.on_later_epoch(before + 7)
        assert node.pool.own_epoch == before + 8
        assert members.joined == [before, before + 8]
        members.on_later_epoch(before + 3)
        assert node.pool.own_epoch == before + 8, "an epoch below the own one says nothing"
    finally:
        node.stop()
    assert members.joined[-1] == 0, "a node that leaves says so"


def test_what_a_former_life_leased_is_quarantined_not_freed(tmp_path: Path) -> None:
    clock = OffsetClock()
    path = tmp_path / "epoch"
    own: list[dict[str, Any]] = [{"epoch": path}, {"clock": clock}]
    with running_nodes(2, own, lease_s=30.0, transfer_s=30.0, **QUIET) as nodes:
        near, far = nodes
        keys = page_keys(*range(4))
        far.put(keys)
        nodes.await_known(keys)
        near.gate.open.clear()
        pull = near.pull(keys[0])
        until(
            lambda: far.pool.status()["leases"]["pages"] == 1, lambda: far.pool.status()["leases"]
        )
        # A new life of the same process: what it leased before is nobody's now.
        near.pool.fenced(near.pool.own_epoch, "a test")
        until(
            lambda: far.pool.status()["leases"]["quarantined_pages"] == 1,
            lambda: far.pool.status()["leases"],
        )
        assert far.pool.status()["leases"]["pages"] == 1, "it may be read still"
        near.gate.open.set()
        pull.future.result(WAIT_S)
        clock.offset_s += 61.0
        until(
            lambda: far.pool.status()["leases"]["pages"] == 0, lambda: far.pool.status()["leases"]
        )
        nodes.await_live()


# --- coming and going -----------------------------------------------------------------------


def test_members_come_and_go_with_the_list() -> None:
    members = ListedMembers()
    with running_nodes(2, **QUIET) as nodes:
        one, two = nodes
        keys = page_keys(1, 2)
        one.put(keys[:1])
        two.put(keys[1:])
        third = start_node(free_address(), [free_address()], membership=members, **QUIET)
        try:
            members.set(one.config.own_address)
            until(lambda: third.store.lookup(keys)[0] is not None, lambda: third.pool.links())
            assert third.store.lookup(keys)[1] is None
            members.set(two.config.own_address)
            until(lambda: third.store.lookup(keys)[1] is not None, lambda: third.pool.links())
            assert third.store.lookup(keys)[0] is None
            assert [link.address for link in third.pool.links()] == [two.config.own_address]
            third.check()
            members.set()
            assert third.store.lookup(keys) == [None, None]
        finally:
            third.stop()


def test_a_copy_offered_before_its_taker_has_found_the_maker_is_made() -> None:
    members = ListedMembers()
    far_address, near_address = free_address(), free_address()
    far = start_node(far_address, [near_address], membership=members, host_share=1.0)
    near = start_node(near_address, [far_address])
    try:
        until(lambda: near.link(far).live, lambda: near.link(far).problem)
        assert far.pool.links() == ()

        def found(payload: bytes, timeout_s: float) -> None:
            parts = read_request(payload)
            if parts is not None and parts[0].verb is Verb.STORE and not members.listed:
                members.set(near_address)

        near.gate.before_message = found
        keys = page_keys(*range(8))
        near.put(keys)
        assert near.remote.flush(WAIT_S)
        assert far.store.lookup_here(keys) == [True] * 8
    finally:
        near.stop()
        far.stop()


def test_drain_leaves_nothing_hot_behind() -> None:
    with running_nodes(3, [QUIET], host_share=1.0) as nodes:
        leaving, one, two = nodes
        keys = page_keys(*range(24))
        leaving.put(keys)
        one.put(keys[:4])
        until(lambda: leaving.index(one).known == 4, lambda: leaving.index(one).known)
        assert leaving.pool.drain(WAIT_S)
        assert leaving.remote.stats().pushed == 20, "what somebody has needs no copy"
        until(lambda: one.link(leaving).leaving, lambda: one.link(leaving).leaving)
        assert leaving.pool.status()["leaving"] is True
        leaving.stop()
        for node in (one, two):
            until(
                lambda node=node: all(node.store.lookup(keys)),  # type: ignore[misc]
                lambda node=node: node.store.lookup(keys),  # type: ignore[misc]
            )
            assert take_content(node.store, keys) == 24


def test_a_leaving_member_gets_no_copies() -> None:
    with running_nodes(3, host_share=1.0) as nodes:
        one, leaving, two = nodes
        assert leaving.pool.drain(WAIT_S), "it has nothing"
        until(lambda: one.link(leaving).leaving, lambda: one.link(leaving).leaving)
        keys = page_keys(*range(16))
        one.put(keys)
        assert one.remote.flush(WAIT_S)
        assert leaving.store.lookup_here(keys) == [False] * 16
        assert two.store.lookup_here(keys) == [True] * 16


def test_drain_with_nobody_to_take_it_says_so() -> None:
    node = start_node(free_address(), [free_address()])
    try:
        assert node.pool.drain(WAIT_S), "nothing is here"
        node.put(page_keys(1))
        assert not node.pool.drain(WAIT_S)
    finally:
        node.stop()


def test_when_a_holder_dies_its_copies_are_made_again_elsewhere() -> None:
    settings = {"rebalance_bytes_per_s": 1 << 20, "suspect_s": 0.2, "host_share": 1.0}
    with running_nodes(3, **settings) as nodes:
        one = nodes[0]
        keys = page_keys(*range(20))
        one.put(keys)
        assert one.remote.flush(WAIT_S)
        others = [nodes[1], nodes[2]]
        held = [sum(node.store.lookup_here(keys)) for node in others]
        assert sum(held) == 20 and all(held)
        others[1].stop()
        until(lambda: all(others[0].store.lookup_here(keys)), lambda: one.remote.rebalanced)
        assert one.remote.rebalanced == held[1], "what was not lost is not copied"
        one.stop()
        assert take_content(others[0].store, keys) == 20


def test_a_page_without_copies_gets_them_when_somebody_joins() -> None:
    settings = {"rebalance_bytes_per_s": 1 << 20, "suspect_s": 0.2, "host_share": 1.0}
    addresses = [free_address(), free_address()]
    one = start_node(addresses[0], [addresses[1]], **settings)
    keys = page_keys(*range(12))
    one.put(keys)
    two = start_node(addresses[1], [addresses[0]], **settings)
    try:
        until(lambda: all(two.store.lookup_here(keys)), lambda: one.remote.rebalanced)
        assert len(two.store.keys_of(POOL_OWNER, TierName.HOST)) == 12
        one.check()
        two.check()
    finally:
        one.stop()
        two.stop()


def test_a_page_size_that_only_others_use_is_opened_when_they_ask() -> None:
    opened: list[int] = []
    made: list[Node] = []

    def open_class(page_bytes: int, timeout_s: float) -> bool:
        opened.append(page_bytes)
        return False

    addresses = [free_address(), free_address()]
    one = start_node(addresses[0], [addresses[1]], host_share=1.0)
    two = start_node(addresses[1], [addresses[0]], open_class=open_class)
    made += [one, two]
    try:
        until(lambda: one.link(two).live and two.link(one).live, lambda: one.link(two).problem)
        assert two.remote.close(WAIT_S)
        one.put(page_keys(1))
        assert not one.remote.flush(WAIT_S), "it could not be opened"
        assert opened and set(opened) == {PAGE_BYTES}
    finally:
        for node in made:
            node.stop()


def add_size(node: Node, page_bytes: int) -> tuple[TieredStore, PoolRemote]:
    """A second page size on a node."""
    store = TieredStore.open(
        StoreConfig(page_bytes=page_bytes, host_bytes=HostTier.capacity_for(page_bytes, 32))
    )
    remote = node.pool.attach(page_bytes)
    store.attach_remote(remote)
    return store, remote


def test_page_sizes_do_not_mix_and_one_goes_without_the_other() -> None:
    with running_nodes(2, **QUIET) as nodes:
        near, far = nodes
        other = 3 * PAGE_BYTES
        near_store, near_remote = add_size(near, other)
        far_store, _ = add_size(far, other)
        try:
            keys = page_keys(*range(8))
            far.put(keys[:4])
            assert put_store(far_store, keys[4:]) == [CommitOutcome.COMMITTED] * 4
            until(
                lambda: all(near.remote.holds(keys[:4])) and all(near_remote.holds(keys[4:])),
                lambda: near.pool.status(),
            )
            assert near.remote.holds(keys) == [True] * 4 + [False] * 4
            assert near_remote.holds(keys) == [False] * 4 + [True] * 4
            assert take_content(near_store, keys[4:]) == 4
            assert near.pool.status()["members"][0]["page_sizes"] == [PAGE_BYTES, other]
            near.check()
            far_store.close()
            until(lambda: not any(near_remote.holds(keys)), lambda: near.pool.status())
            assert take_content(near.store, keys[:4]) == 4, "the other size is served on"
        finally:
            near_store.close()
            far_store.close()


def test_a_store_that_closes_under_a_reader_is_a_miss_there() -> None:
    with running_nodes(2, **QUIET) as nodes:
        near, far = nodes
        keys = page_keys(*range(4))
        far.put(keys)
        nodes.await_known(keys)
        with near.gate.stalled():
            pulls = [near.pull(key) for key in keys]
            until(lambda: far.pool.status()["leases"]["pages"] == 4, lambda: far.pool.status())
            assert far.remote.close(WAIT_S), "what a peer has leased does not keep the arena"
            assert far.pool.status()["leases"]["pages"] == 0
        states = {pull.future.result(WAIT_S).state for pull in pulls}
        assert states <= {PullState.MISSED, PullState.FAILED}
        assert near.store.lookup_here(keys) == [False] * 4


# --- everything at once ---------------------------------------------------------------------


def test_flipped_bits_in_messages_cost_time_never_a_byte() -> None:
    print(f"seed {SEED}")
    random_ = random.Random(SEED)
    with running_nodes(2, **QUIET) as nodes:
        near, far = nodes
        keys = page_keys(*range(12))
        far.put(keys)
        nodes.await_known(keys)

        def flip(payload: bytes, answer: bytes) -> bytes:
            if random_.random() < 0.8:
                return answer
            at = random_.randrange(len(answer))
            return answer[:at] + bytes([answer[at] ^ 1 << random_.randrange(8)]) + answer[at + 1 :]

        near.gate.change_answer = flip
        for _ in range(30):
            take_content(near.store, keys, 2.0)
            near.store.drop(keys, TierName.HOST)
        near.gate.change_answer = None
        nodes.await_live()
        nodes.await_known(keys)
        until(lambda: near.link(far).askable, lambda: near.link(far).last_error)
        assert take_content(near.store, keys) == 12


def test_random_work_with_lost_connections_is_never_wrong() -> None:
    print(f"seed {SEED}")
    random_ = random.Random(SEED)
    with running_nodes(3, host_share=0.5, breaker_open_s=0.05, lease_s=2.0) as nodes:
        got = 0
        for step in range(150):
            node = nodes[random_.randrange(3)]
            first = random_.randrange(60)
            keys = page_keys(*range(first, first + random_.randrange(1, 8)))
            act = random_.random()
            if act < 0.3:
                put_some(node, keys)
            elif act < 0.8:
                got += take_content(node.store, keys, 2.0)
            elif act < 0.9:
                node.store.drop(keys, TierName.HOST)
            else:
                random_.choice(node.gate.peers).close()
            if step % 10 == 0:
                assert all(node.store.wait_quiet(WAIT_S) for node in nodes)
                nodes.check()
        assert got > 100, "little was found"
        nodes.await_live()
        assert all(node.store.wait_quiet(WAIT_S) for node in nodes)


def test_threads_fences_and_lost_connections_are_never_wrong() -> None:
    print(f"seed {SEED}")
    chaos: dict[str, Any] = {
        "host_share": 0.5,
        "host_pages": 40,
        "hot_replicas": 2,
        "rebalance_bytes_per_s": 1 << 20,
        "suspect_s": 0.5,
        "breaker_open_s": 0.05,
        "lease_s": 1.0,
        "transfer_s": 1.0,
        "store_s": 1.0,
    }
    errors: list[BaseException] = []

    def work(nodes: Nodes, number: int) -> None:
        random_ = random.Random(SEED + number)
        try:
            for _ in range(60):
                node = nodes[random_.randrange(3)]
                first = random_.randrange(100)
                keys = page_keys(*range(first, first + random_.randrange(1, 10)))
                act = random_.random()
                if act < 0.3:
                    put_some(node, keys)
                elif act < 0.85:
                    take_content(node.store, keys, random_.choice((0.05, 0.5, 2.0)))
                elif act < 0.92:
                    node.store.drop(keys, TierName.HOST)
                elif act < 0.95:
                    random_.choice(node.gate.peers).close()
                elif act < 0.97:
                    node.pool.fenced(node.pool.own_epoch, "a test")
                else:
                    node.store.fetch(keys, 1.0).cancel()
        except BaseException as error:  # noqa: BLE001
            errors.append(error)

    with running_nodes(3, **chaos) as nodes:
        run_threads([threading.Thread(target=work, args=(nodes, n)) for n in range(4)])
        assert not errors, errors[0]
        nodes.await_live()
        # What one node takes in may be what another copies: twice, so that both have ended.
        assert all(node.store.wait_quiet(WAIT_S) for node in nodes.nodes * 2)
        keys = page_keys(*range(500, 508))
        nodes[0].put(keys)
        nodes.await_known(keys)
        assert [take_content(node.store, keys) for node in nodes] == [8] * 3
        assert all(node.store.wait_quiet(WAIT_S) for node in nodes.nodes * 2)
        await_truth(nodes, page_keys(*range(110)))
        assert sum(node.remote.stats().worker_restarts for node in nodes) == 0
        assert all(node.store.wait_quiet(WAIT_S) for node in nodes.nodes * 2)


def await_truth(nodes: Nodes, keys: list[PageKey]) -> None:
    """Wait until every node believes of every other exactly what is true."""
    prints = fingerprints(keys)
    for one, other in itertools.permutations(nodes.nodes, 2):
        until(
            lambda one=one, other=other: (  # type: ignore[misc]
                one.index(other).holds(prints).tolist() == other.store.lookup_here(keys)
            ),
            lambda one=one, other=other: (one.name, other.name),  # type: ignore[misc]
        )


def put_some(node: Node, keys: list[PageKey]) -> None:
    with node.store.reserve(len(keys)) as held:
        taken = keys[: len(held.views)]
        for key, view in zip(taken, held.views, strict=True):
            view[:] = page_content(key, PAGE_BYTES)
        held.commit(taken)


def test_pull_states_add_up_after_all_of_it() -> None:
    with running_nodes(2, **QUIET) as nodes:
        near, far = nodes
        keys = page_keys(*range(HOST_PAGES // 4))
        far.put(keys)
        nodes.await_known(keys)
        pulls = [near.pull(key) for key in keys]
        states = [pull.future.result(WAIT_S).state for pull in pulls]
        assert states == [PullState.LANDED] * len(keys)
        assert near.remote.wait_quiet(WAIT_S)
        stats = near.remote.stats()
        assert (stats.landed, stats.queued, stats.running) == (len(keys), 0, 0)
