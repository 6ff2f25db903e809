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
    """Ends the wait of one thread from others."""

    def __init__(self) -> None:
        self._event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._lock = threading.Lock()
        self._closed = False
        self._poll = select.poll()
        self._poll.register(self._event, select.POLLIN)
        self._polled: int | None = None

    def wake(self) -> None:
        """Thread-safe. The next wait ends at once."""
        with self._lock:
            if not self._closed:
                os.eventfd_write(self._event, 1)

    def wait(self, worker: UcxWorker, timeout_s: float) -> None:
        """Until the worker, which was armed, has something to do, wake() or the timeout."""
        # Not by an epoll around the worker's own: whoever sends to it would pay for that.
        fd = worker.fileno()
        if fd != self._polled:
            if self._polled is not None:
                self._poll.unregister(self._polled)
            self._poll.register(fd, select.POLLIN)
            self._polled = fd
        for ready, _ in self._poll.poll(max(0.0, timeout_s) * 1e3):
            if ready == self._event:
                os.eventfd_read(self._event)

    def close(self) -> None:
        """By the thread that waits, when it waits no more."""
        with self._lock:
            if not self._closed:
                self._closed = True
                os.close(self._event)


class Watcher(Waker):
    """A waker whose thread sleeps on, while others change for which worker it does."""

    def __init__(self) -> None:
        super().__init__()
        self._epoll = select.epoll()
        self._epoll.register(self._event, select.EPOLLIN)
        self._watched: int | None = None

    def watch(self, worker: UcxWorker | None) -> None:
        """Thread-safe. End a sleep, also one under way, for this worker alone; for none. A worker
        is armed before the sleep, and unwatched before it is closed."""
        fd = None if worker is None else worker.fileno()
        with self._lock:
            if self._closed or fd == self._watched:
                return
            if self._watched is not None:
                self._epoll.unregister(self._watched)
            if fd is not None:
                self._epoll.register(fd, select.EPOLLIN)
            self._watched = fd

    def sleep(self, timeout_s: float) -> None:
        """Until the worker watched has something to do, wake() or the timeout."""
        for ready, _ in self._epoll.poll(max(0.0, timeout_s)):
            if ready == self._event:
                os.eventfd_read(self._event)

    def close(self) -> None:
        with self._lock:
            if not self._closed:
                self._epoll.close()
        super().close()
