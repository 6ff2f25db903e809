"""The part that every transfer shares: one worker thread a direction, events, closing.

Owns the two threads. Subclasses say how a group of pages is copied and what fence orders the copy
behind the compute stream. Queues are bounded by the pool: a page takes part in one copy at a time.
"""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Generic, TypeVar

from tierkv.storage.errors import TierClosedError, TierIOError
from tierkv.storage.transfer.base import CopyEvent, PageTransfer

Fence = TypeVar("Fence")


class ThreadedTransfer(PageTransfer, Generic[Fence]):
    """Runs copies on two threads, in the order they were started within a direction."""

    def __init__(self) -> None:
        self._gathers = ThreadPoolExecutor(1, thread_name_prefix="tierkv-gather")
        self._scatters = ThreadPoolExecutor(1, thread_name_prefix="tierkv-scatter")
        self._closed = False
        self._lock = threading.Lock()

    @abstractmethod
    def _fence(self) -> Fence:
        """Mark the present end of the compute stream; called from the engine thread."""

    @abstractmethod
    def _to_host(self, fence: Fence, pages: list[int], views: list[memoryview]) -> None:
        """Copy pages into views, behind `fence`; returns when the bytes are there."""

    @abstractmethod
    def _to_device(self, fence: Fence, pages: list[int], views: list[memoryview]) -> None:
        """Copy views into pages, behind `fence`; returns when the pages may be read."""

    def gather(self, pages: Sequence[int], views: Sequence[memoryview]) -> CopyEvent:
        return self._start(self._gathers, list(pages), list(views), to_host=True)

    def scatter(self, views: Sequence[memoryview], pages: Sequence[int]) -> CopyEvent:
        return self._start(self._scatters, list(pages), list(views), to_host=False)

    def close(self) -> None:
        with self._lock:
            self._closed = True
        self._gathers.shutdown(wait=True)
        self._scatters.shutdown(wait=True)

    def _start(
        self,
        executor: ThreadPoolExecutor,
        pages: list[int],
        views: list[memoryview],
        *,
        to_host: bool,
    ) -> CopyEvent:
        assert len(pages) == len(views), f"{len(pages)} pages for {len(views)} views"
        event = CopyEvent()
        with self._lock:
            if self._closed:
                raise TierClosedError("copy pages: the transfer is closed")
            executor.submit(self._run, event, self._fence(), pages, views, to_host)
        return event

    def _run(
        self,
        event: CopyEvent,
        fence: Fence,
        pages: list[int],
        views: list[memoryview],
        to_host: bool,
    ) -> None:
        copy = self._to_host if to_host else self._to_device
        try:
            copy(fence, pages, views)
        except (RuntimeError, ValueError, IndexError) as error:
            event.finish(TierIOError(f"copy {len(pages)} pages: {error}"))
            return
        event.finish()
