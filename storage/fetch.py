"""One request for pages under way, and the lease it turns into.

Owns the pins of one run of pages: from the moment a page is in host until the fetch is cancelled,
cut short, or taken (then the lease owns them). Does not know where pages come from or how they
move: storage.promotion starts reads and reports arrivals. Callers of the public half: engines.

    fetch state   take() gives                leaves by
    UNDER WAY     waits                       all of the run arrived, or the run was cut to what
                                              had arrived -> SETTLED
    SETTLED       the run, at once            take, cancel -> CLOSED
    CLOSED        asserts (cancel: nothing)   final

Invariants: arrived pages of the run are pinned, pages cut from it are not; the run only shrinks;
a fetch is done once and its callbacks run once, outside every lock. Lock order: the store's lock,
then the fetch's own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Protocol

from tierkv.storage.base import Fetch, Lease, MappedTier, PageLease
from tierkv.storage.clock import Clock
from tierkv.storage.types import PageKey, TierName


class PinnedPage:
    """One page of a run: where it was, and its host lease once it is there."""

    __slots__ = ("key", "lease", "tier")

    def __init__(self, key: PageKey, tier: TierName, lease: Lease | None) -> None:
        self.key = key
        self.tier = tier
        self.lease = lease


class FetchOwner(Protocol):
    """What a fetch needs from the one that started it. None of it is called with a lock held."""

    def detach(self, fetch: TieredFetch, late: bool) -> None:
        """Stop delivering to `fetch`. `late`: it still waited for pages when its time was up."""
        ...

    def unpin(self, pages: Sequence[PinnedPage]) -> None:
        """Release the host leases of these pages; those without one are skipped."""
        ...

    def sound(self, page: PinnedPage, verify: bool | None) -> bool:
        """Verify one pinned page where `verify`, or when it is None the store's rules, ask."""
        ...

    def handed_out(self, asked: int, pages: Sequence[PinnedPage], demand: bool) -> None:
        """Count what take() gave and what it could not give. `demand`: to a request of here."""
        ...


class TieredLease(PageLease):
    """A run of host pages, pinned and verified; see PageLease."""

    def __init__(self, owner: FetchOwner, host: MappedTier, pages: list[PinnedPage]) -> None:
        self._owner = owner
        self._pages = pages
        self.keys = [page.key for page in pages]
        self.tiers = [page.tier for page in pages]
        leases = [page.lease for page in pages if page.lease is not None]
        self.views = [host.view(lease, 0) for lease in leases]
        self.slots = [int(lease.slots[0]) for lease in leases]
        self.checksums = [lease.checksums[0] for lease in leases]
        assert len(self.views) == len(pages), "a page was handed out without a pin"

    def release(self) -> None:
        pages, self._pages = self._pages, []
        # The views may be evicted and overwritten from here on: nobody finds them in the lease.
        self.views = []
        self.slots = []
        if pages:
            self._owner.unpin(pages)


class TieredFetch(Fetch):
    """See Fetch. `deadline` is in seconds of `clock`; thread-safe."""

    def __init__(
        self,
        owner: FetchOwner,
        host: MappedTier,
        keys: Sequence[PageKey],
        deadline: float,
        clock: Clock,
        verify: bool | None = None,
        demand: bool = True,
    ) -> None:
        """`demand`: for a request of this node, not for the remote tier's own reading."""
        self.keys = list(keys)
        self.deadline = deadline
        self._demand = demand
        self._verify = verify
        self._owner = owner
        self._host = host
        self._clock = clock
        self._cond = threading.Condition()
        self._pages: list[PinnedPage] = []
        self._settled = False
        self._closed = False
        self._announced = False
        self._callbacks: Future[None] = Future()

    @property
    def done(self) -> bool:
        with self._cond:
            return self._settled or self._closed or self._clock.monotonic() >= self.deadline

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        # The library runs it at once when done, and logs what it raises: a careless callback must
        # not end the mover worker or the watch that happens to run it (lesson H2).
        self._callbacks.add_done_callback(lambda _: callback())

    def take(self, timeout_s: float) -> PageLease:
        started = self._clock.monotonic()
        with self._cond:
            assert not self._closed, "a fetch is taken or cancelled once"
            wait_s = min(timeout_s, self.deadline - started)
            self._cond.wait_for(lambda: self._settled, max(0.0, wait_s))
            # Taking nothing but what is there already (timeout 0) says nothing about the tier.
            late = not self._settled and (timeout_s > 0 or started >= self.deadline)
            pages, self._pages = self._pages, []
            self._closed = True
        self._owner.detach(self, late)
        arrived = _arrived_run(pages)
        good = _sound_run(self._owner, pages[:arrived], self._verify)
        self._owner.unpin(pages[good:])
        self._owner.handed_out(len(self.keys), pages[:good], self._demand)
        self._run_callbacks()
        return TieredLease(self._owner, self._host, pages[:good])

    def cancel(self) -> None:
        with self._cond:
            if self._closed:
                return
            pages, self._pages = self._pages, []
            self._closed = True
        self._owner.detach(self, late=False)
        self._owner.unpin(pages)
        self._run_callbacks()

    def begin(self, pages: list[PinnedPage]) -> None:
        """Set the run. By the owner, once, before any arrival can be reported."""
        with self._cond:
            self._pages = pages
            self._settle_if_complete()

    def arrived(self, index: int, lease: Lease) -> bool:
        """Take over the pin of the page at `index`; False when it is no longer wanted."""
        with self._cond:
            if index >= len(self._pages):
                return False
            assert self._pages[index].lease is None, "a page arrived twice"
            self._pages[index].lease = lease
            self._settle_if_complete()
            return True

    def cut(self, count: int) -> list[PinnedPage]:
        """Shorten the run to `count` pages; returns the pages cut off, the caller unpins them."""
        with self._cond:
            off = self._pages[count:]
            del self._pages[count:]
            self._settle_if_complete()
            return off

    def expire(self, late: bool = True) -> None:
        """Settle for what has arrived: the deadline passed (`late`), or the store closes."""
        with self._cond:
            if self._settled or self._closed:
                return
            arrived = _arrived_run(self._pages)
            off = self._pages[arrived:]
            del self._pages[arrived:]
            self._settled = True
            self._cond.notify_all()
        self._owner.detach(self, late)
        self._owner.unpin(off)
        self._run_callbacks()

    def announce(self) -> None:
        """Run the callbacks if the fetch is settled. By the owner, with no lock held."""
        with self._cond:
            settled = self._settled
        if settled:
            self._run_callbacks()

    def _settle_if_complete(self) -> None:
        if not self._closed and all(page.lease is not None for page in self._pages):
            self._settled = True
            self._cond.notify_all()

    def _run_callbacks(self) -> None:
        with self._cond:
            first, self._announced = not self._announced, True
        if first:
            self._callbacks.set_result(None)


def _arrived_run(pages: Sequence[PinnedPage]) -> int:
    """Length of the leading run of pages that are in host."""
    for index, page in enumerate(pages):
        if page.lease is None:
            return index
    return len(pages)


def _sound_run(owner: FetchOwner, pages: Sequence[PinnedPage], verify: bool | None) -> int:
    """Length of the leading run of pages that verify (lesson W6: the rest is a miss)."""
    for index, page in enumerate(pages):
        if not owner.sound(page, verify):
            return index
    return len(pages)
