"""What one peer holds, kept up to date: the asking side of SYNC and SNAPSHOT.

Owns the PeerIndex of each page size that both nodes have. Knows neither the connection nor its
trouble: it is handed something that asks, and whatever that raises ends the round; what was heard
until then stays. Invariants: deltas are asked for one at a time, by the link's thread only; a
snapshot is loaded whole, from parts of one token and seq, or not at all. Called by link.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from tierkv.storage.errors import TierIOError
from tierkv.storage.pool.holdings import Delta, Fingerprints
from tierkv.storage.pool.messages import (
    FINGERPRINTS_MAX,
    AnyRequest,
    Changes,
    Refusal,
    Since,
    SnapshotAsk,
    SnapshotPart,
    Status,
    Sync,
    SyncAnswer,
)
from tierkv.storage.pool.peer_index import PeerIndex

ROUNDS_MAX = 64
"""SYNCs of one heartbeat while the peer has more to tell; the rest comes with the next one."""
RESTARTS_MAX = 8
"""Snapshots that are begun anew because another took the place of the one being read."""
SNAPSHOT_PAGES_MAX = 1 << 24
"""Pages of one peer that are remembered, of one page size: 128 MiB. More are not found here."""

Ask = Callable[[AnyRequest], object]
"""Sends a request and returns its answer or a Refusal; raises TierIOError."""


class Follower:
    """Indexes by page size. indexes() and index() are thread-safe, follow() is one thread's."""

    def __init__(self) -> None:
        self._indexes: dict[int, PeerIndex] = {}

    def index(self, page_bytes: int) -> PeerIndex | None:
        """What the peer holds of this page size; None before it was first asked."""
        return self._indexes.get(page_bytes)

    @property
    def known(self) -> int:
        """Pages of all sizes."""
        return sum(index.known for index in list(self._indexes.values()))

    def reset(self) -> None:
        """Know nothing: the peer has begun a new life."""
        for index in list(self._indexes.values()):
            index.reset()

    def follow(self, page_sizes: Sequence[int], ask: Ask) -> SyncAnswer:
        """Bring the indexes of `page_sizes` up to date; returns the peer's last answer.

        TierIOError when the peer did not answer, or answered what cannot be. O(changes).
        """
        for gone in self._indexes.keys() - set(page_sizes):
            del self._indexes[gone]
        for size in page_sizes:
            self._indexes.setdefault(size, PeerIndex())
        answer = self._sync(ask)
        for _ in range(ROUNDS_MAX):
            if not self._apply(answer, ask):
                break
            answer = self._sync(ask)
        return answer

    def check(self) -> None:
        """Assert the invariants of each index. O(pages)."""
        for index in list(self._indexes.values()):
            index.check()

    def _sync(self, ask: Ask) -> SyncAnswer:
        wants = tuple(Since(size, index.token, index.seq) for size, index in self._indexes.items())
        answer = ask(Sync(wants))
        if not isinstance(answer, SyncAnswer):
            raise TierIOError(f"follow peer: expected its changes, got {answer}")
        return answer

    def _apply(self, answer: SyncAnswer, ask: Ask) -> bool:
        """Take over one answer; True when the peer has more to tell."""
        told = {changes.page_bytes: changes for changes in answer.changes}
        more = False
        for size, index in self._indexes.items():
            changes = told.get(size)
            if changes is None:
                # Not served there (any more): an index that has heard nothing stays as it is.
                if index.token:
                    index.reset()
            elif changes.snapshot_needed or not index.apply(_delta(changes)):
                more |= self._load(size, index, ask)
            else:
                more |= changes.more
        return more

    def _load(self, size: int, index: PeerIndex, ask: Ask) -> bool:
        """Replace an index by a whole snapshot; False when the peer does not serve that size."""
        token = seq = total = restarts = 0
        parts: list[Fingerprints] = []
        while not parts or sum(map(len, parts)) < min(total, SNAPSHOT_PAGES_MAX):
            start = sum(map(len, parts))
            part = ask(SnapshotAsk(size, token, seq, start, FINGERPRINTS_MAX))
            if isinstance(part, Refusal) and part.status is Status.NO_CLASS:
                index.reset()
                return False
            if not isinstance(part, SnapshotPart):
                raise TierIOError(f"follow peer: expected part of a snapshot, got {part}")
            if (part.token, part.seq) != (token, seq):
                restarts += 1
                if restarts > RESTARTS_MAX:
                    raise TierIOError(f"follow peer: its snapshot began anew {restarts} times")
                parts.clear()
            token, seq, total = part.token, part.seq, part.total
            parts.append(part.fingerprints)
        index.load(token, seq, np.concatenate(parts))
        return True


def _delta(changes: Changes) -> Delta:
    return Delta(changes.token, changes.seq, changes.added, changes.removed, changes.more)
