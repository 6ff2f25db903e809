"""The CUDA transfer without a GPU: its own code over fake streams and the kernels run on the CPU,
what is registered when memory is refused, and what is said when a part of CUDA is missing."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.support.kernel_on_cpu import KernelOnCpu, aligned_views, payload
from tierkv.storage.clock import SystemClock
from tierkv.storage.device import address_of
from tierkv.storage.errors import CapacityError, TierIOError, first_line
from tierkv.storage.transfer import cuda, probe
from tierkv.storage.transfer.calibration import calibrate
from tierkv.storage.transfer.kernels import Launch
from tierkv.storage.transfer.layout import PagedKv
from tierkv.storage.transfer.pinned import PinnedRanges
from tierkv.storage.transfer.streams import StreamTransfer

DEADLINE_S = 20.0


class FakeEvent:
    def query(self) -> bool:
        return True


class FakeStream:
    """Runs everything at once."""

    made = 0

    def __init__(self, device: object = None, priority: int = 0) -> None:
        FakeStream.made += 1
        self.cuda_stream = FakeStream.made
        self.waited: list[object] = []

    def record_event(self) -> FakeEvent:
        return FakeEvent()

    def wait_event(self, event: object) -> None:
        self.waited.append(event)


class FakeRuntime:
    """cudaHostRegister and its opposite, with a limit on what may be locked."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.registered: dict[int, int] = {}

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        if sum(self.registered.values()) + size > self.limit_bytes:
            return 2
        self.registered[address] = size
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        return 0 if self.registered.pop(address, None) is not None else 1


class FakeKernels:
    """PageKernels whose launches run at once, on the CPU."""

    blocks_max = 3

    def __init__(self, on_cpu: KernelOnCpu) -> None:
        self.on_cpu = on_cpu
        self.launched: list[str] = []

    def same_address(self, address: int) -> bool:
        return True

    def launch(self, name: str, launch: Launch, plane_table: int, stream: int) -> None:
        self.launched.append(name)
        self.on_cpu.launch(name, launch, plane_table)

    def copy(self, runs: Iterable[tuple[int, int, int]], stream: int) -> None:
        for target, source, nbytes in runs:
            ctypes.memmove(target, source, nbytes)


@pytest.fixture(scope="module")
def on_cpu(tmp_path_factory: pytest.TempPathFactory) -> KernelOnCpu:
    return KernelOnCpu(tmp_path_factory.mktemp("kernels"))


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> FakeRuntime:
    """torch.cuda with streams that run at once; small buffers, so that groups are cut."""
    compute = FakeStream()
    found = FakeRuntime(limit_bytes=1 << 30)
    monkeypatch.setattr(torch.cuda, "Stream", FakeStream)
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: compute)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "cudart", lambda: found)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    monkeypatch.setattr(
        cuda.CudaOps, "_host_buffer", lambda ops, size: torch.empty(size, dtype=torch.uint8)
    )
    return found


def sizes(monkeypatch: pytest.MonkeyPatch, page_bytes: int) -> None:
    monkeypatch.setattr(cuda, "BOUNCE_BYTES", 4 * page_bytes)
    monkeypatch.setattr(cuda, "STAGING_BYTES", 3 * page_bytes)
    monkeypatch.setattr(cuda, "STEP_BYTES", 1)
    monkeypatch.setattr(cuda, "PIECE_BYTES", 1)


@pytest.fixture(params=["kernel", "kernel staged", "torch staged"])
def kernels(
    request: pytest.FixtureRequest, on_cpu: KernelOnCpu, monkeypatch: pytest.MonkeyPatch
) -> Iterator[str]:
    fake = FakeKernels(on_cpu) if request.param.startswith("kernel") else None
    monkeypatch.setattr(cuda.CudaOps, "_load_kernels", lambda ops: fake)
    yield "kernel" if request.param == "kernel" else "copies"


SHAPES = {"heads": (3, 2, 12, 4, 2, 8), "latent": (3, 12, 4, 24)}


@pytest.mark.parametrize("registered", ["all", "part", "none"])
@pytest.mark.parametrize("per_layer", [False, True])
@pytest.mark.parametrize("name", SHAPES)
def test_w1_pages_come_back_bit_for_bit_by_every_way(
    runtime: FakeRuntime,
    kernels: str,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    per_layer: bool,
    registered: str,
) -> None:
    kv = torch.randn(SHAPES[name]).to(torch.bfloat16)
    kv_layers = [layer.clone() for layer in kv] if per_layer else list(kv)
    page_bytes = PagedKv(kv).page_bytes
    sizes(monkeypatch, page_bytes)
    transfer = StreamTransfer(cuda.CudaOps(kv_layers if per_layer else kv))
    transfer.ops.choose(kernels, kernels)
    views = aligned_views(7, page_bytes)
    start = address_of(views[0])
    # One mapping around all views, as the arena is: pages with headers between them.
    length = address_of(views[-1]) + page_bytes - start
    arena = memoryview((ctypes.c_uint8 * length).from_address(start)).cast("B")
    unit = address_of(views[1]) - start
    if registered != "none":
        whole = arena if registered == "all" else arena[: 3 * unit]
        assert transfer.register(whole, unit_bytes=unit) == whole.nbytes
    pages = [4, 11, 0, 7, 3, 9, 2]
    expected = [payload(kv, page) for page in pages]
    saved = transfer.gather(pages, views)
    assert saved.wait(DEADLINE_S)
    assert saved.error is None
    assert [bytes(view) for view in views] == expected
    back = list(reversed(pages))
    loaded = transfer.scatter([view.toreadonly() for view in views], back)
    for layer in range(3):
        loaded.wait_layer(layer, DEADLINE_S)
    assert loaded.wait(DEADLINE_S)
    assert loaded.error is None
    now = torch.stack(kv_layers)
    assert [payload(now, page) for page in back] == expected
    stats = transfer.stats()
    assert stats.bounced_pages == (0 if registered == "all" else 14)
    transfer.close()
    assert runtime.registered == {}


@pytest.mark.parametrize("layers", [1, 16])
def test_p3_a_group_of_pages_is_one_launch_however_many_layers(
    runtime: FakeRuntime, on_cpu: KernelOnCpu, monkeypatch: pytest.MonkeyPatch, layers: int
) -> None:
    fake = FakeKernels(on_cpu)
    monkeypatch.setattr(cuda.CudaOps, "_load_kernels", lambda ops: fake)
    transfer = StreamTransfer(cuda.CudaOps(torch.randn(layers, 2, 40, 4, 2, 8)))
    memory = np.zeros((30, transfer.page_bytes), np.uint8)
    transfer.register(memoryview(memory.data).cast("B"))
    views = [memoryview(row.data) for row in memory]
    # Staged, the kernel is the same; beside it there is one copy of a run of adjacent pages.
    for method in ("kernel", "copies"):
        transfer.ops.choose(method, method)
        fake.launched.clear()
        assert transfer.gather(list(range(30)), views).wait(DEADLINE_S)
        assert transfer.scatter(views, list(range(30))).wait(DEADLINE_S)
        assert fake.launched == ["tierkv_gather_16", "tierkv_scatter_16"]
    transfer.close()


def test_adjacent_pages_travel_in_one_copy() -> None:
    runs = list(cuda.host_runs([1000, 1100, 1200, 1400, 1500, 1000], 100, 7))
    assert runs == [(0, 1007, 300), (300, 1407, 200), (500, 1007, 100)]


def test_calibration_measures_every_way_and_keeps_the_pages(
    runtime: FakeRuntime, on_cpu: KernelOnCpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    kv = torch.randn(SHAPES["heads"])
    before = kv.clone()
    sizes(monkeypatch, PagedKv(kv).page_bytes)
    monkeypatch.setattr(cuda.CudaOps, "_load_kernels", lambda ops: FakeKernels(on_cpu))
    transfer = StreamTransfer(cuda.CudaOps(kv))
    found = calibrate(transfer, SystemClock(), rounds=2)
    assert set(found.out_bytes_per_s) == set(found.in_bytes_per_s) == {"kernel", "copies"}
    assert found.out_method == max(found.out_bytes_per_s, key=found.out_bytes_per_s.__getitem__)
    assert torch.equal(kv, before)
    transfer.close()


def test_c3_memory_that_cannot_be_locked_is_said_once_and_the_rest_is_used(
    runtime: FakeRuntime, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    kv = torch.randn(SHAPES["heads"])
    monkeypatch.setattr(cuda.CudaOps, "_load_kernels", lambda ops: None)
    monkeypatch.setattr("tierkv.storage.transfer.pinned.CHUNK_BYTES_MAX", 8192)
    ops = cuda.CudaOps(kv)
    ops._pinned = PinnedRanges(ops._register, cuda._unregister, 8192)
    runtime.limit_bytes = 20_000
    memory = memoryview(np.zeros(65_536, np.uint8).data)
    with caplog.at_level(logging.WARNING):
        assert ops.register(memory, unit_bytes=4096, first_bytes=0) == 16_384
    lines = [r.getMessage() for r in caplog.records]
    assert len(lines) == 1
    assert "16384 of 65536 bytes (cudaHostRegister: CUDA error 2)" in lines[0]
    assert "ulimit -l" in lines[0]
    assert "lower the host capacity" in lines[0]
    assert ops.reachable([memory[:4096], memory[8192:16384]])
    assert not ops.reachable([memory[16384:]])
    ops.close()


def test_no_pinned_buffer_is_a_warning_and_pageable_copies(
    monkeypatch: pytest.MonkeyPatch, on_cpu: KernelOnCpu, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(size: int, **more: object) -> torch.Tensor:
        if more.pop("pin_memory", False):
            raise RuntimeError("CUDA error: out of memory\nmore")
        return torch.zeros(size, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(cuda.CudaOps, "_load_kernels", lambda ops: FakeKernels(on_cpu))
    ops = cuda.CudaOps(torch.randn(SHAPES["heads"]))
    assert ops.methods == ("kernel", "copies")
    monkeypatch.setattr(torch, "empty", refuse)
    with caplog.at_level(logging.WARNING):
        ops.bounce_halves("out")
        ops.bounce_halves("in")
    # A kernel must not touch pageable memory.
    assert ops.methods == ("copies",)
    (line,) = [record.getMessage() for record in caplog.records]
    assert "pageable memory; raise lockable memory" in line


def test_c3_registration_is_cut_at_slots_and_forgets_nothing() -> None:
    calls: list[tuple[int, int]] = []
    gone: list[int] = []

    def register(address: int, size: int) -> None:
        calls.append((address, size))

    ranges = PinnedRanges(register, gone.append, chunk_bytes_max=10_000)  # type: ignore[arg-type]
    memory = memoryview(np.zeros(4096 + 5 * 3000, np.uint8).data)
    base = address_of(memory)
    assert ranges.add(memory, unit_bytes=3000, first_bytes=4096) == memory.nbytes
    # The header with one slot, then whole slots; a chunk never ends inside one.
    assert [(a - base, size) for a, size in calls] == [(0, 7096), (7096, 9000), (16096, 3000)]
    assert ranges.nbytes == memory.nbytes
    assert ranges.covers(base + 4096, 3000)
    assert not ranges.covers(base + 4096, 3001), "a copy may not span two registrations"
    assert not ranges.covers(base - 1, 2)
    ranges.close()
    assert sorted(gone) == [a for a, _ in calls]
    ranges.close()


class Cuda:
    """torch.cuda as a machine without a usable device shows it."""

    def __init__(self, message: str) -> None:
        self.message = message

    def is_available(self) -> bool:
        return False

    def init(self) -> None:
        raise RuntimeError(self.message)


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("Found no NVIDIA driver on your system. Please check", "no NVIDIA driver was found"),
        (
            "The NVIDIA driver on your system is too old (found version 11040).",
            "the NVIDIA driver is too old (it knows CUDA 11.4); torch was built for CUDA 13.0",
        ),
        ("No CUDA GPUs are available", "no usable CUDA device"),
        ("CUDA driver version is insufficient for CUDA runtime version", "driver is too old"),
    ],
)
def test_what_is_wrong_with_cuda_is_one_line_that_says_what_to_do(
    message: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    version = SimpleNamespace(cuda="13.0")
    monkeypatch.setattr(
        probe, "torch", SimpleNamespace(cuda=Cuda(message), version=version, __version__="2.13.0")
    )
    problem = probe.cuda_problem()
    assert problem is not None
    assert expected in problem
    assert "\n" not in problem
    assert "install" in problem or "nvidia-smi" in problem


def test_what_torch_warns_of_is_said_once(
    monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    class Warning(Cuda):
        def is_available(self) -> bool:
            warnings.warn("CUDA initialization: the driver is too old", stacklevel=1)
            return False

    version = SimpleNamespace(cuda="13.0")
    found = SimpleNamespace(cuda=Warning("too old"), version=version, __version__="2.13.0")
    monkeypatch.setattr(probe, "torch", found)
    assert "driver is too old" in str(probe.cuda_problem())
    assert not recwarn.list


def test_of_a_lack_of_memory_the_figures_are_told_and_not_the_manual() -> None:
    error = torch.OutOfMemoryError(
        "CUDA out of memory. Tried to allocate 2.00 MiB. GPU 0 has a total capacity of 4.00 GiB of "
        "which 1.89 MiB is free. Of the allocated memory 591.02 MiB is allocated by PyTorch. See"
    )
    assert first_line(error).endswith("4.00 GiB of which 1.89 MiB is free")


def test_a_cpu_build_of_torch_is_told_from_a_missing_driver(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    version = SimpleNamespace(cuda=None)
    monkeypatch.setattr(probe, "torch", SimpleNamespace(version=version, __version__="2.13.0+cpu"))
    assert "a build without CUDA; install a CUDA build" in str(probe.cuda_problem())


def test_a_missing_cupy_names_the_extra_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_cupy(name: str) -> object:
        raise ImportError("No module named 'cupy'")

    monkeypatch.setattr("importlib.import_module", no_cupy)
    assert "pip install 'tierkv[cuda13]'" in str(probe.missing_kernels())


def test_kernels_that_do_not_load_leave_torch_copies(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from tierkv.storage.transfer import kernel_cupy

    def refuse(device: int) -> None:
        raise TierIOError("load page kernels: no NVRTC")

    monkeypatch.setattr(cuda, "missing_kernels", lambda: None)
    monkeypatch.setattr(kernel_cupy, "PageKernels", refuse)
    with caplog.at_level(logging.WARNING):
        ops = cuda.CudaOps(torch.randn(SHAPES["heads"]))
    assert ops.method == "copies"
    assert "using torch copies" in caplog.records[0].getMessage()


def test_gpu_memory_that_runs_out_in_a_restore_is_that_copys_error(
    runtime: FakeRuntime, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    kv = torch.randn(SHAPES["heads"])
    monkeypatch.setattr(cuda.CudaOps, "_load_kernels", lambda ops: None)
    transfer = StreamTransfer(cuda.CudaOps(kv))
    empty = torch.empty

    def refuse(*args: object, **more: object) -> torch.Tensor:
        if "device" in more:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate")
        return empty(*args, **more)  # type: ignore[call-overload,no-any-return]

    monkeypatch.setattr(torch, "empty", refuse)
    copy = transfer.scatter(aligned_views(1, transfer.page_bytes), [3])
    assert copy.wait(DEADLINE_S)
    assert "of GPU memory for staging" in str(copy.error)
    assert "lower the KV pool" in str(copy.error)
    monkeypatch.setattr(torch, "empty", empty)
    assert transfer.scatter(aligned_views(1, transfer.page_bytes), [3]).wait(DEADLINE_S)
    assert transfer.stats().failed == 1
    transfer.close()


class Scarce:
    """torch.empty on a device that holds `limit_bytes` at a time."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._empty = torch.empty
        self.refused = 0

    def __call__(self, size: int, **more: object) -> torch.Tensor:
        if "device" in more and size > self._limit_bytes:
            self.refused += 1
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate")
        return self._empty(size, **more)  # type: ignore[call-overload,no-any-return]


def test_staging_takes_what_gpu_memory_there_is(
    runtime: FakeRuntime, on_cpu: KernelOnCpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    kv = torch.randn(SHAPES["heads"])
    page_bytes = PagedKv(kv).page_bytes
    monkeypatch.setattr(cuda, "STAGING_BYTES", 8 * page_bytes)
    monkeypatch.setattr(cuda.CudaOps, "_load_kernels", lambda ops: FakeKernels(on_cpu))
    transfer = StreamTransfer(cuda.CudaOps(kv))
    transfer.ops.choose("copies", "copies")
    scarce = Scarce(2 * page_bytes)
    monkeypatch.setattr(torch, "empty", scarce)
    views = aligned_views(7, page_bytes)
    copy = transfer.gather(list(range(7)), views)
    assert copy.wait(DEADLINE_S)
    assert copy.error is None
    assert scarce.refused == 2
    assert [bytes(view) for view in views] == [payload(kv, page) for page in range(7)]
    transfer.close()


def test_a_way_without_gpu_memory_is_not_chosen_and_the_other_serves(
    runtime: FakeRuntime, on_cpu: KernelOnCpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    kv = torch.randn(SHAPES["heads"])
    monkeypatch.setattr(cuda.CudaOps, "_load_kernels", lambda ops: FakeKernels(on_cpu))
    transfer = StreamTransfer(cuda.CudaOps(kv))
    monkeypatch.setattr(torch, "empty", Scarce(0))
    found = calibrate(transfer, SystemClock(), rounds=1)
    assert set(found.out_bytes_per_s) == {"kernel"}
    assert transfer.ops.method == "kernel"
    transfer.close()


def test_a_device_without_memory_for_any_way_says_so(
    runtime: FakeRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda.CudaOps, "_load_kernels", lambda ops: None)
    transfer = StreamTransfer(cuda.CudaOps(torch.randn(SHAPES["heads"])))
    monkeypatch.setattr(torch, "empty", Scarce(0))
    with pytest.raises(CapacityError, match=r"for staging .*; lower the KV pool by that much"):
        calibrate(transfer, SystemClock(), rounds=1)
    transfer.close()
