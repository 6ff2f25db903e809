"""Copies pages from the compute device into the store: on eviction, or as soon as computed.

Owns the copies under way and what protects their pages: a run that left the tree is COPYING in
the pool, a run that stays in it is locked there. Decides what is worth a copy; where a page goes
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
    """Evicted without a copy: a lower tier had them already."""
    dropped: int
    """Not copied: no room below, too many copies under way, or not used often enough."""
    failed: int
    """Copied, but the copy or its commit failed."""
    in_flight: int


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
        self._policy = policy
        self._selective_hits = selective_hits
        self._in_flight_pages_max = in_flight_pages_max
        self._wake = wake
        self._under_way: deque[_Copy] = deque()
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

        Copies them now if the write policy says so, under a hold of its own. `keys` are those of
        the whole prefix.
        """
        page_count = hold.token_count // self._cache.page_tokens
        if self._policy is WritePolicy.WRITE_BACK or first_page >= page_count:
            return
        if not self._hot(hold.node.hit_count):
            return
        fresh = list(keys[first_page:page_count])
        missing = self._missing(fresh)
        if missing:
            pages = hold.pages[first_page:][missing]
            own = self._cache.lock(Match(hold.node, hold.token_count, page_count))
            first_token = first_page * self._cache.page_tokens
            self._start(pages, [fresh[i] for i in missing], first_token, own)

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
        """Wait for every copy under way, at most `timeout_s` each; True when none is left."""
        while self._under_way:
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
        )

    def check(self) -> None:
        """Assert that the budget is that of the copies under way."""
        assert self._in_flight == sum(len(copy.keys) for copy in self._under_way)

    def _hot(self, hit_count: int) -> bool:
        selective = self._policy is WritePolicy.WRITE_THROUGH_SELECTIVE
        return not selective or hit_count >= self._selective_hits

    def _missing(self, keys: Sequence[PageKey]) -> list[int]:
        """Indexes of keys that no lower tier holds."""
        tiers = self._store.lookup(keys)
        return [i for i, tier in enumerate(tiers) if tier is None]

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
