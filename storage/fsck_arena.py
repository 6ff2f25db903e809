"""The arena's part of an offline check: its header block, every slot's header and payload.

Owns the mapping while it looks. Repair frees a slot by storing the state word, as the host tier
does; a file that is no longer an arena as a whole is emptied, as opening it would. Called by
storage/fsck.py, for which also the lock is taken here: the arena's lock is on its own file.
"""

from __future__ import annotations

import mmap
import os
import struct
from pathlib import Path

from tierkv.storage.arena import ArenaGeometry, boot_id, read_header
from tierkv.storage.checksum import payload_checksum
from tierkv.storage.fsck_report import FindingKind, FsckWork
from tierkv.storage.inspection import locked_file
from tierkv.storage.slot_header import (
    HEADER_BYTES,
    STATE_COMMITTED,
    STATE_FREE,
    STATE_OFFSET,
    SlotHeader,
    parse_header,
    set_state,
)
from tierkv.storage.types import PageKey

_STATE = struct.Struct("<I")


def check_arena(path: Path, work: FsckWork) -> None:
    """Check one arena file. O(slots), or O(bytes) with payloads; raises as check_store says."""
    with locked_file(path, f"check arena {path}", writable=work.repair) as fd:
        found = read_header(fd, path)
        if found is None:
            _judge_header(path, fd, work)
            return
        geometry, boot = found
        access = mmap.ACCESS_WRITE if work.repair else mmap.ACCESS_READ
        with mmap.mmap(fd, geometry.total_bytes, access=access) as mapped:
            with memoryview(mapped) as memory:
                _ArenaCheck(path, geometry, boot == boot_id(), memory, work).run()
            if work.repair:
                mapped.flush()


def _judge_header(path: Path, fd: int, work: FsckWork) -> None:
    size = os.fstat(fd).st_size
    if not size:
        return
    if work.repair:
        os.ftruncate(fd, 0)
    line = f"header block damaged or file cut short ({size} bytes): its pages are lost"
    work.find(FindingKind.ARENA, path, line, work.repair)


class _ArenaCheck:
    """One pass over the slots."""

    def __init__(
        self,
        path: Path,
        geometry: ArenaGeometry,
        same_boot: bool,
        memory: memoryview,
        work: FsckWork,
    ) -> None:
        self._path = path
        self._geometry = geometry
        self._same_boot = same_boot
        self._memory = memory
        self._work = work
        self._best: dict[PageKey, tuple[int, int]] = {}
        self._unverifiable = 0

    def run(self) -> None:
        """Look at every slot, then sum up."""
        count, work = self._geometry.slot_count, self._work
        for slot in range(count):
            self._check_slot(slot)
            work.step(f"arena {self._path}", slot + 1, count)
        work.slots += count
        work.pages += len(self._best)
        if self._unverifiable:
            work.find(
                FindingKind.UNVERIFIABLE,
                self._path,
                f"{self._unverifiable} pages were written without a checksum",
            )

    def _check_slot(self, slot: int) -> None:
        offset = self._geometry.first_slot + slot * self._geometry.slot_bytes
        (state,) = _STATE.unpack_from(self._memory, offset + STATE_OFFSET)
        self._work.read_bytes += HEADER_BYTES
        if state == STATE_FREE:
            return
        header = parse_header(self._memory, offset)
        if header is None:
            self._free(FindingKind.HEADER, slot, "header damaged")
        elif state != STATE_COMMITTED:
            self._free(FindingKind.HEADER, slot, f"unknown state 0x{state:08x}")
        elif header.payload_bytes != self._geometry.page_bytes:
            expected = self._geometry.page_bytes
            line = f"expected {expected} payload bytes, found {header.payload_bytes}"
            self._free(FindingKind.HEADER, slot, line)
        elif not header.checksum and not self._same_boot:
            line = "no checksum, and the machine was restarted since: stores may be missing"
            self._free(FindingKind.PAYLOAD, slot, line)
        elif self._payload_intact(slot, offset, header):
            self._enter(slot, header)

    def _payload_intact(self, slot: int, offset: int, header: SlotHeader) -> bool:
        if not header.checksum:
            self._unverifiable += 1
            return True
        if not self._work.verify_payloads:
            return True
        start = offset + self._geometry.payload_offset
        payload = self._memory[start : start + header.payload_bytes]
        self._work.read_bytes += len(payload)
        found = payload_checksum(payload)
        if found == header.checksum:
            return True
        line = f"expected checksum {header.checksum.hex()}, found {found.hex()}"
        self._free(FindingKind.PAYLOAD, slot, line)
        return False

    def _enter(self, slot: int, header: SlotHeader) -> None:
        """Keep the younger of two slots with one key."""
        rival = self._best.get(header.key)
        if rival is None:
            self._best[header.key] = (slot, header.generation)
            return
        keep, lose = (slot, rival[0]) if header.generation > rival[1] else (rival[0], slot)
        line = f"holds the key of slot {keep}, which is younger"
        self._free(FindingKind.KEY_TWICE, lose, line)
        self._best[header.key] = (keep, max(header.generation, rival[1]))

    def _free(self, kind: FindingKind, slot: int, line: str) -> None:
        if self._work.repair:
            offset = self._geometry.first_slot + slot * self._geometry.slot_bytes
            set_state(self._memory, offset, STATE_FREE)
        self._work.find(kind, f"{self._path} slot {slot}", line, self._work.repair)
