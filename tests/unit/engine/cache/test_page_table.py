"""The page table of one request; check() after each change."""

from __future__ import annotations

import random

import numpy as np
import pytest

from tierkv.engine.cache.page_table import PageTable


def test_positions_map_to_slots_of_their_pages() -> None:
    table = PageTable(4, [7, 3])
    table.check()
    assert (len(table), table.capacity_tokens, table.last_page) == (2, 8, 3)
    slots = table.slots(2, 7)
    assert slots.dtype == np.int64
    assert slots.tolist() == [30, 31, 12, 13, 14]
    assert table.slots(3, 3).tolist() == []


def test_a_new_table_is_empty() -> None:
    table = PageTable(16)
    table.check()
    assert (len(table), table.capacity_tokens, table.last_page) == (0, 0, None)
    assert table.pages.tolist() == []
    assert table.slots(0, 0).tolist() == []
    assert table.slot_run(0, 0) == slice(0, 0)
    assert table.truncate(0).tolist() == []


def test_slots_beyond_the_pages_assert() -> None:
    table = PageTable(4, [1])
    for start, end in ((0, 5), (-1, 2), (3, 2)):
        with pytest.raises(AssertionError):
            table.slots(start, end)
        with pytest.raises(AssertionError):
            table.slot_run(start, end)


def test_truncate_keeps_the_pages_that_tokens_need() -> None:
    table = PageTable(4, [5, 6, 7, 8])
    assert table.truncate(9).tolist() == [8]
    table.check()
    assert table.truncate(8).tolist() == [7]
    assert table.pages.tolist() == [5, 6]
    table.append([9])
    table.check()
    assert table.pages.tolist() == [5, 6, 9]
    assert table.truncate(0).tolist() == [5, 6, 9]
    with pytest.raises(AssertionError):
        table.truncate(1)


def test_replace_swaps_pages_in_place() -> None:
    table = PageTable(2, [5, 6, 7])
    table.replace(1, [2, 3])
    table.check()
    assert table.pages.tolist() == [5, 2, 3]
    with pytest.raises(AssertionError):
        table.replace(2, [8, 9])


def test_slot_run_is_a_slice_only_when_pages_are_adjacent() -> None:
    table = PageTable(4, [7, 8, 9, 2])
    assert table.slot_run(0, 12) == slice(28, 40)
    assert table.slot_run(5, 11) == slice(33, 39)
    assert table.slot_run(13, 16) == slice(9, 12)
    assert table.slot_run(0, 13) is None
    # A page that ends before the range does not matter.
    assert table.slot_run(8, 12) == slice(36, 40)
    assert PageTable(4, [9, 8]).slot_run(0, 8) is None


def test_check_notices_a_page_twice() -> None:
    with pytest.raises(AssertionError):
        PageTable(4, [1, 2, 1]).check()


@pytest.mark.parametrize("seed", range(3))
def test_random_use_agrees_with_a_list(seed: int) -> None:
    rng = random.Random(seed)
    size = rng.choice([1, 3, 16])
    table, model, fresh = PageTable(size), list[int](), 0
    for _ in range(200):
        if rng.random() < 0.7:
            count = rng.randrange(20)
            model += range(fresh, fresh + count)
            table.append(np.arange(fresh, fresh + count, dtype=np.int32))
            fresh += count + rng.randrange(2)
        else:
            tokens = rng.randrange(len(model) * size + 1)
            kept = -(-tokens // size)
            assert table.truncate(tokens).tolist() == model[kept:]
            model = model[:kept]
        table.check()
        start, end = sorted(rng.randrange(len(model) * size + 1) for _ in range(2))
        expected = [model[t // size] * size + t % size for t in range(start, end)]
        assert table.slots(start, end).tolist() == expected
        run = table.slot_run(start, end)
        adjacent = expected == list(range(expected[0], expected[-1] + 1)) if expected else True
        assert (run is not None) == adjacent
        if run is not None and expected:
            assert list(range(run.start, run.stop)) == expected
