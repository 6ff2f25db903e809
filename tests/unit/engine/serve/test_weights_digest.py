"""The weights digest: what it depends on, what it does not, and when it is remembered."""

from __future__ import annotations

import hashlib
import json
import os
import struct
from pathlib import Path

import pytest
import torch

from tests.support.clock import ManualClock
from tests.support.model_files import llama_config, random_weights, write_model, write_weights
from tierkv.engine.serve import weights_digest as module
from tierkv.engine.serve.model_folder import load_config, weight_files
from tierkv.engine.serve.weights_digest import CACHE_FILE, tensors_digest, weights_digest
from tierkv.storage.errors import ModelError

LATER = ManualClock(wall_s=4e9)
"""A moment at which every file in these tests is old enough for its digest to be remembered."""


def _write(folder: Path, weights: dict[str, torch.Tensor], shards: int = 1) -> bytes:
    folder.mkdir(exist_ok=True)
    write_weights(folder, weights, shards)
    return tensors_digest(weight_files(folder))


def _weights() -> dict[str, torch.Tensor]:
    return {
        "b.weight": torch.arange(12, dtype=torch.float32).reshape(3, 4),
        "a.weight": torch.arange(6, dtype=torch.bfloat16),
        "scalar": torch.tensor(2.5),
        "none": torch.zeros(0, 4),
    }


def test_w5_digest_by_the_document(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHUNK_BYTES", 20)

    def leaf(name: bytes, dtype: bytes, shape: list[int], content: bytes) -> bytes:
        header = b"tierkv.weights.." + struct.pack("<I", len(name)) + name
        header += struct.pack("<I", len(dtype)) + dtype
        header += struct.pack("<I", len(shape)) + b"".join(struct.pack("<Q", n) for n in shape)
        pieces = [content[start : start + 20] for start in range(0, len(content), 20)]
        return hashlib.sha256(
            header + b"".join(hashlib.sha256(piece).digest() for piece in pieces)
        ).digest()

    weights = _weights()
    floats = struct.pack("<12f", *range(12))
    halves = b"".join(struct.pack("<f", number)[2:] for number in range(6))
    leaves = [
        leaf(b"a.weight", b"BF16", [6], halves),
        leaf(b"b.weight", b"F32", [3, 4], floats),
        leaf(b"none", b"F32", [0, 4], b""),
        leaf(b"scalar", b"F32", [], struct.pack("<f", 2.5)),
    ]
    whole = b"tierkv.weights.." + struct.pack("<Q", 4) + b"".join(leaves)
    assert _write(tmp_path / "m", weights) == hashlib.sha256(whole).digest()


def test_w3_digest_is_of_tensors_not_of_files(tmp_path: Path) -> None:
    weights = _weights()
    digest = _write(tmp_path / "one", weights)
    assert _write(tmp_path / "two", weights, shards=2) == digest
    reordered = dict(reversed(weights.items()))
    assert _write(tmp_path / "three", reordered, shards=3) == digest


@pytest.mark.parametrize(
    "change",
    [
        {"a.weight": torch.tensor([0, 1, 2, 3, 4, 6], dtype=torch.bfloat16)},
        {"b.weight": torch.arange(12, dtype=torch.float32).reshape(4, 3)},
        {"b.weight": torch.arange(12, dtype=torch.float32).reshape(3, 4).view(torch.int32)},
        {"scalar": torch.tensor([2.5])},
        {"more": torch.zeros(1)},
    ],
    ids=["bytes", "shape", "dtype", "rank", "tensor"],
)
def test_w4_any_change_is_another_digest(tmp_path: Path, change: dict[str, torch.Tensor]) -> None:
    weights = _weights()
    assert _write(tmp_path / "new", weights | change) != _write(tmp_path / "old", weights)


def test_w4_renamed_tensors_are_another_digest(tmp_path: Path) -> None:
    left = {"x": torch.zeros(3), "y": torch.ones(3)}
    right = {"x": torch.ones(3), "y": torch.zeros(3)}
    assert _write(tmp_path / "l", left) != _write(tmp_path / "r", right)


def test_chunks_do_not_run_into_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many chunks over several threads come back in order, and the last byte counts."""
    monkeypatch.setattr(module, "CHUNK_BYTES", 64)
    weights = {f"t{index}": torch.full((100,), float(index)) for index in range(20)}
    digest = _write(tmp_path / "m", weights)
    assert all(tensors_digest(weight_files(tmp_path / "m")) == digest for _ in range(5))
    weights["t7"][99] += 1
    assert _write(tmp_path / "n", weights) != digest


def test_digest_is_remembered_beside_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_model(tmp_path)
    digest = weights_digest(tmp_path, clock=LATER)
    monkeypatch.setattr(module, "tensors_digest", lambda files: pytest.fail("hashed again"))
    assert weights_digest(tmp_path, clock=LATER) == digest
    assert sorted(path.name for path in tmp_path.glob(".tierkv*")) == [CACHE_FILE]


def test_w4_rewritten_file_of_the_same_size_and_mtime_is_noticed(tmp_path: Path) -> None:
    write_model(tmp_path, seed=1)
    first = weights_digest(tmp_path, clock=LATER)
    file = tmp_path / "model.safetensors"
    status = file.stat()
    config = load_config(tmp_path)
    write_weights(tmp_path, random_weights(config, 2))
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    # The kernel's clock moves in steps of milliseconds: touch until it has moved.
    for _ in range(1_000_000):
        if file.stat().st_ctime_ns != status.st_ctime_ns:
            break
        os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert file.stat().st_size == status.st_size
    assert file.stat().st_mtime_ns == status.st_mtime_ns
    second = weights_digest(tmp_path, clock=LATER)
    assert second != first
    assert second == tensors_digest([file])


def test_w4_digest_of_fresh_files_is_not_remembered(tmp_path: Path) -> None:
    """A second write within the file system's clock grain would otherwise go unseen."""
    write_model(tmp_path)
    written = (tmp_path / "model.safetensors").stat().st_ctime
    weights_digest(tmp_path, clock=ManualClock(wall_s=written + 1.0))
    assert not (tmp_path / CACHE_FILE).exists()
    weights_digest(tmp_path, clock=ManualClock(wall_s=written + 3.0))
    assert (tmp_path / CACHE_FILE).exists()


@pytest.mark.parametrize(
    "record",
    [
        "",
        "[]",
        "{",
        "{}",
        '{"version": 1}',
        "[" * 100000,
        '{"version": 99, "files": {}, "digest": ""}',
    ],
    ids=range(7),
)
def test_damaged_record_is_ignored_and_replaced(tmp_path: Path, record: str) -> None:
    write_model(tmp_path)
    digest = weights_digest(tmp_path, clock=LATER)
    (tmp_path / CACHE_FILE).write_text(record)
    assert weights_digest(tmp_path, clock=LATER) == digest
    assert json.loads((tmp_path / CACHE_FILE).read_text())["digest"] == digest.hex()


def test_w4_record_with_a_cut_digest_is_ignored(tmp_path: Path) -> None:
    write_model(tmp_path)
    digest = weights_digest(tmp_path, clock=LATER)
    values = json.loads((tmp_path / CACHE_FILE).read_text())
    (tmp_path / CACHE_FILE).write_text(json.dumps(values | {"digest": "00ff"}))
    assert weights_digest(tmp_path, clock=LATER) == digest


def test_read_only_folder_uses_the_cache_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, cache = tmp_path / "model", tmp_path / "cache"
    write_model(folder)
    # A folder of that name refuses the record for root too, whom permissions would not stop.
    (folder / CACHE_FILE).mkdir()
    digest = weights_digest(folder, cache_dir=cache, clock=LATER)
    assert len(list(cache.rglob("*.json"))) == 1
    assert [path.name for path in folder.glob(".tierkv*")] == [CACHE_FILE]
    monkeypatch.setattr(module, "tensors_digest", lambda files: pytest.fail("hashed again"))
    assert weights_digest(folder, cache_dir=cache, clock=LATER) == digest


def test_nowhere_to_remember_is_no_error(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    write_model(folder)
    (folder / CACHE_FILE).mkdir()
    (tmp_path / "cache").write_text("a file")
    digest = weights_digest(folder, cache_dir=tmp_path / "cache", clock=LATER)
    assert digest == tensors_digest(weight_files(folder))


def test_file_that_changes_meanwhile_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_model(tmp_path)

    def change(files: list[Path]) -> bytes:
        with files[0].open("ab") as file:
            file.write(b"x")
        return bytes(32)

    monkeypatch.setattr(module, "tensors_digest", change)
    with pytest.raises(ModelError, match="changed while read"):
        weights_digest(tmp_path, clock=LATER)
    assert not (tmp_path / CACHE_FILE).exists()


def test_damaged_weights_are_an_error(tmp_path: Path) -> None:
    write_model(tmp_path, llama_config())
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ModelError, match="damaged or truncated"):
        weights_digest(tmp_path)
    file.unlink()
    with pytest.raises(ModelError, match=r"no model\.safetensors"):
        weights_digest(tmp_path)
