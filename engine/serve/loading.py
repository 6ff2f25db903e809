"""One request's restore: which pages of its prefix are wanted, on their way, arrived or lost.

Owns the fetches of its segments and the leases under copy. Knows page numbers within the prompt,
and once the request is admitted the pool pages behind them; does no arithmetic of time. Used by
restore.py on the engine thread only.

The run [first, end) of pages is cut into segments, loaded from the tail, so that computing from
the head and loading meet. Segments that have come by the same step are copied together, so that
their pages arrive layer by layer, not segment by segment. State of a page:

    WANTED   --its segment has come, copy begins-->  COPYING
    COPYING  --copy ends-->  ARRIVED
    WANTED   --fetch failed, given up, or computed meanwhile-->  LOST
    COPYING  --copy failed-->  LOST
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from tierkv.engine.cache.node import PageArray
from tierkv.engine.cache.page_pool import PagesInCopy
from tierkv.engine.serve.request import Request
from tierkv.storage.base import Fetch, PageLease
from tierkv.storage.transfer.base import LayeredCopy
from tierkv.storage.types import TierName


class PageState(IntEnum):
    """See the module's table."""

    WANTED = 0
    COPYING = 1
    ARRIVED = 2
    LOST = 3


@dataclass(slots=True)
class Segment:
    """Pages [first, end) of the prompt, fetched together."""

    first: int
    end: int
    fetch: Fetch
    began_s: float
    done_s: float | None = None
    """When the fetch ended; set by whichever thread ended it."""


@dataclass(slots=True)
class PageCopy:
    """Pages of some segments on their way from host memory into the pool."""

    parts: list[tuple[PageLease, list[int]]]
    """Each segment's lease, and the page numbers copied out of it."""
    held: PagesInCopy
    """Their pool pages: nobody else can free or write them before the copy's end."""
    event: LayeredCopy

    @property
    def pages(self) -> list[int]:
        """Page numbers."""
        return [page for _, numbers in self.parts for page in numbers]


class Load:
    """State of one request's restore."""

    def __init__(
        self,
        request: Request,
        first: int,
        tiers: list[TierName],
        began_s: float,
        deadline_s: float,
    ) -> None:
        self.request = request
        self.first = first
        self.end = first + len(tiers)
        self.tiers = tiers
        """Where each page of the run was when the load was planned."""
        self.deadline_s = deadline_s
        self.state = bytearray([PageState.WANTED]) * len(tiers)
        self.pages: PageArray | None = None
        """Pool pages by page number of the prompt; None before admission."""
        self.under_way: list[Segment] = []
        """Segments being fetched or not taken yet, in the order they were begun: tail first."""
        self.copies: list[PageCopy] = []
        """In the order they were begun, which is that of their ends."""
        self.last_s = began_s
        """When the last of the segments that were taken had come, or the load began."""
        self.layered = True
        """False once a pass that began before the pages were there had to be given up."""

    @property
    def bound(self) -> bool:
        """True once the request has pages to load into."""
        return self.pages is not None

    @property
    def over(self) -> bool:
        """True when nothing more will arrive."""
        return not self.under_way and not self.copies

    @property
    def progress_s(self) -> float:
        """When a fetch last ended, or the load began."""
        ends = [each.done_s for each in self.under_way if each.done_s is not None]
        return max([self.last_s, *ends])

    def at(self, page: int) -> PageState:
        """State of a page number; LOST outside the run."""
        if not self.first <= page < self.end:
            return PageState.LOST
        return PageState(self.state[page - self.first])

    def set(self, page: int, state: PageState) -> None:
        """Change a page's state."""
        self.state[page - self.first] = state

    def lose(self, first: int, end: int) -> None:
        """Give up pages [first, end) that are still WANTED: they are computed."""
        for page in range(max(first, self.first), min(end, self.end)):
            if self.at(page) is PageState.WANTED:
                self.set(page, PageState.LOST)

    def give_up(self) -> None:
        """Cancel what has not begun to be copied."""
        self.lose(self.first, self.end)
        self.drop_unwanted()

    def drop_unwanted(self) -> None:
        """Cancel segments of which no page is wanted any more."""
        for segment in list(self.under_way):
            if not self.wanted(segment.first, segment.end):
                segment.fetch.cancel()
                self.under_way.remove(segment)

    def gap_end(self, page: int) -> int:
        """First page from `page` on that is there or being copied; the run's end if none is."""
        state = self.state
        for index in range(max(page, self.first) - self.first, len(state)):
            if state[index] in (PageState.COPYING, PageState.ARRIVED):
                return self.first + index
        return self.end

    def all_copying(self, page: int) -> bool:
        """True when every page from `page` to the end has been fetched, and some is under copy."""
        rest = self.state[max(0, page - self.first) :]
        settled = (PageState.COPYING, PageState.ARRIVED)
        return page < self.end and PageState.COPYING in rest and all(s in settled for s in rest)

    def wanted(self, first: int, end: int) -> list[int]:
        """Page numbers in [first, end) that are still to come."""
        low, high = max(first, self.first), min(end, self.end)
        return [page for page in range(low, high) if self.at(page) is PageState.WANTED]

    def copying_pages(self) -> PageArray:
        """Pool pages under copy now."""
        return np.concatenate([np.empty(0, np.int32), *(copy.held.pages for copy in self.copies)])

    def check(self) -> None:
        """Assert that every wanted page has a segment that will bring or lose it. O(pages)."""
        covered = {page for each in self.under_way for page in range(each.first, each.end)}
        copied = [page for copy in self.copies for page in copy.pages]
        assert len(copied) == len(set(copied)), "a page is copied twice"
        for page in range(self.first, self.end):
            assert (self.at(page) is PageState.COPYING) == (page in copied)
            if self.at(page) is PageState.WANTED:
                assert page in covered, f"page {page} is wanted but nothing brings it"
