"""Turns a GGUF file into a Hugging Face model folder, once, so that there is one load path.

Owns the conversion of weights (names, dequantisation to float32, llama.cpp's reordered q and k
rows) and the cache of converted folders. engine/serve/gguf_config.py and gguf_tokenizer.py make the
other files. Does not know how the model computes. Called by whoever accepts a
model path from the user.

Invariants: a converted folder appears complete under its final name or not at all, and survives a
power loss from then on; its name depends on the source's size, mtime and first bytes and on
CONVERTER_VERSION, so that a changed file is never served from an old conversion.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import save_file

from tierkv.engine.serve.gguf_config import ROPE_FACTORS, GgufMetadata, damaged, hf_config
from tierkv.engine.serve.gguf_tokenizer import write_tokenizer
from tierkv.engine.serve.model_folder import (
    CONFIG_FILE,
    GENERATION_FILE,
    INDEX_FILE,
    WEIGHTS_FILE,
)
from tierkv.storage.errors import ConfigError, ModelError

CONVERTER_VERSION = 1
"""Part of a converted folder's name: raise it when conversion writes something else."""

HEAD_BYTES = 1 << 20
SHARD_BYTES_MAX = 4 << 30
LOCK_WAIT_S = 900.0
LOCK_POLL_S = 0.1

Progress = Callable[[int, int], None]
"""Called with (tensors converted, tensors in all), from the converting thread."""

_TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def resolve_model(path: Path, cache_dir: Path, progress: Progress | None = None) -> Path:
    """The Hugging Face folder for `path`: itself, or the conversion of a .gguf file.

    A .gguf file is converted below `cache_dir` on first use (minutes of CPU for large models,
    4 bytes per weight on disk) and found there afterwards. Processes that ask for the same file
    at once convert it once. Raises ModelError when the path is neither or the file cannot be
    converted, ConfigError when the cache folder cannot be written.
    """
    if path.is_dir():
        return path
    if path.suffix != ".gguf" or not path.is_file():
        raise ModelError(
            f"load model: {path} is neither a model folder nor a .gguf file; check the path"
        )
    target = cache_dir / f"{path.stem}-{_source_digest(path)}"
    if (target / CONFIG_FILE).is_file():
        return target
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        with _lock(target.with_name(target.name + ".lock")):
            if not (target / CONFIG_FILE).is_file():
                _convert_atomically(path, target, progress)
    except OSError as error:
        raise ConfigError(
            f"convert {path}: cannot write {cache_dir} ({error.strerror}); "
            "choose a writable cache folder with room for 4 bytes per weight"
        ) from error
    return target


def convert_gguf(source: Path, folder: Path, progress: Progress | None = None) -> None:
    """Write the model in `source` into the existing, empty `folder`.

    Weights become float32 safetensors (several shards above 4 GiB; the largest shard is held in
    memory). Raises ModelError when the file is damaged or uses what TierKV does not support;
    what was written by then stays in `folder`.
    """
    reader = _open(source)
    metadata = GgufMetadata(source, reader)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    config = hf_config(metadata, tensors)
    _write_json(folder / CONFIG_FILE, config)
    generation = {
        key: config[key] for key in ("bos_token_id", "eos_token_id") if config[key] is not None
    }
    _write_json(folder / GENERATION_FILE, generation)
    write_tokenizer(source, metadata.values, folder)
    _write_weights(source, folder, config, tensors, progress)


def _open(path: Path) -> gguf.GGUFReader:
    try:
        return gguf.GGUFReader(path)
    except (ValueError, IndexError, KeyError, OverflowError) as error:
        raise damaged(path, error) from error
    except OSError as error:
        raise ModelError(f"read {path}: {error.strerror}; check path and permissions") from error


def _hf_name(path: Path, name: str) -> str:
    if name in _TOP_NAMES:
        return _TOP_NAMES[name]
    parts = name.split(".")
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in _LAYER_NAMES:
        return f"model.layers.{parts[1]}.{_LAYER_NAMES[parts[2]]}.{parts[3]}"
    raise ModelError(f"load model: {path} has a tensor {name}, which TierKV does not know")


def _unpermute(rows: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Undo llama.cpp's reordering of the rows of q and k within each head.

    It interleaves the two halves of a head so that rope turns neighbours; Hugging Face models
    turn element i with element i + head_dim / 2.
    """
    pairs = rows.reshape(heads, -1, 2, *rows.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows.shape)


def _dequantise(
    path: Path, tensor: gguf.ReaderTensor, config: dict[str, Any]
) -> NDArray[np.float32]:
    try:
        array = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
    except RuntimeError as error:
        # The library's error for a type that it cannot dequantise is of this family.
        raise ModelError(
            f"load model: {path}: tensor {tensor.name} is {tensor.tensor_type.name}, "
            "which cannot be dequantised; choose another quantisation"
        ) from error
    array = np.ascontiguousarray(array, dtype=np.float32)
    heads = {
        "attn_q": config["num_attention_heads"],
        "attn_k": config["num_key_value_heads"],
    }.get(tensor.name.split(".")[-2], 0)
    if config["model_type"] != "llama" or heads == 0:
        return array
    if array.shape[0] % (2 * heads):
        raise ModelError(
            f"load model: {path}: tensor {tensor.name} has {array.shape[0]} rows, "
            f"which {heads} heads cannot share; the file is damaged"
        )
    return _unpermute(array, heads)


def _write_weights(
    path: Path,
    folder: Path,
    config: dict[str, Any],
    tensors: dict[str, gguf.ReaderTensor],
    progress: Progress | None,
) -> None:
    """Dequantise and write shard by shard, so that one shard at a time is in memory."""
    shards: list[list[gguf.ReaderTensor]] = [[]]
    shard_bytes = 0
    for name, tensor in tensors.items():
        if name == ROPE_FACTORS:
            continue
        size = int(tensor.n_elements) * 4
        if shards[-1] and shard_bytes + size > SHARD_BYTES_MAX:
            shards.append([])
            shard_bytes = 0
        shards[-1].append(tensor)
        shard_bytes += size
    total, done, weight_map = sum(map(len, shards)), 0, {}
    for number, shard in enumerate(shards, 1):
        file_name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        if len(shards) == 1:
            file_name = WEIGHTS_FILE
        arrays: dict[str, NDArray[np.float32]] = {}
        for tensor in shard:
            name = _hf_name(path, tensor.name)
            arrays[name] = _dequantise(path, tensor, config)
            weight_map[name] = file_name
            done += 1
            if progress is not None:
                progress(done, total)
        try:
            save_file(arrays, folder / file_name, metadata={"format": "pt"})
        except SafetensorError as error:
            # The library's form of a full disk.
            raise OSError(errno.EIO, " ".join(str(error).split())) from error
    if len(shards) > 1:
        _write_json(folder / INDEX_FILE, {"metadata": {}, "weight_map": weight_map})


def _convert_atomically(source: Path, target: Path, progress: Progress | None) -> None:
    """Convert into a folder beside `target`, make it durable, rename it. Holds the lock."""
    partial = target.with_name(target.name + ".partial")
    if partial.exists():
        # Left by a process that was killed: the lock says that nobody is writing it now.
        shutil.rmtree(partial)
    partial.mkdir()
    try:
        convert_gguf(source, partial, progress)
        for file in partial.iterdir():
            _sync(file)
        _sync(partial)
        if target.exists():
            shutil.rmtree(target)
        partial.rename(target)
        _sync(target.parent)
    finally:
        if partial.exists():
            shutil.rmtree(partial)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Hold an advisory lock on `path`, waiting at most LOCK_WAIT_S for another process."""
    with path.open("a") as file:
        deadline = time.monotonic() + LOCK_WAIT_S
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise ModelError(
                        f"convert model: another process holds {path} for over "
                        f"{LOCK_WAIT_S:.0f} s; end it or choose another cache folder"
                    ) from None
            time.sleep(LOCK_POLL_S)
        yield


def _source_digest(path: Path) -> str:
    """16 hex digits over what changes when the file does, without reading all of it."""
    try:
        status = path.stat()
        with path.open("rb") as file:
            head = file.read(HEAD_BYTES)
    except OSError as error:
        raise ModelError(f"read {path}: {error.strerror}; check path and permissions") from error
    identity = f"{CONVERTER_VERSION} {status.st_size} {status.st_mtime_ns} ".encode()
    return hashlib.sha256(identity + head).hexdigest()[:16]


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
