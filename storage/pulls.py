"""Pulls by lane: who waits for which peer, what they hold, and how they end.

Owns the queue of every lane (a peer, or the one service there is), and each pull's host slot from
submit() to its end. Knows neither networks nor who holds a page: the workers of a remote tier take
pulls, bring the bytes and say what came of it. Called by storage/pool and storage/mooncake.

Invariants: accepted == queued + running + ended; a slot is given back when its pull ends, not
before; what is committed had its checksum compared; a pull whose deadline passed in the queue ends
as FAILED when a worker comes to it or expire() is called.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Sequence

from tierkv.storage.base import MappedTier
from tierkv.storage.checksum import payload_checksum
from tierkv.storage.clock import Clock
from tierkv.storage.remote import FINAL, Pull, PullState
from tierkv.storage.types import CommitOutcome


class PullQueue:
    """See the module docstring. Thread-safe."""

    def __init__(self, host: MappedTier, clock: Clock, pages_max: int) -> None:
        """`pages_max`: pulls that are queued or running, all lanes together."""
        self._host = host
        self._clock = clock
        self._pages_max = pages_max
        self._changed = threading.Condition()
        self._lanes: dict[str, deque[Pull]] = {}
        self._lane_of: dict[Pull, str] = {}
        self._running: set[Pull] = set()
        self._accepted = 0
        self._refused = 0
        self._ended: Counter[PullState] = Counter()
        self._closing = False

    def submit(self, pulls: Sequence[tuple[str, Pull]]) -> int:
        """Queue the leading (lane, pull) pairs that there is room for; returns how many."""
        with self._changed:
            room = 0 if self._closing else self._pages_max - self._under_way()
            taken = pulls[: max(0, room)]
            self._refused += len(pulls) - len(taken)
            self._accepted += len(taken)
            for lane, pull in taken:
                self._append(lane, pull)
            self._changed.notify_all()
            return len(taken)

    def take(self, lane: str, count: int, timeout_s: float) -> list[Pull]:
        """Up to `count` pulls of a lane, RUNNING from now on; waits for the first at most
        `timeout_s`. Empty past it and when the queue closes."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._closing or bool(self._lanes.get(lane)), max(0.0, timeout_s)
            )
            now = self._clock.monotonic()
            taken: list[Pull] = []
            late: list[Pull] = []
            queue = self._lanes.get(lane, deque())
            while queue and len(taken) < count and not self._closing:
                pull = queue.popleft()
                self._begin(pull)
                (late if pull.deadline <= now else taken).append(pull)
        for pull in late:
            self.end(pull, PullState.FAILED)
        return taken

    def move(self, pull: Pull, lane: str) -> None:
        """Put a RUNNING pull back into the queue of another lane. Ends it when closing."""
        with self._changed:
            closing = self._closing
            if not closing:
                self._running.remove(pull)
                pull.state = PullState.QUEUED
                self._append(lane, pull)
                self._changed.notify_all()
        if closing:
            self.end(pull, PullState.CANCELLED)

    def view(self, pull: Pull) -> memoryview:
        """Writable view of a RUNNING pull's payload, page_bytes long, until it ends."""
        assert pull.state is PullState.RUNNING, pull.state
        return self._host.payload(pull.target, 0)

    def land(self, pull: Pull, checksum: bytes) -> PullState:
        """The bytes of a RUNNING pull are there: compare, commit and end it; returns its state.

        `checksum`: the page's own, 16 bytes, from whoever recorded it at its commit; empty when
        the page never had one, which cannot be believed and is CORRUPT. O(bytes).
        """
        with self.view(pull) as payload:
            sound = bool(checksum) and payload_checksum(payload) == checksum
        if not sound:
            self.end(pull, PullState.CORRUPT)
            return pull.state
        self._host.seal(pull.target, 0, checksum)
        (outcome,) = self._host.commit(pull.target, [pull.key], pull.owner)
        failed = outcome is CommitOutcome.FAILED
        self.end(pull, PullState.FAILED if failed else PullState.LANDED)
        return pull.state

    def end(self, pull: Pull, state: PullState) -> None:
        """End a RUNNING pull whose slot nobody writes any more: give it back, tell, count."""
        assert state in FINAL and pull.state is PullState.RUNNING, (state, pull.state)
        pull.target.release()
        pull.state = state
        pull.future.set_result(pull)
        with self._changed:
            self._running.remove(pull)
            self._ended[state] += 1
            self._changed.notify_all()

    def cancel(self, pull: Pull) -> bool:
        """End a pull that is still queued; False when it runs or has ended. O(lane)."""
        with self._changed:
            if pull.state is not PullState.QUEUED:
                return False
            self._lanes[self._lane_of[pull]].remove(pull)
            self._begin(pull)
        self.end(pull, PullState.CANCELLED)
        return True

    def expire(self) -> None:
        """End queued pulls whose deadline has passed. O(queued)."""
        now = self._clock.monotonic()
        with self._changed:
            late = [pull for pull in self._lane_of if pull.deadline <= now]
            for pull in late:
                self._lanes[self._lane_of[pull]].remove(pull)
                self._begin(pull)
        for pull in late:
            self.end(pull, PullState.FAILED)

    def empty_lane(self, lane: str) -> list[Pull]:
        """Take every queued pull of a lane out, RUNNING: its peer is gone; move() or end() them."""
        with self._changed:
            queue = self._lanes.pop(lane, deque())
            for pull in queue:
                self._begin(pull)
        return list(queue)

    def wake(self) -> None:
        """Let take() look again: something else changed that its caller waits for."""
        with self._changed:
            self._changed.notify_all()

    @property
    def quiet(self) -> bool:
        """True when nothing is queued or running."""
        with self._changed:
            return not self._under_way()

    def wait_quiet(self, timeout_s: float) -> bool:
        """Wait until nothing is queued or running; False past the timeout."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._under_way(), max(0.0, timeout_s))

    def close(self, timeout_s: float) -> bool:
        """Cancel what is queued, accept nothing more and wait for what runs; False past the
        timeout: slots are still held. Idempotent."""
        with self._changed:
            self._closing = True
            left = list(self._lane_of)
            self._changed.notify_all()
        for pull in left:
            self.cancel(pull)
        return self.wait_quiet(timeout_s)

    @property
    def queued(self) -> int:
        """Pulls that no worker has."""
        return len(self._lane_of)

    @property
    def running(self) -> int:
        """Pulls that a worker has."""
        return len(self._running)

    @property
    def refused(self) -> int:
        """Pulls that found no room."""
        return self._refused

    def ended(self, state: PullState) -> int:
        """How many pulls ended so."""
        return self._ended[state]

    def check(self) -> None:
        """Assert conservation of pulls and of what they hold. O(queued)."""
        with self._changed:
            ended = self._ended.total()
            assert self._accepted == self._under_way() + ended, (
                self._accepted,
                len(self._lane_of),
                len(self._running),
                ended,
            )
            assert self._under_way() <= self._pages_max, "more pulls than allowed"
            queued = [pull for lane in self._lanes.values() for pull in lane]
            assert len(queued) == len(self._lane_of), "a queued pull is in no lane, or in two"
            for pull in queued:
                assert pull.state is PullState.QUEUED and pull.target.open, pull.state

    def _under_way(self) -> int:
        return len(self._lane_of) + len(self._running)

    def _append(self, lane: str, pull: Pull) -> None:
        self._lanes.setdefault(lane, deque()).append(pull)
        self._lane_of[pull] = lane

    def _begin(self, pull: Pull) -> None:
        del self._lane_of[pull]
        pull.state = PullState.RUNNING
        self._running.add(pull)
