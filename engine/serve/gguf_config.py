"""The config.json of a GGUF file: its metadata read, checked and put into Hugging Face's words.

Owns what TierKV refuses in a GGUF file and how llama.cpp's rope factors map back to parameters.
Does not know weights, tokenizers or folders. Called by engine/serve/gguf.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

from tierkv.storage.errors import ModelError

ROPE_FACTORS = "rope_freqs.weight"
"""A tensor that is no weight: the divisor of each rotary frequency."""

_ARCHITECTURES = {
    "llama": ("LlamaForCausalLM", "llama"),
    "qwen3": ("Qwen3ForCausalLM", "qwen3"),
}


class GgufMetadata:
    """The key-value part of a GGUF file, decoded once; wrong entries are ModelErrors."""

    def __init__(self, path: Path, reader: gguf.GGUFReader) -> None:
        self.path = path
        self.values: dict[str, Any] = {}
        try:
            for name, field in reader.fields.items():
                self.values[name] = field.contents()
        except (ValueError, IndexError) as error:
            raise damaged(path, error) from error
        architecture = self.values.get("general.architecture")
        if not isinstance(architecture, str) or architecture not in _ARCHITECTURES:
            raise ModelError(
                f"load model: {path} has architecture {architecture!r}; "
                f"supported are {', '.join(_ARCHITECTURES)}"
            )
        self.architecture: str = architecture

    def own(self, name: str, default: Any = None) -> Any:
        """The value of `<architecture>.<name>`."""
        return self.values.get(f"{self.architecture}.{name}", default)

    def integer(self, name: str, default: int | None = None) -> int:
        """own(name) as a positive integer; ModelError for anything else."""
        value = self.own(name, default)
        if type(value) is not int or value < 1:
            raise ModelError(
                f"load model: {self.path}: expected {self.architecture}.{name} to be a positive "
                f"integer, got {value!r}"
            )
        return value

    def number(self, name: str, default: float) -> float:
        """own(name) as a positive number; ModelError for anything else."""
        value = self.own(name, default)
        if type(value) not in (int, float) or not 0 < value < float("inf"):
            raise ModelError(
                f"load model: {self.path}: expected {self.architecture}.{name} to be a positive "
                f"number, got {value!r}"
            )
        # GGUF holds float32; the shortest decimal that gives it is what the author wrote.
        return float(str(np.float32(value)))


def hf_config(metadata: GgufMetadata, tensors: dict[str, gguf.ReaderTensor]) -> dict[str, Any]:
    """The config.json of the model, whose tensors are given by their GGUF names.

    Raises ModelError when a field is missing or wrong, or when the model uses what TierKV does
    not support. Only the embedding's shape and the rope factors are looked at of the tensors.
    """
    class_name, model_type = _ARCHITECTURES[metadata.architecture]
    heads = metadata.integer("attention.head_count")
    hidden = metadata.integer("embedding_length")
    head_dim = metadata.integer("attention.key_length", hidden // heads)
    embedding = tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ModelError(
            f"load model: {metadata.path} has no matrix token_embd.weight; it is incomplete"
        )
    _refuse_unsupported(metadata, head_dim)
    theta = metadata.number("rope.freq_base", 10000.0)
    return {
        "architectures": [class_name],
        "model_type": model_type,
        "vocab_size": int(embedding.shape[1]),
        "hidden_size": hidden,
        "intermediate_size": metadata.integer("feed_forward_length"),
        "num_hidden_layers": metadata.integer("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": metadata.integer("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": metadata.number("attention.layer_norm_rms_epsilon", 1e-6),
        "rope_theta": theta,
        "rope_scaling": _rope_scaling(metadata, tensors.get(ROPE_FACTORS), theta, head_dim),
        "max_position_embeddings": metadata.integer("context_length"),
        "tie_word_embeddings": "output.weight" not in tensors,
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "bos_token_id": metadata.values.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": metadata.values.get("tokenizer.ggml.eos_token_id"),
        "torch_dtype": "float32",
    }


def _refuse_unsupported(metadata: GgufMetadata, head_dim: int) -> None:
    reasons = {
        "a mixture of experts": bool(metadata.own("expert_count", 0)),
        "sliding-window attention": bool(metadata.own("attention.sliding_window", 0)),
        "values of another size than keys": metadata.own("attention.value_length", head_dim)
        != head_dim,
        "partial rotary embeddings": metadata.own("rope.dimension_count", head_dim) != head_dim,
    }
    for reason, present in reasons.items():
        if present:
            raise ModelError(
                f"load model: {metadata.path} uses {reason}, which is not supported; "
                "choose another model"
            )


def _rope_scaling(
    metadata: GgufMetadata, factors: gguf.ReaderTensor | None, theta: float, head_dim: int
) -> dict[str, Any] | None:
    kind = metadata.own("rope.scaling.type", "none")
    if kind not in ("none", "linear"):
        raise ModelError(
            f"load model: {metadata.path} uses rope scaling {kind!r}; supported are none, linear"
        )
    if factors is not None:
        return llama3_scaling(metadata.path, np.asarray(factors.data), theta, head_dim)
    if kind == "none":
        return None
    return {"rope_type": "linear", "factor": metadata.number("rope.scaling.factor", 1.0)}


def llama3_scaling(
    path: Path, stored: NDArray[np.float32], theta: float, head_dim: int
) -> dict[str, Any]:
    """Recover Llama 3's scaling parameters from the per-frequency divisors that GGUF stores.

    The four parameters are not in the file. Llama 3.1 to 3.3 differ in the factor only, which is
    the largest divisor; the guess is checked against every stored divisor.
    """
    factor, low, high, original = float(stored.max()), 1.0, 4.0, 8192
    wavelength = 2 * np.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    smooth = np.clip((original / wavelength - low) / (high - low), 0.0, 1.0)
    divisors = 1 / ((1 - smooth) / factor + smooth)
    if stored.shape != divisors.shape or not np.allclose(stored, divisors, rtol=1e-4):
        raise ModelError(
            f"load model: {path} has rope factors other than those of Llama 3; not supported"
        )
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }


def damaged(path: Path, error: Exception) -> ModelError:
    """What to raise when the gguf library cannot make sense of the file."""
    reason = " ".join(str(error).split())
    return ModelError(f"read {path}: damaged or truncated GGUF ({reason}); download it again")
