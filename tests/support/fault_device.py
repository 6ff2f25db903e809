"""A Device that fails on request and remembers what a power loss would take away.

It wraps a real device, so files are real; on top of it:

- fail(): the n-th read, write, fdatasync, allocate or open from now raises EIO, ENOSPC or moves
  too few bytes;
- stall(): the next operation of a kind blocks until released, with a deadline;
- on_point: called before and after every write and sync, named "write:before" and so on;
- power_loss_copy(): a copy of a folder as a disk could show it after a power loss now: what
  was not synced is dropped, kept, or torn at 4 KiB or 512 B, chosen by a seed.

Only files written through the device are rolled back. LMDB writes its own files and syncs them
itself before commit returns, so its folder is copied as it is; creations, renames and
allocations count as durable at once.
"""

from __future__ import annotations

import errno
import os
import random
import shutil
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tierkv.storage.device import BlockFile, Device, DirectDevice, device_error, short_transfer
from tierkv.storage.types import Buffer

SECTOR_BYTES = 512
SHORT = -1
"""Stands for "moves half the bytes" where an errno is expected."""
STALL_LIMIT_S = 30.0


@dataclass
class _Fault:
    operation: str
    after: int
    times: int
    code: int


class Stall:
    """One operation held up until release()."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self._released = threading.Event()

    def release(self) -> None:
        self._released.set()

    def hold(self) -> None:
        self.reached.set()
        assert self._released.wait(STALL_LIMIT_S), "nobody released the stalled operation"


class FaultDevice:
    """Device with faults. Thread-safe."""

    def __init__(
        self,
        inner: Device | None = None,
        on_point: Callable[[str], None] | None = None,
        free_bytes: int | None = None,
    ) -> None:
        self._inner = inner or DirectDevice()
        self._lock = threading.RLock()
        self._faults: list[_Fault] = []
        self._stalls: dict[str, Stall] = {}
        self.on_point = on_point
        self.free = free_bytes
        """What free_bytes() answers; None asks the real file system."""
        self.operations: dict[str, int] = {}
        # Content before the first unsynced write, by file and sector.
        self.unsynced: dict[Path, dict[int, bytes]] = {}
        # The same for writes whose sync failed: a later sync does not save them.
        self._lost: dict[Path, dict[int, bytes]] = {}

    def fail(self, operation: str, code: int, after: int = 0, times: int = 1) -> None:
        """Let `after` operations of this kind pass, then fail `times` of them with `code`."""
        with self._lock:
            self._faults.append(_Fault(operation, after, times, code))

    def heal(self) -> None:
        """Forget all faults not met yet."""
        with self._lock:
            self._faults.clear()

    def stall(self, operation: str) -> Stall:
        """Hold up the next operation of this kind."""
        with self._lock:
            self._stalls[operation] = stall = Stall()
            return stall

    def open(self, path: Path, *, create: bool = False) -> BlockFile:
        self.meet("open", path)
        return _FaultFile(self, self._inner.open(path, create=create), path)

    def free_bytes(self, path: Path) -> int:
        return self._inner.free_bytes(path) if self.free is None else self.free

    def sync_directory(self, path: Path) -> None:
        self._inner.sync_directory(path)

    def meet(self, operation: str, path: Path) -> bool:
        """Count an operation and raise its fault; True when it shall be short."""
        with self._lock:
            self.operations[operation] = self.operations.get(operation, 0) + 1
            stall = self._stalls.pop(operation, None)
            code = self._due(operation)
        if stall is not None:
            stall.hold()
        if code not in (0, SHORT):
            raise device_error(operation, path, OSError(code, os.strerror(code)))
        return code == SHORT

    def _due(self, operation: str) -> int:
        for fault in self._faults:
            if fault.operation != operation:
                continue
            if fault.after:
                fault.after -= 1
                return 0
            fault.times -= 1
            if fault.times == 0:
                self._faults.remove(fault)
            return fault.code
        return 0

    def point(self, name: str) -> None:
        """Tell whoever listens that the workload is at this point."""
        if self.on_point is not None:
            self.on_point(name)

    def remember(self, path: Path, offset: int, nbytes: int) -> None:
        """Keep what a write is about to replace."""
        first, last = offset // SECTOR_BYTES, -(-(offset + nbytes) // SECTOR_BYTES)
        with self._lock, path.open("rb") as file:
            kept = self.unsynced.setdefault(path, {})
            file.seek(first * SECTOR_BYTES)
            old = file.read((last - first) * SECTOR_BYTES)
            for sector in range(first, last):
                start = (sector - first) * SECTOR_BYTES
                kept.setdefault(sector, old[start : start + SECTOR_BYTES])

    def synced(self, path: Path) -> None:
        """A sync of this file succeeded."""
        with self._lock:
            self.unsynced.pop(path, None)

    def sync_failed(self, path: Path) -> None:
        """A sync failed: what was waiting for it never becomes durable."""
        with self._lock:
            lost = self._lost.setdefault(path, {})
            for sector, old in self.unsynced.pop(path, {}).items():
                lost.setdefault(sector, old)

    def power_loss_copy(self, source: Path, target: Path, mode: str, seed: int = 0) -> None:
        """Copy `source` to `target` as it may look after a power loss now.

        mode: "drop" (nothing unsynced arrived), "keep" (all did), "torn4096" or "torn512" (each
        unit did or did not, by `seed`).
        """
        shutil.copytree(source, target)
        chance = random.Random(seed)
        unit = {"torn4096": 4096, "torn512": 512}.get(mode, SECTOR_BYTES)
        with self._lock:
            waiting = [(p, s) for p, s in self.unsynced.items() if mode != "keep"]
            for path, sectors in [*waiting, *self._lost.items()]:
                copy = target / path.relative_to(source)
                if copy.exists():
                    _roll_back(copy, sectors, unit, chance, torn=mode.startswith("torn"))


class _FaultFile:
    """BlockFile that asks its device before every operation."""

    def __init__(self, device: FaultDevice, inner: BlockFile, path: Path) -> None:
        self._device = device
        self._inner = inner
        self._path = path
        self.direct = inner.direct

    def preadv(self, buffers: Sequence[Buffer], offset: int) -> None:
        if self._device.meet("read", self._path):
            expected = sum(len(b) for b in buffers)
            raise short_transfer("read", self._path, offset, expected, expected // 2)
        self._inner.preadv(buffers, offset)

    def pwritev(self, buffers: Sequence[Buffer], offset: int) -> None:
        self._device.point("write:before")
        nbytes = sum(len(b) for b in buffers)
        self._device.remember(self._path, offset, nbytes)
        if self._device.meet("write", self._path):
            self._inner.pwritev(buffers[:1], offset)
            raise short_transfer("write", self._path, offset, nbytes, len(buffers[0]))
        self._inner.pwritev(buffers, offset)
        self._device.point("write:after")

    def fdatasync(self) -> None:
        self._device.point("sync:before")
        try:
            self._device.meet("fdatasync", self._path)
        except BaseException:
            self._device.sync_failed(self._path)
            raise
        self._inner.fdatasync()
        self._device.synced(self._path)
        self._device.point("sync:after")

    def allocate(self, nbytes: int) -> None:
        self._device.meet("allocate", self._path)
        self._inner.allocate(nbytes)

    def truncate(self, nbytes: int) -> None:
        self._inner.truncate(nbytes)

    def size(self) -> int:
        return self._inner.size()

    def close(self) -> None:
        self._inner.close()


def flip_bit(path: Path, offset: int, bit: int = 0) -> None:
    """Damage one bit of a file, as a failing disk would."""
    with path.open("r+b") as file:
        file.seek(offset)
        value = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([value ^ (1 << bit)]))
        file.flush()
        os.fsync(file.fileno())


def _roll_back(
    copy: Path, sectors: dict[int, bytes], unit: int, chance: random.Random, torn: bool
) -> None:
    decided: dict[int, bool] = {}
    with copy.open("r+b") as file:
        for sector in sorted(sectors):
            block = sector * SECTOR_BYTES // unit
            if block not in decided:
                decided[block] = torn and chance.random() < 0.5
            if not decided[block]:
                old = sectors[sector]
                file.seek(sector * SECTOR_BYTES)
                # Past the old end of the file nothing had been written: it reads as zeros.
                file.write(old.ljust(SECTOR_BYTES, b"\0"))


EIO = errno.EIO
ENOSPC = errno.ENOSPC
