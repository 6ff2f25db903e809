"""The radix tree, one behaviour a test; check() after each step."""

from __future__ import annotations

import numpy as np
import pytest

from tierkv.engine.cache.radix import (
    Evicted,
    NodeRef,
    RadixTree,
    TierSet,
    path,
    path_page_keys,
    path_pages,
    path_tokens,
)
from tierkv.storage.errors import ConfigError
from tierkv.storage.types import PackedTokens, pack_tokens, unpack_tokens


def packed(*ids: int) -> PackedTokens:
    return pack_tokens(ids)


def keys(*names: int) -> bytes:
    return b"".join(bytes([name]) * 32 for name in names)


@pytest.mark.parametrize("page_size", [0, 65, -1])
def test_page_size_out_of_range_names_the_range(page_size: int) -> None:
    with pytest.raises(ConfigError, match="1 to 64"):
        RadixTree(page_size)


def test_empty_tree_and_empty_tokens() -> None:
    tree = RadixTree(2)
    assert tree.match(packed(1, 2, 3)).token_count == 0
    assert tree.match(packed()).pages.tolist() == []
    result = tree.insert(packed(), [], b"lora")
    assert result.match.token_count == 0
    assert list(tree.nodes()) == []
    assert tree.evict(10) == []
    handle = tree.lock(result.match)
    assert tree.protected_tokens == 0
    tree.check()
    tree.unlock(handle)
    tree.check()


def test_match_counts_whole_pages_only() -> None:
    tree = RadixTree(4)
    tree.insert(packed(*range(8)), [70, 71])
    assert tree.match(packed(*range(8))).pages.tolist() == [70, 71]
    assert tree.match(packed(*range(7))).pages.tolist() == [70]
    assert tree.match(packed(*range(7), 99, 100)).token_count == 4
    assert tree.match(packed(0, 1, 2)).token_count == 0
    assert tree.match(packed(0, 1, 2, 99)).token_count == 0
    assert tree.match(packed(*range(11))).pages.tolist() == [70, 71]


def test_match_is_read_only_unless_it_touches() -> None:
    tree = RadixTree()
    node = tree.insert(packed(1, 2, 3), [0, 1, 2]).match.node
    seen = (node.last_access, node.hit_count, node.end)
    tree.match(packed(1, 2))
    assert (node.last_access, node.hit_count, node.end) == seen
    tree.match(packed(1, 2), touch=True)
    assert node.last_access > seen[0]
    assert node.hit_count == 1
    assert len(list(tree.nodes())) == 1
    tree.check()


def test_extra_keys_are_isolated_and_roots_are_freed() -> None:
    tree = RadixTree()
    tree.insert(packed(1, 2), [0, 1], b"a")
    tree.insert(packed(1, 2), [2, 3], b"b")
    tree.check()
    assert tree.match(packed(1, 2)).token_count == 0
    assert tree.match(packed(1, 2), b"a").pages.tolist() == [0, 1]
    assert tree.match(packed(1, 2), b"b").pages.tolist() == [2, 3]
    assert [run.extra_key for run in tree.evict(2)] == [b"a"]
    tree.check()
    assert tree.match(packed(1, 2), b"a").token_count == 0
    assert [node.extra_key for node in tree.nodes()] == [b"b"]
    assert list(tree.nodes(b"a")) == []


def test_insert_race_gives_duplicates_back_at_once() -> None:
    tree = RadixTree()
    tree.insert(packed(1, 2, 3), [0, 1, 2])
    # Two requests computed the same prompt; the second shares page 0 and has its own 8 and 9.
    result = tree.insert(packed(1, 2, 3, 4), [0, 8, 9, 10])
    assert result.existing_tokens == 3
    assert result.duplicates.tolist() == [8, 9]
    assert result.match.pages.tolist() == [0, 1, 2, 10]
    tree.check()


def test_insert_over_a_longer_prefix_changes_only_recency() -> None:
    tree = RadixTree()
    node = tree.insert(packed(1, 2, 3, 4), [0, 1, 2, 3]).match.node
    before = node.last_access
    result = tree.insert(packed(1, 2), [0, 1])
    assert result.existing_tokens == 2
    assert result.match.node is node
    assert result.match.pages.tolist() == [0, 1]
    assert node.last_access > before
    assert (node.end, node.hit_count, tree.total_tokens) == (4, 0, 4)
    tree.check()


def test_insert_does_not_refresh_the_half_it_diverges_from() -> None:
    tree = RadixTree()
    old = tree.insert(packed(1, 2, 3, 4), [0, 1, 2, 3]).match.node
    before = old.last_access
    new = tree.insert(packed(1, 2, 7), [0, 1, 4]).match.node
    assert unpack_tokens(PackedTokens(old.edge)) == [3, 4]
    assert old.last_access == before
    assert new.parent is not None and new.parent.last_access == new.last_access > before


@pytest.mark.parametrize("broken", ["tokens", "pages", "keys"])
def test_insert_asserts_whole_pages_and_matching_lengths(broken: str) -> None:
    tree = RadixTree(2)
    tokens = packed(1, 2, 3) if broken == "tokens" else packed(1, 2, 3, 4)
    pages = [0] if broken == "pages" else [0, 1]
    with pytest.raises(AssertionError):
        tree.insert(tokens, pages, page_keys=keys(1) if broken == "keys" else None)
    assert tree.total_tokens == 0
    tree.check()


def test_boundary_lets_generated_tokens_go_first() -> None:
    tree = RadixTree(2)
    leaf = tree.insert(packed(*range(8)), [0, 1, 2, 3], boundary=5).match.node
    assert [node.pages.tolist() for node in path(leaf)] == [[0, 1], [2, 3]]
    tree.check()
    assert [run.pages.tolist() for run in tree.evict(4, partial=False)] == [[2, 3]]
    assert tree.match(packed(*range(8))).token_count == 4
    tree.check()


@pytest.mark.parametrize("boundary", [0, 1, 3, 8, 20])
def test_boundary_outside_the_new_run_does_not_split(boundary: int) -> None:
    tree = RadixTree(2)
    tree.insert(packed(0, 1, 2, 3), [0, 1])
    leaf = tree.insert(packed(*range(8)), [0, 1, 2, 3], boundary=boundary).match.node
    assert [node.token_count for node in path(leaf)] == [4, 4]
    tree.check()


def test_lock_splits_at_the_match_and_protects_only_it() -> None:
    tree = RadixTree()
    tree.insert(packed(1, 2, 3, 4), [0, 1, 2, 3])
    handle = tree.lock(tree.match(packed(1, 2, 9)))
    tree.check()
    assert (tree.protected_tokens, tree.evictable_tokens) == (2, 2)
    assert handle.pages.tolist() == [0, 1]
    assert [run.pages.tolist() for run in tree.evict(100)] == [[2, 3]]
    assert tree.match(packed(1, 2, 3, 4)).token_count == 2
    tree.unlock(handle)
    tree.check()


def test_handle_covers_its_prefix_after_splits_above_and_below() -> None:
    tree = RadixTree()
    match = tree.insert(packed(1, 2, 3, 4), [0, 1, 2, 3]).match
    handle = tree.lock(match)
    tree.insert(packed(1, 9), [0, 4])
    tree.check()
    tree.insert(packed(1, 2, 3, 9), [0, 1, 2, 5])
    tree.check()
    assert handle.pages.tolist() == [0, 1, 2, 3]
    assert [node.ref_count for node in path(handle.node)] == [1, 1, 1]
    assert (tree.protected_tokens, tree.evictable_tokens) == (4, 2)
    tree.unlock(handle)
    tree.check()
    assert (tree.protected_tokens, tree.evictable_tokens) == (0, 6)


def test_lock_of_a_match_that_a_split_has_moved() -> None:
    tree = RadixTree()
    tree.insert(packed(1, 2, 3, 4), [0, 1, 2, 3])
    match = tree.match(packed(1, 2))
    tree.insert(packed(1, 2, 3, 9), [0, 1, 2, 4])
    assert match.pages.tolist() == [0, 1]
    handle = tree.lock(match)
    tree.check()
    assert handle.pages.tolist() == [0, 1]
    assert tree.protected_tokens == 2


def test_stale_match_is_refused() -> None:
    tree = RadixTree()
    tree.insert(packed(1, 2, 3, 4), [0, 1, 2, 3])
    match = tree.match(packed(1, 2, 3, 4))
    tree.evict(1)
    with pytest.raises(AssertionError, match="stale"):
        tree.lock(match)
    with pytest.raises(AssertionError, match="stale"):
        _ = match.pages
    tree.check()


def test_reference_counts_add_up_to_the_root() -> None:
    tree = RadixTree()
    tree.insert(packed(1, 2, 3), [0, 1, 2])
    tree.insert(packed(1, 2, 4), [0, 1, 3])
    one = tree.lock(tree.match(packed(1, 2, 3)))
    two = tree.lock(tree.match(packed(1, 2, 4)))
    three = tree.lock(tree.match(packed(1, 2, 4)))
    assert [node.ref_count for node in path(one.node)] == [3, 1]
    assert [node.ref_count for node in path(two.node)] == [3, 2]
    tree.check()
    for handle in (two, one, three):
        tree.unlock(handle)
        tree.check()
    assert (tree.protected_tokens, tree.handle_count) == (0, 0)


def test_l2_double_unlock_asserts_and_changes_nothing() -> None:
    tree = RadixTree()
    tree.insert(packed(1, 2), [0, 1])
    first = tree.lock(tree.match(packed(1, 2)))
    second = tree.lock(tree.match(packed(1, 2)))
    tree.unlock(first)
    with pytest.raises(AssertionError, match="not live"):
        tree.unlock(first)
    with pytest.raises(AssertionError, match="not live"):
        tree.unlock(NodeRef(second.node, 2))
    assert (second.node.ref_count, tree.protected_tokens) == (1, 2)
    tree.check()


def test_l2_check_notices_a_lost_reference() -> None:
    tree = RadixTree()
    handle = tree.lock(tree.insert(packed(1, 2), [0, 1]).match)
    handle.node.ref_count = 0
    with pytest.raises(AssertionError):
        tree.check()


def test_check_notices_a_page_held_twice() -> None:
    tree = RadixTree()
    tree.insert(packed(1, 2), [0, 1])
    tree.insert(packed(5), [1])
    with pytest.raises(AssertionError, match="held twice"):
        tree.check()


def test_evict_takes_leaves_then_their_parents() -> None:
    tree = RadixTree()
    tree.insert(packed(1, 2), [0, 1])
    tree.insert(packed(1, 2, 3), [0, 1, 2])
    tree.insert(packed(1, 2, 4), [0, 1, 3])
    assert tree.evictable_tokens == 4
    runs = tree.evict(100)
    assert [run.pages.tolist() for run in runs] == [[2], [3], [0, 1]]
    assert [unpack_tokens(run.path_tokens()) for run in runs] == [[1, 2, 3], [1, 2, 4], [1, 2]]
    assert tree.total_tokens == 0
    assert list(tree.nodes()) == []
    tree.check()


def test_evict_takes_only_the_tail_that_is_needed() -> None:
    tree = RadixTree(2)
    tree.insert(packed(*range(8)), [0, 1, 2, 3], page_keys=keys(0, 1, 2, 3))
    (run,) = tree.evict(3)
    assert run.pages.tolist() == [2, 3]
    assert run.page_keys == keys(2, 3)
    assert (run.prefix_tokens, run.token_count) == (4, 4)
    assert unpack_tokens(run.path_tokens()) == list(range(8))
    assert tree.match(packed(*range(8))).pages.tolist() == [0, 1]
    tree.check()
    (run,) = tree.evict(1, partial=False)
    assert run.pages.tolist() == [0, 1]
    tree.check()


def test_evicted_paths_stay_readable_while_their_ancestors_are_cut() -> None:
    tree = RadixTree()
    tree.insert(packed(1, 2, 3), [0, 1, 2])
    tree.insert(packed(1, 2, 3, 4, 5), [0, 1, 2, 3, 4])
    runs = tree.evict(3) + tree.evict(1)
    assert [unpack_tokens(run.path_tokens()) for run in runs] == [
        [1, 2, 3, 4, 5],
        [1, 2, 3],
        [1, 2],
    ]
    assert [run.pages.tolist() for run in runs] == [[3, 4], [2], [1]]
    tree.check()


def test_evict_never_takes_what_a_handle_covers() -> None:
    tree = RadixTree()
    tree.insert(packed(1, 2), [0, 1])
    handle = tree.lock(tree.insert(packed(1, 2, 3), [0, 1, 2]).match)
    tree.insert(packed(8), [5])
    assert [run.pages.tolist() for run in tree.evict(100)] == [[5]]
    assert tree.evict(100) == []
    tree.unlock(handle)
    assert sum(run.token_count for run in tree.evict(100)) == 3
    tree.check()


def test_evict_shows_each_run_with_its_metadata() -> None:
    tree = RadixTree()
    result = tree.insert(packed(1, 2), [0, 1], b"x", priority=7, page_keys=keys(1, 2))
    tree.set_tiers(result.match.node, TierSet.GPU | TierSet.HOST)
    tree.match(packed(1, 2), b"x", touch=True)
    seen: list[Evicted] = []
    assert tree.evict(5, on_evict=seen.append) == seen
    (run,) = seen
    assert (run.tiers, run.hit_count, run.priority) == (TierSet.HOST, 1, 7)
    assert (run.page_keys, run.extra_key, run.prefix_tokens) == (keys(1, 2), b"x", 0)


def test_page_keys_and_tiers_are_split_with_the_node() -> None:
    tree = RadixTree(2)
    node = tree.insert(packed(1, 2, 3, 4), [0, 1], page_keys=keys(1, 2)).match.node
    tree.set_tiers(node, TierSet.GPU | TierSet.NVME)
    leaf = tree.insert(packed(1, 2, 5, 6), [0, 2], page_keys=keys(1, 3)).match.node
    tree.check()
    upper = leaf.parent
    assert upper is not None and upper.page_keys == keys(1)
    assert upper.tiers == node.tiers == TierSet.GPU | TierSet.NVME
    assert leaf.tiers == TierSet.GPU
    assert path_page_keys(leaf) == keys(1, 3)
    assert path_page_keys(node) == keys(1, 2)
    assert path_pages(leaf).tolist() == [0, 2]
    assert unpack_tokens(path_tokens(leaf)) == [1, 2, 5, 6]


def test_page_keys_may_come_later() -> None:
    tree = RadixTree()
    node = tree.insert(packed(1, 2), [0, 1]).match.node
    assert path_page_keys(node) is None
    tree.set_page_keys(node, keys(1, 2))
    assert path_page_keys(node) == keys(1, 2)
    with pytest.raises(AssertionError):
        tree.set_page_keys(node, keys(1))


def test_priority_rises_along_the_path() -> None:
    tree = RadixTree(policy="priority")
    tree.insert(packed(1, 2), [0, 1], priority=1)
    leaf = tree.insert(packed(1, 2, 3), [0, 1, 2], priority=5).match.node
    tree.insert(packed(1, 2, 3), [0, 1, 2], priority=2)
    assert [node.priority for node in path(leaf)] == [5, 5]
    tree.check()


def test_reset_returns_every_page_and_refuses_live_handles() -> None:
    tree = RadixTree()
    handle = tree.lock(tree.insert(packed(1, 2), [0, 1]).match)
    tree.insert(packed(1, 3), [3, 2], b"x")
    with pytest.raises(AssertionError, match="1 live handles"):
        tree.reset()
    tree.unlock(handle)
    match = tree.match(packed(1, 2))
    tree.insert(packed(7), [9])
    assert sorted(tree.reset().tolist()) == [0, 1, 2, 3, 9]
    assert (tree.total_tokens, list(tree.nodes())) == (0, [])
    with pytest.raises(AssertionError, match="stale"):
        tree.lock(match)
    tree.check()


def test_pages_may_be_any_integer_sequence() -> None:
    tree = RadixTree()
    tree.insert(packed(1, 2), np.array([5, 6], np.int64))
    match = tree.match(packed(1, 2))
    assert match.pages.dtype == np.int32
    assert match.pages.tolist() == [5, 6]


def test_very_deep_chains_need_no_recursion() -> None:
    tree = RadixTree()
    depth = 1200
    for end in range(1, depth + 1):
        tree.insert(pack_tokens(range(end)), list(range(end)))
    handle = tree.lock(tree.match(pack_tokens(range(depth))))
    assert tree.protected_tokens == depth
    tree.check()
    tree.unlock(handle)
    assert len(tree.evict(depth)) == depth
    tree.check()
