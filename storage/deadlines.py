"""A thread that runs something when its time has come.

Owns a heap of moments. Knows nothing of what runs. Used wherever something ends at a deadline
although nobody waits for it: fetches, pulls, reads of peers, calls of a library. Invariants: what
was discarded never runs; discarded entries never outnumber live ones by more than SLACK; whatever
an action raises, later ones run (lesson H2).
"""

from __future__ import annotations

import heapq
import itertools
import logging
import threading
import traceback
from collections.abc import Callable

from tierkv.storage.clock import Clock

IDLE_WAIT_S = 5.0
SLACK = 64

log = logging.getLogger(__name__)


class DeadlineWatch:
    """Thread-safe. The thread starts with the first entry and ends with close()."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._changed = threading.Condition()
        self._heap: list[tuple[float, int]] = []
        self._actions: dict[int, Callable[[], None]] = {}
        self._tokens = itertools.count()
        self._thread: threading.Thread | None = None
        self._closing = False
        self.failures = 0
        """Actions that raised. By whoever runs what is due only."""

    def add(self, deadline: float, action: Callable[[], None]) -> int:
        """Run `action` at `deadline` (seconds of the clock) unless discarded. O(log n).

        RuntimeError, and nothing was added, when the system gives no thread for the first entry.
        """
        with self._changed:
            if self._thread is None and not self._closing:
                thread = threading.Thread(target=self._watch, name="tierkv-deadlines", daemon=True)
                thread.start()
                self._thread = thread
            token = next(self._tokens)
            self._actions[token] = action
            heapq.heappush(self._heap, (deadline, token))
            if self._heap[0][1] == token:
                self._changed.notify_all()
            return token

    def discard(self, token: int) -> None:
        """Forget an entry. Safe after it ran. Amortised O(1)."""
        with self._changed:
            self._actions.pop(token, None)
            if len(self._heap) > 2 * len(self._actions) + SLACK:
                self._heap = [entry for entry in self._heap if entry[1] in self._actions]
                heapq.heapify(self._heap)

    def run_due(self) -> float:
        """Run what is due, in this thread; returns seconds until the next, at most IDLE_WAIT_S."""
        due: list[Callable[[], None]] = []
        with self._changed:
            now = self._clock.monotonic()
            while self._heap and self._heap[0][0] <= now:
                action = self._actions.pop(heapq.heappop(self._heap)[1], None)
                if action is not None:
                    due.append(action)
            next_s = self._heap[0][0] - now if self._heap else IDLE_WAIT_S
        for action in due:
            try:
                action()
            except Exception:  # noqa: BLE001
                # The one supervisor: a bug met at one deadline must not end the thread that keeps
                # all later ones.
                log.error("deadline: %s", traceback.format_exc())
                self.failures += 1
        return min(next_s, IDLE_WAIT_S)

    def check(self) -> None:
        """Assert that discarded entries do not pile up. O(1)."""
        with self._changed:
            assert len(self._heap) <= 2 * len(self._actions) + SLACK + 1, len(self._heap)

    def close(self, timeout_s: float) -> bool:
        """Stop the thread and forget all entries; False when it did not end in time."""
        with self._changed:
            self._closing = True
            self._actions.clear()
            self._heap.clear()
            self._changed.notify_all()
        if self._thread is None or self._thread is threading.current_thread():
            return True
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _watch(self) -> None:
        while True:
            wait_s = self.run_due()
            with self._changed:
                if self._closing:
                    return
                if self._heap and self._heap[0][0] <= self._clock.monotonic():
                    continue
                self._changed.wait(min(wait_s, self._until_next()))

    def _until_next(self) -> float:
        if not self._heap:
            return IDLE_WAIT_S
        return max(0.0, self._heap[0][0] - self._clock.monotonic())
