"""The nvme tier's recency file: one last-use tick a slot, so that a restart knows what is hot.

Owns recency.bin (docs/formats/nvme.md) and which of its blocks changed. Advisory only: a block
that is missing, torn or damaged reads as "not used since committed", and the index's generations
give the order. Not synced at commits (a power loss may cost recent order, never a page); synced
at close. Thread-safe as the tier uses it: mark() and collect() under the tier's lock, store()
under its publishing lock.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tierkv.storage.checksum import header_checksum
from tierkv.storage.device import BLOCK_BYTES, Device, aligned_buffer

TICKS_PER_BLOCK = BLOCK_BYTES // 8 - 1
_RUN_BLOCKS_MAX = 256
"""Neighbouring blocks go out in one call, below the system's limit of 1024 buffers."""
_SEAL = struct.Struct("<Q")
_SEAL_OFFSET = TICKS_PER_BLOCK * 8


class RecencyFile:
    """Last-use ticks on disk, written a block of 511 slots at a time."""

    def __init__(self, path: Path, device: Device) -> None:
        """Opens or makes the file. TierIOError when that fails."""
        self._file = device.open(path, create=True)
        self._dirty: set[int] = set()

    @staticmethod
    def bytes_for(slot_count: int) -> int:
        """Size of the file for so many slots."""
        return -(-slot_count // TICKS_PER_BLOCK) * BLOCK_BYTES

    def load(self, slot_count: int) -> npt.NDArray[np.uint64]:
        """Ticks of slots [0, slot_count); 0 where a block is missing or damaged. O(slots)."""
        ticks = np.zeros(slot_count, np.uint64)
        present = min(self._file.size(), self.bytes_for(slot_count)) // BLOCK_BYTES
        if not present:
            return ticks
        data = aligned_buffer(present * BLOCK_BYTES)
        self._file.preadv([data], 0)
        for number in range(present):
            block = data[number * BLOCK_BYTES : (number + 1) * BLOCK_BYTES]
            if _SEAL.unpack_from(block, _SEAL_OFFSET)[0] == header_checksum(block[:_SEAL_OFFSET]):
                part = ticks[number * TICKS_PER_BLOCK : (number + 1) * TICKS_PER_BLOCK]
                part[:] = np.frombuffer(block, "<u8", len(part))
        return ticks

    def damaged_blocks(self) -> list[int]:
        """Numbers of blocks that load() reads as zeros though something was written. O(slots)."""
        present = self._file.size() // BLOCK_BYTES
        damaged = []
        block = aligned_buffer(BLOCK_BYTES)
        for number in range(present):
            self._file.preadv([block], number * BLOCK_BYTES)
            sealed = _SEAL.unpack_from(block, _SEAL_OFFSET)[0]
            # A block of zeros is a hole: no page of its slots was ever used.
            if any(block) and sealed != header_checksum(block[:_SEAL_OFFSET]):
                damaged.append(number)
        return damaged

    def clear(self, blocks: Sequence[int]) -> None:
        """Make these blocks say "not used since committed"."""
        for number in blocks:
            self._file.pwritev([aligned_buffer(BLOCK_BYTES)], number * BLOCK_BYTES)

    def shrink(self, slot_count: int) -> None:
        """Cut the file to what `slot_count` slots need."""
        if self._file.size() > self.bytes_for(slot_count):
            self._file.truncate(self.bytes_for(slot_count))

    def mark(self, slots: Sequence[int]) -> None:
        """Note that these slots' ticks changed."""
        self._dirty.update([slot // TICKS_PER_BLOCK for slot in slots])

    def collect(self, ticks: npt.NDArray[np.uint64]) -> dict[int, memoryview]:
        """Copy the changed blocks out of `ticks` (one a slot) and forget that they changed."""
        blocks = {number: _pack_block(ticks, number) for number in self._dirty}
        self._dirty.clear()
        return blocks

    def store(self, blocks: dict[int, memoryview]) -> None:
        """Write collected blocks. TierError when the device refuses: they are then lost."""
        run: list[int] = []
        for number in sorted(blocks):
            if run and (number != run[-1] + 1 or len(run) == _RUN_BLOCKS_MAX):
                self._store_run(blocks, run)
                run = []
            run.append(number)
        if run:
            self._store_run(blocks, run)

    def _store_run(self, blocks: dict[int, memoryview], run: list[int]) -> None:
        self._file.pwritev([blocks[number] for number in run], run[0] * BLOCK_BYTES)

    def abandon(self) -> None:
        """Close the file as it is, for a look that changed nothing."""
        self._file.close()

    def close(self) -> None:
        """Make the file durable and close it. TierIOError when the sync fails; closed anyway."""
        try:
            self._file.fdatasync()
        finally:
            self._file.close()


def _pack_block(ticks: npt.NDArray[np.uint64], number: int) -> memoryview:
    block = aligned_buffer(BLOCK_BYTES)
    part = ticks[number * TICKS_PER_BLOCK : (number + 1) * TICKS_PER_BLOCK]
    np.frombuffer(block, "<u8", len(part))[:] = part
    _SEAL.pack_into(block, _SEAL_OFFSET, header_checksum(block[:_SEAL_OFFSET]))
    return block
