"""The radix tree against a naive model: a dict from token prefixes to pages.

Hypothesis drives both through match, touch, insert, lock, unlock and evict over several extra
keys, page sizes and policies, and prints the steps that fail, shrunk. check() runs after each.
"""

from __future__ import annotations

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from tierkv.engine.cache.page_pool import PagePool
from tierkv.engine.cache.policy import POLICIES
from tierkv.engine.cache.radix import Match, NodeRef, RadixTree
from tierkv.storage.types import PackedTokens, pack_tokens, unpack_tokens

Prefix = tuple[bytes, tuple[int, ...]]
"""Extra key and all tokens up to a page's end."""

# Two symbols and short stretches make shared prefixes and divergence in mid-edge common.
STRETCHES = st.lists(st.tuples(st.integers(0, 1), st.integers(1, 5)), max_size=4)
EXTRA_KEYS = st.sampled_from([b"", b"", b"lora"])
BASES = st.integers(0, 10_000)
POOL_PAGES = 4096


def key_of(prefix: Prefix) -> bytes:
    """A stand-in for a page key: any 32 bytes that name the prefix."""
    return abs(hash(prefix)).to_bytes(32, "little")


class RadixMachine(RuleBasedStateMachine):
    @initialize(page_size=st.sampled_from([1, 2, 3, 16]), policy=st.sampled_from(list(POLICIES)))
    def start(self, page_size: int, policy: str) -> None:
        self.size = page_size
        self.tree = RadixTree(page_size, policy)
        self.pool = PagePool(POOL_PAGES, page_size)
        self.held: dict[Prefix, int] = {}
        self.handles: list[tuple[NodeRef, Prefix]] = []
        self.matches: list[tuple[Match, Prefix]] = []

    def tokens_of(
        self, extra: bytes, base: int, stretches: list[tuple[int, int]]
    ) -> tuple[int, ...]:
        """A cached prefix, or none, and stretches of one token each behind it.

        Half of them are in whole pages, so that large pages meet shared prefixes as well.
        """
        known = [()] + [tokens for key, tokens in self.held if key == extra]
        unit = self.size if base % 2 else 1
        more = [token for token, times in stretches for _ in range(times * unit)]
        return (*known[base % len(known)], *more)

    def prefixes(self, extra: bytes, tokens: tuple[int, ...]) -> list[Prefix]:
        """Every whole-page prefix, shortest first."""
        ends = range(self.size, len(tokens) + 1, self.size)
        return [(extra, tokens[:end]) for end in ends]

    def expected(self, extra: bytes, tokens: tuple[int, ...]) -> list[int]:
        pages: list[int] = []
        for prefix in self.prefixes(extra, tokens):
            if prefix not in self.held:
                break
            pages.append(self.held[prefix])
        return pages

    def protected(self) -> set[Prefix]:
        return {p for _, (extra, tokens) in self.handles for p in self.prefixes(extra, tokens)}

    @rule(base=BASES, stretches=STRETCHES, extra=EXTRA_KEYS, touch=st.booleans())
    def match(self, base: int, stretches: list[tuple[int, int]], extra: bytes, touch: bool) -> None:
        tokens = self.tokens_of(extra, base, stretches)
        nodes = len(list(self.tree.nodes()))
        match = self.tree.match(pack_tokens(tokens), extra, touch=touch)
        assert match.pages.tolist() == self.expected(extra, tokens)
        assert match.token_count == match.page_count * self.size == len(match.pages) * self.size
        assert len(list(self.tree.nodes())) == nodes, "a match must not split"
        self.matches = [*self.matches[-3:], (match, (extra, tokens[: match.token_count]))]

    @rule(base=BASES, stretches=STRETCHES, extra=EXTRA_KEYS, share=st.booleans(), data=st.data())
    def insert(
        self,
        base: int,
        stretches: list[tuple[int, int]],
        extra: bytes,
        share: bool,
        data: st.DataObject,
    ) -> None:
        tokens = self.tokens_of(extra, base, stretches)
        tokens = tokens[: len(tokens) // self.size * self.size]
        known = self.expected(extra, tokens)
        fresh = self.pool.allocate(len(tokens) // self.size - (len(known) if share else 0))
        assert fresh is not None
        pages = np.concatenate([np.array(known if share else [], np.int32), fresh])
        prefixes = self.prefixes(extra, tokens)
        boundary = data.draw(st.none() | st.integers(0, len(tokens)))
        result = self.tree.insert(
            pack_tokens(tokens),
            pages,
            extra,
            boundary=boundary,
            priority=data.draw(st.integers(0, 2)),
            page_keys=b"".join(map(key_of, prefixes)),
        )
        assert result.existing_tokens == len(known) * self.size
        assert result.duplicates.tolist() == ([] if share else pages[: len(known)].tolist())
        self.pool.free(result.duplicates)
        for prefix, page in zip(prefixes[len(known) :], pages[len(known) :], strict=True):
            self.held[prefix] = int(page)
        assert result.match.token_count == len(tokens)
        assert result.match.pages.tolist() == self.expected(extra, tokens)
        self.matches = [*self.matches[-3:], (result.match, (extra, tokens))]

    @precondition(lambda self: self.matches)
    @rule(data=st.data())
    def lock(self, data: st.DataObject) -> None:
        """Lock any recent match, also one that splits have moved since."""
        match, prefix = data.draw(st.sampled_from(self.matches))
        if match.node.evicted:
            return
        handle = self.tree.lock(match)
        self.handles.append((handle, prefix))
        assert handle.token_count == len(prefix[1])

    @precondition(lambda self: self.held)
    @rule(base=BASES)
    def lock_cached(self, base: int) -> None:
        """Lock any cached prefix, most of which end inside a node."""
        extra, tokens = list(self.held)[base % len(self.held)]
        self.handles.append(
            (self.tree.lock(self.tree.match(pack_tokens(tokens), extra)), (extra, tokens))
        )

    @precondition(lambda self: self.handles)
    @rule(data=st.data())
    def unlock(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.handles) - 1))
        handle, _ = self.handles.pop(index)
        self.tree.unlock(handle)

    @rule(wanted=st.integers(0, 12), partial=st.booleans())
    def evict(self, wanted: int, partial: bool) -> None:
        before = self.tree.evictable_tokens
        protected = self.protected()
        evicted = self.tree.evict(wanted, partial=partial)
        count = sum(run.token_count for run in evicted)
        if partial:
            assert count == min(before, -(-wanted // self.size) * self.size)
        else:
            assert min(before, wanted) <= count <= before
        for run in evicted:
            tokens = tuple(unpack_tokens(run.path_tokens()))
            prefixes = self.prefixes(run.extra_key, tokens)[run.prefix_tokens // self.size :]
            assert run.page_keys == b"".join(map(key_of, prefixes))
            for prefix, page in zip(prefixes, run.pages, strict=True):
                assert prefix not in protected
                assert self.held.pop(prefix) == page
            self.pool.free(run.pages)

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "tree"):
            return
        self.tree.check()
        self.pool.check()
        assert self.tree.total_tokens == len(self.held) * self.size
        assert self.tree.protected_tokens == len(self.protected()) * self.size
        assert self.pool.used_count == len(self.held), "a page leaked or is held twice"
        for extra, tokens in self.held:
            assert tokens[: -self.size] == () or (extra, tokens[: -self.size]) in self.held
        for handle, prefix in self.handles:
            assert handle.pages.tolist() == self.expected(*prefix)
            assert len(handle.pages) * self.size == len(prefix[1])

    def teardown(self) -> None:
        if not hasattr(self, "tree"):
            return
        for handle, _ in self.handles:
            self.tree.unlock(handle)
        assert self.tree.protected_tokens == 0
        self.pool.free(self.tree.reset())
        assert self.pool.free_count == POOL_PAGES
        self.tree.check()


TestRadixModel = RadixMachine.TestCase
TestRadixModel.settings = settings(
    max_examples=250,
    stateful_step_count=40,
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)


def test_page_prefix_of_any_bytes_is_what_a_linear_scan_finds() -> None:
    """The bisection for the point of divergence, at every position of an edge."""
    for size in (1, 2, 7, 64):
        tree = RadixTree(size)
        tokens = list(range(size * 9))
        tree.insert(pack_tokens(tokens), list(range(9)))
        for at in range(len(tokens)):
            other = PackedTokens(pack_tokens([*tokens[:at], 99999, *tokens[at + 1 :]]))
            assert tree.match(other).token_count == at // size * size
            assert tree.match(pack_tokens(tokens[:at])).token_count == at // size * size
        tree.check()
