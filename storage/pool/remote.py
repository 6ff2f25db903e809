"""PoolRemote: the pool of nodes as the remote tier of one store.

Owns what belongs to one page size: the registered arena, the journal of what is here, the queue of
pulls with a puller a peer, and the copies. Knows who may be asked from the pool's links and, by
their indexes, who holds what; the bytes are moved by puller.py and pusher.py. Called by the store
(Remote), by the pool when members change, and by the workers (Routes).

    a pull                      goes
    some askable peer has it    to the one that is expected to answer first; what is queued counts
    nobody is known to          to the first in rank order, which then says what is true
    its peer has it no more     to another known holder that was not asked yet; else it ends
    its peer failed it          the same, and then by rank order: copies are younger than indexes

    what its peers said         ends as
    wrong bytes, once or more   CORRUPT
    a failure, once or more     FAILED
    not there, all of them      MISSED

Invariants: whatever is called with the store's lock held waits for nothing; with no askable peer
holds() computes nothing; no memory of the store is reachable from outside once close() is True.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from typing import Protocol

from tierkv.storage.bandwidth import TransferMeter
from tierkv.storage.base import TierStats
from tierkv.storage.clock import Clock
from tierkv.storage.errors import TierIOError
from tierkv.storage.pool.config import PoolConfig
from tierkv.storage.pool.copies import Copies
from tierkv.storage.pool.holdings import Holdings, fingerprints
from tierkv.storage.pool.link import Link, LinkState
from tierkv.storage.pool.pins import Pins
from tierkv.storage.pool.placement import rank
from tierkv.storage.pool.puller import Puller
from tierkv.storage.pool.pusher import CopyEnd, Pusher
from tierkv.storage.pool.rebalance import Rebalancer
from tierkv.storage.pool.receiving import arena_pages
from tierkv.storage.pool.serving import Served
from tierkv.storage.pulls import PullQueue
from tierkv.storage.quota import Quota
from tierkv.storage.remote import (
    POOL_OWNER,
    LocalStore,
    Pull,
    PullState,
    Remote,
    RemoteStats,
)
from tierkv.storage.transport.base import Transport
from tierkv.storage.types import PageKey, TierName

log = logging.getLogger(__name__)

ASKED_MAX = 4
"""Peers that are asked for one page, those aside that are known to have it."""

_WORST = (PullState.CORRUPT, PullState.FAILED, PullState.MISSED)


class Surroundings(Protocol):
    """What a store's end of the pool needs of the whole. Implemented by pool.py."""

    own_name: str
    transport: Transport

    def links(self) -> Sequence[Link]:
        """One a member, live or not. O(1)."""
        ...

    def serve(self, served: Served, remote: PoolRemote) -> None:
        """Answer members about this page size from now on. ConfigError when it is served."""
        ...

    def unserve(self, page_bytes: int, timeout_s: float) -> bool:
        """Serve it no more; False while something of its store is still held."""
        ...

    def problem(self) -> str | None:
        """Why nobody can be asked now; None when somebody can."""
        ...


class PoolRemote(Remote):
    """See Remote and the module docstring. Made by Pool.attach()."""

    lookup_waits = False

    def __init__(
        self, page_bytes: int, surroundings: Surroundings, config: PoolConfig, clock: Clock
    ) -> None:
        self.page_bytes = page_bytes
        self._around = surroundings
        self._config = config
        self._clock = clock
        self._lock = threading.Lock()
        self._pullers: dict[Link, Puller] = {}
        self._trails: dict[Pull, list[tuple[Link, PullState]]] = {}
        """Where a pull was asked for in vain, once it was."""
        self._closing = False
        self._bound = False
        self.generation = 0

    def bind(self, store: LocalStore, reads: TransferMeter, writes: TransferMeter) -> None:
        assert not self._bound, "a remote belongs to one store"
        assert store.page_bytes == self.page_bytes, (store.page_bytes, self.page_bytes)
        store.set_quota(POOL_OWNER, _share(store, self._config))
        self._store, self._reads = store, reads
        self.generation = self._around.transport.register(store.arena_memory())
        self._holdings = Holdings(store, clock=self._clock)
        self._queue = PullQueue(store.host, self._clock, self._config.pull_pages)
        # Half of the arena may be leased to members; so copies get a quarter.
        pins = Pins(max(1, arena_pages(store) // 4))
        self._pins = pins
        self._copies = Copies(
            store,
            self._around,
            lambda link, done: Pusher(
                link, store, self.generation, writes, done, self._config, self._clock, pins
            ),
            self._config,
            self._clock,
        )
        self._balance = Rebalancer(
            store, self._copies, self._around.own_name, self._config, self._clock
        )
        served = Served(self.page_bytes, store, self.generation, self._holdings)
        try:
            self._around.serve(served, self)
        except BaseException:
            self._around.transport.unregister(self.generation)
            raise
        self._bound = True

    # --- with the store's lock held -------------------------------------------------------

    def holds(self, keys: Sequence[PageKey]) -> list[bool]:
        links = self._askable()
        if not links or not keys:
            return [False] * len(keys)
        prints = fingerprints(keys)
        found = links[0].holds(self.page_bytes, prints)
        for link in links[1:]:
            if found.all():
                break
            found |= link.holds(self.page_bytes, prints)
        held: list[bool] = found.tolist()
        return held

    def submit(self, pulls: Sequence[Pull]) -> int:
        links = self._askable()
        if not links:
            return 0
        # One answer for all pulls of a request: O(pages * peers).
        prints = fingerprints([pull.key for pull in pulls])
        held = [link.holds(self.page_bytes, prints).tolist() for link in links]
        page_s = [link.expected_s(self.page_bytes) for link in links]
        waiting = [self._queue.queued_in(link.lane) for link in links]
        placed: list[tuple[str, Pull]] = []
        for number, pull in enumerate(pulls):
            holders = [row for row in range(len(links)) if held[row][number]]
            if holders:
                row = min(holders, key=lambda row: (waiting[row] + 1) * page_s[row])
            else:
                row = self._first_in_rank(pull.key, links)
            waiting[row] += 1
            placed.append((links[row].lane, pull))
        accepted = self._queue.submit(placed)
        used = {lane for lane, _ in placed[:accepted]}
        for link in links:
            if link.lane in used:
                self._puller(link)
        return accepted

    def cancel(self, pull: Pull) -> bool:
        return self._queue.cancel(pull)

    def offer(self, keys: Sequence[PageKey], uses: Sequence[int], owner: int) -> None:
        self._copies.offer(keys, uses, owner)

    def gained(self, keys: Sequence[PageKey]) -> None:
        self._holdings.gained(keys)

    def lost(self, keys: Sequence[PageKey]) -> None:
        self._holdings.lost(keys)

    # --- for pullers: Routes --------------------------------------------------------------

    def again(self, pull: Pull, link: Link, why: PullState) -> None:
        """See Routes. By the worker that has the pull; it is not the worker's any more after."""
        trail = self._trails.get(pull)
        if trail is None:
            trail = self._trails[pull] = []
            pull.future.add_done_callback(lambda future: self._trails.pop(future.result(), None))
        trail.append((link, why))
        if pull.deadline > self._clock.monotonic():
            following = self._next_holder(pull, trail)
            if following is not None:
                self._queue.move(pull, following.lane)
                self._puller(following)
                return
        reasons = [reason for _, reason in trail]
        self._queue.end(pull, next(state for state in _WORST if state in reasons))

    def elsewhere(self, pulls: Sequence[Pull], link: Link) -> bool:
        """See Routes."""
        others = [other for other in self._askable() if other is not link]
        if not others:
            return False
        prints = fingerprints([pull.key for pull in pulls])
        return any(other.holds(self.page_bytes, prints).any() for other in others)

    def avoid(self, link: Link) -> None:
        """See Routes."""
        for pull in self._queue.empty_lane(link.lane):
            self.again(pull, link, PullState.FAILED)

    # --- for the pool ---------------------------------------------------------------------

    @property
    def rebalanced(self) -> int:
        """Copies that were queued for balance."""
        return self._balance.queued

    @property
    def balance_passes(self) -> int:
        """Times that all pages were looked at for balance."""
        return self._balance.passes

    @property
    def late_reads(self) -> int:
        """Reads that outlived their deadline; their pulls hold slots until they end."""
        with self._lock:
            return sum(puller.late_reads for puller in self._pullers.values())

    @property
    def quarantined(self) -> int:
        """Batches of pages that are held for peers that did not answer."""
        return self._copies.quarantined

    def link_changed(self, link: Link, *, members: bool) -> None:
        """A member may be asked or not any more, takes copies or not. `members`: it came, fell
        silent, is leaving or has begun a new life. Does not wait."""
        if not link.askable:
            self.avoid(link)
        if not link.takes_copies:
            self._copies.abandon(link)
        if members:
            self._balance.members_changed()

    def link_closed(self, link: Link) -> None:
        """A member belongs to the pool no more, and its link is closed. Waits, bounded."""
        with self._lock:
            puller = self._pullers.pop(link, None)
        if puller is not None:
            puller.close()
        self.avoid(link)
        self._copies.forget(link)
        self._balance.members_changed()

    def drain(self, timeout_s: float) -> bool:
        """Have what is in host and nowhere else copied to others; see Rebalancer.drain()."""
        return self._balance.drain(timeout_s)

    # --- as a whole -----------------------------------------------------------------------

    def ask(self, keys: Sequence[PageKey], timeout_s: float) -> None:
        """Nothing to ask: members tell what they hold with every heartbeat."""

    def flush(self, timeout_s: float) -> bool:
        return self._copies.flush(timeout_s)

    def wait_quiet(self, timeout_s: float) -> bool:
        deadline = self._clock.monotonic() + timeout_s
        if not self._copies.wait_quiet(timeout_s):
            return False
        return self._queue.wait_quiet(deadline - self._clock.monotonic())

    @property
    def quiet(self) -> bool:
        return self._queue.quiet

    def stats(self) -> RemoteStats:
        ended = self._queue.ended
        copies = self._copies
        indexes = [link.index(self.page_bytes) for link in self._askable()]
        with self._lock:
            restarts = sum(puller.restarts for puller in self._pullers.values())
        return RemoteStats(
            queued=self._queue.queued,
            running=self._queue.running,
            landed=ended(PullState.LANDED),
            missed=ended(PullState.MISSED),
            corrupt=ended(PullState.CORRUPT),
            failed=ended(PullState.FAILED),
            cancelled=ended(PullState.CANCELLED),
            refused=self._queue.refused,
            pushes_queued=copies.queued,
            pushed=copies.ended(CopyEnd.MADE),
            push_duplicates=copies.ended(CopyEnd.THERE),
            push_dropped=copies.dropped,
            push_failed=copies.ended(CopyEnd.REFUSED) + copies.ended(CopyEnd.GONE),
            worker_restarts=(
                restarts + copies.restarts + self._balance.restarts + self._queue.restarts
            ),
            known_pages=sum(index.known for index in indexes if index is not None),
            degraded=self._around.problem(),
        )

    def check(self) -> None:
        self._queue.check()
        self._holdings.check()
        self._copies.check()
        self._pins.check()
        with self._lock:
            pullers = list(self._pullers.values())
        for puller in pullers:
            puller.check()
        assert len(self._trails) <= self._config.pull_pages, "trails of pulls that have ended"

    def close(self, timeout_s: float) -> bool:
        self._closing = True
        if not self._bound:
            return True
        deadline = self._clock.monotonic() + timeout_s

        def left_s() -> float:
            return max(0.0, deadline - self._clock.monotonic())

        ended = self._balance.close(left_s())
        ended &= self._queue.close(left_s())
        try:
            # From here on no peer reads this arena, so that none of its leases matters any more.
            self._around.transport.unregister(self.generation)
        except TierIOError as error:
            log.error("close pool: page_bytes=%d error=%s", self.page_bytes, error)
            return False
        ended &= self._copies.close(left_s())
        self._copies.free_all()
        ended &= self._around.unserve(self.page_bytes, left_s())
        with self._lock:
            pullers = list(self._pullers.values())
        for puller in pullers:
            ended &= puller.close(left_s())
        return ended

    # --- inside ---------------------------------------------------------------------------

    def _askable(self) -> list[Link]:
        if self._closing:
            return []
        return [link for link in self._around.links() if link.askable]

    def _first_in_rank(self, key: PageKey, links: Sequence[Link]) -> int:
        names = [link.name or link.lane for link in links]
        return names.index(rank(key, names)[0])

    def _next_holder(self, pull: Pull, trail: Sequence[tuple[Link, PullState]]) -> Link | None:
        """Whom to ask after the peers of `trail`; None: nobody."""
        asked = {tried for tried, _ in trail}
        links = [other for other in self._askable() if other not in asked]
        prints = fingerprints([pull.key])
        holders = [other for other in links if other.holds(self.page_bytes, prints)[0]]
        if holders:
            return min(holders, key=self._wait_s)
        failed = any(why is not PullState.MISSED for _, why in trail)
        if links and failed and len(asked) < ASKED_MAX:
            # Somebody had it; a copy may be younger than what was heard of its holder.
            return links[self._first_in_rank(pull.key, links)]
        return None

    def _wait_s(self, link: Link) -> float:
        return (self._queue.queued_in(link.lane) + 1) * link.expected_s(self.page_bytes)

    def _puller(self, link: Link) -> None:
        """See to it that somebody takes the pulls of this peer."""
        with self._lock:
            puller = self._pullers.get(link)
            if puller is None and not self._closing and link.state is not LinkState.CLOSED:
                puller = self._pullers[link] = Puller(
                    link,
                    self._queue,
                    self.page_bytes,
                    self._reads,
                    self,
                    self._config,
                    self._clock,
                )
        if puller is not None:
            puller.ensure()


def _share(store: LocalStore, config: PoolConfig) -> Quota:
    """What pages of others may take of this store."""
    shares = {TierName.HOST: config.host_share, TierName.NVME: config.nvme_share}
    tiers: Sequence[TierStats] = store.stats().tiers
    return Quota(
        ceiling_bytes={
            tier.name: int(shares[tier.name] * tier.capacity_pages) * tier.slot_bytes
            for tier in tiers
            if tier.name in shares
        }
    )
