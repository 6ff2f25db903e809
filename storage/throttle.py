"""A device that reads no faster than it is told, to stand in for slower media in measurements.

Owns the rate and the time at which the medium is next free; everything else is the device below.
Only reads are slowed. Used by `tierkv bench offload` and tests.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from pathlib import Path

from tierkv.storage.device import BlockFile, Device
from tierkv.storage.types import Buffer


class ThrottledDevice:
    """Wraps a Device. Concurrent reads queue for the one medium, in order of arrival."""

    def __init__(self, inner: Device, bytes_per_s: float) -> None:
        self._inner = inner
        self._lock = threading.Lock()
        self._bytes_per_s = bytes_per_s
        self._free_at = 0.0

    def set_rate(self, bytes_per_s: float) -> None:
        """Change the rate for reads that begin from now on."""
        assert bytes_per_s > 0
        with self._lock:
            self._bytes_per_s = bytes_per_s
            self._free_at = 0.0

    def open(self, path: Path, *, create: bool = False) -> BlockFile:
        """See Device.open."""
        return _ThrottledFile(self, self._inner.open(path, create=create))

    def free_bytes(self, path: Path) -> int:
        """See Device.free_bytes."""
        return self._inner.free_bytes(path)

    def sync_directory(self, path: Path) -> None:
        """See Device.sync_directory."""
        self._inner.sync_directory(path)

    def pay(self, nbytes: int) -> None:
        """Wait for as long as the medium takes for `nbytes`, after those before them."""
        with self._lock:
            now = time.monotonic()
            self._free_at = max(now, self._free_at) + nbytes / self._bytes_per_s
            wait_s = self._free_at - now
        time.sleep(wait_s)


class _ThrottledFile:
    """One file of a ThrottledDevice."""

    def __init__(self, device: ThrottledDevice, inner: BlockFile) -> None:
        self._device = device
        self._inner = inner

    @property
    def direct(self) -> bool:
        return self._inner.direct

    def preadv(self, buffers: Sequence[Buffer], offset: int) -> None:
        self._inner.preadv(buffers, offset)
        self._device.pay(sum(len(memoryview(buffer).cast("B")) for buffer in buffers))

    def pwritev(self, buffers: Sequence[Buffer], offset: int) -> None:
        self._inner.pwritev(buffers, offset)

    def fdatasync(self) -> None:
        self._inner.fdatasync()

    def allocate(self, nbytes: int) -> None:
        self._inner.allocate(nbytes)

    def truncate(self, nbytes: int) -> None:
        self._inner.truncate(nbytes)

    def size(self) -> int:
        return self._inner.size()

    def close(self) -> None:
        self._inner.close()
