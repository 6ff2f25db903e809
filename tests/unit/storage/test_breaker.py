"""The breaker's three states, and the watch that runs deadlines."""

from __future__ import annotations

import threading

from tests.support.clock import ManualClock
from tierkv.storage.breaker import Breaker
from tierkv.storage.clock import SystemClock
from tierkv.storage.deadlines import SLACK, DeadlineWatch

WAIT_S = 20.0


def tripped(clock: ManualClock) -> Breaker:
    breaker = Breaker(clock, failures_max=2, open_s=5.0)
    breaker.failed()
    assert breaker.closed
    breaker.failed()
    breaker.check()
    assert not breaker.closed
    return breaker


def test_failures_in_a_row_open_it_and_time_half_opens_it() -> None:
    clock = ManualClock()
    breaker = tripped(clock)
    clock.advance(4.9)
    assert not breaker.closed
    clock.advance(0.2)
    assert breaker.closed and breaker.trips == 1


def test_a_success_between_failures_starts_the_count_again() -> None:
    breaker = Breaker(ManualClock(), failures_max=2, open_s=5.0)
    breaker.failed()
    breaker.succeeded()
    breaker.failed()
    assert breaker.closed


def test_one_failure_beyond_doubt_opens_it_once() -> None:
    clock = ManualClock()
    breaker = Breaker(clock, failures_max=3, open_s=5.0)
    for _ in range(2):
        breaker.failed(beyond_doubt=True)
        breaker.check()
        assert not breaker.closed
    assert breaker.trips == 1
    clock.advance(5.1)
    breaker.succeeded()
    breaker.failed()
    assert breaker.closed, "the count began again"


def test_half_open_one_failure_is_enough() -> None:
    clock = ManualClock()
    breaker = tripped(clock)
    clock.advance(6)
    breaker.failed()
    assert not breaker.closed and breaker.trips == 2


def test_half_open_a_success_closes_it() -> None:
    clock = ManualClock()
    breaker = tripped(clock)
    clock.advance(6)
    breaker.succeeded()
    breaker.failed()
    assert breaker.closed and breaker.trips == 1


def test_a_straggler_does_not_close_an_open_one() -> None:
    breaker = tripped(ManualClock())
    breaker.succeeded()
    assert not breaker.closed


def test_the_watch_runs_what_is_due_in_order_and_nothing_else() -> None:
    clock = ManualClock()
    watch = DeadlineWatch(clock)
    ran: list[str] = []
    now = clock.monotonic()
    watch.add(now + 300, lambda: ran.append("later"))
    watch.add(now + 200, lambda: ran.append("second"))
    watch.add(now + 100, lambda: ran.append("first"))
    watch.discard(watch.add(now + 150, lambda: ran.append("discarded")))
    clock.advance(250)
    watch.run_due()
    watch.check()
    assert watch.close(WAIT_S)
    assert ran == ["first", "second"]


def test_h1_the_watch_wakes_up_by_itself() -> None:
    clock = SystemClock()
    watch = DeadlineWatch(clock)
    far, near = threading.Event(), threading.Event()
    watch.add(clock.monotonic() + 1000, far.set)
    watch.add(clock.monotonic() + 0.01, near.set)
    assert near.wait(WAIT_S)
    assert not far.is_set()
    assert watch.close(WAIT_S)


def test_h2_an_action_that_raises_costs_itself() -> None:
    clock = SystemClock()
    watch = DeadlineWatch(clock)
    ran = threading.Event()

    def bug() -> None:
        raise RuntimeError("a bug of ours")

    watch.add(clock.monotonic(), bug)
    watch.add(clock.monotonic() + 0.01, ran.set)
    assert ran.wait(WAIT_S), "the thread ended with the bug"
    assert watch.failures == 1
    assert watch.close(WAIT_S)


def test_discarded_entries_do_not_pile_up() -> None:
    clock = ManualClock()
    watch = DeadlineWatch(clock)
    for _ in range(50 * SLACK):
        watch.discard(watch.add(clock.monotonic() + 1000, lambda: None))
        watch.check()
    assert watch.close(WAIT_S)
