"""An offline check of cache files: slots, headers, index, accounting, manifests and arena.

Owns nothing afterwards. Works under the locks of the files' owners, so never beside a running
process. Invariants: without `repair` no byte is changed; with it, what is wrong is removed or
rebuilt from what a checksum vouches for, never guessed, and a second run finds nothing wrong.
The nvme side is storage/fsck_nvme.py, the arena storage/fsck_arena.py. Called by the command line
and by fault tests.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tierkv.storage.device import DirectDevice, ReadOnlyDevice
from tierkv.storage.errors import ConfigError, TierError
from tierkv.storage.fsck_arena import check_arena
from tierkv.storage.fsck_nvme import check_class
from tierkv.storage.fsck_report import (
    Finding,
    FindingKind,
    FsckProgress,
    FsckReport,
    FsckWork,
    ProgressCallback,
)
from tierkv.storage.inspection import locked_file
from tierkv.storage.tiers.nvme_layout import (
    NVME_VERSION,
    check_version,
    lock_root,
    read_manifest,
    write_json,
)

__all__ = ["Finding", "FindingKind", "FsckProgress", "FsckReport", "check_store"]


def check_store(
    root: Path | None,
    arena: Path | None = None,
    repair: bool = False,
    verify_payloads: bool = True,
    progress: ProgressCallback | None = None,
) -> FsckReport:
    """Check the nvme folder `root` and the host arena file `arena`; None leaves one out.

    With `repair`, bad index entries and arena slots are removed, a lost index is rebuilt from
    slot headers, slot files are cut to whole slots. With `verify_payloads`, every page is read
    and hashed: O(bytes) at the device's speed; without, one 4 KiB read a slot. `progress` is
    called from this thread every few hundred slots.

    Raises ConfigError when there is nothing of TierKV's at a place, DirectoryInUseError when a
    process has it open, FormatVersionError for another version's files, TierError when the
    device fails so that no check is possible.
    """
    work = FsckWork(repair, verify_payloads, progress)
    if root is not None:
        _check_root(root, work)
    if arena is not None:
        check_arena(arena, work)
    return work.report()


def _check_root(root: Path, work: FsckWork) -> None:
    if not root.is_dir() or not (_classes(root) or (root / "manifest.json").is_file()):
        raise ConfigError(f"check nvme folder {root}: nothing of TierKV is in it; check the path")
    with _locked(root, work.repair):
        _check_root_manifest(root, work)
        _check_leftovers(root, work)
        device = DirectDevice() if work.repair else ReadOnlyDevice()
        for folder in _classes(root):
            try:
                check_class(folder, device, work)
            except TierError as error:
                work.find(FindingKind.UNREADABLE, folder, str(error))


def _classes(root: Path) -> list[Path]:
    return sorted(folder for folder in root.glob("pages-*") if folder.is_dir())


@contextmanager
def _locked(root: Path, repair: bool) -> Iterator[None]:
    """Hold the root's LOCK; a copied folder may lack the file."""
    lock = root / "LOCK"
    if lock.is_file() and not repair:
        with locked_file(lock, f"check nvme folder {root}"):
            yield
        return
    fd = lock_root(root)
    try:
        yield
    finally:
        os.close(fd)


def _check_root_manifest(root: Path, work: FsckWork) -> None:
    path = root / "manifest.json"
    try:
        manifest = read_manifest(path)
        fault = None if manifest else "missing"
    except ConfigError as error:
        manifest, fault = {}, f"damaged: {error}"
    check_version(path, manifest)
    if fault is None and manifest.get("format") != "tierkv-nvme":
        fault = f"expected format 'tierkv-nvme', found {manifest.get('format')!r}"
    if fault is not None:
        if work.repair:
            write_json(path, {"format": "tierkv-nvme", "version": NVME_VERSION})
        work.find(FindingKind.MANIFEST, path, fault, work.repair)


def _check_leftovers(root: Path, work: FsckWork) -> None:
    """Temporary control files of a process that died between writing and renaming."""
    for folder in (root, *_classes(root)):
        for path in sorted(folder.glob("manifest.json*.tmp")):
            if work.repair:
                path.unlink()
            line = "left by an interrupted write of a control file"
            work.find(FindingKind.LEFTOVER_FILE, path, line, work.repair)
