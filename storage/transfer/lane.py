"""One direction of a transfer: jobs in order, at most two of them on the device at a time.

Owns the queue of one stream and the thread that drives it. A job is a generator: it puts work on
its stream and yields a HostWait whenever the host must see an event before going on. pump() never
blocks, so that a test can drive a lane step by step on one thread; LaneThread drives it for real.
Knows nothing of pages. Used by streams.py.

Invariant: a job begins only when the one before it has nothing left to do but to end, so that two
jobs never share a buffer.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from tierkv.storage.transfer.device_ops import Wait

log = logging.getLogger(__name__)

DEPTH = 2
"""Jobs on the device at a time: the next is queued there while the first still runs."""
POLL_MIN_S = 50e-6
POLL_MAX_S = 1e-3
IDLE_S = 5.0
STUCK_S = 30.0
"""A device that has not ended a copy by then is reported, once."""


@dataclass(frozen=True, slots=True)
class HostWait:
    """The host goes on with this job once the event is done."""

    event: object
    why: Wait
    last: bool = False
    """Nothing follows but the job's end."""


class Job(Protocol):
    """A copy as its lane sees it."""

    def run(self) -> Generator[HostWait]:
        """Issue the work; an expected failure ends the job inside, it never escapes."""
        ...

    def abandon(self, reason: str) -> None:
        """End without having begun."""
        ...


class _Running:
    __slots__ = ("job", "steps", "wait")

    def __init__(self, job: Job) -> None:
        self.job = job
        self.steps = job.run()
        self.wait: HostWait | None = None

    def advance(self) -> bool:
        """Go on to the next wait; False when the job has ended."""
        self.wait = next(self.steps, None)
        return self.wait is not None

    def fail(self, error: RuntimeError) -> bool:
        """Tell the job that its event can never be seen; as advance()."""
        try:
            self.wait = self.steps.throw(error)
        except StopIteration:
            self.wait = None
        return self.wait is not None


class Lane:
    """A queue of jobs for one stream. submit() and take_back() from any thread; pump() from one."""

    def __init__(self, name: str, event_done: Callable[[object, Wait], bool]) -> None:
        self.name = name
        self._event_done = event_done
        self._queue: deque[Job] = deque()
        self._running: deque[_Running] = deque()
        self.changed = threading.Condition()

    @property
    def idle(self) -> bool:
        """True when no job waits or runs."""
        return not self._queue and not self._running

    @property
    def busy(self) -> bool:
        """True when a job is on the device."""
        return bool(self._running)

    def submit(self, job: Job) -> None:
        """Append a job. The queue is bounded by the pool: a page is in one copy at a time."""
        with self.changed:
            self._queue.append(job)
            self.changed.notify()

    def take_back(self, job: Job) -> bool:
        """Remove a job that has not begun; False when it has."""
        with self.changed:
            if job not in self._queue:
                return False
            self._queue.remove(job)
            return True

    def pump(self) -> bool:
        """Do what can be done without waiting; True when anything was."""
        moved = False
        while self._running:
            head = self._running[0]
            assert head.wait is not None, "a job that waits for nothing has ended"
            try:
                if not self._event_done(head.wait.event, head.wait.why):
                    break
                going_on = head.advance
            except RuntimeError as error:
                going_on = partial(head.fail, error)
            moved = True
            if not going_on():
                self._running.popleft()
        while self._may_begin():
            with self.changed:
                if not self._queue:
                    break
                running = _Running(self._queue.popleft())
                # Under the lock, so that a job is always in the queue or among the running.
                self._running.append(running)
            moved = True
            if not running.advance():
                self._running.remove(running)
        return moved

    def abandon_queue(self, reason: str) -> None:
        """End every job that has not begun."""
        with self.changed:
            jobs, self._queue = list(self._queue), deque()
        for job in jobs:
            job.abandon(reason)

    def _may_begin(self) -> bool:
        if not self._running:
            return True
        newest = self._running[-1].wait
        return len(self._running) < DEPTH and newest is not None and newest.last


class LaneThread:
    """Drives one lane until stop(). The thread polls only while the device works."""

    def __init__(self, lane: Lane, on_broken: Callable[[str], None]) -> None:
        self._lane = lane
        self._on_broken = on_broken
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._main, name=f"tierkv-{lane.name}", daemon=True)
        self._thread.start()

    def stop(self, timeout_s: float) -> bool:
        """Let the jobs end and join the thread; False when that took longer than `timeout_s`."""
        self._stopping.set()
        with self._lane.changed:
            self._lane.changed.notify()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _main(self) -> None:
        ended = False
        try:
            self._drive()
            ended = True
        finally:
            if not ended:
                # A bug, and the trace goes to the thread's excepthook. Nobody may wait for ever.
                self._on_broken(f"the {self._lane.name} thread has died")
                self._lane.abandon_queue("its thread has died")

    def _drive(self) -> None:
        lane = self._lane
        pause_s, waited_s, reported = POLL_MIN_S, 0.0, False
        while True:
            if lane.pump():
                pause_s, waited_s, reported = POLL_MIN_S, 0.0, False
                continue
            if self._stopping.is_set() and lane.idle:
                return
            with lane.changed:
                if lane.idle and not self._stopping.is_set():
                    lane.changed.wait(IDLE_S)
                    continue
                if not lane.changed.wait(pause_s):
                    waited_s += pause_s
            pause_s = min(2 * pause_s, POLL_MAX_S)
            if waited_s > STUCK_S and not reported:
                reported = True
                log.error("transfer=%s stuck_s=%.0f reason=device", lane.name, waited_s)
                self._on_broken(f"the device has not ended a copy for {STUCK_S:.0f} s; restart it")
