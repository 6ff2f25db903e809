"""Preload: the hottest nvme pages come back to host in the background after a reboot.

Owns the list of pages to bring and how far it got. Does not read (storage.mover does, from a
queue that waits behind every request's reads) and never evicts: it ends when host has no free
slot. Each page's end starts the next, so there is no thread and nothing polls.

Invariants: at most WIDTH pages are under way; `done + under way` never exceeds the budget;
finished once and for all when nothing is under way and nothing more will be started.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

from tierkv.storage.policy import FrequencySketch
from tierkv.storage.types import PageKey

ESTIMATE_PAGES = 256
WIDTH = 2
"""Pages under way: a request that arrives waits for no more reads than these."""


class PreloadStart(Enum):
    """What became of the attempt to bring one page."""

    STARTED = "started"
    SKIPPED = "skipped"
    """In host already, or no longer on nvme, or its owner has no room."""
    STOP = "stop"
    """Host has no free slot, nvme does not answer, or the store closes."""


@dataclass(frozen=True, slots=True)
class PreloadProgress:
    """How far a preload is. Pages and payload bytes."""

    done_pages: int
    total_pages: int
    bytes: int
    finished: bool
    """True as well when it was cancelled or ended early."""


class Preload:
    """See the module docstring. Thread-safe. `start(key, on_end)` begins one page and calls
    `on_end(arrived)` once if STARTED, with no lock held; `keys` are hottest first.
    """

    def __init__(
        self,
        keys: Sequence[PageKey],
        page_bytes: int,
        start: Callable[[PageKey, Callable[[bool], None]], PreloadStart],
    ) -> None:
        self._left = list(reversed(keys))
        self._total = len(keys)
        self._page_bytes = page_bytes
        self._start = start
        self._changed = threading.Condition()
        self._under_way = 0
        self._done = 0
        self._stopped = False
        self._pumping = False

    def begin(self) -> None:
        """Start the first pages. Once."""
        self._pump()

    def progress(self) -> PreloadProgress:
        """How far it is. O(1)."""
        with self._changed:
            done = self._done
            return PreloadProgress(done, self._total, done * self._page_bytes, self._finished())

    def cancel(self) -> None:
        """Start no more pages; those under way arrive. Idempotent."""
        with self._changed:
            self._stopped = True
            self._left.clear()
            self._changed.notify_all()

    def wait(self, timeout_s: float) -> bool:
        """Wait until finished; False past the timeout."""
        with self._changed:
            return self._changed.wait_for(self._finished, max(0.0, timeout_s))

    def check(self) -> None:
        """Assert the invariants. O(1)."""
        with self._changed:
            assert 0 <= self._under_way <= WIDTH, self._under_way
            assert self._done + self._under_way + len(self._left) <= self._total, "too many pages"

    def _finished(self) -> bool:
        return self._under_way == 0 and not self._pumping and (self._stopped or not self._left)

    def _ended(self, arrived: bool) -> None:
        with self._changed:
            self._under_way -= 1
            self._done += arrived
            self._changed.notify_all()
        self._pump()

    def _pump(self) -> None:
        """Start pages until enough are under way. One thread at a time; others leave it to it."""
        with self._changed:
            if self._pumping:
                return
            self._pumping = True
        while (key := self._next()) is not None:
            started = self._start(key, self._ended)
            if started is PreloadStart.STARTED:
                continue
            with self._changed:
                self._under_way -= 1
            if started is PreloadStart.STOP:
                self.cancel()

    def _next(self) -> PageKey | None:
        """Take the next page and count it as under way; None ends the pumping."""
        with self._changed:
            if self._left and self._under_way < WIDTH and not self._stopped:
                self._under_way += 1
                return self._left.pop()
            # Decided under the lock that _ended needs: nobody's end can fall between.
            self._pumping = False
            self._changed.notify_all()
            return None


def hottest_first(
    keys: Sequence[PageKey], sketch: FrequencySketch, lock: threading.RLock
) -> list[PageKey]:
    """Order by use count, those alike as they were. `lock` guards the sketch. O(n log n)."""
    uses: list[int] = []
    for start in range(0, len(keys), ESTIMATE_PAGES):
        # In pieces, so that no request waits for all of them.
        with lock:
            uses += [sketch.estimate(key) for key in keys[start : start + ESTIMATE_PAGES]]
    order = sorted(range(len(keys)), key=lambda index: -uses[index])
    return [keys[index] for index in order]
