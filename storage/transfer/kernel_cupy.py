"""Compiles and launches the page kernels through cupy. The only file that imports it.

Owns the compiled module of one device. The source and the launch plan are kernels.py's. Launches
go through the driver's own call, with the arguments' addresses spelled out, because they are
structures by value. Called by cuda.py.
"""

from __future__ import annotations

import ctypes

import cupy
import numpy as np
from cupy.cuda import driver, runtime
from cupy.cuda.compiler import CompileException

from tierkv.storage.errors import TierIOError
from tierkv.storage.transfer.kernels import SOURCE, THREADS, Launch, kernel_names

OPTIONS = ("-std=c++17",)

BLOCKS_MIN = 4
BLOCKS_MAX = 16


class PageKernels:
    """The kernels of kernels.py on one device."""

    def __init__(self, device_index: int) -> None:
        """Compiles for the device at hand (cupy keeps the result on disk). TierIOError when the
        compiler or the driver refuses."""
        self._device_index = device_index
        try:
            with cupy.cuda.Device(device_index):
                module = cupy.RawModule(code=SOURCE, options=OPTIONS, backend="nvrtc")
                self._functions = {n: module.get_function(n).kernel for n in kernel_names()}
            properties = runtime.getDeviceProperties(device_index)
        except (RuntimeError, OSError, ImportError, CompileException) as error:
            raise TierIOError(
                f"compile page kernels: {str(error).splitlines()[0] if str(error) else error!r}"
            ) from error
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
        function = self._functions[name].ptr
        # The driver copies the arguments before the call returns.
        driver.launchKernel(
            function,
            *(launch.blocks, 1, 1),
            *(THREADS, 1, 1),
            0,
            stream,
            ctypes.addressof(addresses),
            0,
        )
