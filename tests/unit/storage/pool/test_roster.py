"""Whose greeting counts: names, epochs and the processes that speak for them."""

from __future__ import annotations

import random

from tests.support.pool_nodes import OffsetClock
from tierkv.storage.pool.roster import NAMES_MAX, TWIN_S, TWINS_MAX, Roster, Standing

A, B, C = (bytes([n]) * 16 for n in range(3))
SEED = 20261129


def test_a_greeting_is_remembered_and_a_stranger_is_nobody() -> None:
    roster = Roster("me")
    assert roster.member_of(A) is None and roster.epoch_of("you") == 0
    assert roster.greet("you", 5, A) is Standing.NEW_LIFE
    assert roster.greet("you", 5, A) is Standing.KNOWN
    assert roster.member_of(A) == ("you", 5)
    roster.check()


def test_nobody_else_has_this_nodes_name() -> None:
    roster = Roster("me")
    assert roster.greet("me", 5, A) is Standing.OWN_NAME
    assert roster.member_of(A) is None


def test_a_later_epoch_is_a_new_life_and_the_former_process_speaks_no_more() -> None:
    roster = Roster("me")
    roster.greet("you", 5, A)
    assert roster.greet("you", 6, B) is Standing.NEW_LIFE
    assert roster.member_of(A) is None and roster.member_of(B) == ("you", 6)
    assert roster.greet("you", 7, B) is Standing.NEW_LIFE, "the same process, fenced meanwhile"
    roster.check()


def test_an_earlier_life_is_fenced_and_so_is_another_process_of_the_same_epoch() -> None:
    roster = Roster("me")
    roster.greet("you", 5, A)
    assert roster.greet("you", 4, A) is Standing.FENCED
    assert roster.greet("you", 5, B) is Standing.FENCED
    assert roster.member_of(A) == ("you", 5) and roster.member_of(B) is None
    roster.check()


def test_of_two_living_nodes_of_one_name_the_first_keeps_it() -> None:
    clock = OffsetClock()
    roster = Roster("me", clock)
    roster.greet("you", 5, A, "first:1")
    assert roster.greet("you", 9, B, "second:1") is Standing.NEW_LIFE, "a restart looks the same"
    assert roster.twin_of("you") is None
    assert roster.greet("you", 5, A, "first:1") is Standing.FENCED, "it lives: it may go above"
    assert (roster.twin_of("you"), roster.address_of("you")) == ("first:1", "second:1")
    assert roster.greet("you", 10, A, "first:1") is Standing.NEW_LIFE
    assert (roster.twin_of("you"), roster.address_of("you")) == ("second:1", "first:1")
    for epoch in (9, 10, 11, 99):
        assert roster.greet("you", epoch, B, "second:1") is Standing.TWIN
        assert roster.member_of(A) == ("you", 10) and roster.member_of(B) is None
        roster.check()
    # Its next life is not the twin's former one, so the twin stays what it is.
    assert roster.greet("you", 12, C, "first:1") is Standing.NEW_LIFE
    assert roster.greet("you", 99, B, "second:1") is Standing.TWIN
    clock.offset_s += TWIN_S + 1
    assert roster.twin_of("you") is None and roster.greeted_s("you") is None
    assert roster.greet("you", 99, B, "second:1") is Standing.NEW_LIFE, "the first is gone"
    roster.check()


def test_twins_of_one_name_are_bounded() -> None:
    roster = Roster("me")
    roster.greet("you", 1, A)
    for number in range(3 * TWINS_MAX):
        epoch = 10 * (number + 1)
        assert roster.greet("you", epoch, number.to_bytes(16, "big") + A) is Standing.NEW_LIFE
        assert roster.greet("you", epoch + 1, A) is Standing.NEW_LIFE
        roster.check()


def test_a_process_that_calls_itself_otherwise_speaks_for_one_name() -> None:
    roster = Roster("me")
    roster.greet("you", 5, A)
    assert roster.greet("she", 9, A) is Standing.NEW_LIFE
    assert roster.member_of(A) == ("she", 9)
    assert roster.epoch_of("you") == 5, "the epoch of a name never falls"
    assert roster.greet("you", 4, C) is Standing.FENCED
    roster.check()


def test_names_are_bounded() -> None:
    roster = Roster("me")
    for number in range(NAMES_MAX):
        token = number.to_bytes(16, "little")
        assert roster.greet(f"n{number}", 1, token) is Standing.NEW_LIFE
    assert roster.greet("one more", 1, b"x" * 16) is Standing.TOO_MANY
    assert roster.greet("n0", 2, b"y" * 16) is Standing.NEW_LIFE, "who is known may go on"
    roster.check()


def test_epochs_never_fall_whoever_greets() -> None:
    print(f"seed {SEED}")
    random_ = random.Random(SEED)
    roster = Roster("me")
    latest: dict[str, int] = {}
    for _ in range(3000):
        name = random_.choice(("a", "b", "c", "me"))
        epoch, token = random_.randrange(1, 40), random_.choice((A, B, C))
        standing = roster.greet(name, epoch, token)
        roster.check()
        assert roster.epoch_of(name) >= latest.get(name, 0)
        latest[name] = roster.epoch_of(name)
        if standing in (Standing.KNOWN, Standing.NEW_LIFE):
            assert roster.member_of(token) == (name, epoch)
