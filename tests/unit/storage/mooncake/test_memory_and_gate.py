"""What is remembered for a while, and whether the store may be asked."""

from __future__ import annotations

import threading

import pytest

from tests.support.clock import ManualClock
from tests.support.pages import page_key, page_keys
from tests.unit.storage.remote_conformance import wait_until
from tierkv.storage.clock import SystemClock
from tierkv.storage.mooncake.config import MooncakeConfig
from tierkv.storage.mooncake.gate import Gate
from tierkv.storage.mooncake.knowledge import Knowledge
from tierkv.storage.mooncake.memory import ExpiringKeys

WAIT_S = 30.0
CONFIG = MooncakeConfig("127.0.0.1:1", breaker_failures=3, breaker_open_s=5.0, call_s=0.05)


def test_keys_are_forgotten_after_their_time_and_the_oldest_for_want_of_room() -> None:
    clock = ManualClock()
    memory = ExpiringKeys(clock, keys_max=3, keep_s=10.0)
    memory.add(page_keys(1, 2))
    clock.advance(5.0)
    memory.add(page_keys(1, 3))
    memory.check()
    assert [page_key(n) in memory for n in (1, 2, 3)] == [True, True, True]
    memory.add(page_keys(4))
    memory.check()
    assert [page_key(n) in memory for n in (1, 2, 3, 4)] == [True, False, True, True]
    clock.advance(10.0)
    assert page_key(4) not in memory and len(memory) == 0
    memory.add(page_keys(5))
    memory.discard(page_keys(5, 6))
    assert page_key(5) not in memory
    memory.check()


def test_what_failed_or_was_wrong_is_not_held_whatever_the_master_says() -> None:
    clock = ManualClock()
    known = Knowledge(CONFIG, clock)
    failed, wrong = page_keys(1, 2)
    known.found([failed, wrong])
    known.failed([failed])
    known.wrong([wrong])
    known.found([failed, wrong])
    assert not known.held(failed) and not known.held(wrong)
    assert known.answers(failed) and known.answers(wrong)
    assert known.needs_no_copy(failed) and not known.needs_no_copy(wrong)
    clock.advance(CONFIG.avoid_s)
    assert known.held(failed) and not known.held(wrong)
    known.stored([wrong])
    assert known.held(wrong)
    known.missed([wrong])
    assert not known.held(wrong)
    known.check()


def test_h1_a_call_that_does_not_return_closes_the_gate_until_it_does() -> None:
    gate = Gate(CONFIG, SystemClock())
    release = threading.Event()
    results: list[tuple[str, bool]] = []

    def call() -> str:
        assert release.wait(WAIT_S)
        return "at last"

    thread = threading.Thread(target=lambda: results.append(gate.run("get", 1e12, call)))
    thread.start()
    wait_until(lambda: not gate.open, "the call is late and nobody noticed")
    assert gate.late == 1
    assert "get has not returned" in (gate.degraded or "")
    gate.check()
    release.set()
    thread.join(WAIT_S)
    assert results == [("at last", False)]
    assert gate.open, "one late call is not enough for the breaker"
    assert gate.degraded is None
    gate.check()
    assert gate.close(WAIT_S)


@pytest.mark.parametrize("in_time", [True, False])
def test_that_the_master_is_gone_is_enough_by_itself(in_time: bool) -> None:
    gate = Gate(CONFIG, ManualClock())
    gate.judge("put", in_time, answered=True, code=-900)
    gate.judge("put", in_time=False, answered=False, code=-800)
    assert gate.open, "a success, and a late failure that was counted when it was late"
    gate.judge("put", in_time, answered=False, code=-900)
    assert not gate.open and gate.trips == 1
    assert "put failed with code -900: the master is gone" in (gate.problem or "")
    gate.check()


def test_failures_in_a_row_open_the_breaker_and_a_success_ends_the_row() -> None:
    clock = ManualClock()
    gate = Gate(CONFIG, clock)
    gate.failed("a")
    gate.failed("b")
    gate.succeeded()
    gate.failed("c")
    gate.failed("d")
    assert gate.open
    gate.judge("get", in_time=True, answered=False, code=-800)
    assert not gate.open and gate.trips == 1
    assert gate.degraded == (
        "mooncake store at 127.0.0.1:1 is not asked for a while: get failed with code -800"
    )
    clock.advance(CONFIG.breaker_open_s)
    assert gate.open
    gate.check()
    assert gate.close(WAIT_S)


def test_a_call_that_raises_is_a_failure() -> None:
    gate = Gate(MooncakeConfig("127.0.0.1:1", breaker_failures=1), SystemClock())

    def call() -> None:
        raise ValueError("surprise")

    with pytest.raises(ValueError, match="surprise"):
        gate.run("put", 1e12, call)
    assert not gate.open
    gate.check()
    assert gate.close(WAIT_S)
