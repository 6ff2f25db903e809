"""Opens the transfer that fits where the KV cache lies. Owns nothing."""

from __future__ import annotations

import torch

from tierkv.storage.transfer.cpu import CpuTransfer
from tierkv.storage.transfer.cuda import CudaTransfer
from tierkv.storage.transfer.layout import KvTensors
from tierkv.storage.transfer.streams import StreamTransfer


def open_transfer(kv: KvTensors) -> StreamTransfer:
    """A transfer for these KV tensors (layout.py says which shapes), which it borrows.

    Then, in this order: register() the host arena, calibrate() or apply() a stored calibration,
    serve, close() before the arena is unmapped. ConfigError for tensors of another shape,
    CapacityError when a device has no memory for the buffers.
    """
    first = kv if isinstance(kv, torch.Tensor) else kv[0]
    return CudaTransfer(kv) if first.device.type == "cuda" else CpuTransfer(kv)
