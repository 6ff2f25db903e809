"""The radix tree: which token prefixes are on the compute device, and in which pages.

Owns the tree, its reference counts and the order of eviction. Does not own the pages: whoever
inserts hands them over, whoever evicts gets them back (engine/cache/page_pool.py counts them).
Knows neither page bytes nor I/O. Single-threaded: the engine's scheduler thread calls it, through
engine/cache/prefix_cache.py.

A match is at bottom a memory comparison: tokens come packed, edges are raw bytes, and the walk
compares a whole edge in one call. Only the last edge is searched for the point of divergence.

    primitive  recency  structure                                   cost
    match      no (*)   none                                        O(matched bytes), memcmp
    lock       no       splits the last node at the match's end     O(depth)
    unlock     no       none                                        O(depth)
    insert     yes      splits at divergence and at `boundary`      O(bytes)
    evict      no       removes leaves, splits a leaf's tail off    O(log n) a leaf, amortised
    (*) yes, and the hit is counted, with touch=True

Invariants, asserted by check(): edges are whole pages; siblings differ in their first page; no
page is held twice; a node's reference count is the number of live handles on it and below it;
evictable + protected == total tokens; every evictable leaf is queued; roots without children are
gone. Chains of single children are allowed: a boundary split makes them.

One file above 400 lines, because the five primitives share the split and the two token counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from tierkv.engine.cache.node import (
    NO_CHILDREN,
    PAGE_INDEX_BYTES,
    Evicted,
    InsertResult,
    Match,
    Node,
    NodeRef,
    PageArray,
    TierSet,
    ascend,
    check_node,
    check_refs,
    packed_path_pages,
    path,
    path_page_keys,
    path_pages,
    path_tokens,
)
from tierkv.engine.cache.policy import EvictionPolicy, EvictionQueue, make_policy
from tierkv.storage.errors import ConfigError
from tierkv.storage.types import KEY_BYTES, TOKEN_BYTES, PackedTokens

__all__ = [
    "Evicted",
    "InsertResult",
    "Match",
    "Node",
    "NodeRef",
    "RadixTree",
    "TierSet",
    "path",
    "path_page_keys",
    "path_pages",
    "path_tokens",
]

PAGE_SIZE_MAX = 64


class RadixTree:
    """Token-granular, path-compressed tree from prefixes to page indexes."""

    def __init__(self, page_size: int = 1, policy: EvictionPolicy | str = "lru") -> None:
        """`page_size` is tokens a page, 1 to 64; `policy` an instance or a name of policy.py.

        Raises ConfigError for values outside that.
        """
        if not 1 <= page_size <= PAGE_SIZE_MAX:
            raise ConfigError(
                f"radix tree: expected a page size of 1 to {PAGE_SIZE_MAX} tokens, "
                f"got {page_size}; change the page size"
            )
        self.page_size = page_size
        self.policy = make_policy(policy) if isinstance(policy, str) else policy
        self._page_bytes = page_size * TOKEN_BYTES
        self._roots: dict[bytes, Node] = {}
        self._nowhere = _make_root(b"")
        self._queue: EvictionQueue[Node] = EvictionQueue(self.policy)
        self._handles: set[NodeRef] = set()
        self._tick = 0
        self._evictable_tokens = 0
        self._protected_tokens = 0

    # --- sizes ---------------------------------------------------------------------------------

    @property
    def evictable_tokens(self) -> int:
        """Tokens that evict() could remove now."""
        return self._evictable_tokens

    @property
    def protected_tokens(self) -> int:
        """Tokens that at least one handle covers."""
        return self._protected_tokens

    @property
    def total_tokens(self) -> int:
        return self._evictable_tokens + self._protected_tokens

    @property
    def handle_count(self) -> int:
        """Handles given out by lock() and not yet unlocked."""
        return len(self._handles)

    # --- match ---------------------------------------------------------------------------------

    def match(self, tokens: PackedTokens, extra_key: bytes = b"", *, touch: bool = False) -> Match:
        """Longest prefix of `tokens` in the tree, in whole pages.

        Read-only: no split, no recency. touch=True refreshes recency and counts a hit on every
        node of the path. Reading Match.pages costs one copy of the page indexes.
        """
        root = self._roots.get(extra_key)
        if root is None:
            return Match(self._nowhere, 0, 0)
        node, offset = self._walk(root, tokens)
        if touch:
            self.touch(node)
        return Match(node, offset // TOKEN_BYTES, offset // self._page_bytes)

    def _walk(self, root: Node, tokens: bytes) -> tuple[Node, int]:
        """Deepest node that shares a page with `tokens`, and the bytes matched from the root."""
        width = self._page_bytes
        node = root
        offset = 0
        while True:
            child = node.children.get(tokens[offset : offset + width])
            if child is None:
                return node, offset
            node = child
            if not tokens.startswith(node.edge, offset):
                return node, offset + self._common_bytes(node.edge, tokens, offset)
            offset += len(node.edge)

    def _common_bytes(self, edge: bytes, tokens: bytes, offset: int) -> int:
        """Bytes that `edge` and tokens[offset:] share, in whole pages; the first page is known.

        Bisects with memcmp on halves that shrink: in all it reads the edge once.
        """
        width = self._page_bytes
        low, high = 1, min(len(edge), len(tokens) - offset) // width + 1
        while high - low > 1:
            middle = (low + high) // 2
            if tokens.startswith(edge[low * width : middle * width], offset + low * width):
                low = middle
            else:
                high = middle
        return low * width

    def touch(self, node: Node, hits: int = 1) -> None:
        """Refresh recency, and count hits, on `node` and its ancestors. O(depth).

        A whole node is touched even when a match ends inside it: to be exact, touch the node of
        the handle after lock().
        """
        self._tick += 1
        tick = self._tick
        for each in ascend(node):
            each.last_access = tick
            each.hit_count += hits
        if node.evictable:
            self._queue.offer(node)

    # --- lock and unlock -----------------------------------------------------------------------

    def lock(self, match: Match) -> NodeRef:
        """Protect the matched prefix from eviction, until unlock() of the handle returned.

        Splits the deepest node when the match ends inside it. A match of 0 tokens may be locked.
        """
        node, target = match.node, match.token_count
        assert not node.evicted, "stale match: its node was evicted, match again"
        assert target % self.page_size == 0 and target <= node.end, f"not of this tree: {match}"
        # A split since the match may have moved its end into an ancestor.
        while node.parent is not None and node.parent.end >= target:
            node = node.parent
        if node.end > target:
            node = self._split(node, target - node.start)
        for each in ascend(node):
            if each.ref_count == 0:
                self._protect(each.token_count)
            each.ref_count += 1
        handle = NodeRef(node, target)
        self._handles.add(handle)
        return handle

    def unlock(self, handle: NodeRef) -> None:
        """End a handle. Asserts that it is live: a second unlock is a bug of the caller."""
        assert handle in self._handles, f"unlock of a handle that is not live: {handle.node!r}"
        self._handles.remove(handle)
        for each in ascend(handle.node):
            each.ref_count -= 1
            if each.ref_count == 0:
                self._protect(-each.token_count)
        if handle.node.evictable:
            self._queue.offer(handle.node)

    def _protect(self, tokens: int) -> None:
        self._evictable_tokens -= tokens
        self._protected_tokens += tokens

    # --- insert --------------------------------------------------------------------------------

    def insert(
        self,
        tokens: PackedTokens,
        pages: PageArray | Sequence[int],
        extra_key: bytes = b"",
        boundary: int | None = None,
        priority: int = 0,
        page_keys: bytes | None = None,
    ) -> InsertResult:
        """Make `tokens` a path of the tree; it takes over the pages that are new to it.

        tokens: a whole number of pages. pages: one int32 index a page, for all of tokens; where
        the tree has the prefix already, its own pages stay and the caller's, when they differ,
        come back as duplicates. boundary: the prompt's length in tokens, rounded down to a page;
        a new run that crosses it becomes two nodes, so that generated tokens can go first.
        priority: raises that of every node on the path. page_keys: 32 bytes a page for all of
        tokens. Refreshes recency of the path; an existing prefix is not changed otherwise.
        Nothing new is protected: lock(result.match) does that.
        """
        packed = np.asarray(pages, dtype=np.int32).tobytes()
        page_count = len(tokens) // self._page_bytes
        assert len(tokens) == page_count * self._page_bytes, f"{len(tokens)} bytes: no whole pages"
        assert len(packed) == page_count * PAGE_INDEX_BYTES, f"{page_count} pages of tokens"
        assert page_keys is None or len(page_keys) == page_count * KEY_BYTES, "one key a page"
        node, offset = self._nowhere, 0
        if page_count:
            node = self._roots.get(extra_key) or self._add_root(extra_key)
            node, offset = self._walk(node, tokens)
        known = offset // self._page_bytes
        duplicates = _differing(packed, packed_path_pages(node), known)
        if node.end * TOKEN_BYTES > offset and offset < len(tokens):
            # Split before touching: the half that diverges was not used.
            node = self._split(node, offset // TOKEN_BYTES - node.start)
        self.touch(node, hits=0)
        if offset < len(tokens):
            node = self._grow(node, offset, boundary, tokens, packed, page_keys, priority)
        for each in ascend(node):
            each.priority = max(each.priority, priority)
        return InsertResult(
            Match(node, len(tokens) // TOKEN_BYTES, page_count), offset // TOKEN_BYTES, duplicates
        )

    def _grow(
        self,
        node: Node,
        offset: int,
        boundary: int | None,
        tokens: bytes,
        packed: bytes,
        page_keys: bytes | None,
        priority: int,
    ) -> Node:
        """Hang tokens[offset:] below `node`, which ends at `offset` bytes; return the new leaf."""
        cuts = [len(tokens)]
        if boundary is not None:
            cut = boundary // self.page_size * self._page_bytes
            if offset < cut < len(tokens):
                cuts = [cut, len(tokens)]
        for cut in cuts:
            first, last = offset // self._page_bytes, cut // self._page_bytes
            child = Node(
                node,
                tokens[offset:cut],
                packed[first * PAGE_INDEX_BYTES : last * PAGE_INDEX_BYTES],
                None if page_keys is None else page_keys[first * KEY_BYTES : last * KEY_BYTES],
                node.extra_key,
                self._tick,
                priority,
            )
            self._adopt(node, child)
            node, offset = child, cut
            self._evictable_tokens += child.token_count
        self._queue.offer(node)
        return node

    def _adopt(self, parent: Node, child: Node) -> None:
        if parent.children is NO_CHILDREN:
            parent.children = {}
        parent.children[child.edge[: self._page_bytes]] = child

    def _add_root(self, extra_key: bytes) -> Node:
        root = self._roots[extra_key] = _make_root(extra_key)
        return root

    def _split(self, node: Node, tokens: int) -> Node:
        """Cut `node` after its first `tokens` tokens; return the new upper half.

        The lower half stays the same object with the same end, so handles and matches on it
        still cover what they covered; every handle below also covers the upper half.
        """
        parent = node.parent
        assert parent is not None and 0 < tokens < node.token_count, f"cannot split {node!r}"
        upper = node.take_head(tokens, self.page_size)
        self._adopt(parent, upper)
        self._adopt(upper, node)
        return upper

    # --- evict ---------------------------------------------------------------------------------

    def evict(
        self,
        tokens_wanted: int,
        on_evict: Callable[[Evicted], None] | None = None,
        *,
        partial: bool = True,
    ) -> list[Evicted]:
        """Remove unreferenced leaves, coldest first, until `tokens_wanted` tokens have left.

        May return less when everything else is protected. partial: of the last leaf only the
        tail goes, so that no more than wanted (rounded up to a page) leaves, and the head, which
        more prompts can share, stays; False removes leaves whole. on_evict sees each run as it
        leaves and must not raise. The pages are the caller's: copy if wanted, then free.
        """
        evicted: list[Evicted] = []
        while tokens_wanted > 0 and (node := self._queue.pop()) is not None:
            kept = (node.token_count - tokens_wanted) // self.page_size * self.page_size
            if partial and kept > 0:
                self._split(node, kept)
            self._remove(node)
            tokens_wanted -= node.token_count
            evicted.append(record := Evicted(node))
            if on_evict is not None:
                on_evict(record)
        return evicted

    def _remove(self, node: Node) -> None:
        """Detach an evictable leaf. It keeps its parent, so that its path can still be read."""
        parent = node.parent
        assert parent is not None and node.evictable, f"not an evictable leaf: {node!r}"
        del parent.children[node.edge[: self._page_bytes]]
        if not parent.children:
            parent.children = NO_CHILDREN
            if parent.evictable:
                self._queue.offer(parent)
            elif parent.parent is None:
                del self._roots[parent.extra_key]
        node.evicted = True
        node.tiers &= ~TierSet.GPU
        self._evictable_tokens -= node.token_count

    def reset(self) -> PageArray:
        """Forget everything; the pages returned are the caller's. No handle may be live."""
        assert not self._handles, f"reset with {len(self._handles)} live handles"
        pages = self.all_pages()
        for node in self.nodes():
            node.evicted = True
            node.tiers &= ~TierSet.GPU
            node.queued = None
        self._roots = {}
        self._queue = EvictionQueue(self.policy)
        self._evictable_tokens = 0
        return pages

    # --- nodes ---------------------------------------------------------------------------------

    def nodes(self, extra_key: bytes | None = None) -> Iterator[Node]:
        """All nodes but the roots, parents first; of one extra key or, with None, of all.

        The tree must not change meanwhile. O(nodes).
        """
        if extra_key is None:
            stack = list(self._roots.values())
        else:
            stack = [self._roots[extra_key]] if extra_key in self._roots else []
        while stack:
            node = stack.pop()
            if node.parent is not None:
                yield node
            stack.extend(node.children.values())

    def all_pages(self) -> PageArray:
        """Every page the tree holds, in no particular order; int32, read-only. O(pages)."""
        return np.frombuffer(b"".join([node.packed_pages for node in self.nodes()]), np.int32)

    def set_tiers(self, node: Node, mask: TierSet) -> None:
        """Record which tiers hold replicas of all pages of `node`. A split copies the mask."""
        node.tiers = mask

    def set_page_keys(self, node: Node, page_keys: bytes) -> None:
        """Name the pages of `node`: 32 bytes a page."""
        assert len(page_keys) * PAGE_INDEX_BYTES == len(node.packed_pages) * KEY_BYTES
        node.page_keys = page_keys

    # --- check ---------------------------------------------------------------------------------

    def check(self) -> None:
        """Assert every invariant of the module docstring. O(tokens + nodes log nodes)."""
        assert not NO_CHILDREN, "the shared empty children were written to"
        assert not self._nowhere.children and self._nowhere.ref_count == 0
        for extra_key, root in self._roots.items():
            assert root.parent is None and root.extra_key == extra_key and root.end == 0
            assert root.children, f"root of {extra_key!r} has no children and was not freed"
        nodes = list(self.nodes())
        for node in nodes:
            assert 0 <= node.created <= node.last_access <= self._tick
            check_node(node, self.page_size)
        check_refs(nodes, self._handles)
        protected = sum(node.token_count for node in nodes if node.ref_count)
        total = sum(node.token_count for node in nodes)
        assert self._protected_tokens == protected, f"{self._protected_tokens} != {protected}"
        assert self._evictable_tokens == total - protected, f"{self.total_tokens} != {total}"
        pages = self.all_pages()
        assert np.unique(pages).size == pages.size, "a page is held twice"
        assert pages.size * self.page_size == total, f"{pages.size} pages for {total} tokens"
        self._queue.check(node for node in nodes if node.evictable)


def _make_root(extra_key: bytes) -> Node:
    return Node(None, b"", b"", None, extra_key, 0, 0)


def _differing(packed: bytes, held: bytes, page_count: int) -> PageArray:
    """Pages among the first `page_count` of `packed` that are not the same as in `held`."""
    cut = page_count * PAGE_INDEX_BYTES
    if packed.startswith(held if len(held) == cut else held[:cut]):
        return np.empty(0, np.int32)
    mine: PageArray = np.frombuffer(packed, np.int32, page_count)
    differing: PageArray = mine[mine != np.frombuffer(held, np.int32, page_count)]
    return differing
