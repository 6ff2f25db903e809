"""The ucx plane on ucx-py's calls, which a double here offers on top of ucxx.

ucx-py itself cannot be installed any more. The double keeps to what its sources promise: calls
back from within progress(), returns None for what is over at once, and calls a message that is
shorter than its buffer an error.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tierkv.storage.clock import SystemClock
from tierkv.storage.errors import ConfigError
from tierkv.storage.transport.base import PageOutcome, PageRange, TransportLimits
from tierkv.storage.transport.ucx import UcxPlane, import_quietly, load_library
from tierkv.storage.transport.ucx_library import UcxLibrary
from tierkv.storage.transport.ucx_py import UcxPyLibrary
from tierkv.storage.transport.ucx_server import UcxServer

try:
    UCXX = load_library()
    API: Any = import_quietly("ucxx._lib.libucxx")
    ARRAYS: Any = import_quietly("ucxx._lib.arr")
except (ConfigError, ImportError) as reason:
    pytest.skip(str(reason), allow_module_level=True)

HOST = "127.0.0.1"
LIMIT_S = 30.0
SHORT_S = 0.3
LIMITS = TransportLimits(read_pages=64, io_s=4.0)
CONTENT = bytes(range(256)) * 4096

Callback = Callable[[object, BaseException | None], None]


class FakeHandle:
    """What a call returned and progress() will call back for."""

    def __init__(self, request: Any, callback: Callback, endpoint: FakeEndpoint | None) -> None:
        self.request = request
        self.callback = callback
        self.endpoint = endpoint
        self.length: tuple[int, int] | None = None


class FakeWorker:
    def __init__(self, context: Any) -> None:
        self.inner = API.UCXWorker(context.inner)
        self.handles: list[FakeHandle] = []
        self.waiting: list[tuple[Any, int, Callback]] = []
        """Receives of no endpoint's: array, tag, callback."""

    def init_blocking_progress_mode(self) -> int:
        self.inner.init_blocking_progress_mode()
        return os.dup(self.inner.epoll_file_descriptor)

    def arm(self) -> bool:
        return bool(self.inner.arm())

    def get_address(self) -> bytes:
        return bytes(self.inner.address.tobytes())

    def progress(self) -> None:
        self.inner.progress()
        while self.waiting:
            array, tag, callback = self.waiting[0]
            probe = self.inner.tag_probe(API.UCXXTag(tag), API.UCXXTagMaskFull, remove=True)
            if not probe.matched:
                break
            self.waiting.pop(0)
            handle = FakeHandle(self.inner.tag_recv_with_handle(array, probe), callback, None)
            handle.length = (probe.length, array.nbytes)
            self.handles.append(handle)
        done = [handle for handle in self.handles if handle.request.completed]
        self.handles = [handle for handle in self.handles if not handle.request.completed]
        for handle in done:
            handle.callback(handle, self._error(handle))

    def _error(self, handle: FakeHandle) -> BaseException | None:
        try:
            handle.request.check_error()
        except API.UCXError as error:
            assert isinstance(error, BaseException)
            return error
        if handle.length is not None and handle.length[0] != handle.length[1]:
            got, expected = handle.length
            return ValueError(f"<tag>: length mismatch: {got} (got) != {expected} (expected)")
        return None

    def request_cancel(self, handle: FakeHandle) -> None:
        if handle.endpoint is not None:
            handle.endpoint.inner.close_blocking()

    def close(self) -> None:
        self.handles.clear()
        del self.inner


class FakeContext:
    def __init__(self, options: dict[str, str], feature_flags: Any) -> None:
        self.inner = API.UCXContext(options, feature_flags=feature_flags)

    def close(self) -> None:
        del self.inner


class FakeEndpoint:
    def __init__(self, worker: FakeWorker, address: bytes) -> None:
        target = API.UCXAddress.create_from_buffer(bytearray(address))
        self.worker = worker
        self.inner = API.UCXEndpoint.create_from_worker_address(worker.inner, target, True)

    @classmethod
    def create_from_worker_address(
        cls, worker: FakeWorker, address: bytes, error_handling: bool
    ) -> FakeEndpoint:
        assert error_handling
        return cls(worker, address)

    def is_alive(self) -> bool:
        return bool(self.inner.alive)

    def close(self) -> None:
        self.inner.close_blocking()


class FakeAddress:
    @staticmethod
    def from_buffer(raw: bytes) -> bytes:
        return raw


class FakeUcp:
    """The module ucp._libs.ucx_api."""

    Feature = API.Feature
    UCXError = API.UCXError
    UCXContext = FakeContext
    UCXWorker = FakeWorker
    UCXAddress = FakeAddress
    UCXEndpoint = FakeEndpoint

    @staticmethod
    def get_ucx_version() -> tuple[int, int, int]:
        return (*UCXX.version, 0)

    @staticmethod
    def tag_send_nb(
        endpoint: FakeEndpoint, array: Any, nbytes: int, tag: int, callback: Callback
    ) -> FakeHandle | None:
        assert nbytes == array.nbytes
        request = endpoint.inner.tag_send(array, API.UCXXTag(tag))
        if request.completed:
            return None
        handle = FakeHandle(request, callback, endpoint)
        endpoint.worker.handles.append(handle)
        return handle

    @staticmethod
    def tag_recv_nb(
        worker: FakeWorker,
        array: Any,
        nbytes: int,
        tag: int,
        callback: Callback,
        ep: FakeEndpoint | None = None,
    ) -> object:
        assert nbytes == array.nbytes
        if ep is None:
            worker.waiting.append((array, tag, callback))
            return callback
        handle = FakeHandle(ep.inner.tag_recv(array, API.UCXXTag(tag)), callback, ep)
        worker.handles.append(handle)
        return handle


def open_plane(library: UcxLibrary) -> UcxPlane:
    return UcxPlane(HOST, limits=LIMITS, clock=SystemClock(), library=library)


@pytest.fixture(params=["both", "reader", "server"])
def planes(request: pytest.FixtureRequest) -> Iterator[tuple[UcxPlane, UcxPlane]]:
    """A serving and a reading plane, one or both of them on ucx-py's calls."""
    fake = UcxPyLibrary(FakeUcp, ARRAYS)
    serving = open_plane(UCXX if request.param == "reader" else fake)
    reading = open_plane(UCXX if request.param == "server" else fake)
    serving.register(memoryview(CONTENT), 1)
    yield serving, reading
    reading.check()
    reading.close()
    serving.check()
    serving.close()
    assert "tierkv-ucx-serve" not in {thread.name for thread in threading.enumerate()}


def test_pages_arrive_bit_for_bit(planes: tuple[UcxPlane, UcxPlane]) -> None:
    serving, reading = planes
    peer = reading.connect(serving.offer(), "serving", LIMIT_S)
    ranges = [PageRange(at * 1000, length) for at, length in enumerate((1, 5000, 70_000, 1 << 19))]
    for _ in range(30):
        buffers = [bytearray(length) for _, length in ranges]
        read = peer.read(1, ranges, [memoryview(buffer) for buffer in buffers], LIMIT_S)
        assert read.take(LIMIT_S) == [PageOutcome.OK] * 4, read.error
        for (offset, length), buffer in zip(ranges, buffers, strict=True):
            assert buffer == CONTENT[offset : offset + length]
    peer.check()


def test_what_was_unregistered_is_gone(planes: tuple[UcxPlane, UcxPlane]) -> None:
    serving, reading = planes
    peer = reading.connect(serving.offer(), "serving", LIMIT_S)
    serving.unregister(1)
    into = bytearray(b"x" * 10_000)
    read = peer.read(1, [PageRange(0, 10_000)], [memoryview(into)], LIMIT_S)
    assert read.take(LIMIT_S) == [PageOutcome.GONE] and into == b"x" * 10_000


def test_h1_a_read_that_is_not_answered_ends(
    planes: tuple[UcxPlane, UcxPlane], monkeypatch: pytest.MonkeyPatch
) -> None:
    serving, reading = planes
    peer = reading.connect(serving.offer(), "serving", LIMIT_S)
    with monkeypatch.context() as patch:
        patch.setattr(UcxServer, "_begin", lambda *call: None)
        into = bytearray(10_000)
        read = peer.read(1, [PageRange(0, 10_000)], [memoryview(into)], SHORT_S)
        assert read.take(LIMIT_S) == [PageOutcome.FAILED]
    again = peer.read(1, [PageRange(0, 10_000)], [memoryview(into)], LIMIT_S)
    assert again.take(LIMIT_S) == [PageOutcome.OK] and into == CONTENT[:10_000]


def test_a_peer_that_was_closed_is_noticed(planes: tuple[UcxPlane, UcxPlane]) -> None:
    serving, reading = planes
    peer = reading.connect(serving.offer(), "serving", LIMIT_S)
    serving.close()
    read = peer.read(1, [PageRange(0, 10)], [memoryview(bytearray(10))], LIMIT_S)
    assert read.take(LIMIT_S) == [PageOutcome.FAILED]
    assert peer.broken is not None
