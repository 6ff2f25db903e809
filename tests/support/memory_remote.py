"""A remote tier in this process: what is elsewhere is a dict, and every trouble is on order.

A Medium is what several stores' MemoryRemotes share. Pulls go through storage/pulls.py as those of
the real remote tiers do; copies are made of what is offered. Passes remote_conformance.py.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Sequence
from enum import Enum

from tests.support.memory_tier import GATE_TIMEOUT_S
from tierkv.storage.bandwidth import TransferMeter
from tierkv.storage.clock import Clock, SystemClock
from tierkv.storage.errors import TierError
from tierkv.storage.pulls import PullQueue
from tierkv.storage.remote import POOL_OWNER, LocalStore, Pull, PullState, Remote, RemoteStats
from tierkv.storage.types import PageKey

LANE = "medium"
IDLE_WAIT_S = 5.0
LEASE_S = 5.0
PUSHES_MAX = 1024


class Fault(Enum):
    """What becomes of the pulls of one page."""

    STALL = "stall"
    """Nothing comes until release(); then the page does."""
    FAIL = "fail"
    FLIP = "flip"
    """A byte arrives changed."""
    MISS = "miss"
    """It is not there, whatever holds() said."""
    LATE = "late"
    """It arrives after the pull's deadline, which is too late."""


class Medium:
    """Pages elsewhere, with their checksums. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pages: dict[PageKey, tuple[bytes, bytes]] = {}

    def put(self, key: PageKey, payload: bytes, checksum: bytes) -> bool:
        """False when it was there."""
        with self._lock:
            if key in self._pages:
                return False
            self._pages[key] = (payload, checksum)
            return True

    def get(self, key: PageKey) -> tuple[bytes, bytes] | None:
        with self._lock:
            return self._pages.get(key)

    def drop(self, key: PageKey) -> None:
        with self._lock:
            self._pages.pop(key, None)

    def flip(self, key: PageKey) -> None:
        """Change a byte and leave the checksum as it is."""
        with self._lock:
            payload, checksum = self._pages[key]
            self._pages[key] = (bytes([payload[0] ^ 1]) + payload[1:], checksum)

    def keys(self) -> list[PageKey]:
        with self._lock:
            return list(self._pages)


class MemoryRemote(Remote):
    """See the module docstring. `told` records what the store told, for tests to read."""

    def __init__(
        self,
        medium: Medium,
        clock: Clock | None = None,
        *,
        pages_max: int = 64,
        batch: int = 2,
        lookup_waits: bool = False,
        copies: bool = True,
    ) -> None:
        """`lookup_waits`: holds() knows only what ask() found out. `copies`: make any."""
        self.lookup_waits = lookup_waits
        self.medium = medium
        self.reachable = True
        self.faults: dict[PageKey, Fault] = {}
        self.every: Fault | None = None
        """For all pages that `faults` does not name."""
        self.asked: list[PageKey] = []
        self.submits: list[list[PageKey]] = []
        self.offered: list[tuple[PageKey, int, int]] = []
        """Key, uses, owner."""
        self.here: set[PageKey] = set()
        """What was told of as gained and not lost since."""
        self.bind_error: Exception | None = None
        self._clock: Clock = clock or SystemClock()
        self._pages_max = pages_max
        self._batch = batch
        self._copies = copies
        self._known: set[PageKey] = set()
        self._released = threading.Condition()
        self._pushed = threading.Condition()
        self._offers: deque[PageKey] = deque()
        self._pushing = 0
        self._counts: Counter[str] = Counter()
        self._closing = False

    # --- what tests order ---

    def stall(self) -> None:
        """Hold every pull that begins from now on, until release()."""
        self.every = Fault.STALL

    def release(self) -> None:
        """Let everything that is held go on, and hold nothing more."""
        self.every = None if self.every is Fault.STALL else self.every
        self.faults = {k: fault for k, fault in self.faults.items() if fault is not Fault.STALL}
        with self._released:
            self._released.notify_all()

    # --- the contract ---

    def bind(self, store: LocalStore, reads: TransferMeter, writes: TransferMeter) -> None:
        if self.bind_error is not None:
            raise self.bind_error
        self._store = store
        self._reads, self._writes = reads, writes
        self.queue = PullQueue(store.host, self._clock, self._pages_max)
        self._threads = [
            threading.Thread(target=work, name=name, daemon=True)
            for name, work in (("test-pull", self._pull_all), ("test-push", self._push_all))
        ]
        for thread in self._threads:
            thread.start()

    def holds(self, keys: Sequence[PageKey]) -> list[bool]:
        if not self.reachable or self._closing:
            return [False] * len(keys)
        if self.lookup_waits:
            return [key in self._known for key in keys]
        return [self.medium.get(key) is not None for key in keys]

    def ask(self, keys: Sequence[PageKey], timeout_s: float) -> None:
        self.asked += keys
        if self.reachable:
            self._known.update(key for key in keys if self.medium.get(key) is not None)

    def submit(self, pulls: Sequence[Pull]) -> int:
        self.submits.append([pull.key for pull in pulls])
        return self.queue.submit([(LANE, pull) for pull in pulls])

    def cancel(self, pull: Pull) -> bool:
        return self.queue.cancel(pull)

    def offer(self, keys: Sequence[PageKey], uses: Sequence[int], owner: int) -> None:
        assert owner != POOL_OWNER, "what is kept for others is not offered"
        self.offered += [(key, count, owner) for key, count in zip(keys, uses, strict=True)]
        if not self._copies:
            return
        with self._pushed:
            room = PUSHES_MAX - len(self._offers)
            self._offers.extend(keys[:room])
            self._counts["dropped"] += max(0, len(keys) - room)
            self._pushed.notify_all()

    def gained(self, keys: Sequence[PageKey]) -> None:
        self.here.update(keys)

    def lost(self, keys: Sequence[PageKey]) -> None:
        self.here.difference_update(keys)

    def flush(self, timeout_s: float) -> bool:
        with self._pushed:
            done = self._pushed.wait_for(lambda: not self._pushes(), timeout_s)
            return done and not self._counts["push_failed"]

    def wait_quiet(self, timeout_s: float) -> bool:
        deadline = self._clock.monotonic() + timeout_s
        with self._pushed:
            if not self._pushed.wait_for(lambda: not self._pushes(), timeout_s):
                return False
        return self.queue.wait_quiet(deadline - self._clock.monotonic())

    @property
    def quiet(self) -> bool:
        return self.queue.quiet

    def stats(self) -> RemoteStats:
        ended = {state.value: self.queue.ended(state) for state in PullState}
        return RemoteStats(
            queued=self.queue.queued,
            running=self.queue.running,
            landed=ended["landed"],
            missed=ended["missed"],
            corrupt=ended["corrupt"],
            failed=ended["failed"],
            cancelled=ended["cancelled"],
            refused=self.queue.refused,
            pushes_queued=self._pushes(),
            pushed=self._counts["pushed"],
            push_duplicates=self._counts["duplicates"],
            push_dropped=self._counts["dropped"],
            push_failed=self._counts["push_failed"],
            worker_restarts=0,
            known_pages=len(self._known) if self.lookup_waits else len(self.medium.keys()),
            degraded=None if self.reachable else "nobody answers",
        )

    def check(self) -> None:
        self.queue.check()
        with self._pushed:
            assert len(self._offers) <= PUSHES_MAX, len(self._offers)

    def close(self, timeout_s: float) -> bool:
        deadline = self._clock.monotonic() + timeout_s
        with self._pushed:
            self._closing = True
            self._offers.clear()
            self._pushed.notify_all()
        ended = self.queue.close(timeout_s)
        for thread in self._threads:
            thread.join(max(0.0, deadline - self._clock.monotonic()))
        return ended and not any(thread.is_alive() for thread in self._threads)

    # --- the workers ---

    def _pull_all(self) -> None:
        while not self._closing:
            for pull in self.queue.take(LANE, self._batch, IDLE_WAIT_S):
                self._pull(pull)

    def _pull(self, pull: Pull) -> None:
        started = self._reads.begin()
        fault = self.faults.get(pull.key, self.every)
        if fault is Fault.STALL:
            with self._released:
                released = self._released.wait_for(
                    lambda: self.faults.get(pull.key, self.every) is not Fault.STALL, GATE_TIMEOUT_S
                )
            assert released, "a test did not release its remote"
        page = None if fault is Fault.MISS else self.medium.get(pull.key)
        good = page is not None and fault is not Fault.FAIL
        if page is not None and good:
            with self.queue.view(pull) as out:
                out[:] = page[0]
                if fault is Fault.FLIP:
                    out[len(out) // 2] ^= 0x40
        if fault is Fault.LATE:
            threading.Event().wait(max(0.0, pull.deadline - self._clock.monotonic()))
            good = False
        # Before the pull ends: whoever is told of its end finds it measured.
        self._reads.end(started, len(page[0]) if page is not None and good else 0)
        if page is None:
            self.queue.end(pull, PullState.MISSED)
        elif good:
            self.queue.land(pull, page[1])
        else:
            self.queue.end(pull, PullState.FAILED)

    def _push_all(self) -> None:
        while True:
            with self._pushed:
                self._pushed.wait_for(lambda: self._offers or self._closing, IDLE_WAIT_S)
                if self._closing:
                    return
                if not self._offers:
                    continue
                key = self._offers.popleft()
                self._pushing = 1
            outcome = self._push(key)
            with self._pushed:
                self._pushing = 0
                self._counts[outcome] += 1
                self._pushed.notify_all()

    def _push(self, key: PageKey) -> str:
        if self.medium.get(key) is not None:
            return "duplicates"
        try:
            with self._store.fetch([key], LEASE_S, here=True).take(LEASE_S) as lease:
                if not lease.views or not self.reachable:
                    return "push_failed"
                started = self._writes.begin()
                new = self.medium.put(key, bytes(lease.views[0]), lease.checksums[0])
                self._writes.end(started, len(lease.views[0]) if new else 0)
                return "pushed" if new else "duplicates"
        except TierError:
            # The store closes, and closes its remote with it.
            return "push_failed"

    def _pushes(self) -> int:
        return len(self._offers) + self._pushing
