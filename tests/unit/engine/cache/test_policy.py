"""Eviction order of every policy, and the lazy queue under it."""

from __future__ import annotations

import random

import pytest

from tierkv.engine.cache.policy import (
    POLICIES,
    QUEUE_SLACK,
    EvictionQueue,
    QueueEntry,
    make_policy,
)
from tierkv.engine.cache.radix import RadixTree
from tierkv.storage.errors import ConfigError
from tierkv.storage.types import pack_tokens


def eviction_order(policy: str) -> list[int]:
    """Leaves 1 to 4 are inserted in order; 1 is hit twice, then 3 once; then all are evicted."""
    tree = RadixTree(policy=policy)
    for token, priority in ((1, 0), (2, 5), (3, 3), (4, 0)):
        tree.insert(pack_tokens([token]), [token], priority=priority)
    for token in (1, 1, 3):
        tree.match(pack_tokens([token]), touch=True)
        tree.check()
    order = []
    for _ in range(4):
        (run,) = tree.evict(1)
        order.append(int(run.pages[0]))
        tree.check()
    return order


@pytest.mark.parametrize(
    ("policy", "order"),
    [
        ("lru", [2, 4, 1, 3]),
        ("lfu", [2, 4, 3, 1]),
        ("fifo", [1, 2, 3, 4]),
        ("mru", [3, 1, 4, 2]),
        ("filo", [4, 3, 2, 1]),
        ("slru", [2, 4, 3, 1]),
        ("priority", [4, 1, 3, 2]),
    ],
)
def test_policy_order(policy: str, order: list[int]) -> None:
    assert eviction_order(policy) == order


def test_slru_protects_from_the_second_hit_on_and_is_lru_inside() -> None:
    orders = {}
    for policy in ("slru", "lfu"):
        tree = RadixTree(policy=policy)
        for token in (1, 2, 3):
            tree.insert(pack_tokens([token]), [token])
        for token in (1, 1, 1, 2, 2, 3):
            tree.match(pack_tokens([token]), touch=True)
        orders[policy] = [int(tree.evict(1)[0].pages[0]) for _ in range(3)]
    assert orders == {"slru": [3, 1, 2], "lfu": [3, 2, 1]}


def test_unknown_policy_lists_the_names() -> None:
    with pytest.raises(ConfigError) as caught:
        RadixTree(policy="belady")
    for name in (*POLICIES, "belady"):
        assert name in str(caught.value)
    assert "\n" not in str(caught.value)


def test_every_policy_is_found_by_its_own_name() -> None:
    assert {name: make_policy(name).name for name in POLICIES} == {name: name for name in POLICIES}
    assert set(POLICIES) == {"lru", "lfu", "fifo", "mru", "filo", "slru", "priority"}


class Leaf:
    """The least a queue needs to know of a node."""

    def __init__(self, created: int) -> None:
        self.created = self.last_access = created
        self.hit_count = self.priority = 0
        self.evictable = True
        self.queued: QueueEntry | None = None


def test_queue_drops_superseded_entries() -> None:
    queue: EvictionQueue[Leaf] = EvictionQueue(make_policy("mru"))
    leaf, cold = Leaf(0), Leaf(0)
    queue.offer(leaf)
    queue.offer(cold)
    for tick in range(1, 10 * QUEUE_SLACK):
        leaf.last_access = tick
        queue.offer(leaf)
        queue.check([leaf, cold])
    assert len(queue) <= QUEUE_SLACK + 4
    assert queue.pop() is leaf
    assert queue.pop() is cold
    assert queue.pop() is None
    assert len(queue) == 0


def test_queue_skips_what_cannot_be_evicted_and_takes_it_back() -> None:
    queue: EvictionQueue[Leaf] = EvictionQueue(make_policy("lru"))
    old, young = Leaf(1), Leaf(2)
    queue.offer(old)
    queue.offer(young)
    old.evictable = False
    assert queue.pop() is young
    assert queue.pop() is None
    old.evictable = True
    queue.offer(old)
    queue.check([old])
    assert queue.pop() is old


def test_queue_check_notices_a_leaf_it_would_miss() -> None:
    queue: EvictionQueue[Leaf] = EvictionQueue(make_policy("lru"))
    leaf = Leaf(5)
    with pytest.raises(AssertionError, match="not queued"):
        queue.check([leaf])
    queue.offer(leaf)
    leaf.last_access = 1
    with pytest.raises(AssertionError, match="later than"):
        queue.check([leaf])


@pytest.mark.parametrize("policy", list(POLICIES))
@pytest.mark.parametrize("seed", [1, 2])
def test_queue_order_is_that_of_a_full_sort(policy: str, seed: int) -> None:
    rng = random.Random(seed)
    queue: EvictionQueue[Leaf] = EvictionQueue(make_policy(policy))
    # Distinct ticks and priorities, so that the order is total.
    leaves = [Leaf(tick) for tick in range(100)]
    for leaf in leaves:
        queue.offer(leaf)
    for tick in range(100, 1000):
        leaf = rng.choice(leaves)
        leaf.last_access, leaf.hit_count = tick, leaf.hit_count + 1
        queue.offer(leaf)
    queue.check(leaves)
    expected = sorted(leaves, key=queue.policy.key)
    assert [queue.pop() for _ in leaves] == expected
