"""A look at cache files that no process has open: what is in them, without changing them.

Owns nothing and writes nothing: files are opened for reading, under their own lock, so that a
process that starts meanwhile is told they are in use instead of being misread. Counters start
with a process, so they are 0 here; sizes are what is there. Payloads are not read. Called by the
command line.
"""

from __future__ import annotations

import mmap
import os
import stat
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import lmdb

from tierkv.storage.arena import ArenaGeometry
from tierkv.storage.arena import read_header as read_arena_header
from tierkv.storage.base import TierStats
from tierkv.storage.device import try_lock
from tierkv.storage.errors import ConfigError, DirectoryInUseError
from tierkv.storage.slot_header import (
    HEADER_BYTES,
    STATE_COMMITTED,
    SlotHeader,
    parse_header,
    slot_bytes_for,
)
from tierkv.storage.tiers.nvme_index import NvmeIndex
from tierkv.storage.tiers.nvme_layout import check_version, read_manifest
from tierkv.storage.types import TierName

_CLASS_PREFIX = "pages-"


def inspect_arena(path: Path) -> TierStats:
    """What a host arena file holds. O(slots).

    Raises ConfigError when there is no arena at `path`, FormatVersionError for another version's,
    DirectoryInUseError when a process has it open.
    """
    geometry, headers = _arena_pages(path)
    return _stats(
        TierName.HOST, geometry.page_bytes, geometry.slot_bytes, geometry.slot_count, len(headers)
    )


def arena_owners(path: Path) -> dict[int, int]:
    """Pages by owner in a host arena file. O(slots). Raises as inspect_arena does."""
    return dict(Counter(header.owner for header in _arena_pages(path)[1]))


def _arena_pages(path: Path) -> tuple[ArenaGeometry, list[SlotHeader]]:
    with locked_file(path, f"stat arena {path}") as fd:
        found = read_arena_header(fd, path)
        if found is None:
            raise ConfigError(f"stat arena {path}: it is empty or damaged; nothing to show")
        geometry = found[0]
        headers = []
        with mmap.mmap(fd, geometry.total_bytes, prot=mmap.PROT_READ) as mapped:
            for offset in range(geometry.first_slot, geometry.total_bytes, geometry.slot_bytes):
                header = parse_header(mapped[offset : offset + HEADER_BYTES])
                if header is not None and header.state == STATE_COMMITTED:
                    headers.append(header)
    return geometry, headers


def inspect_nvme(root: Path) -> list[TierStats]:
    """What an nvme folder holds, one entry per page size. O(1) per page size.

    capacity_pages is the room allocated on disk so far; the budget is not recorded. Raises as
    inspect_arena does.
    """
    with _locked_root(root) as folders:
        return [_inspect_class(folder) for folder in folders]


def nvme_owners(root: Path) -> dict[int, dict[int, int]]:
    """Pages by owner in an nvme folder, for each page size. O(pages).

    Raises as inspect_arena does, TierIOError when an index cannot be read.
    """
    found: dict[int, dict[int, int]] = {}
    with _locked_root(root) as folders:
        for folder in folders:
            page_bytes = _page_bytes(folder)
            found[page_bytes] = {}
            if (folder / "index" / "data.mdb").is_file():
                index = NvmeIndex(folder / "index", limit_bytes=0, readonly=True)
                try:
                    _, rows = index.load()
                finally:
                    index.close()
                found[page_bytes] = dict(Counter(rows["owner"].tolist()))
    return found


@contextmanager
def _locked_root(root: Path) -> Iterator[list[Path]]:
    """The class folders of a locked nvme folder of this format version."""
    operation = f"stat nvme folder {root}"
    if not (root / "manifest.json").is_file():
        raise ConfigError(f"{operation}: it has no manifest.json; name a folder TierKV wrote")
    with locked_file(root / "LOCK", operation):
        check_version(root / "manifest.json", read_manifest(root / "manifest.json"))
        yield sorted(root.glob(f"{_CLASS_PREFIX}*"))


def _inspect_class(folder: Path) -> TierStats:
    page_bytes = _page_bytes(folder)
    slot_bytes = slot_bytes_for(page_bytes)
    allocated = sum(file.stat().st_size // slot_bytes for file in folder.glob("segment-*.slots"))
    pages, fault = _index_entries(folder / "index")
    return _stats(TierName.NVME, page_bytes, slot_bytes, max(allocated, pages), pages, fault)


def _page_bytes(folder: Path) -> int:
    manifest = read_manifest(folder / "manifest.json")
    check_version(folder / "manifest.json", manifest)
    page_bytes = manifest.get("page_bytes")
    if not isinstance(page_bytes, int) or page_bytes < 1:
        raise ConfigError(
            f"stat {folder}: page_bytes must be a positive integer, got {page_bytes!r}; "
            "delete the folder to start empty"
        )
    return page_bytes


def _index_entries(folder: Path) -> tuple[int, str | None]:
    """Pages in an index, and why it cannot be read: the next start rebuilds it then."""
    data = folder / "data.mdb"
    if not data.is_file():
        return 0, "index missing; the next start rebuilds it from the page files"
    try:
        with lmdb.open(str(folder), readonly=True, lock=False, create=False) as index:
            # LMDB maps the file: touching a page past its end would kill the process (SIGBUS).
            promised = (index.info()["last_pgno"] + 1) * index.stat()["psize"]
            if data.stat().st_size < promised:
                return 0, "index truncated; the next start rebuilds it from the page files"
            return int(index.stat()["entries"]), None
    except lmdb.Error as error:
        return 0, f"index damaged ({error}); the next start rebuilds it from the page files"


@contextmanager
def locked_file(path: Path, operation: str, writable: bool = False) -> Iterator[int]:
    """The file at `path`, open and locked against its owners; `operation` opens messages.

    ConfigError when it is not a file that can be opened, DirectoryInUseError when it is in use.
    """
    mode = os.O_RDWR if writable else os.O_RDONLY
    try:
        fd = os.open(path, mode | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError as error:
        raise ConfigError(f"{operation}: {error.strerror}; check the path") from error
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise ConfigError(f"{operation}: not a file; check the path")
        if not try_lock(fd):
            raise DirectoryInUseError(
                f"{operation}: a process has it open; stop it first, or ask it: tierkv stat --url"
            )
        yield fd
    finally:
        os.close(fd)


def _stats(
    name: TierName,
    page_bytes: int,
    slot_bytes: int,
    capacity_pages: int,
    committed_pages: int,
    fault: str | None = None,
) -> TierStats:
    return TierStats(
        name=name,
        page_bytes=page_bytes,
        slot_bytes=slot_bytes,
        capacity_pages=capacity_pages,
        free_pages=capacity_pages - committed_pages,
        reserved_pages=0,
        committed_pages=committed_pages,
        leased_pages=0,
        quarantined_pages=0,
        hits=0,
        misses=0,
        writes=0,
        duplicates=0,
        evictions=0,
        corrupt=0,
        io_errors=0,
        rejected=0,
        recovered_pages=committed_pages,
        degraded=fault,
    )
