"""The few calls that the ucx plane makes of a UCX binding, and how a thread waits for one.

Knows no pages and no peers. Implementations: ucx_ucxx.py, and ucx_py.py where only that is
installed. Invariants, for both: a worker is used by one thread at a time; what the library raises
comes out as TierIOError; nothing is allocated for a message of a stranger before its length was
checked. Called by ucx.py, ucx_lane.py, ucx_peer.py and ucx_server.py.
"""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Mapping, Sequence
from typing import Protocol

from tierkv.storage.types import Buffer

TAG_CONTROL = 0x7469_6572_6B76_0001
"""Tag of everything that was not asked for: greetings and requests to a server."""
PROGRESS_STEPS = 64
TAGS = 1 << 64
"""Tags are counted modulo this."""

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

    def send(
        self, endpoint: UcxEndpoint, parts: Sequence[Buffer], tag: Tag
    ) -> Sequence[UcxRequest]:
        """A message a part, with tags from `tag` upwards."""

    def receive(
        self, endpoint: UcxEndpoint, into: Sequence[Buffer], tag: Tag
    ) -> Sequence[UcxRequest]:
        """A message a buffer, with tags from `tag` upwards. What comes may be shorter."""

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


class Waker:
    """Where a thread sleeps until another one wakes it, or a worker that it watches has news.

    All methods but wait() and close() may be called by other threads while one waits.
    """

    def __init__(self) -> None:
        self._event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll = select.epoll()
        self._epoll.register(self._event, select.EPOLLIN)
        self._lock = threading.Lock()
        self._watched: int | None = None
        self._closed = False

    def wake(self) -> None:
        """The next wait ends at once."""
        with self._lock:
            if not self._closed:
                os.eventfd_write(self._event, 1)

    def watch(self, worker: UcxWorker | None) -> None:
        """End a wait, also one under way, for this worker alone; for none. A worker is to be
        armed before, and is unwatched before it is closed."""
        fd = None if worker is None else worker.fileno()
        with self._lock:
            if self._closed or fd == self._watched:
                return
            if self._watched is not None:
                self._epoll.unregister(self._watched)
            if fd is not None:
                self._epoll.register(fd, select.EPOLLIN)
            self._watched = fd

    def wait(self, timeout_s: float) -> None:
        """Until wake(), the worker has something to do, or the timeout."""
        for fd, _ in self._epoll.poll(max(0.0, timeout_s)):
            if fd == self._event:
                os.eventfd_read(self._event)

    def close(self) -> None:
        """By the thread that waits, when it waits no more."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._epoll.close()
                os.close(self._event)
