"""The radix tree's node and the values the tree hands out.

Owns the shape of one node and how a path is read back; changes nothing in a tree (radix.py does).
Knows neither page bytes nor tensors: a page is an int32 index, a page key is 32 opaque bytes.

    one node, page size 2       parent ──► ... ──► root (one per extra key, empty edge, end 0)
    edge          b"t0 t1 t2 t3"   token ids, little-endian u32, a multiple of the page size
    packed_pages  b"p0 p1"         int32 page indexes, native order, one per page of the edge
    page_keys     b"k0 k1" | None  32 bytes a page
    end           tokens from the root to the end of this node

Invariants: a node's `end` never changes while it is in the tree (a split keeps the lower half as
the same object); an evicted node never changes again, so its path stays readable. Called by
engine/cache/radix.py and, for reading, by engine/cache/prefix_cache.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from enum import IntFlag
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tierkv.engine.cache.policy import QueueEntry
from tierkv.storage.types import KEY_BYTES, TOKEN_BYTES, PackedTokens

PageArray = npt.NDArray[np.int32]
"""Page indexes, one dimension."""

PAGE_INDEX_BYTES = 4


class TierSet(IntFlag):
    """Tiers known to hold a replica of every page of a node. A hint, never a proof."""

    NONE = 0
    GPU = 1
    HOST = 2
    NVME = 4
    REMOTE = 8


class Node:
    """One edge of the tree with what hangs below it. Made and changed by RadixTree only.

    Attributes are public for reading; `children` maps the first page of a child's edge to it.
    """

    __slots__ = (
        "children",
        "created",
        "edge",
        "end",
        "evicted",
        "extra_key",
        "hit_count",
        "last_access",
        "packed_pages",
        "page_keys",
        "parent",
        "priority",
        "queued",
        "ref_count",
        "tiers",
    )

    def __init__(
        self,
        parent: Node | None,
        edge: bytes,
        packed_pages: bytes,
        page_keys: bytes | None,
        extra_key: bytes,
        tick: int,
        priority: int,
    ) -> None:
        self.parent = parent
        self.children: dict[bytes, Node] = NO_CHILDREN
        self.edge = edge
        self.packed_pages = packed_pages
        self.page_keys = page_keys
        self.extra_key = extra_key
        self.end: int = 0 if parent is None else parent.end + len(edge) // TOKEN_BYTES
        self.ref_count = 0
        """Live handles on this node or below it."""
        self.last_access = tick
        self.created = tick
        self.hit_count = 0
        self.priority = priority
        self.tiers = TierSet.GPU
        self.queued: QueueEntry | None = None
        self.evicted = False

    @property
    def token_count(self) -> int:
        """Tokens on this node's own edge."""
        return len(self.edge) // TOKEN_BYTES

    @property
    def start(self) -> int:
        """Tokens before this node's edge."""
        return self.end - len(self.edge) // TOKEN_BYTES

    @property
    def pages(self) -> PageArray:
        """Page indexes of this node's own edge, read-only."""
        return np.frombuffer(self.packed_pages, np.int32)

    @property
    def evictable(self) -> bool:
        """True for a leaf in the tree that no handle covers."""
        return (
            self.ref_count == 0
            and not self.children
            and not self.evicted
            and self.parent is not None
        )

    def take_head(self, tokens: int, page_size: int) -> Node:
        """Cut the first `tokens` tokens off this edge; return them as a new node between.

        Links the node to its new parent; the child maps are the tree's to change. The head has
        the same handles: whatever covers this node covers it too.
        """
        assert self.parent is not None and 0 < tokens < self.token_count, f"cannot cut {self!r}"
        pages = tokens // page_size
        cut, page_cut, key_cut = tokens * TOKEN_BYTES, pages * PAGE_INDEX_BYTES, pages * KEY_BYTES
        head = Node(
            self.parent,
            self.edge[:cut],
            self.packed_pages[:page_cut],
            None if self.page_keys is None else self.page_keys[:key_cut],
            self.extra_key,
            self.last_access,
            self.priority,
        )
        head.created = self.created
        head.hit_count = self.hit_count
        head.ref_count = self.ref_count
        head.tiers = self.tiers
        self.parent = head
        self.edge = self.edge[cut:]
        self.packed_pages = self.packed_pages[page_cut:]
        if self.page_keys is not None:
            self.page_keys = self.page_keys[key_cut:]
        return head

    def __repr__(self) -> str:
        return f"Node([{self.start}, {self.end}) refs={self.ref_count} {self.tiers!r})"


NO_CHILDREN: dict[bytes, Node] = {}
"""Shared by all leaves and never written: an own empty dict each would cost 64 bytes a leaf."""


class Match(NamedTuple):
    """The longest cached prefix of some tokens. A value: it holds nothing in the tree.

    Stale once its node has been evicted; lock() and `pages` then assert. Splits keep it valid.
    """

    node: Node
    """Deepest node touched; its end may lie beyond token_count. A root when nothing matched."""
    token_count: int
    """A multiple of the page size."""
    page_count: int

    @property
    def pages(self) -> PageArray:
        """int32[page_count], read-only, in token order. O(page_count) copy."""
        assert not self.node.evicted, "stale match: its node was evicted, match again"
        return path_pages(self.node)[: self.page_count]


class NodeRef:
    """A handle that protects one prefix from eviction until RadixTree.unlock(). Single use."""

    __slots__ = ("node", "token_count")

    def __init__(self, node: Node, token_count: int) -> None:
        self.node = node
        """Ends exactly at token_count, for as long as the handle lives."""
        self.token_count = token_count

    @property
    def pages(self) -> PageArray:
        """Page indexes of the whole prefix, read-only. O(pages) copy."""
        return path_pages(self.node)


class InsertResult(NamedTuple):
    """What insert() did with the caller's pages."""

    match: Match
    """Covers all inserted tokens: give it to lock()."""
    existing_tokens: int
    """Prefix that the tree already held."""
    duplicates: PageArray
    """The caller's pages that the tree did not take because it has others for those tokens.

    Still the caller's: free them at once and use the tree's. All others are the tree's now."""


class Evicted(NamedTuple):
    """One run of pages that left the tree. The pages are the caller's to copy, then to free."""

    node: Node
    """Detached: it does not change any more, and its path stays readable."""

    @property
    def pages(self) -> PageArray:
        """int32 page indexes of the run, read-only."""
        return self.node.pages

    @property
    def token_count(self) -> int:
        return self.node.token_count

    @property
    def prefix_tokens(self) -> int:
        """Tokens before the run."""
        return self.node.start

    @property
    def page_keys(self) -> bytes | None:
        """32 bytes a page, or None when they were never given."""
        return self.node.page_keys

    @property
    def tiers(self) -> TierSet:
        """Where else replicas are known; the GPU is no longer among them."""
        return self.node.tiers

    @property
    def hit_count(self) -> int:
        return self.node.hit_count

    @property
    def priority(self) -> int:
        return self.node.priority

    @property
    def extra_key(self) -> bytes:
        return self.node.extra_key

    def path_tokens(self) -> PackedTokens:
        """All tokens from the root to the end of the run. O(their number)."""
        return path_tokens(self.node)


def ascend(node: Node) -> Iterator[Node]:
    """The node and its ancestors, deepest first, without the root."""
    while node.parent is not None:
        yield node
        node = node.parent


def path(node: Node) -> list[Node]:
    """Nodes from below the root down to `node`. O(depth)."""
    nodes = list(ascend(node))
    nodes.reverse()
    return nodes


def path_tokens(node: Node) -> PackedTokens:
    """All tokens from the root to the end of `node`. O(their number)."""
    return PackedTokens(b"".join([each.edge for each in path(node)]))


def path_pages(node: Node) -> PageArray:
    """Page indexes from the root to the end of `node`, int32, read-only. O(their number)."""
    return np.frombuffer(packed_path_pages(node), np.int32)


def packed_path_pages(node: Node) -> bytes:
    """path_pages() as raw native int32 bytes."""
    parts = []
    # Written out, not built on path(): this runs once per match.
    while (parent := node.parent) is not None:
        parts.append(node.packed_pages)
        node = parent
    parts.reverse()
    return b"".join(parts)


def path_page_keys(node: Node) -> bytes | None:
    """Page keys from the root to the end of `node`; None when a node on the path has none."""
    parts = []
    for each in path(node):
        if each.page_keys is None:
            return None
        parts.append(each.page_keys)
    return b"".join(parts)


def check_node(node: Node, page_size: int) -> None:
    """Assert what holds for one node of a tree and its link to the parent. O(1)."""
    parent = node.parent
    page_bytes = page_size * TOKEN_BYTES
    page_count = len(node.edge) // page_bytes
    assert parent is not None and not node.evicted, f"{node!r}: not in the tree"
    assert node.edge and len(node.edge) == page_count * page_bytes, f"{node!r}: no whole pages"
    assert len(node.packed_pages) == page_count * PAGE_INDEX_BYTES, f"{node!r}: {page_count} pages"
    assert node.page_keys is None or len(node.page_keys) == page_count * KEY_BYTES, f"{node!r}"
    assert node.end == parent.end + node.token_count, f"{node!r}: parent ends at {parent.end}"
    assert parent.children[node.edge[:page_bytes]] is node, f"{node!r}: not its parent's child"
    assert node.extra_key == parent.extra_key, f"{node!r}: extra keys mixed"
    assert node.tiers & TierSet.GPU, f"{node!r}: in the tree and not on the GPU"


def check_refs(nodes: list[Node], handles: Iterable[NodeRef]) -> None:
    """Assert that each node's references are the handles on and below it. O(nodes + handles).

    `nodes` are all nodes of a tree, parents first.
    """
    counts = dict.fromkeys(map(id, nodes), 0)
    for handle in handles:
        node = handle.node
        assert node.end == handle.token_count, f"{node!r}: handle covers {handle.token_count}"
        if node.parent is not None:
            assert id(node) in counts, f"{node!r}: handle on a node outside the tree"
            counts[id(node)] += 1
    for node in reversed(nodes):
        assert node.ref_count == counts[id(node)], f"{node!r}: {counts[id(node)]} handles"
        if node.parent is not None and node.parent.parent is not None:
            counts[id(node.parent)] += counts[id(node)]
