"""Reading model folders: what loads, and one clear line for each thing that cannot."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.support.model_files import (
    llama_config,
    qwen3_config,
    random_weights,
    write_json,
    write_model,
    write_weights,
)
from tierkv.engine.serve.model_config import RopeScaling
from tierkv.engine.serve.model_folder import load_config, load_weights, weight_files
from tierkv.storage.errors import ModelError

LLAMA3_SCALING = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def _config_folder(folder: Path, config: dict[str, Any]) -> Path:
    write_json(folder / "config.json", config)
    return folder


def _fails(call: Any, *fragments: str) -> None:
    with pytest.raises(ModelError) as caught:
        call()
    message = str(caught.value)
    assert "\n" not in message
    for fragment in fragments:
        assert fragment in message, message


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("family", [llama_config, qwen3_config])
def test_weights_come_back_bit_for_bit(tmp_path: Path, family: Any, shards: int) -> None:
    config = write_model(tmp_path, family(), seed=7, shards=shards, dtype=torch.bfloat16)
    loaded = load_weights(tmp_path)
    expected = random_weights(config, 7, torch.bfloat16)
    assert loaded.keys() == expected.keys()
    for name, tensor in expected.items():
        assert loaded[name].dtype is torch.bfloat16
        assert torch.equal(loaded[name], tensor)
    assert len(weight_files(tmp_path)) == shards


def test_weights_are_converted_on_demand(tmp_path: Path) -> None:
    config = write_model(tmp_path, dtype=torch.bfloat16)
    expected = random_weights(config, 0, torch.bfloat16)
    for name, tensor in load_weights(tmp_path, torch.float32).items():
        assert tensor.dtype is torch.float32
        assert torch.equal(tensor, expected[name].float())


def test_tensors_the_model_does_not_need_are_left_out(tmp_path: Path) -> None:
    config = write_model(tmp_path, llama_config(tie_word_embeddings=True))
    weights = random_weights(config, 0)
    extra = {"lm_head.weight": torch.zeros(2), "model.rotary_emb.inv_freq": torch.zeros(8)}
    write_weights(tmp_path, weights | extra)
    assert load_weights(tmp_path).keys() == weights.keys()


def test_config_defaults(tmp_path: Path) -> None:
    values = llama_config()
    for name in ("num_key_value_heads", "rope_theta", "tie_word_embeddings", "bos_token_id"):
        del values[name]
    config = load_config(_config_folder(tmp_path, values))
    assert config.head_dim == 16
    assert config.num_kv_heads == config.num_heads == 4
    assert config.rope_theta == 10000.0
    assert config.bos_token_id is None
    assert not config.tie_word_embeddings


@pytest.mark.parametrize(
    ("rope", "theta", "scaling"),
    [
        ({"rope_theta": 5e5, "rope_scaling": None}, 5e5, None),
        (
            {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}},
            5e5,
            RopeScaling("linear", 2.0),
        ),
        (
            {"rope_theta": 5e5, "rope_scaling": LLAMA3_SCALING},
            5e5,
            RopeScaling("llama3", 8.0, 1.0, 4.0, 8192),
        ),
        ({"rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}}, 1e6, None),
        (
            {"rope_parameters": {"rope_theta": 1e6} | LLAMA3_SCALING},
            1e6,
            RopeScaling("llama3", 8.0, 1.0, 4.0, 8192),
        ),
    ],
    ids=["old-default", "old-linear", "old-llama3", "new-default", "new-llama3"],
)
def test_rope_in_old_and_new_places(
    tmp_path: Path, rope: dict[str, Any], theta: float, scaling: RopeScaling | None
) -> None:
    values = llama_config()
    del values["rope_theta"], values["rope_scaling"]
    config = load_config(_config_folder(tmp_path, values | rope))
    assert config.rope_theta == theta
    assert config.rope_scaling == scaling


@pytest.mark.parametrize("kind", ["LlamaConfig", "Qwen3Config"])
def test_reads_what_transformers_saves(tmp_path: Path, kind: str) -> None:
    saved = getattr(transformers, kind)(
        vocab_size=100,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        architectures=[kind.replace("Config", "ForCausalLM")],
        eos_token_id=5,
    )
    saved.save_pretrained(tmp_path)
    config = load_config(tmp_path)
    assert config.architecture == kind.removesuffix("Config").lower()
    assert (config.head_dim, config.num_kv_heads, config.max_context) == (32, 2, 512)
    assert config.tie_word_embeddings
    assert config.eos_token_ids == (5,)


def test_eos_of_generation_config_comes_first(tmp_path: Path) -> None:
    folder = _config_folder(tmp_path, llama_config(eos_token_id=2))
    assert load_config(folder).eos_token_ids == (2,)
    write_json(folder / "generation_config.json", {"eos_token_id": [7, 2, 9]})
    assert load_config(folder).eos_token_ids == (7, 2, 9)
    write_json(folder / "generation_config.json", {"eos_token_id": "two"})
    _fails(lambda: load_config(folder), "generation_config.json", "eos_token_id", "'two'")


def test_qwen3_window_that_is_switched_off_is_fine(tmp_path: Path) -> None:
    values = qwen3_config(
        sliding_window=4096, use_sliding_window=False, layer_types=["full_attention"] * 3
    )
    assert load_config(_config_folder(tmp_path, values)).architecture == "qwen3"


def test_missing_folder_and_files(tmp_path: Path) -> None:
    _fails(lambda: load_config(tmp_path / "nowhere"), "nowhere is not a folder")
    _fails(lambda: load_config(tmp_path), "has no config.json")
    _config_folder(tmp_path, llama_config())
    _fails(lambda: load_weights(tmp_path), "no model.safetensors", "index.json")


def test_missing_shard_is_named(tmp_path: Path) -> None:
    write_model(tmp_path, shards=3)
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    _fails(lambda: load_weights(tmp_path), "model-00002-of-00003.safetensors", "lacks")


@pytest.mark.parametrize(
    ("weight_map", "fragment"),
    [
        (None, "weight_map"),
        ({}, "weight_map"),
        ({"a": 1}, "weight_map"),
        ({"a": "../config.json"}, "outside the folder"),
        ({"a": "/etc/hostname"}, "outside the folder"),
    ],
)
def test_broken_index(tmp_path: Path, weight_map: Any, fragment: str) -> None:
    write_model(tmp_path)
    write_json(tmp_path / "model.safetensors.index.json", {"weight_map": weight_map})
    _fails(lambda: load_weights(tmp_path), "index.json", fragment)


@pytest.mark.parametrize("text", ["", "{", "[1]", "null", '{"a": \x01}', "[" * 100000])
def test_config_that_is_no_json_object(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    _fails(lambda: load_config(tmp_path), "config.json")


@pytest.mark.parametrize("keep", [0, 4, 8, 100, 0.5, -1])
def test_truncated_safetensors(tmp_path: Path, keep: float) -> None:
    write_model(tmp_path)
    path = tmp_path / "model.safetensors"
    data = path.read_bytes()
    length = int(len(data) * keep) if isinstance(keep, float) else keep
    path.write_bytes(data[:length])
    _fails(lambda: load_weights(tmp_path), "model.safetensors", "truncated")


def test_weights_of_another_model(tmp_path: Path) -> None:
    config = write_model(tmp_path)
    weights = random_weights(config, 0)
    missing = dict(weights)
    del missing["model.layers.1.mlp.up_proj.weight"]
    write_weights(tmp_path, missing)
    _fails(lambda: load_weights(tmp_path), "no tensor model.layers.1.mlp.up_proj.weight")
    write_weights(tmp_path, weights | {"model.norm.weight": torch.zeros(65)})
    _fails(lambda: load_weights(tmp_path), "model.norm.weight", "[65]", "[64]")
    write_weights(tmp_path, weights | {"model.norm.weight": torch.zeros(64, dtype=torch.int8)})
    _fails(lambda: load_weights(tmp_path), "model.norm.weight", "quantised")


@pytest.mark.parametrize(
    ("change", "fragment"),
    [
        ({"architectures": ["GemmaForCausalLM"]}, "GemmaForCausalLM"),
        ({"architectures": []}, "LlamaForCausalLM, Qwen3ForCausalLM"),
        ({"architectures": None}, "LlamaForCausalLM, Qwen3ForCausalLM"),
        ({"sliding_window": 4096}, "sliding-window"),
        ({"layer_types": ["sliding_attention"]}, "sliding-window"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantised"),
        ({"mlp_bias": True}, "biases"),
        ({"partial_rotary_factor": 0.5}, "partial rotary"),
        ({"hidden_act": "gelu"}, "'gelu'"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "'yarn'"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor"),
        ({"rope_scaling": "linear"}, "rope_scaling"),
        ({"num_attention_heads": 0}, "num_attention_heads"),
        ({"num_attention_heads": "4"}, "num_attention_heads"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers"),
        ({"hidden_size": None}, "hidden_size"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"head_dim": 15}, "head_dim"),
        ({"rms_norm_eps": -1}, "rms_norm_eps"),
        ({"rope_theta": float("nan")}, "rope_theta"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings"),
        ({"eos_token_id": [2, None]}, "eos_token_id"),
    ],
    ids=lambda value: json.dumps(value) if isinstance(value, dict) else None,
)
def test_unsupported_or_wrong_config(tmp_path: Path, change: dict[str, Any], fragment: str) -> None:
    folder = _config_folder(tmp_path, llama_config() | change)
    _fails(lambda: load_config(folder), "config.json", fragment)
