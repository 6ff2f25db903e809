"""The page table of one request: token position -> page, and from there to token slots.

Owns a growable array of page indexes. Does not own the pages: shared ones are the radix tree's,
private ones the request's, and who is who is the request's business. Called by engine/serve.

Invariants, asserted by check(): pages are distinct and not negative; position t lies in page
t // page_tokens at offset t % page_tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

PageArray = npt.NDArray[np.int32]
SlotArray = npt.NDArray[np.int64]

FIRST_CAPACITY = 16


class PageTable:
    """Pages of one sequence in token order."""

    __slots__ = ("_count", "_pages", "page_tokens")

    def __init__(self, page_tokens: int, pages: PageArray | Sequence[int] = ()) -> None:
        assert page_tokens >= 1, f"page of {page_tokens} tokens"
        self.page_tokens = page_tokens
        self._pages: PageArray = np.empty(FIRST_CAPACITY, np.int32)
        self._count = 0
        self.append(pages)

    def __len__(self) -> int:
        """Pages."""
        return self._count

    @property
    def pages(self) -> PageArray:
        """int32[pages], a view that the next change of the table may invalidate. Not to write."""
        return self._pages[: self._count]

    @property
    def capacity_tokens(self) -> int:
        """Tokens that the pages have room for."""
        return self._count * self.page_tokens

    @property
    def last_page(self) -> int | None:
        """Where PagePool.allocate(after=...) should go on; None when empty."""
        return int(self._pages[self._count - 1]) if self._count else None

    def append(self, pages: PageArray | Sequence[int]) -> None:
        """Add pages at the end. Amortised O(pages added)."""
        count = self._count + len(pages)
        if count > len(self._pages):
            grown = np.empty(max(count, 2 * len(self._pages)), np.int32)
            grown[: self._count] = self._pages[: self._count]
            self._pages = grown
        self._pages[self._count : count] = pages
        self._count = count

    def replace(self, first: int, pages: PageArray | Sequence[int]) -> None:
        """Put `pages` in place of those from index `first` on (the tree had its own copies)."""
        assert 0 <= first <= first + len(pages) <= self._count, f"replace beyond {self._count}"
        self._pages[first : first + len(pages)] = pages

    def truncate(self, tokens: int) -> PageArray:
        """Keep the pages that the first `tokens` tokens need; return those that were dropped."""
        kept = -(-tokens // self.page_tokens)
        assert 0 <= kept <= self._count, f"truncate to {tokens} of {self.capacity_tokens} tokens"
        dropped = self._pages[kept : self._count].copy()
        self._count = kept
        return dropped

    def slots(self, start: int, end: int) -> SlotArray:
        """Token slots of positions [start, end): page * page_tokens + offset, int64[end - start].

        A new array, fit to index the pool's token axis. O(end - start).
        """
        assert 0 <= start <= end <= self.capacity_tokens, f"slots [{start}, {end})"
        positions = np.arange(start, end, dtype=np.int64)
        pages, offsets = np.divmod(positions, self.page_tokens)
        slots: SlotArray = self._pages[pages].astype(np.int64) * self.page_tokens + offsets
        return slots

    def slot_run(self, start: int, end: int) -> slice | None:
        """Positions [start, end) as one slice of token slots when their pages are adjacent.

        None when they are not. Lets attention read a view instead of gathering. O(pages).
        """
        assert 0 <= start <= end <= self.capacity_tokens, f"slot_run [{start}, {end})"
        if start == end:
            return slice(0, 0)
        first, last = start // self.page_tokens, (end - 1) // self.page_tokens
        pages = self._pages[first : last + 1]
        if len(pages) > 1 and not (np.diff(pages) == 1).all():
            return None
        slot = int(pages[0]) * self.page_tokens + start % self.page_tokens
        return slice(slot, slot + end - start)

    def check(self) -> None:
        """Assert the invariants of the module docstring. O(pages log pages)."""
        pages = self.pages
        assert 0 <= self._count <= len(self._pages)
        assert np.unique(pages).size == pages.size, "a page is in the table twice"
        assert pages.size == 0 or int(pages.min()) >= 0, "a negative page index"
