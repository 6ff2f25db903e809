"""FrequencySketch, admission classes."""

from __future__ import annotations

import random

import pytest

from tests.support.memory_tier import MemoryTier
from tests.support.pages import page_key, put_tier
from tierkv.storage.errors import ConfigError
from tierkv.storage.policy import (
    COUNTER_MAX,
    AdmissionName,
    AdmitAll,
    FrequencySketch,
    Hotness,
    make_admission,
)
from tierkv.storage.types import PageKey


def test_estimate_is_never_below_the_count_before_a_halving() -> None:
    seed = 7
    rng = random.Random(seed)
    sketch = FrequencySketch(200)
    counts: dict[int, int] = {}
    for _ in range(sketch.sample_max - 1):
        number = min(int(rng.expovariate(0.02)), 199)
        counts[number] = counts.get(number, 0) + 1
        sketch.record(page_key(number))
        sketch.check()
    assert sketch.halvings == 0
    for number, count in counts.items():
        assert sketch.estimate(page_key(number)) >= min(count, COUNTER_MAX), f"seed={seed}"
    exact = sum(
        sketch.estimate(page_key(number)) == min(count, COUNTER_MAX)
        for number, count in counts.items()
    )
    assert exact >= 0.95 * len(counts), f"seed={seed}"


def test_old_popularity_decays_by_halving() -> None:
    sketch = FrequencySketch(10)
    for _ in range(40):
        sketch.record(page_key(1))
    for number in range(2, 2 + sketch.sample_max - 40):
        sketch.record(page_key(number))
    assert sketch.halvings == 1
    assert sketch.estimate(page_key(1)) == 20


def test_counters_saturate_instead_of_wrapping() -> None:
    sketch = FrequencySketch(1000)
    for _ in range(COUNTER_MAX + 50):
        sketch.record(page_key(1))
    assert sketch.estimate(page_key(1)) == COUNTER_MAX


def test_estimates_are_equal_in_every_process() -> None:
    # A golden cell: the hash is the key's own bytes, so nothing depends on a process' seed.
    sketch = FrequencySketch(16)
    assert sketch._cells(PageKey(bytes(range(32)))) == [0, 8, 16, 24]


def test_a_key_of_another_length_is_refused() -> None:
    with pytest.raises(ValueError, match="expected 32 bytes, got 3"):
        FrequencySketch(4).record(PageKey(b"abc"))


def test_a_sketch_for_no_pages_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least 1"):
        FrequencySketch(0)


def test_hotness_admits_while_the_lower_tier_has_room() -> None:
    tier = MemoryTier(8, 2)
    admission = Hotness(FrequencySketch(8))
    put_tier(tier, [page_key(1)])
    assert admission.admit(page_key(2), tier, pending_pages=0)


def test_hotness_compares_with_the_victim_once_pending_pages_fill_the_room() -> None:
    tier = MemoryTier(8, 2)
    sketch = FrequencySketch(8)
    put_tier(tier, [page_key(1)])
    for _ in range(3):
        sketch.record(page_key(1))
    admission = Hotness(sketch)
    assert not admission.admit(page_key(2), tier, pending_pages=1)
    for _ in range(3):
        sketch.record(page_key(2))
    assert admission.admit(page_key(2), tier, pending_pages=1)


def test_hotness_refuses_when_nothing_could_be_displaced() -> None:
    tier = MemoryTier(8, 1)
    put_tier(tier, [page_key(1)])
    with tier.lease([page_key(1)]):
        assert not Hotness(FrequencySketch(8)).admit(page_key(2), tier, pending_pages=0)


def test_admission_classes_by_name() -> None:
    sketch = FrequencySketch(8)
    assert isinstance(make_admission(AdmissionName.ALL, sketch), AdmitAll)
    assert isinstance(make_admission(AdmissionName.HOTNESS, sketch), Hotness)
    full = MemoryTier(8, 1)
    put_tier(full, [page_key(1)])
    sketch.record(page_key(1))
    assert make_admission(AdmissionName.ALL, sketch).admit(page_key(2), full, 5)
