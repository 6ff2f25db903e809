"""Leases of members: deadlines, quarantine, bounds, conservation."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from tests.support.clock import ManualClock
from tests.support.pages import page_keys, put_store
from tierkv.storage.base import PageLease
from tierkv.storage.pool.leases import LeaseTable
from tierkv.storage.store import TieredStore
from tierkv.storage.tiers.host import HostTier

PAGE_BYTES = 4096
OTHER_BYTES = 8192
HOLD_S = 10.0
QUARANTINE_S = 4.0
MAX = 1000
SEED = 20261129


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def store() -> Iterator[TieredStore]:
    capacity = HostTier.capacity_for(PAGE_BYTES, 16)
    with_pages = TieredStore(HostTier(None, PAGE_BYTES, capacity))
    put_store(with_pages, page_keys(*range(16)))
    yield with_pages
    with_pages.check()
    with_pages.close()


@pytest.fixture
def table(clock: ManualClock) -> LeaseTable:
    return LeaseTable(clock, QUARANTINE_S, pages_max=8)


def pages(store: TieredStore, *numbers: int) -> PageLease:
    lease = store.fetch(page_keys(*numbers), 0).take(0)
    assert len(lease.keys) == len(numbers)
    return lease


def leased(store: TieredStore) -> int:
    return store.stats().tiers[0].leased_pages


def grant(table: LeaseTable, member: str, *parts: PageLease, page_bytes: int = PAGE_BYTES) -> int:
    lease = table.grant(member, page_bytes, parts, HOLD_S, MAX)
    assert lease is not None
    table.check()
    return lease


def test_a_released_lease_frees_its_pages_at_once(table: LeaseTable, store: TieredStore) -> None:
    lease = grant(table, "a", pages(store, 0, 1), pages(store, 5))
    assert leased(store) == 3
    assert table.release("a", lease)
    table.check()
    assert leased(store) == 0
    assert not table.release("a", lease)
    assert table.counts().released == 3


def test_a_lease_is_released_by_its_member_only(table: LeaseTable, store: TieredStore) -> None:
    lease = grant(table, "a", pages(store, 0))
    assert not table.release("b", lease)
    assert not table.release("a", lease + 1)
    assert leased(store) == 1
    table.close()


def test_l1_what_is_not_given_back_is_freed_a_quarantine_after_its_hold(
    table: LeaseTable, store: TieredStore, clock: ManualClock
) -> None:
    grant(table, "a", pages(store, 0, 1))
    clock.advance(HOLD_S - 0.001)
    assert (table.expire(), table.counts().quarantined_pages) == (0, 0)
    clock.advance(0.001)
    assert (table.expire(), table.counts().quarantined_pages, leased(store)) == (0, 2, 2)
    clock.advance(QUARANTINE_S - 0.01)
    assert (table.expire(), leased(store)) == (0, 2)
    table.check()
    clock.advance(0.01)
    assert (table.expire(), leased(store)) == (2, 0)
    table.check()
    assert table.expire() == 0


def test_l1_an_overdue_lease_protects_its_pages_and_can_be_given_back(
    table: LeaseTable, store: TieredStore, clock: ManualClock
) -> None:
    lease = grant(table, "a", pages(store, 0))
    clock.advance(HOLD_S + 1)
    table.expire()
    put_store(store, page_keys(*range(100, 116)))
    assert store.lookup(page_keys(0)) != [None], "a page in quarantine was evicted"
    assert table.release("a", lease)
    put_store(store, page_keys(*range(200, 216)))
    assert store.lookup(page_keys(0)) == [None]
    table.check()


def test_leases_of_a_member_that_is_gone_wait_for_its_last_transfer(
    table: LeaseTable, store: TieredStore, clock: ManualClock
) -> None:
    lease = grant(table, "a", pages(store, 0))
    grant(table, "b", pages(store, 1))
    assert table.drop_member("a") == 1
    table.check()
    assert table.counts().quarantined_pages == 1
    assert not table.release("a", lease), "the member's new life has nothing to do with it"
    clock.advance(QUARANTINE_S - 0.01)
    assert (table.expire(), leased(store)) == (0, 2)
    clock.advance(0.01)
    assert (table.expire(), leased(store)) == (1, 1)
    table.check()
    assert table.drop_member("nobody") == 0
    table.close()


def test_a_member_gone_after_its_hold_waits_no_longer_than_before(
    table: LeaseTable, store: TieredStore, clock: ManualClock
) -> None:
    grant(table, "a", pages(store, 0))
    clock.advance(HOLD_S + QUARANTINE_S - 1)
    table.drop_member("a")
    clock.advance(1)
    assert table.expire() == 1


def test_a_member_holds_no_more_than_it_may(
    table: LeaseTable, store: TieredStore, clock: ManualClock
) -> None:
    grant(table, "a", pages(store, *range(8)))
    with pages(store, 8) as one:
        assert table.grant("a", PAGE_BYTES, [one], HOLD_S, MAX) is None
        table.check()
        assert leased(store) == 9, "a refused lease stays the caller's"
    clock.advance(HOLD_S + 1)
    table.expire()
    with pages(store, 8) as one:
        assert table.grant("a", PAGE_BYTES, [one], HOLD_S, MAX) is None, "overdue pages count"
    grant(table, "b", pages(store, 8))
    assert table.counts().refused == 2
    table.drop_member("a")
    grant(table, "a", pages(store, 9))
    assert table.pages_of("a") == 1
    table.close()


def test_all_members_together_hold_no_more_of_a_page_size_than_they_may(
    table: LeaseTable, store: TieredStore
) -> None:
    assert table.grant("a", PAGE_BYTES, [pages(store, 0, 1)], HOLD_S, 3) is not None
    with pages(store, 2, 3) as two:
        assert table.grant("b", PAGE_BYTES, [two], HOLD_S, 3) is None
    assert table.grant("b", OTHER_BYTES, [pages(store, 2, 3)], HOLD_S, 3) is not None
    table.drop_member("a")
    with pages(store, 4, 5) as two:
        assert table.grant("b", PAGE_BYTES, [two], HOLD_S, 3) is None, "quarantined pages count"
    table.close()
    assert leased(store) == 0


def test_a_page_size_whose_memory_is_unregistered_is_freed_whole(
    table: LeaseTable, store: TieredStore
) -> None:
    grant(table, "a", pages(store, 0))
    grant(table, "b", pages(store, 1))
    table.drop_member("b")
    grant(table, "a", pages(store, 2), page_bytes=OTHER_BYTES)
    assert table.drop_class(PAGE_BYTES) == 2
    table.check()
    assert leased(store) == 1
    table.close()
    table.close()
    table.check()
    assert leased(store) == 0


def test_l2_leases_are_conserved_whatever_happens(
    table: LeaseTable, store: TieredStore, clock: ManualClock
) -> None:
    print(f"seed={SEED}")
    rng = random.Random(SEED)
    open_: list[tuple[str, int]] = []
    freed = 0
    for _ in range(600):
        step = rng.randrange(10)
        if step < 5:
            lease = pages(store, *rng.sample(range(16), rng.randint(1, 3)))
            member = rng.choice("abc")
            number = table.grant(member, PAGE_BYTES, [lease], rng.uniform(1, HOLD_S), 20)
            if number is None:
                lease.release()
            else:
                open_.append((member, number))
        elif step < 7 and open_:
            freed += table.release(*open_.pop(rng.randrange(len(open_))))
        elif step < 9:
            clock.advance(rng.uniform(0, 3))
            freed += table.expire() > 0
        else:
            table.drop_member(rng.choice("abc"))
        table.check()
    assert freed > 50
    counts = table.counts()
    assert counts.granted == counts.pages + counts.released + counts.expired
    clock.advance(HOLD_S + QUARANTINE_S)
    table.expire()
    table.check()
    assert (table.counts().leases, leased(store)) == (0, 0)


def test_what_was_released_leaves_nothing_behind_in_the_queue_of_deadlines(
    table: LeaseTable, store: TieredStore
) -> None:
    for _ in range(1000):
        assert table.release("a", grant(table, "a", pages(store, 0)))
    assert len(table._due) <= 2 * 1 + 64


def test_slots_that_several_leases_hold_count_once_in_their_page_size(
    table: LeaseTable, store: TieredStore, clock: ManualClock
) -> None:
    # As when the answers that granted them were lost: the member asks again.
    for _ in range(3):
        assert table.grant("a", PAGE_BYTES, [pages(store, 0, 1)], HOLD_S, 3) is not None
        table.check()
    assert leased(store) == 2 and table.counts().pages == 6
    with pages(store, 1, 2, 3) as more:
        assert table.grant("b", PAGE_BYTES, [more], HOLD_S, 3) is None, "four slots"
    assert table.grant("b", PAGE_BYTES, [pages(store, 1, 2)], HOLD_S, 3) is not None
    table.check()
    clock.advance(HOLD_S + QUARANTINE_S)
    assert table.expire() == 8 and leased(store) == 0
    table.check()
