"""Small random models, as transformers builds them and as the engine takes them.

Weights are scaled up from transformers' default so that attention is far from uniform and a
wrong token, position or page shows in the logits.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from tierkv.engine.serve.model_config import ModelConfig, RopeScaling

VOCAB_SIZE = 211

LLAMA = ModelConfig(
    architecture="llama",
    vocab_size=VOCAB_SIZE,
    hidden_size=48,
    intermediate_size=80,
    num_layers=3,
    num_heads=6,
    num_kv_heads=2,
    head_dim=8,
    rms_norm_eps=1e-5,
    rope_theta=10000.0,
    rope_scaling=None,
    max_context=512,
    tie_word_embeddings=True,
    attention_bias=False,
    eos_token_ids=(2,),
    bos_token_id=1,
)
LLAMA_LINEAR = replace(LLAMA, rope_scaling=RopeScaling("linear", 4.0), tie_word_embeddings=False)
LLAMA_LLAMA3 = replace(
    LLAMA,
    rope_theta=500000.0,
    rope_scaling=RopeScaling("llama3", 8.0, 1.0, 4.0, 64),
    attention_bias=True,
)
QWEN3 = replace(
    LLAMA,
    architecture="qwen3",
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    rms_norm_eps=1e-6,
    rope_theta=1000000.0,
)
ALL = {
    "llama": LLAMA,
    "llama_linear": LLAMA_LINEAR,
    "llama_llama3_bias": LLAMA_LLAMA3,
    "qwen3": QWEN3,
}


def transformers_model(config: ModelConfig, seed: int = 0, scale: float = 0.3) -> Any:
    """A randomly initialised transformers model of this shape, float32, in eval mode."""
    import transformers

    kind = {"llama": "Llama", "qwen3": "Qwen3"}[config.architecture]
    settings = getattr(transformers, f"{kind}Config")(**_settings(config, scale))
    torch.manual_seed(seed)
    model = getattr(transformers, f"{kind}ForCausalLM")(settings).eval()
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if "norm" in name or name.endswith(".bias"):
                tensor.add_(torch.randn_like(tensor) * 0.2)
    return model


def weights_of(model: Any) -> dict[str, torch.Tensor]:
    """The model's tensors by Hugging Face name; views of the model's own memory."""
    return {name: tensor.detach() for name, tensor in model.state_dict().items()}


def random_weights(config: ModelConfig, seed: int = 0) -> dict[str, torch.Tensor]:
    """Weights of this shape without transformers. Deterministic for a seed."""
    generator = torch.Generator().manual_seed(seed)

    def matrix(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * 0.3

    hidden, inner, head_dim = config.hidden_size, config.intermediate_size, config.head_dim
    q_size, kv_size = config.num_heads * head_dim, config.num_kv_heads * head_dim
    weights = {
        "model.embed_tokens.weight": matrix(config.vocab_size, hidden),
        "model.norm.weight": 1 + matrix(hidden),
    }
    if not config.tie_word_embeddings:
        weights["lm_head.weight"] = matrix(config.vocab_size, hidden)
    for index in range(config.num_layers):
        prefix = f"model.layers.{index}."
        attn = f"{prefix}self_attn."
        for name, size in (("q_proj", q_size), ("k_proj", kv_size), ("v_proj", kv_size)):
            weights[f"{attn}{name}.weight"] = matrix(size, hidden)
            if config.attention_bias:
                weights[f"{attn}{name}.bias"] = matrix(size)
        weights[f"{attn}o_proj.weight"] = matrix(hidden, q_size)
        if config.attention_bias:
            weights[f"{attn}o_proj.bias"] = matrix(hidden)
        if config.architecture == "qwen3":
            weights[f"{attn}q_norm.weight"] = 1 + matrix(head_dim)
            weights[f"{attn}k_norm.weight"] = 1 + matrix(head_dim)
        weights[f"{prefix}mlp.gate_proj.weight"] = matrix(inner, hidden)
        weights[f"{prefix}mlp.up_proj.weight"] = matrix(inner, hidden)
        weights[f"{prefix}mlp.down_proj.weight"] = matrix(hidden, inner)
        weights[f"{prefix}input_layernorm.weight"] = 1 + matrix(hidden)
        weights[f"{prefix}post_attention_layernorm.weight"] = 1 + matrix(hidden)
    return weights


def _settings(config: ModelConfig, scale: float) -> dict[str, Any]:
    scaling: dict[str, Any] = {"rope_type": "default"}
    if config.rope_scaling is not None:
        scaling = {"rope_type": config.rope_scaling.kind, "factor": config.rope_scaling.factor}
        if config.rope_scaling.kind == "llama3":
            scaling |= {
                "low_freq_factor": config.rope_scaling.low_freq_factor,
                "high_freq_factor": config.rope_scaling.high_freq_factor,
                "original_max_position_embeddings": config.rope_scaling.original_max_position,
            }
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "rms_norm_eps": config.rms_norm_eps,
        "max_position_embeddings": config.max_context,
        "tie_word_embeddings": config.tie_word_embeddings,
        "attention_bias": config.attention_bias,
        "initializer_range": scale,
        "rope_theta": config.rope_theta,
        "rope_scaling": None if config.rope_scaling is None else scaling,
        "rope_parameters": scaling | {"rope_theta": config.rope_theta},
        "attn_implementation": "sdpa",
    }
