"""PullQueue: lanes, deadlines, and the conservation of pulls and slots."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter

import pytest

from tests.support.clock import ManualClock
from tests.support.pages import page_content, page_key
from tierkv.storage.checksum import payload_checksum
from tierkv.storage.clock import Clock, SystemClock
from tierkv.storage.pulls import PullQueue
from tierkv.storage.remote import FINAL, Pull, PullState
from tierkv.storage.tiers.host import HostTier

PAGE_BYTES = 256
WAIT_S = 20.0
SEED = 20261129


class Fixture:
    """A queue over a real host tier."""

    def __init__(self, clock: Clock | None = None, pages: int = 32, pages_max: int = 32) -> None:
        self.clock = clock or SystemClock()
        self.host = HostTier(None, PAGE_BYTES, HostTier.capacity_for(PAGE_BYTES, pages))
        self.queue = PullQueue(self.host, self.clock, pages_max)
        self.ends: Counter[PullState] = Counter()

    def pull(self, number: int, left_s: float = 60.0) -> Pull:
        deadline = self.clock.monotonic() + left_s
        return Pull(page_key(number), 3, deadline, self.host.reserve(1), self._ended)

    def _ended(self, pull: Pull) -> None:
        self.ends[pull.state] += 1

    def fill(self, pull: Pull) -> bytes:
        """Bring the right bytes; returns their checksum."""
        content = page_content(pull.key, PAGE_BYTES)
        with self.queue.view(pull) as view:
            view[:] = content
        return payload_checksum(content)

    def close(self) -> None:
        assert self.queue.close(WAIT_S)
        self.queue.check()
        assert self.host.stats().reserved_pages == 0, "a slot leaked"
        self.host.close()


def test_a_landed_page_is_its_owners_and_its_bytes_are_those_that_came() -> None:
    at = Fixture()
    pull = at.pull(1)
    assert at.queue.submit([("a", pull)]) == 1
    assert at.queue.take("a", 8, WAIT_S) == [pull]
    assert at.queue.land(pull, at.fill(pull)) is PullState.LANDED
    assert at.host.owner_of([pull.key]) == [3]
    with at.host.lease([pull.key]) as lease:
        assert bytes(at.host.view(lease, 0)) == page_content(pull.key, PAGE_BYTES)
    assert at.ends == {PullState.LANDED: 1}
    at.close()


@pytest.mark.parametrize("checksum", [b"", bytes(16)])
def test_w7_what_does_not_match_its_checksum_is_not_landed(checksum: bytes) -> None:
    at = Fixture()
    pull = at.pull(1)
    at.queue.submit([("a", pull)])
    at.queue.take("a", 1, WAIT_S)
    at.fill(pull)
    assert at.queue.land(pull, checksum) is PullState.CORRUPT
    assert pull.state is PullState.CORRUPT and at.host.lookup([pull.key]) == [False]
    at.close()


def test_a_corrupt_page_may_be_kept_for_another_holder() -> None:
    at = Fixture()
    pull = at.pull(1)
    at.queue.submit([("a", pull)])
    at.queue.take("a", 1, WAIT_S)
    checksum = at.fill(pull)
    assert at.queue.land(pull, bytes(16), keep_corrupt=True) is PullState.CORRUPT
    assert pull.state is PullState.RUNNING and pull.target.open
    at.queue.move(pull, "b")
    at.queue.check()
    assert at.queue.take("b", 1, WAIT_S) == [pull]
    assert at.queue.land(pull, checksum) is PullState.LANDED
    at.close()


def test_h1_a_queued_pull_ends_at_its_deadline_with_no_workers_help() -> None:
    at = Fixture()
    late, early = at.pull(1, 0.1), at.pull(2, 0.05)
    at.queue.submit([("a", late)])
    at.queue.submit([("a", early)])
    assert early.future.result(WAIT_S).state is PullState.FAILED
    assert late.future.result(WAIT_S).state is PullState.FAILED
    assert not early.target.open and not late.target.open
    at.close()


def test_h2_the_watch_of_deadlines_survives_a_bug(monkeypatch: pytest.MonkeyPatch) -> None:
    at = Fixture()
    expire = at.queue.expire
    broken = threading.Event()

    def bug() -> None:
        if not broken.is_set():
            broken.set()
            raise RuntimeError("a bug of ours")
        expire()

    monkeypatch.setattr(at.queue, "expire", bug)
    pull = at.pull(1, 0.05)
    at.queue.submit([("a", pull)])
    assert pull.future.result(WAIT_S).state is PullState.FAILED
    assert broken.is_set() and at.queue.restarts == 1
    at.close()


def test_h1_a_deadline_that_was_moved_later_counts() -> None:
    clock = ManualClock()
    at = Fixture(clock)
    pull = at.pull(1, 5.0)
    at.queue.submit([("a", pull)])
    pull.deadline += 10.0
    clock.advance(6.0)
    at.queue.expire()
    assert pull.state is PullState.QUEUED
    clock.advance(10.0)
    at.queue.expire()
    assert pull.state is PullState.FAILED
    at.close()


def test_pulls_of_one_batch_have_about_the_same_time_left() -> None:
    at = Fixture(ManualClock())
    pulls = [at.pull(number, left_s) for number, left_s in enumerate((10, 12, 18, 30, 40, 4, 5))]
    at.queue.submit([("a", pull) for pull in pulls])
    assert at.queue.take("a", 8, 0.0) == pulls[:3]
    assert at.queue.take("a", 8, 0.0) == pulls[3:5]
    assert at.queue.take("a", 8, 0.0) == pulls[5:]
    for pull in pulls:
        at.queue.end(pull, PullState.MISSED)
    at.close()


def test_workers_share_what_is_queued() -> None:
    at = Fixture()
    pulls = [at.pull(number) for number in range(20)]
    at.queue.submit([("a", pull) for pull in pulls])
    sizes = []
    while batch := at.queue.take("a", 16, 0.0, workers=2):
        sizes.append(len(batch))
        for pull in batch:
            at.queue.end(pull, PullState.MISSED)
    assert sizes == [10, 8, 2]
    at.close()


def test_a_lane_has_its_own_pulls_and_can_be_emptied() -> None:
    at = Fixture()
    ours, theirs = [at.pull(1), at.pull(2)], [at.pull(3)]
    at.queue.submit([("a", ours[0]), ("b", theirs[0]), ("a", ours[1])])
    assert (at.queue.queued_in("a"), at.queue.queued_in("b"), at.queue.queued_in("c")) == (2, 1, 0)
    assert at.queue.empty_lane("a") == ours
    assert [pull.state for pull in ours] == [PullState.RUNNING] * 2
    at.queue.check()
    for pull in ours:
        at.queue.move(pull, "b")
    assert at.queue.take("b", 8, 0.0) == theirs + ours
    for pull in theirs + ours:
        at.queue.end(pull, PullState.FAILED)
    assert at.queue.empty_lane("nobody") == []
    at.close()


def test_wake_lets_a_waiting_worker_go() -> None:
    at = Fixture()
    taken: list[list[Pull]] = []
    worker = threading.Thread(target=lambda: taken.append(at.queue.take("a", 8, WAIT_S)))
    worker.start()
    deadline = time.monotonic() + WAIT_S
    while worker.is_alive() and time.monotonic() < deadline:
        at.queue.wake()
    worker.join(WAIT_S)
    assert taken == [[]]
    at.close()


def test_what_there_is_no_room_for_is_refused_and_stays_the_callers() -> None:
    at = Fixture(pages_max=2)
    pulls = [at.pull(number) for number in range(3)]
    assert at.queue.submit([("a", pull) for pull in pulls]) == 2
    assert at.queue.refused == 1 and pulls[2].target.open
    pulls[2].target.release()
    for pull in pulls[:2]:
        assert at.queue.cancel(pull) and not at.queue.cancel(pull)
    at.close()


def test_closing_cancels_what_is_queued_and_waits_for_what_runs() -> None:
    at = Fixture()
    running, queued = at.pull(1), at.pull(2)
    at.queue.submit([("a", running), ("b", queued)])
    at.queue.take("a", 1, 0.0)
    assert not at.queue.close(0.0)
    assert queued.state is PullState.CANCELLED and running.target.open
    at.queue.move(running, "b")
    assert running.state is PullState.CANCELLED
    late = at.pull(3)
    assert at.queue.submit([("a", late)]) == 0
    late.target.release()
    at.close()


def test_h3_pulls_and_slots_are_conserved_whatever_happens() -> None:
    print(f"seed {SEED}")
    random_ = random.Random(SEED)
    clock = ManualClock()
    at = Fixture(clock, pages=64, pages_max=24)
    queued: list[Pull] = []
    running: list[Pull] = []
    for number in range(2000):
        act = random_.randrange(7)
        if act == 0 and at.host.stats().free_pages:
            pull = at.pull(number, random_.choice((1.0, 5.0, 60.0)))
            if at.queue.submit([(random_.choice("abc"), pull)]):
                queued.append(pull)
            else:
                pull.target.release()
        elif act == 1:
            running += at.queue.take(random_.choice("abc"), random_.randrange(1, 5), 0.0)
        elif act == 2 and running:
            pull = running.pop(random_.randrange(len(running)))
            at.queue.land(pull, random_.choice((at.fill(pull), bytes(16))))
        elif act == 3 and running:
            at.queue.move(running.pop(), random_.choice("abc"))
        elif act == 4 and queued:
            at.queue.cancel(random_.choice(queued))
        elif act == 5:
            clock.advance(random_.random())
            at.queue.expire()
        elif act == 6 and random_.random() < 0.2:
            running += at.queue.empty_lane(random_.choice("abc"))
        queued = [pull for pull in queued if pull.state not in FINAL]
        at.queue.check()
        at.host.check()
        at.host.evict(2)
    for pull in running:
        at.queue.end(pull, PullState.FAILED)
    at.close()
    assert len(at.ends) == 4, at.ends
