"""Following one peer's journal: deltas, snapshots in parts, and peers that answer nonsense."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest

from tierkv.storage.errors import TierIOError
from tierkv.storage.pool import follower
from tierkv.storage.pool.follower import RESTARTS_MAX, ROUNDS_MAX, Follower
from tierkv.storage.pool.holdings import Fingerprints
from tierkv.storage.pool.messages import (
    AnyRequest,
    Changes,
    Refusal,
    SnapshotAsk,
    SnapshotPart,
    Status,
    Sync,
    SyncAnswer,
)

SIZE = 4096
SEED = 20261129


def prints(*numbers: int) -> Fingerprints:
    return np.array(sorted(numbers), np.uint64)


class Peer:
    """A journal that is whatever the test says."""

    def __init__(self) -> None:
        self.token = 1
        self.log: list[tuple[bool, int]] = []
        self.kept_from = 0
        self.per_answer = 1000
        self.asked: list[AnyRequest] = []
        self.during_snapshot: Callable[[], None] | None = None
        self.part = 4

    def held(self) -> set[int]:
        held: set[int] = set()
        for gained, number in self.log:
            (held.add if gained else held.discard)(number)
        return held

    def __call__(self, request: AnyRequest) -> object:
        self.asked.append(request)
        if isinstance(request, Sync):
            return SyncAnswer(False, (SIZE,), tuple(self._changes(*want) for want in request.wants))
        assert isinstance(request, SnapshotAsk)
        whole = prints(*self.held())
        seq = len(self.log)
        begun = (request.token, request.seq) == (self.token, seq)
        start = request.start if begun else 0
        part = SnapshotPart(self.token, seq, len(whole), whole[start : start + self.part])
        if self.during_snapshot is not None:
            self.during_snapshot()
        return part

    def _changes(self, size: int, token: int, since: int) -> Changes:
        nothing = prints()
        if token != self.token or since < self.kept_from:
            return Changes(size, self.token, 0, nothing, nothing, snapshot_needed=True)
        end = min(len(self.log), since + self.per_answer)
        last = {number: gained for gained, number in self.log[since:end]}
        return Changes(
            size,
            self.token,
            end,
            prints(*(number for number, gained in last.items() if gained)),
            prints(*(number for number, gained in last.items() if not gained)),
            more=end < len(self.log),
        )


def known(following: Follower, limit: int = 200) -> set[int]:
    index = following.index(SIZE)
    assert index is not None
    return {n for n, held in enumerate(index.holds(prints(*range(limit))).tolist()) if held}


def test_a_new_peer_is_heard_whole_in_parts_then_by_its_changes() -> None:
    peer, following = Peer(), Follower()
    peer.log = [(True, number) for number in range(10)]
    following.follow([SIZE], peer)
    assert known(following) == set(range(10)) and following.known == 10
    assert sum(isinstance(request, SnapshotAsk) for request in peer.asked) == 3
    peer.log += [(False, 3), (True, 77)]
    peer.asked.clear()
    following.follow([SIZE], peer)
    assert known(following) == peer.held() and len(peer.asked) == 1
    following.check()


def test_a_peer_with_much_to_tell_is_asked_until_it_has() -> None:
    peer, following = Peer(), Follower()
    following.follow([SIZE], peer)
    peer.per_answer = 3
    peer.log = [(True, number) for number in range(100)]
    following.follow([SIZE], peer)
    assert known(following) == set(range(100))


def test_h1_one_heartbeat_has_a_bounded_number_of_rounds() -> None:
    peer, following = Peer(), Follower()
    following.follow([SIZE], peer)
    peer.per_answer = 1
    peer.log = [(True, number) for number in range(150)]
    peer.asked.clear()
    following.follow([SIZE], peer)
    assert len(peer.asked) == ROUNDS_MAX + 1
    while known(following) != peer.held():
        following.follow([SIZE], peer)
    following.check()


def test_a_snapshot_that_is_overtaken_begins_anew_a_bounded_number_of_times() -> None:
    peer, following = Peer(), Follower()
    peer.log = [(True, number) for number in range(20)]
    left = iter(range(3))

    def change() -> None:
        if next(left, None) is not None:
            peer.log.append((True, 100 + len(peer.log)))

    peer.during_snapshot = change
    following.follow([SIZE], peer)
    assert known(following) == peer.held()
    endless = Follower()
    peer.during_snapshot = lambda: peer.log.append((True, 5))
    with pytest.raises(TierIOError, match="began anew"):
        endless.follow([SIZE], peer)
    restarts = [request for request in peer.asked if isinstance(request, SnapshotAsk)]
    assert len(restarts) <= 20 + RESTARTS_MAX


def test_a_journal_that_was_cut_or_begun_anew_leads_to_a_snapshot() -> None:
    peer, following = Peer(), Follower()
    peer.log = [(True, number) for number in range(10)]
    following.follow([SIZE], peer)
    peer.log += [(False, number) for number in range(5)] * 3
    peer.kept_from = len(peer.log) - 2
    following.follow([SIZE], peer)
    assert known(following) == peer.held()
    peer.token, peer.log, peer.kept_from = 2, [(True, 150)], 0
    following.follow([SIZE], peer)
    assert known(following) == {150}


def test_a_page_size_that_is_served_no_more_is_known_of_no_more() -> None:
    peer, following = Peer(), Follower()
    peer.log = [(True, 1)]
    following.follow([SIZE], peer)
    following.follow([SIZE], lambda request: SyncAnswer(False, (), ()))
    assert known(following) == set()
    following.follow([], lambda request: SyncAnswer(False, (), ()))
    assert following.index(SIZE) is None


def test_a_size_that_goes_before_its_snapshot_is_no_trouble() -> None:
    peer, following = Peer(), Follower()

    def gone(request: AnyRequest) -> object:
        return Refusal(Status.NO_CLASS) if isinstance(request, SnapshotAsk) else peer(request)

    following.follow([SIZE], gone)
    assert known(following) == set()


@pytest.mark.parametrize(
    "nonsense",
    [Refusal(Status.NO_CLASS), SnapshotPart(1, 1, 0, prints()), None],
)
def test_an_answer_that_is_none_ends_the_round_and_keeps_what_was_heard(nonsense: object) -> None:
    peer, following = Peer(), Follower()
    peer.log = [(True, 1), (True, 2)]
    following.follow([SIZE], peer)
    with pytest.raises(TierIOError):
        following.follow([SIZE], lambda request: nonsense)
    assert known(following) == {1, 2}


def test_a_snapshot_out_of_order_is_refused_whole() -> None:
    peer, following = Peer(), Follower()

    def damaged(request: AnyRequest) -> object:
        if isinstance(request, SnapshotAsk):
            return SnapshotPart(1, 1, 3, np.array([3, 1, 2], np.uint64))
        return peer(request)

    with pytest.raises(TierIOError, match="not in order"):
        following.follow([SIZE], damaged)
    assert known(following) == set()


def test_no_more_is_remembered_than_there_is_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follower, "SNAPSHOT_PAGES_MAX", 8)
    peer, following = Peer(), Follower()
    peer.log = [(True, number) for number in range(100)]
    following.follow([SIZE], peer)
    assert known(following) == set(range(8)), "the first; the others are not found here"


def test_following_a_random_journal_converges() -> None:
    print(f"seed {SEED}")
    random_ = random.Random(SEED)
    peer, following = Peer(), Follower()
    for _ in range(300):
        for _ in range(random_.randrange(6)):
            peer.log.append((random_.random() < 0.6, random_.randrange(200)))
        if random_.random() < 0.1:
            peer.kept_from = len(peer.log)
        if random_.random() < 0.03:
            peer.token += 1
            peer.kept_from = 0
            peer.log = peer.log[-5:]
        following.follow([SIZE], peer)
        assert known(following) == peer.held()
        following.check()
