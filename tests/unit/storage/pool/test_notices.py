"""What is logged of the pool: once, again after a while, and shown while it lasts."""

from __future__ import annotations

import pytest

from tests.support.clock import ManualClock
from tierkv.storage.pool.notices import NOTICES_MAX, REPEAT_S, Notices


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    found = [record.getMessage() for record in caplog.records]
    caplog.clear()
    return found


def test_a_text_is_logged_once_and_again_after_a_while(caplog: pytest.LogCaptureFixture) -> None:
    clock = ManualClock()
    notices = Notices(clock)
    for _ in range(5):
        notices.tell("two nodes")
        notices.tell("a third", "said otherwise each time")
        clock.advance(REPEAT_S / 10)
        notices.check()
    assert lines(caplog) == ["pool two nodes", "pool said otherwise each time"]
    assert notices.told("two nodes") and not notices.told("something else")
    clock.advance(REPEAT_S)
    assert not notices.told("two nodes")
    notices.tell("two nodes")
    assert lines(caplog) == ["pool two nodes"]
    notices.check()


def test_a_trouble_is_shown_until_it_was_not_seen_for_long_enough() -> None:
    clock = ManualClock()
    notices = Notices(clock)
    notices.tell("twins", lasts_s=30.0)
    notices.tell("only logged")
    for _ in range(10):
        clock.advance(20.0)
        notices.tell("twins", lasts_s=30.0)
    assert notices.lasting() == ["twins"]
    clock.advance(31.0)
    assert notices.lasting() == []
    notices.tell("twins", lasts_s=30.0)
    notices.over("twins")
    assert notices.lasting() == []


def test_what_others_make_up_is_bounded(caplog: pytest.LogCaptureFixture) -> None:
    clock = ManualClock()
    notices = Notices(clock)
    for number in range(3 * NOTICES_MAX):
        notices.tell(f"text {number}", lasts_s=5.0)
        notices.check()
    assert len(lines(caplog)) == NOTICES_MAX and len(notices.lasting()) == NOTICES_MAX
    clock.advance(REPEAT_S + 1)
    notices.tell("one more", lasts_s=5.0)
    assert lines(caplog) == ["pool one more"] and notices.lasting() == ["one more"]
    notices.check()
