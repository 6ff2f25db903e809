"""Attention that gathers each group's pages and hands them to torch's own kernel.

Runs on any device and dtype; the way taken on CUDA. Sequences are grouped by number of new
tokens (all decodes are one group), padded to the longest context of the group and masked.
Padding repeats slots of the sequence's own context, so no other page is ever read: a masked NaN
would still poison the product with V.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from tierkv.engine.serve.batch import ForwardBatch, Int64Array, SequenceSpan
from tierkv.engine.serve.kv_pool import KVPool


@dataclass(frozen=True, slots=True)
class _Group:
    """Sequences with the same number of new tokens."""

    rows: torch.Tensor
    """[sequences * query_len], rows of the batch."""
    slots: torch.Tensor
    """[sequences * context], token slots."""
    mask: torch.Tensor
    """bool [sequences, 1, query_len, context], True where attention may look."""


class GatherAttention:
    """AttentionPlan by index_select and scaled_dot_product_attention."""

    def __init__(self, batch: ForwardBatch, pool: KVPool) -> None:
        self._pool = pool
        by_length: dict[int, list[SequenceSpan]] = {}
        for span in batch.sequences:
            by_length.setdefault(span.query_len, []).append(span)
        device = pool.kv.device
        self._groups = [_group(spans, pool.page_tokens, device) for spans in by_length.values()]

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        """See AttentionPlan. Costs one copy of every context's K and V, taken from the pool."""
        keys, values = self._pool.layer(layer)
        out = torch.empty_like(query)
        for group in self._groups:
            count, _, query_len, context = group.mask.shape
            q = query.index_select(0, group.rows).view(count, query_len, *query.shape[1:])
            k = keys.index_select(0, group.slots).view(count, context, *keys.shape[1:])
            v = values.index_select(0, group.slots).view(count, context, *values.shape[1:])
            done = F.scaled_dot_product_attention(
                q.transpose(1, 2),
                k.transpose(1, 2),
                v.transpose(1, 2),
                attn_mask=group.mask,
                enable_gqa=True,
            )
            out.index_copy_(0, group.rows, done.transpose(1, 2).flatten(0, 1))
        return out.flatten(1)


def _group(spans: list[SequenceSpan], page_tokens: int, device: torch.device) -> _Group:
    query_len = spans[0].query_len
    longest = max(span.context_len for span in spans)
    columns = np.arange(longest, dtype=np.int64)
    rows: list[Int64Array] = []
    slots: list[Int64Array] = []
    lengths: list[int] = []
    for span in spans:
        rows.append(np.arange(span.query_start, span.query_start + query_len, dtype=np.int64))
        at = np.minimum(columns, span.context_len - 1)
        slots.append(span.pages[at // page_tokens] * np.int64(page_tokens) + at % page_tokens)
        lengths.append(span.context_len)
    last = np.asarray(lengths)[:, None] - query_len + np.arange(query_len)[None, :]
    mask = torch.from_numpy(columns[None, None, :] <= last[:, :, None])
    return _Group(
        torch.from_numpy(np.concatenate(rows)).to(device),
        torch.from_numpy(np.concatenate(slots)).to(device),
        mask.unsqueeze(1).to(device),
    )
