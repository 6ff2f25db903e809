"""The offline check after a power loss at every write and sync, and after kill -9 of a host tier.

What a power loss leaves with its index must be without a fault but in the order of use, which is
not synced at commits. Without the index, a repair must bring back every acknowledged page, and
leave nothing that does not verify. A second run finds nothing.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
from pathlib import Path

import pytest

from tests.crash.test_nvme_crash import SEED, Workload, judge
from tests.unit.storage.tier_conformance import PAGE_BYTES, page_bytes_of, put
from tierkv.storage.fsck import FindingKind, check_store
from tierkv.storage.tiers.host import HostTier


@pytest.mark.parametrize("mode", ["drop", "torn4096", "torn512"])
@pytest.mark.parametrize("whole_index", [True, False], ids=["index", "index_lost"])
def test_w7_c4_a_power_loss_at_every_point_leaves_what_fsck_accepts_or_repairs(
    tmp_path: Path, mode: str, whole_index: bool
) -> None:
    points = 0
    scratch = tmp_path / "after"
    workload: Workload | None = None

    def cut(name: str) -> None:
        nonlocal points
        if workload is None:
            return
        points += 1
        seed = SEED + points
        workload.device.power_loss_copy(workload.root, scratch, mode, seed)
        if not whole_index:
            shutil.rmtree(next(scratch.glob("pages-*")) / "index")
        try:
            _check_twice(scratch, workload.certain, whole_index)
        except AssertionError as error:
            raise AssertionError(f"point {points} {name} mode={mode} seed={seed}") from error
        shutil.rmtree(scratch)

    # Keys told at the write: headers are complete before anything was committed.
    workload = Workload(tmp_path / "nvme", cut, keys_told=True)
    workload.script()
    assert points > 40, f"only {points} points met"


def _check_twice(root: Path, certain: set[int], whole_index: bool) -> None:
    mended = check_store(root, repair=True)
    if whole_index:
        assert {finding.kind for finding in mended.problems} <= {FindingKind.RECENCY}
    assert mended.clean, mended.problems
    again = check_store(root)
    assert again.problems == ()
    assert again.pages == mended.pages
    # A repaired index promises nothing that does not verify, so it is as good as a whole one.
    judge(root, certain, whole_index=True)


def _die_while_committing(path: Path) -> None:
    tier = HostTier(path, PAGE_BYTES, HostTier.capacity_for(PAGE_BYTES, 6))
    put(tier, [1, 2, 3], 7)
    tier.evict(1)
    reservation = tier.reserve(1)
    tier.payload(reservation, 0)[:100] = page_bytes_of(9)[:100]
    os.kill(os.getpid(), signal.SIGKILL)


def test_r3_an_arena_after_kill_9_is_clean(tmp_path: Path) -> None:
    child = multiprocessing.get_context("fork").Process(
        target=_die_while_committing, args=(tmp_path / "arena",)
    )
    child.start()
    child.join(30)
    assert child.exitcode == -9
    report = check_store(None, tmp_path / "arena")
    assert (report.findings, report.pages) == ((), 2)
