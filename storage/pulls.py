"""Pulls by lane: who waits for which peer, what they hold, and how they end.

Owns the queue of every lane (a peer, or the one service there is), and each pull's host slot from
submit() to its end. Knows neither networks nor who holds a page: the workers of a remote tier take
pulls, bring the bytes and say what came of it. Called by storage/pool and storage/mooncake.

Invariants: accepted == queued + running + ended; a slot is given back when its pull ends, not
before; what is committed had its checksum compared; a pull whose deadline passes in the queue ends
as FAILED then, with no worker's help.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Sequence

from tierkv.storage.base import MappedTier
from tierkv.storage.checksum import payload_checksum
from tierkv.storage.clock import Clock
from tierkv.storage.deadlines import DeadlineWatch
from tierkv.storage.remote import FINAL, Pull, PullState
from tierkv.storage.types import CommitOutcome

WATCH_STOP_S = 5.0
BATCH_PAGES_MIN = 8
"""What one of several workers takes at least, if there is so much."""


class _Lane:
    """The pulls that wait for one peer, and the workers that wait for pulls."""

    __slots__ = ("pulls", "ready", "waiting")

    def __init__(self, lock: threading.RLock) -> None:
        self.pulls: deque[Pull] = deque()
        self.ready = threading.Condition(lock)
        self.waiting = 0


class PullQueue:
    """See the module docstring. Thread-safe."""

    def __init__(self, host: MappedTier, clock: Clock, pages_max: int) -> None:
        """`pages_max`: pulls that are queued or running, all lanes together."""
        self._host = host
        self._clock = clock
        self._pages_max = pages_max
        lock = threading.RLock()
        self._lock = lock
        self._changed = threading.Condition(lock)
        """Told when a pull ended. A lane's own condition tells its workers, and nobody else's."""
        self._lanes: dict[str, _Lane] = {}
        self._lane_of: dict[Pull, str] = {}
        self._running: set[Pull] = set()
        self._accepted = 0
        self._refused = 0
        self._ended: Counter[PullState] = Counter()
        self._closing = False
        self._wakes = 0
        self._watch = DeadlineWatch(clock)
        self._watched_until: float | None = None
        """The moment at which the watch looks next; None: it does not."""

    def submit(self, pulls: Sequence[tuple[str, Pull]]) -> int:
        """Queue the leading (lane, pull) pairs that there is room for; returns how many."""
        with self._lock:
            room = 0 if self._closing else self._pages_max - self._under_way()
            taken = pulls[: max(0, room)]
            self._refused += len(pulls) - len(taken)
            self._accepted += len(taken)
            for lane, pull in taken:
                self._append(lane, pull)
            self._watch_deadlines([pull for _, pull in taken])
            return len(taken)

    def take(self, lane: str, count: int, timeout_s: float, *, workers: int = 1) -> list[Pull]:
        """Up to `count` pulls of a lane, RUNNING from now on; waits for the first at most
        `timeout_s`. Empty past it, after wake() and when the queue closes.

        `workers` of the lane share what is queued: each takes its part, if that is not too small
        to be worth a batch. The times left of a batch's pulls differ by no more than a factor of
        two, so that what is asked for together can be given up together.
        """
        with self._lock:
            waited = self._lane(lane)
            waited.waiting += 1
            wakes = self._wakes
            try:
                waited.ready.wait_for(
                    lambda: self._closing or bool(waited.pulls) or self._wakes != wakes,
                    max(0.0, timeout_s),
                )
            finally:
                waited.waiting -= 1
            part = max(BATCH_PAGES_MIN, -(-len(waited.pulls) // workers))
            taken, late = self._cut_batch(waited.pulls, min(count, part))
            self._drop_if_idle(lane)
        for pull in late:
            self.end(pull, PullState.FAILED)
        return taken

    def _cut_batch(self, queue: deque[Pull], count: int) -> tuple[list[Pull], list[Pull]]:
        """The next batch of a lane, and the pulls before its end that are late. Under the lock."""
        now = self._clock.monotonic()
        taken: list[Pull] = []
        late: list[Pull] = []
        while queue and len(taken) < count and not self._closing:
            left_s = queue[0].deadline - now
            if taken and left_s > 0:
                first_s = taken[0].deadline - now
                if not first_s / 2 <= left_s <= 2 * first_s:
                    break
            pull = queue.popleft()
            self._begin(pull)
            (late if left_s <= 0 else taken).append(pull)
        return taken, late

    def move(self, pull: Pull, lane: str) -> None:
        """Put a RUNNING pull back into the queue of another lane. Ends it when closing."""
        with self._lock:
            closing = self._closing
            if not closing:
                self._running.remove(pull)
                pull.state = PullState.QUEUED
                self._append(lane, pull)
                self._watch_deadlines([pull])
        if closing:
            self.end(pull, PullState.CANCELLED)

    def view(self, pull: Pull) -> memoryview:
        """Writable view of a RUNNING pull's payload, page_bytes long, until it ends."""
        assert pull.state is PullState.RUNNING, pull.state
        return self._host.payload(pull.target, 0)

    def land(self, pull: Pull, checksum: bytes, *, keep_corrupt: bool = False) -> PullState:
        """The bytes of a RUNNING pull are there: compare, commit and end it; returns its state.

        `checksum`: the page's own, 16 bytes, from whoever recorded it at its commit; empty when
        the page never had one, which cannot be believed and is CORRUPT. With `keep_corrupt` such
        a pull stays RUNNING, and CORRUPT is returned all the same: another holder may have the
        page as it should be; move() or end() it. O(bytes).
        """
        with self.view(pull) as payload:
            sound = bool(checksum) and payload_checksum(payload) == checksum
        if not sound:
            if not keep_corrupt:
                self.end(pull, PullState.CORRUPT)
            return PullState.CORRUPT
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
        with self._lock:
            if pull.state is not PullState.QUEUED:
                return False
            self._leave_lane(pull)
        self.end(pull, PullState.CANCELLED)
        return True

    def expire(self) -> None:
        """End queued pulls whose deadline passed; the queue does it by itself too. O(queued)."""
        now = self._clock.monotonic()
        with self._lock:
            late = [pull for pull in self._lane_of if pull.deadline <= now]
            for pull in late:
                self._leave_lane(pull)
        for pull in late:
            self.end(pull, PullState.FAILED)

    def empty_lane(self, lane: str) -> list[Pull]:
        """Take every queued pull of a lane out, RUNNING: its peer is gone; move() or end() them."""
        with self._lock:
            found = self._lanes.get(lane)
            pulls = list(found.pulls) if found is not None else []
            for pull in pulls:
                self._leave_lane(pull)
        return pulls

    def queued_in(self, lane: str) -> int:
        """Pulls of one lane that no worker has."""
        with self._lock:
            found = self._lanes.get(lane)
            return len(found.pulls) if found is not None else 0

    def wake(self) -> None:
        """Let every take() that waits return: its caller has something else to look at."""
        with self._lock:
            self._wakes += 1
            self._changed.notify_all()
            for lane in self._lanes.values():
                lane.ready.notify_all()

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
        with self._lock:
            self._closing = True
            left = list(self._lane_of)
            self.wake()
        for pull in left:
            self.cancel(pull)
        self._watch.close(WATCH_STOP_S)
        return self.wait_quiet(timeout_s)

    @property
    def closing(self) -> bool:
        """True once close() was called: take() waits for nothing and gives nothing any more."""
        return self._closing

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

    @property
    def restarts(self) -> int:
        """Times that ending late pulls failed by an error of this node."""
        return self._watch.failures

    def ended(self, state: PullState) -> int:
        """How many pulls ended so."""
        return self._ended[state]

    def check(self) -> None:
        """Assert conservation of pulls and of what they hold. O(queued)."""
        with self._lock:
            ended = self._ended.total()
            assert self._accepted == self._under_way() + ended, (
                self._accepted,
                len(self._lane_of),
                len(self._running),
                ended,
            )
            assert self._under_way() <= self._pages_max, "more pulls than allowed"
            queued = [pull for lane in self._lanes.values() for pull in lane.pulls]
            assert len(queued) == len(self._lane_of), "a queued pull is in no lane, or in two"
            for pull in queued:
                assert pull.state is PullState.QUEUED and pull.target.open, pull.state
            watched = self._watched_until
            assert not queued or self._closing or watched is not None, "nobody watches deadlines"
        self._watch.check()

    def _under_way(self) -> int:
        return len(self._lane_of) + len(self._running)

    def _append(self, lane: str, pull: Pull) -> None:
        found = self._lane(lane)
        found.pulls.append(pull)
        self._lane_of[pull] = lane
        if found.waiting:
            found.ready.notify()

    def _lane(self, name: str) -> _Lane:
        lane = self._lanes.get(name)
        if lane is None:
            lane = self._lanes[name] = _Lane(self._lock)
        return lane

    def _drop_if_idle(self, name: str) -> None:
        """Peers come and go: what nobody waits in or for is not kept."""
        lane = self._lanes.get(name)
        if lane is not None and not lane.pulls and not lane.waiting:
            del self._lanes[name]

    def _leave_lane(self, pull: Pull) -> None:
        lane = self._lane_of[pull]
        self._lanes[lane].pulls.remove(pull)
        self._begin(pull)
        self._drop_if_idle(lane)

    def _begin(self, pull: Pull) -> None:
        del self._lane_of[pull]
        pull.state = PullState.RUNNING
        self._running.add(pull)

    def _watch_deadlines(self, pulls: Sequence[Pull]) -> None:
        """See to it that the watch looks when the first of them is due. Under the lock."""
        if not pulls or self._closing:
            return
        first = min(pull.deadline for pull in pulls)
        if self._watched_until is None or first < self._watched_until:
            self._watched_until = first
            self._watch.add(first, lambda: self._look(first))

    def _look(self, moment: float) -> None:
        """Runs in the watch at `moment`: end what is late, and come back for what is left."""
        try:
            self.expire()
        finally:
            with self._lock:
                # Deadlines may have been moved later, and an earlier look been added since.
                if self._watched_until is not None and self._watched_until <= moment:
                    self._watched_until = None
                self._watch_deadlines(list(self._lane_of))
