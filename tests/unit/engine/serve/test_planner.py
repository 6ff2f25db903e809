"""The planner's arithmetic: the fit, the rate, the meeting point."""

from __future__ import annotations

import random

import pytest

from tierkv.engine.serve.planner import (
    CostCoefficients,
    LoadRate,
    PrefillCost,
    dump_calibration,
    load_calibration,
    meet,
    plan,
)

TRUE = CostCoefficients(a=2.2e-3, b=4e-7, c=0.05)


def test_the_fit_finds_the_cost_of_a_noisy_machine() -> None:
    seed = 7
    rng = random.Random(seed)
    fit = PrefillCost()
    for _ in range(60):
        tokens, context = rng.choice([16, 64, 128, 256, 512]), rng.randrange(2000)
        fit.note(tokens, context, TRUE.seconds(tokens, context) * rng.uniform(0.95, 1.05))
    for tokens, context in ((16, 0), (512, 0), (512, 2000), (100, 1000)):
        expected = TRUE.seconds(tokens, context)
        assert fit.current.seconds(tokens, context) == pytest.approx(expected, rel=0.06), seed


def test_the_fit_follows_a_machine_that_changes() -> None:
    fit = PrefillCost()
    for _ in range(50):
        fit.note(256, 0, 0.5)
    for _ in range(200):
        fit.note(256, 0, 1.0)
    assert fit.current.seconds(256, 0) == pytest.approx(1.0, rel=0.05)


def test_coefficients_never_go_negative_on_odd_measurements() -> None:
    fit = PrefillCost()
    for tokens, context, seconds in ((16, 0, 5.0), (512, 900, 0.01), (100, 0, 2.0), (0, 0, 1.0)):
        fit.note(tokens, context, seconds)
        assert min(fit.current.a, fit.current.b, fit.current.c) >= 0
        assert fit.current.a > 0


def test_rate_is_that_of_a_shared_pipeline() -> None:
    rate = LoadRate()
    assert rate.bytes_per_s is None
    assert rate.seconds(1000) == 0.0
    # Two loads begun together at 0 share one medium of 100 bytes a second.
    rate.note(100, began=0.0, now=1.0)
    rate.note(100, began=0.0, now=2.0)
    rate.note(100, began=0.0, now=3.0)
    assert rate.bytes_per_s == pytest.approx(100)
    rate.note(100, began=50.0, now=52.0)
    assert 50 < (rate.bytes_per_s or 0) < 100
    assert rate.seconds(200) == pytest.approx(200 / (rate.bytes_per_s or 1))


def test_meet_ends_both_together() -> None:
    for per_token in (1e-4, 1e-3, 3e-3):
        head = meet(1000, 0, TRUE, per_token)
        assert TRUE.seconds(head, 0) == pytest.approx((1000 - head) * per_token, rel=1e-6)


def test_meet_at_the_extremes() -> None:
    assert meet(1000, 0, TRUE, 1e-9) == 0.0, "loading ends before a pass could"
    assert meet(1000, 0, TRUE, 1e6) == pytest.approx(1000)
    assert meet(100, 0, TRUE, 1e-3, credit_s=10.0) == 0.0


def test_p1_plan_is_the_best_of_the_three_ways() -> None:
    seed = 3
    rng = random.Random(seed)
    for _ in range(300):
        tokens = rng.randint(1, 5000)
        per_token = 10 ** rng.uniform(-6, 0)
        latency = rng.choice([0.0, 0.001, 0.5])
        made = plan(tokens, 0, TRUE, per_token, latency, 512)
        assert made.compute_tokens + made.load_tokens == tokens
        assert made.expected_s <= min(made.compute_all_s, made.load_all_s), seed


def test_p1_a_short_prefix_on_a_slow_tier_is_recomputed_outright() -> None:
    made = plan(32, 0, TRUE, 0.1, 1.0, 512)
    assert (made.compute_tokens, made.load_tokens) == (32, 0)


def test_calibration_survives_a_round_trip_and_nothing_else() -> None:
    text = dump_calibration(TRUE, {"nvme": 1e9})
    assert load_calibration(text) == (TRUE, {"nvme": 1e9})
    for bad in ("", "{}", "[]", "null"):
        assert load_calibration(bad) is None
    for broken in (
        '{"version": 2, "cost": [1, 1, 1], "rates": {}}',
        '{"version": 1, "cost": [1, 1], "rates": {}}',
        '{"version": 1, "cost": [1, -1, 1], "rates": {}}',
        '{"version": 1, "cost": [1, NaN, 1], "rates": {}}',
        '{"version": 1, "cost": [1, 1, 1], "rates": {"nvme": "fast"}}',
    ):
        assert load_calibration(broken) is None, broken
