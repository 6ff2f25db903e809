"""Moving estimates of what each tier delivers: bytes per second and seconds per operation.

Owns a handful of floats per tier and direction. Knows no pages. The restore planner reads them
through MoverStats; the mover and the store feed them. Invariant: a rate is bytes moved over the
time in which at least one operation was under way, so parallel operations count as the device
serves them together, not one by one. All methods are thread-safe.
"""

from __future__ import annotations

import threading
from enum import Enum

from tierkv.storage.clock import Clock
from tierkv.storage.types import TierName

DECAY = 0.95
"""Weight that old transfers keep at each new one: the last twenty or so dominate."""


class Way(Enum):
    """Direction of a transfer, seen from the tier."""

    READ = "read"
    WRITE = "write"


class TransferMeter:
    """Estimate for one tier and one direction. Call begin() before and end() after each one."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._active = 0
        self._accounted_until = 0.0
        self._bytes = 0.0
        self._busy_s = 0.0
        self._latency_s: float | None = None

    def begin(self) -> float:
        """Note that an operation starts; returns its start, to be handed to end()."""
        now = self._clock.monotonic()
        with self._lock:
            if self._active == 0:
                self._accounted_until = now
            self._active += 1
        return now

    def end(self, started: float, moved_bytes: int) -> None:
        """Note that it ended. `moved_bytes` 0: it failed and says nothing about speed."""
        now = self._clock.monotonic()
        with self._lock:
            assert self._active > 0, "end() without begin()"
            self._active -= 1
            busy_s, self._accounted_until = now - self._accounted_until, now
            if moved_bytes == 0:
                return
            self._bytes = self._bytes * DECAY + moved_bytes
            self._busy_s = self._busy_s * DECAY + busy_s
            latency_s = now - started
            old = latency_s if self._latency_s is None else self._latency_s
            self._latency_s = old * DECAY + latency_s * (1 - DECAY)

    @property
    def bytes_per_s(self) -> float | None:
        """Current estimate; None before the first transfer that took measurable time."""
        with self._lock:
            return self._bytes / self._busy_s if self._busy_s > 0 else None

    @property
    def latency_s(self) -> float | None:
        """Seconds from begin() to end() of one operation; None before the first."""
        with self._lock:
            return self._latency_s


class Bandwidth:
    """The meters of all tiers."""

    def __init__(self, clock: Clock) -> None:
        self._meters = {(tier, way): TransferMeter(clock) for tier in TierName for way in Way}

    def meter(self, tier: TierName, way: Way) -> TransferMeter:
        """The meter of one tier and direction, shared by all who use that tier."""
        return self._meters[tier, way]

    def rates(self, way: Way) -> dict[TierName, float]:
        """Bytes per second of each tier that moved something in this direction."""
        found = {tier: self._meters[tier, way].bytes_per_s for tier in TierName}
        return {tier: rate for tier, rate in found.items() if rate is not None}

    def latencies(self, way: Way) -> dict[TierName, float]:
        """Seconds per operation of each tier that moved something in this direction."""
        found = {tier: self._meters[tier, way].latency_s for tier in TierName}
        return {tier: latency for tier, latency in found.items() if latency is not None}
