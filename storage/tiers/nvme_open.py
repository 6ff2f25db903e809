"""Opening the nvme tier: from a locked root folder to files, index and a filled slot table.

Owns nothing afterwards; storage/tiers/nvme.py takes over what it returns. Invariants: nothing on
disk is trusted: entries that cannot be right are dropped and counted, a lost index is rebuilt
from slot headers, slots that no entry names are free; space is given back only after the index
has durably forgotten the pages in it. A failure closes everything, the root's lock included.
"""

from __future__ import annotations

import ctypes
import logging
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import compress

import numpy as np
import numpy.typing as npt

from tierkv.storage.device import Device
from tierkv.storage.errors import ConfigError, TierError
from tierkv.storage.slot_header import FLAG_CHECKSUM
from tierkv.storage.tiers.nvme_index import NvmeIndex, rebuild_index
from tierkv.storage.tiers.nvme_layout import NvmeRoot
from tierkv.storage.tiers.recency import RecencyFile
from tierkv.storage.tiers.segments import SegmentFiles
from tierkv.storage.tiers.slot_table import RecoveredPages, SlotTable
from tierkv.storage.types import PageKey

_TRIM_PAGES_MIN = 100_000

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class NvmeParts:
    """What an open nvme tier is made of; the caller closes it."""

    segments: SegmentFiles
    index: NvmeIndex
    recency: RecencyFile
    table: SlotTable


def open_parts(root: NvmeRoot, device: Device) -> NvmeParts:
    """Open the size class that `root` has chosen and recover its pages.

    Raises ConfigError when the device fails; `root` is closed then. O(pages).
    """
    with ExitStack() as undo:
        undo.callback(root.close)
        try:
            parts = _Opening(root, device, undo).run()
        except TierError as error:
            raise ConfigError(f"open nvme tier {root.root}: {error}") from error
        undo.pop_all()
    return parts


class _Opening:
    """The steps of open_parts()."""

    def __init__(self, root: NvmeRoot, device: Device, undo: ExitStack) -> None:
        self._root = root
        self._device = device
        self._undo = undo
        self._segments = SegmentFiles(
            root.folder, device, root.geometry.page_bytes, root.geometry.slots_per_segment
        )
        undo.callback(self._segments.close)

    def run(self) -> NvmeParts:
        folder, geometry = self._root.folder, self._root.geometry
        index = self._open_index()
        self._undo.callback(index.close)
        # Made first: what lasts then lies below what opening needs for a moment.
        table = SlotTable(geometry.slot_count, 0)
        try:
            pages, bad = self._load(index)
        except TierError as error:
            log.warning("nvme root=%s index=damaged reason=%s", self._root.root, error)
            index.close()
            index = self._rebuild()
            self._undo.callback(index.close)
            pages, bad = self._load(index)
        if bad:
            log.warning("nvme root=%s dropped_index_entries=%d", self._root.root, len(bad))
            index.apply(bad, [])
        # Only now, with those entries gone for good, may the files behind them be cut.
        self._segments.close_gaps()
        self._segments.shrink(geometry.slot_count)
        recency = RecencyFile(folder / "recency.bin", self._device)
        self._undo.callback(recency.close)
        recency.shrink(geometry.slot_count)
        pages.last_use = np.maximum(
            pages.generation, recency.load(geometry.slot_count)[pages.slots]
        )
        table.recover(pages, min(self._segments.slot_count, geometry.slot_count))
        table.counters.corrupt += len(bad)
        log.info(
            "nvme root=%s recovered_pages=%d direct=%s",
            self._root.root,
            len(pages.keys),
            self._segments.direct,
        )
        if len(pages.keys) >= _TRIM_PAGES_MIN:
            del pages
            _trim_memory()
        return NvmeParts(self._segments, index, recency, table)

    def _open_index(self) -> NvmeIndex:
        folder = self._root.folder / "index"
        data = folder / "data.mdb"
        present = data.exists() and data.stat().st_size > 0
        if not present and self._segments.slot_count > 0:
            return self._rebuild()
        folder.mkdir(mode=0o700, exist_ok=True)
        try:
            return NvmeIndex(folder, self._root.geometry.index_limit_bytes)
        except TierError as error:
            log.warning("nvme root=%s index=damaged reason=%s", self._root.root, error)
            return self._rebuild()

    def _rebuild(self) -> NvmeIndex:
        limit = self._root.geometry.index_limit_bytes
        return rebuild_index(self._root.folder / "index", limit, self._segments)

    def _load(self, index: NvmeIndex) -> tuple[RecoveredPages, list[PageKey]]:
        """Index entries that can be right, and the keys of those that cannot."""
        keys, rows = index.load()
        slots = rows["slot"].astype(np.int64)
        good = slots < self._root.geometry.slot_count
        good &= self._segments.present(slots)
        good &= rows["payload_bytes"] == self._root.geometry.page_bytes
        if np.bincount(slots[good]).max(initial=0) > 1:
            good[good] = _youngest(slots[good], rows["generation"][good])
        bad: list[PageKey] = []
        if not good.all():
            bad = list(compress(keys, (~good).tolist()))
            keys = list(compress(keys, good.tolist()))
            slots, rows = slots[good], rows[good]
        generation = rows["generation"].astype(np.uint64)
        return (
            RecoveredPages(
                keys=keys,
                slots=slots,
                generation=generation,
                last_use=generation,
                checksum=rows["checksum"],
                has_checksum=(rows["flags"] & FLAG_CHECKSUM).astype(np.bool_),
                owner=rows["owner"],
            ),
            bad,
        )


def _youngest(
    slots: npt.NDArray[np.int64], generation: npt.NDArray[np.uint64]
) -> npt.NDArray[np.bool_]:
    """Mark one entry a slot. At most one of several can be right: the last one written."""
    order = np.argsort(generation, kind="stable")[::-1]
    first = np.zeros(len(slots), np.bool_)
    first[order[np.unique(slots[order], return_index=True)[1]]] = True
    return first


def _trim_memory() -> None:
    """Give back what opening needed: glibc keeps freed arrays below 32 MiB, 90 bytes a page."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:  # Other C libraries return memory by themselves.
        trim(0)
