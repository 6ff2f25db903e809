"""Copies for a pool on a CUDA device: two streams of the lowest priority, pinned host memory.

Owns the device side of a transfer: streams, events, the registration of host memory, the bounce
buffer and the staging. Two ways to move a group of pages, chosen for each direction
(calibration.py measures them; docs/adr/0006 says why there are two):

    kernel   one launch for up to 224 pages reads and writes registered host memory directly
    copies   one gather into page-contiguous staging on the device, then one copy a page (or a run
             of adjacent pages), and the reverse; needs torch only

Never a call per layer per page. Staging is used by one stream only, so stream order protects it.
Every CUDA call is checked: torch and cupy raise, registration returns a reason. Called by
streams.py.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from tierkv.storage.device import address_of
from tierkv.storage.errors import CapacityError, TierIOError, first_line
from tierkv.storage.transfer.device_ops import DeviceOps, Wait
from tierkv.storage.transfer.kernels import plan_launches, word_size
from tierkv.storage.transfer.layout import KvTensors, PagedKv
from tierkv.storage.transfer.pinned import PinnedRanges
from tierkv.storage.transfer.probe import missing_kernels
from tierkv.storage.transfer.staging import gather_staged, scatter_staged
from tierkv.storage.transfer.streams import StreamTransfer

if TYPE_CHECKING:
    from tierkv.storage.transfer.kernel_cupy import PageKernels

log = logging.getLogger(__name__)

BOUNCE_BYTES = 64 << 20
"""Pinned memory a direction, in two halves; at least two pages."""
STAGING_BYTES = 64 << 20
"""Device memory a direction for the method "copies"; at least one page."""
STEP_BYTES = 8 << 20
"""Least bytes of one layer step of a restore, so that launches and events cost little."""
PIECE_BYTES = 1 << 20
"""Least bytes of one copy a page: small ones run far below PCIe's rate."""

REGISTER_FLAGS = 0x01 | 0x02
"""cudaHostRegisterPortable | cudaHostRegisterMapped."""

METHODS = ("kernel", "copies")


class CudaOps(DeviceOps):
    """Moves between a KV cache on a CUDA device and pinned host memory. Borrows the tensors."""

    def __init__(self, kv: KvTensors) -> None:
        """RuntimeError of torch when the device has no memory left."""
        self._kv = PagedKv(kv)
        self.device = self._kv.device
        self.layers = self._kv.layers
        self.planes_per_layer = self._kv.planes_per_layer
        self.row_bytes = self._kv.row_bytes
        self.pages = self._kv.pages
        self._pinned = PinnedRanges(self._register, _unregister)
        self._buffers: list[torch.Tensor] = []
        self._bounce_pinned = True
        self._staging: dict[int, torch.Tensor] = {}
        """By stream (cudaStream_t): uint8 [pages, planes, row_bytes]."""
        self._kernels = self._load_kernels()
        addresses = [plane.data_ptr() for plane in self._kv.planes]
        self._plane_table = torch.tensor(addresses, dtype=torch.int64, device=self.device)
        self._plane_addresses = addresses
        self.out_method = self.in_method = "kernel" if self._kernels is not None else "copies"

    @property
    def method(self) -> str:
        if self.out_method == self.in_method:
            return self.out_method
        return f"{self.out_method} out, {self.in_method} in"

    @property
    def methods(self) -> tuple[str, ...]:
        return METHODS if self._kernels is not None else ("copies",)

    def choose(self, out_method: str, in_method: str) -> None:
        super().choose(out_method, in_method)
        self.out_method, self.in_method = out_method, in_method
        if "copies" not in (out_method, in_method):
            self._staging.clear()

    def register(self, memory: memoryview, *, unit_bytes: int, first_bytes: int) -> int:
        """See StreamTransfer.register()."""
        return self._pinned.add(memory, unit_bytes=unit_bytes, first_bytes=first_bytes)

    def new_stream(self, name: str) -> torch.cuda.Stream:
        # 0 is the lowest priority there is; a forward pass on a stream of priority -1 goes first.
        return torch.cuda.Stream(self.device, priority=0)  # type: ignore[no-untyped-call]

    def compute_stream(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self.device)

    def record(self, stream: object) -> torch.cuda.Event:
        assert isinstance(stream, torch.cuda.Stream)
        event: torch.cuda.Event = stream.record_event()
        return event

    def stream_wait(self, stream: object, event: object, why: Wait) -> None:
        assert isinstance(stream, torch.cuda.Stream)
        assert isinstance(event, torch.cuda.Event)
        stream.wait_event(event)

    def event_done(self, event: object, why: Wait) -> bool:
        assert isinstance(event, torch.cuda.Event)
        return bool(event.query())  # type: ignore[no-untyped-call]

    def reachable(self, views: Sequence[memoryview]) -> bool:
        covers = self._pinned.covers
        return all(covers(address_of(view), view.nbytes) for view in views)

    def bounce_halves(self, name: str) -> list[list[memoryview]]:
        count = max(1, BOUNCE_BYTES // 2 // self.page_bytes)
        halves = []
        for _ in range(2):
            buffer = self._host_buffer(count * self.page_bytes)
            self._buffers.append(buffer)
            whole = memoryview(buffer.numpy().data)
            halves.append(
                [whole[i * self.page_bytes : (i + 1) * self.page_bytes] for i in range(count)]
            )
        return halves

    def step_layers(self, page_count: int, *, reachable: bool) -> int:
        layer_bytes = self.planes_per_layer * self.row_bytes
        layers = -(-STEP_BYTES // max(1, page_count * layer_bytes))
        if self.in_method == "copies":
            layers = max(layers, -(-PIECE_BYTES // layer_bytes))
        return max(1, min(self.layers, layers))

    def move_out(
        self, stream: object, pages: Sequence[int], views: Sequence[memoryview], planes: range
    ) -> None:
        assert isinstance(stream, torch.cuda.Stream)
        addresses = [address_of(view) for view in views]
        if self.out_method == "kernel":
            self._launch("gather", stream, pages, addresses, planes)
            return
        first = planes.start * self.row_bytes
        with torch.cuda.stream(stream):
            for group, staging in self._staged(stream, len(pages), planes):
                self._stage("gather", stream, pages[group], planes, staging)
                self._copy_runs("gather", stream, staging, addresses[group], first)

    def move_in(
        self, stream: object, views: Sequence[memoryview], pages: Sequence[int], planes: range
    ) -> None:
        assert isinstance(stream, torch.cuda.Stream)
        addresses = [address_of(view) for view in views]
        if self.in_method == "kernel":
            self._launch("scatter", stream, pages, addresses, planes)
            return
        first = planes.start * self.row_bytes
        with torch.cuda.stream(stream):
            for group, staging in self._staged(stream, len(pages), planes):
                self._copy_runs("scatter", stream, staging, addresses[group], first)
                self._stage("scatter", stream, pages[group], planes, staging)

    def pinned_bytes(self) -> int:
        return self._pinned.nbytes

    def close(self) -> None:
        self._pinned.close()
        self._buffers.clear()
        self._staging.clear()

    def _load_kernels(self) -> PageKernels | None:
        reason = missing_kernels()
        if reason is None:
            from tierkv.storage.transfer.kernel_cupy import PageKernels

            try:
                return PageKernels(self.device.index or 0)
            except TierIOError as error:
                reason = str(error)
        log.warning("GPU copies without kernels: %s; using torch copies, somewhat slower", reason)
        return None

    def _host_buffer(self, nbytes: int) -> torch.Tensor:
        if not self._bounce_pinned:
            return torch.empty(nbytes, dtype=torch.uint8)
        try:
            return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        except RuntimeError as error:
            # A kernel may not touch pageable memory; the driver's copies may, at half the speed.
            log.warning(
                "no pinned buffer of %d bytes (%s): copies go through pageable memory; "
                "raise lockable memory (ulimit -l) or free some host memory",
                nbytes,
                first_line(error),
            )
            self._kernels = None
            self._bounce_pinned = False
            self.choose("copies", "copies")
            return torch.empty(nbytes, dtype=torch.uint8)

    def _launch(
        self,
        way: str,
        stream: torch.cuda.Stream,
        pages: Sequence[int],
        addresses: list[int],
        planes: range,
    ) -> None:
        assert self._kernels is not None
        stride = self._kv.page_stride
        size = word_size(self.row_bytes, stride, [*addresses, *self._plane_addresses])
        for launch in plan_launches(
            pages,
            addresses,
            planes,
            row_bytes=self.row_bytes,
            page_stride=stride,
            word_bytes=size,
            blocks_max=self._kernels.blocks_max,
        ):
            name = f"tierkv_{way}_{size}"
            self._kernels.launch(name, launch, self._plane_table.data_ptr(), stream.cuda_stream)

    def _staged(
        self, stream: torch.cuda.Stream, page_count: int, planes: range
    ) -> Iterator[tuple[slice, torch.Tensor]]:
        """Groups of pages with their part of the stream's staging, [pages, bytes of planes]."""
        whole = self._staging.get(stream.cuda_stream)
        if whole is None:
            whole = self._staging[stream.cuda_stream] = self._new_staging()
        piece = len(planes) * self.row_bytes
        group = whole.numel() // piece
        for start in range(0, page_count, group):
            count = min(group, page_count - start)
            yield slice(start, start + count), whole[: count * piece].view(count, piece)

    def _new_staging(self) -> torch.Tensor:
        """As much as there is room for, at least one page."""
        size = max(STAGING_BYTES, self.page_bytes)
        while True:
            try:
                return torch.empty(size, dtype=torch.uint8, device=self.device)
            except torch.cuda.OutOfMemoryError as error:
                if size == self.page_bytes:
                    raise CapacityError(
                        f"copy pages: no {size} bytes of GPU memory for staging "
                        f"({first_line(error)}); lower the KV pool by that much"
                    ) from error
            size = max(size // 2, self.page_bytes)

    def _copy_runs(
        self,
        way: str,
        stream: torch.cuda.Stream,
        staging: torch.Tensor,
        addresses: Sequence[int],
        offset_bytes: int,
    ) -> None:
        """Between staging, [pages, bytes of planes], and its pages' host memory."""
        runs = host_runs(addresses, staging.shape[1], offset_bytes)
        if self._kernels is not None:
            # A call of torch costs the host as long as the bus needs for half a page.
            base = staging.data_ptr()
            ways = (
                (host, base + at, size) if way == "gather" else (base + at, host, size)
                for at, host, size in runs
            )
            self._kernels.copy(ways, stream.cuda_stream)
            return
        flat = staging.view(-1)
        for at, address, size in runs:
            host, piece = host_tensor(address, size), flat[at : at + size]
            target, source = (host, piece) if way == "gather" else (piece, host)
            target.copy_(source, non_blocking=True)

    def _stage(
        self,
        way: str,
        stream: torch.cuda.Stream,
        pages: Sequence[int],
        planes: range,
        staging: torch.Tensor,
    ) -> None:
        """Between pages and staging, [pages, bytes of planes], both on the device."""
        if self._kernels is None:
            move = gather_staged if way == "gather" else scatter_staged
            move(self._kv, self._index(pages), planes, staging)
            return
        # The kernel counts from the start of a whole payload, of which staging holds a part.
        base = staging.data_ptr() - planes.start * self.row_bytes
        piece = staging.shape[1]
        addresses = [base + i * piece for i in range(len(pages))]
        self._launch(way, stream, pages, addresses, planes)

    def _index(self, pages: Sequence[int]) -> torch.Tensor:
        index = torch.tensor(pages, dtype=torch.int64)
        if not self._bounce_pinned:
            return index.to(self.device)
        # torch keeps the pinned block until the copy has read it.
        return index.pin_memory().to(self.device, non_blocking=True)

    def _register(self, address: int, nbytes: int) -> str | None:
        code = int(_cudart().cudaHostRegister(address, nbytes, REGISTER_FLAGS))
        if code != 0:
            self._spend_error()
            return f"cudaHostRegister: CUDA error {code}"
        if self._kernels is not None and not self._kernels.same_address(address):
            _unregister(address)
            return "the device maps it at another address"
        return None

    def _spend_error(self) -> None:
        """The runtime keeps a failed call's error for the next kernel launch to report."""
        try:
            torch.zeros(1, device=self.device)
        except RuntimeError as error:
            log.debug("spent=%s", first_line(error))


class CudaTransfer(StreamTransfer):
    """Transfer for KV tensors on CUDA (layout.py says which shapes).

    Borrows the tensors; the caller keeps them alive until close(). CapacityError when there is no
    memory for the buffers.
    """

    ops: CudaOps

    def __init__(self, kv: KvTensors) -> None:
        try:
            ops = CudaOps(kv)
            assert ops.device.type == "cuda", f"tensors on {ops.device}"
            super().__init__(ops)
        except torch.cuda.OutOfMemoryError as error:
            raise CapacityError(
                f"open transfer: no GPU memory ({first_line(error)}); lower the KV pool"
            ) from error


def _cudart() -> Any:
    """torch's binding of the CUDA runtime."""
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def _unregister(address: int) -> str | None:
    code = int(_cudart().cudaHostUnregister(address))
    return f"cudaHostUnregister: CUDA error {code}" if code else None


def host_runs(
    addresses: Sequence[int], piece_bytes: int, offset_bytes: int
) -> Iterator[tuple[int, int, int]]:
    """Runs of adjacent pieces: where each begins among all pieces, its host address, its bytes.

    Piece i lies at `addresses[i] + offset_bytes` on the host and at `i * piece_bytes` in staging.
    """
    start = 0
    for end in range(1, len(addresses) + 1):
        if end < len(addresses) and addresses[end] == addresses[end - 1] + piece_bytes:
            continue
        size = (end - start) * piece_bytes
        yield start * piece_bytes, addresses[start] + offset_bytes, size
        start = end


def host_tensor(address: int, nbytes: int) -> torch.Tensor:
    """Host memory as a uint8 tensor, which borrows it."""
    return torch.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), dtype=torch.uint8)
