"""The engine's model against transformers on the same float32 weights.

Logits within 1e-4 and equal greedy tokens, whatever way the prompt was cut, mixed and placed.
Unused pages are poisoned with NaN, so a read outside a context shows in the logits.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from tests.support import tiny_models
from tierkv.engine.serve.batch import SequenceInput
from tierkv.engine.serve.kv_pool import KVPool
from tierkv.engine.serve.model import DecoderModel
from tierkv.engine.serve.model_config import ModelConfig
from tierkv.engine.serve.runner import ModelRunner

pytest.importorskip("transformers")

LOGITS_ERROR_MAX = 1e-4
POOL_TOKENS = 4096


class Peer:
    """One model in both implementations."""

    def __init__(self, config: ModelConfig) -> None:
        self.config = config
        self.reference: Any = tiny_models.transformers_model(config)
        self.model = DecoderModel(config, tiny_models.weights_of(self.reference))

    def runner(self, page_tokens: int) -> ModelRunner:
        """A runner over a pool full of NaN."""
        pool = KVPool(
            self.config,
            POOL_TOKENS // page_tokens,
            page_tokens,
            torch.float32,
            torch.device("cpu"),
        )
        pool.kv.fill_(float("nan"))
        return ModelRunner(self.model, pool)

    def logits(self, tokens: list[int]) -> torch.Tensor:
        """Reference logits of every position, [tokens, vocab]."""
        with torch.inference_mode():
            out: torch.Tensor = self.reference(torch.tensor([tokens])).logits[0]
        return out

    def greedy(self, tokens: list[int], count: int) -> list[int]:
        with torch.inference_mode():
            out = self.reference.generate(
                torch.tensor([tokens]),
                attention_mask=torch.ones(1, len(tokens), dtype=torch.long),
                max_new_tokens=count,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )
        new: list[int] = out[0, len(tokens) :].tolist()
        return new


@pytest.fixture(scope="module", params=list(tiny_models.ALL))
def peer(request: pytest.FixtureRequest) -> Peer:
    return Peer(tiny_models.ALL[request.param])


class Pages:
    """Hands out pages, in ascending order or shuffled."""

    def __init__(self, runner: ModelRunner, scatter: random.Random | None) -> None:
        self.page_tokens = runner.pool.page_tokens
        self.free = list(range(runner.pool.num_pages))
        if scatter is not None:
            scatter.shuffle(self.free)

    def take(self, tokens: int) -> list[int]:
        count = -(-tokens // self.page_tokens)
        taken, self.free = self.free[:count], self.free[count:]
        return taken


def prompt(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(tiny_models.VOCAB_SIZE) for _ in range(length)]


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert actual.dtype == torch.float32
    assert actual.shape == expected.shape
    assert torch.isfinite(actual).all()
    assert float((actual - expected).abs().max()) <= LOGITS_ERROR_MAX


@pytest.mark.parametrize("page_tokens", [1, 16, 64])
@pytest.mark.parametrize("scattered", [False, True])
def test_one_chunk(peer: Peer, page_tokens: int, scattered: bool) -> None:
    rng = random.Random(1)
    runner = peer.runner(page_tokens)
    tokens = prompt(rng, 133)
    pages = Pages(runner, rng if scattered else None).take(len(tokens))
    logits = runner.run([SequenceInput(tokens, len(tokens), pages, all_logits=True)])
    assert_close(logits, peer.logits(tokens))


@pytest.mark.parametrize("page_tokens", [1, 16, 64])
@pytest.mark.parametrize("scattered", [False, True])
def test_several_chunks(peer: Peer, page_tokens: int, scattered: bool) -> None:
    rng = random.Random(2)
    runner = peer.runner(page_tokens)
    tokens = prompt(rng, 150)
    pages = Pages(runner, rng if scattered else None).take(len(tokens))
    rows = []
    start = 0
    for size in (1, 37, 64, 2, 46):
        end = start + size
        rows.append(runner.run([SequenceInput(tokens[start:end], end, pages, all_logits=True)]))
        start = end
    assert start == len(tokens)
    assert_close(torch.cat(rows), peer.logits(tokens))


@pytest.mark.parametrize("page_tokens", [1, 16, 64])
def test_mixed_batch_of_chunks_and_decodes(peer: Peer, page_tokens: int) -> None:
    rng = random.Random(3)
    runner = peer.runner(page_tokens)
    pages = Pages(runner, rng)
    prompts = [prompt(rng, length) for length in (90, 41, 17, 64, 5, 130)]
    tables = [pages.take(len(tokens)) for tokens in prompts]
    done = [89, 0, 16, 30, 4, 129]
    for tokens, table, cached in zip(prompts, tables, done, strict=True):
        if cached:
            runner.run([SequenceInput(tokens[:cached], cached, table)])
    logits = runner.run(
        [
            SequenceInput(tokens[cached:], len(tokens), table)
            for tokens, table, cached in zip(prompts, tables, done, strict=True)
        ]
    )
    expected = torch.stack([peer.logits(tokens)[-1] for tokens in prompts])
    assert_close(logits, expected)


@pytest.mark.parametrize("page_tokens", [1, 16])
@pytest.mark.parametrize("scattered", [False, True])
def test_w1_greedy_tokens_of_sixteen_sequences_at_once(
    peer: Peer, page_tokens: int, scattered: bool
) -> None:
    rng = random.Random(4)
    runner = peer.runner(page_tokens)
    count = 12
    prompts = [prompt(rng, 3 + 9 * index) for index in range(16)]
    pages = Pages(runner, rng if scattered else None)
    tables = [pages.take(len(tokens) + count) for tokens in prompts]
    texts = [list(tokens) for tokens in prompts]
    steps = [list(tokens) for tokens in prompts]
    for _ in range(count):
        logits = runner.run(
            [
                SequenceInput(new, len(text), table)
                for new, text, table in zip(steps, texts, tables, strict=True)
            ]
        )
        steps = [[token] for token in logits.argmax(-1).tolist()]
        texts = [text + new for text, new in zip(texts, steps, strict=True)]
    for tokens, text in zip(prompts, texts, strict=True):
        assert text[len(tokens) :] == peer.greedy(tokens, count)
