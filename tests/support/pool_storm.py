"""A pool in this process that many threads use while nodes stop, come back, stall and lie.

Owns the nodes, the threads and the random numbers. Every page's content follows from its key, so
whoever is handed one compares every byte, for as long as the lease is held. What the threads meet
that they must not is in `errors`. A seed decides what is done; the threads decide in which order.
"""

from __future__ import annotations

import gc
import random
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tests.support.pages import page_content, page_key, put_store
from tests.support.pool_nodes import (
    PAGE_BYTES,
    WAIT_S,
    Node,
    OffsetClock,
    free_address,
    start_node,
    until,
)
from tierkv.storage.errors import TierClosedError
from tierkv.storage.remote import POOL_OWNER
from tierkv.storage.types import TierName

UNIVERSE = 240
GRACE_S = 20.0
"""Past its deadline by so much, a request hangs: two cores, many threads."""


class Storm:
    """Nodes 0 and 1 have nvme. Node n keeps arena, nvme and epoch in its folder when it restarts;
    with a boot token of its own each time, as every transport has."""

    def __init__(self, folder: Path, seed: int, nodes: int = 4, threads: int = 6) -> None:
        self.errors: list[str] = []
        self.counts: Counter[str] = Counter()
        self._folder = folder
        self._rng = random.Random(seed)
        self._seed = seed
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self._addresses = [free_address() for _ in range(nodes)]
        self.nodes: list[Node] = [self._start(number) for number in range(nodes)]
        self._threads = [
            threading.Thread(target=self._work, args=(number,), name=f"test-work-{number}")
            for number in range(threads)
        ]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stopping.set()
        for node in self.nodes:
            node.gate.open.set()
        for thread in self._threads:
            thread.join(WAIT_S)
        for node in self.nodes:
            if not node.stopped:
                node.pool.close(WAIT_S)
                node.store.close()

    # --- what happens to the nodes --------------------------------------------------------

    def rage(self, seconds: float) -> None:
        """Do harm, one thing after the other, for so long or until an error."""
        acts = [self._restart, self._jump, self._stall, self._cut, self._lie, self._fence]
        until_s = time.monotonic() + seconds
        while time.monotonic() < until_s and not self.errors:
            act = self._rng.choice(acts)
            self.counts[act.__name__] += 1
            act(self._rng.randrange(len(self.nodes)))
            self._stopping.wait(self._rng.choice((0.0, 0.02, 0.1)))

    def calm(self) -> None:
        """End harm and load; wait until nothing is held any more, and check everything."""
        self._stopping.set()
        for thread in self._threads:
            thread.join(WAIT_S)
            assert not thread.is_alive(), f"{thread.name} hangs"
        assert not self.errors, self.errors[0]
        for node in self.nodes:
            node.gate.open.set()
            node.gate.change_answer = None
        until(self._all_live, lambda: [link.problem for n in self.nodes for link in n.pool.links()])
        for node in self.nodes:
            assert node.store.wait_quiet(WAIT_S), node.pool.status()
            clock = node.clock
            assert isinstance(clock, OffsetClock)
            clock.offset_s += 60.0
        until(self._all_live, lambda: [link.problem for n in self.nodes for link in n.pool.links()])
        for node in self.nodes:
            until(lambda node=node: not held(node), lambda node=node: held(node))  # type: ignore[misc]
            node.check()
            stats = node.remote.stats()
            assert stats.worker_restarts == 0, "a bug was survived"
            assert node.pool.status()["serving"]["errors"] == 0, "a bug was answered"

    def _all_live(self) -> bool:
        pairs = [(one, two) for one in self.nodes for two in self.nodes if one is not two]
        return all(one.link(two).live for one, two in pairs)

    def _restart(self, number: int) -> None:
        node = self.nodes[number]
        node.gate.open.set()
        if not node.pool.close(WAIT_S):
            self._note("a pool does not close")
        node.check()
        node.store.close()
        node.stopped = True
        self.nodes[number] = self._start(number)

    def _jump(self, number: int) -> None:
        clock = self.nodes[number].clock
        assert isinstance(clock, OffsetClock)
        clock.offset_s += self._rng.choice((0.5, 3.0, 3600.0))

    def _stall(self, number: int) -> None:
        with self.nodes[number].gate.stalled():
            self._stopping.wait(self._rng.choice((0.05, 0.3, 1.5)))

    def _cut(self, number: int) -> None:
        for peer in self.nodes[number].gate.peers[-3:]:
            peer.close()

    def _lie(self, number: int) -> None:
        """For a while, bits of some answers flip."""
        rng = random.Random(self._rng.random())

        def flip(payload: bytes, answer: bytes) -> bytes:
            if rng.random() < 0.7:
                return answer
            flipped = bytearray(answer)
            flipped[rng.randrange(len(flipped))] ^= 1 << rng.randrange(8)
            return bytes(flipped)

        gate = self.nodes[number].gate
        gate.change_answer = flip
        self._stopping.wait(0.1)
        gate.change_answer = None

    def _fence(self, number: int) -> None:
        pool = self.nodes[number].pool
        pool.fenced(pool.own_epoch, "a test")

    def _start(self, number: int) -> Node:
        folder = self._folder / f"n{number}"
        folder.mkdir(exist_ok=True)
        address = self._addresses[number]
        settings: dict[str, Any] = {
            "host_share": 0.5,
            "nvme_share": 0.5,
            "lease_s": 1.0,
            "transfer_s": 1.0,
            "store_s": 1.0,
            "batch_pages": 4,
            "hot_after": 3,
            "rebalance_bytes_per_s": 4 << 20,
            "suspect_s": 0.5,
            "breaker_open_s": 0.1,
        }
        return start_node(
            address,
            [other for other in self._addresses if other != address],
            folder=folder / "nvme",
            host_pages=48,
            nvme_pages=96 if number < 2 else 0,
            arena=folder / "arena",
            epoch=folder / "epoch",
            clock=OffsetClock(),
            **settings,
        )

    # --- load -----------------------------------------------------------------------------

    def _work(self, number: int) -> None:
        rng = random.Random(f"{self._seed}/{number}")
        acts: list[Callable[[Node, random.Random], None]] = [
            *(self._put, self._put, self._fetch, self._fetch, self._fetch, self._fetch),
            *(self._drop, self._trim, self._ask),
        ]
        while not self._stopping.is_set() and not self.errors:
            node = self.nodes[rng.randrange(len(self.nodes))]
            act = rng.choice(acts)
            try:
                act(node, rng)
            except TierClosedError:
                self._count("closed")
            except BaseException:  # noqa: BLE001
                # Whatever it is, the test that started this thread must hear of it.
                self._note(f"{act.__name__} on {node.name}: {traceback.format_exc()}")

    def _put(self, node: Node, rng: random.Random) -> None:
        numbers = [rng.randrange(UNIVERSE) for _ in range(rng.randint(1, 6))]
        put_store(node.store, [page_key(each) for each in dict.fromkeys(numbers)])
        self._count("put")

    def _fetch(self, node: Node, rng: random.Random) -> None:
        numbers = dict.fromkeys(rng.randrange(UNIVERSE) for _ in range(rng.randint(1, 6)))
        keys = [page_key(each) for each in numbers]
        deadline_s = rng.choice((0.0, 0.05, 0.5, 3.0))
        begun = time.monotonic()
        fetch = node.store.fetch(keys, deadline_s, owner=rng.choice((0, 7)))
        if rng.random() < 0.1:
            fetch.cancel()
            return
        with fetch.take(deadline_s) as lease:
            spent_s = time.monotonic() - begun
            assert spent_s < deadline_s + GRACE_S, f"{spent_s} s for a deadline of {deadline_s}"
            self._compare(lease.keys, lease.views)
            if rng.random() < 0.2:
                self._stopping.wait(0.02)
                self._compare(lease.keys, lease.views)
            for tier in lease.tiers:
                self._count(tier.value)

    def _compare(self, keys: Sequence[Any], views: Sequence[memoryview]) -> None:
        for key, view in zip(keys, views, strict=True):
            assert bytes(view) == page_content(key, PAGE_BYTES), f"wrong bytes under {key.hex()}"

    def _drop(self, node: Node, rng: random.Random) -> None:
        node.store.drop([page_key(rng.randrange(UNIVERSE)) for _ in range(8)], TierName.HOST)

    def _trim(self, node: Node, rng: random.Random) -> None:
        if rng.random() < 0.1:
            node.store.trim(rng.choice(list(tiers(node))), rng.randrange(40))

    def _ask(self, node: Node, rng: random.Random) -> None:
        node.store.lookup([page_key(rng.randrange(UNIVERSE)) for _ in range(32)])
        node.pool.status()
        node.store.stats()

    def _count(self, what: str) -> None:
        with self._lock:
            self.counts[what] += 1

    def _note(self, error: str) -> None:
        with self._lock:
            self.errors.append(error)


def tiers(node: Node) -> dict[TierName, Any]:
    """The tiers of a node's store."""
    return {tier.name: tier for tier in node.store.stats().tiers}


def held(node: Node) -> dict[str, int]:
    """What somebody still holds of a node; empty when nobody does."""
    host = tiers(node)[TierName.HOST]
    status = node.pool.status()
    found = {
        "leased": host.leased_pages,
        "reserved": host.reserved_pages,
        "quarantined": host.quarantined_pages,
        "lent": status["leases"]["pages"],
        "late": status["serving"]["late_pages"],
        "pulls": node.remote.stats().queued + node.remote.stats().running,
        "copies": node.remote.stats().pushes_queued,
    }
    return {what: count for what, count in found.items() if count}


def kept_for_others(node: Node) -> int:
    """Host pages of a node that it keeps for others."""
    return len(node.store.keys_of(POOL_OWNER, TierName.HOST))


def open_files() -> Counter[str]:
    """What this process has open: sockets as one, files by name.

    An arena is unmapped with its last view, and those of an error's frames go with a collection.
    """
    gc.collect()
    found: Counter[str] = Counter()
    for entry in Path("/proc/self/fd").iterdir():
        try:
            name = str(entry.readlink())
        except FileNotFoundError:
            # The one that reads this folder.
            continue
        found["socket" if name.startswith("socket:") else name] += 1
    return found


def pool_threads(besides: Collection[threading.Thread] = ()) -> list[str]:
    """Threads of ours that have not ended, besides those that were there before."""
    here = [thread for thread in threading.enumerate() if thread not in besides]
    return sorted(thread.name for thread in here if thread.name.startswith("tierkv"))
