"""Owners of pages: the pool, a request, the tree, a copy; and nobody twice."""

from __future__ import annotations

import numpy as np
import pytest

from tierkv.engine.cache.node import Evicted, PageArray
from tierkv.engine.cache.page_pool import PagePool, PagesInCopy
from tierkv.engine.cache.prefix_cache import NO_PAGES, PrefixCache
from tierkv.engine.cache.radix import RadixTree
from tierkv.storage.types import PackedTokens, PageKey, pack_tokens

NAMESPACE = b"n" * 32


def keys(count: int) -> list[PageKey]:
    return [PageKey(bytes([i]) * 32) for i in range(count)]


def tokens(*ids: int) -> PackedTokens:
    return pack_tokens(list(ids))


class Demotions:
    """Takes the first pages of each evicted run into a copy, as told."""

    def __init__(self, pool: PagePool, take: int) -> None:
        self.pool, self.take = pool, take
        self.copying: list[PagesInCopy] = []
        self.runs: list[Evicted] = []

    def __call__(self, run: Evicted) -> PageArray:
        self.runs.append(run)
        taken = run.pages[: self.take]
        if len(taken):
            self.copying.append(self.pool.begin_copy(taken))
        return taken


def cache_of(pages: int, take: int = 0) -> tuple[PrefixCache, Demotions]:
    pool = PagePool(pages, 2)
    demotions = Demotions(pool, take)
    return PrefixCache(RadixTree(2), pool, demotions), demotions


def test_insert_passes_pages_to_the_tree_and_frees_duplicates_at_once() -> None:
    cache, _ = cache_of(8)
    first = cache.allocate(3)
    second = cache.allocate(3)
    assert first is not None
    assert second is not None
    cache.check(np.concatenate([first, second]))
    cache.insert(tokens(1, 2, 3, 4, 5, 6), first, NAMESPACE, keys(3))
    cache.check(second)
    result = cache.insert(tokens(1, 2, 3, 4, 7, 8), second, NAMESPACE, keys(3))
    assert result.existing_tokens == 4
    assert result.match.pages.tolist() == [*first[:2].tolist(), int(second[2])]
    assert cache.pool.free_count == 4
    cache.check(NO_PAGES)


def test_allocate_evicts_cold_leaves_but_never_what_is_held() -> None:
    cache, demotions = cache_of(4)
    pages = cache.allocate(4)
    assert pages is not None
    cache.insert(tokens(1, 2, 3, 4), pages[:2], NAMESPACE, keys(2))
    cache.insert(tokens(5, 6, 7, 8), pages[2:], NAMESPACE, keys(2))
    hold = cache.lock(cache.match(tokens(1, 2, 3, 4), NAMESPACE))
    assert cache.allocate(3) is None
    assert demotions.runs == []
    fresh = cache.allocate(2)
    assert fresh is not None
    assert sorted(fresh.tolist()) == sorted(pages[2:].tolist())
    assert cache.allocate(1) is None
    cache.check(fresh)
    cache.unlock(hold)
    more = cache.allocate(2)
    assert more is not None
    cache.check(np.concatenate([fresh, more]))


def test_w2_pages_under_copy_come_back_only_when_the_copy_ends() -> None:
    cache, demotions = cache_of(4, take=1)
    pages = cache.allocate(4)
    assert pages is not None
    cache.insert(tokens(1, 2, 3, 4, 5, 6, 7, 8), pages, NAMESPACE, keys(4))
    assert cache.allocate(4) is None
    assert cache.pool.copying_count == 1
    assert cache.pool.free_count == 3
    assert demotions.runs[0].page_keys == b"".join(keys(4))
    cache.check(NO_PAGES)
    cache.pool.finish_copy(demotions.copying[0], free=True)
    assert cache.allocate(4) is not None


def test_namespaces_share_nothing() -> None:
    cache, _ = cache_of(4)
    pages = cache.allocate(2)
    assert pages is not None
    cache.insert(tokens(1, 2, 3, 4), pages, NAMESPACE, keys(2))
    assert cache.match(tokens(1, 2, 3, 4), b"m" * 32).token_count == 0
    assert cache.match(tokens(1, 2, 3, 4), NAMESPACE).token_count == 4


def test_check_finds_a_page_with_two_owners_and_a_lost_one() -> None:
    cache, _ = cache_of(4)
    pages = cache.allocate(2)
    assert pages is not None
    with pytest.raises(AssertionError, match="with an owner"):
        cache.check(NO_PAGES)
    cache.insert(tokens(1, 2, 3, 4), pages, NAMESPACE, keys(2))
    with pytest.raises(AssertionError, match="two owners"):
        cache.check(pages[:1])
