"""Whether the store may be asked now: a breaker, and the calls that should have returned.

Owns the breaker, the watch, the last failure's text and how many copies found no room in a row.
Knows no pages. Shared by all that call one client. Called by storage.mooncake's workers; `open` by
everybody.

A failed call counts once, one that says that the master is gone is enough by itself: with the
master nothing works, and each further call may take the library seconds.

Invariants: a call that is late is counted once, as a failure, at the moment it is late; while one
is, nothing more is asked.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from tierkv.storage.breaker import Breaker
from tierkv.storage.clock import Clock
from tierkv.storage.deadlines import DeadlineWatch
from tierkv.storage.mooncake.config import MooncakeConfig

GONE_CODES = frozenset({-900, -901})
"""The library's words for a master that is gone, or silent."""

T = TypeVar("T")


class Gate:
    """Thread-safe; see the module docstring."""

    def __init__(self, config: MooncakeConfig, clock: Clock) -> None:
        self._master = config.master
        self._call_s = config.call_s
        self._clock = clock
        self._breaker = Breaker(clock, config.breaker_failures, config.breaker_open_s)
        self._watch = DeadlineWatch(clock)
        self._lock = threading.Lock()
        self._running: set[object] = set()
        self._overdue: set[object] = set()
        self._late = 0
        self._why = "no failure yet"
        self._roomless = 0

    @property
    def open(self) -> bool:
        """True when the store may be asked. Never waits."""
        return not self._overdue and self._breaker.closed

    @property
    def late(self) -> int:
        """Calls that did not return in time, so far."""
        return self._late

    @property
    def trips(self) -> int:
        """How often the store was given up for a while."""
        return self._breaker.trips

    @property
    def degraded(self) -> str | None:
        """None when the store may be asked; else one line that says why not."""
        if self.open:
            return None
        return f"mooncake store at {self._master} is not asked for a while: {self._why}"

    @property
    def problem(self) -> str | None:
        """One line when the store cannot be asked, or takes no copies; None otherwise."""
        roomless = self._roomless
        if (degraded := self.degraded) is not None or not roomless:
            return degraded
        return (
            f"mooncake store at {self._master} had no room for the last {roomless} copies; give it "
            "memory: mooncake.segment on its nodes, or a store node of its own"
        )

    def run(self, what: str, deadline: float, call: Callable[[], T]) -> tuple[T, bool]:
        """Run one call of the library in this thread, watched; (result, returned in time).

        `deadline`: in seconds of the clock; the call is late past it, and past call_s at the
        latest. Raises what `call` raises, which counts as a failure. A result in time is judged by
        the caller: succeeded() or failed().
        """
        token = object()
        started = self._clock.monotonic()
        moment = min(deadline, started + self._call_s)
        with self._lock:
            self._running.add(token)
        entry = self._watch.add(moment, lambda: self._is_late(token, what, moment - started))
        returned = in_time = False
        try:
            result = call()
            returned = True
        finally:
            self._watch.discard(entry)
            with self._lock:
                in_time = token not in self._overdue
                self._running.remove(token)
                self._overdue.discard(token)
            if in_time and not returned:
                self.failed(f"{what} raised an error")
        return result, in_time

    def judge(self, what: str, in_time: bool, answered: bool, code: int | None) -> None:
        """What a call that returned says of the store. `code`: the client's last one."""
        if answered:
            if in_time:
                self.succeeded()
            return
        gone = code in GONE_CODES
        if in_time or gone:
            # A late call was counted when it was late; that the master is gone it says now.
            hint = ": the master is gone or silent, look whether it runs" if gone else ""
            why = f"{what} failed with code {code}{hint}"
            self.failed(why, beyond_doubt=gone)

    def note_room(self, made: int, roomless: int) -> None:
        """Of a call's copies so many were made, and so many found no room."""
        with self._lock:
            self._roomless = 0 if made else self._roomless + roomless

    def succeeded(self) -> None:
        """A call in time was answered."""
        self._breaker.succeeded()

    def failed(self, why: str, *, beyond_doubt: bool = False) -> None:
        """A call in time was not answered, or by an error."""
        with self._lock:
            self._why = why
        self._breaker.failed(beyond_doubt=beyond_doubt)

    def check(self) -> None:
        """Assert the breaker's and the watch's invariants. O(1)."""
        self._breaker.check()
        self._watch.check()
        with self._lock:
            assert self._overdue <= self._running, "a call is late that has returned"
            assert self._late >= len(self._overdue), (self._late, len(self._overdue))

    def close(self, timeout_s: float) -> bool:
        """Stop the watch. Idempotent."""
        return self._watch.close(timeout_s)

    def _is_late(self, token: object, what: str, after_s: float) -> None:
        with self._lock:
            if token not in self._running:
                # It returned while the watch was on its way here.
                return
            self._overdue.add(token)
            self._late += 1
            self._why = f"{what} has not returned after {after_s:.2f} s"
        self._breaker.failed()
