"""The decoder-only transformer of the Llama and Qwen3 families, over a paged KV pool.

Owns the weights in the form they are computed with. Knows nothing of requests, scheduling or
sampling, nor of who owns which page. Called by the runner, which also enters inference mode.

Tensor names are those of Hugging Face checkpoints. A forward writes K and V of the new tokens
into the slots the batch names, layer by layer, and reads only slots of the batch's contexts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from tierkv.engine.serve.attention import plan_attention
from tierkv.engine.serve.batch import ForwardBatch
from tierkv.engine.serve.kv_pool import KVPool
from tierkv.engine.serve.linear import Linear, make_linear
from tierkv.engine.serve.model_config import ModelConfig
from tierkv.engine.serve.rope import RopeTable, rotate
from tierkv.storage.errors import ModelError

ARCHITECTURES = ("llama", "qwen3")

BeforeLayer = Callable[[int], None]
"""Called with a layer's index before that layer's attention reads the pool."""


_MLP_ROWS = 256


class _RmsNorm:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis."""

    __slots__ = ("_eps", "_shift", "_size", "_weight")

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        self._size = weight.shape[0]
        self._eps = eps
        # On the CPU torch's own operator is a longer chain of passes over the rows. There the
        # mean's division moves into these two: x / sqrt(sum(x^2) + size eps) * sqrt(size) w.
        self._shift: torch.Tensor | None = None
        if weight.device.type == "cpu" and weight.dtype == torch.float32:
            self._shift = torch.tensor([eps * self._size])
            weight = weight * self._size**0.5
        self._weight = weight

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        if self._shift is None:
            return F.rms_norm(rows, (self._size,), self._weight, self._eps)
        norm = torch.linalg.vector_norm(rows, dim=-1, keepdim=True)
        scale = torch.addcmul(self._shift, norm, norm).rsqrt_()
        return (rows * scale).mul_(self._weight)


@dataclass(frozen=True, slots=True)
class _Layer:
    input_norm: _RmsNorm
    qkv: Linear
    q_norm: _RmsNorm | None
    k_norm: _RmsNorm | None
    output: Linear
    post_norm: _RmsNorm
    gate_up: Linear
    down: Linear


class DecoderModel:
    """Weights and forward pass. Immutable once built; not thread-safe only through its pool."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Mapping[str, torch.Tensor],
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """Fuse and place `weights` (Hugging Face names); the mapping is not changed.

        The model keeps its own copies: drop the mapping afterwards. Raises ModelError naming
        the tensor, the expected and the actual shape when one is missing or odd.
        """
        if config.architecture not in ARCHITECTURES:
            raise ModelError(
                f"load model: architecture {config.architecture!r} is unknown; "
                f"expected one of {', '.join(ARCHITECTURES)}"
            )
        self.config = config
        self.device = torch.device(device)
        self.dtype = dtype
        source = _Source(weights, self.device, dtype)
        hidden, vocab = config.hidden_size, config.vocab_size
        self._embedding = source.take("model.embed_tokens.weight", (vocab, hidden))
        self._layers = [_load_layer(source, config, i) for i in range(config.num_layers)]
        self._norm = source.norm("model.norm.weight", hidden, config.rms_norm_eps)
        if config.tie_word_embeddings:
            self._head = make_linear(self._embedding)
        else:
            self._head = make_linear(source.take("lm_head.weight", (vocab, hidden)))
        self._rope = RopeTable(config, self.device, dtype)

    def forward(
        self, batch: ForwardBatch, pool: KVPool, before_layer: BeforeLayer | None = None
    ) -> torch.Tensor:
        """Compute one batch; returns logits float32 [len(batch.logit_rows), vocab_size].

        Writes K and V of the batch's tokens into `pool` at batch.slots. `before_layer(i)` runs
        before layer i's attention reads the pool. Call it in inference mode.
        """
        ids = torch.from_numpy(batch.token_ids).to(self.device)
        slots = torch.from_numpy(batch.slots).to(self.device)
        cos, sin = self._rope.rows(torch.from_numpy(batch.positions).to(self.device))
        plan = plan_attention(batch, pool)
        hidden = F.embedding(ids, self._embedding)
        for index, layer in enumerate(self._layers):
            qkv = layer.qkv(layer.input_norm(hidden))
            query, key, value = self._heads(layer, qkv, cos, sin)
            keys, values = pool.layer(index)
            keys.index_copy_(0, slots, key)
            values.index_copy_(0, slots, value)
            if before_layer is not None:
                before_layer(index)
            hidden += layer.output(plan.attend(index, query, key, value))
            # In blocks, so that the widest intermediates of a long prefill stay in the cache and
            # in memory that the allocator already holds.
            for block in torch.split(hidden, _MLP_ROWS) if len(hidden) > _MLP_ROWS else (hidden,):
                gate, up = layer.gate_up(layer.post_norm(block)).chunk(2, dim=-1)
                block += layer.down(F.silu(gate).mul_(up))
        rows = torch.from_numpy(batch.logit_rows).to(self.device)
        return self._head(self._norm(hidden.index_select(0, rows))).float()

    def _heads(
        self, layer: _Layer, qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Split [n, (heads + 2 kv_heads) * head_dim], normalise and rotate query and key."""
        config = self.config
        heads = qkv.view(qkv.shape[0], -1, config.head_dim)
        turned = config.num_heads + config.num_kv_heads
        value = heads[:, turned:]
        query_key = heads[:, :turned]
        if layer.q_norm is not None and layer.k_norm is not None:
            query_key = torch.cat(
                (
                    layer.q_norm(query_key[:, : config.num_heads]),
                    layer.k_norm(query_key[:, config.num_heads :]),
                ),
                dim=1,
            )
        rotated = rotate(query_key, cos, sin)
        return rotated[:, : config.num_heads], rotated[:, config.num_heads :], value


class _Source:
    """Hands out checked tensors on the device in the compute dtype."""

    def __init__(
        self, weights: Mapping[str, torch.Tensor], device: torch.device, dtype: torch.dtype
    ) -> None:
        self._weights = weights
        self._device = device
        self._dtype = dtype

    def take(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        tensor = self._weights.get(name)
        if tensor is None:
            raise ModelError(
                f"load model: tensor {name} is missing, expected shape {list(shape)}; "
                "the folder holds another or an incomplete model"
            )
        if tuple(tensor.shape) != shape:
            raise ModelError(
                f"load model: tensor {name} has shape {list(tensor.shape)}, expected "
                f"{list(shape)}; config.json belongs to another model"
            )
        return tensor.to(device=self._device, dtype=self._dtype)

    def norm(self, name: str, size: int, eps: float) -> _RmsNorm:
        return _RmsNorm(self.take(name, (size,)), eps)

    def join(self, parts: list[tuple[str, tuple[int, ...]]]) -> torch.Tensor:
        """Concatenate along the first axis."""
        return torch.cat([self.take(name, shape) for name, shape in parts])


def _load_layer(source: _Source, config: ModelConfig, index: int) -> _Layer:
    prefix = f"model.layers.{index}."
    hidden, inner, head_dim = config.hidden_size, config.intermediate_size, config.head_dim
    q_size, kv_size = config.num_heads * head_dim, config.num_kv_heads * head_dim
    attn = prefix + "self_attn."
    sizes = (("q_proj", q_size), ("k_proj", kv_size), ("v_proj", kv_size))
    qkv = source.join([(f"{attn}{name}.weight", (size, hidden)) for name, size in sizes])
    qkv_bias = output_bias = q_norm = k_norm = None
    if config.attention_bias:
        qkv_bias = source.join([(f"{attn}{name}.bias", (size,)) for name, size in sizes])
        output_bias = source.take(f"{attn}o_proj.bias", (hidden,))
    if config.architecture == "qwen3":
        q_norm = source.norm(f"{attn}q_norm.weight", head_dim, config.rms_norm_eps)
        k_norm = source.norm(f"{attn}k_norm.weight", head_dim, config.rms_norm_eps)
    gate_up = source.join(
        [(f"{prefix}mlp.{name}.weight", (inner, hidden)) for name in ("gate_proj", "up_proj")]
    )
    return _Layer(
        input_norm=source.norm(f"{prefix}input_layernorm.weight", hidden, config.rms_norm_eps),
        qkv=make_linear(qkv, qkv_bias),
        q_norm=q_norm,
        k_norm=k_norm,
        output=make_linear(source.take(f"{attn}o_proj.weight", (hidden, q_size)), output_bias),
        post_norm=source.norm(
            f"{prefix}post_attention_layernorm.weight", hidden, config.rms_norm_eps
        ),
        gate_up=make_linear(gate_up),
        down=make_linear(source.take(f"{prefix}mlp.down_proj.weight", (hidden, inner))),
    )
