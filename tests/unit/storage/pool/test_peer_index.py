"""What is known of a peer: exact once its journal was heard, whatever was lost on the way."""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence

import numpy as np
import pytest

from tests.support.clock import ManualClock
from tests.support.pages import page_key
from tierkv.storage.errors import TierIOError
from tierkv.storage.pool import peer_index
from tierkv.storage.pool.holdings import Delta, Fingerprints, Holdings, fingerprint, fingerprints
from tierkv.storage.pool.peer_index import PeerIndex
from tierkv.storage.types import PageKey

STEPS = 12_000
UNIVERSE = 400
JOURNAL = 64
SNAPSHOT_EVERY_S = 5.0


def row(*names: int) -> Fingerprints:
    return np.array(names, np.uint64)


def delta(
    seq: int, added: Sequence[int] = (), removed: Sequence[int] = (), more: bool = False
) -> Delta:
    return Delta(7, seq, row(*added), row(*removed), more)


@pytest.fixture
def index() -> PeerIndex:
    """Of a peer that holds 10, 20 and 30, token 7 at seq 5."""
    index = PeerIndex()
    index.load(7, 5, row(10, 20, 30))
    return index


def held(index: PeerIndex, *names: int) -> list[bool]:
    index.check()
    found: list[bool] = index.holds(row(*names)).tolist()
    return found


def test_a_new_index_knows_nothing() -> None:
    index = PeerIndex()
    assert (index.token, index.seq, index.known) == (0, 0, 0)
    assert held(index, 0, 1, 2**64 - 1) == [False] * 3
    index.note(1)
    assert held(index, 1) == [True], "the peer said so itself, before its journal was followed"
    index.reset()
    assert held(index, 1) == [False]
    assert not index.apply(delta(1)), "a snapshot comes first"


def test_load_and_look_up_at_the_edges(index: PeerIndex) -> None:
    assert held(index, 30, 9, 10, 11, 20, 31, 2**64 - 1) == [1, 0, 1, 0, 1, 0, 0]
    assert held(index) == []
    assert (index.token, index.seq, index.known) == (7, 5, 3)
    index.load(7, 6, row(0, 2**64 - 1))
    assert held(index, 0, 2**64 - 1, 10, 1) == [True, True, False, False]


def test_load_copies(index: PeerIndex) -> None:
    names = row(1, 2, 3)
    index.load(7, 5, names)
    names[:] = 9
    assert held(index, 1, 2, 3, 9) == [True, True, True, False]


@pytest.mark.parametrize(
    ("token", "seq", "names"),
    [(7, 6, row(2, 1)), (7, 6, row(1, 1)), (0, 6, row(1)), (7, -1, row(1)), (7, 6, row(1)[None])],
)
def test_a_damaged_snapshot_is_refused_and_changes_nothing(
    index: PeerIndex, token: int, seq: int, names: Fingerprints
) -> None:
    with pytest.raises(TierIOError, match="not in order"):
        index.load(token, seq, names)
    assert held(index, 10, 20, 30) == [True] * 3 and index.seq == 5


def test_apply(index: PeerIndex) -> None:
    assert index.apply(delta(9, added=[5, 20], removed=[10, 40]))
    assert held(index, 5, 10, 20, 30, 40) == [True, False, True, True, False]
    assert (index.seq, index.known) == (9, 3)
    assert index.apply(delta(12, added=[10], removed=[5]))
    assert held(index, 5, 10) == [False, True] and index.known == 3


def test_apply_twice_does_no_harm(index: PeerIndex) -> None:
    """A snapshot and the journal after it overlap."""
    for _ in range(2):
        assert index.apply(delta(9, added=[5, 10], removed=[20, 40]))
        assert held(index, 5, 10, 20, 30, 40) == [True, True, False, True, False]
        assert index.known == 3


def test_what_does_not_continue_is_not_applied(index: PeerIndex) -> None:
    assert not index.apply(Delta(8, 9, row(1), row(), False)), "another life of the peer"
    assert not index.apply(delta(4, added=[1])), "older than what is known"
    assert held(index, 1) == [False] and index.seq == 5


def test_reset_forgets_all(index: PeerIndex) -> None:
    index.apply(delta(6, added=[1]))
    index.note(2)
    index.reset()
    assert held(index, 1, 2, 10) == [False] * 3
    assert (index.token, index.seq, index.known) == (0, 0, 0)


def test_merging_changes_no_answer(index: PeerIndex, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_index, "CHANGES_MAX", 8)
    truth = {10, 20, 30}
    dice = random.Random(5)
    for seq in range(6, 200):
        added = set(dice.sample(range(100), 3))
        removed = set(dice.sample(range(100), 3)) - added
        truth = (truth - removed) | added
        assert index.apply(delta(seq, sorted(added), sorted(removed)))
        assert held(index, *range(100)) == [name in truth for name in range(100)]
        assert index.known == len(truth)


def test_forget_and_note_count_until_the_journal_was_asked_after_them(index: PeerIndex) -> None:
    index.forget(10)
    index.note(11)
    assert held(index, 10, 11) == [False, True]
    index.apply(delta(6))
    assert held(index, 10, 11) == [False, True], "this delta may have been on its way before"
    index.apply(delta(7, more=True))
    assert held(index, 10, 11) == [False, True], "the journal goes on: not yet heard"
    index.apply(delta(8))
    assert held(index, 10, 11) == [True, False], "the journal has the last word"


def test_the_last_opinion_counts(index: PeerIndex) -> None:
    index.forget(10)
    index.apply(delta(6))
    index.note(10)
    assert held(index, 10) == [True]
    index.apply(delta(7, removed=[10]))
    assert held(index, 10) == [True]
    index.apply(delta(8))
    assert held(index, 10) == [False]


def test_opinions_live_through_a_snapshot_of_the_same_journal_only(index: PeerIndex) -> None:
    index.note(11)
    index.load(7, 8, row(10))
    assert held(index, 11) == [True], "the snapshot may be older than the answer"
    index.load(8, 1, row(10))
    assert held(index, 11) == [False], "that was another life"


def test_opinions_are_bounded(index: PeerIndex, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_index, "OPINIONS_MAX", 4)
    for name in range(100, 106):
        index.note(name)
    assert held(index, *range(100, 106)) == [False, False, True, True, True, True]


class Node:
    """A store of two tiers that reports as a TieredStore does, from under its lock."""

    def __init__(self, journal: int) -> None:
        self.lock = threading.Lock()
        self.host: set[PageKey] = set()
        self.nvme: set[PageKey] = set()
        self.clock = ManualClock()
        self.journal = journal
        self.restart()

    def restart(self) -> None:
        """A new life: host is empty, nvme is warm, the journal and its token are new."""
        self.host.clear()
        self.holdings = Holdings(self, self.journal, clock=self.clock, snapshot_s=SNAPSHOT_EVERY_S)

    def lookup_here(self, keys: Sequence[PageKey]) -> list[bool]:
        with self.lock:
            return [key in self.host or key in self.nvme for key in keys]

    def keys_here(self) -> list[PageKey]:
        with self.lock:
            return list(self.host | self.nvme)

    def step(self, dice: random.Random) -> None:
        """Something happens to a few pages."""
        keys = [page_key(dice.randrange(UNIVERSE)) for _ in range(dice.randint(1, 6))]
        with self.lock:
            match dice.randrange(4):
                case 0:  # committed, or promoted from nvme
                    self.holdings.gained([key for key in keys if key not in self.host])
                    self.host.update(keys)
                case 1:  # demoted: no more visible than before
                    self.nvme.update(key for key in keys if key in self.host)
                case 2:  # evicted from host
                    gone = [key for key in keys if key in self.host]
                    self.host.difference_update(gone)
                    self.holdings.lost(gone)
                case _:  # evicted from nvme
                    gone = [key for key in keys if key in self.nvme]
                    self.nvme.difference_update(gone)
                    self.holdings.lost(gone)


def hear(node: Node, index: PeerIndex, limit: int, lossy: random.Random | None) -> bool:
    """One round trip of a link: True when the journal was heard to its end."""
    answer = node.holdings.changes(index.token, index.seq, limit)
    if lossy is not None and lossy.random() < 0.2:
        return False
    if answer is None:
        snapshot = node.holdings.snapshot()
        if lossy is None or lossy.random() < 0.8:
            index.load(snapshot.token, snapshot.seq, snapshot.fingerprints)
        return False
    assert index.apply(answer)
    return not answer.more


def assert_exact(node: Node, index: PeerIndex) -> None:
    """After two rounds heard to their end: what the index says is what the store has."""
    rounds = 0
    for _ in range(10_000):
        rounds += hear(node, index, 50, None)
        if rounds == 2:
            break
    universe = [page_key(number) for number in range(UNIVERSE)]
    found = index.holds(fingerprints(universe)).tolist()
    assert found == node.lookup_here(universe)
    assert index.known == len(node.host | node.nvme)
    index.check()
    node.holdings.check()


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_converges_to_exactly_what_the_store_holds(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gains, losses, evictions, lost answers, journal overflow, restarts, wrong opinions."""
    print(f"seed={seed}")
    monkeypatch.setattr(peer_index, "CHANGES_MAX", 16)
    dice = random.Random(seed)
    node, index = Node(JOURNAL), PeerIndex()
    snapshots = overflows = 0
    for step in range(STEPS):
        node.step(dice)
        chance = dice.random()
        if chance < 0.3:
            before = index.token
            overflows += before != 0 and node.holdings.seq - index.seq > JOURNAL
            hear(node, index, dice.randint(1, 80), dice)
            snapshots += index.token != before
        elif chance < 0.4:
            name = fingerprint(page_key(dice.randrange(UNIVERSE)))
            (index.note if dice.random() < 0.5 else index.forget)(name)
        elif chance < 0.402:
            node.restart()
        elif chance < 0.404:
            index.reset()
        elif chance < 0.41:
            # A while in which nothing is heard: the journal overflows.
            for _ in range(JOURNAL):
                node.step(dice)
        node.clock.advance(dice.random())
        if step % 20 == 0:
            index.check()
            node.holdings.check()
        if step % 500 == 0:
            assert_exact(node, index)
    assert_exact(node, index)
    assert snapshots > 10 and overflows > 10, (snapshots, overflows)


class BusyNode(Node):
    """A node that lives on in a thread of its own, certainly while it is being listed."""

    def __init__(self, journal: int, seed: int) -> None:
        super().__init__(journal)
        self.holdings = Holdings(self, journal, clock=self.clock, snapshot_s=0.0)
        self.dice = random.Random(seed)
        self.steps = 0
        self.busy = False
        self.stepped = threading.Condition()

    def keys_here(self) -> list[PageKey]:
        found = super().keys_here()
        with self.stepped:
            aim = self.steps + 5
            assert self.stepped.wait_for(lambda: self.steps >= aim or not self.busy, 30)
        return found

    def live(self) -> None:
        while self.busy:
            self.step(self.dice)
            with self.stepped:
                self.steps += 1
                self.stepped.notify_all()


@pytest.mark.parametrize("journal", [32, 100_000])
def test_converges_while_pages_come_and_go_in_another_thread(
    journal: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Snapshots are built and deltas resolved while the store changes under them."""
    seed = 77 + journal
    print(f"seed={seed}")
    monkeypatch.setattr(peer_index, "CHANGES_MAX", 32)
    node, index = BusyNode(journal, seed), PeerIndex()
    for phase in range(20):
        node.busy = True
        thread = threading.Thread(target=node.live)
        thread.start()
        try:
            for turn in range(20):
                hear(node, index, 16 + turn * phase, None)
                index.check()
            # As a link that lost everything: a snapshot in the midst of changes, then the journal.
            index.reset()
            assert not hear(node, index, 1, None) and index.token == node.holdings.token
        finally:
            node.busy = False
            thread.join(30)
        assert not thread.is_alive()
        assert_exact(node, index)


def test_look_ups_go_on_while_another_thread_applies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages that never change are always answered right, also in the middle of a merge."""
    monkeypatch.setattr(peer_index, "CHANGES_MAX", 8)
    index = PeerIndex()
    index.load(7, 0, row(*range(0, 2000, 2)))
    stop = threading.Event()
    failed: list[str] = []

    def read() -> None:
        steady = row(*range(1000, 1100))
        expected = [name % 2 == 0 for name in range(1000, 1100)]
        while not stop.is_set():
            if index.holds(steady).tolist() != expected:
                failed.append("a page that never changed was answered wrong")
                return

    thread = threading.Thread(target=read)
    thread.start()
    try:
        for seq in range(1, 1500):
            odd, even = seq % 450 * 2 + 1, seq % 450 * 2
            assert index.apply(delta(seq, added=[odd], removed=[even]))
            assert index.apply(delta(seq, added=[even], removed=[odd]))
    finally:
        stop.set()
        thread.join(30)
    assert not thread.is_alive() and failed == []
    index.check()
    assert index.known == 1000
