"""The architecture of a model, independent of the file format it came from.

Frozen values only. Built by engine/serve/model_folder.py; read by the model, the KV pool and the
fingerprint. Field names follow Hugging Face config.json where that has a name.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """Frequency scaling of rotary embeddings. kind: "linear" or "llama3"."""

    kind: str
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    original_max_position: int = 0


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Shape and constants of one decoder-only transformer."""

    architecture: str
    """"llama" or "qwen3"."""
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    max_context: int
    """Longest sequence in tokens, prompt plus output."""
    tie_word_embeddings: bool
    attention_bias: bool
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None

    def kv_bytes_per_token(self, itemsize: int) -> int:
        """Bytes of K and V of one token over all layers, for a KV dtype of `itemsize` bytes."""
        return self.num_layers * 2 * self.num_kv_heads * self.head_dim * itemsize
