"""The nvme tier's slot files: slot numbers in, aligned transfers out.

Owns the open segment files and per-thread scratch memory. Knows slot images only as a header
block and a payload; which slots hold pages is not known here. Invariants: slot n lies in segment
n // slots_per_segment; every transfer is one vectored call, aligned to 4 KiB in address, length
and offset. Thread-safe: different slots may be moved at once. Called by nvme.py and nvme_index.py.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tierkv.storage.checksum import copy_bytes
from tierkv.storage.device import BLOCK_BYTES, BlockFile, Device, address_of, aligned_buffer
from tierkv.storage.errors import TierError
from tierkv.storage.slot_header import HEADER_BYTES, slot_bytes_for
from tierkv.storage.types import Buffer


class _Scratch(threading.local):
    """One thread's aligned memory: a header block, a block for an odd tail, a bounce buffer."""

    def __init__(self) -> None:
        self.header = aligned_buffer(HEADER_BYTES)
        self.tail = aligned_buffer(BLOCK_BYTES)
        self.bounce: memoryview | None = None


class SegmentFiles:
    """Slots [0, slot_count) spread over a few large files."""

    def __init__(
        self, folder: Path, device: Device, page_bytes: int, slots_per_segment: int
    ) -> None:
        """Opens the segments that are there. TierIOError when one cannot be opened."""
        self.folder = folder
        self.page_bytes = page_bytes
        self.slot_bytes = slot_bytes_for(page_bytes)
        self.slots_per_segment = slots_per_segment
        self._device = device
        self._whole_bytes = page_bytes // BLOCK_BYTES * BLOCK_BYTES
        self._scratch = _Scratch()
        self._files: list[BlockFile] = []
        self._sizes: list[int] = []
        try:
            for number in range(self._existing()):
                file = device.open(self._path(number), create=True)
                self._files.append(file)
                self._sizes.append(file.size())
        except TierError:
            self.close()
            raise

    @property
    def direct(self) -> bool:
        """True when every open segment bypasses the page cache."""
        return all(file.direct for file in self._files)

    @property
    def slot_count(self) -> int:
        """Slots from 0 on that have room on the device without a gap."""
        count = 0
        for size in self._sizes:
            whole = min(size // self.slot_bytes, self.slots_per_segment)
            count += whole
            if whole < self.slots_per_segment:
                break
        return count

    def close_gaps(self) -> None:
        """Stretch files that are missing or short before the last one, without taking space.

        Their pages are gone; their slots can be written again.
        """
        full = self.slots_per_segment * self.slot_bytes
        for number in range(len(self._files) - 1):
            if self._sizes[number] < full:
                self._files[number].truncate(full)
                self._sizes[number] = full

    def cut_ragged(self) -> None:
        """Cut what is no whole slot, or past the segment's last one, off every file."""
        full = self.slots_per_segment * self.slot_bytes
        for number, size in enumerate(self._sizes):
            whole = min(size // self.slot_bytes * self.slot_bytes, full)
            if size != whole:
                self._files[number].truncate(whole)
                self._sizes[number] = whole

    def present(self, slots: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Which of these slots lie wholly inside a file."""
        if not self._sizes:
            return np.zeros(len(slots), np.bool_)
        sizes = np.array(self._sizes, np.int64) // self.slot_bytes
        segment = slots // self.slots_per_segment
        known = (slots >= 0) & (segment < len(sizes))
        inside = slots % self.slots_per_segment < sizes[np.where(known, segment, 0)]
        return known & inside

    def grow(self, slot_count: int) -> None:
        """Allocate room so that slots [0, slot_count) exist. TierFullError when there is none."""
        for number in range(-(-slot_count // self.slots_per_segment)):
            held = min(self.slots_per_segment, slot_count - number * self.slots_per_segment)
            wanted = held * self.slot_bytes
            if number == len(self._files):
                self._files.append(self._device.open(self._path(number), create=True))
                self._sizes.append(self._files[number].size())
                self._device.sync_directory(self.folder)
            if self._sizes[number] < wanted:
                self._files[number].allocate(wanted)
                self._sizes[number] = wanted

    def shrink(self, slot_count: int) -> None:
        """Give back what lies past slot `slot_count`: no live page may be there."""
        keep = -(-slot_count // self.slots_per_segment)
        while len(self._files) > keep:
            self._files.pop().close()
            self._sizes.pop()
            self._path(len(self._files)).unlink()
        if self._files:
            last = len(self._files) - 1
            wanted = (slot_count - last * self.slots_per_segment) * self.slot_bytes
            if self._sizes[last] > wanted:
                self._files[last].truncate(wanted)
                self._sizes[last] = wanted

    def write(self, slot: int, header: bytes, payload: memoryview) -> None:
        """Write one slot image. Straight from `payload` when it is 4 KiB aligned, else copied."""
        if not _aligned(payload):
            payload = self._bounced(payload)
        self._put_header(header)
        file, offset = self._place(slot)
        file.pwritev(self._image(payload, fill_tail=True), offset)

    def write_header(self, slot: int, header: bytes) -> None:
        """Write only the header block."""
        self._put_header(header)
        file, offset = self._place(slot)
        file.pwritev([self._scratch.header], offset)

    def read(self, slot: int, out: memoryview) -> memoryview:
        """Read one slot image: the payload into `out`, the header block into what is returned.

        The returned block is this thread's scratch, valid until its next transfer.
        """
        target = out if _aligned(out) else self._bounce()
        file, offset = self._place(slot)
        file.preadv(self._image(target, fill_tail=False), offset)
        if len(target) > self._whole_bytes:
            target[self._whole_bytes :] = self._scratch.tail[: len(target) - self._whole_bytes]
        if target is not out:
            copy_bytes(out, target)
        return self._scratch.header

    def read_header(self, slot: int) -> memoryview:
        """Read only the header block, into this thread's scratch."""
        file, offset = self._place(slot)
        file.preadv([self._scratch.header], offset)
        return self._scratch.header

    def sync(self, slots: Iterable[int]) -> None:
        """Make everything written to the files of these slots durable."""
        for number in sorted({slot // self.slots_per_segment for slot in slots}):
            self._files[number].fdatasync()

    def close(self) -> None:
        """Close all files. Idempotent."""
        for file in self._files:
            file.close()

    def _place(self, slot: int) -> tuple[BlockFile, int]:
        number, within = divmod(slot, self.slots_per_segment)
        return self._files[number], within * self.slot_bytes

    def _put_header(self, header: bytes) -> None:
        # Bytes past the packed fields are zero in the scratch and stay so.
        self._scratch.header[: len(header)] = header

    def _image(self, payload: memoryview, fill_tail: bool) -> list[Buffer]:
        """The iovec of a slot image: header block, whole blocks, and a block for the tail."""
        image: list[Buffer] = [self._scratch.header]
        if self._whole_bytes:
            image.append(payload[: self._whole_bytes])
        rest = self.page_bytes - self._whole_bytes
        if rest:
            tail = self._scratch.tail
            if fill_tail:
                tail[:rest] = payload[self._whole_bytes :]
                tail[rest:] = bytes(BLOCK_BYTES - rest)
            image.append(tail)
        return image

    def _bounce(self) -> memoryview:
        if self._scratch.bounce is None:
            self._scratch.bounce = aligned_buffer(self.page_bytes)
        return self._scratch.bounce

    def _bounced(self, payload: memoryview) -> memoryview:
        bounce = self._bounce()
        copy_bytes(bounce, payload)
        return bounce

    def _path(self, number: int) -> Path:
        return self.folder / f"segment-{number:05d}.slots"

    def _existing(self) -> int:
        """One more than the highest segment number present: a gap counts as an empty file."""
        numbers = [int(p.stem.split("-")[1]) for p in self.folder.glob("segment-[0-9]*.slots")]
        return max(numbers, default=-1) + 1


def _aligned(buffer: memoryview) -> bool:
    return address_of(buffer) % BLOCK_BYTES == 0
