"""Use counts and moments of use of a store's pages, and when they are saved.

Owns the sketch, the moments and the file they are kept in. Does not use them: storage.demotion
and storage.promotion do, with the store's lock held, which is passed in here to copy them. Saving
waits for I/O and is done without that lock. Called by storage.store.
"""

from __future__ import annotations

import threading
from pathlib import Path

from tierkv.storage.clock import Clock
from tierkv.storage.hotness_file import Hotness, HotnessFile
from tierkv.storage.last_use import LastUse
from tierkv.storage.policy import FrequencySketch


class HotnessKeeper:
    """See the module docstring. `folder` None: nothing is kept."""

    def __init__(
        self, capacity_pages: int, clock: Clock, folder: Path | None, save_s: float
    ) -> None:
        """Go on from what was saved in `folder`, or start anew. O(capacity)."""
        self._clock = clock
        self._save_s = save_s
        self._file = None if folder is None else HotnessFile(folder)
        saved = None if self._file is None else self._file.load()
        pages = max(1, capacity_pages)
        self.sketch = FrequencySketch(pages, None if saved is None else saved.sketch)
        self.last_use = LastUse(pages, clock, None if saved is None else saved.last_use)
        self._saving = threading.Lock()
        self._saved_at = clock.monotonic()

    def save_if_due(self, lock: threading.RLock) -> None:
        """Save when the last time is long enough ago and nobody else is at it."""
        if self._clock.monotonic() - self._saved_at >= self._save_s:
            self.save(lock, closing=False)

    def save(self, lock: threading.RLock, closing: bool) -> bool:
        """Save now; `lock` is the store's, held while a copy is made. O(capacity).

        False when the device refused; True too when nothing is kept, or another thread saves.
        """
        if self._file is None or not self._saving.acquire(blocking=closing):
            return True
        try:
            self._saved_at = self._clock.monotonic()
            with lock:
                copy = Hotness(self.sketch.state(), self.last_use.state())
            return self._file.save(copy, closing)
        finally:
            self._saving.release()
