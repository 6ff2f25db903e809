"""Epochs: never used twice, whenever the process dies."""

from __future__ import annotations

import json
import logging
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest

from tests.support.clock import ManualClock
from tierkv.storage.errors import ConfigError, FormatVersionError
from tierkv.storage.pool.epoch import EPOCH_MAX, Epoch

WALL_MS = 1_700_000_000_000
KILLS = 12
CHILD = """
import sys
from pathlib import Path
from tierkv.storage.pool.epoch import Epoch
epoch = Epoch(Path(sys.argv[1]))
print(epoch.value, flush=True)
while True:
    print(epoch.raise_above(epoch.value), flush=True)
"""


class Killed(BaseException):
    """Stands for the end of the process: nothing catches it."""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "epoch.json"


def write(path: Path, epoch: object, version: object = 1) -> None:
    path.write_text(json.dumps({"format": "tierkv-pool-epoch", "version": version, "epoch": epoch}))


def test_each_life_takes_the_next(path: Path) -> None:
    write(path, 41)
    assert [Epoch(path).value for _ in range(3)] == [42, 43, 44]


def test_raise_above_is_on_disk_when_it_returns(path: Path) -> None:
    write(path, 4)
    epoch = Epoch(path)
    assert epoch.raise_above(3) == 5, "above already"
    assert epoch.raise_above(5) == 6, "another life has this number too"
    assert epoch.raise_above(70) == 71 == epoch.value
    epoch.check()
    assert Epoch(path).value == 72


def test_a_missing_file_starts_from_the_wall_clock(path: Path) -> None:
    """What was lost with it is far below: lives are counted in ones."""
    clock = ManualClock(wall_s=WALL_MS / 1000)
    assert Epoch(path, clock).value == WALL_MS
    assert Epoch(path, clock).value == WALL_MS + 1


def test_nothing_kept_still_grows() -> None:
    clock = ManualClock(wall_s=WALL_MS / 1000)
    first = Epoch(None, clock)
    clock.advance(1.0)
    second = Epoch(None, clock)
    assert second.value == first.value + 1000 == WALL_MS + 1000
    assert second.raise_above(2 * WALL_MS) == 2 * WALL_MS + 1
    second.check()


def test_a_clock_before_1970_still_gives_a_number() -> None:
    assert Epoch(None, ManualClock(wall_s=-5.0)).value == 1


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x00" * 64,
        b"{",
        b"[]",
        b"\xff\xfe",
        b'{"format": "something else", "version": 1, "epoch": 3}',
        b'{"format": "tierkv-pool-epoch", "version": 1}',
        b'{"format": "tierkv-pool-epoch", "version": 1, "epoch": true}',
        b'{"format": "tierkv-pool-epoch", "version": 1, "epoch": "7"}',
        b'{"format": "tierkv-pool-epoch", "version": 1, "epoch": 0}',
        b'{"format": "tierkv-pool-epoch", "version": 1, "epoch": 9223372036854775808}',
        b"[" * 5000,
    ],
)
def test_a_damaged_file_warns_once_and_goes_on_from_the_clock(
    path: Path, data: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    path.write_bytes(data)
    with caplog.at_level(logging.WARNING):
        epoch = Epoch(path, ManualClock(wall_s=WALL_MS / 1000))
    assert epoch.value == WALL_MS
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert str(path) in caplog.text and "damaged" in caplog.text
    epoch.check()


def test_another_version_is_not_overwritten(path: Path) -> None:
    write(path, 5, version=2)
    before = path.read_bytes()
    with pytest.raises(FormatVersionError, match="version 2"):
        Epoch(path)
    assert path.read_bytes() == before


def test_a_folder_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="absent"):
        Epoch(tmp_path / "absent" / "epoch.json")
    with pytest.raises(ConfigError, match="read pool epoch"):
        Epoch(tmp_path)


def test_the_last_number_is_the_last(path: Path) -> None:
    """A peer's nonsense must not wrap around, and is refused without harm."""
    write(path, 10)
    epoch = Epoch(path)
    with pytest.raises(ConfigError, match="another name"):
        epoch.raise_above(EPOCH_MAX)
    assert epoch.value == 11
    epoch.check()
    assert epoch.raise_above(EPOCH_MAX - 1) == EPOCH_MAX


def test_stopped_at_every_step_of_writing(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever step is the last one of a life, the next life's number is above all told."""
    write(path, 1)
    told = [1]
    stops = 0
    for stop in range(1, 20):
        calls = 0

        def step(real: object, *args: object, stop: int = stop, **kwargs: object) -> object:
            nonlocal calls
            calls += 1
            if calls == stop:
                raise Killed
            assert callable(real)
            return real(*args, **kwargs)

        with monkeypatch.context() as patched:
            for owner, name in (
                (tempfile, "mkstemp"),
                (os, "fdopen"),
                (os, "fsync"),
                (os, "open"),
                (Path, "replace"),
            ):
                real = getattr(owner, name)
                patched.setattr(owner, name, lambda *args, real=real, **kw: step(real, *args, **kw))
            try:
                told.append(Epoch(path).value)
            except Killed:
                stops += 1
        after = Epoch(path).value
        assert after > max(told), (stop, told)
        told.append(after)
    assert stops >= 6, "the steps were not reached"
    assert len(set(told)) == len(told)


def test_killed_at_any_moment_never_used_twice(path: Path) -> None:
    """A child takes numbers as fast as it can; kill -9; again on the same file."""
    seed = 20261130
    print(f"seed={seed}")
    dice = random.Random(seed)
    told: list[int] = []
    for _ in range(KILLS):
        child = subprocess.Popen(
            [sys.executable, "-c", CHILD, str(path)], stdout=subprocess.PIPE, text=True
        )
        assert child.stdout is not None
        told.extend(int(child.stdout.readline()) for _ in range(dice.randint(1, 40)))
        child.send_signal(signal.SIGKILL)
        # What it said before it died was used too, but for half a line.
        rest = child.stdout.read()
        told.extend(int(line) for line in rest.splitlines(keepends=True) if line.endswith("\n"))
        child.stdout.close()
        assert child.wait(timeout=30) == -signal.SIGKILL
    assert told == sorted(set(told)), "an epoch was used twice or fell"
    assert Epoch(path).value > told[-1]


def test_threads_that_raise_get_numbers_that_only_grow(path: Path) -> None:
    write(path, 100)
    epoch = Epoch(path)
    seen: list[list[int]] = [[] for _ in range(4)]

    def run(mine: list[int]) -> None:
        mine.extend(epoch.raise_above(epoch.value) for _ in range(20))

    threads = [threading.Thread(target=run, args=(mine,)) for mine in seen]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert all(mine == sorted(mine) for mine in seen)
    epoch.check()
    assert list(path.parent.iterdir()) == [path], "temporary files are left"
