"""WriteBudget: bytes per day, who is skipped first, and what a restart keeps."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.clock import ManualClock
from tierkv.storage.errors import ConfigError
from tierkv.storage.write_budget import HOT_USES, WARM_USES, WriteBudget

DAY_BYTES = 4000
BUCKET = 1000


def test_no_day_sees_more_than_its_bytes() -> None:
    clock = ManualClock()
    budget = WriteBudget(DAY_BYTES, clock)
    spent = []
    for _ in range(3 * 24 * 60):
        spent.append(10 * budget.spend(10, HOT_USES))
        budget.check()
        clock.advance(60)
    day = 24 * 60
    windows = [sum(spent[start : start + day]) for start in range(0, len(spent) - day, 7)]
    assert max(windows) <= DAY_BYTES
    assert min(windows) >= DAY_BYTES * 0.7, "what is allowed can be used"


def test_the_less_is_left_the_hotter_a_page_must_be() -> None:
    budget = WriteBudget(DAY_BYTES, ManualClock())
    assert budget.spend(501, 1)
    assert not budget.spend(1, WARM_USES - 1)
    assert budget.spend(260, WARM_USES)
    assert not budget.spend(1, HOT_USES - 1)
    assert budget.spend(239, HOT_USES)
    assert not budget.spend(1, 255)
    assert budget.skipped_pages == 3


def test_a_forced_write_is_taken_and_delays_later_ones() -> None:
    clock = ManualClock()
    budget = WriteBudget(DAY_BYTES, clock)
    assert budget.spend(BUCKET + 300, 0, forced=True)
    assert budget.left_bytes == -300
    clock.advance(86400 / 3000 * 300)
    assert budget.left_bytes == 0
    assert not budget.spend(1, 255)


def test_what_was_not_written_is_given_back() -> None:
    budget = WriteBudget(DAY_BYTES, ManualClock())
    budget.spend(400, 1)
    budget.give_back(400)
    assert budget.left_bytes == BUCKET
    budget.give_back(400)
    budget.check()


def test_r1_a_restart_keeps_what_was_spent(tmp_path: Path) -> None:
    clock = ManualClock()
    path = tmp_path / "state" / "budget.json"
    budget = WriteBudget(DAY_BYTES, clock, path)
    budget.spend(900, 1)
    budget.save_if_due()
    again = WriteBudget(DAY_BYTES, clock, path)
    assert again.left_bytes == 100
    again.save()
    clock.advance(86400 / 3000 * 50)
    assert WriteBudget(DAY_BYTES, clock, path).left_bytes == 150


def test_a_clock_far_ahead_fills_no_more_than_the_bucket(tmp_path: Path) -> None:
    clock = ManualClock()
    path = tmp_path / "budget.json"
    budget = WriteBudget(DAY_BYTES, clock, path)
    budget.spend(BUCKET, 255)
    budget.save()
    clock.advance(1e9)
    assert WriteBudget(DAY_BYTES, clock, path).left_bytes == BUCKET


def test_a_clock_that_went_back_grants_nothing(tmp_path: Path) -> None:
    path = tmp_path / "budget.json"
    budget = WriteBudget(DAY_BYTES, ManualClock(wall_s=2e9), path)
    budget.spend(BUCKET, 255)
    budget.save()
    assert WriteBudget(DAY_BYTES, ManualClock(wall_s=1e9), path).left_bytes == 0


def test_saves_are_not_made_for_every_page(tmp_path: Path) -> None:
    path = tmp_path / "budget.json"
    budget = WriteBudget(DAY_BYTES, ManualClock(), path)
    budget.save_if_due()
    path.unlink()
    budget.spend(10, 1)
    budget.save_if_due()
    assert not path.exists()
    budget.spend(10, 1)
    budget.save_if_due()
    assert path.exists()


@pytest.mark.parametrize(
    "damage", [b"", b"{", b"[1]", b'{"version": 2}', b'{"version": 1, "left": NaN, "wall_s": 0}']
)
def test_a_damaged_file_counts_as_spent(tmp_path: Path, damage: bytes) -> None:
    path = tmp_path / "budget.json"
    path.write_bytes(damage)
    assert WriteBudget(DAY_BYTES, ManualClock(), path).left_bytes == 0


def test_a_folder_that_cannot_be_written_stops_nobody(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_bytes(b"")
    budget = WriteBudget(DAY_BYTES, ManualClock(), tmp_path / "file" / "budget.json")
    budget.save()
    assert "write budget: save=" in caplog.text


def test_a_budget_of_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least 1"):
        WriteBudget(0, ManualClock())
