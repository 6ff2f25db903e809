"""Which copies are missing, who makes them, and at which pace."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import numpy as np
import pytest

from tests.support.clock import ManualClock
from tests.support.pages import page_keys
from tests.support.pool_nodes import KEY, WAIT_S, free_address, until
from tierkv.storage.pool.config import PoolConfig
from tierkv.storage.pool.copies import Copies
from tierkv.storage.pool.holdings import Fingerprints, fingerprint
from tierkv.storage.pool.placement import rank
from tierkv.storage.pool.rebalance import STEP_S, Rebalancer
from tierkv.storage.remote import LocalStore
from tierkv.storage.types import PageKey

PAGE_BYTES = 1000


class Held:
    """A link, and what its peer holds."""

    def __init__(self, keys: Sequence[PageKey]) -> None:
        self.prints = {fingerprint(key) for key in keys}

    def holds(
        self, page_bytes: int, prints: Fingerprints
    ) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        return np.array([name in self.prints for name in prints.tolist()], np.bool_)


class Others:
    """Stands for Copies: who is live, what is wanted, and what was asked for."""

    unmade_background = 0

    def __init__(self, members: dict[str, Sequence[PageKey]]) -> None:
        self.members = {name: Held(keys) for name, keys in members.items()}
        self.wanted: dict[PageKey, int] = {}
        self.placed: list[list[tuple[PageKey, int]]] = []

    def holders(self) -> dict[str, Held]:
        return self.members

    def wanted_of(self, key: PageKey) -> int:
        return self.wanted.get(key, 0)

    def place(self, wanted: Sequence[tuple[PageKey, int]], *, background: bool) -> int:
        assert background, "nobody waits for balance"
        self.placed.append(list(wanted))
        return len(wanted)

    def wait_background(self, open_max: int, timeout_s: float) -> bool:
        return True


class Store:
    """What is here."""

    page_bytes = PAGE_BYTES

    def __init__(self, keys: Sequence[PageKey]) -> None:
        self._keys = list(keys)

    def keys_here(self) -> list[PageKey]:
        return list(self._keys)


def balance(
    keys: Sequence[PageKey], others: Others, clock: ManualClock, **changes: object
) -> Rebalancer:
    config = PoolConfig(
        listen=free_address(),
        members=(free_address(),),
        key=KEY,
        **{"rebalance_bytes_per_s": 1 << 30, **changes},  # type: ignore[arg-type]
    )
    store, copies = cast(LocalStore, Store(keys)), cast(Copies, others)
    return Rebalancer(store, copies, "me", config, clock)


def run_pass(rebalancer: Rebalancer, clock: ManualClock) -> None:
    """Say that members changed, let the time pass, and wait until all was looked at."""
    passes = rebalancer.passes
    rebalancer.members_changed()
    clock.advance(60.0)
    with rebalancer._changed:
        rebalancer._changed.notify_all()
    until(lambda: rebalancer.passes > passes, lambda: rebalancer.passes)
    assert rebalancer.close(WAIT_S)


def test_what_too_few_members_have_is_copied_by_the_first_holder_in_rank_order() -> None:
    keys = page_keys(*range(60))
    others = Others({"you": keys[:20], "they": keys[10:20]})
    clock = ManualClock()
    rebalancer = balance(keys, others, clock, replicas=2, hot_replicas=2)
    run_pass(rebalancer, clock)
    placed = {key: count for batch in others.placed for key, count in batch}
    mine = {
        key
        for number, key in enumerate(keys)
        if not 10 <= number < 20 and (number >= 20 or rank(key, ["me", "you"])[0] == "me")
    }
    assert set(placed) == mine and set(placed.values()) == {2}
    assert 40 < len(mine) < 50, "some are the other holder's to copy"
    assert rebalancer.queued == len(mine)


def test_no_more_copies_are_wanted_than_there_are_members() -> None:
    keys = page_keys(*range(10))
    others, clock = Others({"you": keys}), ManualClock()
    run_pass(balance(keys, others, clock, replicas=3, hot_replicas=3), clock)
    assert others.placed == []


def test_pages_that_are_copied_after_some_uses_only_are_not_copied_for_balance() -> None:
    keys = page_keys(*range(10))
    others, clock = Others({"you": []}), ManualClock()
    others.wanted = {keys[3]: 1}
    run_pass(balance(keys, others, clock, copy_after=2), clock)
    assert others.placed == [[(keys[3], 1)]]


def test_balance_keeps_to_its_pace(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = page_keys(*range(100))
    others, clock = Others({"you": []}), ManualClock()
    rate = 40 * PAGE_BYTES
    rebalancer = balance(keys, others, clock, rebalance_bytes_per_s=rate)
    pauses: list[int] = []

    def pause(copies: int) -> bool:
        pauses.append(copies)
        return True

    monkeypatch.setattr(rebalancer, "_pause", pause)
    run_pass(rebalancer, clock)
    assert max(map(len, others.placed)) <= rate * STEP_S / PAGE_BYTES
    assert pauses == [len(batch) for batch in others.placed], "a pause after each step, for it"
    assert sum(pauses) == 100


def test_without_a_pace_nothing_is_copied_for_balance() -> None:
    others, clock = Others({"you": []}), ManualClock()
    rebalancer = balance(page_keys(1), others, clock, rebalance_bytes_per_s=0)
    rebalancer.members_changed()
    clock.advance(60.0)
    assert rebalancer.close(WAIT_S) and others.placed == []


def test_h2_balance_survives_a_bug(monkeypatch: pytest.MonkeyPatch) -> None:
    others, clock = Others({"you": []}), ManualClock()
    rebalancer = balance(page_keys(1), others, clock)
    whole = rebalancer._missing

    def bug(keys: Sequence[PageKey]) -> list[tuple[PageKey, int]]:
        monkeypatch.setattr(rebalancer, "_missing", whole)
        raise RuntimeError("a bug of ours")

    monkeypatch.setattr(rebalancer, "_missing", bug)
    rebalancer.members_changed()
    clock.advance(60.0)
    with rebalancer._changed:
        rebalancer._changed.notify_all()
    until(lambda: rebalancer.restarts == 1, lambda: rebalancer.restarts)
    run_pass(rebalancer, clock)
    assert others.placed == [[(page_keys(1)[0], 1)]]
