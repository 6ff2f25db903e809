"""Hotness survives a restart; what is damaged is ignored (docs/formats/state.md)."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.support.clock import ManualClock
from tests.support.pages import page_key
from tierkv.storage.hotness_file import (
    CLOSED_NAME,
    OPEN_NAME,
    Hotness,
    HotnessFile,
    pack_hotness,
    unpack_hotness,
)
from tierkv.storage.last_use import LastUse
from tierkv.storage.policy import FrequencySketch


def some_hotness(pages: int = 100) -> Hotness:
    sketch, last = FrequencySketch(pages), LastUse(pages, ManualClock())
    for number in range(50):
        for _ in range(1 + number % 5):
            sketch.record(page_key(number))
        last.record(page_key(number), number % 3)
    return Hotness(sketch.state(), last.state())


def test_r1_what_is_saved_is_loaded(tmp_path: Path) -> None:
    hotness = some_hotness()
    assert HotnessFile(tmp_path / "state").save(hotness, closing=True)
    loaded = HotnessFile(tmp_path / "state").load()
    assert loaded is not None
    assert loaded.sketch == hotness.sketch
    assert loaded.last_use.rows == hotness.last_use.rows
    assert loaded.last_use.owners == hotness.last_use.owners
    assert loaded.last_use.closed_well
    sketch = FrequencySketch(100, loaded.sketch)
    assert [sketch.estimate(page_key(number)) for number in range(5)] == [1, 2, 3, 4, 5]
    sketch.check()


@pytest.mark.parametrize("pages", [20, 3000])
def test_counts_survive_another_capacity(pages: int) -> None:
    hotness = some_hotness()
    before, after = FrequencySketch(100, hotness.sketch), FrequencySketch(pages, hotness.sketch)
    for number in range(50):
        assert after.estimate(page_key(number)) >= before.estimate(page_key(number))
    after.check()


def test_a_kill_after_opening_is_seen_at_the_next_opening(tmp_path: Path) -> None:
    HotnessFile(tmp_path).save(some_hotness(), closing=True)
    assert HotnessFile(tmp_path).load() is not None
    again = HotnessFile(tmp_path).load()
    assert again is not None and not again.last_use.closed_well
    HotnessFile(tmp_path).save(some_hotness(), closing=False)
    HotnessFile(tmp_path).save(some_hotness(), closing=True)
    assert [path.name for path in tmp_path.iterdir()] == [CLOSED_NAME]


def test_nothing_saved_is_nothing(tmp_path: Path) -> None:
    assert HotnessFile(tmp_path / "absent").load() is None


def test_every_flipped_byte_and_every_length_is_ignored() -> None:
    data = pack_hotness(some_hotness(20))
    rng = random.Random(5)
    for position in [*range(100), *rng.sample(range(100, len(data)), 60)]:
        damaged = bytearray(data)
        damaged[position] ^= 1 << rng.randrange(8)
        with pytest.raises(ValueError):
            unpack_hotness(bytes(damaged))
    for length in [0, 1, 79, 80, len(data) - 1]:
        with pytest.raises(ValueError):
            unpack_hotness(data[:length])
    with pytest.raises(ValueError):
        unpack_hotness(data + b"\0")


@pytest.mark.parametrize("content", [b"", b"x" * 10, b"x" * 5000])
def test_a_damaged_file_is_logged_and_ignored(
    tmp_path: Path, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / OPEN_NAME).write_bytes(content)
    assert HotnessFile(tmp_path).load() is None
    assert "ignored=yes" in caplog.text


def test_a_device_that_refuses_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    assert not HotnessFile(tmp_path / "file").save(some_hotness(), closing=True)
