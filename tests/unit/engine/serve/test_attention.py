"""Paged attention against a dense softmax, with everything outside the contexts poisoned."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
import torch

from tests.support.tiny_models import LLAMA
from tierkv.engine.serve import attention_cpu
from tierkv.engine.serve.attention import AttentionPlan, plan_attention
from tierkv.engine.serve.attention_cpu import CpuAttention, flash_kernel, plain_kernel, token_runs
from tierkv.engine.serve.attention_gather import GatherAttention
from tierkv.engine.serve.batch import ForwardBatch, SequenceInput, build_batch
from tierkv.engine.serve.kv_pool import KVPool

KINDS = {"cpu": CpuAttention, "gather": GatherAttention}
HEADS, KV_HEADS, HEAD_DIM = LLAMA.num_heads, LLAMA.num_kv_heads, LLAMA.head_dim
LAYER = 1


def poisoned_pool(tokens: int, page_tokens: int, dtype: torch.dtype = torch.float32) -> KVPool:
    pool = KVPool(LLAMA, -(-tokens // page_tokens), page_tokens, dtype, torch.device("cpu"))
    pool.kv.fill_(float("nan"))
    return pool


def dense(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Causal attention of the last rows; query [n, heads, d], key and value [context, kv, d]."""
    n, context = query.shape[0], key.shape[0]
    key, value = (part.repeat_interleave(HEADS // KV_HEADS, dim=1) for part in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query, key) / math.sqrt(HEAD_DIM)
    later = torch.ones(n, context, dtype=torch.bool).triu(context - n + 1)
    weights = scores.masked_fill(later, -math.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, value).flatten(1)


def fill(
    pool: KVPool, batch: ForwardBatch, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Random query, key and value rows; contexts in the pool; the expected output."""
    query = torch.randn(len(batch), HEADS, HEAD_DIM, generator=generator) * 3
    key, value = torch.empty(2, len(batch), KV_HEADS, HEAD_DIM)
    keys, values = pool.layer(LAYER)
    expected = []
    for span in batch.sequences:
        at = np.arange(span.context_len)
        slots = torch.from_numpy(
            span.pages[at // pool.page_tokens].astype(np.int64) * pool.page_tokens
            + at % pool.page_tokens
        )
        k, v = torch.randn(2, span.context_len, KV_HEADS, HEAD_DIM, generator=generator)
        keys[slots], values[slots] = k, v
        rows = slice(span.query_start, span.query_start + span.query_len)
        key[rows], value[rows] = k[-span.query_len :], v[-span.query_len :]
        expected.append(dense(query[rows], k, v))
    return query, key, value, torch.cat(expected)


def batch_of(lengths: list[tuple[int, int]], page_tokens: int, order: list[int]) -> ForwardBatch:
    """Sequences of (query_len, context_len) over pages taken from `order`."""
    inputs = []
    for query_len, context_len in lengths:
        count = -(-context_len // page_tokens)
        pages, order = order[:count], order[count:]
        assert len(pages) == count
        inputs.append(SequenceInput([0] * query_len, context_len, pages))
    return build_batch(inputs, page_tokens)


@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("page_tokens", [1, 16, 64])
@pytest.mark.parametrize("scattered", [False, True])
@pytest.mark.parametrize(
    "lengths",
    [
        [(1, 1)],
        [(1, 257), (1, 3), (1, 64)],
        [(1, 1111)],
        [(1, 600), (1, 1030), (1, 513)],
        [(1, 512), (1, 520)],
        [(5, 5), (33, 70), (1, 40), (1, 41), (2, 300)],
        [(600, 600)],
        [(520, 800), (1, 700)],
    ],
    ids=str,
)
def test_equals_dense_attention_and_reads_only_contexts(
    kind: str, page_tokens: int, scattered: bool, lengths: list[tuple[int, int]]
) -> None:
    pool = poisoned_pool(4096, page_tokens)
    order = list(range(3, pool.num_pages))
    if scattered:
        random.Random(5).shuffle(order)
    batch = batch_of(lengths, page_tokens, order)
    query, key, value, expected = fill(pool, batch, torch.Generator().manual_seed(6))
    got = KINDS[kind](batch, pool).attend(LAYER, query, key, value)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("runs", [1, 2, 3, 4, 5, 9])
def test_runs_are_merged_or_gathered(runs: int) -> None:
    pool = poisoned_pool(2048, 16)
    pages = [page for index in range(runs) for page in range(index * 12, index * 12 + 9)]
    for query_len in (1, 40):
        context = len(pages) * 16 - 5
        batch = build_batch([SequenceInput([0] * query_len, context, pages)], 16)
        query, key, value, expected = fill(pool, batch, torch.Generator().manual_seed(runs))
        got = CpuAttention(batch, pool).attend(LAYER, query, key, value)
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=2e-5)


def test_plain_kernel_serves_where_the_private_one_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(attention_cpu, "_kernel", plain_kernel)
    pool = poisoned_pool(4096, 16)
    batch = batch_of([(1, 1111), (300, 350)], 16, list(range(pool.num_pages)))
    query, key, value, expected = fill(pool, batch, torch.Generator().manual_seed(8))
    got = CpuAttention(batch, pool).attend(LAYER, query, key, value)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=2e-5)


def test_kernel_choice_distrusts_a_kernel_that_disagrees(monkeypatch: pytest.MonkeyPatch) -> None:
    assert attention_cpu._choose_kernel() in (flash_kernel, plain_kernel)

    def wrong(*args: object) -> attention_cpu.Partial:
        out, sums = plain_kernel(*args)  # type: ignore[arg-type]
        return out, sums * 1.01

    monkeypatch.setattr(attention_cpu, "flash_kernel", wrong)
    assert attention_cpu._choose_kernel() is plain_kernel


def test_plan_follows_the_pool_dtype() -> None:
    plans: list[AttentionPlan] = []
    for dtype in (torch.float32, torch.bfloat16):
        pool = poisoned_pool(64, 16, dtype)
        plans.append(plan_attention(batch_of([(1, 20)], 16, [0, 1]), pool))
    assert isinstance(plans[0], CpuAttention)
    assert isinstance(plans[1], GatherAttention)


def test_token_runs_join_neighbouring_pages_and_end_at_the_context() -> None:
    pages = np.array([4, 5, 6, 2, 3, 9, 8], dtype=np.int32)
    assert token_runs(pages, 7 * 16 - 3, 16) == [(64, 112), (32, 64), (144, 160), (128, 141)]
    assert token_runs(pages, 33, 16) == [(64, 97)]
    assert token_runs(pages, 49, 16) == [(64, 112), (32, 33)]
