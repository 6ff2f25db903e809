"""A digest of a model's weights: of the tensors, not of the folder's name or how it is sharded.

Owns the digest (docs/formats/identity.md, "Weights digest") and the small file that remembers it.
Does not know fingerprints. Called by the runner at start, and for LoRA adapters.

Invariants: a changed file is noticed by its size, mtime or ctime, before and after the hashing; a
digest of files younger than SETTLED_S is not remembered, since a second write within the clock's
grain would go unseen. Whatever is wrong with the remembered digest, it is computed again.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any

import platformdirs
import torch
from safetensors import SafetensorError, safe_open

from tierkv.engine.serve.model_folder import weight_files
from tierkv.storage.clock import Clock, SystemClock
from tierkv.storage.errors import ModelError

CACHE_FILE = ".tierkv-digest.json"
DIGEST_VERSION = 1
DOMAIN = b"tierkv.weights.."
CHUNK_BYTES = 8 << 20
"""Part of the digest's definition: tensors are hashed in chunks of this size, in parallel."""

SETTLED_S = 2.0
_CACHE_BYTES_MAX = 1 << 20

FileStates = dict[str, list[int]]
"""File name to [size, mtime_ns, ctime_ns]."""


def weights_digest(
    folder: Path, *, cache_dir: Path | None = None, clock: Clock | None = None
) -> bytes:
    """32 bytes over every tensor in the folder's weight files: name, dtype, shape and bytes.

    Remembered beside the model in CACHE_FILE, or below `cache_dir` (the user's cache folder) when
    the model folder cannot be written. Raises ModelError when files are missing, damaged or
    change meanwhile. Reads all weights the first time (over 1 GB/s on two cores), afterwards only
    file states.
    """
    files = weight_files(folder)
    before = _states(files)
    places = [folder / CACHE_FILE, _fallback(folder, cache_dir)]
    for place in places:
        known = _recall(place, before)
        if known is not None:
            return known
    started = (clock or SystemClock()).wall()
    digest = tensors_digest(files)
    if _states(files) != before:
        raise ModelError(f"digest weights: files in {folder} changed while read; try again")
    newest = max(max(mtime, ctime) for _, mtime, ctime in before.values())
    if newest / 1e9 + SETTLED_S <= started:
        _remember(places, before, digest)
    return digest


def tensors_digest(files: list[Path]) -> bytes:
    """The digest itself, uncached, over the tensors of all `files` together."""
    leaves: list[tuple[bytes, bytes]] = []
    with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:
        for path in files:
            try:
                leaves += _file_leaves(pool, path)
            except (SafetensorError, OSError, ValueError) as error:
                raise ModelError(
                    f"read {path}: damaged or truncated ({error}); download it again"
                ) from error
    # A name that is in two shards counts twice: the order of equal names is that of the digests.
    leaves.sort()
    whole = hashlib.sha256(DOMAIN + struct.pack("<Q", len(leaves)))
    for _, leaf in leaves:
        whole.update(leaf)
    return whole.digest()


def _file_leaves(pool: ThreadPoolExecutor, path: Path) -> list[tuple[bytes, bytes]]:
    """Name and digest of each tensor of one file; chunks of all tensors are hashed in parallel."""
    with safe_open(path, framework="pt", device="cpu") as file:
        names = sorted(file.keys())
        headers = [_header(file, name) for name in names]
        # Views of the mapped file: pages come in as the threads hash them.
        contents = [
            memoryview(file.get_tensor(name).reshape(-1).view(torch.uint8).numpy())
            for name in names
        ]
        counts = [len(range(0, len(content), CHUNK_BYTES)) for content in contents]
        chunks = (chunk for content in contents for chunk in _chunks(content))
        digests = pool.map(_chunk_digest, chunks)
        return [
            (
                name.encode(),
                hashlib.sha256(header + b"".join(islice(digests, count))).digest(),
            )
            for name, header, count in zip(names, headers, counts, strict=True)
        ]


def _header(file: Any, name: str) -> bytes:
    """What a tensor is, before its bytes: name, dtype and shape, each with its length."""
    part = file.get_slice(name)
    header = [DOMAIN]
    for text in (name, part.get_dtype()):
        encoded = text.encode()
        header.append(struct.pack("<I", len(encoded)) + encoded)
    shape = part.get_shape()
    header.append(struct.pack(f"<I{len(shape)}Q", len(shape), *shape))
    return b"".join(header)


def _chunks(content: memoryview) -> Iterator[memoryview]:
    for start in range(0, len(content), CHUNK_BYTES):
        yield content[start : start + CHUNK_BYTES]


def _chunk_digest(chunk: memoryview) -> bytes:
    return hashlib.sha256(chunk).digest()


def _states(files: list[Path]) -> FileStates:
    states: FileStates = {}
    for file in files:
        status = file.stat()
        states[file.name] = [status.st_size, status.st_mtime_ns, status.st_ctime_ns]
    return states


def _fallback(folder: Path, cache_dir: Path | None) -> Path:
    """Where the digest goes when the folder is read-only: named after the folder's path."""
    base = cache_dir or Path(platformdirs.user_cache_dir("tierkv"))
    name = hashlib.sha256(os.fsencode(folder.resolve())).hexdigest()[:32]
    return base / "digests" / f"{name}.json"


def _recall(place: Path, states: FileStates) -> bytes | None:
    """The remembered digest, if it is of exactly these file states. Damage means None."""
    try:
        if place.stat().st_size > _CACHE_BYTES_MAX:
            return None
        record = json.loads(place.read_text(encoding="utf-8"))
        if record["version"] != DIGEST_VERSION or record["files"] != states:
            return None
        digest = bytes.fromhex(record["digest"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        # The record is only a shortcut: without it the weights are hashed again.
        return None
    return digest if len(digest) == hashlib.sha256().digest_size else None


def _remember(places: list[Path], states: FileStates, digest: bytes) -> None:
    """Write the record to the first place that takes it; none is no error."""
    record = {"version": DIGEST_VERSION, "digest": digest.hex(), "files": states}
    for index, place in enumerate(places):
        try:
            if index > 0:
                place.parent.mkdir(parents=True, exist_ok=True)
            _write_atomically(place, json.dumps(record))
        except OSError:
            continue
        return


def _write_atomically(place: Path, text: str) -> None:
    descriptor, name = tempfile.mkstemp(prefix=f"{place.name}.", dir=place.parent)
    temporary = Path(name)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        temporary.replace(place)
    finally:
        temporary.unlink(missing_ok=True)
