"""Decides which requests compute which tokens next, and owns their pages while they do.

Holds the waiting and the running requests. Knows no tensors: it hands out `Work` and is told the
tokens that came of it. Called from the engine thread only. A pool that runs out never becomes a
client's error: running requests are retracted, youngest first, and begin again later from what
they left in the cache.

A request's pages (Request.table), and who may free them:

    [0, shared_pages)      the tree; Request.hold protects them
    [shared_pages, end)    the request, until published or finished; COPYING while a load writes
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from tierkv.engine.cache.node import Match, PageArray
from tierkv.engine.cache.page_table import PageTable
from tierkv.engine.cache.prefix_cache import NO_PAGES, PrefixCache
from tierkv.engine.serve.offload import Offload
from tierkv.engine.serve.request import CachedTokens, FinishReason, Request, RequestState
from tierkv.engine.serve.restore import Restore
from tierkv.storage.clock import Clock
from tierkv.storage.types import PageKey

log = logging.getLogger(__name__)

COPY_WAIT_S = 1.0
"""Longest wait for a demotion to give its pages back before a request is retracted instead."""


class SchedulePolicy(StrEnum):
    """Order in which waiting requests are admitted, within one priority."""

    FCFS = "fcfs"
    """First come, first served."""
    LPM = "lpm"
    """Longest prefix match first: what the cache holds is used before it is evicted."""


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """Bounds of one engine."""

    batch_tokens_max: int
    """New tokens of one forward pass."""
    running_max: int
    watermark_pages: int
    """Pages kept back at admission, so that running requests can grow."""
    starvation_s: float = 5.0
    """A request that waited longer goes ahead of any prefix match."""


@dataclass(frozen=True, slots=True)
class Work:
    """Tokens [start, end) of one request in the next forward pass."""

    request: Request
    start: int
    end: int
    layered: bool = False
    """The pages from the request's front to `start` are still being copied: the pass waits for
    them layer by layer, and settle() follows it."""

    @property
    def wants_token(self) -> bool:
        """True when the pass reaches the last known token, whose logits choose the next."""
        return self.end == self.request.token_count


class Scheduler:
    """Queues of one engine and the pages of the requests in them."""

    def __init__(
        self,
        cache: PrefixCache,
        limits: SchedulerLimits,
        policy: SchedulePolicy,
        clock: Clock,
        restore: Restore | None,
        offload: Offload | None,
    ) -> None:
        self._cache = cache
        self._limits = limits
        self._policy = policy
        self._clock = clock
        self._restore = restore
        self._offload = offload
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.retractions = 0

    @property
    def page_tokens(self) -> int:
        return self._cache.page_tokens

    # --- queue ---------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queue a new request and start fetching what lower tiers hold of it."""
        assert request.state is RequestState.QUEUED
        request.extend_keys(self.page_tokens)
        self.waiting.append(request)
        if self._restore is not None:
            self._restore.begin(request, self._match(request).page_count)

    def admit(self) -> None:
        """Move waiting requests to running while there is room, in policy order."""
        if self._restore is not None:
            for request in [r for r in self.running if self._restore.stuck(r)]:
                self._retract(request)
        if not self.waiting:
            return
        produced = self._keys_being_produced()
        for request in self._ordered():
            if len(self.running) >= self._limits.running_max:
                break
            match = self._match(request)
            if self._worth_waiting_for(request, match, produced):
                continue
            if not self._admit_one(request):
                break
            produced.update(request.page_keys[match.page_count :])

    def _ordered(self) -> list[Request]:
        now = self._clock.monotonic()

        def rank(request: Request) -> tuple[float, ...]:
            starved = now - request.arrival_s > self._limits.starvation_s
            hit = 0
            if self._policy is SchedulePolicy.LPM and not starved:
                hit = self._match(request).token_count
            # A retracted request was promised room once: it goes before its peers.
            return (-request.priority, -request.retractions, not starved, -hit, request.arrival_s)

        return sorted(self.waiting, key=rank)

    def _match(self, request: Request) -> Match:
        usable = request.restorable_pages(self.page_tokens) * self.page_tokens
        return self._cache.match(request.packed_prefix(usable), request.namespace)

    def _keys_being_produced(self) -> Counter[PageKey]:
        """Keys of pages that a running request is computing or restoring now."""
        produced: Counter[PageKey] = Counter()
        for request in self.running:
            if request.state is RequestState.PREFILL:
                produced.update(request.page_keys[request.shared_pages :])
        return produced

    def _worth_waiting_for(
        self, request: Request, match: Match, produced: Counter[PageKey]
    ) -> bool:
        """True when most of what the request misses is about to appear in the tree anyway."""
        missing = request.page_keys[match.page_count : request.restorable_pages(self.page_tokens)]
        shared = next((i for i, key in enumerate(missing) if not produced[key]), len(missing))
        return shared > 0 and 2 * shared >= len(missing)

    def _admit_one(self, request: Request) -> bool:
        """Give the request its pages; False when there is no room now."""
        total = -(-(request.token_count + 1) // self.page_tokens)
        # From here on the hold counts, not the match: what was matched beyond its end is not
        # protected and may be evicted by the allocation.
        hold = self._cache.lock(self._match(request))
        self._cache.touch(hold)
        table = PageTable(self.page_tokens, hold.pages)
        hit_pages = len(table)
        reserve = self._limits.watermark_pages if self.running else 0
        pages = None
        if self._has_room(total - hit_pages + reserve):
            pages = self._allocate(total - hit_pages, table.last_page)
        if pages is None:
            self._cache.unlock(hold)
            return False
        self.waiting.remove(request)
        self.running.append(request)
        request.hold = hold
        request.shared_pages = hit_pages
        request.table = table
        table.append(pages)
        request.computed = hold.token_count
        if request.admitted_s is None:
            request.admitted_s = self._clock.monotonic()
            request.cached = CachedTokens(gpu=hold.token_count)
        if self._offload is not None and hit_pages:
            self._offload.published(hold, request.page_keys, 0)
        request.state = RequestState.PREFILL
        if self._restore is not None:
            self._restore.bind(request, hit_pages, table.pages.copy())
        return True

    # --- batches -------------------------------------------------------------------------------

    def plan(self) -> list[Work]:
        """Choose what the next forward pass computes: decodes first, then prefill in order.

        Makes room for each new token, retracting the youngest requests when there is none.
        """
        budget = self._limits.batch_tokens_max
        work: list[Work] = []
        for request in [r for r in self.running if r.state is RequestState.DECODE]:
            if budget == 0:
                break
            if request.state is RequestState.DECODE and self._grow(request):
                work.append(Work(request, request.computed, request.token_count))
                budget -= 1
        for request in self.running:
            if budget == 0:
                break
            if request.state is RequestState.PREFILL:
                chunk = self._chunk(request, budget, layered=not any(w.layered for w in work))
                if chunk is not None:
                    work.append(chunk)
                    budget -= chunk.end - chunk.start
        # A request planned early may have been retracted to make room for a later one.
        return [each for each in work if each.request in self.running]

    def _chunk(self, request: Request, budget: int, *, layered: bool) -> Work | None:
        """A prefill's part of this pass; None when it waits for its load.

        `layered`: it may go on behind pages that are being copied. One request of a pass may, so
        that one failed copy costs one restore.
        """
        if self._restore is None:
            end = min(request.token_count, request.computed + budget)
            return Work(request, request.computed, end)
        if self._restore.advance(request):
            self._publish(request, copy=False)
        end = self._restore.chunk_end(request, budget)
        if end > request.computed:
            return Work(request, request.computed, end)
        start = self._restore.layered_start(request) if layered else None
        if start is None:
            return None
        return Work(request, start, min(request.token_count, start + budget), layered=True)

    def settle(self, work: Work) -> bool:
        """After a layered pass, before its token is chosen: True when the pages were all right.

        False: what it computed is worth nothing, and commit() must not hear of it.
        """
        assert self._restore is not None
        self._restore.settle(work.request)
        if self._restore.advance(work.request):
            self._publish(work.request, copy=False)
        return work.request.computed == work.start

    def commit(self, work: Sequence[Work], tokens: dict[int, int], eos: frozenset[int]) -> None:
        """Take note of a pass: its KV is in the pool; `tokens` by request id are its choices."""
        now = self._clock.monotonic()
        for each in work:
            request = each.request
            request.computed = each.end
            if not each.wants_token:
                continue
            if request.state is RequestState.PREFILL:
                self._publish(request, copy=True)
                request.state = RequestState.DECODE
            token = tokens[request.request_id]
            request.append(token)
            if request.first_token_s is None:
                request.first_token_s = now
            params = request.params
            if token in params.stop_token_ids or (token in eos and not params.ignore_eos):
                self.finish(request, FinishReason.STOP)
            elif len(request.output) >= request.max_tokens:
                self.finish(request, FinishReason.LENGTH)

    def _grow(self, request: Request) -> bool:
        """Make sure the request's next token has a slot. False: it is not running any more."""
        table = request.table
        assert table is not None
        while table.capacity_tokens < request.token_count:
            page = self._allocate(1, table.last_page)
            if page is not None:
                table.append(page)
                continue
            victim = self._youngest()
            if victim is request and len(self.running) == 1:
                # Alone and still no room: the answer ends where the pool ends.
                self.finish(request, FinishReason.LENGTH)
                return False
            self._retract(victim)
            if victim is request:
                return False
        return True

    def _allocate(self, count: int, after: int | None) -> PageArray | None:
        """Pages from the cache, waiting a bounded time for demotions that will free some."""
        pages = None
        if self._has_room(count):
            pages = self._cache.allocate(count, after)
        deadline = self._clock.monotonic() + COPY_WAIT_S
        while pages is None and self._offload is not None and self._copies_would_do(count):
            if not self._offload.wait_for_one(deadline - self._clock.monotonic()):
                break
            pages = self._cache.allocate(count, after)
        return pages

    def _has_room(self, count: int) -> bool:
        """True when so many pages are free or could be; runs that wait to be copied give way."""
        if count <= self._cache.available_pages:
            return True
        offload = self._offload
        return (
            offload is not None
            and offload.put_off_pending()
            and count <= self._cache.available_pages
        )

    def _copies_would_do(self, count: int) -> bool:
        copying = self._cache.pool.copying_count
        return copying > 0 and count <= self._cache.available_pages + copying

    def _youngest(self) -> Request:
        return min(
            self.running,
            key=lambda r: (r.priority, r.retractions, -r.arrival_s, -r.request_id),
        )

    def _retract(self, request: Request) -> None:
        """Send a running request back to the queue; what it computed stays cached if it can."""
        log.info("retract request=%d tokens=%d", request.request_id, request.token_count)
        self.retractions += 1
        request.retractions += 1
        self._publish(request, copy=False)
        self._release(request)
        request.state = RequestState.QUEUED
        request.computed = 0
        self.waiting.insert(0, request)

    # --- ends ----------------------------------------------------------------------------------

    def finish(self, request: Request, reason: FinishReason, error: str | None = None) -> None:
        """End a request, wherever it stands; its whole pages stay cached unless it failed."""
        if request.finish_reason is not None:
            return
        request.finish_reason = reason
        request.error = error
        request.finished_s = self._clock.monotonic()
        if request.state is RequestState.QUEUED:
            if self._restore is not None:
                self._restore.detach(request)
            self.waiting.remove(request)
            request.state = RequestState.FINISHED
            return
        if reason is not FinishReason.ERROR:
            self._publish(request, copy=True)
        self._release(request)

    def _publish(self, request: Request, *, copy: bool) -> None:
        """Give the tree the request's whole computed pages; take over its copies of them."""
        assert request.table is not None
        request.extend_keys(self.page_tokens)
        pages = request.computed // self.page_tokens
        if pages <= request.shared_pages:
            return
        result = self._cache.insert(
            request.packed_prefix(pages * self.page_tokens),
            request.table.pages[:pages],
            request.namespace,
            request.page_keys[:pages],
            boundary=len(request.prompt),
            priority=request.priority,
        )
        hold = self._cache.lock(result.match)
        if request.hold is not None:
            self._cache.unlock(request.hold)
        request.hold = hold
        request.table.replace(0, result.match.pages)
        first, request.shared_pages = request.shared_pages, pages
        if copy and self._offload is not None:
            self._offload.published(hold, request.page_keys, first)

    def _release(self, request: Request) -> None:
        """Give back everything a running request holds."""
        self.running.remove(request)
        own = request.own_pages
        if self._restore is not None:
            # What a copy still writes is freed when the copy ends.
            own = own[~np.isin(own, self._restore.detach(request))]
        self._cache.free(own)
        if request.hold is not None:
            self._cache.unlock(request.hold)
        request.hold = None
        request.table = None
        request.shared_pages = 0
        if request.finish_reason is not None:
            request.state = RequestState.FINISHED

    def check(self) -> None:
        """Assert that every page has one owner and every request is in its state's queue."""
        self._cache.check(np.concatenate([NO_PAGES, *(r.own_pages for r in self.running)]))
        for request in self.waiting:
            assert request.state is RequestState.QUEUED
            assert request.hold is None
            assert request.table is None
        for request in self.running:
            assert request.state not in (RequestState.QUEUED, RequestState.FINISHED)
            assert request.hold is not None
            assert request.table is not None
            request.table.check()
            assert request.computed <= request.table.capacity_tokens
