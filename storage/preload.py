"""Preload: the hottest nvme pages come back to host in the background after a reboot.

Owns the list of pages to bring and how far it got. Does not read (storage.mover does, from a
queue that waits behind every request's reads) and never evicts: it ends when host has no free
slot. Each page's end starts the next, so there is no thread and nothing polls.

Invariants: at most WIDTH pages are under way; `done + under way` never exceeds the budget;
finished once and for all when nothing is under way and nothing more will be started. Only then is
the order in host put right: pages came hottest first, so the hottest would look the oldest.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial

from tierkv.storage.base import Tier
from tierkv.storage.last_use import LastUse
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
    `on_end(arrived)` once if STARTED, with no lock held; `finish(arrived)` is called once, before
    the preload is seen as finished; `keys` are hottest first.
    """

    def __init__(
        self,
        keys: Sequence[PageKey],
        page_bytes: int,
        start: Callable[[PageKey, Callable[[bool], None]], PreloadStart],
        finish: Callable[[list[PageKey]], None] = lambda arrived: None,
    ) -> None:
        self._left = list(reversed(keys))
        self._total = len(keys)
        self._page_bytes = page_bytes
        self._start = start
        self._finish = finish
        self._keys = list(keys)
        self._arrived: set[PageKey] = set()
        self._changed = threading.Condition()
        self._under_way = 0
        self._stopped = False
        self._pumping = False
        self._finishing = False
        self._ended_all = False

    def begin(self) -> None:
        """Start the first pages. Once."""
        self._pump()

    def progress(self) -> PreloadProgress:
        """How far it is. O(1)."""
        with self._changed:
            done = len(self._arrived)
            return PreloadProgress(done, self._total, done * self._page_bytes, self._ended_all)

    def cancel(self) -> None:
        """Start no more pages; those under way arrive. Idempotent."""
        with self._changed:
            self._stopped = True
            self._left.clear()
        self._finish_once()

    def wait(self, timeout_s: float) -> bool:
        """Wait until finished; False past the timeout."""
        with self._changed:
            return self._changed.wait_for(lambda: self._ended_all, max(0.0, timeout_s))

    def check(self) -> None:
        """Assert the invariants. O(1)."""
        with self._changed:
            assert 0 <= self._under_way <= WIDTH, self._under_way
            under_way = self._under_way + len(self._left)
            assert len(self._arrived) + under_way <= self._total, "too many pages"

    def _ended(self, key: PageKey, arrived: bool) -> None:
        with self._changed:
            self._under_way -= 1
            if arrived:
                self._arrived.add(key)
        self._pump()

    def _pump(self) -> None:
        """Start pages until enough are under way. One thread at a time; others leave it to it."""
        with self._changed:
            if self._pumping:
                return
            self._pumping = True
        while (key := self._next()) is not None:
            started = self._start(key, partial(self._ended, key))
            if started is PreloadStart.STARTED:
                continue
            with self._changed:
                self._under_way -= 1
            if started is PreloadStart.STOP:
                self.cancel()
        self._finish_once()

    def _next(self) -> PageKey | None:
        """Take the next page and count it as under way; None ends the pumping."""
        with self._changed:
            if self._left and self._under_way < WIDTH and not self._stopped:
                self._under_way += 1
                return self._left.pop()
            # Decided under the lock that _ended needs: nobody's end can fall between.
            self._pumping = False
            return None

    def _finish_once(self) -> None:
        with self._changed:
            if self._under_way or self._pumping or self._left or self._finishing:
                return
            self._finishing = True
        # Two reads at a time may end the other way round: the order is the one asked for.
        self._finish([key for key in self._keys if key in self._arrived])
        with self._changed:
            self._ended_all = True
            self._changed.notify_all()


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


class HostOrder:
    """Puts pages that were preloaded below those in use, the hottest of them uppermost."""

    def __init__(self, host: Tier, last_use: LastUse, lock: threading.RLock) -> None:
        """Before the preload begins: what is used from now on was asked for. `lock` is the
        store's and guards `last_use`.
        """
        self._host = host
        self._last_use = last_use
        self._lock = lock
        self._began_s = last_use.now_s()

    def restore(self, arrived: list[PageKey]) -> None:
        """`arrived` hottest first. O(pages in host)."""
        preloaded = set(arrived)
        wanted = [key for key in arrived if self._asked_for(key)]
        preloaded.difference_update(wanted)
        order = [key for key in reversed(arrived) if key in preloaded]
        order += [key for key in self._host.keys_of() if key not in preloaded]
        for start in range(0, len(order), ESTIMATE_PAGES):
            self._host.touch(order[start : start + ESTIMATE_PAGES])

    def _asked_for(self, key: PageKey) -> bool:
        with self._lock:
            # Readings are whole seconds: a page used just before the preload may count as well.
            return self._last_use.used_at_s(key) > self._began_s
