"""NIXL as the driver sees it, over memory of this process, and as slow or broken as a test says."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence

from tierkv.storage.errors import TierIOError
from tierkv.storage.transport.nixl_agent import Agent, Copy


class FakeAgent(Agent):
    """Transfers end when asked about, unless they are held."""

    def __init__(self) -> None:
        self.name = "fake"
        self.changed = threading.Condition()
        self.held: set[int] = set()
        """Lengths of copies whose transfers stay under way; cookies are 16 bytes."""
        self.failing: set[int] = set()
        """Lengths of copies whose transfers fail."""
        self.raises: type[Exception] = TierIOError
        self.before_copy: dict[int, object] = {}
        """What to do when a copy of that length is about to be made."""
        self.transfers: dict[int, list[Copy]] = {}
        self.started: list[int] = []
        """Lengths, in the order of their transfers."""
        self.forgotten: list[str] = []
        self.registered: list[object] = []
        self.progressed = 0
        self.closed = False

    def register_all(self, runs: Sequence[tuple[int, int]]) -> object:
        token = list(runs)
        self.registered.append(token)
        return token

    def deregister(self, registration: object) -> None:
        self.registered.remove(registration)

    def forget(self, name: str) -> None:
        assert not self.transfers, "a transfer is under way"
        self.forgotten.append(name)

    def start(self, peer: str, copies: Sequence[Copy]) -> tuple[int, bool]:
        with self.changed:
            handle = len(self.started) + 1
            self.started.append(copies[0].length)
            self.transfers[handle] = list(copies)
            self.changed.notify_all()
        try:
            done = self.done(handle)
        except Exception:
            self.release(handle)
            raise
        return handle, done

    def done(self, handle: int) -> bool:
        with self.changed:
            copies = self.transfers[handle]
            length = copies[0].length
            if length in self.held:
                return False
            if length in self.failing:
                raise self.raises("of the test")
        action = self.before_copy.pop(length, None)
        if callable(action):
            action()
        for copy in copies:
            ctypes.memmove(copy.local, copy.remote, copy.length)
        return True

    def release(self, handle: int) -> None:
        with self.changed:
            del self.transfers[handle]
            self.changed.notify_all()

    def progress(self) -> None:
        self.progressed += 1

    def wait_started(self, length: int, limit_s: float) -> bool:
        """Until a transfer of copies of that length has begun."""
        with self.changed:
            return self.changed.wait_for(lambda: length in self.started, limit_s)

    def let(self, length: int) -> None:
        """Hold transfers of that length no more."""
        with self.changed:
            self.held.discard(length)

    def close(self) -> None:
        self.closed = True
