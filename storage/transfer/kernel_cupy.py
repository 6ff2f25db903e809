"""Compiles and launches the page kernels through cupy. The only file that imports it.

Owns the compiled module of one device. The source and the launch plan are kernels.py's. Launches
go through the driver's own call, with the arguments' addresses spelled out, because they are
structures by value. Called by cuda.py.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable

import cupy
import numpy as np
from cupy.cuda import driver, function, nvrtc, runtime

from tierkv.storage.errors import TierIOError, first_line
from tierkv.storage.transfer.kernels import SOURCE, THREADS, Launch, kernel_names

OPTIONS = ("-std=c++17",)

BLOCKS_MIN = 4
BLOCKS_MAX = 16


class PageKernels:
    """The kernels of kernels.py on one device."""

    def __init__(self, device_index: int) -> None:
        """Compiles for the device at hand, a fraction of a second. TierIOError when the compiler
        or the driver refuses."""
        self._device_index = device_index
        try:
            with cupy.cuda.Device(device_index) as device:
                self._module = function.Module()
                self._module.load(compile_cubin(f"sm_{device.compute_capability}"))
                self._functions = {n: self._module.get_function(n).ptr for n in kernel_names()}
            properties = runtime.getDeviceProperties(device_index)
        except (RuntimeError, OSError, ImportError) as error:
            raise TierIOError(f"load page kernels: {first_line(error)}") from error
        # A sixteenth of the multiprocessors is enough for PCIe, and decode does not miss it.
        multiprocessors = int(properties["multiProcessorCount"])
        self.blocks_max = max(BLOCKS_MIN, min(BLOCKS_MAX, multiprocessors // 16))

    def same_address(self, address: int) -> bool:
        """True when the device sees registered host memory where the host does."""
        return int(runtime.pointerGetAttributes(address).devicePointer) == address

    def launch(self, name: str, launch: Launch, plane_table: int, stream: int) -> None:
        """Put one launch on a stream. RuntimeError when the driver refuses.

        `plane_table`: device address of the planes' addresses (u64), which must stay alive until
        the launch has ended. `stream`: a cudaStream_t.
        """
        runtime.setDevice(self._device_index)
        table = np.array([plane_table], np.uint64)
        addresses = (ctypes.c_void_p * 3)(
            launch.group.ctypes.data, table.ctypes.data, launch.geometry.ctypes.data
        )
        # The driver copies the arguments before the call returns.
        driver.launchKernel(
            self._functions[name],
            *(launch.blocks, 1, 1),
            *(THREADS, 1, 1),
            0,
            stream,
            ctypes.addressof(addresses),
            0,
        )

    def copy(self, runs: Iterable[tuple[int, int, int]], stream: int) -> None:
        """Put copies (target, source, bytes) on a stream; RuntimeError when the driver refuses.

        Addresses on the device or of pinned host memory.
        """
        runtime.setDevice(self._device_index)
        for target, source, nbytes in runs:
            runtime.memcpyAsync(target, source, nbytes, runtime.memcpyDefault, stream)


def compile_cubin(architecture: str) -> bytes:
    """Machine code of the kernels for one architecture ("sm_90"). Needs no device and no driver.

    TierIOError with the compiler's first complaint; ImportError or RuntimeError when there is no
    NVRTC library.
    """
    program = nvrtc.createProgram(SOURCE, "tierkv_pages.cu", (), ())
    try:
        nvrtc.compileProgram(program, (*OPTIONS, f"-arch={architecture}"))
        return bytes(nvrtc.getCUBIN(program))
    except nvrtc.NVRTCError as error:
        log = [line for line in nvrtc.getProgramLog(program).splitlines() if line.strip()]
        raise TierIOError(
            f"compile page kernels for {architecture}: {log[0] if log else error}"
        ) from error
    finally:
        nvrtc.destroyProgram(program)
