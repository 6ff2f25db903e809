"""The whole engine against transformers on the same float32 weights, from every tier (W1).

Cold, GPU hit, host-restored, NVMe-restored and mixed; alone and 16 in flight. Greedy tokens must
be identical; the logits each token was chosen from within 1e-4 of a plain forward pass over the
whole sequence.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.model_files import qwen3_config, write_model
from tierkv.engine.serve.engine import Engine
from tierkv.engine.serve.engine_config import EngineConfig
from tierkv.engine.serve.gguf import resolve_model
from tierkv.engine.serve.request import RequestOutput
from tierkv.engine.serve.restore import RestoreMode
from tierkv.engine.serve.sampler import SamplingParams, SamplingState
from tierkv.models import bundled_gguf, default_model_cache
from tierkv.scenario import system_prompt
from tierkv.storage.policy import WritePolicy
from tierkv.storage.store import StoreConfig, StoreRules, TieredStore
from tierkv.storage.types import TierName

transformers = pytest.importorskip("transformers")

LOGITS_ERROR_MAX = 1e-4
NEW_TOKENS = 12
PARALLEL = 16
FLUSH_S = 60.0
PARAMS = SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True)


@dataclass
class Peer:
    """A model folder, its engine, and what transformers says of the same prompts."""

    engine: Engine
    prompts: list[list[int]]
    tokens: list[list[int]] = field(default_factory=list)
    """Greedy continuation of each prompt."""
    logits: list[torch.Tensor] = field(default_factory=list)
    """[new tokens, vocab]: what each token was chosen from."""
    drawn: dict[int, list[torch.Tensor]] = field(default_factory=dict)
    """Rows of logits that the engine chose from, by request id, since the last run."""

    @property
    def store(self) -> TieredStore:
        assert isinstance(self.engine.store, TieredStore)
        return self.engine.store

    def run(self, indexes: Sequence[int], salt: str = "") -> list[RequestOutput]:
        """Run prompts together and compare every answer with the reference."""
        self.drawn.clear()
        outputs = self.engine.generate([self.prompts[i] for i in indexes], PARAMS, cache_salt=salt)
        for index, output in zip(indexes, outputs, strict=True):
            assert output.error is None
            assert list(output.token_ids) == self.tokens[index], f"prompt {index}"
            error = (torch.stack(self.drawn[output.request_id]) - self.logits[index]).abs().max()
            assert error <= LOGITS_ERROR_MAX, f"prompt {index}: logits off by {error}"
        self.engine.check()
        return outputs

    def put_all_into(self, tier: TierName) -> None:
        """Leave every cached page in one tier only."""
        assert self.engine.flush(FLUSH_S)
        if tier is not TierName.GPU:
            self.engine.drop_gpu_cache()
        if tier is TierName.NVME:
            assert self.engine.flush(FLUSH_S)
            self.store.trim(TierName.HOST, 0)


def reference(folder: Path, peer: Peer) -> None:
    """Fill in what transformers answers. The model is dropped afterwards.

    One forward pass over prompt and answer says at each place which token greedy decoding takes
    there: the answer is the greedy one exactly when each of its tokens is that token.
    """
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.eval()
    answers = peer.engine.generate(peer.prompts, PARAMS, cache_salt="reference")
    with torch.inference_mode():
        for prompt, answer in zip(peer.prompts, answers, strict=True):
            ids = torch.tensor([prompt + list(answer.token_ids[:-1])])
            rows = model(ids, logits_to_keep=NEW_TOKENS).logits[0].float()
            peer.tokens.append(rows.argmax(dim=-1).tolist())
            peer.logits.append(rows)


def watch(peer: Peer) -> None:
    """Note the logits behind every choice of the engine."""
    core = peer.engine.core
    owners: dict[int, int] = {}
    submit, sample = core.submit, core._sampler.sample

    def noting_submit(request: Any, sink: Any) -> None:
        owners[id(request.sampling)] = request.request_id
        submit(request, sink)

    def noting_sample(logits: torch.Tensor, states: Sequence[SamplingState]) -> list[int]:
        for row, state in zip(logits, states, strict=True):
            peer.drawn.setdefault(owners[id(state)], []).append(row.float().clone())
        return sample(logits, states)

    core.submit = noting_submit  # type: ignore[method-assign]
    core._sampler.sample = noting_sample  # type: ignore[method-assign]


def model_folder(name: str, directory: Path) -> Path:
    if name == "smollm2":
        return resolve_model(bundled_gguf(), default_model_cache())
    folder = directory / name
    write_model(folder, qwen3_config(), seed=5)
    return folder


def make_prompts(name: str, engine: Engine, seed: int) -> list[list[int]]:
    """16 prompts: four prefixes of different length, four endings each."""
    rng = random.Random(seed)
    if name == "smollm2":
        text = engine.tokenizer.encode(system_prompt(12))
        prefixes = [text[start : start + size] for start, size in ((0, 350), (40, 120), (9, 200))]
        prefixes.append(text[:70])
    else:
        vocab = engine.config.vocab_size
        prefixes = [[rng.randrange(vocab) for _ in range(n)] for n in (150, 97, 64, 33)]
    ending = [token for prefix in prefixes for token in prefix]
    return [prefix + rng.sample(ending, 5 + 7 * i) for prefix in prefixes for i in range(4)]


@pytest.fixture(scope="module", params=["qwen3", "smollm2"])
def peer(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Peer]:
    directory = tmp_path_factory.mktemp("engine")
    folder = model_folder(request.param, directory)
    config = EngineConfig(
        model=folder,
        num_pages=400,
        device="cpu",
        max_batch_tokens=256,
        # Where each page came from is part of what is tested: the plan must not choose.
        restore=RestoreMode.LOAD,
        store=StoreConfig(
            page_bytes=1,
            host_bytes=400 << 20,
            nvme_root=directory / "nvme",
            nvme_bytes=800 << 20,
            rules=StoreRules(write_policy=WritePolicy.WRITE_THROUGH),
        ),
    )
    with Engine.open(config) as engine:
        made = Peer(engine, make_prompts(request.param, engine, seed=11))
        reference(folder, made)
        watch(made)
        yield made


@pytest.mark.parametrize("parallel", [1, PARALLEL])
def test_w1_cold_and_gpu_hit(peer: Peer, parallel: int) -> None:
    indexes = range(parallel)
    cold = peer.run(indexes, salt=f"cold-{parallel}")
    assert cold[0].cached.total == 0
    again = peer.run(indexes, salt=f"cold-{parallel}")
    for output in again:
        whole = (len(output.prompt_token_ids) - 1) // 16 * 16
        assert output.cached.gpu == whole
        assert output.cached.total == whole


@pytest.mark.parametrize("tier", [TierName.HOST, TierName.NVME])
@pytest.mark.parametrize("parallel", [1, PARALLEL])
def test_w1_restored_from_a_lower_tier(peer: Peer, tier: TierName, parallel: int) -> None:
    indexes = range(parallel)
    peer.run(indexes)
    peer.put_all_into(tier)
    outputs = peer.run(indexes)
    restored = [getattr(output.cached, tier.value) for output in outputs]
    for output, count in zip(outputs, restored, strict=True):
        # The rest was found in the GPU pool, where another request had just restored it.
        assert output.cached.gpu + count == (len(output.prompt_token_ids) - 1) // 16 * 16
    families = [restored[i : i + 4] for i in range(0, len(restored), 4)]
    assert all(any(family) for family in families)


@pytest.mark.parametrize("parallel", [1, PARALLEL])
def test_w1_mixed_gpu_host_nvme(peer: Peer, parallel: int) -> None:
    indexes = list(range(parallel))
    peer.run(indexes)
    peer.put_all_into(TierName.NVME)
    # Bring the head of the first prompt back to GPU and host, then take the GPU's tail away.
    head = peer.prompts[0][:100]
    peer.engine.generate([head], SamplingParams(max_tokens=1))
    peer.engine.drop_gpu_cache()
    peer.engine.generate([head[:50]], SamplingParams(max_tokens=1))
    outputs = peer.run(indexes)
    cached = outputs[0].cached
    # In company, another request may have restored some of the head to the pool before.
    assert cached.gpu >= 48 if parallel > 1 else cached.gpu == 48
    assert cached.gpu + cached.host == 96
    assert cached.host > 0
    assert cached.nvme > 0
    assert cached.total == (len(peer.prompts[0]) - 1) // 16 * 16
