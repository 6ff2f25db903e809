"""The contract for copies between a device's paged KV pool and page payloads in host memory.

Owns no pages: the caller says which pages and which host views take part, and leaves both alone
until the copy's event is done. That is rule 1 of ARCHITECTURE.md, "Data-path rules": a page under
copy may be neither written, freed nor handed out. Implementations: cpu.py, cuda.py.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from tierkv.storage.errors import TierKVError


class CopyEvent:
    """Completion of one copy. Set once by the transfer, waited on by anybody."""

    __slots__ = ("_callbacks", "_error", "_lock", "_set")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._set = threading.Event()
        self._error: TierKVError | None = None
        self._callbacks: list[Callable[[CopyEvent], None]] = []

    @property
    def done(self) -> bool:
        """True once the copy has ended, well or badly."""
        return self._set.is_set()

    @property
    def error(self) -> TierKVError | None:
        """Why the copy failed; None when it went well or has not ended."""
        return self._error

    def wait(self, timeout_s: float) -> bool:
        """Wait at most `timeout_s`; True when the copy has ended."""
        return self._set.wait(timeout_s)

    def add_done_callback(self, callback: Callable[[CopyEvent], None]) -> None:
        """Call `callback(self)` once when the copy ends, from the thread that ends it; at once
        when it has ended already."""
        with self._lock:
            if not self._set.is_set():
                self._callbacks.append(callback)
                return
        callback(self)

    def finish(self, error: TierKVError | None = None) -> None:
        """Called by the transfer, once."""
        with self._lock:
            assert not self._set.is_set(), "a copy ends once"
            self._error = error
            self._set.set()
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback(self)


class PageTransfer(ABC):
    """Asynchronous copies for one paged pool. Methods are called from the engine thread.

    Copies in one direction end in the order they were started; the two directions are unordered.
    Both wait for work already queued on the compute stream at the time of the call: a gather for
    the forward pass that wrote the pages, a scatter for the last one that read them.
    """

    page_bytes: int

    @abstractmethod
    def gather(self, pages: Sequence[int], views: Sequence[memoryview]) -> CopyEvent:
        """Copy pool page `pages[i]` into `views[i]` (page_bytes long, writable), for all i.

        Payload order is [layers, 2, page_tokens, kv_heads, head_dim] (docs/formats/page.md).
        The views hold the bytes, for any reader, once the event is done without error.
        """

    @abstractmethod
    def scatter(self, views: Sequence[memoryview], pages: Sequence[int]) -> CopyEvent:
        """Copy `views[i]` into pool page `pages[i]`, for all i.

        Attention may read the pages once the event is done without error.
        """

    @abstractmethod
    def close(self) -> None:
        """End the copies under way and stop. Idempotent."""
