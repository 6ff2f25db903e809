"""What a person is told about this pool: each thing now and then, and what of it still lasts.

Owns which texts were logged and when, and what was last seen of each trouble. Does not know what
the texts mean. Called by pool.py; link.py and serving.py ask told() before they say the same again.

Invariants: a text is logged when it is first told and then at most once in REPEAT_S; a trouble is
shown until nothing was seen of it for as long as it was said to last; both tables are bounded: past
NOTICES_MAX what was told longest ago makes way if it is due again, else the new text is not logged.
Thread-safe.
"""

from __future__ import annotations

import logging
import threading

from tierkv.storage.clock import Clock

REPEAT_S = 600.0
NOTICES_MAX = 256

log = logging.getLogger(__name__)


def two_nodes(name: str, one: str, other: str) -> str:
    """That two nodes have one name, in the same words on every node that finds it out."""
    where = " and ".join(sorted(each or "an unknown address" for each in (one, other)))
    return f"two nodes are called {name}, {where}; give each member a pool.name of its own"


class Notices:
    """See the module docstring."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._told: dict[str, float] = {}
        """When each text was logged last, the longest ago first."""
        self._until: dict[str, float] = {}
        """Until when each trouble is shown unless it is seen again."""

    def tell(self, text: str, line: str | None = None, lasts_s: float = 0.0) -> None:
        """Log `line` (None: the text) as a warning unless `text` was told lately.

        With `lasts_s` it is shown as a trouble for so long.
        """
        now = self._clock.monotonic()
        with self._lock:
            if lasts_s > 0 and (text in self._until or self._room(self._until, now)):
                self._until[text] = max(self._until.get(text, 0.0), now + lasts_s)
            told = self._told.get(text)
            if told is not None and now - told < REPEAT_S:
                return
            if told is None and not self._room(self._told, now - REPEAT_S):
                return
            self._told.pop(text, None)
            self._told[text] = now
        log.warning("pool %s", line or text)

    def told(self, text: str) -> bool:
        """Whether this very text was logged in the last REPEAT_S. O(1)."""
        with self._lock:
            told = self._told.get(text)
            return told is not None and self._clock.monotonic() - told < REPEAT_S

    def lasting(self) -> list[str]:
        """The troubles that were seen lately, the oldest first. O(troubles)."""
        now = self._clock.monotonic()
        with self._lock:
            for text in [text for text, until in self._until.items() if until <= now]:
                del self._until[text]
            return list(self._until)

    def over(self, text: str) -> None:
        """That trouble is known to have ended."""
        with self._lock:
            self._until.pop(text, None)

    def check(self) -> None:
        """Assert the bounds. O(texts)."""
        with self._lock:
            assert max(len(self._told), len(self._until)) <= NOTICES_MAX
            times = list(self._told.values())
            assert times == sorted(times), "told in another order than it is kept"

    def _room(self, table: dict[str, float], before: float) -> bool:
        """Whether one more fits, after the first entry has gone if it is from `before`."""
        if len(table) < NOTICES_MAX:
            return True
        first = min(table, key=table.__getitem__)
        if table[first] > before:
            return False
        del table[first]
        return True
