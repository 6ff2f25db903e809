"""The UCX library under the ucx plane: which binding there is, and one worker of it.

Owns the import of ucxx, or of ucx-py (module `ucp`, in ucx_py.py) where only that is installed,
and the few calls the plane makes. Knows no pages and no peers. Invariants: an import leaves the
environment as it was, so that NIXL's own UCX and child processes do not inherit its settings; a
worker is used by one thread at a time; what the library raises comes out as TierIOError; nothing
allocates for a message of a stranger before its length was checked. Called by ucx.py,
ucx_lane.py and ucx_server.py.
"""

from __future__ import annotations

import importlib
import os
import select
import threading
from collections.abc import Mapping
from types import ModuleType
from typing import Any, Protocol

from tierkv.storage.errors import ConfigError, TierIOError
from tierkv.storage.types import Buffer

PENDING_MESSAGES_MAX = 256
"""Messages that a worker receives at once; more wait inside UCX."""
TAG_CONTROL = 0x7469_6572_6B76_0001
"""Tag of everything that was not asked for: greetings and requests to a server."""
PROGRESS_STEPS = 64
TAG_BITS = 64

Tag = int


class UcxRequest(Protocol):
    """A send or a receive under way."""

    @property
    def done(self) -> bool:
        """True once neither UCX nor a device touches its memory any more."""

    def failure(self) -> str | None:
        """Why it failed; None when it did not. Only once done."""


class UcxEndpoint(Protocol):
    """A connection to another worker."""

    @property
    def alive(self) -> bool:
        """False once UCX knows that the other side is gone."""

    def abort(self) -> None:
        """Close without the peer's consent: its requests are done after some progress()."""


class UcxWorker(Protocol):
    """What sends and receives. Nothing moves outside progress(). TierIOError from every call."""

    strays: int
    """Messages dropped: too long, or broken on the way."""

    def address(self) -> bytes: ...

    def fileno(self) -> int:
        """Readable when progress() has something to do, after arm() said True."""

    def progress(self) -> bool:
        """Move bytes, a bounded number of them; True when there may be more to do."""

    def arm(self) -> bool:
        """False when there is something to do at once."""

    def connect(self, address: bytes) -> UcxEndpoint: ...

    def send(self, endpoint: UcxEndpoint, data: Buffer, tag: Tag) -> UcxRequest: ...

    def receive(self, endpoint: UcxEndpoint, into: Buffer, tag: Tag) -> UcxRequest:
        """`into` may be longer than what comes."""

    def take_messages(self) -> list[bytes]:
        """Complete messages nobody posted a receive for; longer ones than allowed are dropped."""

    def close(self) -> None: ...


class UcxLibrary(Protocol):
    """One binding."""

    name: str
    version: tuple[int, int]
    """Of UCX itself: major, minor."""

    def open_worker(self, options: Mapping[str, str], message_bytes: int) -> UcxWorker:
        """`options`: UCX settings without their UCX_ prefix, which win over the environment.
        `message_bytes`: longest message that take_messages() returns."""


def load_library() -> UcxLibrary:
    """ucxx, else ucx-py. ConfigError when neither can be imported."""
    reasons = []
    try:
        return UcxxLibrary(import_quietly("ucxx._lib.libucxx"), import_quietly("ucxx._lib.arr"))
    except (ImportError, OSError) as error:
        reasons.append(f"ucxx: {error}")
    # Here, because ucx_py.py is written in terms of this module.
    from tierkv.storage.transport.ucx_py import UcxPyLibrary

    library: UcxLibrary
    try:
        library = UcxPyLibrary(import_quietly("ucp._libs.ucx_api"), import_quietly("ucp._libs.arr"))
        return library
    except (ImportError, OSError) as error:
        reasons.append(f"ucp: {error}")
    raise ConfigError(
        f"start the ucx plane: no UCX library can be imported ({'; '.join(reasons)}); "
        "install tierkv[ucx] or take ucx out of the configured planes"
    )


def import_quietly(name: str) -> ModuleType:
    """Import, and take back what the import wrote to the environment."""
    before = dict(os.environ)
    try:
        return importlib.import_module(name)
    finally:
        for key in set(os.environ) - set(before):
            del os.environ[key]
        for key, value in before.items():
            if os.environ.get(key) != value:
                os.environ[key] = value


class UcxxLibrary:
    """ucxx, through the classes its asyncio layer is built on: they need no event loop."""

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
    def __init__(self, api: Any, endpoint: Any) -> None:
        self._api = api
        self.endpoint = endpoint

    @property
    def alive(self) -> bool:
        return bool(self.endpoint.alive)

    def abort(self) -> None:
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
        try:
            # A context of its own: UCX shares one between threads only when told to, and the
            # binding does not tell it.
            self._context = api.UCXContext(
                dict(options), feature_flags=(api.Feature.TAG, api.Feature.WAKEUP)
            )
            self._worker = api.UCXWorker(self._context)
            self._worker.init_blocking_progress_mode()
        except api.UCXError as error:
            raise TierIOError(f"start UCX with {dict(options)}: {_line(error)}") from error

    def address(self) -> bytes:
        return bytes(self._worker.address.tobytes())

    def fileno(self) -> int:
        return int(self._worker.epoll_file_descriptor)

    def progress(self) -> bool:
        step = self._worker.progress_once
        if not step():
            return False
        for _ in range(PROGRESS_STEPS):
            if not step():
                break
        return True

    def arm(self) -> bool:
        return bool(self._worker.arm())

    def connect(self, address: bytes) -> _UcxxEndpoint:
        try:
            target = self._api.UCXAddress.create_from_buffer(bytearray(address))
            # Without error handling a dead peer would leave its requests pending for ever.
            endpoint = self._api.UCXEndpoint.create_from_worker_address(self._worker, target, True)
        except self._api.UCXError as error:
            raise TierIOError(f"connect: {_line(error)}") from error
        return _UcxxEndpoint(self._api, endpoint)

    def send(self, endpoint: UcxEndpoint, data: Buffer, tag: Tag) -> _UcxxRequest:
        assert isinstance(endpoint, _UcxxEndpoint)
        array = self._array(data)
        try:
            request = endpoint.endpoint.tag_send(array, self._api.UCXXTag(tag))
        except self._api.UCXError as error:
            raise TierIOError(f"send: {_line(error)}") from error
        return _UcxxRequest(self._api, request, array)

    def receive(self, endpoint: UcxEndpoint, into: Buffer, tag: Tag) -> _UcxxRequest:
        assert isinstance(endpoint, _UcxxEndpoint)
        array = self._array(into)
        try:
            # The endpoint's receive, not the worker's: closing the endpoint ends it.
            request = endpoint.endpoint.tag_recv(array, self._api.UCXXTag(tag))
        except self._api.UCXError as error:
            raise TierIOError(f"receive: {_line(error)}") from error
        return _UcxxRequest(self._api, request, array)

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


class Waker:
    """Ends a wait() from another thread."""

    def __init__(self) -> None:
        self._event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._lock = threading.Lock()
        self._closed = False

    def wake(self) -> None:
        """Thread-safe. The next wait ends at once."""
        with self._lock:
            if not self._closed:
                os.eventfd_write(self._event, 1)

    def wait(self, worker: UcxWorker | None, timeout_s: float) -> bool:
        """Until the worker has something to do, wake() or the timeout. True: it may have."""
        if worker is not None and not worker.arm():
            return True
        poll = select.poll()
        poll.register(self._event, select.POLLIN)
        if worker is not None:
            poll.register(worker.fileno(), select.POLLIN)
        ready = {fd for fd, _ in poll.poll(max(0.0, timeout_s) * 1e3)}
        if self._event in ready:
            os.eventfd_read(self._event)
        return bool(ready - {self._event})

    def close(self) -> None:
        """By the thread that waits, when it waits no more."""
        with self._lock:
            if not self._closed:
                self._closed = True
                os.close(self._event)


def _line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".replace("\n", " ")
