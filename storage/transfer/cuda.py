"""Copies for a pool on a CUDA device: one low-priority stream a direction, pinned staging.

A group of pages is one gather kernel into a contiguous staging tensor on the device and one
cudaMemcpyAsync to pinned memory, or the reverse: never a copy per layer per page. The worker
thread of a direction waits for the copy and moves bytes between the pinned buffer and the views.
"""

from __future__ import annotations

import numpy as np
import torch

from tierkv.storage.transfer.threaded import ThreadedTransfer

STAGING_BYTES = 64 << 20
"""Pinned memory a direction. Larger groups of pages go in several pieces."""


class CudaTransfer(ThreadedTransfer[torch.cuda.Event]):
    """Transfer for a `kv` tensor [layers, 2, pages, page_tokens, kv_heads, head_dim] on CUDA.

    Borrows the tensor; the caller keeps it alive until close(). Raises RuntimeError from torch
    when pinned memory cannot be had.
    """

    def __init__(self, kv: torch.Tensor, staging_bytes: int = STAGING_BYTES) -> None:
        assert kv.device.type == "cuda"
        assert kv.is_contiguous()
        super().__init__()
        layers, two, pages = kv.shape[:3]
        self._device = kv.device
        self._planes = kv.view(torch.uint8).reshape(layers * two, pages, -1)
        self.page_bytes = layers * two * self._planes.shape[2]
        self._group = max(1, staging_bytes // self.page_bytes)
        shape = (self._group, layers * two, self._planes.shape[2])
        self._pinned_out = torch.empty(shape, dtype=torch.uint8, pin_memory=True)
        self._pinned_in = torch.empty(shape, dtype=torch.uint8, pin_memory=True)
        # Priority 0 is the lowest there is: the forward pass runs ahead of copies.
        self._stream_out = torch.cuda.Stream(self._device, priority=0)
        self._stream_in = torch.cuda.Stream(self._device, priority=0)

    def _fence(self) -> torch.cuda.Event:
        event: torch.cuda.Event = torch.cuda.current_stream(self._device).record_event()
        return event

    def _to_host(self, fence: torch.cuda.Event, pages: list[int], views: list[memoryview]) -> None:
        for start in range(0, len(pages), self._group):
            group = pages[start : start + self._group]
            pinned = self._pinned_out[: len(group)]
            with torch.cuda.stream(self._stream_out):
                self._stream_out.wait_event(fence)
                index = torch.tensor(group, device=self._device)
                staging = self._planes.index_select(1, index).transpose(0, 1).contiguous()
                pinned.copy_(staging, non_blocking=True)
                done = self._stream_out.record_event()
            done.synchronize()
            for row, view in zip(pinned, views[start : start + self._group], strict=True):
                np.copyto(np.frombuffer(view, dtype=np.uint8), row.view(-1).numpy())

    def _to_device(
        self, fence: torch.cuda.Event, pages: list[int], views: list[memoryview]
    ) -> None:
        for start in range(0, len(pages), self._group):
            group = pages[start : start + self._group]
            pinned = self._pinned_in[: len(group)]
            for row, view in zip(pinned, views[start : start + self._group], strict=True):
                np.copyto(row.view(-1).numpy(), np.frombuffer(view, dtype=np.uint8))
            with torch.cuda.stream(self._stream_in):
                self._stream_in.wait_event(fence)
                index = torch.tensor(group, device=self._device)
                staging = pinned.to(self._device, non_blocking=True)
                self._planes.index_copy_(1, index, staging.transpose(0, 1).contiguous())
                done = self._stream_in.record_event()
            done.synchronize()
