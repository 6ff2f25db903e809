"""Copies for a pool in ordinary memory, by numpy, which releases the GIL while it copies.

Forward passes on the CPU are synchronous: whatever wrote or read a page has ended when gather or
scatter is called, so there is nothing to fence. A move has ended when it returns; the lanes'
threads are the streams, and a restore still arrives layer by layer.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from tierkv.storage.transfer.device_ops import DeviceOps, Wait
from tierkv.storage.transfer.layout import KvTensors, PagedKv
from tierkv.storage.transfer.streams import StreamTransfer

STEP_BYTES = 4 << 20
"""Least bytes of one layer step of a restore: smaller ones are mostly overhead."""

_DONE = object()


class HostOps(DeviceOps):
    """Moves within host memory; every event is done at once."""

    @property
    def method(self) -> str:
        return "cpu"

    def __init__(self, kv: KvTensors) -> None:
        self._kv = PagedKv(kv)
        assert self._kv.device.type == "cpu", f"tensors on {self._kv.device}"
        self.layers = self._kv.layers
        self.planes_per_layer = self._kv.planes_per_layer
        self.row_bytes = self._kv.row_bytes
        self.pages = self._kv.pages
        self._planes: list[npt.NDArray[np.uint8]] = [p.numpy() for p in self._kv.planes]
        stacked = self._kv.stacked
        self._stacked: npt.NDArray[np.uint8] | None = None if stacked is None else stacked.numpy()

    def new_stream(self, name: str) -> object:
        return name

    def compute_stream(self) -> object:
        return "compute"

    def record(self, stream: object) -> object:
        return _DONE

    def stream_wait(self, stream: object, event: object, why: Wait) -> None:
        return None

    def event_done(self, event: object, why: Wait) -> bool:
        return True

    def reachable(self, views: Sequence[memoryview]) -> bool:
        return True

    def bounce_halves(self, name: str) -> list[list[memoryview]]:
        return []

    def step_layers(self, page_count: int, *, reachable: bool) -> int:
        layer_bytes = max(1, page_count * self.planes_per_layer * self.row_bytes)
        return max(1, STEP_BYTES // layer_bytes)

    def move_out(
        self, stream: object, pages: Sequence[int], views: Sequence[memoryview], planes: range
    ) -> None:
        for page, view in zip(pages, views, strict=True):
            rows = self._rows(view, planes)
            if self._stacked is not None:
                np.copyto(rows, self._stacked[planes.start : planes.stop, page])
            else:
                for row, plane in zip(rows, planes, strict=True):
                    np.copyto(row, self._planes[plane][page])

    def move_in(
        self, stream: object, views: Sequence[memoryview], pages: Sequence[int], planes: range
    ) -> None:
        for page, view in zip(pages, views, strict=True):
            rows = self._rows(view, planes)
            if self._stacked is not None:
                np.copyto(self._stacked[planes.start : planes.stop, page], rows)
            else:
                for row, plane in zip(rows, planes, strict=True):
                    np.copyto(self._planes[plane][page], row)

    def register(self, memory: memoryview, *, unit_bytes: int, first_bytes: int) -> int:
        return memory.nbytes

    def pinned_bytes(self) -> int:
        return 0

    def close(self) -> None:
        return None

    def _rows(self, view: memoryview, planes: range) -> npt.NDArray[np.uint8]:
        """The planes' part of a payload as [planes, row_bytes]."""
        payload = np.frombuffer(view, dtype=np.uint8).reshape(-1, self.row_bytes)
        return payload[planes.start : planes.stop]


class CpuTransfer(StreamTransfer):
    """Transfer for KV tensors on the CPU (layout.py says which shapes).

    Borrows the tensors; the caller keeps them alive until close().
    """

    def __init__(self, kv: KvTensors) -> None:
        super().__init__(HostOps(kv))
