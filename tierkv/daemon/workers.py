"""Threads for what may take long: checksums, flushes, drops, opening a page class.

Owns its threads and one bounded queue. Results come back to the event loop. The threads are
daemons: one that is stuck in I/O past the bound of a stop does not keep the process alive, which
is why this is not the standard library's executor. Called by the daemon's verbs on the loop.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from tierkv.storage.errors import OverloadedError

T = TypeVar("T")

QUEUE_MAX = 4096

log = logging.getLogger(__name__)


class Workers:
    """A fixed number of threads. submit() from the loop's thread only; close() ends it."""

    def __init__(self, count: int, loop: asyncio.AbstractEventLoop, name: str = "daemon") -> None:
        self._loop = loop
        self._jobs: queue.Queue[_Job | None] = queue.Queue(QUEUE_MAX)
        self.running = 0
        """Jobs queued or at work, from the loop's point of view."""
        self._closed = False
        self._threads = [
            threading.Thread(target=self._work, name=f"{name}-{index}", daemon=True)
            for index in range(count)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def count(self) -> int:
        """How many threads there are."""
        return len(self._threads)

    def submit(self, call: Callable[[], T]) -> asyncio.Future[T]:
        """Run `call` in a thread; its result or exception arrives in the future.

        A cancelled future does not stop the call. Raises OverloadedError when the queue is full.
        """
        future: asyncio.Future[T] = self._loop.create_future()
        try:
            if self._closed:
                raise queue.Full
            self._jobs.put_nowait(_Job(call, future))
        except queue.Full as error:
            raise OverloadedError(
                f"daemon: {QUEUE_MAX} operations wait already; try again later"
            ) from error
        self.running += 1
        return future

    def close(self, timeout_s: float) -> bool:
        """Take no more, end the idle threads; False when some are still at work after the bound."""
        self._closed = True
        for _ in self._threads:
            try:
                self._jobs.put(None, timeout=timeout_s)
            except queue.Full:
                return False
        for thread in self._threads:
            thread.join(timeout_s / len(self._threads))
        return not any(thread.is_alive() for thread in self._threads)

    def _work(self) -> None:
        while True:
            job = self._jobs.get()
            if job is None:
                return
            result: Any = None
            failure: BaseException | None = None
            try:
                result = job.call()
            except BaseException as error:  # noqa: BLE001 - handed to whoever awaits, not swallowed
                failure = error
            try:
                self._loop.call_soon_threadsafe(self._finish, job.future, result, failure)
            except RuntimeError:
                log.debug("workers: a result came after the loop had ended")
                return

    def _finish(
        self, future: asyncio.Future[Any], result: Any, failure: BaseException | None
    ) -> None:
        self.running -= 1
        if future.cancelled():
            return
        if failure is not None:
            future.set_exception(failure)
        else:
            future.set_result(result)


class _Job:
    """One call and where its result goes."""

    __slots__ = ("call", "future")

    def __init__(self, call: Callable[[], Any], future: asyncio.Future[Any]) -> None:
        self.call = call
        self.future = future
