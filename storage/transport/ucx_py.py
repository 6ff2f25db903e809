"""ucx-py, the predecessor of ucxx, as the ucx plane's library where only that is installed.

Owns the translation of its calls (module `ucp`) into the few of ucx_library.py, the only caller.
ucx-py calls back where ucxx has a request to ask; it has no way to look at a message without
receiving it; and it closes an endpoint by flushing it, which waits for the peer. So here messages
are received into buffers posted beforehand, and abort() cancels but leaves the endpoint open
until all that was posted there is done.

Weaker than with ucxx: a receive that is half way through cannot be taken back, so after a deadline
a read from a peer that is alive but stuck stays open until UCX's own keep-alive ends the
connection; and messages of strangers under other tags stay in UCX's memory.
"""

from __future__ import annotations

import re
import select
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

POSTED_MESSAGES = 16
"""Buffers that wait for messages of readers; more messages wait inside UCX."""
_SHORTER = re.compile(r"length mismatch: (\d+) \(got\) != \d+ \(expected\)")


class UcxPyLibrary:
    """ucx-py, through the classes its asyncio layer is built on."""

    name = "ucp"

    def __init__(self, api: Any, arrays: Any) -> None:
        self._api = api
        self._array = arrays.Array
        major, minor = api.get_ucx_version()[:2]
        self.version = (int(major), int(minor))

    def open_worker(self, options: Mapping[str, str], message_bytes: int) -> UcxWorker:
        return _PyWorker(self._api, self._array, options, message_bytes)


class _PyRequest:
    """Done when ucx-py has called back, or had nothing to wait for."""

    __slots__ = ("_array", "_failure", "_posted", "done", "handle", "length")

    def __init__(self, array: Any, posted: set[_PyRequest]) -> None:
        self._array = array
        self._posted = posted
        self._failure: str | None = None
        self.length = int(array.nbytes)
        self.done = False
        self.handle: Any = None

    def begin(self, handle: Any) -> None:
        """What ucx-py returned: None when it is over already and there will be no call."""
        if handle is None:
            self.done = True
        elif not self.done:
            self.handle = handle
            self._posted.add(self)

    def finish(self, request: object, error: BaseException | None) -> None:
        """What ucx-py calls, from within progress()."""
        shorter = None if error is None else _SHORTER.search(str(error))
        if shorter is not None and int(shorter[1]) <= self.length:
            # To ucx-py it is an error that there was more room than bytes.
            self.length = int(shorter[1])
        elif error is not None:
            self._failure = f"{type(error).__name__}: {error}".replace("\n", " ")
        self.done = True
        self.handle = None
        self._posted.discard(self)

    def failure(self) -> str | None:
        return self._failure


class _PyEndpoint:
    def __init__(self, worker: Any, endpoint: Any) -> None:
        self._worker = worker
        self.endpoint = endpoint
        self.posted: set[_PyRequest] = set()

    @property
    def alive(self) -> bool:
        return bool(self.endpoint.is_alive())

    def abort(self) -> None:
        # Cancelling calls back, and so changes the set.
        for request in list(self.posted):
            if request.handle is not None:
                self._worker.request_cancel(request.handle)


class _PyWorker:
    def __init__(
        self, api: Any, array: Any, options: Mapping[str, str], message_bytes: int
    ) -> None:
        self._api = api
        self._array = array
        self._message_bytes = message_bytes
        self._endpoints: list[_PyEndpoint] = []
        self._messages: list[tuple[_PyRequest, bytearray]] = []
        self.strays = 0
        try:
            self._context = api.UCXContext(
                dict(options), feature_flags=(api.Feature.TAG, api.Feature.WAKEUP)
            )
            self._worker = api.UCXWorker(self._context)
            self._epoll = select.epoll.fromfd(self._worker.init_blocking_progress_mode())
        except (api.UCXError, OSError) as error:
            raise TierIOError(f"start UCX with {dict(options)}: {error}") from error
        for _ in range(POSTED_MESSAGES if message_bytes else 0):
            self._post_message()

    def _post_message(self) -> None:
        buffer = bytearray(self._message_bytes)
        self._messages.append((self._receive(buffer, TAG_CONTROL, set()), buffer))

    def address(self) -> bytes:
        return bytes(self._worker.get_address())

    def fileno(self) -> int:
        return self._epoll.fileno()

    def progress(self) -> bool:
        # It goes on by itself until there is nothing to do, and does not say what it did.
        self._worker.progress()
        return False

    def arm(self) -> bool:
        for _ in range(PROGRESS_STEPS):
            if self._worker.arm():
                return True
            self._worker.progress()
        return False

    def connect(self, address: bytes) -> _PyEndpoint:
        try:
            target = self._api.UCXAddress.from_buffer(address)
            made = self._api.UCXEndpoint.create_from_worker_address(self._worker, target, True)
        except self._api.UCXError as error:
            raise TierIOError(f"connect: {error}") from error
        self._sweep()
        endpoint = _PyEndpoint(self._worker, made)
        self._endpoints.append(endpoint)
        return endpoint

    def _sweep(self) -> None:
        """Close endpoints of lanes that are gone: nothing is posted there any more."""
        for endpoint in list(self._endpoints):
            if not endpoint.posted and not endpoint.alive:
                endpoint.endpoint.close()
                self._endpoints.remove(endpoint)

    def send(self, endpoint: UcxEndpoint, parts: Sequence[Buffer], tag: Tag) -> list[_PyRequest]:
        assert isinstance(endpoint, _PyEndpoint)
        return [self._send(endpoint, part, (tag + at) % TAGS) for at, part in enumerate(parts)]

    def _send(self, endpoint: _PyEndpoint, data: Buffer, tag: Tag) -> _PyRequest:
        array = self._array(data)
        request = _PyRequest(array, endpoint.posted)
        try:
            handle = self._api.tag_send_nb(
                endpoint.endpoint, array, array.nbytes, tag, request.finish
            )
        except self._api.UCXError as error:
            raise TierIOError(f"send: {error}") from error
        request.begin(handle)
        return request

    def receive(self, endpoint: UcxEndpoint, into: Sequence[Buffer], tag: Tag) -> list[_PyRequest]:
        assert isinstance(endpoint, _PyEndpoint)
        return [
            self._receive(buffer, (tag + at) % TAGS, endpoint.posted, endpoint.endpoint)
            for at, buffer in enumerate(into)
        ]

    def _receive(
        self, into: Buffer, tag: Tag, posted: set[_PyRequest], endpoint: Any = None
    ) -> _PyRequest:
        array = self._array(into)
        request = _PyRequest(array, posted)
        try:
            handle = self._api.tag_recv_nb(
                self._worker, array, array.nbytes, tag, request.finish, ep=endpoint
            )
        except self._api.UCXError as error:
            raise TierIOError(f"receive: {error}") from error
        request.begin(handle)
        return request

    def take_messages(self) -> list[bytes]:
        done = [entry for entry in self._messages if entry[0].done]
        self._messages = [entry for entry in self._messages if not entry[0].done]
        for _ in done:
            self._post_message()
        good = [bytes(b[: request.length]) for request, b in done if request.failure() is None]
        self.strays += len(done) - len(good)
        return good

    def close(self) -> None:
        for endpoint in self._endpoints:
            endpoint.endpoint.close()
        self._endpoints.clear()
        self._messages.clear()
        self._epoll.close()
        self._worker.close()
        self._context.close()
