"""The page pool: all or nothing, adjacent pages first, no page lost; check() after each step."""

from __future__ import annotations

import random

import numpy as np
import pytest

from tierkv.engine.cache.page_pool import PagePool, PagesInCopy
from tierkv.storage.errors import CapacityError, ConfigError


def pool_with_free(free: list[int], num_pages: int) -> PagePool:
    pool = PagePool(num_pages, 16)
    assert pool.allocate(num_pages) is not None
    pool.free(free)
    pool.check()
    return pool


def take(pool: PagePool, count: int, after: int | None = None) -> list[int]:
    pages = pool.allocate(count, after)
    pool.check()
    assert pages is not None and pages.dtype == np.int32
    return [int(page) for page in pages]


@pytest.mark.parametrize(("pages", "tokens"), [(0, 16), (-1, 16), (4, 0)])
def test_a_pool_below_one_page_is_a_capacity_error(pages: int, tokens: int) -> None:
    with pytest.raises(CapacityError, match="raise the KV budget"):
        PagePool(pages, tokens)


@pytest.mark.parametrize(("low", "high"), [(-1, 0), (3, 2), (0, 9), (9, None)])
def test_watermarks_out_of_order_are_a_config_error(low: int, high: int | None) -> None:
    with pytest.raises(ConfigError, match="watermarks"):
        PagePool(8, 16, low, high)


def test_allocate_is_all_or_nothing() -> None:
    pool = PagePool(4, 16)
    assert pool.allocate(5) is None
    assert pool.free_count == 4
    assert take(pool, 0) == []
    assert take(pool, 4) == [0, 1, 2, 3]
    assert pool.allocate(1) is None
    assert take(pool, 0) == []


def test_allocate_goes_on_right_after_a_page() -> None:
    pool = pool_with_free([0, 1, 2, 5, 6, 7], 8)
    assert take(pool, 2, after=4) == [5, 6]
    assert take(pool, 2, after=6) == [0, 1]
    assert take(pool, 1, after=7) == [2]


def test_allocate_takes_the_first_run_that_fits() -> None:
    pool = pool_with_free([1, 3, 4, 6, 7, 8], 10)
    assert take(pool, 3) == [6, 7, 8]
    assert take(pool, 2) == [3, 4]


def test_allocate_uses_few_runs_when_fragmented() -> None:
    pool = pool_with_free([0, 2, 3, 5, 6, 7, 9, 11, 12], 13)
    # Of the runs [0] [2,3] [5,6,7] [9] [11,12] two are enough; in ascending order.
    assert take(pool, 5) == [5, 6, 7, 11, 12]
    pool = pool_with_free([0, 2, 3, 5, 6, 7, 9], 10)
    # The rest after [5,6,7] is one page: the shortest run that is enough leaves [2,3] whole.
    assert take(pool, 4) == [5, 6, 7, 9]
    assert take(pool, 2) == [2, 3]
    assert take(pool, 1) == [0]


def test_copying_pages_are_neither_free_nor_used() -> None:
    pool = PagePool(4, 16)
    take(pool, 3)
    first, second = pool.begin_copy([0]), pool.begin_copy([1])
    pool.check()
    assert (pool.free_count, pool.used_count, pool.copying_count) == (1, 1, 2)
    assert pool.copying_among(np.array([0, 2, 1], np.int32)) == 2
    assert pool.allocate(2) is None
    with pytest.raises(AssertionError):
        pool.free([1])
    with pytest.raises(AssertionError):
        pool.begin_copy([1])
    pool.finish_copy(first, free=True)
    pool.check()
    pool.finish_copy(second, free=False)
    pool.check()
    assert (pool.free_count, pool.used_count, pool.copying_count) == (2, 2, 0)
    with pytest.raises(AssertionError):
        pool.finish_copy(second, free=True)
    pool.free([1, 2])
    pool.check()
    assert pool.free_count == 4


@pytest.mark.parametrize("pages", [[0, 0], [3], [4], [-1], [0, 3], [2**31 - 1]])
def test_l2_double_free_and_foreign_pages_assert_and_change_nothing(pages: list[int]) -> None:
    pool = PagePool(4, 16)
    take(pool, 3)
    with pytest.raises(AssertionError):
        pool.free(pages)
    pool.check()
    assert pool.free_count == 1
    pool.free([2, 0, 1])
    with pytest.raises(AssertionError):
        pool.free([2])
    pool.check()


def test_freeing_nothing_is_allowed() -> None:
    pool = PagePool(2, 16)
    pool.free([])
    pool.finish_copy(pool.begin_copy(np.empty(0, np.int32)), free=True)
    pool.check()
    assert pool.copying_among(np.empty(0, np.int32)) == 0


def test_watermarks_hold_pages_back_and_ask_for_more() -> None:
    pool = PagePool(10, 16, watermark_low=3, watermark_high=5)
    assert (pool.available, pool.shortfall) == (7, 0)
    take(pool, 7)
    assert (pool.available, pool.shortfall) == (0, 0)
    take(pool, 1)
    assert (pool.available, pool.shortfall) == (0, 3)
    assert take(pool, 2) == [8, 9]
    assert pool.shortfall == 5
    pool.free([0, 1, 2, 3, 4])
    assert (pool.available, pool.shortfall) == (2, 0)


@pytest.mark.parametrize("seed", range(4))
def test_random_use_never_loses_or_doubles_a_page(seed: int) -> None:
    rng = random.Random(seed)
    pool = PagePool(60, 16)
    used: list[int] = []
    copies: list[PagesInCopy] = []
    for _ in range(400):
        action = rng.randrange(4)
        copying = [page for copy in copies for page in copy.page_list()]
        if action == 0:
            count = rng.randrange(12)
            pages = pool.allocate(count, rng.choice([None, *used]))
            assert (pages is None) == (count > 60 - len(used) - len(copying))
            if pages is not None:
                assert len(pages) == count and sorted(pages) == list(pages)
                assert not set(pages.tolist()) & {*used, *copying}
                used += pages.tolist()
        elif action == 1:
            rng.shuffle(used)
            count = rng.randrange(len(used) + 1)
            pool.free(used[:count])
            used = used[count:]
        elif action == 2:
            rng.shuffle(used)
            count = rng.randrange(len(used) // 2 + 1)
            copies.append(pool.begin_copy(used[:count]))
            used = used[count:]
        elif copies:
            copy, free = copies.pop(rng.randrange(len(copies))), rng.random() < 0.5
            pool.finish_copy(copy, free)
            if not free:
                used += copy.page_list()
        pool.check()
        copying = [page for copy in copies for page in copy.page_list()]
        assert (pool.used_count, pool.copying_count) == (len(used), len(copying))


class Copy:
    """A copy whose end the test decides."""

    done = False


def test_w2_pages_tied_to_a_copy_cannot_be_given_back_before_its_end() -> None:
    pool = PagePool(6, 16)
    pages = pool.allocate(3)
    assert pages is not None
    held = pool.begin_copy(pages)
    copy = Copy()
    held.attach(copy)
    pool.check()
    with pytest.raises(AssertionError, match="has not ended"):
        pool.finish_copy(held, free=True)
    with pytest.raises(AssertionError, match="not in state"):
        pool.free(pages)
    copy.done = True
    pool.finish_copy(held, free=True)
    pool.check()
    assert pool.free_count == 6
    with pytest.raises(AssertionError, match="ends once"):
        pool.finish_copy(held, free=True)


def test_w2_pages_that_a_copy_reads_are_neither_freed_nor_written() -> None:
    pool = PagePool(6, 16)
    pages = pool.allocate(2)
    assert pages is not None
    first, second = pool.begin_read(pages), pool.begin_read(pages[:1])
    copy = Copy()
    first.attach(copy)
    assert (pool.used_count, pool.copying_count) == (2, 0)
    for forbidden in (pool.free, pool.begin_copy, pool.check_writable):
        with pytest.raises(AssertionError, match="being read"):
            forbidden(pages)
    with pytest.raises(AssertionError, match="has not ended"):
        pool.finish_copy(first, free=False)
    copy.done = True
    with pytest.raises(AssertionError, match="stay their holder's"):
        pool.finish_copy(first, free=True)
    pool.finish_copy(first, free=False)
    pool.check()
    with pytest.raises(AssertionError, match="being read"):
        pool.free(pages[:1])
    # A copy that never began ties nothing.
    pool.finish_copy(second, free=False)
    pool.free(pages)
    pool.check()


def test_a_copy_takes_its_pages_once_and_only_while_they_are_its_own() -> None:
    pool = PagePool(4, 16)
    pages = pool.allocate(2)
    assert pages is not None
    held = pool.begin_copy(pages)
    pool.finish_copy(held, free=False)
    with pytest.raises(AssertionError, match="before the copy began"):
        held.attach(Copy())
    again = pool.begin_copy(pages)
    again.attach(Copy())
    with pytest.raises(AssertionError, match="one copy only"):
        again.attach(Copy())


def test_w2_a_pass_may_write_pages_of_no_copy_only() -> None:
    pool = PagePool(6, 4)
    pages = pool.allocate(6)
    assert pages is not None
    pool.check_writable(pages)
    restoring, demoting = pool.begin_copy(pages[:2]), pool.begin_read(pages[2:4])
    pool.check_writable(pages[4:])
    with pytest.raises(AssertionError, match="are under copy"):
        pool.check_writable(pages[1:2])
    with pytest.raises(AssertionError, match="being read"):
        pool.check_writable(pages[2:3])
    pool.finish_copy(restoring, free=False)
    pool.finish_copy(demoting, free=False)
    pool.check_writable(pages)
