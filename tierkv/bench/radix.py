"""`tierkv bench radix`: the radix tree against a plain memory comparison of the same bytes.

Workload: prompts of 4096 tokens over 50 system prompts, 70 % of them exact repeats of an earlier
one, packed beforehand as a request packs its tokens once. They arrive in batches; a repeat refers
to an earlier batch, so a whole batch can be timed at once. Every prompt is an object of its own:
together they are larger than the processor's caches, so each is read from (nearly) cold memory.

The limit, timed batch by batch between the matches, is `a == b` on two bytes objects of the hit's
length: `a` is one object per request, `b` one per distinct prefix, like the tree's edges. Both
sides are timed as one loop over the batch, loop and call overhead included. A match counts with
its page indexes copied out (`match_us`) and, in other batches, without (`match_walk_us`, what a
caller pays that only wants the length).
"""

from __future__ import annotations

import gc
import random
import statistics
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from tierkv.bench.report import BenchReport
from tierkv.engine.cache.node import PageArray
from tierkv.engine.cache.radix import RadixTree
from tierkv.storage.types import TOKEN_BYTES, PackedTokens

SEED = 20261129
PROMPTS = 2000
PROMPT_TOKENS = 4096
SYSTEM_PROMPTS = 50
SYSTEM_TOKENS = 2304
REPEATS = 0.7
VOCABULARY = 49_152
BATCH = 20
EVICT_LEAVES = 1000
MEMORY_TOKENS = 1_000_000
SHORT_EDGE_TOKENS = 32
PAGE_SIZES = (1, 16)


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt, and the two sides of the comparison that its match costs at least."""

    tokens: PackedTokens
    hit_tokens: int
    left: bytes
    right: bytes


def run(quick: bool) -> BenchReport:
    """Measure at page sizes 1 (the figures without prefix) and 16. `quick`: one repetition."""
    repetitions = 1 if quick else 5
    report = BenchReport("radix")
    for page_size in PAGE_SIZES:
        prefix = "" if page_size == 1 else f"page{page_size}_"
        batches = _requests(page_size)
        taken: dict[str, list[float]] = {}
        for _ in range(repetitions):
            _replay(batches, page_size, taken)
        medians = {name: statistics.median(times) for name, times in taken.items()}
        for name in ("match_us", "match_walk_us", "insert_us"):
            report.results[prefix + name] = medians[name]
        report.limits[prefix + "memcmp_us"] = medians["memcmp_us"]
        for name in ("match", "match_walk"):
            ratio = medians[f"{name}_us"] / medians["memcmp_us"]
            report.ratios[f"{prefix}{name}_vs_memcmp"] = ratio
        evictions = _evictions(page_size, 500 * repetitions)
        report.results[prefix + "evict_us"] = statistics.median(evictions)
        report.results[prefix + "evict_mean_us"] = statistics.fmean(evictions)
        report.results[prefix + "tree_bytes_per_token"] = _bytes_per_token(
            page_size, PROMPT_TOKENS - SYSTEM_TOKENS
        )
        if page_size == 1:
            hits = [request.hit_tokens for batch in batches for request in batch]
            report.config["hit_tokens_mean"] = statistics.fmean(hits)
            report.results["short_edges_tree_bytes_per_token"] = _bytes_per_token(
                page_size, SHORT_EDGE_TOKENS
            )
    report.config |= {
        "page_sizes": list(PAGE_SIZES),
        "prompts": PROMPTS,
        "prompt_tokens": PROMPT_TOKENS,
        "system_prompts": SYSTEM_PROMPTS,
        "system_tokens": SYSTEM_TOKENS,
        "repeats": REPEATS,
        "batch": BATCH,
        "evict_leaves": EVICT_LEAVES,
        "memory_tokens": MEMORY_TOKENS,
        "short_edge_tokens": SHORT_EDGE_TOKENS,
        "repetitions": repetitions,
        "seed": SEED,
        "match": "with page indexes copied out; match_walk: without",
        "timing": "medians over batches, loop and call overhead included on both sides",
    }
    return report


class _Prompts:
    """Random prompts over shared system prompts, always new objects."""

    def __init__(self) -> None:
        self.random = random.Random(SEED)
        self._numpy = np.random.default_rng(SEED)
        self._systems = [self.tokens(SYSTEM_TOKENS) for _ in range(SYSTEM_PROMPTS)]

    def tokens(self, count: int) -> bytes:
        return self._numpy.integers(0, VOCABULARY, count).astype("<u4").tobytes()

    def new(self, own_tokens: int = PROMPT_TOKENS - SYSTEM_TOKENS) -> PackedTokens:
        return PackedTokens(self.random.choice(self._systems) + self.tokens(own_tokens))


def _requests(page_size: int) -> list[list[Request]]:
    """All requests in batches; a dry run finds how long each one's hit will be."""
    prompts = _Prompts()
    tree = RadixTree(page_size)
    pages = np.zeros(PROMPT_TOKENS // page_size, np.int32)
    distinct: list[PackedTokens] = []
    rights: dict[bytes, bytes] = {}
    batches: list[list[Request]] = []
    for _ in range(PROMPTS // BATCH):
        batch = []
        fresh = []
        for _ in range(BATCH):
            if distinct and prompts.random.random() < REPEATS:
                tokens = _copy(prompts.random.choice(distinct))
            else:
                tokens = prompts.new()
                fresh.append(tokens)
            hit = tree.match(tokens).token_count
            left = _copy(tokens[: hit * TOKEN_BYTES])
            right = rights.setdefault(left, _copy(left))
            batch.append(Request(tokens, hit, left, right))
        distinct += fresh
        for request in batch:
            tree.insert(request.tokens, pages)
        batches.append(batch)
    return batches


def _copy(data: bytes) -> PackedTokens:
    """The same bytes at another address."""
    return PackedTokens(bytes(bytearray(data)))


def _replay(batches: list[list[Request]], page_size: int, taken: dict[str, list[float]]) -> None:
    """One pass over all requests with a fresh tree; adds a sample of each kind per batch."""
    tree = RadixTree(page_size)
    page_count = PROMPT_TOKENS // page_size
    next_page = 0
    for index, batch in enumerate(batches):
        actions: list[tuple[str, Callable[[], None]]] = [
            ("match_us", partial(_match_all, tree, batch))
            if index % 2
            else ("match_walk_us", partial(_match_walk_all, tree, batch)),
            ("memcmp_us", partial(_compare_all, batch)),
        ]
        if index % 4 < 2:
            actions.reverse()
        for name, action in actions:
            taken.setdefault(name, []).append(_time_us(action) / len(batch))
        pages = []
        for request in batch:
            own = np.arange(next_page, next_page + page_count, dtype=np.int32)
            found = tree.match(request.tokens)
            assert found.token_count == request.hit_tokens
            own[: found.page_count] = found.pages
            next_page += page_count
            pages.append(own)
        elapsed = _time_us(partial(_insert_all, tree, batch, pages))
        taken.setdefault("insert_us", []).append(elapsed / len(batch))


def _match_all(tree: RadixTree, batch: list[Request]) -> None:
    match = tree.match
    for request in batch:
        match(request.tokens).pages  # noqa: B018 (reading the property is what is timed)


def _match_walk_all(tree: RadixTree, batch: list[Request]) -> None:
    match = tree.match
    for request in batch:
        match(request.tokens)


def _compare_all(batch: list[Request]) -> None:
    for request in batch:
        assert request.left == request.right


def _insert_all(tree: RadixTree, batch: list[Request], pages: list[PageArray]) -> None:
    insert = tree.insert
    for request, own in zip(batch, pages, strict=True):
        insert(request.tokens, own)


def _time_us(action: Callable[[], None]) -> float:
    start = time.perf_counter_ns()
    action()
    return (time.perf_counter_ns() - start) / 1e3


def _evictions(page_size: int, rounds: int) -> list[float]:
    """Microseconds of evicting one of EVICT_LEAVES leaves, each followed by a hit and a refill."""
    prompts = _Prompts()
    tree = RadixTree(page_size)
    pages = np.zeros(PROMPT_TOKENS // page_size, np.int32)
    # The longest-resident prompts first, as lru will take them.
    resident = [prompts.new() for _ in range(EVICT_LEAVES)]
    for tokens in resident:
        tree.insert(tokens, pages)
    times = []
    for _ in range(rounds):
        tree.match(prompts.random.choice(resident), touch=True)
        start = time.perf_counter_ns()
        (gone,) = tree.evict(1, partial=False)
        times.append((time.perf_counter_ns() - start) / 1e3)
        tree.insert(gone.path_tokens(), pages)
    return times


def _bytes_per_token(page_size: int, own_tokens: int) -> float:
    """Memory of a tree of a million tokens whose prompts add `own_tokens` to a system prompt."""
    prompts = _Prompts()
    owned = SYSTEM_PROMPTS * SYSTEM_TOKENS
    count = (MEMORY_TOKENS - owned) // own_tokens
    todo = [prompts.new(own_tokens // page_size * page_size) for _ in range(count)]
    pages = np.zeros((SYSTEM_TOKENS + own_tokens) // page_size, np.int32)
    gc.collect()
    tracemalloc.start()
    try:
        tree = RadixTree(page_size)
        for tokens in todo:
            tree.insert(tokens, pages)
        gc.collect()
        used, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    return used / tree.total_tokens
