"""Reads a Hugging Face model folder: config.json and safetensors weights, nothing else.

Owns the translation from config.json to ModelConfig and the promise that weights fit it: what
load_weights returns has every tensor the model needs, in the right shape. Does not know tokens,
GGUF (engine/serve/gguf.py converts to such a folder first) or how the model computes. Every way
in which a folder can be unusable is a ModelError of one line that says what to change. Called by
the runner, the weights digest, the tokenizer and the GGUF conversion.

Invariant: nothing here writes to the folder.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from tierkv.engine.serve.model_config import ModelConfig, RopeScaling
from tierkv.storage.errors import ModelError

CONFIG_FILE = "config.json"
GENERATION_FILE = "generation_config.json"
WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
JSON_BYTES_MAX = 64 << 20
"""Larger than any tokenizer.json seen; a bound on what is read into memory."""
LAYERS_MAX = 1024
"""Several times the deepest model: a bound on what a wrong number makes us build."""

ARCHITECTURES = {"LlamaForCausalLM": "llama", "Qwen3ForCausalLM": "qwen3"}
"""config.json `architectures` entry to ModelConfig.architecture."""


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`. Raises ModelError when missing, unreadable or not an object."""
    try:
        if path.stat().st_size > JSON_BYTES_MAX:
            raise ModelError(f"read {path}: larger than {JSON_BYTES_MAX} bytes; not a model file")
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(
            f"load model: {path.parent} has no {path.name}; complete the model folder"
        ) from None
    except OSError as error:
        raise ModelError(f"read {path}: {error.strerror}; check path and permissions") from error
    except (ValueError, RecursionError) as error:
        raise ModelError(
            f"read {path}: not valid JSON ({error}); download the file again"
        ) from error
    if not isinstance(value, dict):
        raise ModelError(f"read {path}: expected a JSON object, got {type(value).__name__}")
    return value


def load_config(folder: Path) -> ModelConfig:
    """Read config.json (and generation_config.json, if there) of a model folder.

    Raises ModelError when the folder or file is missing or broken, or when the architecture, a
    sliding window, a quantised checkpoint or the rope variant is not supported.
    """
    if not folder.is_dir():
        raise ModelError(f"load model: {folder} is not a folder; give a Hugging Face model folder")
    source = _Fields(folder / CONFIG_FILE, read_json(folder / CONFIG_FILE))
    architecture = _architecture(source)
    _refuse_unsupported(source)
    heads = source.integer("num_attention_heads")
    hidden = source.integer("hidden_size")
    theta, scaling = _rope(source)
    config = ModelConfig(
        architecture=architecture,
        vocab_size=source.integer("vocab_size"),
        hidden_size=hidden,
        intermediate_size=source.integer("intermediate_size"),
        num_layers=source.integer("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=source.integer("num_key_value_heads", heads),
        head_dim=source.integer("head_dim", hidden // heads),
        rms_norm_eps=source.number("rms_norm_eps", 1e-6),
        rope_theta=theta,
        rope_scaling=scaling,
        max_context=source.integer("max_position_embeddings"),
        tie_word_embeddings=source.flag("tie_word_embeddings"),
        attention_bias=source.flag("attention_bias"),
        eos_token_ids=_eos_ids(folder, source),
        bos_token_id=(source.token_ids("bos_token_id") or (None,))[0],
    )
    if config.num_heads % config.num_kv_heads:
        raise source.wrong(
            "num_key_value_heads", f"a divisor of {config.num_heads}", config.num_kv_heads
        )
    if config.num_layers > LAYERS_MAX:
        raise source.wrong("num_hidden_layers", f"at most {LAYERS_MAX}", config.num_layers)
    if config.head_dim % 2:
        raise source.wrong("head_dim", "an even number (rope turns pairs)", config.head_dim)
    return config


def weight_files(folder: Path) -> list[Path]:
    """The folder's safetensors files, sorted by name: one, or the shards its index names.

    Raises ModelError when there are none, when the index is broken, or when a shard is missing.
    """
    index = folder / INDEX_FILE
    if not index.exists():
        single = folder / WEIGHTS_FILE
        if not single.is_file():
            raise ModelError(
                f"load model: {folder} has no {WEIGHTS_FILE} and no {INDEX_FILE}; "
                "only safetensors weights are read: download or convert them"
            )
        return [single]
    names = read_json(index).get("weight_map")
    if (
        not isinstance(names, dict)
        or not names
        or not all(isinstance(name, str) for name in names.values())
    ):
        raise ModelError(f"read {index}: expected weight_map to map tensors to files")
    shards = sorted(set(names.values()))
    for shard in shards:
        if Path(shard).name != shard:
            raise ModelError(f"read {index}: shard {shard!r} is outside the folder; not read")
        if not (folder / shard).is_file():
            raise ModelError(
                f"load model: {index.name} names {shard}, which {folder} lacks; download it"
            )
    return [folder / shard for shard in shards]


def load_weights(folder: Path, dtype: torch.dtype | None = None) -> dict[str, torch.Tensor]:
    """All tensors of the folder on the CPU, by their names in the file.

    Tensors map the file (no copy, pages come in when used; do not write to them) unless `dtype`
    differs from the stored one, which copies. Names and shapes are checked against config.json;
    tensors it does not call for are left out. Raises ModelError when a file is missing, truncated
    or does not fit the config. O(tensors), plus one pass over the bytes when converting.
    """
    config = load_config(folder)
    expected = expected_shapes(config)
    weights: dict[str, torch.Tensor] = {}
    for path in weight_files(folder):
        try:
            with safe_open(path, framework="pt", device="cpu") as file:
                for name in file.keys():  # noqa: SIM118 (not a dict, cannot be iterated)
                    if name in expected:
                        weights[name] = file.get_tensor(name)
        except (SafetensorError, OSError, ValueError) as error:
            raise ModelError(
                f"read {path}: damaged or truncated ({error}); download it again"
            ) from error
    for name, shape in expected.items():
        tensor = weights.get(name)
        if tensor is None:
            raise ModelError(f"load model: {folder} has no tensor {name}; weights are incomplete")
        if tuple(tensor.shape) != shape:
            raise ModelError(
                f"load model: tensor {name} in {folder} has shape {list(tensor.shape)}, "
                f"but {CONFIG_FILE} asks for {list(shape)}; files are of different models"
            )
        if not tensor.is_floating_point() or tensor.itemsize < 2:
            raise ModelError(
                f"load model: tensor {name} in {folder} is quantised ({tensor.dtype}); "
                "use the float16, bfloat16 or float32 checkpoint"
            )
    if dtype is not None:
        weights = {name: tensor.to(dtype) for name, tensor in weights.items()}
    return weights


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of each tensor that a model of this config needs, in Hugging Face names."""
    hidden, middle, head = config.hidden_size, config.intermediate_size, config.head_dim
    q_rows, kv_rows = config.num_heads * head, config.num_kv_heads * head
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (q_rows, hidden),
        "self_attn.k_proj.weight": (kv_rows, hidden),
        "self_attn.v_proj.weight": (kv_rows, hidden),
        "self_attn.o_proj.weight": (hidden, q_rows),
        "mlp.gate_proj.weight": (middle, hidden),
        "mlp.up_proj.weight": (middle, hidden),
        "mlp.down_proj.weight": (hidden, middle),
    }
    if config.attention_bias:
        layer |= {
            "self_attn.q_proj.bias": (q_rows,),
            "self_attn.k_proj.bias": (kv_rows,),
            "self_attn.v_proj.bias": (kv_rows,),
            "self_attn.o_proj.bias": (hidden,),
        }
    if config.architecture == "qwen3":
        layer |= {"self_attn.q_norm.weight": (head,), "self_attn.k_norm.weight": (head,)}
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    for index in range(config.num_layers):
        shapes |= {f"model.layers.{index}.{name}": shape for name, shape in layer.items()}
    return shapes


class _Fields:
    """Typed access to one JSON object; a wrong value is a ModelError naming file and field."""

    def __init__(self, path: Path, values: Mapping[str, Any]) -> None:
        self.path = path
        self.values = values

    def wrong(self, name: str, expected: str, actual: object) -> ModelError:
        return ModelError(f"read {self.path}: expected {name} to be {expected}, got {actual!r}")

    def integer(self, name: str, default: int | None = None) -> int:
        value = self.values.get(name)
        if value is None and default is not None:
            return default
        if type(value) is not int or value < 1:
            raise self.wrong(name, "a positive integer", value)
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value = self.values.get(name)
        if value is None and default is not None:
            return default
        if not isinstance(value, int | float) or not 0 < value < float("inf"):
            raise self.wrong(name, "a positive number", value)
        return float(value)

    def flag(self, name: str) -> bool:
        value = self.values.get(name)
        if value is None:
            return False
        if type(value) is not bool:
            raise self.wrong(name, "true or false", value)
        return value

    def token_ids(self, name: str) -> tuple[int, ...]:
        value = self.values.get(name)
        ids = [] if value is None else value if isinstance(value, list) else [value]
        if not all(type(item) is int and item >= 0 for item in ids):
            raise self.wrong(name, "a token id or a list of them", value)
        return tuple(ids)

    def child(self, name: str) -> _Fields | None:
        value = self.values.get(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.wrong(name, "an object", value)
        return _Fields(self.path, value)


def _architecture(source: _Fields) -> str:
    names = source.values.get("architectures")
    known = ", ".join(ARCHITECTURES)
    if not isinstance(names, list) or not names:
        raise source.wrong("architectures", f"a list with one of {known}", names)
    for name in names:
        if isinstance(name, str) and name in ARCHITECTURES:
            return ARCHITECTURES[name]
    raise ModelError(f"load model: {source.path} is a {names[0]}; supported are {known}")


def _refuse_unsupported(source: _Fields) -> None:
    """Refuse what would load but compute something else than the model was trained for."""
    values = source.values
    layer_types = values.get("layer_types") or []
    # Qwen3 files carry a window size that use_sliding_window switches off.
    window = values.get("sliding_window") is not None and values.get("use_sliding_window", True)
    reasons = {
        "sliding-window attention": bool(window) or "sliding_attention" in layer_types,
        "a quantised checkpoint": values.get("quantization_config") is not None,
        "biases in the MLP": bool(values.get("mlp_bias")),
        "partial rotary embeddings": values.get("partial_rotary_factor") not in (None, 1, 1.0),
        f"activation {values.get('hidden_act')!r}": values.get("hidden_act", "silu") != "silu",
    }
    for reason, present in reasons.items():
        if present:
            raise ModelError(
                f"load model: {source.path} uses {reason}, which is not supported; "
                "choose another checkpoint"
            )


def _rope(source: _Fields) -> tuple[float, RopeScaling | None]:
    """Base and scaling, from `rope_parameters` (transformers 5) or the two older fields."""
    parameters = source.child("rope_parameters")
    if parameters is not None and "rope_theta" in parameters.values:
        theta = parameters.number("rope_theta")
    else:
        theta = source.number("rope_theta", 10000.0)
    scaling = parameters or source.child("rope_scaling")
    if scaling is None:
        return theta, None
    kind = scaling.values.get("rope_type", scaling.values.get("type", "default"))
    if kind == "default":
        return theta, None
    if kind == "linear":
        return theta, RopeScaling("linear", scaling.number("factor"))
    if kind == "llama3":
        return theta, RopeScaling(
            "llama3",
            scaling.number("factor"),
            scaling.number("low_freq_factor"),
            scaling.number("high_freq_factor"),
            scaling.integer("original_max_position_embeddings"),
        )
    raise ModelError(
        f"load model: {source.path} uses rope type {kind!r}; supported are default, linear, llama3"
    )


def _eos_ids(folder: Path, source: _Fields) -> tuple[int, ...]:
    """Ids that end an answer: those of generation_config.json, then config.json's other ones."""
    ids: tuple[int, ...] = ()
    path = folder / GENERATION_FILE
    if path.exists():
        ids = _Fields(path, read_json(path)).token_ids("eos_token_id")
    return tuple(dict.fromkeys(ids + source.token_ids("eos_token_id")))
