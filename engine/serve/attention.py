"""Attention over paged K and V: what the model asks for, and the choice of who does it.

Owns no state between forwards. A plan is made once per forward from the batch's page tables and
used by every layer. attention_cpu.py reads the pool in place; attention_gather.py gathers pages
first and runs anywhere torch does, and is what CUDA uses.

A plan reads exactly the slots of each sequence's context, never a page or a tail beyond it.
"""

from __future__ import annotations

from typing import Protocol

import torch

from tierkv.engine.serve.attention_cpu import CpuAttention
from tierkv.engine.serve.attention_gather import GatherAttention
from tierkv.engine.serve.batch import ForwardBatch
from tierkv.engine.serve.kv_pool import KVPool


class AttentionPlan(Protocol):
    """Attention of one batch over one pool."""

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        """Causal attention of the new tokens over their contexts, grouped-query.

        `query` is [n, heads, head_dim], `key` and `value` [n, kv_heads, head_dim], rotated; K
        and V are in the pool already as well. Returns a tensor [n, heads * head_dim]. Scale is
        1 / sqrt(head_dim).
        """
        ...


def plan_attention(batch: ForwardBatch, pool: KVPool) -> AttentionPlan:
    """Choose the implementation for the pool's device. O(pages)."""
    assert batch.page_tokens == pool.page_tokens, "forward batch: built for another page size"
    if pool.kv.device.type == "cpu" and pool.kv.dtype == torch.float32:
        return CpuAttention(batch, pool)
    return GatherAttention(batch, pool)
