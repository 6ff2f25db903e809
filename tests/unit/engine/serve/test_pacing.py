"""The rate at which pages leave beside decodes: down while they feel it, up while they do not."""

from __future__ import annotations

from tierkv.engine.serve import pacing
from tierkv.engine.serve.pacing import DecodePace


def quiet(pace: DecodePace, seconds: float, batch_size: int = 4) -> None:
    for _ in range(pacing.QUIET_MIN):
        pace.note(seconds, batch_size, copying=False)


def busy(pace: DecodePace, seconds: float, batch_size: int = 4) -> None:
    for _ in range(pacing.BUSY_MIN):
        pace.note(seconds, batch_size, copying=True)


def test_p2_nothing_leaves_before_quiet_steps_are_known_and_slowly_without_them() -> None:
    pace = DecodePace()
    grants = [pace.grant(4) for _ in range(pacing.PATIENCE_STEPS)]
    assert grants[:-1] == [0] * (pacing.PATIENCE_STEPS - 1)
    assert grants[-1] > 0
    quiet(pace, 0.010)
    assert pace.grant(4) > 0


def test_p2_the_rate_is_halved_when_decoding_feels_it_and_grows_when_it_does_not() -> None:
    pace = DecodePace()
    quiet(pace, 0.010)
    busy(pace, 0.0102)
    assert pace.rate == pacing.RATE_START + 1
    busy(pace, 0.012)
    assert pace.rate == (pacing.RATE_START + 1) / 2
    assert pace.slowed == 1
    for _ in range(20):
        busy(pace, 0.030)
    assert pace.rate == pacing.RATE_MIN
    # A rate below a page a step is a page every few steps.
    assert sum(pace.grant(4) for _ in range(80)) in (9, 10, 11)
    for _ in range(200):
        busy(pace, 0.010)
    assert pace.rate == pacing.RATE_MAX


def test_p2_a_larger_batch_is_not_mistaken_for_the_cost_of_copies() -> None:
    pace = DecodePace()
    quiet(pace, 0.010, batch_size=1)
    quiet(pace, 0.030, batch_size=16)
    busy(pace, 0.030, batch_size=16)
    assert pace.slowed == 0


def test_p2_one_slow_step_is_not_a_trend_and_idle_steps_are_no_credit() -> None:
    pace = DecodePace()
    quiet(pace, 0.010)
    for seconds in (0.010, 0.5, 0.010, 0.010):
        pace.note(seconds, 4, copying=True)
    assert pace.slowed == 0
    for _ in range(50):
        pace.note(0.010, 4, copying=False)
    assert pace.grant(4) <= pace.rate


def test_batch_sizes_are_remembered_up_to_a_bound() -> None:
    pace = DecodePace()
    for size in range(1, 3 * pacing.SIZES_MAX):
        quiet(pace, 0.010, size)
    assert len(pace._quiet) == pacing.SIZES_MAX
