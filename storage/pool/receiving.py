"""Copies that members ask this node to make: their pages, read out of their arenas.

Owns the host slots of pages on their way here, for one store, until they are committed or given
back. Does not know messages or epochs: serving.py calls it with what a member offered and with
this node's own connection to that member. Thread-safe.

    page offered ── here already ────────────────────────────→ EXISTS      nothing is read
        └ slot reserved ── none free ────────────────────────→ FULL
            └ read ── did not come, late ────────────────────→ FAILED
                └ checksum compared ── wrong ────────────────→ CORRUPT
                    └ committed as POOL_OWNER ── no share ───→ FULL
                        └────────────────────────────────────→ COMMITTED

Invariants: a slot is given back only when no byte of it can be written any more: a read that
outlived its deadline keeps its slots until the transport says it is done, whoever waits no longer;
pages on their way take at most half of the arena; only bytes whose checksum was compared are
committed, each page for itself.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence

from tierkv.storage.base import StoreReservation
from tierkv.storage.checksum import copy_bytes
from tierkv.storage.clock import Clock
from tierkv.storage.errors import TierError
from tierkv.storage.pool.config import PoolConfig
from tierkv.storage.pool.messages import OfferedPage, StoreOutcome
from tierkv.storage.remote import POOL_OWNER, LocalStore
from tierkv.storage.transport.base import PageOutcome, PageRange, Peer, PeerRead
from tierkv.storage.types import CommitOutcome

GRACE_S = 1.0
"""A read is done at its deadline; past this much more, nobody waits for it here."""

log = logging.getLogger(__name__)

_KEPT = {
    CommitOutcome.COMMITTED: StoreOutcome.COMMITTED,
    CommitOutcome.EXISTS: StoreOutcome.EXISTS,
    # Host refuses a page only when its owner, the pool, has no room left.
    CommitOutcome.FAILED: StoreOutcome.FULL,
}


class Receiver:
    """See the module docstring."""

    def __init__(self, store: LocalStore, config: PoolConfig, clock: Clock) -> None:
        self._store = store
        self._clock = clock
        self._shares = config.host_share > 0
        self._transfer_s = config.transfer_s
        self._pages_max = max(1, arena_pages(store) // 2)
        self._batch_pages = min(config.batch_pages, self._pages_max)
        self._changed = threading.Condition()
        self._reserved = 0
        self._late = 0

    @property
    def late_pages(self) -> int:
        """Pages whose read outlived its deadline: their slots are still held."""
        return self._late

    def receive(
        self, peer: Peer, generation: int, pages: Sequence[OfferedPage], wait_s: float
    ) -> tuple[StoreOutcome, ...]:
        """Copy what a member offers in its memory `generation`, a few pages at a time.

        One outcome a page. Waits; what has not begun after `wait_s` is FAILED. O(bytes).
        """
        until = self._clock.monotonic() + wait_s
        here = self._store.lookup_here([page.key for page in pages])
        outcomes = [StoreOutcome.EXISTS if there else StoreOutcome.FULL for there in here]
        wanted = [index for index, there in enumerate(here) if not there and self._shares]
        reachable = True
        for start in range(0, len(wanted), self._batch_pages):
            batch = wanted[start : start + self._batch_pages]
            left = until - self._clock.monotonic()
            got = [StoreOutcome.FAILED] * len(batch)
            if reachable and left > 0:
                offered = [pages[index] for index in batch]
                got = self._receive_batch(peer, generation, offered, left)
                reachable = any(outcome is not StoreOutcome.FAILED for outcome in got)
            for index, outcome in zip(batch, got, strict=True):
                outcomes[index] = outcome
        return tuple(outcomes)

    def wait_quiet(self, timeout_s: float) -> bool:
        """Wait until no slot is held for a copy; False past the timeout."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._reserved, max(0.0, timeout_s))

    def check(self) -> None:
        """Assert the invariants. O(1)."""
        with self._changed:
            assert 0 <= self._late <= self._reserved <= self._pages_max, (
                self._late,
                self._reserved,
                self._pages_max,
            )

    def _receive_batch(
        self, peer: Peer, generation: int, pages: Sequence[OfferedPage], left_s: float
    ) -> list[StoreOutcome]:
        held, read = self._reserve(len(pages)), None
        count = len(held.views)
        try:
            if not count:
                return [StoreOutcome.FULL] * len(pages)
            timeout_s = min(left_s, self._transfer_s)
            ranges = [PageRange(page.offset, self._store.page_bytes) for page in pages[:count]]
            read = peer.read(generation, ranges, held.views, timeout_s)
            came = read.take(timeout_s + GRACE_S)
            got = self._commit(held, pages[:count], came)
            return got + [StoreOutcome.FULL] * (len(pages) - count)
        except TierError as error:
            log.warning("receive pages: peer=%s pages=%d error=%s", peer.address, count, error)
            return [StoreOutcome.FAILED] * len(pages)
        finally:
            self._give_back(held, count, read)

    def _commit(
        self, held: StoreReservation, pages: Sequence[OfferedPage], came: Sequence[PageOutcome]
    ) -> list[StoreOutcome]:
        """Commit the pages that came and are sound; one outcome a page."""
        outcomes = [StoreOutcome.FAILED] * len(pages)
        sound: list[int] = []
        for index, (page, outcome) in enumerate(zip(pages, came, strict=True)):
            if outcome is not PageOutcome.OK:
                continue
            if held.verify(index, page.checksum):
                sound.append(index)
            else:
                outcomes[index] = StoreOutcome.CORRUPT
        for place, index in enumerate(sound):
            # A reservation publishes its leading views: sound pages close the gaps of others.
            if place < index:
                copy_bytes(held.views[place], held.views[index])
        if sound:
            keys = [pages[index].key for index in sound]
            checksums = [pages[index].checksum for index in sound]
            committed = held.commit(keys, checksums, POOL_OWNER)
            for index, was in zip(sound, committed, strict=True):
                outcomes[index] = _KEPT[was]
        return outcomes

    def _reserve(self, count: int) -> StoreReservation:
        """Up to `count` slots, as many as there is room for; each is in `_reserved` from then."""
        with self._changed:
            room = max(0, min(count, self._pages_max - self._reserved))
            self._reserved += room
        taken = 0
        try:
            held = self._store.reserve(room, POOL_OWNER)
            taken = len(held.views)
            return held
        finally:
            if taken < room:
                self._ended(room - taken)

    def _give_back(self, held: StoreReservation, count: int, read: PeerRead | None) -> None:
        """Release what was not committed, once no byte of it moves any more."""
        if read is None or read.done:
            held.release()
            self._ended(count)
            return
        with self._changed:
            self._late += count
        log.warning("receive pages: pages=%d are held until their late read is done", count)
        read.add_done_callback(lambda: self._late_ended(held, count))

    def _late_ended(self, held: StoreReservation, count: int) -> None:
        held.release()
        self._ended(count, late=count)

    def _ended(self, count: int, late: int = 0) -> None:
        with self._changed:
            self._late -= late
            self._reserved -= count
            self._changed.notify_all()


def arena_pages(store: LocalStore) -> int:
    """How many pages the host arena of a store has slots for."""
    return store.host.stats().capacity_pages
