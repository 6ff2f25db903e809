"""Copies pages from the compute device into the store: on eviction, or as soon as computed.

Owns the copies under way and what protects their pages: a run that left the tree is COPYING in
the pool, a run that stays in it is locked there. Evicted pages leave at once, since somebody needs
their room; computed ones wait in a bounded queue for start_pending(), which is told how many
pages decoding bears. Decides what is worth a copy; where a page goes
below host memory is the store's business. Runs on the engine thread, except for `_commit`, which
runs where a copy ends. Stores are dropped, never waited for ("Data-path rules").
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tierkv.engine.cache.node import Evicted, Match, NodeRef, PageArray, TierSet
from tierkv.engine.cache.page_pool import PagesInCopy
from tierkv.engine.cache.prefix_cache import NO_PAGES, PrefixCache
from tierkv.storage.base import PageStore, StoreReservation
from tierkv.storage.errors import TierError
from tierkv.storage.policy import WritePolicy
from tierkv.storage.transfer.base import CopyEvent, PageTransfer
from tierkv.storage.types import KEY_BYTES, CommitOutcome, PageKey

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class OffloadStats:
    """Counters since start, in pages."""

    copied: int
    """Committed to the store."""
    present: int
    """Evicted without a copy: a lower tier of this node had them already."""
    dropped: int
    """Not copied: no room below, too many copies under way, or not used often enough."""
    failed: int
    """Copied, but the copy or its commit failed."""
    in_flight: int
    pending: int = 0
    """Computed pages that wait to be copied."""
    put_off: int = 0
    """Of those, given up for room or for newer ones; they are copied when they are evicted."""


@dataclass(slots=True)
class _Pending:
    """A computed run that is to be copied while it stays in the tree."""

    hold: NodeRef
    keys: list[PageKey]
    pages: PageArray
    first_token: int
    started: int = 0
    """Pages of it that were copied or dropped."""

    @property
    def left(self) -> int:
        return len(self.keys) - self.started


@dataclass(slots=True)
class _Copy:
    """One gather under way."""

    keys: list[PageKey]
    reservation: StoreReservation
    pages: PagesInCopy
    """Evicted pages, which only this copy can free; or pages of the tree that it only reads."""
    hold: NodeRef | None
    """Lock on the prefix when the pages stay in the tree."""
    first_token: int
    """Tokens before the first page that this copy and the store cover."""
    ended: threading.Event = field(default_factory=threading.Event)
    committed: int = 0


class Offload:
    """Demotion out of one engine's pool. Owned by the engine thread."""

    def __init__(
        self,
        cache: PrefixCache,
        store: PageStore,
        transfer: PageTransfer,
        policy: WritePolicy,
        *,
        selective_hits: int,
        in_flight_pages_max: int,
        wake: Callable[[], None],
    ) -> None:
        self._cache = cache
        self._store = store
        self._transfer = transfer
        self.policy = policy
        """Changed between measurements only."""
        self._selective_hits = selective_hits
        self._in_flight_pages_max = in_flight_pages_max
        self._wake = wake
        self._under_way: deque[_Copy] = deque()
        self._pending: deque[_Pending] = deque()
        self._pending_pages = 0
        self._queued: set[PageKey] = set()
        """Keys of pending pages, so that none is queued twice."""
        self._put_off = 0
        self._in_flight = 0
        self._copied = 0
        self._present = 0
        self._dropped = 0
        self._failed = 0

    def evicted(self, run: Evicted) -> PageArray:
        """OnEvict hook of the prefix cache: copy what no lower tier holds.

        Returns the pages taken into a copy; they come back to the pool when it ends.
        """
        if run.page_keys is None:
            return NO_PAGES
        pages, keys = run.pages, split_keys(run.page_keys)
        missing = self._missing(keys)
        self._present += len(keys) - len(missing)
        if not missing:
            return NO_PAGES
        if not self._hot(run.hit_count):
            self._dropped += len(missing)
            return NO_PAGES
        taken = pages[missing]
        count = self._start(taken, [keys[i] for i in missing], run.prefix_tokens, hold=None)
        return taken[:count]

    def published(self, hold: NodeRef, keys: Sequence[PageKey], first_page: int) -> None:
        """Pages from `first_page` to the end of `hold` are in the tree with their KV computed.

        Queues a copy of them if the write policy says so, under a hold of its own. `keys` are
        those of the whole prefix. The oldest runs make room in a full queue.
        """
        page_count = hold.token_count // self._cache.page_tokens
        if self.policy is WritePolicy.WRITE_BACK or first_page >= page_count:
            return
        if not self._hot(hold.node.hit_count):
            return
        fresh = list(keys[first_page:page_count])
        missing = [i for i in self._missing(fresh) if fresh[i] not in self._queued]
        if not missing:
            return
        pages = hold.pages[first_page:][missing]
        first_token = first_page * self._cache.page_tokens
        wanted = [fresh[i] for i in missing]
        self._pending.append(_Pending(self._lock_again(hold), wanted, pages, first_token))
        self._pending_pages += len(wanted)
        self._queued.update(wanted)
        while self._pending_pages > self._in_flight_pages_max and len(self._pending) > 1:
            self._put_off += self._forget(self._pending.popleft())

    def start_pending(self, pages_max: int | None) -> int:
        """Start copying at most so many of the pages that wait; return how many.

        None: as many as may be in flight.
        """
        room = max(0, self._in_flight_pages_max - self._in_flight)
        left = room if pages_max is None else min(room, pages_max)
        begun = 0
        while left > 0 and self._pending:
            run = self._pending[0]
            part = slice(run.started, run.started + left)
            keys = run.keys[part]
            # Only a copy of the whole run says of the node that all of it is below.
            first = run.first_token if len(keys) == len(run.keys) else run.hold.token_count
            begun += self._start(run.pages[part], keys, first, self._lock_again(run.hold))
            run.started += len(keys)
            self._pending_pages -= len(keys)
            self._queued.difference_update(keys)
            left -= len(keys)
            if run.left == 0:
                self._forget(self._pending.popleft())
        return begun

    def put_off_pending(self) -> bool:
        """Let go of the runs that wait, because their room is needed; True when any did."""
        any_did = bool(self._pending)
        while self._pending:
            self._put_off += self._forget(self._pending.popleft())
        return any_did

    def poll(self) -> int:
        """Take note of copies that ended; return how many. Called once a step."""
        ended = 0
        while self._under_way and self._under_way[0].ended.is_set():
            self._end(self._under_way.popleft())
            ended += 1
        return ended

    def wait_for_one(self, timeout_s: float) -> bool:
        """Wait for the oldest copy, at most `timeout_s`; True when one ended."""
        if self._under_way:
            self._under_way[0].ended.wait(timeout_s)
        return self.poll() > 0

    def drain(self, timeout_s: float) -> bool:
        """Start what waits and wait for every copy, at most `timeout_s` each; True when none is
        left."""
        while self._pending or self._under_way:
            self.start_pending(None)
            if not self._under_way:
                continue
            if not self.wait_for_one(timeout_s):
                return False
        return True

    def stats(self) -> OffloadStats:
        """Counters now."""
        return OffloadStats(
            copied=self._copied,
            present=self._present,
            dropped=self._dropped,
            failed=self._failed,
            in_flight=self._in_flight,
            pending=self._pending_pages,
            put_off=self._put_off,
        )

    @property
    def copying(self) -> bool:
        """True while a copy is under way."""
        return bool(self._under_way)

    def check(self) -> None:
        """Assert that the budgets are those of the copies under way and of the runs that wait."""
        assert self._pending_pages == sum(run.left for run in self._pending)
        assert len(self._queued) == self._pending_pages
        assert self._in_flight == sum(len(copy.keys) for copy in self._under_way)

    def _hot(self, hit_count: int) -> bool:
        selective = self.policy is WritePolicy.WRITE_THROUGH_SELECTIVE
        return not selective or hit_count >= self._selective_hits

    def _missing(self, keys: Sequence[PageKey]) -> list[int]:
        """Indexes of keys that no lower tier of this node holds.

        What only others hold is copied all the same: they may be gone when it is wanted.
        """
        return [i for i, here in enumerate(self._store.lookup_here(keys)) if not here]

    def _lock_again(self, hold: NodeRef) -> NodeRef:
        size = self._cache.page_tokens
        return self._cache.lock(Match(hold.node, hold.token_count, hold.token_count // size))

    def _forget(self, run: _Pending) -> int:
        """End a run that waited; returns the pages of it that were not started."""
        self._cache.unlock(run.hold)
        self._pending_pages -= run.left
        self._queued.difference_update(run.keys[run.started :])
        return run.left

    def _start(
        self, pages: PageArray, keys: list[PageKey], first_token: int, hold: NodeRef | None
    ) -> int:
        """Start copying the first pages there is room for; return how many. Takes `hold`."""
        room = self._in_flight_pages_max - self._in_flight
        reservation = self._store.reserve(min(len(keys), room)) if room > 0 else None
        count = len(reservation.views) if reservation else 0
        self._dropped += len(keys) - count
        if reservation is None or count == 0:
            if hold is not None:
                self._cache.unlock(hold)
            return 0
        pool = self._cache.pool
        begin = pool.begin_copy if hold is None else pool.begin_read
        copy = _Copy(keys[:count], reservation, begin(pages[:count]), hold, first_token)
        self._under_way.append(copy)
        self._in_flight += count
        event = self._transfer.gather(copy.pages, reservation.views)
        event.add_done_callback(lambda done: self._commit(copy, done))
        return count

    def _commit(self, copy: _Copy, event: CopyEvent) -> None:
        """Publish the bytes. On the transfer's thread; touches nothing of the engine's."""
        try:
            if event.error is not None:
                log.warning("demote failed pages=%d error=%s", len(copy.keys), event.error)
                copy.reservation.release()
            else:
                outcomes = copy.reservation.commit(copy.keys)
                copy.committed = sum(each is not CommitOutcome.FAILED for each in outcomes)
        except TierError as error:
            log.warning("demote failed pages=%d error=%s", len(copy.keys), error)
        finally:
            copy.ended.set()
            self._wake()

    def _end(self, copy: _Copy) -> None:
        self._in_flight -= len(copy.keys)
        self._copied += copy.committed
        self._failed += len(copy.keys) - copy.committed
        self._cache.pool.finish_copy(copy.pages, free=copy.hold is None)
        if copy.hold is not None:
            node = copy.hold.node
            if copy.committed == len(copy.keys) and node.start >= copy.first_token:
                self._cache.tree.set_tiers(node, node.tiers | TierSet.HOST)
            self._cache.unlock(copy.hold)


def split_keys(packed: bytes) -> list[PageKey]:
    """Page keys from their concatenation, KEY_BYTES each."""
    return [PageKey(packed[i : i + KEY_BYTES]) for i in range(0, len(packed), KEY_BYTES)]
