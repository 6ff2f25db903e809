"""Random demotions, restores, evictions and aborts on a device that reorders all it may."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.sim.transfer_world import World
from tierkv.storage.transfer.device_ops import Wait

SEEDS = 1000
CHUNKS = 10
SEEDS_PER_WAIT = 150


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_w2_l2_no_wrong_byte_no_leak_no_deadlock(chunk: int) -> None:
    done: Counter[str] = Counter()
    for seed in range(chunk * SEEDS // CHUNKS, (chunk + 1) * SEEDS // CHUNKS):
        world = World(seed)
        try:
            world.run()
        except AssertionError:
            print(f"seed {seed}: replay with World({seed}).run() of tests.sim.transfer_world")
            raise
        done += world.done
    # A simulation in which nothing happens finds nothing.
    events = ("saved", "restored", "layers followed", "cancelled", "failed saves")
    for what in (*events, "failed restores"):
        assert done[what] > 10, f"{what}: {done}"


@pytest.mark.parametrize("wait", list(Wait), ids=lambda wait: wait.value)
def test_w2_every_wait_is_needed(wait: Wait) -> None:
    for seed in range(SEEDS_PER_WAIT):
        try:
            World(seed, skipped=frozenset({wait}), failure_rate=0.1).run()
        except AssertionError as error:
            # Other assertions notice too; that wrong bytes come of it is the point.
            if "wrong bytes" in str(error):
                return
    pytest.fail(f"{wait.value} was left out and no byte was wrong in {SEEDS_PER_WAIT} seeds")


def test_the_same_seed_gives_the_same_run() -> None:
    runs = [World(7), World(7)]
    for world in runs:
        world.run()
    assert runs[0].done == runs[1].done
    assert (runs[0].kv == runs[1].kv).all()
