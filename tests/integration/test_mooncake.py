"""A real Mooncake Store as the remote tier: mooncake_master and a store node on loopback.

Both are processes that the tests start, stop and kill. The suite of remote tiers runs on it too.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.mooncake_cluster import (
    CALL_S,
    HOST,
    NODE_TTL_S,
    MooncakeCluster,
    StoreNode,
    raw_client,
    why_absent,
)
from tests.support.pages import page_content, page_keys, put_store, take_content
from tests.unit.storage.remote_conformance import (
    HOST_PAGES,
    PAGE_BYTES,
    SHORT_S,
    WAIT_S,
    Pair,
    RemoteConformance,
    wait_until,
)
from tierkv.bench.child import free_ports
from tierkv.storage.checksum import payload_checksum
from tierkv.storage.errors import ConfigError
from tierkv.storage.mooncake.config import MooncakeConfig
from tierkv.storage.mooncake.remote import MooncakeRemote
from tierkv.storage.mooncake.service import Mooncake, open_mooncake
from tierkv.storage.mooncake.values import HEADER_BYTES, ValueHeader, key_text
from tierkv.storage.store import TieredStore
from tierkv.storage.store_config import StoreConfig
from tierkv.storage.tiers.host import HostTier
from tierkv.storage.types import PageKey, TierName

WHY_ABSENT = why_absent()
pytestmark = pytest.mark.skipif(WHY_ABSENT is not None, reason=WHY_ABSENT or "there")
LONG_S = 60.0


def settings(master: str, **changes: Any) -> MooncakeConfig:
    return MooncakeConfig(
        master, address=HOST, call_s=CALL_S, batch_pages=4, pull_pages=24, **changes
    )


def open_store(
    service: Mooncake, page_bytes: int, pages: int
) -> tuple[TieredStore, MooncakeRemote]:
    """A host-only store with the cluster beneath it."""
    room = HostTier.capacity_for(page_bytes, pages)
    store = TieredStore.open(StoreConfig(page_bytes=page_bytes, host_bytes=room))
    remote = service.attach(page_bytes)
    store.attach_remote(remote)
    return store, remote


class Calm:
    """A cluster that lives as long as this module, and two nodes' connections to it."""

    def __init__(self, cluster: MooncakeCluster) -> None:
        self.cluster = cluster
        self.services = [open_mooncake(settings(cluster.master)) for _ in range(2)]
        self.raw = raw_client(cluster.master)

    def close(self) -> None:
        self.raw.close()
        for service in self.services:
            assert service.close(LONG_S)


@pytest.fixture(scope="module")
def calm() -> Iterator[Calm]:
    with MooncakeCluster() as cluster:
        made = Calm(cluster)
        yield made
        made.close()


class World:
    """Two stores, each with a client of its own, on one cluster."""

    def __init__(self, cluster: MooncakeCluster, services: list[Mooncake], page_bytes: int) -> None:
        self.cluster = cluster
        self.services = services
        self.page_bytes = page_bytes
        self.left = False
        opened = [open_store(service, page_bytes, 24) for service in services]
        (self.here, self.remote), (self.there, self.far_remote) = opened

    def put(self, *numbers: int) -> list[PageKey]:
        """Pages stored over there, and known of here."""
        keys = page_keys(*numbers)
        put_store(self.there, keys)
        assert self.far_remote.flush(WAIT_S)
        self.know(keys)
        return keys

    def know(self, keys: list[PageKey]) -> None:
        def known() -> bool:
            self.remote.ask(keys, SHORT_S)
            return all(self.remote.holds(keys))

        wait_until(known, "the cluster never said that it has the pages")

    def leave_there(self) -> None:
        """The other node goes away."""
        self.left = True
        self.there.close()
        assert self.services[1].close(WAIT_S)

    def check(self) -> None:
        for store in [self.here, *([] if self.left else [self.there])]:
            assert store.wait_quiet(LONG_S)
            store.check()
        for service in self.services:
            service.check()

    def close(self) -> None:
        self.here.close()
        self.there.close()


@contextmanager
def world(page_bytes: int = 64 << 10, **changes: Any) -> Iterator[World]:
    """On a cluster of its own, to be ill-treated."""
    with MooncakeCluster() as cluster:
        services = [open_mooncake(settings(cluster.master, **changes)) for _ in range(2)]
        made = World(cluster, services, page_bytes)
        try:
            yield made
            made.check()
        finally:
            made.close()
            for service in services:
                assert service.close(LONG_S)


@contextmanager
def calm_world(calm: Calm, page_bytes: int = 64 << 10) -> Iterator[World]:
    """On the cluster of all, emptied."""
    calm.raw.remove_all(True)
    made = World(calm.cluster, calm.services, page_bytes)
    try:
        yield made
        made.check()
    finally:
        made.close()


def test_a_page_put_on_one_node_is_fetched_on_another_identical(calm: Calm) -> None:
    with calm_world(calm, page_bytes=1 << 20) as made:
        keys = made.put(*range(12))
        assert made.here.lookup(keys) == [TierName.REMOTE] * 12
        assert take_content(made.here, keys) == 12
        assert made.here.stats().restored_pages == {TierName.REMOTE: 12}
        # And it is not sent a second time from where it has come to.
        assert made.remote.flush(WAIT_S)
        assert made.remote.stats().pushed == 0
        assert made.far_remote.stats().pushed == 12


def test_a_node_that_starts_with_nothing_finds_what_a_dead_one_left() -> None:
    with world() as made:
        keys = made.put(*range(6))
        made.leave_there()
        assert take_content(made.here, keys) == 6


def test_w7_a_value_that_was_damaged_is_a_miss_counted_and_not_asked_for_again(calm: Calm) -> None:
    with calm_world(calm) as made:
        keys = made.put(1, 2, 3, 4)
        raw = calm.raw
        replace(raw, key_text(keys[1], made.page_bytes), flip_middle)
        replace(raw, key_text(keys[2], made.page_bytes), lambda value: value[:-4096])
        replace(raw, key_text(keys[3], made.page_bytes), lambda value: value + bytes(4096))
        assert take_content(made.here, keys) == 1
        assert made.here.wait_quiet(WAIT_S)
        stats = made.remote.stats()
        assert (stats.corrupt, stats.failed) == (3, 0)
        assert made.here.lookup(keys) == [TierName.HOST, None, None, None]
        assert take_content(made.here, keys[1:]) == 0
        assert made.remote.stats().corrupt == 3


def test_w7_a_value_that_proves_another_page_is_never_served(calm: Calm) -> None:
    with calm_world(calm) as made:
        wanted, other = page_keys(1, 2)
        content = page_content(other, made.page_bytes)
        header = ValueHeader(other, made.page_bytes, payload_checksum(content)).pack()
        raw = calm.raw
        assert raw.put(key_text(wanted, made.page_bytes), header + content) == 0
        made.know([wanted])
        assert take_content(made.here, [wanted]) == 0
        assert made.here.wait_quiet(WAIT_S)
        assert made.remote.stats().corrupt == 1
        # Who has the right page puts it in the place of the wrong one.
        put_store(made.here, [wanted])
        assert made.remote.flush(WAIT_S)
        assert take_content(made.there, [wanted]) == 0, "nobody has asked yet over there"
        made.far_remote.ask([wanted], WAIT_S)
        assert take_content(made.there, [wanted]) == 1


def test_kill_9_of_the_store_node_while_in_use() -> None:
    with world() as made:
        keys = made.put(*range(16))
        wrong, stop = start_readers(made, keys)
        wait_until(lambda: made.remote.stats().landed >= 16, "nothing was read")
        made.cluster.node.kill()
        wait_until(lambda: made.remote.stats().failed > 0, "no pull met the dead node")
        stop()
        assert not wrong
        assert made.here.wait_quiet(LONG_S)
        made.here.check()
        # Its pages are gone, its successor takes new ones.
        made.cluster.node = StoreNode(made.cluster.master, made.cluster.segment_bytes)
        assert_serves_again(made, 100)


def test_kill_9_of_the_master_while_in_use() -> None:
    with world(known_s=600.0) as made:
        keys = made.put(*range(16))
        wrong, stop = start_readers(made, keys)
        wait_until(lambda: made.remote.stats().landed >= 16, "nothing was read")
        made.cluster.kill_master()
        wait_until(lambda: made.remote.stats().degraded is not None, "its death went unnoticed")
        assert made.here.lookup(page_keys(50)) == [None]
        stop()
        assert not wrong
        made.cluster.restart_master()
        made.cluster.restart_node()
        assert_serves_again(made, 100)


def test_h1_a_master_that_never_answers_holds_nobody_up(calm: Calm) -> None:
    with calm_world(calm) as made:
        keys = made.put(*range(4))
        made.cluster.stop_master()
        try:
            fetch = made.here.fetch(keys, SHORT_S)
            with fetch.take(WAIT_S) as lease:
                assert lease.keys == []
            # Still in the library: its slots are nobody else's until it returns.
            stats = made.remote.stats()
            assert stats.running == 4
            assert not made.remote.quiet
            assert made.here.host.stats().reserved_pages == 4
            wait_until(lambda: bool(made.remote.stats().degraded), "it is believed to serve")
            assert "has not returned" in (made.remote.stats().degraded or "")
            assert made.here.lookup(keys) == [None] * 4
            made.here.check()
        finally:
            made.cluster.continue_master()
        assert made.here.wait_quiet(LONG_S)
        assert made.here.host.stats().reserved_pages == 0
        wait_until(lambda: made.remote.stats().degraded is None, "it is never asked again")


def test_h1_a_node_that_stands_still_writes_into_nobody_elses_slot_later(calm: Calm) -> None:
    with calm_world(calm, page_bytes=2 << 20) as made:
        first, *keys = made.put(*range(9))
        # The library waits a minute for the greeting of a node that it has not met before.
        assert take_content(made.here, [first]) == 1
        made.cluster.node.stop()
        try:
            with made.here.fetch(keys, SHORT_S).take(WAIT_S) as lease:
                assert lease.keys == []
            assert made.remote.stats().running > 0
            made.here.check()
            # The library gives up by itself; from then on the slots are anybody's.
            assert made.here.wait_quiet(LONG_S)
            assert made.here.host.stats().reserved_pages == 0
            others = page_keys(*range(100, 124))
            assert len(put_store(made.here, others)) == 24
        finally:
            made.cluster.node.go_on()
        # It answers again, and has sent what was left of the pages if it ever will.
        wait_until(lambda: calm.raw.put("alive", bytes(4096)) == 0, "the node does not go on")
        wait_until(lambda: len(calm.raw.get("alive")) == 4096, "the node does not answer")
        assert take_content(made.here, others) == 24


def test_c4_a_full_cluster_refuses_copies_and_each_is_counted(calm: Calm) -> None:
    with calm_world(calm, page_bytes=4 << 20) as made:
        keys = page_keys(*range(20))
        put_store(made.there, keys)
        assert not made.far_remote.flush(WAIT_S)
        stats = made.far_remote.stats()
        assert stats.push_failed > 0
        assert stats.pushed + stats.push_failed == 20
        assert stats.degraded is None, "a full cluster is no broken one"
        found = [key for key in keys if not made.remote.ask([key], WAIT_S) and knows(made, key)]
        # What is full makes room by itself, so some may be gone again.
        assert 0 < len(found) <= stats.pushed


@pytest.mark.parametrize("kind", ["absent", "mute", "nameless"])
def test_a_master_that_cannot_be_used_is_one_clear_line(kind: str) -> None:
    with socket.socket() as mute:
        mute.bind((HOST, 0))
        mute.listen(8)
        master, said = {
            "absent": (f"{HOST}:{free_ports(1)[0]}", "start mooncake_master"),
            "mute": (f"{HOST}:{mute.getsockname()[1]}", "does not answer"),
            "nameless": ("no-such-host.invalid:50051", "is not reached"),
        }[kind]
        with ticking() as ticks, pytest.raises(ConfigError, match=said) as caught:
            open_mooncake(settings(master, connect_s=1.0))
        # The library's own setup() would have stopped every thread until it gave up.
        assert kind != "mute" or ticks() > 100
        assert master in str(caught.value)
        assert "\n" not in str(caught.value)


@contextmanager
def ticking() -> Iterator[Callable[[], int]]:
    """How often another thread came to run meanwhile."""
    count = 0
    ended = threading.Event()

    def tick() -> None:
        nonlocal count
        while not ended.wait(0.001):
            count += 1

    thread = threading.Thread(target=tick)
    thread.start()
    try:
        yield lambda: count
    finally:
        ended.set()
        thread.join(WAIT_S)


def test_a_killed_master_is_told_of_after_one_failed_copy() -> None:
    with MooncakeCluster() as cluster:
        service = open_mooncake(settings(cluster.master))
        store, remote = open_store(service, PAGE_BYTES, 24)
        put_store(store, page_keys(1))
        assert remote.flush(WAIT_S) and service.status()["degraded"] is None
        cluster.kill_master()
        put_store(store, page_keys(2))
        assert not remote.flush(WAIT_S)
        assert "the master is gone" in service.status()["degraded"]
        store.close()
        assert service.close(LONG_S)


def test_a_store_to_which_nobody_gives_memory_is_told_of() -> None:
    with MooncakeCluster(segment_bytes=0) as cluster:
        service = open_mooncake(settings(cluster.master))
        store, remote = open_store(service, PAGE_BYTES, 24)
        put_store(store, page_keys(1, 2))
        assert not remote.flush(WAIT_S)
        assert "no room for the last 2 copies" in service.status()["degraded"]
        store.close()
        assert service.close(LONG_S)


def test_an_address_that_is_not_ours_is_one_clear_line() -> None:
    with MooncakeCluster(segment_bytes=16 << 20) as cluster:
        config = MooncakeConfig(cluster.master, address="192.0.2.1")
        with pytest.raises(ConfigError, match="is not one of this machine"):
            open_mooncake(config)


def test_over_tcp_nobody_can_write_into_the_arena(calm: Calm) -> None:
    """The library lets anybody who reaches its port write into memory that is registered."""
    with calm_world(calm) as made:
        memory = made.here.arena_memory()
        before = bytes(memory)
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        written = attack(address + made.here.payload_offset(0))
        assert written == [], "the arena was written from outside"
        assert bytes(memory) == before
        memory.release()
        # The attack itself works, or this test proves nothing.
        target = mmap.mmap(-1, 4096)
        place = ctypes.addressof(ctypes.c_char.from_buffer(target))
        raw = calm.raw
        assert raw.register_buffer(place, 4096) == 0
        assert attack(place) and target[:6] == b"ATTACK"
        assert raw.unregister_buffer(place) == 0


_ATTACK = """
import ctypes, os, sys
from mooncake.engine import TransferEngine
engine = TransferEngine()
assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
bytes_ = ctypes.create_string_buffer(b"ATTACK", 4096)
here = ctypes.addressof(bytes_)
engine.register_memory(here, 4096)
for port in sys.argv[2:]:
    if engine.transfer_sync_write("127.0.0.1:" + port, here, int(sys.argv[1]), 6) == 0:
        print(port)
sys.stdout.flush()
os._exit(0)
"""


def attack(address: int) -> list[str]:
    """Have another process write to an address of this one; the ports where that worked."""
    command = [sys.executable, "-c", _ATTACK, str(address), *own_ports()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LONG_S, check=True)
    return done.stdout.split()


def own_ports() -> list[str]:
    """Ports on which this process listens, as /proc tells."""
    links = [link for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    own = set()
    for link in links:
        try:
            own.add(str(link.readlink()))
        except OSError:
            continue
    ports = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in own:
                ports.append(str(int(fields[1].rpartition(":")[2], 16)))
    return ports


def knows(made: World, key: PageKey) -> bool:
    return made.remote.holds([key]) == [True]


def flip_middle(value: bytes) -> bytes:
    middle = len(value) // 2
    return value[:middle] + bytes([value[middle] ^ 1]) + value[middle + 1 :]


def replace(raw: Any, key: str, change: Any) -> None:
    """Put another value under a key, as a stranger might."""
    value = raw.get(key)
    assert len(value) > HEADER_BYTES
    assert raw.remove(key, True) == 0
    assert raw.put(key, change(value)) == 0


def start_readers(made: World, keys: list[PageKey]) -> tuple[list[PageKey], Any]:
    """Two threads that fetch, compare and drop, one that stores over there; until told to stop.

    Returns the pages that came wrong, and stop().
    """
    wrong: list[PageKey] = []
    stopping = threading.Event()

    def read(first: int) -> None:
        while not stopping.is_set():
            made.remote.ask(keys, SHORT_S)
            for start in range(first, len(keys), 8):
                part = keys[start : start + 4]
                with made.here.fetch(part, SHORT_S).take(SHORT_S) as lease:
                    for key, view in zip(lease.keys, lease.views, strict=True):
                        if bytes(view) != page_content(key, made.page_bytes):
                            wrong.append(key)
                made.here.drop(part, TierName.HOST)

    def write() -> None:
        for number in itertools.count(10_000):
            if stopping.wait(0.01):
                return
            put_store(made.there, page_keys(number))

    threads = [threading.Thread(target=read, args=(first,)) for first in (0, 4)]
    threads.append(threading.Thread(target=write))
    for thread in threads:
        thread.start()

    def stop() -> None:
        stopping.set()
        for thread in threads:
            thread.join(WAIT_S)
            assert not thread.is_alive(), "a reader waits past its deadline"

    return wrong, stop


def assert_serves_again(made: World, first: int) -> None:
    """New pages can be put and fetched, once the breaker and the dead node are forgotten."""
    turn = itertools.count(first, 2)

    def served() -> bool:
        number = next(turn)
        keys = page_keys(number, number + 1)
        put_store(made.there, keys)
        if not made.far_remote.flush(WAIT_S):
            return False
        made.remote.ask(keys, SHORT_S)
        return take_content(made.here, keys, 2.0) == 2

    wait_until(served, "the cluster is never used again", LONG_S + NODE_TTL_S)


class RealPair(Pair):
    """And what the suite need not know."""

    cluster: MooncakeCluster
    raw: Any


class TestRealMooncake(RemoteConformance):
    """The suite of remote tiers, on one cluster that each test finds empty."""

    queue_pages = 24
    running_pages = 8

    @pytest.fixture(autouse=True)
    def calm_cluster(self, calm: Calm) -> None:
        self.calm = calm

    def open_pair(self, folder: Path) -> Pair:
        raw = self.calm.raw
        raw.remove_all(True)
        opened = [open_store(service, PAGE_BYTES, HOST_PAGES) for service in self.calm.services]
        pair = RealPair(*opened[0], *opened[1])
        pair.cluster, pair.raw = self.calm.cluster, raw
        return pair

    @contextmanager
    def stalled(self, pair: Pair) -> Iterator[None]:
        assert isinstance(pair, RealPair)
        pair.cluster.stop_master()
        try:
            yield
        finally:
            pair.cluster.continue_master()

    def damage(self, pair: Pair, key: PageKey) -> None:
        assert isinstance(pair, RealPair)
        replace(pair.raw, key_text(key, PAGE_BYTES), flip_middle)

    def forget(self, pair: Pair, key: PageKey) -> None:
        assert isinstance(pair, RealPair)
        assert pair.raw.remove(key_text(key, PAGE_BYTES), True) == 0
