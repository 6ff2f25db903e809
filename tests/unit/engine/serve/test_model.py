"""The decoder model by itself: refused weights, hooks, dtypes, packing."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.support import tiny_models
from tierkv.engine.serve import linear
from tierkv.engine.serve.batch import SequenceInput, build_batch
from tierkv.engine.serve.kv_pool import KVPool
from tierkv.engine.serve.linear import PackedLinear, PlainLinear, make_linear, packing_available
from tierkv.engine.serve.model import DecoderModel
from tierkv.engine.serve.model_config import ModelConfig, RopeScaling
from tierkv.engine.serve.rope import inverse_frequencies
from tierkv.storage.errors import ModelError

CPU = torch.device("cpu")


def pool_for(config: ModelConfig, dtype: torch.dtype = torch.float32) -> KVPool:
    pool = KVPool(config, 16, 16, dtype, CPU)
    pool.kv.fill_(float("nan"))
    return pool


def logits(model: DecoderModel, pool: KVPool, tokens: list[int]) -> torch.Tensor:
    pages = list(range(-(-len(tokens) // 16)))
    batch = build_batch([SequenceInput(tokens, len(tokens), pages, all_logits=True)], 16)
    with torch.inference_mode():
        return model.forward(batch, pool)


def test_missing_tensor_is_named() -> None:
    weights = tiny_models.random_weights(tiny_models.QWEN3)
    del weights["model.layers.1.self_attn.q_norm.weight"]
    with pytest.raises(ModelError, match=r"model\.layers\.1\.self_attn\.q_norm\.weight is missing"):
        DecoderModel(tiny_models.QWEN3, weights)


def test_odd_shape_gives_expected_and_actual() -> None:
    weights = tiny_models.random_weights(tiny_models.LLAMA)
    weights["model.layers.0.mlp.down_proj.weight"] = torch.zeros(7, 80)
    with pytest.raises(ModelError, match=r"down_proj\.weight has shape \[7, 80\].*\[48, 80\]"):
        DecoderModel(tiny_models.LLAMA, weights)


def test_unknown_architecture_and_rope_are_refused() -> None:
    weights = tiny_models.random_weights(tiny_models.LLAMA)
    with pytest.raises(ModelError, match="architecture 'gpt2' is unknown"):
        DecoderModel(replace(tiny_models.LLAMA, architecture="gpt2"), weights)
    with pytest.raises(ModelError, match="rope scaling 'yarn' is unknown"):
        inverse_frequencies(replace(tiny_models.LLAMA, rope_scaling=RopeScaling("yarn", 2.0)))


def test_construction_leaves_the_weights_alone() -> None:
    weights = tiny_models.random_weights(tiny_models.LLAMA)
    before = {name: tensor.clone() for name, tensor in weights.items()}
    model = DecoderModel(tiny_models.LLAMA, weights)
    logits(model, pool_for(tiny_models.LLAMA), [1, 2, 3])
    assert weights.keys() == before.keys()
    assert all(torch.equal(weights[name], before[name]) for name in before)


def test_hook_runs_before_each_layer_reads_the_pool() -> None:
    """A page restored by the hook counts; the same page of a later layer is not read yet."""
    config = tiny_models.LLAMA
    model = DecoderModel(config, tiny_models.random_weights(config))
    tokens = list(range(30, 60))
    full = pool_for(config)
    expected = logits(model, full, tokens)[-1]

    pool = pool_for(config)
    seen: list[int] = []

    def restore(layer: int) -> None:
        seen.append(layer)
        pool.kv[layer, :, 0] = full.kv[layer, :, 0]

    batch = build_batch([SequenceInput(tokens[16:], len(tokens), [0, 1])], 16)
    with torch.inference_mode():
        got = model.forward(batch, pool, restore)
    assert seen == list(range(config.num_layers))
    torch.testing.assert_close(got[0], expected, rtol=0, atol=1e-4)


def test_forward_writes_only_the_slots_of_its_tokens() -> None:
    config = tiny_models.LLAMA
    model = DecoderModel(config, tiny_models.random_weights(config))
    pool = pool_for(config)
    batch = build_batch([SequenceInput([5] * 20, 20, [3, 1])], 16)
    with torch.inference_mode():
        model.forward(batch, pool)
    written = ~torch.isnan(pool.kv).flatten(4).any(-1)
    expected = torch.zeros_like(written)
    expected[:, :, 3] = True
    expected[:, :, 1, :4] = True
    assert torch.equal(written, expected)


def test_bfloat16_takes_the_gathered_path_and_stays_near() -> None:
    config = tiny_models.QWEN3
    weights = tiny_models.random_weights(config)
    exact = logits(DecoderModel(config, weights), pool_for(config), list(range(40)))
    model = DecoderModel(config, weights, dtype=torch.bfloat16)
    rough = logits(model, pool_for(config, torch.bfloat16), list(range(40)))
    assert rough.dtype == torch.float32
    assert torch.nn.functional.cosine_similarity(exact, rough).min() > 0.98


def test_packed_product_agrees_for_every_row_count_that_occurs() -> None:
    if not packing_available():
        pytest.skip("this torch has no MKL")
    weight = torch.randn(96, 64, generator=torch.Generator().manual_seed(1))
    bias = torch.randn(96, generator=torch.Generator().manual_seed(2))
    packed = make_linear(weight, bias)
    assert isinstance(packed, PackedLinear)
    for count in (*range(1, 20), 63, 64, 65, 255, 256, 257, 1024):
        rows = torch.randn(count, 64, generator=torch.Generator().manual_seed(count))
        expected = torch.nn.functional.linear(rows, weight, bias)
        torch.testing.assert_close(packed(rows), expected, rtol=1e-4, atol=1e-4)


def test_product_that_disagrees_is_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if not packing_available():
        pytest.skip("this torch has no MKL")
    true_product = PackedLinear.__call__

    def wrong(self: PackedLinear, rows: torch.Tensor) -> torch.Tensor:
        return true_product(self, rows) * (1 + 1e-3 * (rows.shape[0] > 8))

    monkeypatch.setattr(PackedLinear, "__call__", wrong)
    assert isinstance(make_linear(torch.randn(32, 16)), PlainLinear)
    assert "disagrees" in caplog.text


def test_model_is_the_same_without_packing(monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny_models.LLAMA_LLAMA3
    weights = tiny_models.random_weights(config)
    tokens = list(range(50))
    one = logits(DecoderModel(config, weights), pool_for(config), tokens)
    monkeypatch.setattr(linear, "packing_available", lambda: False)
    other = logits(DecoderModel(config, weights), pool_for(config), tokens)
    torch.testing.assert_close(one, other, rtol=0, atol=1e-4)
