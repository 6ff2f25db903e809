"""The two worked examples of ARCHITECTURE.md, number for number."""

from __future__ import annotations

from tierkv.engine.cache.page_pool import PagePool
from tierkv.engine.cache.radix import RadixTree, path
from tierkv.storage.types import pack_tokens, unpack_tokens


def edges(tree: RadixTree, tokens: list[int]) -> list[list[int]]:
    """Token runs of the nodes on the path of a fully cached prefix."""
    match = tree.match(pack_tokens(tokens))
    assert match.token_count == len(tokens)
    assert match.node.end == len(tokens)
    return [unpack_tokens(node.edge) for node in path(match.node)]


def test_example_three_prompts_split_a_path_twice() -> None:
    tree = RadixTree(page_size=1)
    a, b, c = [101, 11, 12, 21, 22], [101, 11, 12, 31, 32], [101, 11, 99]

    first = tree.insert(pack_tokens(a), [0, 1, 2, 3, 4])
    tree.check()
    assert (first.existing_tokens, first.duplicates.tolist()) == (0, [])
    assert edges(tree, a) == [[101, 11, 12, 21, 22]]

    # B shares three tokens; its request computed into slots of its own: 5 6 7 | 8 9.
    second = tree.insert(pack_tokens(b), [5, 6, 7, 8, 9])
    tree.check()
    assert second.existing_tokens == 3
    assert second.duplicates.tolist() == [5, 6, 7]
    assert edges(tree, a) == [[101, 11, 12], [21, 22]]
    assert edges(tree, b) == [[101, 11, 12], [31, 32]]

    # C runs on A's slots 0 and 1 and brings one of its own: nothing is a duplicate.
    third = tree.insert(pack_tokens(c), [0, 1, 10])
    tree.check()
    assert third.existing_tokens == 2
    assert third.duplicates.tolist() == []
    assert edges(tree, a) == [[101, 11], [12], [21, 22]]
    assert edges(tree, b) == [[101, 11], [12], [31, 32]]
    assert edges(tree, c) == [[101, 11], [99]]

    # Shared slots were not copied: one slot a token, the first writer's.
    assert tree.match(pack_tokens(a)).pages.tolist() == [0, 1, 2, 3, 4]
    assert tree.match(pack_tokens(b)).pages.tolist() == [0, 1, 2, 8, 9]
    assert tree.match(pack_tokens(c)).pages.tolist() == [0, 1, 10]
    assert tree.total_tokens == 5 + 2 + 1
    assert sorted(tree.all_pages().tolist()) == [0, 1, 2, 3, 4, 8, 9, 10]


def test_example_shared_prefix_outlives_requests_and_makes_room() -> None:
    tree = RadixTree(page_size=1)
    pool = PagePool(num_pages=9, page_tokens=1)
    s = [900, 10, 11, 12]
    r1, r2 = [*s, 31, 32], [*s, 41, 42, 43]

    # S lies on p0..p3, unreferenced; somebody else uses p4 and p5; p6, p7 and p8 are free.
    slots = pool.allocate(4)
    assert slots is not None and slots.tolist() == [0, 1, 2, 3]
    tree.insert(pack_tokens(s), slots)
    other = pool.allocate(2)
    assert other is not None and other.tolist() == [4, 5]
    assert (tree.evictable_tokens, tree.protected_tokens) == (4, 0)

    # A match gives 4 and protects nothing.
    match = tree.match(pack_tokens(r1))
    assert match.token_count == 4
    assert match.pages.tolist() == [0, 1, 2, 3]
    assert (tree.evictable_tokens, tree.protected_tokens) == (4, 0)

    # A lock moves 4 tokens from evictable to protected along the path.
    held = tree.lock(match)
    assert (tree.evictable_tokens, tree.protected_tokens) == (0, 4)
    assert [node.ref_count for node in path(held.node)] == [1]
    tree.check()

    # R1 allocates only p6 and p7.
    own = pool.allocate(len(r1) - match.token_count, after=3)
    assert own is not None and own.tolist() == [6, 7]

    # The insert adds only [31, 32].
    result = tree.insert(pack_tokens(r1), [*match.pages, *own])
    assert (result.existing_tokens, result.duplicates.tolist()) == (4, [])
    assert edges(tree, r1) == [[900, 10, 11, 12], [31, 32]]
    longer = tree.lock(result.match)
    tree.unlock(held)
    assert (tree.evictable_tokens, tree.protected_tokens) == (0, 6)
    tree.check()

    # R1 ends: its tokens are evictable again, S stays resident.
    tree.unlock(longer)
    assert (tree.evictable_tokens, tree.protected_tokens) == (6, 0)
    assert tree.match(pack_tokens(s)).token_count == 4

    # R2 shares S and finds no room for three tokens of its own: [31, 32] goes, p6 and p7 return.
    held = tree.lock(tree.match(pack_tokens(r2)))
    assert held.token_count == 4
    assert pool.free_count == 1
    assert pool.allocate(3, after=3) is None
    evicted = tree.evict(3 - pool.free_count)
    assert [unpack_tokens(run.node.edge) for run in evicted] == [[31, 32]]
    assert [run.pages.tolist() for run in evicted] == [[6, 7]]
    assert unpack_tokens(evicted[0].path_tokens()) == r1
    pool.free(evicted[0].pages)
    assert pool.free_count == 3
    own = pool.allocate(3, after=3)
    assert own is not None and own.tolist() == [6, 7, 8]
    assert tree.match(pack_tokens(r1)).token_count == 4
    tree.unlock(held)
    tree.check()
    pool.check()
