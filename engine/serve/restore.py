"""Brings a request's prefix back from the store while its head is computed, until they meet.

Owns the loads of waiting and running requests, the cost model of computing and the rate of each
tier. Runs on the engine thread. What is late, lost or corrupt is a miss: the request computes it.

    queued      begin()     plans, and starts fetching from the tail: prefetch into host memory
    admitted    bind()      gives the load its pool pages; what has come is copied into them
    each step   poll()      takes note of arrivals, starts copies
                advance()   moves the request's front over pages that have arrived
                chunk_end() how far to compute now; the front itself means: better wait, or
                layered_start() where a pass may begin that meets the copies layer by layer
    that pass   layer_gate() waits for a layer of them; then settle(), or stop_layered()
    any time    stuck()     a copy outlasts every deadline: the request must leave its pages
                detach()    ends the load; pages still under copy are freed when the copy ends
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from tierkv.engine.cache.node import PageArray
from tierkv.engine.cache.prefix_cache import NO_PAGES, PrefixCache
from tierkv.engine.serve.loading import Load, PageCopy, PageState, Segment
from tierkv.engine.serve.planner import LoadRate, Plan, PrefillCost, meet, plan
from tierkv.engine.serve.request import Request
from tierkv.storage.base import PageLease, PageStore
from tierkv.storage.clock import Clock
from tierkv.storage.transfer.base import PageTransfer
from tierkv.storage.types import TierName

log = logging.getLogger(__name__)

SEGMENTS = 16
"""Pieces a run is loaded in: the finer, the closer computing and loading meet."""
SEGMENT_PAGES_MAX = 64
STUCK_GRACE_S = 1.0
"""A copy that began in time may end so much after the deadline."""
LATE_FACTOR = 2.0
"""A segment that takes this many times as long as expected is late: plan again."""
PROBE_EVERY = 16
"""Loads that the plan rejects outright before one is tried all the same, to learn the rate."""
RECHECK_S_MIN = 0.005
STUCK_KEPT = 1024
LAYERED_WAIT_S = 1.0
"""Longest a pass waits, in all, for pages that are being copied while it runs. Others are in it."""


class RestoreMode(StrEnum):
    """How a missing prefix is brought back. AUTO is for serving, the others for measuring."""

    AUTO = "auto"
    LOAD = "load"
    RECOMPUTE = "recompute"


@dataclass(frozen=True, slots=True)
class RestoreStats:
    """Counters since start."""

    loads: int
    restored_pages: int
    recomputed_pages: int
    """Pages of planned loads that were computed before they came."""
    late: int
    """Loads that reached their deadline; what had come was used."""
    failed: int
    """Pages whose fetch or copy failed."""
    outright: int
    """Hits in a lower tier that the plan left alone: computing was cheaper."""
    active: int
    orphaned_pages: int
    """Pages of ended requests that a copy still writes."""
    expected_s: float
    """Sum of the plans' expected times, of the loads that ended."""
    taken_s: float
    """Sum of the times they took, from admission to the last page."""
    layered: int = 0
    """Passes that began before their last pages were there."""


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
        loads_max: int,
        chunk_tokens: int,
        mode: RestoreMode,
        wake: Callable[[], None],
    ) -> None:
        self._cache = cache
        self._store = store
        self._transfer = transfer
        self._clock = clock
        self._deadline_s = deadline_s
        self._loads_max = loads_max
        self._chunk_tokens = chunk_tokens
        self._wake = wake
        self.mode = mode
        self.cost = PrefillCost()
        self.rates: dict[TierName, LoadRate] = {}
        self._loads: dict[int, Load] = {}
        self._plans: dict[int, tuple[Plan, float]] = {}
        self._orphans: list[PageCopy] = []
        """Of ended requests."""
        self._stuck: deque[int] = deque(maxlen=STUCK_KEPT)
        """Requests that compute everything, since a copy for them did not end."""
        self._rejected_in_a_row = 0
        self._counts = Counter[str]()
        self._expected_s = 0.0
        self._taken_s = 0.0

    # --- life of a load ------------------------------------------------------------------------

    def begin(self, request: Request, gpu_pages: int) -> None:
        """Start fetching what lower tiers hold after the first `gpu_pages`; returns at once.

        Does nothing when they hold nothing, when computing is cheaper, or when enough other
        loads are under way; bind() asks again.
        """
        if request.request_id in self._loads or len(self._loads) >= self._loads_max:
            return
        if self.mode == RestoreMode.RECOMPUTE or request.request_id in self._stuck:
            return
        keys = request.page_keys[gpu_pages : request.restorable_pages(self._cache.page_tokens)]
        tiers = leading(self._store.lookup(keys))
        if not tiers:
            return
        expected = self._plan(len(tiers), gpu_pages, tiers)
        if self.mode == RestoreMode.AUTO and self._outright(expected):
            return
        now = self._clock.monotonic()
        load = Load(request, gpu_pages, tiers, now, now + self._deadline_s)
        self._loads[request.request_id] = load
        self._plans[request.request_id] = (expected, now)
        request.plan = expected
        self._counts["loads"] += 1
        size = min(SEGMENT_PAGES_MAX, max(1, len(tiers) // SEGMENTS))
        # From the tail: the store serves what was asked first, and the head is what is computed.
        for first in reversed(range(load.first, load.end, size)):
            self._fetch(load, first, min(first + size, load.end))

    def bind(self, request: Request, gpu_pages: int, pages: PageArray) -> None:
        """The request is admitted: `pages` is its whole page table, a copy that stays valid.

        Its first `gpu_pages` are the tree's. What was planned before is kept where it still
        fits: pages the GPU has meanwhile are dropped, pages it lost are computed.
        """
        self.begin(request, gpu_pages)
        load = self._loads.get(request.request_id)
        if load is None:
            return
        load.pages = pages
        load.lose(load.first, gpu_pages)
        load.drop_unwanted()
        expected, _ = self._plans[request.request_id]
        self._plans[request.request_id] = (expected, self._clock.monotonic())
        self._pump(load)

    def poll(self) -> None:
        """Take note of what arrived since the last step, and start copies."""
        self._free_orphans()
        now = self._clock.monotonic()
        for load in list(self._loads.values()):
            if now >= load.deadline_s and load.under_way:
                self._counts["late"] += 1
                load.give_up()
            self._pump(load)

    def advance(self, request: Request) -> bool:
        """Move `computed` over pages that have arrived; True when it moved."""
        load = self._loads.get(request.request_id)
        if load is None:
            return False
        size = self._cache.page_tokens
        began = request.computed
        while request.computed % size == 0:
            page = request.computed // size
            if load.at(page) is not PageState.ARRIVED:
                break
            request.computed += size
            if request.retractions == 0:
                tier = load.tiers[page - load.first]
                cached = request.cached
                name = tier.value
                request.cached = replace(cached, **{name: getattr(cached, name) + size})
        if load.over and request.computed // size >= load.end:
            self._close(load)
        return request.computed > began

    def chunk_end(self, request: Request, budget: int) -> int:
        """Token up to which to compute in the next pass, at most `budget` from the front on.

        Equal to `request.computed` when the request had better wait for its load.
        """
        front = request.computed
        end = min(request.token_count, front + budget)
        load = self._loads.get(request.request_id)
        if load is None:
            return end
        size = self._cache.page_tokens
        page = front // size
        if page >= load.end:
            return end
        assert load.at(page) is not PageState.ARRIVED, "advance() comes first"
        if load.at(page) is PageState.COPYING:
            return front
        gap = load.gap_end(page)
        end = min(end, gap * size)
        wanted = load.wanted(page, gap)
        if not wanted:
            return end
        if self.mode == RestoreMode.LOAD:
            # Up to the first page that may still come.
            return min(end, max(front, wanted[0] * size))
        meeting = front + self._meeting(load, front, gap * size - front, wanted)
        # To the nearest page: what ends inside one is computed or loaded, not both.
        target = min(end, round(meeting / size) * size)
        if target <= front:
            return min(end, max(front, wanted[0] * size))
        load.lose(page, -(-target // size))
        load.drop_unwanted()
        return target

    # --- passes that begin before their prefix is there ------------------------------------------

    def layered_start(self, request: Request) -> int | None:
        """Token from which a pass may compute while pages before it are still being copied.

        None: not now. The whole rest of the load must have been fetched, so that nothing but a
        copy of known length is waited for.
        """
        load = self._loads.get(request.request_id)
        size = self._cache.page_tokens
        if load is None or not load.layered or request.computed % size:
            return None
        return load.end * size if load.all_copying(request.computed // size) else None

    def layer_gate(self, request: Request) -> Callable[[int], None]:
        """What the pass calls before layer i's attention: returns when layer i is in the pool.

        Raises TierIOError when a copy failed or is late: see stop_layered().
        """
        copies = [copy.event for copy in self._loads[request.request_id].copies]
        until = self._clock.monotonic() + LAYERED_WAIT_S

        def wait(layer: int) -> None:
            for copy in copies:
                copy.wait_layer(layer, max(0.0, until - self._clock.monotonic()))

        return wait

    def settle(self, request: Request) -> None:
        """The pass has ended: take note of its copies, which have as good as ended too."""
        load = self._loads[request.request_id]
        for copy in load.copies:
            if not copy.event.wait(LAYERED_WAIT_S):
                load.layered = False
        self._pump(load)
        self._counts["layered"] += 1

    def stop_layered(self, request: Request) -> None:
        """A copy failed or was late for the pass: from now on the request waits for its pages.

        What is under copy is cancelled; as soon as a copy has ended its pages are computed, since
        nobody may write them before.
        """
        load = self._loads[request.request_id]
        load.layered = False
        for copy in load.copies:
            copy.event.cancel()
        self._pump(load)

    def stuck(self, request: Request) -> bool:
        """True when a copy into the request's pages has outlasted the load's deadline.

        Nobody may write those pages until it ends, if ever: the request must leave them (detach)
        and begin again with others. It loads nothing then.
        """
        load = self._loads.get(request.request_id)
        if load is None or not load.copies:
            return False
        if self._clock.monotonic() < load.deadline_s + STUCK_GRACE_S:
            return False
        log.error(
            "restore stuck request=%d pages=%d", request.request_id, len(load.copying_pages())
        )
        for copy in load.copies:
            copy.event.cancel()
        self._counts["failed"] += len(load.copying_pages())
        self._stuck.append(request.request_id)
        return True

    def detach(self, request: Request) -> PageArray:
        """End the request's load; returns pages that a copy still writes.

        Those are freed here when the copy ends; the caller frees the others.
        """
        load = self._loads.pop(request.request_id, None)
        self._plans.pop(request.request_id, None)
        if load is None:
            return NO_PAGES
        load.give_up()
        held = load.copying_pages()
        self._orphans.extend(load.copies)
        return held

    def close(self, timeout_s: float) -> None:
        """End all loads and wait for the copies under way, each at most `timeout_s`."""
        for load in list(self._loads.values()):
            self.detach(load.request)
        for copy in self._orphans:
            copy.event.wait(timeout_s)
        self._free_orphans()

    # --- time ----------------------------------------------------------------------------------

    def recheck_s(self) -> float | None:
        """Seconds until some load should be looked at again though nothing arrived."""
        waits = []
        now = self._clock.monotonic()
        for load in self._loads.values():
            if load.over:
                continue
            waits.append(load.deadline_s + (STUCK_GRACE_S if load.copies else 0.0) - now)
            if load.bound:
                waited = now - load.progress_s
                late = self._late_after_s(self._segment_s(load), load.request.computed)
                waits.append(max(late - waited, waited / 4))
        return max(RECHECK_S_MIN, min(waits)) if waits else None

    def stats(self) -> RestoreStats:
        """Counters now."""
        return RestoreStats(
            loads=self._counts["loads"],
            restored_pages=self._counts["restored"],
            recomputed_pages=self._counts["recomputed"],
            late=self._counts["late"],
            failed=self._counts["failed"],
            layered=self._counts["layered"],
            outright=self._counts["outright"],
            active=len(self._loads),
            orphaned_pages=sum(len(copy.pages) for copy in self._orphans),
            expected_s=self._expected_s,
            taken_s=self._taken_s,
        )

    def check(self) -> None:
        """Assert the invariants of every load. O(pages)."""
        for load in self._loads.values():
            load.check()

    def _plan(self, page_count: int, first: int, tiers: Sequence[TierName]) -> Plan:
        size = self._cache.page_tokens
        seconds = self._load_s(tiers) / page_count / size
        return plan(
            page_count * size, first * size, self.cost.current, seconds, 0.0, self._chunk_tokens
        )

    def _outright(self, expected: Plan) -> bool:
        """True when the plan loads nothing; now and then tried all the same."""
        if expected.load_tokens > 0:
            self._rejected_in_a_row = 0
            return False
        self._rejected_in_a_row += 1
        if self._rejected_in_a_row % PROBE_EVERY == 0:
            return False
        self._counts["outright"] += 1
        return True

    def _load_s(self, tiers: Sequence[TierName]) -> float:
        """Time to load pages from these tiers, alone."""
        each = self._transfer.page_bytes
        return sum(self._rate(tier).seconds(each * count) for tier, count in Counter(tiers).items())

    def _rate(self, tier: TierName) -> LoadRate:
        if tier not in self.rates:
            known = self._store.stats().mover.read_bytes_per_s.get(tier)
            self.rates[tier] = LoadRate(known)
        return self.rates[tier]

    def _sharing(self) -> int:
        """Loads that share the tiers now."""
        return max(1, sum(not load.over for load in self._loads.values()))

    def _segment_s(self, load: Load) -> float:
        """Expected time between two arrivals of this load; 0 when not known."""
        pending = [each for each in load.under_way if each.done_s is None]
        if not pending:
            return 0.0
        first, end = pending[0].first - load.first, pending[0].end - load.first
        return self._load_s(load.tiers[first:end]) * self._sharing()

    def _meeting(self, load: Load, front: int, gap_tokens: int, wanted: list[int]) -> float:
        """Tokens to compute at the front of a gap so that its tail has arrived by then."""
        tiers = [load.tiers[page - load.first] for page in wanted]
        per_token = self._load_s(tiers) * self._sharing() / max(1, gap_tokens)
        waited = self._clock.monotonic() - load.progress_s
        segment = self._segment_s(load)
        credit = min(waited, segment)
        if segment <= 0:
            # Nothing is known of the tier but that a segment takes longer than this.
            pending = sum(each.done_s is None for each in load.under_way)
            per_token = waited * pending / max(1, gap_tokens)
        elif waited > self._late_after_s(segment, front):
            # What is late by so much is expected to take as long again; the pages after it not: a
            # disk that paused once is not a slow disk, and a slow one shows with each arrival.
            credit = -waited
        return int(meet(gap_tokens, front, self.cost.current, per_token, credit))

    def _late_after_s(self, segment_s: float, front: int) -> float:
        """How long to wait for an arrival before taking the tier for slower than it was.

        Never less than computing one page takes: a shorter wait decides nothing.
        """
        page = self.cost.current.seconds(self._cache.page_tokens, front)
        return max(LATE_FACTOR * segment_s, page)

    # --- pages on their way --------------------------------------------------------------------

    def _fetch(self, load: Load, first: int, end: int) -> None:
        """Begin one segment. It goes on by itself: the engine thread may be computing."""
        fetch = self._store.fetch(load.request.page_keys[first:end], self._deadline_s)
        segment = Segment(first, end, fetch, self._clock.monotonic())
        load.under_way.append(segment)

        def ended() -> None:
            segment.done_s = self._clock.monotonic()
            self._wake()

        fetch.add_done_callback(ended)

    def _pump(self, load: Load) -> None:
        """Copy what was fetched and note what was copied."""
        while load.copies and load.copies[0].event.done:
            self._arrived(load, load.copies.pop(0))
        if load.bound:
            fetched = [each for each in load.under_way if each.done_s is not None]
            if fetched:
                self._copy(load, sorted(fetched, key=lambda each: each.first))

    def _copy(self, load: Load, segments: list[Segment]) -> None:
        """Take fetched segments and start copying the pages of them that are still wanted."""
        assert load.pages is not None
        parts: list[tuple[PageLease, list[int]]] = []
        views: list[memoryview] = []
        for segment in segments:
            lease, numbers = self._take(load, segment)
            if numbers:
                parts.append((lease, numbers))
                views += [lease.views[number - segment.first] for number in numbers]
            else:
                lease.release()
        if not parts:
            return
        pages = [number for _, numbers in parts for number in numbers]
        for number in pages:
            load.set(number, PageState.COPYING)
        held = self._cache.pool.begin_copy(load.pages[pages])
        event = self._transfer.scatter(views, held)
        load.copies.append(PageCopy(parts, held, event))
        event.add_done_callback(lambda _: self._wake())

    def _take(self, load: Load, segment: Segment) -> tuple[PageLease, list[int]]:
        """What a fetched segment brought, and the numbers of its pages that are still wanted."""
        assert segment.done_s is not None
        load.under_way.remove(segment)
        load.last_s = max(load.last_s, segment.done_s)
        lease = segment.fetch.take(timeout_s=0.0)
        got = segment.first + len(lease.views)
        missing = len(load.wanted(got, segment.end))
        if missing:
            self._counts["failed"] += missing
            load.lose(got, segment.end)
        self._note_rate(segment, lease.tiers)
        return lease, load.wanted(segment.first, got)

    def _arrived(self, load: Load, copy: PageCopy) -> None:
        """A copy ended."""
        error = copy.event.error
        self._cache.pool.finish_copy(copy.held, free=False)
        lost = 0
        for lease, numbers in copy.parts:
            # Asked after the copy: a lease can end on its own while the bytes are read.
            failed = error is not None or not lease.intact
            lease.release()
            for number in numbers:
                load.set(number, PageState.LOST if failed else PageState.ARRIVED)
            self._counts["failed" if failed else "restored"] += len(numbers)
            lost += len(numbers) if failed else 0
        if lost:
            reason = error or "the lease ended during the copy"
            log.warning("restore failed pages=%d: %s", lost, reason)

    def _note_rate(self, segment: Segment, tiers: Sequence[TierName]) -> None:
        """A fetched segment says how fast its tier is, when all of it came from one."""
        if len(set(tiers)) == 1 and segment.done_s is not None:
            nbytes = len(tiers) * self._transfer.page_bytes
            self._rate(tiers[0]).note(nbytes, segment.began_s, segment.done_s)

    def _free_orphans(self) -> None:
        left = []
        for copy in self._orphans:
            if not copy.event.done:
                left.append(copy)
                continue
            for lease, _ in copy.parts:
                lease.release()
            self._cache.pool.finish_copy(copy.held, free=True)
        self._orphans = left

    def _close(self, load: Load) -> None:
        """The front is past the run: judge the plan."""
        del self._loads[load.request.request_id]
        expected, bound_s = self._plans.pop(load.request.request_id)
        self._expected_s += expected.expected_s
        self._taken_s += self._clock.monotonic() - bound_s
        self._counts["recomputed"] += load.state.count(PageState.LOST)


def leading(tiers: Sequence[TierName | None]) -> list[TierName]:
    """The leading run that some tier holds."""
    run = []
    for tier in tiers:
        if tier is None:
            break
        run.append(tier)
    return run
