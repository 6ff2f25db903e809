"""The time seam: nothing else in TierKV asks the system what time it is.

Tests hand in a manual clock (tests/support/clock.py).
"""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Source of time. Both readings are in seconds."""

    def monotonic(self) -> float:
        """Seconds since an arbitrary start; never goes back. For deadlines and durations."""
        ...

    def wall(self) -> float:
        """Seconds since the Unix epoch. For records that outlive the process; may jump."""
        ...


class SystemClock:
    """The machine's clock."""

    def monotonic(self) -> float:
        return time.monotonic()

    def wall(self) -> float:
        return time.time()
