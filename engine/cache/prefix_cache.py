"""The radix tree and the page pool as one thing: which pages are cached, private, copied or free.

Knows tokens, pages and their owners; not one byte of KV, and no tier below the GPU: what is to
happen to an evicted run is asked of `on_evict`. Called from the engine thread only.

Every page has exactly one owner, and this module is where it changes:

    owner            gets a page by                 gives it up by
    pool (free)      free, finished copy            allocate
    a request        allocate                       insert (to the tree), free
    the tree         insert                         evict
    a copy           evict, when on_evict takes it  the copy's end (to free)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from tierkv.engine.cache.node import Evicted, InsertResult, Match, NodeRef, PageArray
from tierkv.engine.cache.page_pool import PagePool
from tierkv.engine.cache.radix import RadixTree
from tierkv.storage.types import PackedTokens, PageKey

NO_PAGES: PageArray = np.empty(0, np.int32)

OnEvict = Callable[[Evicted], PageArray]
"""Shown each run that left the tree. May take pages of it into a copy, with pool.begin_copy(),
and returns those: the cache frees the others at once, the copy's end frees these."""


@dataclass(frozen=True, slots=True)
class PrefixCacheStats:
    """Sizes at one moment; tokens unless named otherwise."""

    pages_total: int
    pages_free: int
    pages_copying: int
    evictable_tokens: int
    protected_tokens: int


class PrefixCache:
    """Cached prefixes over one page pool. Not thread-safe."""

    def __init__(self, tree: RadixTree, pool: PagePool, on_evict: OnEvict | None = None) -> None:
        assert tree.page_size == pool.page_tokens, "the tree's page is the pool's page"
        self.tree = tree
        self.pool = pool
        self.page_tokens = pool.page_tokens
        self._on_evict = on_evict

    @property
    def available_pages(self) -> int:
        """Pages that are free or would be after evicting all that nobody holds."""
        return self.pool.free_count + self.tree.evictable_tokens // self.page_tokens

    def match(self, tokens: PackedTokens, extra_key: bytes) -> Match:
        """Longest cached prefix. Protects nothing and leaves no trace."""
        return self.tree.match(tokens, extra_key)

    def lock(self, match: Match) -> NodeRef:
        """Protect a matched prefix from eviction until unlock()."""
        return self.tree.lock(match)

    def unlock(self, hold: NodeRef) -> None:
        """End one lock(). Each hold ends once."""
        self.tree.unlock(hold)

    def touch(self, hold: NodeRef) -> None:
        """Count one use of a locked prefix, for the eviction policy."""
        self.tree.touch(hold.node)

    def allocate(self, count: int, after: int | None = None) -> PageArray | None:
        """Take `count` pages, evicting what nobody holds; None when even that is not enough now.

        None does not mean never: pages under copy come back when their copies end. `after` asks
        for the page that follows it, so that a sequence stays contiguous.
        """
        pages = self.pool.allocate(count, after)
        if pages is None and count <= self.available_pages:
            self.evict(count - self.pool.free_count)
            pages = self.pool.allocate(count, after)
        return pages

    def evict(self, page_count: int) -> int:
        """Evict runs of `page_count` pages in all, coldest first; return how many went."""
        evicted = 0
        for run in self.tree.evict(page_count * self.page_tokens):
            pages = run.pages
            evicted += len(pages)
            taken = self._on_evict(run) if self._on_evict else NO_PAGES
            self.free(pages[~np.isin(pages, taken)] if len(taken) else pages)
        return evicted

    def insert(
        self,
        tokens: PackedTokens,
        pages: PageArray,
        extra_key: bytes,
        page_keys: list[PageKey],
        *,
        boundary: int | None = None,
        priority: int = 0,
    ) -> InsertResult:
        """Give the tree a prefix of whole pages; pages it has already are freed at once.

        After it, the caller uses `result.match.pages`: all of them are the tree's. Lock before
        the next allocate, or they may be evicted.
        """
        result = self.tree.insert(
            tokens,
            pages,
            extra_key,
            boundary=boundary,
            priority=priority,
            page_keys=b"".join(page_keys),
        )
        if len(result.duplicates):
            self.pool.free(result.duplicates)
        return result

    def free(self, pages: PageArray) -> None:
        """Return pages to the pool; the caller owned them."""
        if len(pages):
            self.pool.free(pages)

    def stats(self) -> PrefixCacheStats:
        """Sizes now. O(1)."""
        return PrefixCacheStats(
            pages_total=self.pool.num_pages,
            pages_free=self.pool.free_count,
            pages_copying=self.pool.copying_count,
            evictable_tokens=self.tree.evictable_tokens,
            protected_tokens=self.tree.protected_tokens,
        )

    def check(self, private: PageArray) -> None:
        """Assert that every page has one owner. `private`: all pages requests hold. O(pages)."""
        self.tree.check()
        self.pool.check()
        cached = self.tree.all_pages()
        together = np.concatenate([cached, np.asarray(private, np.int32)])
        assert len(np.unique(together)) == len(together), "a page has two owners"
        used = self.pool.num_pages - self.pool.free_count - self.pool.copying_count
        owned = len(together) - self.pool.copying_among(together)
        assert used == owned, f"{used} pages in use, {owned} with an owner"
