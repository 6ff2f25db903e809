"""What every Remote must do, sentence by sentence of storage/remote.py.

Subclass RemoteConformance in a test module and give it open_pair(): two stores whose remote tiers
reach each other, or share one medium. What is put on the far side is pulled on the near side. The
hooks below it say how pages get there and how a transfer is held up; their defaults suit a remote
that serves pages out of the far store's own arena. Each test ends with check() on both sides.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.support.pages import page_content, page_keys, put_store, take_content
from tierkv.storage.errors import TierClosedError
from tierkv.storage.remote import FINAL, Pull, PullState, Remote
from tierkv.storage.store import TieredStore
from tierkv.storage.types import PageKey, TierName

PAGE_BYTES = 5000
HOST_PAGES = 96
"""The near store's host holds at least this many pages."""
WAIT_S = 30.0
SHORT_S = 0.2
OWNER = 7


@dataclass
class Pair:
    """Two stores that share a remote medium."""

    near: TieredStore
    near_remote: Remote
    far: TieredStore
    far_remote: Remote
    closers: list[Callable[[], object]] = field(default_factory=list)
    """What else is to be closed, after the stores, in this order."""
    closed: list[TieredStore] = field(default_factory=list)
    """Stores that the test itself closed."""


class RemoteConformance:
    """The suite."""

    queue_pages = 64
    """Pulls that the near remote takes over at most."""
    running_pages = 8
    """Pulls that its workers hold at most at a time."""

    # --- what a subclass says

    def open_pair(self, folder: Path) -> Pair:
        """Two stores of PAGE_BYTES, HOST_PAGES of host, with their remotes attached."""
        raise AssertionError("a subclass opens its stores here")

    def stalled(self, pair: Pair) -> AbstractContextManager[None]:
        """Inside, no transfer to the near side makes progress, and none fails."""
        pytest.skip("this remote's transfers cannot be held up from outside")

    def damage(self, pair: Pair, key: PageKey) -> None:
        """Change a byte of the copy that the near side would get."""
        with pair.far.fetch([key], WAIT_S, here=True).take(WAIT_S) as lease:
            start = pair.far.payload_offset(lease.slots[0])
        with pair.far.arena_memory() as memory:
            memory[start + PAGE_BYTES // 2] ^= 0x10

    def forget(self, pair: Pair, key: PageKey) -> None:
        """Remove the copy that the near side would get, which may still believe in it."""
        pair.far.drop([key], TierName.HOST)

    # --- what the tests use

    @pytest.fixture
    def pair(self, tmp_path: Path) -> Iterator[Pair]:
        pair = self.open_pair(tmp_path)
        try:
            yield pair
            for store in (each for each in (pair.near, pair.far) if each not in pair.closed):
                assert store.wait_quiet(WAIT_S)
                store.check()
        finally:
            pair.near.close()
            pair.far.close()
            for close in pair.closers:
                close()

    def put(self, pair: Pair, *numbers: int) -> list[PageKey]:
        """Put pages on the far side and wait until the near side knows of them."""
        keys = page_keys(*numbers)
        put_store(pair.far, keys)
        assert pair.far_remote.flush(WAIT_S)

        def known() -> bool:
            pair.near_remote.ask(keys, SHORT_S)
            return all(pair.near_remote.holds(keys))

        wait_until(known, "the near side never heard of the pages")
        return keys

    def pull(self, pair: Pair, key: PageKey, deadline_s: float = WAIT_S) -> Pull:
        """A pull of one page, not submitted."""
        target = pair.near.host.reserve(1)
        assert len(target) == 1, "the test's host is full"
        return Pull(key, OWNER, time.monotonic() + deadline_s, target, lambda _: None)

    # --- bringing pages

    def test_what_was_put_on_one_side_is_pulled_on_the_other_identical(self, pair: Pair) -> None:
        keys = self.put(pair, *range(12))
        assert pair.near.lookup(keys) == [TierName.REMOTE] * 12
        assert take_content(pair.near, keys, WAIT_S) == 12
        assert pair.near.lookup(keys) == [TierName.HOST] * 12
        assert pair.near.stats().restored_pages == {TierName.REMOTE: 12}

    def test_a_pull_lands_as_its_owners_page(self, pair: Pair) -> None:
        (key,) = self.put(pair, 1)
        pull = self.pull(pair, key)
        assert pair.near_remote.submit([pull]) == 1
        assert pull.future.result(WAIT_S) is pull
        assert pull.state is PullState.LANDED
        assert pair.near.keys_of(OWNER, TierName.HOST) == [key]
        assert not pull.target.open

    def test_bytes_and_time_are_told_to_the_meters(self, pair: Pair) -> None:
        keys = self.put(pair, *range(4))
        assert take_content(pair.near, keys, WAIT_S) == 4
        mover = pair.near.stats().mover
        assert mover.read_bytes_per_s[TierName.REMOTE] > 0
        assert mover.read_latency_s[TierName.REMOTE] > 0

    def test_a_page_that_nobody_has_is_missed_not_failed(self, pair: Pair) -> None:
        pull = self.pull(pair, page_keys(77)[0])
        assert pair.near_remote.submit([pull]) == 1
        pull.future.result(WAIT_S)
        assert pull.state is PullState.MISSED
        stats = pair.near_remote.stats()
        assert (stats.missed, stats.failed, stats.corrupt) == (1, 0, 0)

    def test_a_page_that_is_gone_is_missed_whatever_was_believed(self, pair: Pair) -> None:
        keys = self.put(pair, 1, 2)
        self.forget(pair, keys[0])
        gone, there = (self.pull(pair, key) for key in keys)
        assert pair.near_remote.submit([gone, there]) == 2
        gone.future.result(WAIT_S)
        there.future.result(WAIT_S)
        assert (gone.state, there.state) == (PullState.MISSED, PullState.LANDED)
        assert pair.near.lookup_here(keys) == [False, True]

    def test_w7_a_flipped_byte_never_lands(self, pair: Pair) -> None:
        keys = self.put(pair, 1, 2)
        self.damage(pair, keys[0])
        pulls = [self.pull(pair, key) for key in keys]
        assert pair.near_remote.submit(pulls) == 2
        for pull in pulls:
            pull.future.result(WAIT_S)
        assert pulls[0].state in (PullState.CORRUPT, PullState.MISSED, PullState.FAILED)
        assert pulls[1].state is PullState.LANDED
        assert pair.near.lookup_here(keys) == [False, True]

    # --- what is known without asking

    def test_l1_holds_and_ask_have_no_side_effects(self, pair: Pair) -> None:
        keys = self.put(pair, 1, 2, 3)
        before, order = pair.far.stats(), pair.far.host.keys_of()
        known = pair.near_remote.stats().known_pages
        for _ in range(20):
            pair.near_remote.ask(keys, SHORT_S)
            assert pair.near_remote.holds([*keys, *page_keys(99)]) == [True, True, True, False]
        assert pair.far.host.keys_of() == order
        assert pair.far.stats().tiers == before.tiers
        stats = pair.near_remote.stats()
        assert stats.known_pages == known
        assert (stats.queued, stats.running, stats.landed) == (0, 0, 0)

    def test_asking_for_nothing_and_for_nobodys_pages_raises_nothing(self, pair: Pair) -> None:
        assert pair.near_remote.holds([]) == []
        pair.near_remote.ask([], SHORT_S)
        pair.near_remote.ask(page_keys(50, 51), SHORT_S)
        assert pair.near_remote.holds(page_keys(50, 51)) == [False, False]

    # --- bounds, ends and what is held meanwhile

    def test_h1_a_pull_past_its_deadline_fails(self, pair: Pair) -> None:
        (key,) = self.put(pair, 1)
        pull = self.pull(pair, key, deadline_s=0.0)
        assert pair.near_remote.submit([pull]) == 1
        pull.future.result(WAIT_S)
        assert pull.state is PullState.FAILED
        assert not pull.target.open
        assert pair.near.lookup_here([key]) == [False]

    def test_a_full_queue_refuses_the_tail_and_counts_it(self, pair: Pair) -> None:
        keys = self.put(pair, *range(4))
        pulls = [self.pull(pair, keys[i % 4]) for i in range(self.queue_pages + 3)]
        with self.stalled(pair):
            assert pair.near_remote.submit(pulls) == self.queue_pages
            assert pair.near_remote.stats().refused == 3
            for refused in pulls[self.queue_pages :]:
                assert refused.target.open and refused.state is PullState.QUEUED
                refused.target.release()
            pair.near_remote.check()
        for pull in pulls[: self.queue_pages]:
            pull.future.result(WAIT_S)
        assert pair.near_remote.wait_quiet(WAIT_S)
        stats = pair.near_remote.stats()
        assert (stats.landed, stats.refused) == (self.queue_pages, 3)

    def test_h3_what_is_queued_can_be_cancelled_what_runs_cannot(self, pair: Pair) -> None:
        keys = self.put(pair, *range(4))
        count = self.running_pages + 4
        ends: list[Pull] = []
        with self.stalled(pair):
            pulls = [self.pull(pair, keys[i % 4]) for i in range(count)]
            for pull in pulls:
                pull.future.add_done_callback(lambda future: ends.append(future.result()))
            assert pair.near_remote.submit(pulls) == count
            cancelled = [pull for pull in reversed(pulls) if pair.near_remote.cancel(pull)]
            assert len(cancelled) >= 4
            for pull in cancelled:
                assert pull.state is PullState.CANCELLED and not pull.target.open
                assert not pair.near_remote.cancel(pull), "cancelled twice"
            for pull in set(pulls) - set(cancelled):
                assert pull.state in FINAL or pull.target.open
        for pull in pulls:
            pull.future.result(WAIT_S)
        assert sorted(map(id, ends)) == sorted(map(id, pulls)), "a pull ends once"
        assert pair.near_remote.wait_quiet(WAIT_S)
        assert pair.near_remote.stats().cancelled == len(cancelled)

    def test_a_slot_is_held_as_long_as_bytes_may_still_come(self, pair: Pair) -> None:
        keys = self.put(pair, 1, 2)
        pulls = [self.pull(pair, key, deadline_s=SHORT_S) for key in keys]
        with self.stalled(pair):
            assert pair.near_remote.submit(pulls) == 2
            wait_until(
                lambda: time.monotonic() > pulls[0].deadline, "the clock stands still", SHORT_S
            )
            pair.near_remote.check()
            for pull in pulls:
                # Either nobody will write into it any more, or it is still reserved.
                assert pull.state in FINAL or pull.target.open
            if any(pull.state not in FINAL for pull in pulls):
                assert not pair.near_remote.quiet
        for pull in pulls:
            pull.future.result(WAIT_S)
            assert not pull.target.open
        assert pair.near_remote.wait_quiet(WAIT_S) and pair.near_remote.quiet

    def test_pulls_are_conserved(self, pair: Pair) -> None:
        keys = self.put(pair, *range(6))
        self.forget(pair, keys[5])
        wanted = [*keys, *page_keys(90, 91)]
        pulls = [self.pull(pair, key) for key in wanted]
        assert pair.near_remote.submit(pulls) == len(wanted)
        for pull in pulls:
            pull.future.result(WAIT_S)
        assert pair.near_remote.wait_quiet(WAIT_S)
        pair.near_remote.check()
        stats = pair.near_remote.stats()
        ended = stats.landed + stats.missed + stats.corrupt + stats.failed + stats.cancelled
        assert (stats.queued, stats.running, ended) == (0, 0, len(wanted))
        assert (stats.landed, stats.missed) == (5, 3)

    # --- the end

    def test_closing_ends_what_is_queued_and_waits_for_what_runs(self, pair: Pair) -> None:
        keys = self.put(pair, *range(4))
        count = self.running_pages + 4
        with self.stalled(pair):
            pulls = [self.pull(pair, keys[i % 4]) for i in range(count)]
            assert pair.near_remote.submit(pulls) == count
            let_go = pair.near_remote.close(SHORT_S)
            for pull in pulls:
                assert pull.state in FINAL or (not let_go and pull.target.open)
            assert sum(pull.state is PullState.CANCELLED for pull in pulls) >= 4
        assert pair.near_remote.close(WAIT_S), "nothing is in the way any more"
        for pull in pulls:
            assert pull.state in FINAL and not pull.target.open
        pair.near_remote.check()

    def test_after_close_nothing_is_held_and_nothing_taken_over(self, pair: Pair) -> None:
        (key,) = self.put(pair, 1)
        assert pair.near_remote.close(WAIT_S)
        assert pair.near_remote.close(WAIT_S), "a second close changes nothing"
        pair.near_remote.ask([key], SHORT_S)
        assert pair.near_remote.holds([key]) == [False]
        pull = self.pull(pair, key)
        assert pair.near_remote.submit([pull]) == 0
        pull.target.release()
        assert pair.near.lookup([key]) == [None]

    def test_closing_the_store_closes_its_remote_first(self, pair: Pair) -> None:
        keys = self.put(pair, 1, 2)
        fetch = pair.near.fetch(keys, WAIT_S)
        pair.near.close()
        pair.closed.append(pair.near)
        assert fetch.done
        with pytest.raises(TierClosedError):
            pair.near.lookup(keys)
        # The far side serves on.
        assert take_content(pair.far, keys) == 2

    def test_many_threads_pull_and_cancel_and_every_pull_ends(self, pair: Pair) -> None:
        keys = self.put(pair, *range(8))

        def work(number: int) -> None:
            for turn in range(6):
                fetch = pair.near.fetch(keys[(number + turn) % 8 :], WAIT_S)
                if (number + turn) % 3 == 0:
                    fetch.cancel()
                    continue
                with fetch.take(WAIT_S) as lease:
                    for key, view in zip(lease.keys, lease.views, strict=True):
                        if bytes(view) != page_content(key, PAGE_BYTES):
                            wrong.append(key)
                pair.near.drop(keys[:number], TierName.HOST)

        wrong: list[PageKey] = []
        run_threads([threading.Thread(target=work, args=(number,)) for number in range(4)])
        assert not wrong
        assert pair.near.wait_quiet(WAIT_S)
        pair.near.check()


def wait_until(condition: Callable[[], bool], otherwise: str, bound_s: float = 0.0) -> None:
    """Ask again and again, for WAIT_S and `bound_s` at most."""
    deadline = time.monotonic() + WAIT_S + bound_s
    pause = threading.Event()
    while not condition():
        assert time.monotonic() < deadline, otherwise
        pause.wait(0.005)


def run_threads(threads: Sequence[threading.Thread]) -> None:
    """Start them all and see them end."""
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
        assert not thread.is_alive(), "a thread hangs"


@contextlib.contextmanager
def between(before: Callable[[], None], after: Callable[[], None]) -> Iterator[None]:
    """For stalled(): run one on entering, the other on leaving."""
    before()
    try:
        yield
    finally:
        after()
