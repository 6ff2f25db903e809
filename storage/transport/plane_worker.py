"""A thread that does for read() what would have to wait.

Owns a bounded queue and one thread, started with the first task. Knows nothing of what it runs.
Called by planes.py and negotiated_peer.py.
"""

from __future__ import annotations

import logging
import threading
import traceback
from collections import deque
from collections.abc import Callable

from tierkv.storage.errors import TierKVError

TASKS_MAX = 256
IDLE_WAIT_S = 5.0
STOP_S = 12.0
"""Longer than a negotiation."""

log = logging.getLogger(__name__)


class Worker:
    """Thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._tasks: deque[Callable[[], None]] = deque()
        self._thread: threading.Thread | None = None
        self._closing = False
        self.dropped = 0
        """Tasks that there was no room for."""
        self.failed = 0
        """Tasks that met a bug. The thread went on."""

    def ask(self, task: Callable[[], None]) -> bool:
        """Run `task` soon. False when it never will: too many wait, or the worker was closed."""
        with self._changed:
            if self._closing:
                return False
            if len(self._tasks) >= TASKS_MAX:
                self.dropped += 1
                return False
            self._tasks.append(task)
            if self._thread is None:
                thread = threading.Thread(target=self._work, name="tierkv-planes", daemon=True)
                try:
                    thread.start()
                except RuntimeError as error:
                    log.error("planes worker=not started reason=%s", error)
                    self._tasks.pop()
                    self.dropped += 1
                    return False
                self._thread = thread
            self._changed.notify_all()
            return True

    def close(self) -> None:
        """End the thread after the task it is at. Idempotent."""
        with self._changed:
            self._closing = True
            self._tasks.clear()
            self._changed.notify_all()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(STOP_S)
            if thread.is_alive():
                log.error("planes worker=did not end")

    def _work(self) -> None:
        while True:
            with self._changed:
                if self._closing:
                    return
                if not self._tasks:
                    self._changed.wait(IDLE_WAIT_S)
                    continue
                task = self._tasks.popleft()
            try:
                task()
            except TierKVError as error:
                log.warning("planes task=%s", error)
            except Exception:  # noqa: BLE001
                # A bug in one task must not end the thread that all peers need (lesson H2).
                log.error("planes: %s", traceback.format_exc())
                self.failed += 1
