"""Which pages of the compute device are free, used or being copied.

Owns the accounting of page indexes only: the bytes are engine/serve/kv_pool.py's, the meaning of
a page is its holder's. Knows neither tokens nor tensors. Single-threaded, like the tree: copy
threads report completion to the engine thread, which calls finish_copy().

    state    who may touch the bytes             leaves by
    FREE     nobody                              allocate -> USED
    USED     its holder (a request or the tree)  free -> FREE, begin_copy -> COPYING
    COPYING  the copy under way, and readers     finish_copy -> USED, or FREE with free=True
             when the copy only reads

A COPYING page can be neither freed nor handed out: its slot is reusable only after the copy's own
completion. begin_copy() returns that promise as an object, PagesInCopy: the transfer ties it to
the copy's completion, and finish_copy() refuses it earlier. A copy that reads pages which stay in
use (begin_read) keeps them USED, yet nobody can free them or write to them before its end.
Invariants: free + used + copying == total; a page with readers is USED; both asserted by check().
Called by engine/cache/prefix_cache.py and by the engine's restore and offload.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from tierkv.storage.errors import CapacityError, ConfigError

PageArray = npt.NDArray[np.int32]

FREE = 0
USED = 1
COPYING = 2


class Completion(Protocol):
    """The end of a copy, as the transfer reports it."""

    @property
    def done(self) -> bool:
        """True once no byte of the copy moves any more."""
        ...


class PagesInCopy:
    """Pages of one copy, from begin_copy() or begin_read() until finish_copy(). Single use.

    Handed to the transfer, which ties its completion to it: from then on the pool takes the pages
    back only when the copy has ended.
    """

    __slots__ = ("_completion", "_pool", "finished", "pages", "reads")

    def __init__(self, pool: PagePool, pages: PageArray, *, reads: bool) -> None:
        self._pool = pool
        self.pages = pages
        self.reads = reads
        """True when the pages stay USED and the copy only reads them."""
        self.finished = False
        self._completion: Completion | None = None

    @property
    def under_way(self) -> bool:
        """True while a copy may touch the pages."""
        return self._completion is not None and not self._completion.done

    def page_list(self) -> list[int]:
        """The indexes as Python integers."""
        indexes: list[int] = self.pages.tolist()
        return indexes

    def attach(self, completion: Completion) -> None:
        """Tie the pages to the copy that was started. Once."""
        assert self._completion is None, "the pages take part in one copy only"
        assert not self.finished, "the pages were given back before the copy began"
        self._pool.note_tied(self)
        self._completion = completion


class PagePool:
    """Page indexes 0 to num_pages - 1, each in one of three states."""

    def __init__(
        self,
        num_pages: int,
        page_tokens: int,
        watermark_low: int = 0,
        watermark_high: int | None = None,
    ) -> None:
        """`watermark_low`: pages held back from new work so that running requests can grow.

        `watermark_high` (default: the low one): free pages to restore once fewer than low are
        free. Both in pages. Raises CapacityError for a pool without room for one page,
        ConfigError when not 0 <= low <= high <= num_pages.
        """
        if num_pages < 1 or page_tokens < 1:
            raise CapacityError(
                f"page pool: expected room for at least one page of at least one token, got "
                f"{num_pages} pages of {page_tokens} tokens; raise the KV budget"
            )
        high = watermark_low if watermark_high is None else watermark_high
        if not 0 <= watermark_low <= high <= num_pages:
            raise ConfigError(
                f"page pool: expected watermarks 0 <= low <= high <= {num_pages} pages, got "
                f"{watermark_low} and {high}; lower them or raise the KV budget"
            )
        self.num_pages = num_pages
        self.page_tokens = page_tokens
        self.watermark_low = watermark_low
        self.watermark_high = high
        self._states = bytearray(num_pages)
        # A view of the same memory: runs are searched as bytes, groups are set as an array.
        self._array = np.frombuffer(self._states, np.uint8)
        self._readers = np.zeros(num_pages, np.uint16)
        """Copies under way that read each page."""
        self._free_count = num_pages
        self._copying_count = 0
        self._reading_count = 0
        self._tied: list[PagesInCopy] = []
        """Copies that were handed to a transfer and are not finished, oldest first."""

    @property
    def free_count(self) -> int:
        return self._free_count

    @property
    def copying_count(self) -> int:
        return self._copying_count

    @property
    def used_count(self) -> int:
        return self.num_pages - self._free_count - self._copying_count

    @property
    def available(self) -> int:
        """Free pages above the low watermark: what new work may take."""
        return max(0, self._free_count - self.watermark_low)

    @property
    def shortfall(self) -> int:
        """Pages to free now to reach the high watermark; 0 while at least the low one is free."""
        if self._free_count >= self.watermark_low:
            return 0
        return self.watermark_high - self._free_count

    def copying_among(self, pages: PageArray) -> int:
        """How many of `pages` are being copied. O(pages)."""
        return int(np.count_nonzero(self._array[self._indexes(pages)] == COPYING))

    def allocate(self, count: int, after: int | None = None) -> PageArray | None:
        """Take `count` free pages, all or nothing: None when there are too few.

        Prefers the pages right after page `after`, else the first run of `count` adjacent pages,
        else as few runs as possible, in ascending order. Ignores the watermarks: callers compare
        with `available` first. O(num_pages) byte search; a fragmented pool costs a full scan.
        """
        assert count >= 0, f"allocate {count} pages"
        if count > self._free_count:
            return None
        if count == 0:
            return np.empty(0, np.int32)
        wanted = bytes(count)
        if after is not None and self._states.startswith(wanted, after + 1):
            start = after + 1
        else:
            start = self._states.find(wanted)
        if start >= 0:
            pages = np.arange(start, start + count, dtype=np.int32)
        else:
            pages = self._fewest_runs(count)
        self._array[pages] = USED
        self._free_count -= count
        return pages

    def _fewest_runs(self, count: int) -> PageArray:
        """`count` free pages in as few runs as possible; no single run is long enough."""
        edges = np.diff(self._array == FREE, prepend=False, append=False).nonzero()[0]
        starts, lengths = edges[::2], edges[1::2] - edges[::2]
        order = np.argsort(-lengths, kind="stable")
        needed = int(np.searchsorted(np.cumsum(lengths[order]), count)) + 1
        chosen = order[:needed]
        # The last run need not be the longest that is left: the shortest that is enough keeps
        # the longer ones whole.
        rest = count - int(lengths[chosen[:-1]].sum())
        enough = order[needed - 1 :][lengths[order[needed - 1 :]] >= rest]
        chosen[-1] = enough[-1]
        taken = np.zeros_like(lengths)
        taken[chosen] = lengths[chosen]
        taken[chosen[-1]] = rest
        # Each taken run counts up from its start; runs lie in ascending order already.
        offsets = np.arange(count) - np.repeat(np.cumsum(taken) - taken, taken)
        pages: PageArray = (np.repeat(starts, taken) + offsets).astype(np.int32)
        return pages

    def free(self, pages: PageArray | Sequence[int]) -> None:
        """Give USED pages back.

        Asserts on a double free, a COPYING, a read or a foreign page."""
        self._check_unread(pages)
        self._move(pages, USED, FREE, "free")
        self._free_count += len(pages)

    def begin_copy(self, pages: PageArray | Sequence[int]) -> PagesInCopy:
        """Mark USED pages as being copied: nobody can free them until finish_copy()."""
        self._check_unread(pages)
        self._move(pages, USED, COPYING, "begin_copy")
        self._copying_count += len(pages)
        return self._begin(pages, reads=False)

    def begin_read(self, pages: PageArray | Sequence[int]) -> PagesInCopy:
        """Let a copy read USED pages, which stay USED: nobody can free or write to them until
        finish_copy(). Several reads of one page may overlap."""
        indexes = self._indexes(pages)
        wrong = indexes[self._array[indexes] != USED]
        assert wrong.size == 0, f"begin_read: pages {wrong[:8].tolist()} are not in use"
        assert np.unique(indexes).size == indexes.size, "begin_read: a page is named twice"
        self._readers[indexes] += 1
        self._reading_count += indexes.size
        return self._begin(pages, reads=True)

    def finish_copy(self, copy: PagesInCopy, free: bool) -> None:
        """End a copy: back to USED, or to FREE (a demotion that is done, a restore that failed).

        Asserts when a copy that was tied to the pages has not ended, and on a second end. `free`
        is not for begin_read(): the pages have their holder.
        """
        assert not copy.finished, "finish_copy: a copy ends once"
        assert not copy.under_way, "finish_copy: the copy has not ended"
        if copy.reads:
            assert not free, "finish_copy: pages that are only read stay their holder's"
            self._readers[copy.pages] -= 1
            self._reading_count -= copy.pages.size
        else:
            self._end_copy(copy.pages, free)
        copy.finished = True
        if copy in self._tied:
            self._tied.remove(copy)

    def note_tied(self, copy: PagesInCopy) -> None:
        """Called by PagesInCopy.attach(): from now on only its copy's end frees the pages."""
        assert copy.reads or (self._array[copy.pages] == COPYING).all(), "the pages were finished"
        self._tied.append(copy)

    def check_writable(self, pages: PageArray | Sequence[int]) -> None:
        """Assert that no copy reads or writes these pages: a forward pass is about to.

        O(1) while no copy is under way.
        """
        self._check_unread(pages)
        if self._copying_count:
            indexes = self._indexes(pages)
            copied = indexes[self._array[indexes] == COPYING]
            assert copied.size == 0, f"pages {copied[:8].tolist()} are under copy"

    def _check_unread(self, pages: PageArray | Sequence[int]) -> None:
        if self._reading_count:
            indexes = self._indexes(pages)
            read = indexes[self._readers[indexes] > 0]
            assert read.size == 0, f"pages {read[:8].tolist()} are being read by a copy"

    def _begin(self, pages: PageArray | Sequence[int], *, reads: bool) -> PagesInCopy:
        return PagesInCopy(self, self._indexes(pages).copy(), reads=reads)

    def _end_copy(self, pages: PageArray | Sequence[int], free: bool) -> None:
        self._move(pages, COPYING, FREE if free else USED, "finish_copy")
        self._copying_count -= len(pages)
        if free:
            self._free_count += len(pages)

    def check(self) -> None:
        """Assert that free + used + copying == total. O(num_pages)."""
        assert len(self._states) == self.num_pages
        free, used, copying = (self._states.count(bytes([s])) for s in (FREE, USED, COPYING))
        assert free + used + copying == self.num_pages, "a page in no state"
        assert free == self._free_count, f"{free} free pages, {self._free_count} counted"
        assert copying == self._copying_count, f"{copying} copying, {self._copying_count} counted"
        assert used == self.used_count
        assert self._reading_count == int(self._readers.sum())
        assert (self._array[self._readers > 0] == USED).all(), "a page is read that is not in use"
        for copy in self._tied:
            assert copy.reads or (self._array[copy.pages] == COPYING).all(), "a copy lost a page"

    def _move(self, pages: PageArray | Sequence[int], old: int, new: int, operation: str) -> None:
        indexes = self._indexes(pages)
        wrong = indexes[self._array[indexes] != old]
        assert wrong.size == 0, f"{operation}: pages {wrong[:8].tolist()} are not in state {old}"
        assert np.unique(indexes).size == indexes.size, f"{operation}: a page is named twice"
        self._array[indexes] = new

    def _indexes(self, pages: PageArray | Sequence[int]) -> PageArray:
        indexes: PageArray = np.asarray(pages, dtype=np.int32)
        assert indexes.size == 0 or (indexes.min() >= 0 and indexes.max() < self.num_pages), (
            f"foreign page: expected 0 to {self.num_pages - 1}"
        )
        return indexes
