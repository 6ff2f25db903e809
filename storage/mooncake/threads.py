"""Worker threads that survive whatever one round of their work raises.

Owns the threads and the count of rounds that failed. Knows nothing of the work. Called by
storage.mooncake.remote. Invariant: a worker ends only when its work says so (lesson H2).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from tierkv.storage.clock import Clock

log = logging.getLogger(__name__)


class Threads:
    """Thread-safe, but for start()."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._restarts = 0

    @property
    def restarts(self) -> int:
        """Rounds that raised."""
        return self._restarts

    def start(self, name: str, work: Callable[[], bool]) -> None:
        """Run rounds of `work`, each of which waits for something to do, until one says False.

        A round that raises has given back what it held.
        """
        thread = threading.Thread(target=self._rounds, args=(work,), name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def join(self, timeout_s: float) -> bool:
        """Wait until all have ended; False past the timeout."""
        until = self._clock.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, until - self._clock.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _rounds(self, work: Callable[[], bool]) -> None:
        more = True
        while more:
            try:
                more = work()
            except Exception:
                # The one supervisor: whatever a round raises, the library's surprises included,
                # must not end the thread that all later rounds need. Logged and counted.
                log.exception("mooncake worker=%s", threading.current_thread().name)
                with self._lock:
                    self._restarts += 1
