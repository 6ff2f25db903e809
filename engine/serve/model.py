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


@dataclass(frozen=True, slots=True)
class _Layer:
    input_norm: torch.Tensor
    qkv: Linear
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    output: Linear
    post_norm: torch.Tensor
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
        self._norm = source.take("model.norm.weight", (hidden,))
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
            qkv = layer.qkv(self._rms(hidden, layer.input_norm))
            query, key, value = self._heads(layer, qkv, cos, sin)
            keys, values = pool.layer(index)
            keys.index_copy_(0, slots, key)
            values.index_copy_(0, slots, value)
            if before_layer is not None:
                before_layer(index)
            hidden += layer.output(plan.attend(index, query, key, value))
            gate, up = layer.gate_up(self._rms(hidden, layer.post_norm)).chunk(2, dim=-1)
            hidden += layer.down(F.silu(gate) * up)
        rows = torch.from_numpy(batch.logit_rows).to(self.device)
        wanted = self._rms(hidden.index_select(0, rows), self._norm)
        return self._head(wanted).float()

    def _rms(self, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        size, eps = hidden.shape[-1], self.config.rms_norm_eps
        if self.device.type != "cpu":
            return F.rms_norm(hidden, (size,), weight, eps)
        # torch's CPU version is a chain of more operators, each a pass over all rows.
        norm = torch.linalg.vector_norm(hidden, dim=-1, keepdim=True)
        scale = norm.square_().div_(size).add_(eps).rsqrt_()
        return (hidden * scale).mul_(weight)

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
                    self._rms(query_key[:, : config.num_heads], layer.q_norm),
                    self._rms(query_key[:, config.num_heads :], layer.k_norm),
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
        q_norm = source.take(f"{attn}q_norm.weight", (head_dim,))
        k_norm = source.take(f"{attn}k_norm.weight", (head_dim,))
    gate_up = source.join(
        [(f"{prefix}mlp.{name}.weight", (inner, hidden)) for name in ("gate_proj", "up_proj")]
    )
    return _Layer(
        input_norm=source.take(f"{prefix}input_layernorm.weight", (hidden,)),
        qkv=make_linear(qkv, qkv_bias),
        q_norm=q_norm,
        k_norm=k_norm,
        output=make_linear(source.take(f"{attn}o_proj.weight", (hidden, q_size)), output_bias),
        post_norm=source.take(f"{prefix}post_attention_layernorm.weight", (hidden,)),
        gate_up=make_linear(gate_up),
        down=make_linear(source.take(f"{prefix}mlp.down_proj.weight", (hidden, inner))),
    )
