"""Rotary position embedding: the frequencies of a model and the rotation of query and key.

Owns the cosine and sine tables. Halves are paired as in Hugging Face checkpoints: element i of a
head turns with element i + head_dim / 2. Keys in the pool are stored rotated.
Called by the model, once per forward for the rows and once per layer for the rotation.
"""

from __future__ import annotations

import math

import torch

from tierkv.engine.serve.model_config import ModelConfig, RopeScaling
from tierkv.storage.errors import ModelError


class RopeTable:
    """Cosine and sine of every position up to the model's context, float32.

    `sin` carries the sign of the rotation, negative in the first half of a head, so that
    rotating is x * cos + swap_halves(x) * sin.
    """

    def __init__(self, config: ModelConfig, device: torch.device, dtype: torch.dtype) -> None:
        angles = torch.outer(
            torch.arange(config.max_context, dtype=torch.float32), inverse_frequencies(config)
        )
        cos, sin = angles.cos(), angles.sin()
        self._cos = torch.cat((cos, cos), dim=-1).to(device=device, dtype=dtype)
        self._sin = torch.cat((-sin, sin), dim=-1).to(device=device, dtype=dtype)

    def rows(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosine and sine of `positions` [n], each [n, 1, head_dim]. New tensors. O(n)."""
        return (
            self._cos.index_select(0, positions).unsqueeze_(1),
            self._sin.index_select(0, positions).unsqueeze_(1),
        )


def rotate(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate `heads` [n, heads, head_dim] by the rows of a RopeTable; returns a new tensor."""
    swapped = heads.roll(heads.shape[-1] // 2, -1)
    return (heads * cos).addcmul_(swapped, sin)


def inverse_frequencies(config: ModelConfig) -> torch.Tensor:
    """Angle per position of each pair of elements, float32 [head_dim / 2].

    Raises ModelError for a scaling kind other than "linear" and "llama3".
    """
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    frequencies = 1.0 / (config.rope_theta**exponents)
    scaling = config.rope_scaling
    if scaling is None:
        return frequencies
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    if scaling.kind == "llama3":
        return _llama3(frequencies, scaling)
    raise ModelError(
        f"load model: rope scaling {scaling.kind!r} is unknown; expected linear or llama3"
    )


def _llama3(frequencies: torch.Tensor, scaling: RopeScaling) -> torch.Tensor:
    """Slow waves down by `factor`, keep fast ones, blend between the two (Llama 3.1)."""
    wavelengths = 2 * math.pi / frequencies
    turns = scaling.original_max_position / wavelengths
    blend = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    share = blend.clamp(0.0, 1.0)
    return frequencies * (share + (1.0 - share) / scaling.factor)
