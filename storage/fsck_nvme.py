"""One nvme size class's part of an offline check: manifest, slot files, index, recency.

Owns the files while it looks; the root's lock is storage/fsck.py's. The index decides what
exists, as when the tier opens; slot headers, which carry their own checksum, decide what an entry
may say. Invariants: an entry is removed unless a header in full agreement vouches for it; one
whose page lies in another slot, under the same key, generation and checksum, is pointed there; a
lost index is rebuilt from the headers. Pages evicted before stay in their slots until those are
reused, so a header without an entry is no fault.
"""

from __future__ import annotations

import shutil
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tierkv.storage.checksum import payload_checksum
from tierkv.storage.device import Device, aligned_buffer
from tierkv.storage.errors import ConfigError, TierError
from tierkv.storage.fsck_report import FindingKind, FsckWork
from tierkv.storage.slot_header import (
    FLAG_CHECKSUM,
    HEADER_BYTES,
    STATE_COMMITTED,
    SlotHeader,
    parse_header,
    slot_bytes_for,
)
from tierkv.storage.tiers.nvme_index import NvmeIndex, pack_entry, rebuild_index
from tierkv.storage.tiers.nvme_layout import (
    NVME_VERSION,
    check_version,
    index_limit_for,
    positive_field,
    read_manifest,
    write_json,
)
from tierkv.storage.tiers.recency import RecencyFile
from tierkv.storage.tiers.segments import SegmentFiles


@dataclass(frozen=True, slots=True)
class _Layout:
    """What a class folder's manifest says, as far as it is needed here."""

    page_bytes: int
    slots_per_segment: int


def check_class(folder: Path, device: Device, work: FsckWork) -> None:
    """Check one pages-* folder. O(slots), or O(bytes) with payloads.

    Raises FormatVersionError, and TierError when the device fails for all slots.
    """
    layout = _check_manifest(folder, work)
    if layout is None:
        return
    _check_segment_files(folder, layout, work)
    fresh = folder / "index.new"
    if fresh.exists():
        if work.repair:
            shutil.rmtree(fresh)
        line = "left by an interrupted rebuild of the index"
        work.find(FindingKind.LEFTOVER_FILE, fresh, line, work.repair)
    with ExitStack() as stack:
        segments = SegmentFiles(folder, device, layout.page_bytes, layout.slots_per_segment)
        stack.callback(segments.close)
        if work.repair:
            segments.close_gaps()
            segments.cut_ragged()
        index = _open_index(folder, segments, work)
        if index is not None:
            stack.callback(index.close)
            _ClassCheck(folder, layout, segments, index, work).run()
        _check_recency(folder, device, segments.slot_count, work)


# --- control and slot files


def _check_manifest(folder: Path, work: FsckWork) -> _Layout | None:
    """The layout; None when the folder cannot be understood, which is then a finding."""
    path = folder / "manifest.json"
    name = folder.name.removeprefix("pages-")
    if not name.isdecimal() or not int(name):
        work.find(FindingKind.MANIFEST, folder, "expected a name pages-<bytes>; remove it by hand")
        return None
    page_bytes = int(name)
    try:
        manifest = read_manifest(path)
        check_version(path, manifest)
        per_segment = positive_field(manifest, "slots_per_segment", None, folder)
        named = positive_field(manifest, "page_bytes", None, folder)
        slot_bytes = positive_field(manifest, "slot_bytes", None, folder)
        if (named, slot_bytes) == (page_bytes, slot_bytes_for(page_bytes)):
            return _Layout(page_bytes, per_segment)
        fault = f"names {named} page and {slot_bytes} slot bytes in {folder.name}"
    except ConfigError as error:
        if type(error) is not ConfigError:
            raise
        fault = f"missing or damaged: {error}" if path.exists() else "missing"
    return _rebuild_manifest(folder, page_bytes, fault, work)


def _rebuild_manifest(folder: Path, page_bytes: int, fault: str, work: FsckWork) -> _Layout | None:
    """All but slots_per_segment follows from the folder's name, and that from two full files."""
    slot_bytes = slot_bytes_for(page_bytes)
    sizes = [size for _, size in _segment_sizes(folder)]
    known = len(sizes) > 1 and sizes[0] % slot_bytes == 0 and sizes[0] >= max(sizes)
    if not known:
        line = f"{fault}; slots per segment cannot be told: delete {folder} to start empty"
        work.find(FindingKind.MANIFEST, folder / "manifest.json", line)
        return None
    layout = _Layout(page_bytes, sizes[0] // slot_bytes)
    if work.repair:
        fields = {"page_bytes": page_bytes, "slot_bytes": slot_bytes, "opened_wall_s": 0.0}
        own = {"format": "tierkv-nvme-class", "version": NVME_VERSION}
        per_segment = {"slots_per_segment": layout.slots_per_segment}
        write_json(folder / "manifest.json", {**own, **fields, **per_segment})
    work.find(FindingKind.MANIFEST, folder / "manifest.json", fault, work.repair)
    return layout


def _segment_sizes(folder: Path) -> list[tuple[int, int]]:
    """Number and size of each slot file that is there, in order."""
    paths = folder.glob("segment-[0-9]*.slots")
    return sorted((int(path.stem.split("-")[1]), path.stat().st_size) for path in paths)


def _check_segment_files(folder: Path, layout: _Layout, work: FsckWork) -> None:
    """Sizes of the slot files. Repair is SegmentFiles', once they are open."""
    slot_bytes = slot_bytes_for(layout.page_bytes)
    full = layout.slots_per_segment * slot_bytes
    found = _segment_sizes(folder)
    last = found[-1][0] if found else -1
    for (before, _), (number, _) in pairwise([(-1, 0), *found]):
        for missing in range(before + 1, number):
            path = folder / f"segment-{missing:05d}.slots"
            work.find(FindingKind.SEGMENT, path, "missing before a later one", work.repair)
    for number, size in found:
        path = folder / f"segment-{number:05d}.slots"
        if number < last and size < full:
            line = f"cut short: expected {full} bytes, found {size}"
        elif size > full:
            line = f"too long: expected at most {full} bytes, found {size}"
        elif size % slot_bytes:
            line = f"cut short: {size} bytes are no whole number of {slot_bytes}-byte slots"
        else:
            continue
        work.find(FindingKind.SEGMENT, path, line, work.repair)


def _open_index(folder: Path, segments: SegmentFiles, work: FsckWork) -> NvmeIndex | None:
    """The index, rebuilt when lost and repair is asked for; None when there is none to check."""
    path = folder / "index"
    data = path / "data.mdb"
    present = data.is_file() and data.stat().st_size > 0
    if not present and not segments.slot_count:
        return None
    limit = index_limit_for(segments.slot_count)
    fault = "missing"
    kind = FindingKind.INDEX
    if present:
        try:
            index = NvmeIndex(path, limit, readonly=not work.repair)
        except TierError as error:
            fault = str(error)
        else:
            try:
                count = len(index.load()[0])
                if index.entry_count == count:
                    return index
                kind = FindingKind.ACCOUNTING
                fault = f"counts {index.entry_count} entries and has {count}"
            except TierError as error:
                fault = str(error)
            index.close()
    if not work.repair:
        work.find(kind, path, f"{fault}; repair, or the next start, rebuilds it from headers")
        return None
    rebuilt = rebuild_index(path, limit, segments)
    work.find(kind, path, f"{fault}; rebuilt from slot headers", repaired=True)
    return rebuilt


def _check_recency(folder: Path, device: Device, slot_count: int, work: FsckWork) -> None:
    path = folder / "recency.bin"
    if not path.is_file():
        return
    recency = RecencyFile(path, device)
    try:
        damaged = recency.damaged_blocks()
        if damaged:
            if work.repair:
                recency.clear(damaged)
            line = f"{len(damaged)} of {-(-slot_count // 511)} blocks damaged: order of use lost"
            work.find(FindingKind.RECENCY, path, line, work.repair)
    finally:
        if work.repair:
            recency.close()
        else:
            recency.abandon()


# --- entries, headers, payloads


class _ClassCheck:
    """One pass over the slots of a class, against its index."""

    def __init__(
        self,
        folder: Path,
        layout: _Layout,
        segments: SegmentFiles,
        index: NvmeIndex,
        work: FsckWork,
    ) -> None:
        self._folder = folder
        self._layout = layout
        self._segments = segments
        self._index = index
        self._work = work
        self._keys, self._rows = index.load()
        self._row_of = {key: row for row, key in enumerate(self._keys)}
        self._payload = aligned_buffer(layout.page_bytes)
        # Rows to remove, with what is wrong; a header found later may save one.
        self._bad: dict[int, tuple[FindingKind, str]] = {}
        self._moved: dict[int, tuple[int, SlotHeader]] = {}
        self._retagged: dict[int, tuple[int, SlotHeader]] = {}
        self._unused = 0
        self._unverifiable = 0

    def run(self) -> None:
        """Judge entries, then every slot, then repair in one transaction."""
        row_at = self._judge_places()
        # Slots past a gap are there without repair only, which closes gaps first.
        ready = self._segments.slot_count
        slots = [*range(ready), *(slot for slot in sorted(row_at) if slot >= ready)]
        for done, slot in enumerate(slots, start=1):
            try:
                self._check_slot(slot, row_at.get(slot))
            except TierError as error:
                place = f"{self._folder} slot {slot}"
                self._work.find(FindingKind.UNREADABLE, place, str(error))
            self._work.step(f"nvme {self._folder.name}", done, len(slots))
        self._work.slots += len(slots)
        self._settle()

    def _judge_places(self) -> dict[int, int]:
        """Rows whose slot and size can be right, by slot; the others are bad."""
        rows = self._rows
        slots = rows["slot"].astype(np.int64)
        inside = self._segments.present(slots)
        sized = rows["payload_bytes"] == self._layout.page_bytes
        for row in np.flatnonzero(~inside).tolist():
            line = f"names slot {slots[row]}, which no file has"
            self._bad[row] = (FindingKind.ENTRY_PLACE, line)
        for row in np.flatnonzero(inside & ~sized).tolist():
            line = f"promises {rows['payload_bytes'][row]} bytes in slot {slots[row]}"
            self._bad[row] = (FindingKind.ENTRY_SIZE, line)
        row_at: dict[int, int] = {}
        for row in _by_generation(rows, inside & sized):
            older = row_at.get(int(slots[row]))
            if older is not None:
                line = f"names slot {slots[row]}, which a younger entry names too"
                self._bad[older] = (FindingKind.SLOT_SHARED, line)
            row_at[int(slots[row])] = row
        return row_at

    def _check_slot(self, slot: int, row: int | None) -> None:
        if row is None:
            header = parse_header(self._segments.read_header(slot))
            self._work.read_bytes += HEADER_BYTES
            self._note_unclaimed(slot, header)
            return
        hashed = self._work.verify_payloads and bool(self._rows["flags"][row] & FLAG_CHECKSUM)
        if hashed:
            header = parse_header(self._segments.read(slot, self._payload))
            self._work.read_bytes += HEADER_BYTES + self._layout.page_bytes
        else:
            header = parse_header(self._segments.read_header(slot))
            self._work.read_bytes += HEADER_BYTES
        if header is None or not self._agrees(row, header):
            found = "a damaged header" if header is None else f"the page {header.key.hex()}"
            self._bad[row] = (FindingKind.HEADER, f"slot {slot} has {found}")
            self._note_unclaimed(slot, header)
        elif hashed and payload_checksum(self._payload) != header.checksum:
            self._bad[row] = (FindingKind.PAYLOAD, f"slot {slot} does not have its checksum")
        else:
            self._unverifiable += not header.checksum
            if header.owner != int(self._rows["owner"][row]):
                self._retagged[row] = (slot, header)

    def _agrees(self, row: int, header: SlotHeader) -> bool:
        """Whether the header is of the very commit the entry is of, wherever it lies."""
        entry = self._rows[row]
        checksum = entry["checksum"].tobytes() if entry["flags"] & FLAG_CHECKSUM else b""
        return (
            header.key == self._keys[row]
            and header.payload_bytes == self._layout.page_bytes
            and header.generation == int(entry["generation"])
            and header.checksum == checksum
        )

    def _note_unclaimed(self, slot: int, header: SlotHeader | None) -> None:
        """A header that no entry agrees with: normal, or the page a misplaced entry means."""
        if header is None or header.state != STATE_COMMITTED:
            return
        row = self._row_of.get(header.key)
        if row is not None and header.checksum and self._agrees(row, header):
            self._moved[row] = (slot, header)
        else:
            self._unused += 1

    def _settle(self) -> None:
        """Repair the index and write the findings down."""
        # A misplaced entry is saved when its page was found whole elsewhere, unless that slot
        # holds what it named all along (then the fault is in the payload).
        saved = {row: self._moved[row] for row in self._bad if row in self._moved}
        saved = {row: found for row, found in saved.items() if self._whole(*found)}
        puts = [
            (self._keys[row], pack_entry(header, slot))
            for row, (slot, header) in {**self._retagged, **saved}.items()
        ]
        deletes = [self._keys[row] for row in self._bad if row not in saved]
        repaired = self._work.repair
        if repaired and (deletes or puts):
            self._index.apply(deletes, puts)
        for row, (kind, line) in self._bad.items():
            done = f"; its page is in slot {saved[row][0]}" if row in saved else ""
            self._work.find(kind, self._entry(row), line + done, repaired)
        for row, (slot, header) in self._retagged.items():
            line = f"owner {self._rows['owner'][row]}, slot {slot} says {header.owner}"
            self._work.find(FindingKind.OWNER, self._entry(row), line, repaired)
        self._work.pages += len(self._keys) - len(self._bad) + len(saved)
        self._note()

    def _entry(self, row: int) -> str:
        return f"{self._folder} key {self._keys[row].hex()}"

    def _whole(self, slot: int, header: SlotHeader) -> bool:
        """Read the page an entry would be pointed at: always hashed, whatever was asked."""
        try:
            self._segments.read(slot, self._payload)
        except TierError:
            return False  # The entry goes: what cannot be read is not vouched for.
        self._work.read_bytes += HEADER_BYTES + self._layout.page_bytes
        return payload_checksum(self._payload) == header.checksum

    def _note(self) -> None:
        if self._unverifiable:
            line = f"{self._unverifiable} pages were written without a checksum"
            self._work.find(FindingKind.UNVERIFIABLE, self._folder, line)
        if self._unused:
            line = f"{self._unused} slots hold pages that no entry names, as eviction leaves them"
            self._work.find(FindingKind.UNUSED_PAGES, self._folder, line)


def _by_generation(rows: npt.NDArray[np.void], wanted: npt.NDArray[np.bool_]) -> list[int]:
    """Numbers of the wanted rows, oldest commit first."""
    numbers = np.flatnonzero(wanted)
    order: list[int] = numbers[np.argsort(rows["generation"][numbers], kind="stable")].tolist()
    return order
