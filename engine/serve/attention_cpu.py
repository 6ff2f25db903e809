"""Attention on the CPU in float32, reading K and V where they lie.

The allocator prefers ascending runs of pages, so a context is mostly one or a few runs of
consecutive slots: each is a view of the pool, read once for all query heads that share it.
Called through attention.plan_attention.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F

from tierkv.engine.serve.batch import ForwardBatch, SequenceSpan
from tierkv.engine.serve.kv_pool import KVPool


class CpuAttention:
    """AttentionPlan over views of the pool."""

    def __init__(self, batch: ForwardBatch, pool: KVPool) -> None:
        self._pool = pool
        self._spans = batch.sequences
        self._runs = [token_runs(span, pool.page_tokens) for span in batch.sequences]
        self._masks = [_mask(span) for span in batch.sequences]

    def attend(self, layer: int, query: torch.Tensor) -> torch.Tensor:
        """See AttentionPlan."""
        keys, values = self._pool.layer(layer)
        out = torch.empty_like(query)
        for span, runs, mask in zip(self._spans, self._runs, self._masks, strict=True):
            end = span.query_start + span.query_len
            done = F.scaled_dot_product_attention(
                query[span.query_start : end].transpose(0, 1).unsqueeze(0),
                _gather(keys, runs).transpose(0, 1).unsqueeze(0),
                _gather(values, runs).transpose(0, 1).unsqueeze(0),
                attn_mask=mask,
                enable_gqa=True,
            )
            out[span.query_start : end] = done[0].transpose(0, 1)
        return out.flatten(1)


def token_runs(span: SequenceSpan, page_tokens: int) -> list[tuple[int, int]]:
    """Half-open runs of consecutive token slots that make up the context, in token order."""
    pages = span.pages
    breaks = np.flatnonzero(np.diff(pages) != 1) + 1
    starts = np.concatenate(([0], breaks))
    ends = np.concatenate((breaks, [len(pages)]))
    runs = [
        (int(pages[a]) * page_tokens, (int(pages[b - 1]) + 1) * page_tokens)
        for a, b in zip(starts, ends, strict=True)
    ]
    surplus = len(pages) * page_tokens - span.context_len
    runs[-1] = (runs[-1][0], runs[-1][1] - surplus)
    return runs


def _gather(slots: torch.Tensor, runs: list[tuple[int, int]]) -> torch.Tensor:
    if len(runs) == 1:
        return slots[runs[0][0] : runs[0][1]]
    return torch.cat([slots[start:end] for start, end in runs])


def _mask(span: SequenceSpan) -> torch.Tensor | None:
    if span.query_len == 1:
        return None
    last = torch.arange(span.context_len - span.query_len, span.context_len)
    return torch.arange(span.context_len).unsqueeze(0) <= last.unsqueeze(1)
