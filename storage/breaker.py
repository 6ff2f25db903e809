"""A breaker that stops asking a tier which keeps failing or being late.

Owns a failure count and a moment. Knows neither tiers nor pages. Called by storage.promotion, and
by whoever asks another node or a library.

    state      allows            leaves by
    CLOSED     everything        failures_max failures in a row, or one beyond doubt -> OPEN
    OPEN       nothing           open_s passed -> HALF OPEN
    HALF OPEN  everything        a success -> CLOSED; a failure -> OPEN
"""

from __future__ import annotations

import threading

from tierkv.storage.clock import Clock


class Breaker:
    """Thread-safe. Times are in seconds of `clock.monotonic()`."""

    def __init__(self, clock: Clock, failures_max: int, open_s: float) -> None:
        self._clock = clock
        self._failures_max = failures_max
        self._open_s = open_s
        self._lock = threading.Lock()
        self._failures = 0
        self._open_until: float | None = None
        self._trips = 0

    @property
    def closed(self) -> bool:
        """True when the tier may be asked now. No side effects."""
        with self._lock:
            return self._open_until is None or self._clock.monotonic() >= self._open_until

    @property
    def trips(self) -> int:
        """How often the tier was given up for a while."""
        with self._lock:
            return self._trips

    def succeeded(self) -> None:
        """The tier answered in time."""
        with self._lock:
            if self._open_until is not None and self._clock.monotonic() < self._open_until:
                # A straggler from before the trip says nothing about the tier's health now.
                return
            self._failures = 0
            self._open_until = None

    def failed(self, *, beyond_doubt: bool = False) -> None:
        """The tier failed or was late. In HALF OPEN one failure is enough to open again, as it is
        when it is `beyond_doubt` that the tier cannot be asked."""
        with self._lock:
            now = self._clock.monotonic()
            half_open = self._open_until is not None and now >= self._open_until
            self._failures += 1
            enough = beyond_doubt or self._failures >= self._failures_max
            if half_open or (self._open_until is None and enough):
                self._open_until = now + self._open_s
                self._trips += 1

    def check(self) -> None:
        """Assert that a closed breaker is below its limit. O(1)."""
        with self._lock:
            assert self._open_until is not None or self._failures < self._failures_max, (
                self._failures,
                self._failures_max,
            )
