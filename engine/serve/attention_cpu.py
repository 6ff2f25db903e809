"""Attention on the CPU in float32, reading K and V where they lie.

The allocator prefers ascending runs of pages, so a context is mostly one or a few runs of
consecutive token slots. Each run is a view of the pool and is attended by itself; the partial
results are merged by their log-sum-exp, so no bias matrix and no copy of K and V is made. A
context in more than RUNS_MAX runs is gathered instead.

Who reads what, for a sequence with `past` cached tokens and `query_len` new ones:

    decode (query_len 1)   all context_len tokens from the pool; the query heads that share a
                           K/V head are the rows of one product, so K and V are read once
    prefill chunk          the past from the pool, unmasked; the chunk itself from the fresh
                           key and value rows, causal

Called through attention.plan_attention.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from tierkv.engine.serve.batch import ForwardBatch, Int32Array, SequenceSpan
from tierkv.engine.serve.kv_pool import KVPool

RUNS_MAX = 4
"""Merging one more run costs about as much as copying a few hundred tokens' K and V."""
SPLIT_TOKENS = 256
"""A decode's run is cut into parts of this many tokens up to twice as many, for all threads to
share and so that the heads of a part find its lines in the cache."""
CHUNK_BLOCK = 256
"""Rows of a prefill chunk attended at a time: what is later than a block is never computed."""

Partial = tuple[torch.Tensor, torch.Tensor]
"""Attention over part of a context, [parts, heads, rows, head_dim], and its log-sum-exp
[parts, heads, rows]. parts is 1 outside a cut run."""
Kernel = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, bool, torch.Tensor | None], Partial]


class CpuAttention:
    """AttentionPlan over views of the pool."""

    def __init__(self, batch: ForwardBatch, pool: KVPool) -> None:
        self._steps: list[_Decodes | _Chunk] = []
        for decode, group in itertools.groupby(batch.sequences, lambda s: s.query_len == 1):
            if decode:
                self._steps.append(_Decodes(list(group), pool))
            else:
                self._steps.extend(_Chunk(span, pool) for span in group)

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        """See AttentionPlan."""
        done = [step.attend(layer, query, key, value) for step in self._steps]
        return done[0] if len(done) == 1 else torch.cat(done)


class _Decodes:
    """Neighbouring sequences with one new token each."""

    def __init__(self, spans: list[SequenceSpan], pool: KVPool) -> None:
        self._start = spans[0].query_start
        self._end = self._start + len(spans)
        self._contexts = [_Context(span, span.context_len, pool, split=True) for span in spans]
        # Contexts of one run each, cut alike, are merged together instead of one by one.
        self._single = [c.runs[0] for c in self._contexts if len(c.runs) == 1]
        counts = {run.parts for run in self._single}
        alike = len(self._single) == len(self._contexts) and len(counts) == 1
        self._parts = counts.pop() if alike else None

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        heads, head_dim = query.shape[1:]
        kv_heads = key.shape[1]
        rows = query[self._start : self._end].view(-1, kv_heads, heads // kv_heads, head_dim)
        if self._parts is None:
            out = torch.cat(
                [
                    context.attend_row(layer, row)
                    for context, row in zip(self._contexts, torch.split(rows, 1), strict=True)
                ]
            )
        elif self._parts == 1:
            # The public operator costs less per call, and there is nothing to merge.
            out = torch.cat(
                [
                    F.scaled_dot_product_attention(row, run.keys[layer], run.values[layer])
                    for run, row in zip(self._single, torch.split(rows, 1), strict=True)
                ]
            )
        else:
            many = rows.unsqueeze(1).expand(-1, self._parts, -1, -1, -1).unbind(0)
            partials = [run.attend(layer, row) for run, row in zip(self._single, many, strict=True)]
            out = _merge(partials, self._parts)
        return out.view(-1, heads * head_dim)


class _Chunk:
    """Several new tokens of one sequence."""

    def __init__(self, span: SequenceSpan, pool: KVPool) -> None:
        self._start = span.query_start
        self._len = span.query_len
        past = span.context_len - span.query_len
        self._past = _Context(span, past, pool, split=False) if past else None

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        q, k, v = (
            rows[self._start : self._start + self._len].transpose(0, 1).unsqueeze(0)
            for rows in (query, key, value)
        )
        done = []
        for start in range(0, self._len, CHUNK_BLOCK):
            block = slice(start, min(start + CHUNK_BLOCK, self._len))
            rows = q[:, :, block]
            partial = _kernel(rows, k[:, :, block], v[:, :, block], True, None)
            if start:
                partial = _join(
                    partial, _kernel(rows, k[:, :, :start], v[:, :, :start], False, None)
                )
            if self._past is not None:
                for earlier in self._past.attend(layer, rows):
                    partial = _join(partial, earlier)
            done.append(partial[0][0].transpose(0, 1).flatten(1))
        return done[0] if len(done) == 1 else torch.cat(done)


class _Context:
    """The first `tokens` tokens of a sequence in the pool, as views or as a gather."""

    def __init__(self, span: SequenceSpan, tokens: int, pool: KVPool, split: bool) -> None:
        self._pool = pool
        self._tokens = tokens
        runs = token_runs(span.pages, tokens, pool.page_tokens)
        self._pages: torch.Tensor | None = None
        self.runs: list[_Run] = []
        if len(runs) > RUNS_MAX:
            count = -(-tokens // pool.page_tokens)
            self._pages = torch.from_numpy(span.pages[:count]).long()
        else:
            self.runs = [_Run(pool, start, end, split) for start, end in runs]

    def attend_row(self, layer: int, query: torch.Tensor) -> torch.Tensor:
        """Attention of one token, `query` [1, kv_heads, group, head_dim]; returns that shape."""
        partials = self.attend(layer, query)
        return _merge(partials, sum(len(out) for out, _ in partials))

    def attend(self, layer: int, query: torch.Tensor) -> list[Partial]:
        """Unmasked attention of `query` [1, heads, rows, head_dim], at least a partial a run."""
        if self._pages is None:
            return [run.attend(layer, query.expand(run.parts, -1, -1, -1)) for run in self.runs]
        gathered = self._pool.kv[layer].index_select(1, self._pages).flatten(1, 2)
        keys, values = gathered[:, : self._tokens].transpose(1, 2).unsqueeze(1)
        return [_kernel(query, keys, values, False, None)]


class _Run:
    """Token slots [start, end) as views of every layer, cut into equal parts for the threads.

    Parts must lie at equal distances to be one view, so all have the length of the longest and
    may overlap the next part's first tokens, which are masked.
    """

    def __init__(self, pool: KVPool, start: int, end: int, split: bool) -> None:
        layers, _, _, _, kv_heads, head_dim = pool.kv.shape
        length = end - start
        self.parts = max(1, length // SPLIT_TOKENS) if split else 1
        step = length // self.parts
        longest = length - step * (self.parts - 1)
        token = kv_heads * head_dim
        views = pool.kv.as_strided(
            (layers * 2, self.parts, kv_heads, longest, head_dim),
            (pool.num_pages * pool.page_tokens * token, step * token, head_dim, token, 1),
            pool.kv.storage_offset() + start * token,
        ).unbind(0)
        self.keys, self.values = views[::2], views[1::2]
        self._mask: torch.Tensor | None = None
        if longest > step:
            self._mask = torch.zeros((self.parts, 1, 1, longest))
            self._mask[:-1, ..., step:] = -math.inf

    def attend(self, layer: int, query: torch.Tensor) -> Partial:
        """Unmasked attention over each part; `query` [parts, heads, rows, head_dim]."""
        return _kernel(query, self.keys[layer], self.values[layer], False, self._mask)


def token_runs(pages: Int32Array, tokens: int, page_tokens: int) -> list[tuple[int, int]]:
    """Half-open runs of consecutive token slots that hold the first `tokens`, in token order."""
    pages = pages[: -(-tokens // page_tokens)]
    breaks = (np.flatnonzero(np.diff(pages) != 1) + 1).tolist()
    runs = [
        (int(pages[first]) * page_tokens, (int(pages[last - 1]) + 1) * page_tokens)
        for first, last in zip([0, *breaks], [*breaks, len(pages)], strict=True)
    ]
    surplus = len(pages) * page_tokens - tokens
    runs[-1] = (runs[-1][0], runs[-1][1] - surplus)
    return runs


def _merge(partials: list[Partial], parts: int) -> torch.Tensor:
    """Weigh every `parts` consecutive parts by their log-sum-exp.

    Returns [all parts / parts, heads, rows, head_dim].
    """
    outs = torch.cat([out for out, _ in partials]) if len(partials) > 1 else partials[0][0]
    if parts == 1:
        return outs.contiguous()
    sums = torch.cat([total for _, total in partials]) if len(partials) > 1 else partials[0][1]
    weights = sums.reshape(-1, parts, *sums.shape[1:]).softmax(1).unsqueeze_(-1)
    return (outs.reshape(-1, parts, *outs.shape[1:]) * weights).sum(1).contiguous()


def _join(one: Partial, other: Partial) -> Partial:
    """Attention over two disjoint parts of a context, weighed by their log-sum-exp."""
    share = torch.sigmoid(other[1] - one[1]).unsqueeze_(-1)
    return torch.lerp(one[0], other[0], share), torch.logaddexp(one[1], other[1])


def flash_kernel(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    causal: bool,
    mask: torch.Tensor | None,
) -> Partial:
    """torch's blocked CPU kernel. `mask` is added to the scores; see `plain_kernel`."""
    kernel: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    partial: Partial = kernel(query, key, value, 0.0, causal, attn_mask=mask)
    return partial


def plain_kernel(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    causal: bool,
    mask: torch.Tensor | None,
) -> Partial:
    """The same in public operators, for a torch without the private kernel.

    `query` [parts, heads, rows, head_dim]; `key`, `value` [parts, kv_heads, tokens, head_dim].
    """
    group = query.shape[1] // key.shape[1]
    key, value = (part.repeat_interleave(group, dim=1) for part in (key, value))
    scores = query @ key.transpose(-1, -2) / math.sqrt(query.shape[-1])
    if causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(later, -math.inf)
    if mask is not None:
        scores = scores + mask
    sums = scores.logsumexp(-1)
    return (scores - sums.unsqueeze(-1)).exp() @ value, sums


def _choose_kernel() -> Kernel:
    """Take the private kernel only if it is there and agrees with the plain one."""
    if not hasattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu"):
        return plain_kernel
    generator = torch.Generator().manual_seed(0)
    query = torch.randn((2, 6, 5, 8), generator=generator)
    key, value = torch.randn((2, 2, 2, 5, 8), generator=generator)
    mask = torch.zeros((2, 1, 1, 5))
    mask[0, ..., 4:] = -math.inf
    for causal, bias in ((True, None), (False, mask)):
        got = flash_kernel(query, key, value, causal, bias)
        expected = plain_kernel(query, key, value, causal, bias)
        if not all(
            a.shape == b.shape and torch.allclose(a, b, rtol=1e-4, atol=1e-5)
            for a, b in zip(got, expected, strict=True)
        ):
            return plain_kernel
    return flash_kernel


_kernel = _choose_kernel()
