"""Brings a request's prefix back from the store: prefetch while it waits, copy when it is admitted.

Owns the fetches of waiting requests and the copies under way into the pool. Runs on the engine
thread. What is late, lost or corrupt is a miss: the request computes it.

    WAITING request   begin()    asks the store for the run after the GPU hit
                      ready()    False while that is under way and in time
    admission         start()    takes what has come; copies it into the request's fresh pages
    RESTORING         poll()     returns requests whose copies ended; their pages may be read
    any time          cancel()   frees what a waiting request holds
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tierkv.engine.cache.node import PageArray
from tierkv.engine.cache.prefix_cache import PrefixCache
from tierkv.engine.serve.request import CachedTokens, Request
from tierkv.storage.base import Fetch, PageLease, PageStore
from tierkv.storage.clock import Clock
from tierkv.storage.transfer.base import CopyEvent, PageTransfer
from tierkv.storage.types import TierName

log = logging.getLogger(__name__)

ATTEMPTS_MAX = 3
"""Times a waiting request may ask again because its GPU hit shrank in the meantime."""


@dataclass(frozen=True, slots=True)
class RestoreStats:
    """Counters since start."""

    fetches: int
    restored_pages: int
    late: int
    """Fetches that had not ended by their deadline; what had come was used."""
    failed: int
    """Copies into the pool that failed; the pages were computed instead."""
    waiting: int
    copying: int


@dataclass(slots=True)
class _Waiting:
    """A fetch of a request that is not admitted yet."""

    fetch: Fetch
    first_page: int
    deadline: float


@dataclass(slots=True)
class _Copying:
    """A scatter under way."""

    request: Request
    lease: PageLease
    pages: PageArray
    tiers: list[TierName]
    event: CopyEvent


class Restore:
    """Restores for one engine. Owned by the engine thread."""

    def __init__(
        self,
        cache: PrefixCache,
        store: PageStore,
        transfer: PageTransfer,
        clock: Clock,
        *,
        deadline_s: float,
        waiting_max: int,
        wake: Callable[[], None],
    ) -> None:
        self._cache = cache
        self._store = store
        self._transfer = transfer
        self._clock = clock
        self._deadline_s = deadline_s
        self._waiting_max = waiting_max
        self._wake = wake
        self._waiting: dict[int, _Waiting] = {}
        self._attempts: Counter[int] = Counter()
        self._copying: list[_Copying] = []
        self._fetches = 0
        self._restored_pages = 0
        self._late = 0
        self._failed = 0

    def begin(self, request: Request, gpu_pages: int) -> None:
        """Ask the store for the pages after the first `gpu_pages`; returns at once.

        Does nothing when the store has none, or when enough other requests are being fetched:
        the request then asks again from ready().
        """
        if request.request_id in self._waiting or len(self._waiting) >= self._waiting_max:
            return
        if self._attempts[request.request_id] >= ATTEMPTS_MAX:
            return
        wanted = request.page_keys[gpu_pages : request.restorable_pages(self._cache.page_tokens)]
        run = leading(self._store.lookup(wanted))
        if not run:
            return
        self._attempts[request.request_id] += 1
        fetch = self._store.fetch(wanted[:run], self._deadline_s)
        self._fetches += 1
        deadline = self._clock.monotonic() + self._deadline_s
        self._waiting[request.request_id] = _Waiting(fetch, gpu_pages, deadline)
        fetch.add_done_callback(self._wake)

    def ready(self, request: Request, gpu_pages: int) -> bool:
        """True when admission should not wait any longer for this request's fetch."""
        held = self._waiting.get(request.request_id)
        if held is not None and gpu_pages < held.first_page:
            # What the GPU held was evicted meanwhile, so the fetch begins too late: ask anew.
            self.cancel(request)
            held = None
        if held is None:
            self.begin(request, gpu_pages)
            held = self._waiting.get(request.request_id)
        if held is None or held.fetch.done:
            return True
        return self._clock.monotonic() >= held.deadline

    def deadline(self) -> float | None:
        """When the next fetch under way is given up, on the monotonic clock."""
        pending = [w.deadline for w in self._waiting.values() if not w.fetch.done]
        return min(pending, default=None)

    def start(self, request: Request, gpu_pages: int, pages: PageArray) -> int:
        """Copy what has come into `pages`, which follow the request's `gpu_pages` hit.

        Returns how many pages are being restored; they are COPYING until poll() returns the
        request. 0: nothing to wait for. Ends the request's fetch either way.
        """
        held = self._waiting.pop(request.request_id, None)
        self._attempts.pop(request.request_id, None)
        if held is None:
            return 0
        if not held.fetch.done:
            self._late += 1
        lease = held.fetch.take(timeout_s=0.0)
        skip = gpu_pages - held.first_page
        count = min(len(lease.views) - skip, len(pages)) if skip >= 0 else 0
        if count <= 0:
            lease.release()
            return 0
        target = pages[:count]
        self._cache.pool.begin_copy(target)
        event = self._transfer.scatter(lease.views[skip : skip + count], target.tolist())
        tiers = lease.tiers[skip : skip + count]
        self._copying.append(_Copying(request, lease, target, tiers, event))
        event.add_done_callback(lambda _: self._wake())
        return count

    def poll(self) -> list[Request]:
        """Requests whose copies ended. `computed` and `cached` of each are brought up to date."""
        ended = [copy for copy in self._copying if copy.event.done]
        self._copying = [copy for copy in self._copying if not copy.event.done]
        for copy in ended:
            copy.lease.release()
            self._cache.pool.finish_copy(copy.pages, free=False)
            if copy.event.error is not None:
                log.warning("restore failed pages=%d error=%s", len(copy.pages), copy.event.error)
                self._failed += 1
                continue
            self._restored_pages += len(copy.pages)
            copy.request.computed += len(copy.pages) * self._cache.page_tokens
            if copy.request.retractions == 0:
                copy.request.cached = self._add(copy.request.cached, copy.tiers)
        return [copy.request for copy in ended]

    def cancel(self, request: Request) -> None:
        """Give up the fetch of a waiting request, if it has one."""
        held = self._waiting.pop(request.request_id, None)
        if held is not None:
            held.fetch.cancel()

    def forget(self, request: Request) -> None:
        """The request has ended: cancel, and forget how often it asked."""
        self.cancel(request)
        self._attempts.pop(request.request_id, None)

    def close(self, timeout_s: float) -> list[Request]:
        """Cancel all fetches and wait for the copies under way, at most `timeout_s` each.

        Returns what poll() would.
        """
        for held in self._waiting.values():
            held.fetch.cancel()
        self._waiting.clear()
        for copy in self._copying:
            copy.event.wait(timeout_s)
        return self.poll()

    def stats(self) -> RestoreStats:
        """Counters now."""
        return RestoreStats(
            fetches=self._fetches,
            restored_pages=self._restored_pages,
            late=self._late,
            failed=self._failed,
            waiting=len(self._waiting),
            copying=len(self._copying),
        )

    def _add(self, cached: CachedTokens, tiers: Sequence[TierName]) -> CachedTokens:
        tokens = Counter(tiers)
        page = self._cache.page_tokens
        return CachedTokens(
            gpu=cached.gpu,
            host=cached.host + tokens[TierName.HOST] * page,
            nvme=cached.nvme + tokens[TierName.NVME] * page,
            remote=cached.remote + tokens[TierName.REMOTE] * page,
        )


def leading(tiers: Sequence[TierName | None]) -> int:
    """Length of the leading run that some tier holds."""
    return next((i for i, tier in enumerate(tiers) if tier is None), len(tiers))
