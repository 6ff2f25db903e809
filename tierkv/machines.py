"""Published constants of GPUs and models, and what they say of restoring against recomputing.

Arithmetic only: nothing is measured here. A forward pass over n tokens costs 2 * P * n floating-
point operations for the weights that take part (P: all parameters, or the activated ones of a
mixture, without the input embedding) and, for causal attention, heads * (qk + v dimensions) * n^2
a layer. It runs at a share of the peak rate (`mfu`). Peaks are dense bf16 rates of the vendors'
data sheets; model constants are those of the published configurations.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

from tierkv.engine.serve.planner import CostCoefficients, Plan, plan
from tierkv.storage.errors import ConfigError

Entry = TypeVar("Entry")

MFU = 0.5
CHUNK_TOKENS = 8192
KV_ITEM_BYTES = 2


@dataclass(frozen=True, slots=True)
class Gpu:
    """One accelerator."""

    name: str
    peak_flops: float
    """Dense bf16, per second."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What of a model decides its prefill time and the size of its KV."""

    name: str
    parameters: float
    """That take part in computing one token, input embedding left out."""
    layers: int
    heads: int
    qk_dim: int
    v_dim: int
    kv_values: int
    """Values of K and V (or latents) one token keeps in one layer."""

    @property
    def kv_bytes_per_token(self) -> int:
        """In bf16."""
        return self.layers * self.kv_values * KV_ITEM_BYTES

    def attention_flops(self, tokens: float) -> float:
        """Causal attention over `tokens` from none."""
        return tokens * tokens * self.layers * self.heads * (self.qk_dim + self.v_dim)

    def flops(self, tokens: float) -> float:
        """A whole prefill of `tokens`."""
        return 2 * self.parameters * tokens + self.attention_flops(tokens)


GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("a100", 312e12),
        Gpu("l40s", 362e12),
        Gpu("h100", 989e12),
        Gpu("h200", 989e12),
        Gpu("b200", 2250e12),
    )
}

MODELS = {
    model.name: model
    for model in (
        ModelShape("llama-3.1-8b", 7.504e9, 32, 32, 128, 128, 2 * 8 * 128),
        ModelShape("llama-3.1-70b", 69.50e9, 80, 64, 128, 128, 2 * 8 * 128),
        ModelShape("qwen3-32b", 31.98e9, 64, 64, 128, 128, 2 * 8 * 128),
        ModelShape("deepseek-v3", 37.0e9, 61, 128, 192, 128, 512 + 64),
    )
}


@dataclass(frozen=True, slots=True)
class Forecast:
    """One context length on one machine."""

    context_tokens: int
    prefill_s: float
    break_even_bytes_per_s: float
    """Tier bandwidth above which loading all is faster than computing all."""
    plan: Plan


def gpu_named(name: str) -> Gpu:
    """Look up a GPU. Raises ConfigError that lists the known ones."""
    return _named(GPUS, name, "gpu")


def model_named(name: str) -> ModelShape:
    """Look up a model. Raises ConfigError that lists the known ones."""
    return _named(MODELS, name, "model")


def cost_of(gpu: Gpu, model: ModelShape, mfu: float = MFU) -> CostCoefficients:
    """The planner's coefficients: a and b from operation counts, no fixed cost."""
    rate = mfu * gpu.peak_flops
    quadratic = model.attention_flops(1.0) / rate
    return CostCoefficients(a=2 * model.parameters / rate, b=2 * quadratic, c=0.0)


def forecast(
    gpu: Gpu, model: ModelShape, context_tokens: int, bytes_per_s: float, mfu: float = MFU
) -> Forecast:
    """Prefill time, break-even bandwidth and the plan for one prefix on a tier of this speed."""
    prefill_s = model.flops(context_tokens) / (mfu * gpu.peak_flops)
    per_token = model.kv_bytes_per_token / bytes_per_s
    chosen = plan(context_tokens, 0, cost_of(gpu, model, mfu), per_token, 0.0, CHUNK_TOKENS)
    even = model.kv_bytes_per_token * context_tokens / prefill_s
    return Forecast(context_tokens, prefill_s, even, chosen)


def _named(known: dict[str, Entry], name: str, what: str) -> Entry:
    found = known.get(name.lower())
    if found is None:
        names = ", ".join(known)
        raise ConfigError(f"plan: {what} {name!r} is not known; expected one of {names}")
    return found
