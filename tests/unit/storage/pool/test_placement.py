"""Rendezvous placement: the same everywhere, even, and stable when members come and go."""

from __future__ import annotations

import random
import subprocess
import sys
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from tests.support.pages import page_key
from tierkv.storage.pool.placement import rank, targets
from tierkv.storage.types import PageKey

NAMES = st.lists(st.text(min_size=1, max_size=20), min_size=1, max_size=12, unique=True)
KEYS = st.binary(min_size=32, max_size=32).map(PageKey)
GOLDEN_MEMBERS = ["node1:7422", "node2:7422", "node3:7422", "rack-ü"]
GOLDEN = {
    0: ["rack-ü", "node1:7422", "node2:7422", "node3:7422"],
    1: ["rack-ü", "node1:7422", "node3:7422", "node2:7422"],
    2: ["node3:7422", "node2:7422", "rack-ü", "node1:7422"],
    3: ["node1:7422", "node2:7422", "node3:7422", "rack-ü"],
}


def test_golden_values() -> None:
    """Another order would make every node of a mixed pool place its copies elsewhere."""
    assert {number: rank(page_key(number), GOLDEN_MEMBERS) for number in GOLDEN} == GOLDEN


def test_w5_same_order_in_another_process() -> None:
    code = (
        "from tests.support.pages import page_key\n"
        "from tierkv.storage.pool.placement import rank\n"
        f"print([rank(page_key(n), {GOLDEN_MEMBERS!r}) for n in {list(GOLDEN)!r}])"
    )
    found = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONHASHSEED": "12345", "PYTHONUTF8": "1"},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert found.stdout.strip() == str(list(GOLDEN.values()))


@given(KEYS, NAMES, st.randoms(use_true_random=False))
def test_order_of_the_list_does_not_matter(
    key: PageKey, names: list[str], shuffler: random.Random
) -> None:
    shuffled = list(names)
    shuffler.shuffle(shuffled)
    assert rank(key, shuffled) == rank(key, names)
    assert sorted(rank(key, names)) == sorted(names)


@given(KEYS, NAMES, st.data())
def test_a_leaving_member_changes_nobody_elses_order(
    key: PageKey, names: list[str], data: st.DataObject
) -> None:
    gone = data.draw(st.sampled_from(names))
    before = rank(key, names)
    assert rank(key, [name for name in names if name != gone]) == [
        name for name in before if name != gone
    ]


@given(KEYS, NAMES, st.integers(1, 5))
def test_targets_are_the_first_of_the_order(key: PageKey, names: list[str], replicas: int) -> None:
    found = targets(key, names, replicas)
    assert found == rank(key, names)[:replicas]
    assert len(found) == min(replicas, len(names))


def test_no_members_no_place() -> None:
    assert rank(page_key(0), []) == [] == targets(page_key(0), [], 3)


def test_adding_a_member_moves_its_share_and_nothing_else() -> None:
    names = [f"node{number}:7422" for number in range(7)]
    keys = [page_key(number) for number in range(8000)]
    moved = 0
    for key in keys:
        before, after = targets(key, names, 2), targets(key, [*names, "new:7422"], 2)
        if before != after:
            moved += 1
            assert "new:7422" in after
            assert [name for name in after if name != "new:7422"] == before[:1]
    # Two copies of each key over eight members: the new one gets a quarter of the keys.
    assert 0.22 < moved / len(keys) < 0.28


def test_spread_over_members_is_even() -> None:
    names = [f"10.0.0.{number}:7422" for number in range(16)]
    counts = Counter(rank(page_key(number), names)[0] for number in range(16000))
    # 1000 expected each, standard deviation 31.
    assert set(counts) == set(names)
    assert min(counts.values()) > 850 and max(counts.values()) < 1150, counts
    seconds = Counter(rank(page_key(n), names)[1] for n in range(8000) if _first(n, names))
    # Of the keys of one member that dies, each of the 15 others takes an equal part.
    assert len(seconds) == 15 and max(seconds.values()) < 3 * min(seconds.values()), seconds


def _first(number: int, names: list[str]) -> bool:
    return rank(page_key(number), names)[0] == names[0]
