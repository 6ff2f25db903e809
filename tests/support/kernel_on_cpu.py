"""Runs the CUDA kernels' own source on the CPU: every block and thread in turn, as plain C++.

The source has no barrier and no shared memory, so that threads may run one after the other. What
CUDA gives a kernel is declared by a few lines in front; what starts it is a loop behind.
"""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from tierkv.storage.device import address_of
from tierkv.storage.transfer.kernels import (
    SOURCE,
    Launch,
    kernel_names,
    plan_launches,
    word_size,
)
from tierkv.storage.transfer.layout import PagedKv

BEFORE = """
#define __device__
#define __global__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(threads)
struct Index { unsigned int x, y, z; };
static Index threadIdx, blockIdx, gridDim;
struct uint4 { unsigned int x, y, z, w; } __attribute__((aligned(16)));
template <typename T> static inline T __ldcs(const T *from) { return *from; }
template <typename T> static inline void __stcs(T *to, T value) { *to = value; }
"""

RUN = """
extern "C" void run_{name}(unsigned int blocks, const PageGroup *group, const u64 *planes,
                           const Geometry *geometry) {{
    gridDim.x = blocks;
    for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x)
        for (threadIdx.x = 0; threadIdx.x < THREADS; ++threadIdx.x)
            {name}(*group, planes, *geometry);
}}
"""


class KernelOnCpu:
    """The compiled kernels."""

    def __init__(self, folder: Path) -> None:
        """Compiles in `folder`. Fails when there is no C++ compiler."""
        source = folder / "pages.cpp"
        runs = "".join(RUN.format(name=name) for name in kernel_names())
        source.write_text(BEFORE + SOURCE + runs)
        library = folder / "pages.so"
        command = ["g++", "-std=c++17", "-O1", "-fPIC", "-shared", "-Wall", "-Wextra", "-Werror"]
        # The sources' own pragma is for the CUDA compiler.
        command += ["-Wno-unknown-pragmas", "-fsanitize=undefined", "-fno-sanitize-recover"]
        subprocess.run([*command, str(source), "-o", str(library)], check=True, timeout=120)
        self._library = ctypes.CDLL(str(library))

    def launch(self, name: str, launch: Launch, plane_table: int) -> None:
        """What PageKernels.launch() does on a device."""
        self._library[f"run_{name}"](
            ctypes.c_uint(launch.blocks),
            ctypes.c_void_p(launch.group.ctypes.data),
            ctypes.c_void_p(plane_table),
            ctypes.c_void_p(launch.geometry.ctypes.data),
        )

    def move(
        self,
        way: str,
        kv: PagedKv,
        pages: Sequence[int],
        views: Sequence[memoryview],
        planes: range,
        *,
        blocks_max: int,
    ) -> int:
        """Run "gather" or "scatter" between pages and views; return the word size it used."""
        table = np.array([plane.data_ptr() for plane in kv.planes], np.uint64)
        addresses = [address_of(view) for view in views]
        word = word_size(kv.row_bytes, kv.page_stride, [*addresses, *table.tolist()])
        for launch in plan_launches(
            pages,
            addresses,
            planes,
            row_bytes=kv.row_bytes,
            page_stride=kv.page_stride,
            word_bytes=word,
            blocks_max=blocks_max,
        ):
            self.launch(f"tierkv_{way}_{word}", launch, table.ctypes.data)
        return word


def aligned_views(count: int, page_bytes: int, *, shift: int = 0) -> list[memoryview]:
    """Page buffers at multiples of 4 KiB, plus `shift` bytes, with bytes between them."""
    slot = -(-page_bytes // 4096 + 1) * 4096 + 4096
    raw = np.full((count + 1) * slot + 4096, 0xDB, np.uint8)
    start = -address_of(memoryview(raw.data)) % 4096 + shift
    starts = range(start, start + count * slot, slot)
    return [memoryview(raw[at : at + page_bytes].data) for at in starts]


def payload(kv: torch.Tensor, page: int) -> bytes:
    """A page's payload by definition, docs/formats/page.md."""
    part = kv[:, :, page] if kv.dim() == 6 else kv[:, page]
    return part.contiguous().view(torch.uint8).numpy().tobytes()
