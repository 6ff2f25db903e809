"""What this node holds of one page size, as a journal that peers follow.

Owns the journal, its token and a cached snapshot. Knows no peers and no tiers: it is told which
pages came and went, and asks the store about those that went, since a page that left host may be
in nvme still. Called by storage.pool.remote (gained, lost) and storage.pool.serving (the rest).

    entry seq     1  2  3 ...                              seq of the last entry
    journal             [ oldest kept ........ newest ]    the last `journal_max` entries
    changes(since)         (since ........ end]            last entry of each key decides:
                              gained  -> added             its later loss has an entry of its own
                              lost    -> asked: still here -> added, else removed

Why it converges: an entry is made when or after the page came or went, and what it means is found
out after it was made. So the last entry of a key, in whatever delta it travels, tells what is true
after the key's last change. A snapshot carries the seq from before it was built: what changed
meanwhile is in the journal after it, and to apply it twice does no harm.

Invariants: no call into the store while the journal's lock is held; gained() and lost() hold it
for O(n) and wait for nothing else; a token is one life of one journal.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from tierkv.storage.clock import Clock, SystemClock
from tierkv.storage.types import KEY_BYTES, PageKey

JOURNAL_MAX = 65536
SNAPSHOT_S = 5.0
"""How long a snapshot is given out again although pages changed since: the journal has those."""

_PIECE_KEYS = 8192

Fingerprints = NDArray[np.uint64]


class Held(Protocol):
    """What is asked of the store; storage.remote.LocalStore has it."""

    def lookup_here(self, keys: Sequence[PageKey]) -> list[bool]:
        """Whether each page is in host or nvme. No side effects."""
        ...

    def keys_here(self) -> list[PageKey]:
        """Every page in host or nvme, once. O(capacity)."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class Delta:
    """What a journal says after one seq, up to and including `seq`. No fingerprint is in both."""

    token: int
    seq: int
    added: Fingerprints
    removed: Fingerprints
    more: bool
    """The journal goes on after `seq`: ask again."""


@dataclass(frozen=True, slots=True, eq=False)
class Snapshot:
    """All that is held, or was when the journal stood at `seq`. The array is shared: read only."""

    token: int
    seq: int
    fingerprints: Fingerprints
    """Strictly ascending."""


def fingerprint(key: PageKey) -> int:
    """The first 8 bytes of the key, little-endian. Keys are digests: no further mixing."""
    return int.from_bytes(key[:8], "little")


def fingerprints(keys: Sequence[PageKey]) -> Fingerprints:
    """fingerprint() of each key, in their order; an array of its own. O(n)."""
    joined = b"".join(keys)
    assert len(joined) == len(keys) * KEY_BYTES, "a key has 32 bytes"
    return np.frombuffer(joined, dtype="<u8")[:: KEY_BYTES // 8].astype(np.uint64)


def _sorted_fingerprints(keys: Sequence[PageKey]) -> Fingerprints:
    """Strictly ascending. Measured for a million keys: 0.2 s, of which the interpreter is held for
    20 ms at once; joined whole and made unique by numpy.unique, 0.5 s and 140 ms."""
    found = np.empty(len(keys), np.uint64)
    for start in range(0, len(keys), _PIECE_KEYS):
        piece = keys[start : start + _PIECE_KEYS]
        found[start : start + len(piece)] = fingerprints(piece)
    found.sort()
    first = np.ones(len(keys), np.bool_)
    np.not_equal(found[1:], found[:-1], out=first[1:])
    return found if first.all() else found[first]


class Holdings:
    """Thread-safe. Memory: 8 bytes an entry and what keeps its key, 8 bytes a page of snapshot."""

    def __init__(
        self,
        store: Held,
        journal_max: int = JOURNAL_MAX,
        *,
        clock: Clock | None = None,
        snapshot_s: float = SNAPSHOT_S,
    ) -> None:
        assert journal_max >= 1, "a journal keeps something"
        self._store = store
        self._clock = clock or SystemClock()
        self._snapshot_s = snapshot_s
        self._lock = threading.Lock()
        # Rings: the entry of seq s is at s % journal_max. Slices of lists copy at memory speed.
        self._keys: list[PageKey | None] = [None] * journal_max
        self._gained = bytearray(journal_max)
        self._seq = 0
        self.token = secrets.randbits(63) + 1
        """Never 0: that is nobody's."""
        self._building = threading.Lock()
        self._snapshot: Snapshot | None = None
        self._built = 0.0

    @property
    def seq(self) -> int:
        """Of the last entry; 0 when there is none."""
        with self._lock:
            return self._seq

    def gained(self, keys: Sequence[PageKey]) -> None:
        """Pages became visible. O(n), never waits; may be called with the store's lock held."""
        self._append(keys, 1)

    def lost(self, keys: Sequence[PageKey]) -> None:
        """Pages left a tier, perhaps not the last one. O(n), as gained()."""
        self._append(keys, 0)

    def changes(self, token: int, since: int, limit: int) -> Delta | None:
        """What `limit` entries after seq `since` come to, as of now.

        None: of another journal, or too old: a snapshot is needed. Asks the store, with no lock
        held. O(limit).
        """
        assert limit >= 1, "a delta moves on"
        entries = self._entries(token, since, limit)
        if entries is None:
            return None
        last, end, more = entries
        gone = [key for key, came in last.items() if not came]
        still = self._store.lookup_here(gone) if gone else []
        here = [key for key, came in last.items() if came]
        here += [key for key, kept in zip(gone, still, strict=True) if kept]
        removed = fingerprints([key for key, kept in zip(gone, still, strict=True) if not kept])
        added = fingerprints(here)
        if added.size and removed.size:
            # Only two keys that share a fingerprint can be on both sides; it is held then.
            removed = np.setdiff1d(removed, added)
        return Delta(self.token, end, added, removed, more)

    def snapshot(self) -> Snapshot:
        """All that is held. O(capacity) when built, O(1) when given out again.

        Built anew when pages changed and the last one is older than SNAPSHOT_S, or when the
        journal no longer reaches back to it.
        """
        with self._building:
            # Before the store is asked: what changes from here on is in the journal after it.
            with self._lock:
                seq = self._seq
            last = self._snapshot
            if last is not None and (last.seq == seq or self._follows(last, seq)):
                return last
            held = _sorted_fingerprints(self._store.keys_here())
            held.flags.writeable = False
            self._snapshot = Snapshot(self.token, seq, held)
            self._built = self._clock.monotonic()
            return self._snapshot

    def check(self) -> None:
        """Assert the invariants. O(journal + snapshot)."""
        with self._lock:
            count = min(self._seq, len(self._keys))
            kept = [key for key in self._keys if key is not None]
            assert len(kept) == count, f"{len(kept)} entries kept, {count} made"
            assert all(len(key) == KEY_BYTES for key in kept), "a key has 32 bytes"
            last, seq = self._snapshot, self._seq
        if last is not None:
            assert last.token == self.token and last.seq <= seq, (last.seq, seq)
            assert bool((last.fingerprints[1:] > last.fingerprints[:-1]).all()), "not ascending"

    def _append(self, keys: Sequence[PageKey], came: int) -> None:
        with self._lock:
            ring, flags, size = self._keys, self._gained, len(self._keys)
            for seq, key in enumerate(keys, self._seq + 1):
                ring[seq % size] = key
                flags[seq % size] = came
            self._seq += len(keys)

    def _entries(
        self, token: int, since: int, limit: int
    ) -> tuple[dict[PageKey, int], int, bool] | None:
        """Last entry of each key in (since, end], and end, and whether there are more."""
        with self._lock:
            size, seq = len(self._keys), self._seq
            if token != self.token or not max(0, seq - size) <= since <= seq:
                return None
            end = min(seq, since + limit)
            first, stop = (since + 1) % size, (end + 1) % size
            if end == since:
                return {}, end, False
            if first < stop:
                keys, flags = self._keys[first:stop], self._gained[first:stop]
            else:
                keys = self._keys[first:] + self._keys[:stop]
                flags = self._gained[first:] + self._gained[:stop]
        found: dict[PageKey, int] = {}
        for key, came in zip(keys, flags, strict=True):
            assert key is not None, "an entry in range is kept"
            found[key] = came
        return found, end, end < seq

    def _follows(self, last: Snapshot, seq: int) -> bool:
        """Whether the journal leads from `last` to now with half of itself to spare."""
        young = self._clock.monotonic() - self._built < self._snapshot_s
        return young and seq - last.seq <= len(self._keys) // 2
