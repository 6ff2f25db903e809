"""Writes tiny random models as Hugging Face folders, for tests that need real files.

The models are small enough for milliseconds and random enough that logits have no ties: weights
have the variance of their fan-in. Everything follows from the seed.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from tokenizers.processors import ByteLevel

from tierkv.engine.serve.model_config import ModelConfig
from tierkv.engine.serve.model_folder import expected_shapes, load_config

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
"""Ids 0 to 2: unknown, bos, eos."""

CHAT_TEMPLATE = """\
{%- if tools %}
    {{- '<|im_start|>system\\nTools:' }}
    {%- for tool in tools %}
        {{- '\\n' + tool | tojson }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role not in ['system', 'user', 'assistant', 'tool'] %}
        {{- raise_exception('unknown role ' + message.role) }}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""

_MERGES = ("t h", "th e", "a n", "an d", "i n", "Ġ the", "Ġ a", "Ġ and", "o n", "e r")


def llama_config(**overrides: Any) -> dict[str, Any]:
    """config.json of a tiny Llama: 3 layers, 4 heads over 2 KV heads of 16."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab_size(),
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
    } | overrides


def qwen3_config(**overrides: Any) -> dict[str, Any]:
    """config.json of a tiny Qwen3: heads wider than hidden / heads, tied embeddings, q/k norm."""
    config = llama_config() | {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "head_dim": 32,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": True,
        "use_sliding_window": False,
        "sliding_window": None,
        "max_window_layers": 3,
    }
    return config | overrides


def write_model(
    folder: Path,
    config: dict[str, Any] | None = None,
    *,
    seed: int = 0,
    shards: int = 1,
    dtype: torch.dtype = torch.float32,
) -> ModelConfig:
    """Write a complete model folder (llama_config() unless told otherwise); return its config.

    `shards` above 1 spreads the tensors over that many files with an index.
    """
    folder.mkdir(parents=True, exist_ok=True)
    values = config or llama_config()
    write_json(folder / "config.json", values)
    write_json(folder / "generation_config.json", {"bos_token_id": 1, "eos_token_id": [2]})
    parsed = load_config(folder)
    write_weights(folder, random_weights(parsed, seed, dtype), shards)
    write_tokenizer(folder)
    return parsed


def random_weights(
    config: ModelConfig, seed: int, dtype: torch.dtype = torch.float32
) -> dict[str, torch.Tensor]:
    """Every tensor the model needs: norms near one, matrices of variance 1 / fan-in."""
    generator = torch.Generator().manual_seed(seed)
    weights: dict[str, torch.Tensor] = {}
    for name, shape in expected_shapes(config).items():
        values = torch.randn(shape, generator=generator)
        if "norm" in name:
            values = 1 + 0.1 * values
        elif name.endswith(".bias"):
            values = 0.1 * values
        elif "embed_tokens" in name:
            # Tied and large, the embedding would make the model repeat its last token for ever.
            values = 0.2 * values if config.tie_word_embeddings else values
        else:
            values = values * shape[1] ** -0.5
        weights[name] = values.to(dtype)
    return weights


def write_weights(folder: Path, weights: dict[str, torch.Tensor], shards: int = 1) -> None:
    """Write safetensors: one file, or `shards` files with every n-th tensor and an index."""
    if shards == 1:
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        return
    names = sorted(weights)
    weight_map: dict[str, str] = {}
    for index in range(shards):
        file_name = f"model-{index + 1:05d}-of-{shards:05d}.safetensors"
        part = {name: weights[name] for name in names[index::shards]}
        save_file(part, folder / file_name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file_name)
    write_json(folder / "model.safetensors.index.json", {"metadata": {}, "weight_map": weight_map})


def byte_level_tokens() -> tuple[list[str], list[str]]:
    """Vocabulary by id (specials, the 256 bytes, ten merged words) and the merges."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merged = [merge.replace(" ", "") for merge in _MERGES]
    return [*SPECIAL_TOKENS, *alphabet, *merged], list(_MERGES)


def vocab_size() -> int:
    """Tokens in the tiny vocabulary."""
    return len(byte_level_tokens()[0])


def write_tokenizer(folder: Path, chat_template: str | None = CHAT_TEMPLATE) -> None:
    """Write tokenizer.json and tokenizer_config.json of the tiny byte-level vocabulary."""
    tokens, merges = byte_level_tokens()
    pairs = [(left, right) for left, right in (merge.split(" ") for merge in merges)]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = ByteLevel(trim_offsets=False)
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in SPECIAL_TOKENS])
    tokenizer.save(str(folder / "tokenizer.json"))
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": SPECIAL_TOKENS[0],
        "bos_token": SPECIAL_TOKENS[1],
        "eos_token": SPECIAL_TOKENS[2],
        "clean_up_tokenization_spaces": False,
    }
    if chat_template is not None:
        config["chat_template"] = chat_template
    write_json(folder / "tokenizer_config.json", config)


def write_json(path: Path, value: Any) -> None:
    """Write `value` as JSON."""
    path.write_text(json.dumps(value, indent=2), encoding="utf-8")


def write_gguf(
    path: Path,
    config: ModelConfig,
    weights: dict[str, torch.Tensor],
    *,
    pre: str = "gpt-2",
    quantise: bool = False,
    extra: dict[str, Any] | None = None,
    leave_out: tuple[str, ...] = (),
) -> None:
    """Write the model as llama.cpp's converter would, with the tiny vocabulary.

    `quantise` stores matrices as Q8_0. `extra` metadata (text, integers, floats by type) is added
    last and replaces; `leave_out` names metadata or tensors that are not written.
    """
    writer = gguf.GGUFWriter(path, config.architecture)
    for name, value in (_gguf_metadata(config, pre) | (extra or {})).items():
        if name not in leave_out:
            _add_metadata(writer, name, value)
    for name, tensor in weights.items():
        stored = gguf_tensor_name(name)
        if stored in leave_out:
            continue
        array = gguf_rows(config, name, tensor.float()).numpy()
        if quantise and array.ndim == 2:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(stored, gguf.quants.quantize(array, kind), raw_dtype=kind)
        else:
            writer.add_tensor(stored, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def gguf_tensor_name(name: str) -> str:
    """GGUF's name of a Hugging Face tensor."""
    plain = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
    }
    if name in plain:
        return plain[name]
    parts = {
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "self_attn.q_norm": "attn_q_norm",
        "self_attn.k_norm": "attn_k_norm",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    }
    _, _, layer, rest = name.split(".", 3)
    part, kind = rest.rsplit(".", 1)
    return f"blk.{layer}.{parts[part]}.{kind}"


def gguf_rows(config: ModelConfig, name: str, tensor: torch.Tensor) -> torch.Tensor:
    """The tensor with llama's q and k rows in GGUF's order: the halves of a head interleaved."""
    if config.architecture != "llama" or not (".q_proj." in name or ".k_proj." in name):
        return tensor
    half = config.head_dim // 2
    rows = [
        head * config.head_dim + part * half + index
        for head in range(tensor.shape[0] // config.head_dim)
        for index in range(half)
        for part in (0, 1)
    ]
    return tensor[rows]


def _gguf_metadata(config: ModelConfig, pre: str) -> dict[str, Any]:
    tokens, merges = byte_level_tokens()
    own = {
        "block_count": config.num_layers,
        "context_length": config.max_context,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_heads,
        "attention.head_count_kv": config.num_kv_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": config.rope_theta,
    }
    return {f"{config.architecture}.{name}": value for name, value in own.items()} | {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3] * len(SPECIAL_TOKENS)
        + [1] * (len(tokens) - len(SPECIAL_TOKENS)),
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.chat_template": CHAT_TEMPLATE,
    }


def _add_metadata(writer: gguf.GGUFWriter, name: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(name, value)
    elif isinstance(value, int):
        writer.add_uint32(name, value)
    elif isinstance(value, float):
        writer.add_float32(name, value)
    elif isinstance(value, str):
        writer.add_string(name, value)
    else:
        writer.add_array(name, value)
