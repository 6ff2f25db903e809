"""How many bytes a day may be written to nvme: flash wears out by writes.

Owns a token bucket and its file (docs/formats/state.md). Knows pages only as sizes and hotness.
Called by storage.demotion with the store's lock held; save_if_due() does I/O and is called
without it.

The bucket holds a quarter of the day's bytes and fills at three quarters of them a day, so no 24
hours see more than the whole, whenever they start. It fills by the monotonic clock; across a
restart by the wall clock, at most to the brim: a clock that jumps can grant one quarter once.
The file is saved after each SAVE_FRACTION of the bucket, so a kill forgets no more than that.
Invariant: tokens never exceed the bucket; they are below 0 only for forced writes.
"""

from __future__ import annotations

import json
import logging
import threading
from pathlib import Path
from typing import Any

from tierkv.storage.clock import Clock
from tierkv.storage.errors import ConfigError
from tierkv.storage.tiers.nvme_layout import write_json

DAY_S = 86400.0
BUCKET_FRACTION = 0.25
SAVE_FRACTION = 1 / 64
VERSION = 1
_FILE_BYTES_MAX = 4096

WARM_LEFT, HOT_LEFT = 0.5, 0.25
"""Below these shares of the bucket a page needs WARM_USES, then HOT_USES, to be written."""
WARM_USES, HOT_USES = 2, 4

log = logging.getLogger(__name__)


class WriteBudget:
    """See the module docstring. Thread-safe. `bytes_per_day` above 0; `path` None: not kept."""

    def __init__(self, bytes_per_day: int, clock: Clock, path: Path | None = None) -> None:
        if bytes_per_day < 1:
            raise ConfigError(
                f"write budget: bytes_per_day is {bytes_per_day}, expected at least 1; "
                "leave it out for no limit"
            )
        self._clock = clock
        self._path = path
        self._bucket = bytes_per_day * BUCKET_FRACTION
        self._rate = bytes_per_day * (1 - BUCKET_FRACTION) / DAY_S
        self._lock = threading.Lock()
        self._tokens = self._load()
        self._filled_at = clock.monotonic()
        self._saved_tokens: float | None = None
        self.skipped_pages = 0
        """Copies not made because the budget was spent or the page too cold for what is left."""

    @property
    def left_bytes(self) -> int:
        """What may be written now; negative after forced writes."""
        with self._lock:
            self._fill()
            return int(self._tokens)

    def spend(self, nbytes: int, uses: int, forced: bool = False) -> bool:
        """Take `nbytes` for a page used `uses` times, or say that it is not to be written.

        The less is left, the hotter a page must be. `forced` is for writes that were ordered
        (flush): they are always taken, and what they overdraw delays later ones. O(1).
        """
        with self._lock:
            self._fill()
            left = self._tokens / self._bucket
            uses_min = HOT_USES if left < HOT_LEFT else WARM_USES if left < WARM_LEFT else 0
            if not forced and (self._tokens < nbytes or uses < uses_min):
                self.skipped_pages += 1
                return False
            self._tokens -= nbytes
            return True

    def give_back(self, nbytes: int) -> None:
        """Return what was taken for a copy that was not made."""
        with self._lock:
            self._tokens = min(self._bucket, self._tokens + nbytes)

    def save_if_due(self) -> None:
        """Save once enough changed since the last time. Waits for I/O when it saves."""
        with self._lock:
            last = self._saved_tokens
            due = last is None or abs(last - self._tokens) >= self._bucket * SAVE_FRACTION
        if due:
            self.save()

    def save(self) -> None:
        """Write the file now. A failure is logged: the next restart then grants too much."""
        if self._path is None:
            return
        with self._lock:
            self._fill()
            self._saved_tokens = self._tokens
            value = {"version": VERSION, "left": self._tokens / self._bucket}
            value["wall_s"] = self._clock.wall()
        try:
            self._path.parent.mkdir(mode=0o700, exist_ok=True)
            write_json(self._path, value)
        except (OSError, ConfigError) as error:
            log.warning("write budget: save=%s error=%s", self._path, error)

    def check(self) -> None:
        """Assert that the bucket does not overflow. O(1)."""
        with self._lock:
            assert self._tokens <= self._bucket, (self._tokens, self._bucket)

    def _fill(self) -> None:
        now = self._clock.monotonic()
        grown = self._tokens + (now - self._filled_at) * self._rate
        self._tokens = min(self._bucket, grown)
        self._filled_at = now

    def _load(self) -> float:
        """Tokens at the opening: a full bucket the first time, none when the file is damaged."""
        if self._path is None:
            return self._bucket
        try:
            with self._path.open("rb") as file:
                left, wall_s = _parse(file.read(_FILE_BYTES_MAX))
        except FileNotFoundError:
            return self._bucket
        except (OSError, ValueError) as error:
            log.warning("write budget: load=%s error=%s left=0", self._path, error)
            return 0.0
        closed_s = max(0.0, self._clock.wall() - wall_s)
        return min(self._bucket, left * self._bucket + closed_s * self._rate)


def _parse(data: bytes) -> tuple[float, float]:
    """Share left and wall time of a saved budget. ValueError when it is none."""
    value: Any = json.loads(data)
    if not isinstance(value, dict) or value.get("version") != VERSION:
        raise ValueError(f"expected a version {VERSION} budget, got {str(value)[:80]}")
    return _number(value, "left"), _number(value, "wall_s")


def _number(value: dict[str, Any], name: str) -> float:
    number = value.get(name)
    # Python's json reads NaN and Infinity too; neither compares like a number.
    if not isinstance(number, int | float) or not -1e18 < number < 1e18:
        raise ValueError(f"{name}: expected a number, got {number!r}")
    return float(number)
