"""What members hear of the pages held here: changes of a journal, parts of a snapshot.

Owns the snapshots that members are reading, so that all parts of one come from the same state.
Does not know who is a member, nor epochs: serving.py asks it. Thread-safe. Invariants: an answer
never has more fingerprints than the format allows; one snapshot a member and page size is kept,
until it was read through, the member is gone or has not asked on for READING_S.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

import numpy as np

from tierkv.storage.clock import Clock
from tierkv.storage.pool.holdings import Holdings, Snapshot
from tierkv.storage.pool.messages import Changes, Since, SnapshotAsk, SnapshotPart

READING_S = 60.0
"""A member that has not asked for the next part for so long begins anew when it comes back."""

_NONE = np.empty(0, np.uint64)


@dataclass(frozen=True, slots=True)
class _Reading:
    snapshot: Snapshot
    until: float


class Teller:
    """See the module docstring."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._snapshots: dict[tuple[str, int], _Reading] = {}

    def part(self, name: str, holdings: Holdings, ask: SnapshotAsk) -> SnapshotPart:
        """The part of a snapshot that member `name` asks for; the first one of a new snapshot
        when it was not reading this one. O(part), O(capacity) for a new one."""
        reading = (name, ask.page_bytes)
        with self._lock:
            known = self._snapshots.get(reading)
        snapshot = None if known is None else known.snapshot
        if snapshot is None or (snapshot.token, snapshot.seq) != (ask.token, ask.seq):
            snapshot = holdings.snapshot()
        goes_on = (snapshot.token, snapshot.seq) == (ask.token, ask.seq)
        start = ask.start if goes_on else 0
        part = snapshot.fingerprints[start : start + ask.count]
        total = len(snapshot.fingerprints)
        with self._lock:
            if start + ask.count < total:
                until = self._clock.monotonic() + READING_S
                self._snapshots[reading] = _Reading(snapshot, until)
            else:
                self._snapshots.pop(reading, None)
        return SnapshotPart(snapshot.token, snapshot.seq, total, part)

    def expire(self) -> None:
        """Let go what nobody reads on. O(snapshots)."""
        now = self._clock.monotonic()
        with self._lock:
            for reading in [key for key, one in self._snapshots.items() if one.until <= now]:
                del self._snapshots[reading]

    def forget_member(self, name: str) -> None:
        """It reads no more. O(snapshots)."""
        with self._lock:
            for reading in [key for key in self._snapshots if key[0] == name]:
                del self._snapshots[reading]

    def forget_class(self, page_bytes: int) -> None:
        """Nobody reads of this page size any more. O(snapshots)."""
        with self._lock:
            for reading in [key for key in self._snapshots if key[1] == page_bytes]:
                del self._snapshots[reading]

    @property
    def reading(self) -> int:
        """Snapshots kept because a member has not read them through."""
        return len(self._snapshots)


def changes_since(holdings: Holdings, want: Since, room: int) -> Changes:
    """What a member is to hear of one page size, in at most `room` fingerprints."""
    if room < 1 and want.token == holdings.token:
        return Changes(want.page_bytes, want.token, want.since, _NONE, _NONE, more=True)
    delta = holdings.changes(want.token, want.since, max(1, room))
    if delta is None:
        return Changes(want.page_bytes, holdings.token, 0, _NONE, _NONE, snapshot_needed=True)
    return Changes(want.page_bytes, delta.token, delta.seq, delta.added, delta.removed, delta.more)
