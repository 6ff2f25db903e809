"""What one forward pass is asked to compute: new tokens, where their KV goes, which rows count.

Frozen values in numpy, built by the scheduler and read by the model and the attention. Knows no
tensors, no requests and no radix tree. Decode (one new token) and prefill chunks (many) of any
number of sequences may be mixed.

Invariants, held by `build_batch`:
  - sequences follow each other: query_start of one is query_end of the one before;
  - a sequence's new tokens are the last `query_len` of its `context_len` tokens;
  - the page table covers the context: len(pages) * page_tokens >= context_len;
  - logit rows are ascending rows of the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Int64Array = NDArray[np.int64]
Int32Array = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class SequenceInput:
    """One sequence's share of a forward pass, as the scheduler hands it in."""

    token_ids: Sequence[int] | Int64Array
    """The new tokens, at least one."""
    context_len: int
    """KV length once the new tokens are written: cached tokens plus len(token_ids)."""
    pages: Sequence[int] | Int32Array
    """Page indices in token order; entries past the context are ignored."""
    all_logits: bool = False
    """True: logits of every new token. False: of the last one."""
    no_logits: bool = False
    """True: none at all, for a prefill chunk that is not the prompt's last."""


@dataclass(frozen=True, slots=True)
class SequenceSpan:
    """Where one sequence lies in the batch. Rows [query_start, query_start + query_len)."""

    query_start: int
    query_len: int
    context_len: int
    pages: Int32Array
    """Page table cut to exactly the pages that hold the context."""


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """One forward pass. Arrays are owned by the batch and not written after it is built."""

    token_ids: Int64Array
    """[n]"""
    positions: Int64Array
    """[n], position of each token in its sequence, from 0."""
    slots: Int64Array
    """[n], token slot (page * page_tokens + offset) that each new token's K and V go to."""
    sequences: tuple[SequenceSpan, ...]
    logit_rows: Int64Array
    """[rows], ascending rows of the batch whose logits are wanted."""
    page_tokens: int

    def __len__(self) -> int:
        return len(self.token_ids)


def build_batch(inputs: Sequence[SequenceInput], page_tokens: int) -> ForwardBatch:
    """Lay sequences one after the other. O(new tokens + pages).

    Broken promises of the caller (no token, page table too short) assert.
    """
    assert inputs, "forward batch: expected at least one sequence"
    spans: list[SequenceSpan] = []
    tokens: list[Int64Array] = []
    positions: list[Int64Array] = []
    slots: list[Int64Array] = []
    rows: list[Int64Array] = []
    start = 0
    for item in inputs:
        ids = np.asarray(item.token_ids, dtype=np.int64)
        span = _span(item, start, len(ids), page_tokens)
        where = np.arange(span.context_len - span.query_len, span.context_len, dtype=np.int64)
        tokens.append(ids)
        positions.append(where)
        slots.append(span.pages[where // page_tokens] * np.int64(page_tokens) + where % page_tokens)
        end = start + span.query_len
        if not item.no_logits:
            rows.append(np.arange(start if item.all_logits else end - 1, end, dtype=np.int64))
        spans.append(span)
        start = end
    return ForwardBatch(
        token_ids=np.concatenate(tokens),
        positions=np.concatenate(positions),
        slots=np.concatenate(slots),
        sequences=tuple(spans),
        logit_rows=np.concatenate(rows) if rows else np.empty(0, dtype=np.int64),
        page_tokens=page_tokens,
    )


def _span(item: SequenceInput, start: int, query_len: int, page_tokens: int) -> SequenceSpan:
    assert query_len > 0, "forward batch: a sequence without new tokens"
    assert item.context_len >= query_len, "forward batch: context shorter than its new tokens"
    needed = -(-item.context_len // page_tokens)
    pages = np.asarray(item.pages, dtype=np.int32)[:needed]
    assert len(pages) == needed, (
        f"forward batch: {item.context_len} tokens need {needed} pages, table has {len(pages)}"
    )
    return SequenceSpan(start, query_len, item.context_len, pages)
