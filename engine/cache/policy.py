"""Which leaf goes first: eviction policies, and the queue that keeps leaves in their order.

Owns the order only. A policy maps a node to a key, lowest evicted first, and does no I/O; the
queue keeps one live entry per node. Neither knows tokens, pages or tiers. Called by
engine/cache/radix.py.

Queue invariant: every evictable leaf has an entry whose key is at most the leaf's present key. So
a key that rose since (a touched leaf under lru) is corrected when its entry surfaces, and only a
key that fell (a touched leaf under mru) needs a push at once.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from typing import Any, Generic, Protocol, TypeVar

from tierkv.storage.errors import ConfigError

PolicyKey = tuple[int, ...]
QueueEntry = tuple[PolicyKey, int, Any]
"""Key, tie-breaking sequence number, node."""

QUEUE_SLACK = 64
"""Superseded entries that are never worth a rebuild."""


class Rankable(Protocol):
    """What a policy may look at. Ticks count operations of the tree, not time."""

    last_access: int
    created: int
    hit_count: int
    priority: int


class Candidate(Rankable, Protocol):
    """What the queue needs of a node."""

    queued: QueueEntry | None

    @property
    def evictable(self) -> bool: ...


class EvictionPolicy(Protocol):
    """Orders nodes: the one with the lowest key is evicted first."""

    name: str

    def key(self, node: Rankable) -> PolicyKey:
        """Present key of `node`. All keys of one policy have the same length. O(1)."""
        ...


class LruPolicy:
    """Least recently used first."""

    name = "lru"

    def key(self, node: Rankable) -> PolicyKey:
        return (node.last_access,)


class LfuPolicy:
    """Fewest hits first, then least recently used."""

    name = "lfu"

    def key(self, node: Rankable) -> PolicyKey:
        return (node.hit_count, node.last_access)


class FifoPolicy:
    """Oldest first, however often it was used."""

    name = "fifo"

    def key(self, node: Rankable) -> PolicyKey:
        return (node.created,)


class MruPolicy:
    """Most recently used first: for scans that are longer than the cache."""

    name = "mru"

    def key(self, node: Rankable) -> PolicyKey:
        return (-node.last_access,)


class FiloPolicy:
    """Youngest first: what came first stays."""

    name = "filo"

    def key(self, node: Rankable) -> PolicyKey:
        return (-node.created,)


class SlruPolicy:
    """Segmented: nodes hit at most once go before nodes hit more often; lru inside each."""

    name = "slru"
    protected_hits = 2
    """Hits from which a node is in the protected segment."""

    def key(self, node: Rankable) -> PolicyKey:
        return (int(node.hit_count >= self.protected_hits), node.last_access)


class PriorityPolicy:
    """Lowest priority first, then least recently used."""

    name = "priority"

    def key(self, node: Rankable) -> PolicyKey:
        return (node.priority, node.last_access)


POLICIES: dict[str, type[EvictionPolicy]] = {
    LruPolicy.name: LruPolicy,
    LfuPolicy.name: LfuPolicy,
    FifoPolicy.name: FifoPolicy,
    MruPolicy.name: MruPolicy,
    FiloPolicy.name: FiloPolicy,
    SlruPolicy.name: SlruPolicy,
    PriorityPolicy.name: PriorityPolicy,
}


def make_policy(name: str) -> EvictionPolicy:
    """A new policy by its name. Raises ConfigError, listing the names, for an unknown one."""
    try:
        return POLICIES[name]()
    except KeyError:
        raise ConfigError(
            f"eviction policy: expected one of {', '.join(POLICIES)}, got {name!r}; "
            "set the policy to one of these"
        ) from None


NodeT = TypeVar("NodeT", bound=Candidate)


class EvictionQueue(Generic[NodeT]):
    """Evictable leaves in a lazy heap, coldest first. Amortised O(log n) per leaf.

    Entries of nodes that were locked, grew children or left the tree stay until they surface.
    """

    __slots__ = ("_heap", "_live", "_sequence", "policy")

    def __init__(self, policy: EvictionPolicy) -> None:
        self.policy = policy
        self._heap: list[QueueEntry] = []
        self._live = 0
        self._sequence = 0

    def __len__(self) -> int:
        """Entries held, superseded ones included."""
        return len(self._heap)

    def offer(self, node: NodeT) -> None:
        """Make sure that the queue finds `node`, which is evictable now, at its present key."""
        key = self.policy.key(node)
        if node.queued is not None:
            if node.queued[0] <= key:
                return
            self._live -= 1
        node.queued = entry = self._entry(key, node)
        heapq.heappush(self._heap, entry)
        self._live += 1
        self._trim()

    def pop(self) -> NodeT | None:
        """Take out the coldest evictable leaf; None when there is none."""
        heap = self._heap
        while heap:
            entry = heap[0]
            node: NodeT = entry[2]
            if node.queued is not entry:
                heapq.heappop(heap)
            elif not node.evictable:
                heapq.heappop(heap)
                self._forget(node)
            elif (key := self.policy.key(node)) != entry[0]:
                node.queued = entry = self._entry(key, node)
                heapq.heapreplace(heap, entry)
            else:
                heapq.heappop(heap)
                self._forget(node)
                return node
        return None

    def check(self, leaves: Iterable[NodeT]) -> None:
        """Assert heap order, the counts, and that every one of `leaves` is found in time. O(n)."""
        heap = self._heap
        for index in range(1, len(heap)):
            assert heap[(index - 1) // 2][:2] <= heap[index][:2], f"heap order broken at {index}"
        live = {id(entry) for entry in heap if entry[2].queued is entry}
        assert len(live) == self._live, f"{len(live)} live entries, {self._live} counted"
        assert len(heap) <= 2 * len(live) + QUEUE_SLACK, f"{len(heap)} entries, {len(live)} live"
        for leaf in leaves:
            assert id(leaf.queued) in live, f"{leaf!r} is evictable and not queued"
            assert leaf.queued is not None and leaf.queued[0] <= self.policy.key(leaf), (
                f"{leaf!r} is queued at {leaf.queued}, later than {self.policy.key(leaf)}"
            )

    def _entry(self, key: PolicyKey, node: NodeT) -> QueueEntry:
        self._sequence += 1
        return (key, self._sequence, node)

    def _forget(self, node: NodeT) -> None:
        node.queued = None
        self._live -= 1
        self._trim()

    def _trim(self) -> None:
        """Drop superseded entries once they outnumber the live ones. Amortised O(1)."""
        heap = self._heap
        if len(heap) > 2 * self._live + QUEUE_SLACK:
            heap[:] = [entry for entry in heap if entry[2].queued is entry]
            heapq.heapify(heap)
