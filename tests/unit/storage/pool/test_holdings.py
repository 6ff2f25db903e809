"""The journal of what a node holds: what a delta says, and when it says that a snapshot is due."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from tests.support.clock import ManualClock
from tests.support.pages import page_key, page_keys
from tierkv.storage.pool.holdings import SNAPSHOT_S, Delta, Holdings, fingerprint, fingerprints
from tierkv.storage.types import PageKey


class Shelf:
    """The two questions a journal asks of its store, and how often it asked."""

    def __init__(self) -> None:
        self.held: set[PageKey] = set()
        self.asked: list[list[PageKey]] = []
        self.listed = 0

    def lookup_here(self, keys: Sequence[PageKey]) -> list[bool]:
        self.asked.append(list(keys))
        return [key in self.held for key in keys]

    def keys_here(self) -> list[PageKey]:
        self.listed += 1
        return list(self.held)


@pytest.fixture
def shelf() -> Shelf:
    return Shelf()


def gain(shelf: Shelf, holdings: Holdings, *numbers: int) -> None:
    keys = page_keys(*numbers)
    shelf.held.update(keys)
    holdings.gained(keys)


def lose(shelf: Shelf, holdings: Holdings, *numbers: int) -> None:
    keys = page_keys(*numbers)
    shelf.held.difference_update(keys)
    holdings.lost(keys)


def changes(holdings: Holdings, since: int, limit: int = 1000) -> Delta:
    delta = holdings.changes(holdings.token, since, limit)
    holdings.check()
    assert delta is not None
    return delta


def marks(*numbers: int) -> list[int]:
    return sorted(fingerprint(page_key(number)) for number in numbers)


def test_fingerprints_are_the_first_eight_bytes_little_endian() -> None:
    key = PageKey(bytes(range(1, 33)))
    assert fingerprint(key) == 0x0807060504030201
    other = PageKey(b"\xff" * 32)
    found = fingerprints([key, other])
    assert found.dtype == np.uint64 and found.tolist() == [0x0807060504030201, 2**64 - 1]
    found[0] = 0
    assert fingerprints([]).size == 0


def test_a_key_of_another_length_is_a_bug_here() -> None:
    with pytest.raises(AssertionError):
        fingerprints([PageKey(b"short")])


def test_nothing_happened(shelf: Shelf) -> None:
    delta = changes(Holdings(shelf), 0)
    assert (delta.seq, delta.added.size, delta.removed.size, delta.more) == (0, 0, 0, False)


def test_gained_and_lost(shelf: Shelf) -> None:
    holdings = Holdings(shelf)
    gain(shelf, holdings, 1, 2, 3)
    lose(shelf, holdings, 2)
    delta = changes(holdings, 0)
    assert sorted(delta.added.tolist()) == marks(1, 3)
    assert delta.removed.tolist() == marks(2)
    assert delta.seq == holdings.seq == 4 and not delta.more
    assert changes(holdings, 3).removed.tolist() == marks(2)
    assert changes(holdings, 4).removed.size == 0


def test_a_page_that_left_host_but_not_nvme_is_still_held(shelf: Shelf) -> None:
    holdings = Holdings(shelf)
    gain(shelf, holdings, 1)
    holdings.lost(page_keys(1))
    delta = changes(holdings, 0)
    assert delta.added.tolist() == marks(1), "a peer that heard nothing yet must learn of it"
    assert delta.removed.size == 0
    lose(shelf, holdings, 1)
    assert changes(holdings, delta.seq).removed.tolist() == marks(1)


def test_only_losses_are_asked_for_and_not_when_gained_again(shelf: Shelf) -> None:
    holdings = Holdings(shelf)
    gain(shelf, holdings, 1, 2)
    lose(shelf, holdings, 1)
    gain(shelf, holdings, 1)
    delta = changes(holdings, 0)
    assert shelf.asked == [] and sorted(delta.added.tolist()) == marks(1, 2)


def test_a_delta_is_cut_at_the_limit_and_goes_on(shelf: Shelf) -> None:
    holdings = Holdings(shelf)
    gain(shelf, holdings, *range(10))
    first = changes(holdings, 0, limit=4)
    assert first.more and first.seq == 4 and len(first.added) == 4
    second = changes(holdings, first.seq, limit=6)
    assert not second.more and second.seq == 10 and len(second.added) == 6
    assert sorted(first.added.tolist() + second.added.tolist()) == marks(*range(10))


@pytest.mark.parametrize("start", [0, 5, 8])
def test_the_ring_keeps_the_last_entries_exactly(shelf: Shelf, start: int) -> None:
    holdings = Holdings(shelf, journal_max=8)
    gain(shelf, holdings, *range(100, 100 + start))
    gain(shelf, holdings, *range(8))
    delta = changes(holdings, start)
    assert sorted(delta.added.tolist()) == marks(*range(8)), "the whole ring"
    assert changes(holdings, start + 7).added.tolist() == marks(7)
    if start:
        assert holdings.changes(holdings.token, start - 1, 10) is None, "one too old"


def test_another_token_and_a_seq_to_come_need_a_snapshot(shelf: Shelf) -> None:
    holdings, later = Holdings(shelf), Holdings(shelf)
    gain(shelf, holdings, 1)
    assert holdings.token != later.token and 0 not in (holdings.token, later.token)
    assert holdings.changes(later.token, 0, 10) is None
    assert holdings.changes(0, 0, 10) is None
    assert holdings.changes(holdings.token, 2, 10) is None
    assert holdings.changes(holdings.token, -1, 10) is None


def test_a_batch_longer_than_the_journal(shelf: Shelf) -> None:
    holdings = Holdings(shelf, journal_max=8)
    gain(shelf, holdings, *range(20))
    assert holdings.changes(holdings.token, 11, 10) is None
    assert sorted(changes(holdings, 12).added.tolist()) == marks(*range(12, 20))


def test_two_keys_of_one_fingerprint_are_not_both_added_and_removed(shelf: Shelf) -> None:
    holdings = Holdings(shelf)
    one, two = PageKey(b"same-eig" * 4), PageKey(b"same-eig" + b"other123" * 3)
    shelf.held.add(two)
    holdings.gained([one, two])
    holdings.lost([one])
    delta = changes(holdings, 0)
    assert delta.added.tolist() == [fingerprint(one)] and delta.removed.size == 0
    shelf.held.update((one, page_key(1)))
    snapshot = holdings.snapshot().fingerprints.tolist()
    assert snapshot == sorted([fingerprint(one), fingerprint(page_key(1))]), "ascending, each once"


def test_snapshot_is_sorted_shared_and_read_only(shelf: Shelf) -> None:
    holdings = Holdings(shelf)
    gain(shelf, holdings, *range(50))
    snapshot = holdings.snapshot()
    assert snapshot.fingerprints.tolist() == marks(*range(50))
    assert (snapshot.token, snapshot.seq) == (holdings.token, 50)
    assert holdings.snapshot() is snapshot and shelf.listed == 1
    with pytest.raises(ValueError, match="read-only"):
        snapshot.fingerprints[0] = 1


def test_snapshot_is_given_again_while_young(shelf: Shelf) -> None:
    clock = ManualClock()
    holdings = Holdings(shelf, clock=clock)
    gain(shelf, holdings, 1)
    first = holdings.snapshot()
    gain(shelf, holdings, 2)
    clock.advance(SNAPSHOT_S - 0.1)
    assert holdings.snapshot() is first
    assert changes(holdings, first.seq).added.tolist() == marks(2), "the journal has the rest"
    clock.advance(0.2)
    assert holdings.snapshot().fingerprints.tolist() == marks(1, 2)
    clock.advance(100 * SNAPSHOT_S)
    holdings.snapshot()
    assert shelf.listed == 2, "nothing changed: no need to build it again"


def test_snapshot_that_the_journal_outran_is_built_again(shelf: Shelf) -> None:
    """A peer that loads it must be able to go on from there."""
    holdings = Holdings(shelf, journal_max=8, clock=ManualClock())
    gain(shelf, holdings, 1)
    first = holdings.snapshot()
    gain(shelf, holdings, *range(10, 14))
    assert holdings.snapshot() is first
    gain(shelf, holdings, 14)
    assert holdings.snapshot().seq == 6


def test_changes_while_a_snapshot_is_built_are_in_the_journal_after_it(shelf: Shelf) -> None:
    class Moving(Shelf):
        def keys_here(self) -> list[PageKey]:
            found = super().keys_here()
            gain(self, holdings, 7)
            lose(self, holdings, 1)
            return found

    moving = Moving()
    holdings = Holdings(moving)
    gain(moving, holdings, 1, 2)
    snapshot = holdings.snapshot()
    assert snapshot.seq == 2 and snapshot.fingerprints.tolist() == marks(1, 2)
    delta = changes(holdings, snapshot.seq)
    assert delta.added.tolist() == marks(7) and delta.removed.tolist() == marks(1)


def test_the_store_is_asked_with_no_lock_held(shelf: Shelf) -> None:
    """gained() is called with the store's lock held: the other way round would be a deadlock."""

    class Asking(Shelf):
        def lookup_here(self, keys: Sequence[PageKey]) -> list[bool]:
            holdings.gained(page_keys(99))
            return super().lookup_here(keys)

        def keys_here(self) -> list[PageKey]:
            holdings.lost(page_keys(99))
            return super().keys_here()

    asking = Asking()
    holdings = Holdings(asking)
    lose(asking, holdings, 1)
    assert changes(holdings, 0).removed.tolist() == marks(1)
    holdings.snapshot()
    assert holdings.seq == 3
