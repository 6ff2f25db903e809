"""A clock that moves only when a test says so."""

from __future__ import annotations


class ManualClock:
    """Clock at a fixed time until advance()."""

    def __init__(self, monotonic_s: float = 1000.0, wall_s: float = 1_700_000_000.0) -> None:
        self._monotonic_s = monotonic_s
        self._wall_s = wall_s

    def monotonic(self) -> float:
        return self._monotonic_s

    def wall(self) -> float:
        return self._wall_s

    def advance(self, seconds: float) -> None:
        """Let `seconds` pass on both readings."""
        assert seconds >= 0, "time does not go back"
        self._monotonic_s += seconds
        self._wall_s += seconds
