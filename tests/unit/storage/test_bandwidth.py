"""Moving estimates of what a tier delivers."""

from __future__ import annotations

import pytest

from tests.support.clock import ManualClock
from tierkv.storage.bandwidth import Bandwidth, TransferMeter, Way
from tierkv.storage.types import TierName


def test_no_estimate_before_the_first_transfer() -> None:
    meter = TransferMeter(ManualClock())
    assert meter.bytes_per_s is None and meter.latency_s is None


def test_one_transfer_gives_its_own_rate() -> None:
    clock = ManualClock()
    meter = TransferMeter(clock)
    started = meter.begin()
    clock.advance(2)
    meter.end(started, 1000)
    assert meter.bytes_per_s == pytest.approx(500)
    assert meter.latency_s == pytest.approx(2)


def test_parallel_transfers_count_as_the_device_serves_them() -> None:
    clock = ManualClock()
    meter = TransferMeter(clock)
    first, second = meter.begin(), meter.begin()
    clock.advance(1)
    meter.end(first, 1000)
    meter.end(second, 1000)
    assert meter.bytes_per_s == pytest.approx(2000, rel=0.06)


def test_idle_time_does_not_count() -> None:
    clock = ManualClock()
    meter = TransferMeter(clock)
    for _ in range(3):
        started = meter.begin()
        clock.advance(1)
        meter.end(started, 100)
        clock.advance(1000)
    assert meter.bytes_per_s == pytest.approx(100)


def test_a_failed_transfer_says_nothing_about_speed() -> None:
    clock = ManualClock()
    meter = TransferMeter(clock)
    started = meter.begin()
    clock.advance(50)
    meter.end(started, 0)
    assert meter.bytes_per_s is None
    started = meter.begin()
    clock.advance(1)
    meter.end(started, 10)
    assert meter.bytes_per_s == pytest.approx(10)


def test_the_estimate_follows_a_device_that_slows_down() -> None:
    clock = ManualClock()
    meter = TransferMeter(clock)
    for seconds in [1.0] * 50 + [10.0] * 50:
        started = meter.begin()
        clock.advance(seconds)
        meter.end(started, 100)
    assert meter.bytes_per_s is not None
    assert 10 <= meter.bytes_per_s < 12


def test_only_tiers_that_moved_something_are_listed() -> None:
    clock = ManualClock()
    bandwidth = Bandwidth(clock)
    meter = bandwidth.meter(TierName.NVME, Way.READ)
    started = meter.begin()
    clock.advance(1)
    meter.end(started, 8)
    assert bandwidth.rates(Way.READ) == {TierName.NVME: pytest.approx(8)}
    assert bandwidth.latencies(Way.READ) == {TierName.NVME: pytest.approx(1)}
    assert bandwidth.rates(Way.WRITE) == bandwidth.latencies(Way.WRITE) == {}
