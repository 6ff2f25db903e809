"""Copies for a pool in ordinary memory, by numpy, which releases the GIL while it copies.

Forward passes on the CPU are synchronous, so that whatever wrote or read a page has ended when
gather or scatter is called: there is nothing to fence.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from tierkv.storage.transfer.threaded import ThreadedTransfer


class CpuTransfer(ThreadedTransfer[None]):
    """Transfer for a `kv` tensor [layers, 2, pages, page_tokens, kv_heads, head_dim] on the CPU.

    Borrows the tensor; the caller keeps it alive until close().
    """

    def __init__(self, kv: torch.Tensor) -> None:
        assert kv.device.type == "cpu"
        assert kv.is_contiguous()
        super().__init__()
        layers, two, pages = kv.shape[:3]
        flat = kv.view(torch.uint8).numpy()
        self._planes: npt.NDArray[np.uint8] = flat.reshape(layers * two, pages, -1)
        self.page_bytes = layers * two * self._planes.shape[2]

    def _fence(self) -> None:
        return None

    def _to_host(self, fence: None, pages: list[int], views: list[memoryview]) -> None:
        for page, view in zip(pages, views, strict=True):
            np.copyto(self._as_planes(view), self._planes[:, page])

    def _to_device(self, fence: None, pages: list[int], views: list[memoryview]) -> None:
        for page, view in zip(pages, views, strict=True):
            np.copyto(self._planes[:, page], self._as_planes(view))

    def _as_planes(self, view: memoryview) -> npt.NDArray[np.uint8]:
        return np.frombuffer(view, dtype=np.uint8).reshape(len(self._planes), -1)
