"""Batches as the scheduler describes them, and the runner that computes them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.support import tiny_models
from tierkv.engine.serve.batch import SequenceInput, build_batch
from tierkv.engine.serve.kv_pool import KVPool
from tierkv.engine.serve.model import DecoderModel
from tierkv.engine.serve.runner import ModelRunner

CONFIG = tiny_models.LLAMA


@pytest.fixture
def runner() -> ModelRunner:
    model = DecoderModel(CONFIG, tiny_models.random_weights(CONFIG))
    pool = KVPool(CONFIG, 32, 4, torch.float32, torch.device("cpu"))
    pool.kv.fill_(float("nan"))
    return ModelRunner(model, pool)


def test_batch_lays_sequences_one_after_the_other() -> None:
    batch = build_batch(
        [
            SequenceInput([7, 8, 9], 6, [5, 2, 99]),
            SequenceInput([1], 9, np.array([0, 1, 3], dtype=np.int32)),
            SequenceInput([4, 5], 2, [6], all_logits=True),
            SequenceInput([3, 3], 2, [7], no_logits=True),
        ],
        page_tokens=4,
    )
    assert batch.token_ids.tolist() == [7, 8, 9, 1, 4, 5, 3, 3]
    assert batch.positions.tolist() == [3, 4, 5, 8, 0, 1, 0, 1]
    assert batch.slots.tolist() == [23, 8, 9, 12, 24, 25, 28, 29]
    assert batch.logit_rows.tolist() == [2, 3, 4, 5]
    assert [s.pages.tolist() for s in batch.sequences] == [[5, 2], [0, 1, 3], [6], [7]]


@pytest.mark.parametrize(
    "broken",
    [
        SequenceInput([], 3, [0]),
        SequenceInput([1, 2], 1, [0]),
        SequenceInput([1], 5, [0]),
    ],
)
def test_broken_promises_assert(broken: SequenceInput) -> None:
    with pytest.raises(AssertionError, match="forward batch"):
        build_batch([broken], page_tokens=4)


def test_rows_follow_what_was_asked(runner: ModelRunner) -> None:
    tokens = list(range(10, 19))
    every = runner.run([SequenceInput(tokens, 9, [0, 1, 2], all_logits=True)])
    assert every.shape == (9, CONFIG.vocab_size)
    none = runner.run([SequenceInput(tokens[:5], 5, [3, 4], no_logits=True)])
    assert none.shape == (0, CONFIG.vocab_size)
    last = runner.run([SequenceInput(tokens[5:], 9, [3, 4, 9])])
    torch.testing.assert_close(last[0], every[-1], rtol=0, atol=1e-4)


def test_w1_logits_do_not_depend_on_the_neighbours(runner: ModelRunner) -> None:
    tokens = list(range(20, 33))
    alone = runner.run([SequenceInput(tokens, 13, range(4))])
    crowd = [SequenceInput([index] * 6, 6, [8 + 2 * index, 9 + 2 * index]) for index in range(8)]
    together = runner.run([*crowd[:4], SequenceInput(tokens, 13, range(4, 8)), *crowd[4:]])
    torch.testing.assert_close(together[4], alone[0], rtol=0, atol=1e-4)


def test_warm_up_touches_only_page_0(runner: ModelRunner) -> None:
    runner.warm_up()
    assert torch.isnan(runner.pool.kv[:, :, 1:]).all()


def test_results_are_free_of_autograd(runner: ModelRunner) -> None:
    assert runner.run([SequenceInput([1], 1, [0])]).is_inference()
