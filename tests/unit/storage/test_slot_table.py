"""The slot table: exact LRU over many slots, against a naive model."""

from __future__ import annotations

import random

import pytest

from tests.unit.storage.tier_conformance import page_key
from tierkv.storage.tiers.slot_table import SlotTable

SLOTS = 3000


def filled(count: int) -> SlotTable:
    table = SlotTable(SLOTS, SLOTS)
    for number, slot in enumerate(table.take(count)):
        table.publish(slot, page_key(number), b"", table.next_tick())
    return table


@pytest.mark.parametrize("seed", range(3))
def test_coldest_is_exact_lru_whatever_is_touched_leased_or_removed(seed: int) -> None:
    chance = random.Random(seed)
    table = filled(SLOTS)
    order = dict.fromkeys(page_key(n) for n in range(SLOTS))
    leased: list[bytes] = []
    for step in range(400):
        action = chance.randrange(4)
        known = chance.choice(list(order))
        if action == 0:
            table.touch(table.index[known])
            order[known] = order.pop(known)
        elif action == 1 and len(leased) < 50:
            table.lease([known])
            order[known] = order.pop(known)
            leased.append(known)
        elif action == 2 and leased:
            key = leased.pop(chance.randrange(len(leased)))
            table.unlease(table.index[key])
        else:
            count = chance.randrange(1, 8)
            expected = [k for k in order if k not in leased][:count]
            slots = table.coldest(count)
            assert [table.keys[s] for s in slots] == expected, f"seed {seed} step {step}"
            for key in expected:
                table.remove(key)
                del order[key]
    table.check()
    rest = [k for k in order if k not in leased]
    assert [table.keys[s] for s in table.coldest(SLOTS)] == rest, f"seed {seed}"


def test_leased_pages_at_the_cold_end_hide_nothing() -> None:
    table = filled(SLOTS)
    table.lease([page_key(n) for n in range(2500)])
    # Leasing made them the hottest; make the others hotter still.
    for number in range(2500, SLOTS):
        table.touch(table.index[page_key(number)])
    slots = table.coldest(SLOTS)
    assert [table.keys[s] for s in slots] == [page_key(n) for n in range(2500, SLOTS)]
    table.check()


def test_slots_are_taken_in_order_and_new_ones_last() -> None:
    table = SlotTable(6, 2)
    assert table.take(3) == [0, 1]
    table.give_back(1)
    table.grow(5)
    assert table.take(9) == [1, 2, 3, 4]
    assert (table.free, table.ready) == (1, 0)
    table.check()
