"""How many pages may start to leave the pool in one step, so that decoding does not feel it.

Pure arithmetic on the times of decode steps: knows no pages and no copies, has no clock. Steps
with copies under way are compared with steps of the same batch size without; while the median
cost stays within COST_MAX the rate grows by a page a step, past it the rate is halved. Nothing is
started until a few quiet steps are known. Called by core.py, on the engine thread.
"""

from __future__ import annotations

import statistics
from collections import OrderedDict, deque

COST_MAX = 1.05
"""A decode step may take this many times as long while pages leave."""
RATE_START = 2.0
RATE_MIN = 0.125
"""Pages a step: never none, so that what waits leaves in the end."""
RATE_MAX = 64.0
QUIET_MIN = 4
"""Quiet steps of a batch size before its copies can be judged."""
QUIET_KEPT = 32
BUSY_MIN = 4
"""Steps with copies before the rate is changed."""
PATIENCE_STEPS = 16
"""Steps without a judgement after which pages leave all the same, slowly."""
SIZES_MAX = 16


class DecodePace:
    """The rate of one engine's demotion beside decoding."""

    def __init__(self) -> None:
        self.rate = RATE_START
        """Pages a step."""
        self._quiet: OrderedDict[int, deque[float]] = OrderedDict()
        """Seconds of decode steps without copies, by batch size; the latest used size last."""
        self._costs: deque[float] = deque(maxlen=BUSY_MIN)
        self._credit = 0.0
        self._unjudged = 0
        self.slowed = 0
        """Times the rate was halved."""

    def note(self, seconds: float, batch_size: int, *, copying: bool) -> None:
        """One pass of nothing but decodes took so long."""
        known = self._quiet.setdefault(batch_size, deque(maxlen=QUIET_KEPT))
        self._quiet.move_to_end(batch_size)
        if len(self._quiet) > SIZES_MAX:
            self._quiet.popitem(last=False)
        if not copying:
            known.append(seconds)
            return
        if len(known) < QUIET_MIN:
            return
        self._costs.append(seconds / max(statistics.median(known), 1e-9))
        if len(self._costs) < BUSY_MIN:
            return
        if statistics.median(self._costs) > COST_MAX:
            self.rate = max(RATE_MIN, self.rate / 2)
            self.slowed += 1
        else:
            self.rate = min(RATE_MAX, self.rate + 1)
        self._costs.clear()

    def grant(self, batch_size: int) -> int:
        """Pages that may start in the step that begins, beside `batch_size` decodes."""
        if len(self._quiet.get(batch_size, ())) < QUIET_MIN:
            self._unjudged += 1
            if self._unjudged < PATIENCE_STEPS:
                return 0
        self._unjudged = 0
        # Unused steps do not add up to a burst.
        self._credit = min(self._credit + self.rate, max(self.rate, 1.0))
        pages = int(self._credit)
        self._credit -= pages
        return pages
