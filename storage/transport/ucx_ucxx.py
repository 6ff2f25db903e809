"""ucxx as the library of the ucx plane.

Owns the translation of its calls into those of ucx_library.py. Uses the classes its asyncio layer
is built on: they need no event loop, and reach four times its throughput. Invariants: what UCX may
touch is kept alive until the request is done; every endpoint has error handling on, which is what
tells a dead peer and what closing can rely on. Used by ucx.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tierkv.storage.errors import TierIOError
from tierkv.storage.transport.ucx_library import (
    PROGRESS_STEPS,
    TAG_CONTROL,
    TAGS,
    Tag,
    UcxEndpoint,
    UcxWorker,
)
from tierkv.storage.types import Buffer

PENDING_MESSAGES_MAX = 256
"""Messages that a worker receives at once; more wait inside UCX."""


class UcxxLibrary:
    """ucxx, once its modules are imported."""

    name = "ucxx"

    def __init__(self, api: Any, arrays: Any) -> None:
        self._api = api
        self._array = arrays.Array
        major, minor, _ = api.get_ucx_version()
        self.version = (int(major), int(minor))

    def open_worker(self, options: Mapping[str, str], message_bytes: int) -> UcxWorker:
        return _UcxxWorker(self._api, self._array, options, message_bytes)


class _UcxxRequest:
    """Holds the array, and through it the memory, for as long as UCX may touch it."""

    __slots__ = ("_api", "_array", "_request")

    def __init__(self, api: Any, request: Any, array: Any) -> None:
        self._api = api
        self._request = request
        self._array = array

    @property
    def done(self) -> bool:
        return bool(self._request.completed)

    def failure(self) -> str | None:
        try:
            self._request.check_error()
        except self._api.UCXError as error:
            return _line(error)
        return None


class _UcxxEndpoint:
    def __init__(self, api: Any, worker: _UcxxWorker, endpoint: Any) -> None:
        self._api = api
        self._worker = worker
        self.endpoint = endpoint

    @property
    def alive(self) -> bool:
        return bool(self.endpoint.alive)

    def abort(self) -> None:
        self._worker.cancels = True
        try:
            self.endpoint.close_blocking()
        except self._api.UCXError as error:
            raise TierIOError(f"close endpoint: {_line(error)}") from error


class _UcxxWorker:
    def __init__(
        self, api: Any, array: Any, options: Mapping[str, str], message_bytes: int
    ) -> None:
        self._api = api
        self._array = array
        self._message_bytes = message_bytes
        self._any_tag = (api.UCXXTag(0), api.UCXXTagMask(0))
        self._pending: list[tuple[_UcxxRequest, bytearray | None]] = []
        self.strays = 0
        self.cancels = False
        """An endpoint was aborted since the last progress()."""
        try:
            # A context of its own: UCX shares one between threads only when told to, and the
            # binding does not tell it.
            self._context = api.UCXContext(
                dict(options), feature_flags=(api.Feature.TAG, api.Feature.WAKEUP)
            )
            self._worker = api.UCXWorker(self._context)
            self._worker.init_blocking_progress_mode()
            self._fd = int(self._worker.epoll_file_descriptor)
        except api.UCXError as error:
            raise TierIOError(f"start UCX with {dict(options)}: {_line(error)}") from error

    def address(self) -> bytes:
        return bytes(self._worker.address.tobytes())

    def fileno(self) -> int:
        return self._fd

    def progress(self) -> bool:
        step = self._worker.progress_once
        if self.cancels or not step():
            # This cancels what a failed endpoint left behind; progress_once() does not.
            self.cancels = False
            self._worker.progress()
            return False
        left = PROGRESS_STEPS
        while left and step():
            left -= 1
        return left == 0

    def arm(self) -> bool:
        return bool(self._worker.arm())

    def connect(self, address: bytes) -> _UcxxEndpoint:
        try:
            target = self._api.UCXAddress.create_from_buffer(bytearray(address))
            # Without error handling a dead peer would leave its requests pending for ever.
            endpoint = self._api.UCXEndpoint.create_from_worker_address(self._worker, target, True)
        except self._api.UCXError as error:
            raise TierIOError(f"connect: {_line(error)}") from error
        return _UcxxEndpoint(self._api, self, endpoint)

    def send(self, endpoint: UcxEndpoint, parts: Sequence[Buffer], tag: Tag) -> list[_UcxxRequest]:
        assert isinstance(endpoint, _UcxxEndpoint)
        return self._post(endpoint.endpoint.tag_send, parts, tag)

    def receive(
        self, endpoint: UcxEndpoint, into: Sequence[Buffer], tag: Tag
    ) -> list[_UcxxRequest]:
        assert isinstance(endpoint, _UcxxEndpoint)
        # The endpoint's receive, not the worker's: closing the endpoint ends it.
        return self._post(endpoint.endpoint.tag_recv, into, tag)

    def _post(self, call: Any, buffers: Sequence[Buffer], tag: Tag) -> list[_UcxxRequest]:
        # Once a page: names that are looked up here are not looked up in the loop.
        api, new_array, new_tag = self._api, self._array, self._api.UCXXTag
        posted = []
        try:
            for buffer in buffers:
                array = new_array(buffer)
                posted.append(_UcxxRequest(api, call(array, new_tag(tag)), array))
                tag = (tag + 1) % TAGS
        except api.UCXError as error:
            raise TierIOError(f"{call.__name__}: {_line(error)}") from error
        return posted

    def take_messages(self) -> list[bytes]:
        while len(self._pending) < PENDING_MESSAGES_MAX:
            probe = self._worker.tag_probe(*self._any_tag, remove=True)
            if not probe.matched:
                break
            wanted = probe.length <= self._message_bytes and probe.sender_tag.value == TAG_CONTROL
            # UCX frees a message only when it is received; one byte of it is enough for that.
            buffer = bytearray(max(1, probe.length) if wanted else 1)
            array = self._array(buffer)
            request = self._worker.tag_recv_with_handle(array, probe)
            self._pending.append(
                (_UcxxRequest(self._api, request, array), buffer if wanted else None)
            )
        if not self._pending:
            return []
        done = [entry for entry in self._pending if entry[0].done]
        self._pending = [entry for entry in self._pending if not entry[0].done]
        good = [bytes(b) for request, b in done if b is not None and request.failure() is None]
        self.strays += len(done) - len(good)
        return good

    def close(self) -> None:
        self._pending.clear()
        # The library frees a worker when nothing refers to it any more.
        del self._worker, self._context


def _line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".replace("\n", " ")
