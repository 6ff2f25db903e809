"""Builds the fingerprint of a loaded model: the only place where models become identity.

Owns the choice of architecture fields. Does not compute digests (engine/serve/weights_digest.py)
and does not encode (storage/identity.py). Called by the engine when it starts, and once per LoRA
adapter, tenant or salt.

A field that is listed needlessly costs a cold cache once; a field that is missing serves wrong
KV. So every constant that enters the computation of K and V is listed, even those that the
weights digest would almost surely tell apart.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tierkv.engine.serve.model_config import ModelConfig
from tierkv.storage.identity import (
    NO_DIGEST,
    ArchitectureFields,
    Fingerprint,
    architecture_fields,
)


@dataclass(frozen=True, slots=True)
class ParallelPlace:
    """Which part of the model one worker holds. Sizes from 1, ranks from 0."""

    tensor_size: int = 1
    tensor_rank: int = 0
    pipeline_size: int = 1
    pipeline_rank: int = 0
    context_size: int = 1
    context_rank: int = 0


def build_fingerprint(
    config: ModelConfig,
    weights_digest: bytes,
    kv_dtype: torch.dtype,
    page_tokens: int,
    *,
    kv_quantisation: str = "none",
    place: ParallelPlace | None = None,
    lora_digest: bytes = NO_DIGEST,
    tenant: str = "",
    cache_salt: str = "",
) -> Fingerprint:
    """The fingerprint of one worker. Raises ValueError when a value is out of range."""
    place = place or ParallelPlace()
    return Fingerprint(
        weights_digest=weights_digest,
        architecture=kv_shaping_fields(config),
        kv_dtype=str(kv_dtype).removeprefix("torch."),
        kv_quantisation=kv_quantisation,
        page_tokens=page_tokens,
        tensor_parallel_size=place.tensor_size,
        tensor_parallel_rank=place.tensor_rank,
        pipeline_parallel_size=place.pipeline_size,
        pipeline_parallel_rank=place.pipeline_rank,
        context_parallel_size=place.context_size,
        context_parallel_rank=place.context_rank,
        lora_digest=lora_digest,
        tenant=tenant,
        cache_salt=cache_salt,
    )


def kv_shaping_fields(config: ModelConfig) -> ArchitectureFields:
    """The constants of a model that enter its K and V. Floats as their shortest decimal."""
    values: dict[str, str | int] = {
        "architecture": config.architecture,
        "attention_bias": int(config.attention_bias),
        "head_dim": config.head_dim,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "kv_heads": config.num_kv_heads,
        "layers": config.num_layers,
        "mla_rank": 0,
        "query_heads": config.num_heads,
        "rms_norm_eps": repr(config.rms_norm_eps),
        "rope_scaling": "none",
        "rope_theta": repr(config.rope_theta),
        "sliding_window": 0,
    }
    scaling = config.rope_scaling
    if scaling is not None:
        values |= {
            "rope_scaling": scaling.kind,
            "rope_scaling_factor": repr(scaling.factor),
            "rope_scaling_high_freq": repr(scaling.high_freq_factor),
            "rope_scaling_low_freq": repr(scaling.low_freq_factor),
            "rope_scaling_original_max": scaling.original_max_position,
        }
    return architecture_fields(values)
