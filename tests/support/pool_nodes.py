"""Nodes of a pool in this process: real transports on loopback addresses, real stores.

Every node has an address of its own in 127/8, so tests that run at once do not meet. A transport
may be wrapped in a Gate, which holds up or changes what a node reads and asks of its peers.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.pages import put_store
from tierkv.storage.clock import Clock, SystemClock
from tierkv.storage.pool.config import Address, PoolConfig
from tierkv.storage.pool.epoch import Epoch
from tierkv.storage.pool.link import Link
from tierkv.storage.pool.members import Membership, StaticMembership
from tierkv.storage.pool.opening import transport_limits
from tierkv.storage.pool.peer_index import PeerIndex
from tierkv.storage.pool.pool import Pool
from tierkv.storage.pool.remote import PoolRemote
from tierkv.storage.remote import Pull
from tierkv.storage.store import StoreConfig, TieredStore
from tierkv.storage.tiers.host import HostTier
from tierkv.storage.tiers.nvme import NvmeTier
from tierkv.storage.transport.base import (
    Handler,
    PageRange,
    Peer,
    PeerIdentity,
    PeerRead,
    PeerStats,
    Transport,
    TransportStats,
)
from tierkv.storage.transport.tcp import TcpTransport
from tierkv.storage.types import CommitOutcome, PageKey

KEY = bytes(range(32))
PORT = 7422
PAGE_BYTES = 5000
HOST_PAGES = 96
OWNER = 7
NEVER = 1_000_000
"""Uses after which copies are made, where a test wants none."""
WAIT_S = 30.0

_hosts = itertools.count(1)


def free_address() -> Address:
    """A loopback address that nobody else in this or another process of the tests uses."""
    pid, host = os.getpid(), next(_hosts)
    return Address(f"127.{1 + pid // 250 % 250}.{1 + pid % 250}.{1 + host % 250}", PORT)


class OffsetClock:
    """The machine's clock, and what a test adds to it."""

    def __init__(self) -> None:
        self.offset_s = 0.0

    def monotonic(self) -> float:
        return time.monotonic() + self.offset_s

    def wall(self) -> float:
        return time.time()


class GatedPeer(Peer):
    """A peer whose reads and messages pass the gate of their transport."""

    def __init__(self, inner: Peer, gate: Gate) -> None:
        self.inner = inner
        self.address = inner.address
        self.identity = inner.identity
        self._gate = gate

    @property
    def transport(self) -> str:
        return self.inner.transport

    @property
    def declined(self) -> Mapping[str, str]:
        return self.inner.declined

    def read(
        self,
        generation: int,
        ranges: Sequence[PageRange],
        into: Sequence[memoryview],
        timeout_s: float,
    ) -> PeerRead:
        gate = self._gate
        gate.reads += 1
        if gate.before_read is not None:
            gate.before_read(self)
        if gate.open.is_set():
            return self.inner.read(generation, ranges, into, timeout_s)
        held = PeerRead(len(ranges))

        def later() -> None:
            gate.open.wait(WAIT_S)
            read = self.inner.read(generation, ranges, into, WAIT_S)
            held.settle(0, read.take(WAIT_S), read.error)

        threading.Thread(target=later, name="test-gate", daemon=True).start()
        return held

    def message(self, payload: bytes, timeout_s: float) -> bytes:
        if self._gate.before_message is not None:
            self._gate.before_message(payload, timeout_s)
        answer = self.inner.message(payload, timeout_s)
        if self._gate.change_answer is not None:
            return self._gate.change_answer(payload, answer)
        return answer

    def stats(self) -> PeerStats:
        return self.inner.stats()

    def check(self) -> None:
        self.inner.check()

    def close(self) -> None:
        self.inner.close()


class Gate(Transport):
    """A transport that tests can hold up. What it is not told to change, it passes on."""

    name = "gate"

    def __init__(self, inner: Transport) -> None:
        self.inner = inner
        self.boot_token = inner.boot_token
        self.open = threading.Event()
        self.open.set()
        self.reads = 0
        self.before_read: Callable[[GatedPeer], None] | None = None
        self.before_message: Callable[[bytes, float], None] | None = None
        self.change_answer: Callable[[bytes, bytes], bytes] | None = None
        self.peers: list[GatedPeer] = []

    @contextmanager
    def stalled(self) -> Iterator[None]:
        """Inside, reads that begin neither move nor fail."""
        self.open.clear()
        try:
            yield
        finally:
            self.open.set()

    def register(self, memory: memoryview) -> int:
        return self.inner.register(memory)

    def unregister(self, generation: int) -> None:
        self.inner.unregister(generation)

    def listen(self, host: str, port: int, handler: Handler) -> tuple[str, int]:
        def handle(identity: PeerIdentity, payload: bytes) -> bytes:
            return handler(identity, payload)

        return self.inner.listen(host, port, handle)

    def connect(self, host: str, port: int, timeout_s: float) -> Peer:
        peer = GatedPeer(self.inner.connect(host, port, timeout_s), self)
        self.peers.append(peer)
        return peer

    def stats(self) -> TransportStats:
        return self.inner.stats()

    def check(self) -> None:
        self.inner.check()

    def close(self) -> None:
        self.inner.close()


@dataclass
class Node:
    """One node of a test's pool."""

    config: PoolConfig
    pool: Pool
    gate: Gate
    store: TieredStore
    remote: PoolRemote
    clock: Clock
    stopped: bool = False

    @property
    def name(self) -> str:
        return self.config.own_name

    def link(self, other: Node) -> Link:
        """This node's link to another."""
        return next(link for link in self.pool.links() if link.address == other.config.own_address)

    def put(self, keys: Sequence[PageKey]) -> None:
        assert put_store(self.store, keys) == [CommitOutcome.COMMITTED] * len(keys)

    def index(self, other: Node) -> PeerIndex:
        """What this node knows of another's pages."""
        index = self.link(other).index(self.remote.page_bytes)
        assert index is not None
        return index

    def pull(self, key: PageKey, deadline_s: float = WAIT_S) -> Pull:
        """A pull of one page, submitted."""
        target = self.store.host.reserve(1)
        assert len(target) == 1, "the test's host is full"
        deadline = self.clock.monotonic() + deadline_s
        pull = Pull(key, OWNER, deadline, target, lambda _: None)
        assert self.remote.submit([pull]) == 1
        return pull

    def check(self) -> None:
        """Every invariant. Those of a store hold when nobody is just giving slots back to it,
        which another node's copies may do at any time: they get a moment."""
        failure: list[AssertionError] = []

        def holds() -> bool:
            failure.clear()
            try:
                self.store.check()
            except AssertionError as error:
                failure.append(error)
            return not failure

        until(holds, lambda: failure)
        self.pool.check()

    def stop(self) -> None:
        """Close pool and store, as a daemon does."""
        if not self.stopped:
            self.stopped = True
            assert self.pool.close(WAIT_S)
            self.store.close()


@dataclass
class Nodes:
    """A test's pool. Closed with the block it is made in; checked unless the test failed."""

    nodes: list[Node] = field(default_factory=list)

    def __getitem__(self, index: int) -> Node:
        return self.nodes[index]

    def await_live(self) -> None:
        """Wait until every node sees all the others live."""
        running = [node for node in self.nodes if not node.stopped]
        until(
            lambda: all(
                node.link(other).live for node in running for other in running if other is not node
            ),
            lambda: [link.problem for node in running for link in node.pool.links()],
        )

    def await_known(self, keys: Sequence[PageKey], *numbers: int) -> None:
        """Wait until these nodes (none: all) know where `keys` are, elsewhere or at home."""
        for node in [self.nodes[number] for number in numbers] or self.nodes:
            until(
                lambda node=node: all(node.store.lookup(keys)),  # type: ignore[misc]
                lambda node=node: (node.name, node.store.lookup(keys)),  # type: ignore[misc]
            )

    def check(self) -> None:
        for node in self.nodes:
            if not node.stopped:
                node.check()


def start_node(
    address: Address,
    others: Sequence[Address],
    *,
    folder: Path | None = None,
    host_pages: int = HOST_PAGES,
    nvme_pages: int = 0,
    epoch: Path | None = None,
    arena: Path | None = None,
    clock: Clock | None = None,
    open_class: Callable[[int, float], bool] | None = None,
    membership: Membership | None = None,
    key: bytes = KEY,
    page_bytes: int = PAGE_BYTES,
    **changes: Any,
) -> Node:
    """A node that runs. `changes` go over its PoolConfig. `clock` is that of pool and store; the
    transport has the machine's."""
    clock = clock or SystemClock()
    settings: dict[str, Any] = {
        "heartbeat_s": 0.02,
        "suspect_s": 1.0,
        "connect_s": 1.0,
        "breaker_open_s": 0.5,
        "rebalance_bytes_per_s": 0,
        **changes,
    }
    config = PoolConfig(listen=address, members=tuple(others), key=key, **settings)
    gate = Gate(TcpTransport(key, limits=transport_limits(config)))
    members = membership or StaticMembership(config)
    pool = Pool(config, gate, members, Epoch(epoch, clock), clock, open_class)
    pool.start()
    nvme_bytes = NvmeTier.capacity_for(page_bytes, nvme_pages) if nvme_pages else 0
    store = TieredStore.open(
        StoreConfig(
            page_bytes=page_bytes,
            host_bytes=HostTier.capacity_for(page_bytes, host_pages),
            host_arena_path=arena,
            nvme_root=folder if nvme_pages else None,
            nvme_bytes=nvme_bytes,
            nvme_min_free_bytes=0,
        ),
        clock,
    )
    remote = pool.attach(page_bytes)
    store.attach_remote(remote)
    return Node(config, pool, gate, store, remote, clock)


@contextmanager
def running_nodes(
    count: int, each: Sequence[dict[str, Any]] = (), **changes: Any
) -> Iterator[Nodes]:
    """`count` nodes that see each other live, with start_node's arguments for all, and for `each`
    of them. Checked and closed at the end."""
    addresses = [free_address() for _ in range(count)]
    nodes = Nodes()
    try:
        for number, address in enumerate(addresses):
            others = [other for other in addresses if other != address]
            own = each[number] if number < len(each) else {}
            nodes.nodes.append(start_node(address, others, **{**changes, **own}))
        nodes.await_live()
        yield nodes
        nodes.check()
    finally:
        for node in nodes.nodes:
            node.gate.open.set()
        for node in nodes.nodes:
            if not node.stopped:
                node.pool.close(WAIT_S)
                node.store.close()


def until(condition: Callable[[], bool], otherwise: Callable[[], object]) -> None:
    """Wait for a condition that nothing tells of; `otherwise` says what is there instead."""
    deadline = time.monotonic() + WAIT_S
    pause = threading.Event()
    while not condition():
        assert time.monotonic() < deadline, otherwise()
        pause.wait(0.005)
