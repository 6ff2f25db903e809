"""kill -9 of a writer while it demotes, fifty times on the same directories.

After each death the next opening must find every page that was acknowledged - in the arena, or,
when the arena is deleted as by a reboot, on nvme - with the right content, and nothing else. The
tiers are large enough that nothing is evicted, so "acknowledged" is "found".
"""

from __future__ import annotations

import fcntl
import os
import random
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.pages import page_content, page_key
from tests.support.processes.demoting_writer import PAGE_BYTES, store_config
from tierkv.storage.store import TieredStore
from tierkv.storage.types import PageKey, TierName

ROOT = Path(__file__).resolve().parents[2]
SEED = 20261129
KILLS = 50
HOST_PAGES = 5000
NVME_PAGES = 5000
NVME_ACKS_BEFORE_KILL = 24
EXTRA_ACKS_MAX = 12
PIPE_BYTES = 4096
"""A small pipe bounds how far the child runs ahead of what the parent has read."""

WAIT_S = 60.0


@pytest.fixture
def arena() -> Iterator[Path]:
    """A place on tmpfs, as in service; an ordinary file where there is none."""
    shm = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shm if os.access(shm, os.W_OK) else None) as folder:
        yield Path(folder) / "arena"


class Acks:
    """What the children said, over all their lives."""

    def __init__(self) -> None:
        self.host: set[int] = set()
        self.nvme: set[int] = set()
        self.next_number = 0

    def read(self, line: str) -> None:
        if line == "open":
            return
        tier, number = line.split()
        {"host": self.host, "nvme": self.nvme}[tier].add(int(number))
        self.next_number = max(self.next_number, int(number) + 1)


def run_and_kill(arena: Path, nvme: Path, acks: Acks, durable: int, extra: int) -> None:
    """Start a writer, read its lines up to `extra` after the `durable`-th page that is on nvme,
    kill it, and read what else it had said."""
    child = subprocess.Popen(
        [
            *(sys.executable, "-m", "tests.support.processes.demoting_writer"),
            *(str(arena), str(nvme), str(HOST_PAGES), str(NVME_PAGES), str(acks.next_number)),
        ],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    fcntl.fcntl(child.stdout, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    with child.stdout as lines:
        durable += len(acks.nvme)
        while len(acks.nvme) < durable or extra > 0:
            extra -= len(acks.nvme) >= durable
            line = lines.readline()
            assert line.endswith("\n"), f"the writer ended by itself, status {child.wait(WAIT_S)}"
            acks.read(line.strip())
        child.send_signal(signal.SIGKILL)
        for line in lines:
            # A line cut by the kill acknowledges nothing.
            if line.endswith("\n"):
                acks.read(line.strip())
    assert child.wait(WAIT_S) == -signal.SIGKILL


def found_after(store: TieredStore, numbers: range) -> dict[int, TierName]:
    """Where each page of `numbers` is; every page that is anywhere is fetched and compared."""
    found: dict[int, TierName] = {}
    for number in numbers:
        key = page_key(number)
        with store.fetch([key], WAIT_S).take(WAIT_S) as lease:
            for view, tier in zip(lease.views, lease.tiers, strict=True):
                assert view == page_content(key, PAGE_BYTES), f"page {number} is wrong"
                found[number] = tier
    return found


def survivors(store: TieredStore) -> list[PageKey]:
    """Every key the tiers show right after opening."""
    assert store._lower is not None
    return [*store._host.victims(HOST_PAGES), *store._lower.tier.victims(NVME_PAGES)]


def test_r1_r2_r3_every_acknowledged_page_survives_fifty_kills(arena: Path, tmp_path: Path) -> None:
    rng = random.Random(SEED)
    nvme, acks = tmp_path / "nvme", Acks()
    checked = 0
    for kill in range(KILLS):
        first = acks.next_number
        durable, extra = rng.randint(0, NVME_ACKS_BEFORE_KILL), rng.randint(1, EXTRA_ACKS_MAX)
        run_and_kill(arena, nvme, acks, durable, extra)
        reboot = kill % 2 == 1
        if reboot:
            arena.unlink()
            acks.host.clear()
        note = f"seed={SEED} kill={kill} reboot={reboot}"
        store = TieredStore.open(store_config(arena, nvme, HOST_PAGES, NVME_PAGES))
        try:
            store.check()
            # The child may have committed a few pages that it could not tell us about.
            past = acks.next_number + HOST_PAGES
            known = {page_key(number) for number in range(past)}
            assert known.issuperset(survivors(store)), note
            numbers = range(0 if kill == KILLS - 1 else first, acks.next_number)
            found = found_after(store, numbers)
            checked += len(found)
            lost = (acks.nvme | acks.host).intersection(numbers) - found.keys()
            assert not lost, f"{note}: acknowledged and lost: {sorted(lost)}"
            assert not reboot or set(found.values()) <= {TierName.NVME}, note
            store.check()
            stats = store.stats()
            assert all(tier.corrupt == 0 and tier.evictions == 0 for tier in stats.tiers), note
            acks.next_number = next_free(store, acks.next_number)
        finally:
            store.close()
    assert len(acks.nvme) > KILLS and checked > KILLS


def next_free(store: TieredStore, number: int) -> int:
    """The first number from `number` on whose page is nowhere: the next child starts there."""
    while store.lookup([page_key(number)]) != [None]:
        number += 1
    return number
