"""Whether a tier may be written to now, and why not.

Owns the degraded line and the time of the next try. Does no I/O; not thread-safe (the tier's
lock guards it). A tier that failed to write refuses reservations until `retry_s` has passed,
then lets one attempt through: a commit that succeeds heals it, another failure starts again.
"""

from __future__ import annotations

import logging

from tierkv.storage.clock import Clock

log = logging.getLogger(__name__)


class WriteHealth:
    """Breaker for writes. Reads are never refused by it."""

    def __init__(self, clock: Clock, retry_s: float, subject: str) -> None:
        self._clock = clock
        self._retry_s = retry_s
        self._subject = subject
        self._retry_at_s = 0.0
        self.degraded: str | None = None
        """One line that says why writes are refused; None when healthy."""

    def fail(self, reason: str) -> None:
        """Refuse writes from now until `retry_s` has passed."""
        if self.degraded is None:
            log.warning(
                "tier=%s degraded reason=%r retry_s=%s", self._subject, reason, self._retry_s
            )
        self.degraded = " ".join(reason.split())
        self._retry_at_s = self._clock.monotonic() + self._retry_s

    def writable(self) -> bool:
        """True when healthy or due for a try."""
        return self.degraded is None or self._clock.monotonic() >= self._retry_at_s

    def succeed(self) -> None:
        """A write became durable: healthy again."""
        if self.degraded is not None:
            log.info("tier=%s recovered", self._subject)
        self.degraded = None
