"""The folder an nvme tier lives in: its lock, manifests, size classes and how the cap is split.

Owns the root folder's LOCK and control files (docs/formats/nvme.md). Knows no pages. Invariants:
one process per root; nothing is changed before the lock is held and the format versions are
known to be ours; slots, index and control files of all classes together stay within the cap.

    root/LOCK                      flock'ed; holds the owner's process id
    root/manifest.json             format version
    root/pages-<page_bytes>/       one size class: manifest.json, segment-NNNNN.slots,
                                   index/ (LMDB), recency.bin
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tierkv.storage.clock import Clock
from tierkv.storage.device import round_up, try_lock
from tierkv.storage.errors import (
    CapacityError,
    ConfigError,
    DirectoryInUseError,
    FormatVersionError,
)
from tierkv.storage.slot_header import slot_bytes_for
from tierkv.storage.tiers.recency import RecencyFile

NVME_VERSION = 1
PAGE_BYTES_MAX = (1 << 30) - (1 << 20)
"""One transfer moves a whole slot, and Linux moves less than 2 GiB at once."""

SEGMENTS_MAX = 256
"""Bounds open files: above SEGMENTS_MAX GiB the segments grow instead."""
_CONTROL_BYTES = 64 << 10
_INDEX_BYTES_MIN = 256 << 10
_INDEX_BYTES_PER_PAGE = 512
"""Room for an entry (about 120 bytes) and for LMDB's copies of changed tree pages."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class NvmeGeometry:
    """How one size class is laid out."""

    page_bytes: int
    slot_bytes: int
    slots_per_segment: int
    slot_count: int

    @property
    def index_limit_bytes(self) -> int:
        """The index's share of the cap."""
        return index_limit_for(self.slot_count)


def index_limit_for(slot_count: int) -> int:
    """How large the index of so many pages may become."""
    return round_up(_INDEX_BYTES_MIN + slot_count * _INDEX_BYTES_PER_PAGE)


def capacity_for(page_bytes: int, slot_count: int) -> int:
    """The smallest cap that holds `slot_count` pages: slots, index, recency, control files."""
    slots = slot_count * slot_bytes_for(page_bytes)
    return slots + index_limit_for(slot_count) + RecencyFile.bytes_for(slot_count) + _CONTROL_BYTES


class NvmeRoot:
    """A locked root folder with one size class chosen."""

    def __init__(
        self, root: Path, page_bytes: int, capacity_bytes: int, segment_bytes: int, clock: Clock
    ) -> None:
        """Lock `root`, check versions, make room for this class.

        Raises ConfigError, CapacityError, DirectoryInUseError, FormatVersionError: then nothing
        in the folder was changed but the folder itself and its LOCK may have been created.
        """
        if not 0 < page_bytes <= PAGE_BYTES_MAX:
            raise ConfigError(
                f"open nvme tier {root}: page_bytes must be 1 to {PAGE_BYTES_MAX}, got {page_bytes}"
            )
        self.root = root
        self.folder = root / f"pages-{page_bytes}"
        self._lock_fd = lock_root(root)
        try:
            self.geometry = self._open_class(page_bytes, capacity_bytes, segment_bytes, clock)
        except BaseException:
            self.close()
            raise

    def _open_class(
        self, page_bytes: int, capacity_bytes: int, segment_bytes: int, clock: Clock
    ) -> NvmeGeometry:
        check_version(self.root / "manifest.json", read_manifest(self.root / "manifest.json"))
        manifest = read_manifest(self.folder / "manifest.json")
        check_version(self.folder / "manifest.json", manifest)
        slot_bytes = slot_bytes_for(page_bytes)
        fallback = max(segment_bytes, capacity_bytes // SEGMENTS_MAX) // slot_bytes
        per_segment = positive_field(manifest, "slots_per_segment", max(1, fallback), self.folder)
        _check_capacity(self.root, page_bytes, capacity_bytes)
        others = self._make_room(page_bytes, capacity_bytes)
        slot_count = _plan_slots(page_bytes, capacity_bytes - others)
        self.folder.mkdir(mode=0o700, exist_ok=True)
        write_json(self.root / "manifest.json", {"format": "tierkv-nvme", "version": NVME_VERSION})
        write_json(
            self.folder / "manifest.json",
            {
                "format": "tierkv-nvme-class",
                "version": NVME_VERSION,
                "page_bytes": page_bytes,
                "slot_bytes": slot_bytes,
                "slots_per_segment": per_segment,
                "opened_wall_s": clock.wall(),
            },
        )
        return NvmeGeometry(page_bytes, slot_bytes, per_segment, slot_count)

    def _make_room(self, page_bytes: int, capacity_bytes: int) -> int:
        """Bytes other size classes keep: the longest unused go until half the cap is ours."""
        allowed = min(capacity_bytes // 2, capacity_bytes - capacity_for(page_bytes, 1))
        others = sorted(
            (_opened_wall_s(folder), _tree_bytes(folder), folder)
            for folder in self.root.glob("pages-*")
            if folder.is_dir() and folder != self.folder
        )
        total = sum(nbytes for _, nbytes, _ in others)
        for _, nbytes, folder in others:
            if total <= allowed:
                break
            log.warning("nvme root=%s removed_class=%s bytes=%d", self.root, folder.name, nbytes)
            try:
                shutil.rmtree(folder)
            except OSError as error:
                raise ConfigError(
                    f"remove {folder}: {error.strerror}; delete it or raise the nvme capacity"
                ) from error
            total -= nbytes
        return total

    def close(self) -> None:
        """Let other processes in. Idempotent."""
        fd, self._lock_fd = self._lock_fd, -1
        if fd >= 0:
            os.close(fd)


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Replace a control file atomically: after a crash it is the old one or the new one.

    Raises ConfigError when the folder cannot be written.
    """
    data = json.dumps(value, indent=1, sort_keys=True).encode() + b"\n"
    try:
        fd, temporary = tempfile.mkstemp(prefix=path.name, suffix=".tmp", dir=path.parent)
        try:
            with os.fdopen(fd, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            Path(temporary).replace(path)
        except OSError:
            Path(temporary).unlink(missing_ok=True)
            raise
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except OSError as error:
        raise ConfigError(
            f"write {path}: {error.strerror}; make the folder writable or choose another"
        ) from error


def lock_root(root: Path) -> int:
    """Make the folder when absent and take its LOCK: closing the descriptor lets it go.

    DirectoryInUseError when another process has it, ConfigError when it cannot be written.
    """
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd = os.open(root / "LOCK", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigError(
            f"open nvme tier {root}: {error.strerror}; make the folder writable or choose another"
        ) from error
    try:
        if not try_lock(fd):
            owner = os.pread(fd, 32, 0).decode("ascii", "replace").strip() or "unknown"
            raise DirectoryInUseError(
                f"open nvme tier {root}: in use by process {owner}; "
                "stop it or choose another folder"
            )
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
    except OSError as error:
        os.close(fd)
        raise ConfigError(
            f"lock nvme tier {root}: {error.strerror}; use a file system with locks"
        ) from error
    except DirectoryInUseError:
        os.close(fd)
        raise
    return fd


def read_manifest(path: Path) -> dict[str, Any]:
    """The control file's content; empty when there is none. ConfigError when it is damaged."""
    try:
        found = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"read {path}: {error}; restore the file or delete its folder to start empty"
        ) from error
    if not isinstance(found, dict):
        raise ConfigError(f"read {path}: expected an object; delete its folder to start empty")
    return found


def check_version(path: Path, manifest: dict[str, Any]) -> None:
    """FormatVersionError when a manifest read from `path` is another version's."""
    if manifest and manifest.get("version") != NVME_VERSION:
        raise FormatVersionError(
            f"open {path}: format version {manifest.get('version')!r}, this TierKV reads "
            f"{NVME_VERSION}; use the TierKV that wrote it or choose another folder"
        )


def positive_field(manifest: dict[str, Any], field: str, fallback: int | None, folder: Path) -> int:
    """A count in the manifest of `folder`; ConfigError when it is none or missing."""
    value = manifest.get(field, fallback)
    if not isinstance(value, int) or value < 1:
        raise ConfigError(
            f"read {folder / 'manifest.json'}: {field} must be a positive integer, got {value!r}; "
            "restore the file or delete its folder to start empty"
        )
    return value


def _check_capacity(root: Path, page_bytes: int, capacity_bytes: int) -> None:
    needed = capacity_for(page_bytes, 1)
    if capacity_bytes < needed:
        raise CapacityError(
            f"open nvme tier {root}: capacity_bytes {capacity_bytes} is below one page of "
            f"{page_bytes} bytes with its index; raise the nvme capacity to at least {needed}"
        )


def _plan_slots(page_bytes: int, budget_bytes: int) -> int:
    """The most slots whose capacity_for() fits."""
    low, high = 1, max(1, budget_bytes // slot_bytes_for(page_bytes))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (
            (middle, high)
            if capacity_for(page_bytes, middle) <= budget_bytes
            else (low, middle - 1)
        )
    return low


def _opened_wall_s(folder: Path) -> float:
    try:
        value = read_manifest(folder / "manifest.json").get("opened_wall_s", 0.0)
    except ConfigError:
        return 0.0
    return float(value) if isinstance(value, (int, float)) else 0.0


def _tree_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
