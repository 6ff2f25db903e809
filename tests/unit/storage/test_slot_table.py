"""The slot table: exact LRU over many slots, against a naive model."""

from __future__ import annotations

import random

import pytest

from tests.unit.storage.tier_conformance import page_key
from tierkv.storage.tiers.slot_table import SlotTable
from tierkv.storage.types import PageKey

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
    leased: list[PageKey] = []
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


@pytest.mark.parametrize("seed", range(3))
def test_coldest_of_some_owners_is_exact_lru_among_theirs(seed: int) -> None:
    chance = random.Random(seed)
    table = SlotTable(SLOTS, SLOTS)
    order: dict[PageKey, int] = {}

    def publish(slot: int) -> None:
        key, owner = page_key(chance.getrandbits(64)), chance.randrange(12)
        table.publish(slot, key, b"", table.next_tick(), owner)
        order[key] = owner

    for slot in table.take(SLOTS):
        publish(slot)
    for step in range(400):
        owners = chance.sample(range(12), chance.randrange(13))
        if chance.random() < 0.3:
            key = chance.choice(list(order))
            table.touch(table.index[key])
            order[key] = order.pop(key)
        count = chance.randrange(1, 30)
        expected = [key for key, owner in order.items() if owner in owners][:count]
        slots = table.coldest(count, owners)
        assert [table.keys[slot] for slot in slots] == expected, f"seed {seed} step {step}"
        for key in expected:
            table.remove(key)
            del order[key]
        for slot in table.take(chance.randrange(30)):
            publish(slot)
    table.check()


def test_a_page_that_came_back_is_as_cold_as_it_was() -> None:
    table = filled(10)
    (slot,) = table.coldest(1)
    table.detach(slot)
    assert table.coldest(1) == [slot + 1]
    table.reattach(slot)
    assert table.coldest(2) == [slot, slot + 1]
    table.check()


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
