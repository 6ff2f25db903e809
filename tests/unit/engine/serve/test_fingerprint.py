"""The fingerprint of a model names every constant that enters its K and V."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from tierkv.engine.serve.fingerprint import ParallelPlace, build_fingerprint, kv_shaping_fields
from tierkv.engine.serve.model_config import ModelConfig, RopeScaling
from tierkv.storage.identity import explain, namespace

CONFIG = ModelConfig(
    architecture="llama",
    vocab_size=100,
    hidden_size=64,
    intermediate_size=128,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    rms_norm_eps=1e-5,
    rope_theta=10000.0,
    rope_scaling=None,
    max_context=512,
    tie_word_embeddings=True,
    attention_bias=False,
    eos_token_ids=(2,),
    bos_token_id=1,
)

CHANGES: dict[str, Any] = {
    "architecture": "qwen3",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_layers": 4,
    "num_heads": 8,
    "num_kv_heads": 4,
    "head_dim": 32,
    "rms_norm_eps": 1e-6,
    "rope_theta": 500000.0,
    "rope_scaling": RopeScaling("linear", 2.0),
    "attention_bias": True,
}


@pytest.mark.parametrize("field", CHANGES)
def test_w3_each_shaping_field_counts(field: str) -> None:
    left = build_fingerprint(CONFIG, bytes(32), torch.float32, 16)
    other = dataclasses.replace(CONFIG, **{field: CHANGES[field]})
    right = build_fingerprint(other, bytes(32), torch.float32, 16)
    assert namespace(left) != namespace(right)
    assert all(difference.field.startswith("architecture.") for difference in explain(left, right))


def test_fields_that_do_not_shape_kv_do_not_count() -> None:
    other = dataclasses.replace(CONFIG, max_context=99, eos_token_ids=(7,), bos_token_id=None)
    assert kv_shaping_fields(other) == kv_shaping_fields(CONFIG)


def test_every_config_field_is_decided_upon() -> None:
    """A new field of ModelConfig must be added to one of the two lists, on purpose."""
    indifferent = {
        "vocab_size",
        "max_context",
        "tie_word_embeddings",
        "eos_token_ids",
        "bos_token_id",
    }
    names = {field.name for field in dataclasses.fields(ModelConfig)}
    assert names == indifferent | CHANGES.keys()


@pytest.mark.parametrize(
    "change",
    [
        {"factor": 4.0},
        {"low_freq_factor": 2.0},
        {"high_freq_factor": 8.0},
        {"original_max_position": 1},
    ],
    ids=str,
)
def test_w3_rope_scaling_parameters_count(change: dict[str, Any]) -> None:
    scaling = RopeScaling("llama3", 8.0, 1.0, 4.0, 8192)
    fields = [
        kv_shaping_fields(dataclasses.replace(CONFIG, rope_scaling=value))
        for value in (scaling, dataclasses.replace(scaling, **change))
    ]
    assert fields[0] != fields[1]


def test_w3_dtype_place_lora_tenant_and_salt_count() -> None:
    base = build_fingerprint(CONFIG, bytes(32), torch.float32, 16)
    assert base.kv_dtype == "float32"
    others = [
        build_fingerprint(CONFIG, bytes(32), torch.bfloat16, 16),
        build_fingerprint(CONFIG, bytes(32), torch.float32, 32),
        build_fingerprint(CONFIG, bytes(32), torch.float32, 16, kv_quantisation="fp8"),
        build_fingerprint(CONFIG, bytes(32), torch.float32, 16, place=ParallelPlace(2, 0)),
        build_fingerprint(CONFIG, bytes(32), torch.float32, 16, place=ParallelPlace(2, 1)),
        build_fingerprint(CONFIG, bytes(32), torch.float32, 16, lora_digest=bytes(range(32))),
        build_fingerprint(CONFIG, bytes(32), torch.float32, 16, tenant="a"),
        build_fingerprint(CONFIG, bytes(32), torch.float32, 16, cache_salt="a"),
        build_fingerprint(CONFIG, bytes(range(32)), torch.float32, 16),
    ]
    assert len({namespace(fingerprint) for fingerprint in [base, *others]}) == 10


def test_rank_outside_its_group_is_refused() -> None:
    with pytest.raises(ValueError, match="tensor rank"):
        build_fingerprint(CONFIG, bytes(32), torch.float32, 16, place=ParallelPlace(2, 2))
