"""Installs the emulation: imported before a test or a program uses torch.cuda.

cupy brings a CUDA runtime of its own inside, which no library can replace: the few calls that
storage/transfer/kernel_cupy.py makes are redirected here, and its kernels are the same source as
C++. With EMULATED_NO_CUPY set cupy is left as it is, and finds no device.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cupy
from cupy.cuda import driver, function, runtime

from tests.support.cuda_emulation import operators
from tests.support.kernel_on_cpu import BEFORE, RUN
from tierkv.storage.transfer import kernel_cupy
from tierkv.storage.transfer.kernels import SOURCE, THREADS, kernel_names

CUBIN = b"\x7fELF"


class Device:
    """cupy.cuda.Device."""

    compute_capability = "90"

    def __init__(self, index: int) -> None:
        assert index == 0

    def __enter__(self) -> Device:
        return self

    def __exit__(self, *_: object) -> None:
        pass


class Module:
    """cupy.cuda.function.Module over the kernels as C++."""

    addresses: dict[str, int]

    def load(self, cubin: bytes) -> None:
        assert cubin == CUBIN

    def get_function(self, name: str) -> SimpleNamespace:
        return SimpleNamespace(ptr=self.addresses[name])


def build_kernels() -> dict[str, int]:
    """Compile kernels.py's source; the address of each kernel."""
    folder = Path(tempfile.mkdtemp(prefix="tierkv-kernels-"))
    source, library = folder / "pages.cpp", folder / "pages.so"
    before = BEFORE.replace("static Index", "static thread_local Index")
    source.write_text(before + SOURCE + "".join(RUN.format(name=name) for name in kernel_names()))
    command = ["g++", "-std=c++17", "-O2", "-fPIC", "-shared", "-Wno-unknown-pragmas"]
    subprocess.run([*command, str(source), "-o", str(library)], check=True, timeout=120)
    loaded = ctypes.CDLL(str(library))
    found = {}
    for name in kernel_names():
        address = ctypes.cast(loaded[f"run_{name}"], ctypes.c_void_p).value
        assert address is not None
        found[name] = address
    return found


def checked(code: int) -> None:
    """cupy raises for every call that fails."""
    if code:
        raise RuntimeError(f"CUDA error {code}")


def install_cupy() -> None:
    launch, copy = operators.RUNTIME.emulated_launch, operators.RUNTIME.cudaMemcpyAsync
    launch.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_uint, *[ctypes.c_void_p] * 4]
    copy.argtypes = [
        *(ctypes.c_void_p, ctypes.c_void_p),
        *(ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p),
    ]
    Module.addresses = build_kernels()
    names = {address: name for name, address in Module.addresses.items()}

    def launch_kernel(kernel: int, blocks: int, *more: Any) -> None:
        grid, threads, (shared, stream, arguments, extra) = more[:2], more[2:5], more[5:]
        assert (*grid, *threads, shared, extra) == (1, 1, THREADS, 1, 1, 0, 0)
        group, planes, geometry = (ctypes.c_void_p * 3).from_address(arguments)
        table = ctypes.c_uint64.from_address(planes).value
        word = int(names[kernel].rpartition("_")[2])
        checked(launch(kernel, word, blocks, group, table, geometry, stream))

    cupy.cuda.is_available = lambda: True
    cupy.cuda.Device = Device
    function.Module = Module
    driver.launchKernel = launch_kernel
    runtime.setDevice = lambda index: None
    runtime.getDeviceProperties = lambda index: {"multiProcessorCount": 132}
    runtime.pointerGetAttributes = lambda address: SimpleNamespace(devicePointer=address)
    runtime.memcpyAsync = lambda *arguments: checked(copy(*arguments))
    # The compiler itself, NVRTC, is tested where there is no driver: it asks the driver things.
    kernel_cupy.compile_cubin = lambda architecture: CUBIN


operators.install()
if not os.environ.get("EMULATED_NO_CUPY"):
    install_cupy()
