"""How long an nvme tier with very many pages takes to open, and what a page costs in RAM and disk.

Owns a folder it is given: an nvme tier whose slot files are holes, so that a million pages need
no disk, with an index and a recency file made by the storage package's own code. Memory is
measured in a process of its own. Payloads are never read. Called by `tierkv bench daemon`.

    python -m tierkv.bench.index ROOT       opens ROOT once, prints its cost as JSON
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tierkv.storage.clock import SystemClock
from tierkv.storage.device import BlockFile, DirectDevice, DirectFile
from tierkv.storage.slot_header import FLAG_CHECKSUM
from tierkv.storage.tiers.nvme import SEGMENT_BYTES, NvmeTier
from tierkv.storage.tiers.nvme_index import ENTRY, NvmeIndex
from tierkv.storage.tiers.nvme_layout import NvmeRoot
from tierkv.storage.tiers.recency import RecencyFile
from tierkv.storage.tiers.segments import SegmentFiles
from tierkv.storage.types import KEY_BYTES, PageKey

PAGE_BYTES = 4096
SEED = 20261129
OWNERS = 100
_BATCH_PAGES = 10_000
_CHILD_LIMIT_S = 300.0


class OpenCost(NamedTuple):
    """What opening cost."""

    seconds: float
    """From the call of NvmeTier() to its return; files are in the page cache."""
    ram_bytes_per_page: float
    """Growth of the process's own memory (anonymous; LMDB's map of its file is page cache)."""
    disk_bytes_per_page: float
    """Index, recency and control files, without the slots themselves."""


class _HoleFile(DirectFile):
    """A file whose room is a hole."""

    def allocate(self, nbytes: int) -> None:
        self.truncate(nbytes)


class _HoleDevice(DirectDevice):
    """The machine's file systems, but room in files takes none."""

    def open(self, path: Path, *, create: bool = False) -> BlockFile:
        flags = os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if create else 0)
        return _HoleFile(os.open(path, flags, 0o600), path, direct=False)


def build_index(root: Path, pages: int) -> None:
    """Make an nvme folder at `root` with `pages` committed pages of PAGE_BYTES.

    `root` must not exist. O(pages), about 10 us each; keys come in random order, as in use.
    """
    capacity = NvmeTier.capacity_for(PAGE_BYTES, pages)
    folder = NvmeRoot(root, PAGE_BYTES, capacity, SEGMENT_BYTES, SystemClock())
    try:
        geometry, device = folder.geometry, _HoleDevice()
        segments = SegmentFiles(folder.folder, device, PAGE_BYTES, geometry.slots_per_segment)
        segments.grow(pages)
        segments.close()
        (folder.folder / "index").mkdir(mode=0o700)
        index = NvmeIndex(folder.folder / "index", geometry.index_limit_bytes)
        try:
            _fill(index, pages)
        finally:
            index.close()
        recency = RecencyFile(folder.folder / "recency.bin", device)
        recency.mark(range(pages))
        recency.store(recency.collect(np.arange(1, pages + 1, dtype=np.uint64)))
        recency.close()
    finally:
        folder.close()


def _fill(index: NvmeIndex, pages: int) -> None:
    chance = np.random.default_rng(SEED)
    for start in range(0, pages, _BATCH_PAGES):
        count = min(_BATCH_PAGES, pages - start)
        names = chance.bytes(count * KEY_BYTES)
        rows = np.zeros(count, ENTRY)
        numbers = np.arange(start, start + count)
        rows["generation"] = numbers + 1
        rows["payload_bytes"] = PAGE_BYTES
        rows["owner"] = numbers % OWNERS
        rows["slot"] = numbers
        rows["flags"] = FLAG_CHECKSUM
        rows["checksum"] = np.frombuffer(chance.bytes(count * 16), "V16")
        values = rows.tobytes()
        puts = [
            (
                PageKey(names[n * KEY_BYTES : (n + 1) * KEY_BYTES]),
                values[n * ENTRY.itemsize : (n + 1) * ENTRY.itemsize],
            )
            for n in range(count)
        ]
        index.apply([], puts)


def measure_open(root: Path) -> OpenCost:
    """Open what build_index() made, in a new process. Raises RuntimeError when that fails."""
    command = [sys.executable, "-m", "tierkv.bench.index", str(root)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=_CHILD_LIMIT_S, check=False
    )
    if done.returncode:
        raise RuntimeError(f"open {root} in a process of its own: {done.stderr.strip()}")
    return OpenCost(*json.loads(done.stdout))


def _open_here(root: Path) -> OpenCost:
    folder = root / f"pages-{PAGE_BYTES}"
    index = NvmeIndex(folder / "index", limit_bytes=0, readonly=True)
    pages = index.entry_count
    index.close()
    control = sum(
        path.stat().st_size
        for path in root.rglob("*")
        if path.is_file() and path.suffix != ".slots"
    )
    before = _own_memory_bytes()
    started_s = time.monotonic()
    tier = NvmeTier(root, PAGE_BYTES, NvmeTier.capacity_for(PAGE_BYTES, pages))
    seconds = time.monotonic() - started_s
    used = _own_memory_bytes() - before
    found = tier.stats().recovered_pages
    tier.close()
    if found != pages:
        raise RuntimeError(f"open {root}: expected {pages} pages, recovered {found}")
    return OpenCost(seconds, used / pages, control / pages)


def _own_memory_bytes() -> int:
    """Anonymous memory of this process that is resident."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("measure memory: /proc/self/status has no RssAnon; Linux is needed")


if __name__ == "__main__":
    sys.stdout.write(json.dumps(_open_here(Path(sys.argv[1]))) + "\n")
