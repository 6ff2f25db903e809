"""Everything at once: four nodes, many threads, and all that can happen to nodes of one machine."""

from __future__ import annotations

import random
import threading
from pathlib import Path

import pytest

from tests.support.pages import page_keys, put_store, take_content
from tests.support.pool_nodes import WAIT_S, Node, until
from tests.support.pool_storm import Storm, kept_for_others, open_files, pool_threads
from tierkv.storage.types import CommitOutcome, PageKey


def weather(folder: Path, seed: int, seconds: float) -> None:
    """A storm of so long, and what must be true after it."""
    print(f"seed={seed}")
    files, threads = open_files(), threading.enumerate()
    with Storm(folder, seed) as storm:
        storm.rage(seconds)
        storm.calm()
        print(dict(storm.counts))
        assert storm.counts["remote"] > 0, storm.counts
        for node in storm.nodes:
            # A share of a half of 48 pages.
            assert kept_for_others(node) <= 24
        one, *others = storm.nodes
        # What could not be copied during the storm is said once.
        one.remote.flush(WAIT_S)
        fresh = page_keys(*range(10_000, 10_012))
        assert put_store(one.store, fresh) == [CommitOutcome.COMMITTED] * 12
        assert one.remote.flush(WAIT_S), one.pool.status()
        assert one.pool.close(WAIT_S)
        one.store.close()
        one.stopped = True
        for node in others:
            for key in fresh:
                find(node, others, key)
    until(lambda: not pool_threads(threads), lambda: pool_threads(threads))
    until(lambda: open_files() <= files, lambda: open_files() - files)


def find(node: Node, others: list[Node], key: PageKey) -> None:
    """Fetch a page that was acknowledged, if somebody holds it: balance may push it out of the
    last share that had it."""

    def holders() -> list[str]:
        return [other.name for other in others if other.store.lookup_here([key])[0]]

    def found() -> bool:
        before = holders()
        got = take_content(node.store, [key]) == 1
        return got or not set(before) & set(holders())

    until(found, lambda: (key.hex(), node.name, holders(), node.pool.status()))


@pytest.mark.parametrize("seed", [20261129])
def test_l2_a_storm_leaves_no_wrong_byte_and_nothing_held(tmp_path: Path, seed: int) -> None:
    weather(tmp_path, seed, 6.0)


@pytest.mark.slow
@pytest.mark.parametrize("run", range(6))
def test_l2_long_storms(tmp_path: Path, run: int) -> None:
    weather(tmp_path, random.SystemRandom().randrange(1 << 32) + run, 60.0)
