"""TimeToLive and LastUse: what expires, when, and what a clock that jumps cannot do."""

from __future__ import annotations

import random
import threading

import pytest

from tests.support.clock import ManualClock
from tests.support.pages import page_key, page_keys
from tierkv.storage import ttl as ttl_module
from tierkv.storage.errors import ConfigError
from tierkv.storage.last_use import OWNERS_MAX, REUSE_GAP_BOUNDS_S, LastUse, LastUseState
from tierkv.storage.ttl import TimeToLive
from tierkv.storage.types import PageKey, TierName

HOST, NVME = TierName.HOST, TierName.NVME


class JumpyClock(ManualClock):
    """A clock whose wall reading can be set by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.jump_s = 0.0

    def wall(self) -> float:
        return super().wall() + self.jump_s


class Rig:
    """Pages of owners in two tiers as plain lists."""

    def __init__(self, clock: JumpyClock, saved: LastUseState | None = None) -> None:
        self.clock = clock
        self.last_use = LastUse(1000, clock, saved)
        self.pages: dict[tuple[int, TierName], list[PageKey]] = {}
        self.ttl = TimeToLive(
            self.last_use, threading.RLock(), [HOST, NVME], self.keys_of, self.remove
        )

    def put(self, owner: int, *numbers: int, tier: TierName = NVME) -> None:
        for key in page_keys(*numbers):
            self.pages.setdefault((owner, tier), []).append(key)
            self.last_use.record(key, owner)

    def keys_of(self, owner: int, tier: TierName) -> list[PageKey]:
        return list(self.pages.get((owner, tier), []))

    def remove(self, keys: list[PageKey], tier: TierName) -> int:
        removed = 0
        for (_, where), there in self.pages.items():
            if where is tier:
                removed += sum(key in there for key in keys)
                there[:] = [key for key in there if key not in keys]
        return removed

    def reopened(self, closed_well: bool = True, closed_s: float = 0.0) -> Rig:
        saved = self.last_use.state()
        saved.closed_well = closed_well
        self.clock.advance(closed_s)
        fresh = Rig(self.clock, saved)
        fresh.pages = self.pages
        for owner, seconds in self.ttl.limits().items():
            fresh.ttl.set_limit(owner, seconds)
        return fresh


@pytest.fixture
def rig() -> Rig:
    return Rig(JumpyClock())


def test_pages_expire_after_their_last_use_and_not_before(rig: Rig) -> None:
    rig.put(1, 10, 11)
    rig.put(2, 20)
    rig.put(1, 12, tier=HOST)
    rig.ttl.set_limit(1, 100)
    rig.clock.advance(60)
    rig.last_use.record(page_key(11), 1)
    assert rig.ttl.expire() == 0
    rig.clock.advance(40)
    assert rig.ttl.expire() == 2
    assert rig.pages == {(1, NVME): page_keys(11), (1, HOST): [], (2, NVME): page_keys(20)}
    rig.clock.advance(60)
    assert rig.ttl.expire() == 1
    rig.ttl.check()


def test_a_cleared_limit_expires_nothing(rig: Rig) -> None:
    rig.put(1, 10)
    rig.ttl.set_limit(1, 10)
    rig.ttl.set_limit(1, None)
    rig.clock.advance(1000)
    assert rig.ttl.expire() == 0


@pytest.mark.parametrize("seconds", [0, -1, float("nan")])
def test_a_limit_that_is_no_time_is_refused(rig: Rig, seconds: float) -> None:
    with pytest.raises(ConfigError, match="above 0"):
        rig.ttl.set_limit(1, seconds)


def test_expire_removes_in_bounded_batches(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ttl_module, "REMOVE_PAGES_MAX", 4)
    rig.put(1, *range(10))
    rig.ttl.set_limit(1, 5)
    rig.clock.advance(5)
    assert [rig.ttl.expire() for _ in range(5)] == [4, 4, 2, 0, 0]


@pytest.mark.parametrize("jump_s", [3600.0, -3600.0, 365 * 86400.0])
def test_a_wall_clock_that_jumps_while_open_expires_nothing(rig: Rig, jump_s: float) -> None:
    rig.put(1, 10)
    rig.ttl.set_limit(1, 600)
    rig.clock.jump_s = jump_s
    assert rig.ttl.expire() == 0
    rig.clock.advance(600)
    assert rig.ttl.expire() == 1, "the jump did not stop the clock either"


@pytest.mark.parametrize("jump_s", [3600.0, -3600.0, 365 * 86400.0])
def test_a_jump_across_a_restart_spares_what_was_used_lately(rig: Rig, jump_s: float) -> None:
    rig.put(1, 10)
    rig.ttl.set_limit(1, 600)
    rig.clock.advance(299)
    rig.put(1, 11)
    fresh = rig.reopened()
    fresh.clock.jump_s = jump_s
    fresh = rig.reopened()
    assert fresh.ttl.expire() == 0


def test_r1_age_goes_on_after_a_restart_and_closed_time_counts_half(rig: Rig) -> None:
    rig.put(1, 10)
    rig.ttl.set_limit(1, 600)
    rig.clock.advance(301)
    rig.put(1, 11)
    rig.clock.advance(1)
    fresh = rig.reopened(closed_s=86400)
    assert fresh.ttl.expire() == 1, "idle for more than half before, and for a day"
    assert fresh.pages[1, NVME] == page_keys(11)
    fresh.clock.advance(300)
    assert fresh.ttl.expire() == 1


def test_after_a_kill_nothing_looks_older_than_the_last_save(rig: Rig) -> None:
    rig.put(1, 10)
    rig.ttl.set_limit(1, 600)
    rig.clock.advance(500)
    saved = rig.reopened(closed_well=False)
    saved.clock.advance(200)
    assert saved.ttl.expire() == 0
    saved.clock.advance(400)
    assert saved.ttl.expire() == 1


def test_a_moment_is_never_before_the_last_use(rig: Rig) -> None:
    rng = random.Random(7)
    truth: dict[PageKey, int] = {}
    for _ in range(20000):
        key = page_key(rng.randrange(2000))
        rig.last_use.record(key)
        truth[key] = rig.last_use.now_s()
        rig.clock.advance(1)
    late = 0
    for key, used in truth.items():
        assert rig.last_use.used_at_s(key) >= used, "seed=7"
        late += rig.last_use.used_at_s(key) > used
    # Twice as many pages as it is made for: still most of the moments are exact.
    assert late < len(truth) // 2
    rig.last_use.check()


@pytest.mark.parametrize("pages", [40, 1000, 50000])
def test_moments_survive_another_capacity(rig: Rig, pages: int) -> None:
    for number in range(200):
        rig.put(1, number)
        rig.clock.advance(1)
    saved = rig.last_use.state()
    saved.closed_well = True
    resized = LastUse(pages, rig.clock, saved)
    for number in range(200):
        key = page_key(number)
        assert resized.used_at_s(key) >= rig.last_use.used_at_s(key)
    resized.check()


def test_p4_reuse_gaps_fall_into_their_buckets(rig: Rig) -> None:
    for number, gap in enumerate([0, 5, 59, 100_000, 8 * 86400]):
        rig.last_use.record(page_key(number))
        rig.clock.advance(gap)
        rig.last_use.reused(page_key(number), NVME)
    counts = rig.last_use.reuse_gaps()
    assert len(counts[NVME]) == len(REUSE_GAP_BOUNDS_S) + 1
    assert counts == {NVME: (1, 1, 1, 0, 0, 0, 0, 1, 1)}


def test_owners_are_remembered_up_to_a_bound(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    assert OWNERS_MAX == 65536
    monkeypatch.setattr("tierkv.storage.last_use.OWNERS_MAX", 3)
    for owner in (1, 2, 3, 1, 4):
        rig.last_use.record(page_key(owner), owner)
    assert sorted(rig.last_use.state().owners) == [1, 3, 4]
    rig.clock.advance(30)
    assert rig.last_use.owner_wall_s(4) == rig.clock.wall() - 30
