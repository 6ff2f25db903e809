"""The thread that has NIXL fetch pages, and knows when a destination is the caller's again.

Owns the pieces of reads that have not ended, the thread, and the memory that cookies land in.
Knows no offers and no addresses but those in a piece. Called by nixl.py.

A piece is pages of one read in one transfer. The peer's cookie for that memory is read before the
pages, so that nothing is asked of memory that is gone, and again after their last byte: only when
it still is what the offer said were all bytes read from registered memory.

    piece state   step    who writes to its destinations   leaves by
    QUEUED                nobody                           thread takes it -> RUNNING; deadline,
                                                           peer closed -> ENDED
    RUNNING       BEFORE  nobody                           cookie right -> PAGES; wrong, failed,
                                                           deadline -> ENDED
                  PAGES   NIXL, until it reports an end    done -> AFTER; failed -> ENDED
                  AFTER   nobody                           cookie, failed, deadline -> ENDED
    ENDED                 the caller, again                final

A transfer cannot be stopped: NIXL takes a release, or the loss of the peer's name, in the middle
of one and may write all the same. So a piece whose pages are late only makes its peer broken, and
is ended when NIXL reports that the transfer has, or when the agent is closed. Memory of this
machine is copied by the call that starts the transfer, whatever the other process does meanwhile,
and RDMA gives up on a silent peer after its retries, so that is soon. When a transfer fails, NIXL
does not tell of its other pages: UCX is given the time to cancel them, DRAIN_S, first.

NIXL cannot wake whoever waits for a transfer (lesson P4). The thread asks after transfers under
way, at first at once and then in pauses that double up to PAUSE_S_MAX; with none under way it
sleeps.
"""

from __future__ import annotations

import logging
import mmap
import threading
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

from tierkv.storage.clock import Clock
from tierkv.storage.deadlines import DeadlineWatch
from tierkv.storage.device import address_of
from tierkv.storage.errors import TierIOError
from tierkv.storage.transport.base import PageOutcome, PeerRead
from tierkv.storage.transport.nixl_agent import Agent, Copy
from tierkv.storage.transport.nixl_offer import COOKIE_BYTES, COOKIE_CLOSED, OfferedMemory

RUNNING_MAX = 8
"""Pieces under way at once: enough for RDMA to be busy, few enough for a deadline to be kept."""
PAUSE_S_MIN = 0.00002
PAUSE_S_MAX = 0.001
LATE_PAUSE_S = 0.05
"""Between questions after transfers that are all past their deadline."""
DRAIN_S = 0.05
IDLE_WAIT_S = 5.0
STOP_S = 5.0

log = logging.getLogger(__name__)


class State(Enum):
    """See the table at the top."""

    QUEUED = "queued"
    RUNNING = "running"
    ENDED = "ended"


class Step(Enum):
    """See the table at the top."""

    BEFORE = "before"
    PAGES = "pages"
    AFTER = "after"


@dataclass(eq=False, slots=True)
class Remote:
    """A peer's agent, as loaded into ours. Shared by all connections to that peer.

    `running`, `users` and `broken` change under the driver's lock.
    """

    name: str
    memories: dict[int, OfferedMemory]
    users: int = 0
    """Connected peers that use it."""
    running: int = 0
    """Pieces for which NIXL may have a transfer under way."""
    broken: str | None = None
    forgotten: bool = False


Told = Callable[["Piece", Sequence[PageOutcome]], None]
"""Hears of a piece that has ended, before its read does."""


@dataclass(eq=False, slots=True)
class Piece:
    """Pages of one read, one transfer."""

    read: PeerRead
    start: int
    copies: list[Copy]
    views: list[memoryview]
    """The destinations, held so that their memory stays."""
    foreign: list[tuple[int, int]]
    """Destinations (address, length) that NIXL does not know yet."""
    memory: OfferedMemory
    remote: Remote
    deadline: float
    told: Told
    state: State = State.QUEUED
    step: Step = Step.BEFORE
    watch: int | None = None
    handle: int | None = None
    slot: int | None = None
    """Where its cookie lands."""
    registration: object = None
    late: bool = False
    drained_at: float | None = None
    """When its failed transfer counts as ended."""
    reason: str = ""


class Driver:
    """Runs pieces until close(). Thread-safe."""

    def __init__(self, agent: Agent, clock: Clock) -> None:
        self._agent = agent
        self._clock = clock
        self._watch = DeadlineWatch(clock)
        self.changed = threading.Condition()
        """Guards remotes too."""
        self._queue: deque[Piece] = deque()
        self._running: list[Piece] = []
        self._cookies = mmap.mmap(-1, mmap.PAGESIZE)
        self._cookies_at = address_of(memoryview(self._cookies))
        self._cookies_known = agent.register(self._cookies_at, len(self._cookies))
        self._slots = list(range(RUNNING_MAX))
        self._thread: threading.Thread | None = None
        self._sleeping = True
        """Whether the thread takes the next piece at once."""
        self._closing = False
        self.restarts = 0
        """Pieces that met a bug. The thread went on."""

    def submit(self, pieces: Sequence[Piece]) -> None:
        """Run these. Each is ended exactly once, by told() and settle()."""
        with self.changed:
            refusal = "it was closed" if self._closing else None
            if refusal is None:
                idle = self._sleeping and not self._queue
                self._sleeping = False
                self._queue.extend(pieces)
                refusal = self._start()
            if refusal is None:
                self.changed.notify_all()
        if refusal is not None:
            for piece in pieces:
                with self.changed:
                    if piece in self._queue:
                        self._queue.remove(piece)
                    piece.state = State.ENDED
                self._tell(piece, PageOutcome.FAILED, refusal)
            return
        # The thread takes the first at once when it sleeps; the others might be late in its queue.
        for piece in pieces[1:] if idle else pieces:
            self._watch_deadline(piece)

    def drop(self, told: Told) -> None:
        """End the queued pieces of one peer, and wait STOP_S for those that run."""
        with self.changed:
            dropped = [piece for piece in self._queue if piece.told == told]
            for piece in dropped:
                self._queue.remove(piece)
                piece.state = State.ENDED
        for piece in dropped:
            self._tell(piece, PageOutcome.FAILED, "it was closed")
        if threading.current_thread() is self._thread:
            return
        with self.changed:
            self.changed.wait_for(
                lambda: all(piece.told != told for piece in self._running), STOP_S
            )

    def break_remote(self, remote: Remote, reason: str) -> None:
        """No more reads of this peer; it is forgotten as soon as nothing of it is under way."""
        with self.changed:
            if remote.broken is None:
                remote.broken = reason
                log.warning("nixl peer=%s broken=%s", remote.name, reason)
            self._forget_locked(remote)

    def release_remote(self, remote: Remote) -> None:
        """One user less; the last one forgets it."""
        with self.changed:
            remote.users -= 1
            self._forget_locked(remote)

    def check(self) -> None:
        """Assert the invariants. O(pieces)."""
        with self.changed:
            assert all(piece.state is State.QUEUED for piece in self._queue)
            assert len(self._running) <= RUNNING_MAX
            slots = self._slots + [piece.slot for piece in self._running]
            assert self._closing or set(slots) == set(range(RUNNING_MAX)), slots
            assert self._closing or len(slots) == RUNNING_MAX, slots
        self._watch.check()

    def close(self) -> None:
        """End what is queued, wait for what runs, then the thread. The agent may be closed next;
        abandon() follows that."""
        with self.changed:
            self._closing = True
            queued = list(self._queue)
            self._queue.clear()
            for piece in queued:
                piece.state = State.ENDED
            self.changed.notify_all()
            thread = self._thread
        for piece in queued:
            self._tell(piece, PageOutcome.FAILED, "it was closed")
        self._watch.close(STOP_S)
        if thread is not None and thread is not threading.current_thread():
            thread.join(2 * STOP_S)
            if thread.is_alive():
                log.error("nixl=%s thread=did not end", self._agent.name)

    def abandon(self) -> None:
        """After the agent was closed: what had not ended then writes no more, and ends here."""
        with self.changed:
            left, self._running = self._running, []
        for piece in left:
            if piece.state is not State.ENDED:
                piece.state = State.ENDED
                self._tell(piece, PageOutcome.FAILED, "it was closed")

    # The thread

    def _start(self) -> str | None:
        """Start the thread once. Under the lock; says why it cannot."""
        if self._thread is None:
            thread = threading.Thread(target=self._work, name="tierkv-nixl", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:
                return f"no thread for it: {error}"
            self._thread = thread
        return None

    def _work(self) -> None:
        """Life of the thread."""
        pause = PAUSE_S_MIN
        stop_at: float | None = None
        while True:
            piece, going = self._next(pause)
            if not going:
                now = self._clock.monotonic()
                stop_at = now + STOP_S if stop_at is None else stop_at
                if not self._running or now >= stop_at:
                    return
            moved = piece is not None
            for running in list(self._running):
                moved = self._advance(running) or moved
            pause = PAUSE_S_MIN if moved else min(2 * pause, self._pause_max())

    def _pause_max(self) -> float:
        late = all(piece.late for piece in self._running)
        return LATE_PAUSE_S if late else PAUSE_S_MAX

    def _next(self, pause: float) -> tuple[Piece | None, bool]:
        """A piece that now runs, or None after the pause; False once closing."""
        with self.changed:
            full = len(self._running) >= RUNNING_MAX
            if (not self._queue or full) and not (self._closing and not self._running):
                self._sleeping = not self._running
                self.changed.wait(pause if self._running else IDLE_WAIT_S)
            self._sleeping = False
            if not self._queue or len(self._running) >= RUNNING_MAX:
                return None, not self._closing
            piece = self._queue.popleft()
            piece.state = State.RUNNING
            piece.remote.running += 1
            piece.slot = self._slots.pop()
            self._running.append(piece)
            return piece, not self._closing

    def _advance(self, piece: Piece) -> bool:
        """As far as it goes without waiting. True when it went."""
        try:
            return self._steps(piece)
        except TierIOError as error:
            self._fail(piece, str(error))
        except Exception as error:  # noqa: BLE001
            # A bug in one piece must not end the thread that all others need (lesson H2).
            log.error("nixl=%s %s", self._agent.name, traceback.format_exc())
            with self.changed:
                self.restarts += 1
            self._fail(piece, f"{type(error).__name__}: {error}")
        return True

    def _steps(self, piece: Piece) -> bool:
        if piece.drained_at is not None:
            return self._drain(piece)
        moved = False
        while piece.state is not State.ENDED or piece.handle is not None:
            if piece.handle is None:
                if piece.step is Step.BEFORE and piece.remote.broken is not None:
                    self._end(piece, PageOutcome.FAILED, piece.remote.broken)
                    return True
                piece.handle, done = self._agent.start(piece.remote.name, self._copies(piece))
                moved = True
            else:
                done = self._agent.done(piece.handle)
            if not done:
                return self._late(piece) or moved
            self._agent.release(piece.handle)
            piece.handle = None
            moved = True
            if piece.state is State.ENDED:
                self._retire(piece)
                return True
            self._step_done(piece)
        return moved

    def _copies(self, piece: Piece) -> list[Copy]:
        if piece.step is not Step.PAGES:
            assert piece.slot is not None
            at = self._cookies_at + piece.slot * COOKIE_BYTES
            return [Copy(at, piece.memory.cookie_address, COOKIE_BYTES)]
        if piece.foreign and piece.registration is None:
            piece.registration = self._agent.register_all(piece.foreign)
        return piece.copies

    def _step_done(self, piece: Piece) -> None:
        """The transfer of its step has ended well."""
        if piece.step is Step.PAGES:
            piece.step = Step.AFTER
            return
        assert piece.slot is not None
        at = piece.slot * COOKIE_BYTES
        cookie = self._cookies[at : at + COOKIE_BYTES]
        if cookie == COOKIE_CLOSED:
            self.break_remote(piece.remote, "it was closed over there")
            self._end(piece, PageOutcome.FAILED, "it was closed over there")
        elif cookie != piece.memory.cookie:
            self._end(piece, PageOutcome.GONE, None)
        elif piece.step is Step.AFTER:
            self._end(piece, PageOutcome.OK, None)
        elif self._clock.monotonic() >= piece.deadline:
            self._end(piece, PageOutcome.FAILED, "deadline passed")
        else:
            piece.step = Step.PAGES

    def _late(self, piece: Piece) -> bool:
        """Its transfer goes on. Past the deadline the peer is broken, and the piece ended if
        nothing is written to its destinations."""
        if piece.late or self._clock.monotonic() < piece.deadline:
            return False
        piece.late = True
        self.break_remote(piece.remote, "deadline passed while a transfer was under way")
        if piece.step is not Step.PAGES and piece.state is not State.ENDED:
            self._end(piece, PageOutcome.FAILED, "deadline passed")
        return True

    # Ends

    def _fail(self, piece: Piece, reason: str) -> None:
        """Its transfer has failed, and with it the connection to the peer."""
        self.break_remote(piece.remote, reason)
        if piece.handle is not None:
            self._agent.release(piece.handle)
            piece.handle = None
        if piece.state is State.ENDED:
            self._retire(piece)
        elif piece.step is Step.PAGES and piece.drained_at is None:
            piece.drained_at = self._clock.monotonic() + DRAIN_S
            piece.reason = reason
        else:
            self._end(piece, PageOutcome.FAILED, piece.reason or reason)

    def _drain(self, piece: Piece) -> bool:
        """Let UCX cancel what was under way on a connection that has failed. True at the end."""
        assert piece.drained_at is not None
        if self._clock.monotonic() < piece.drained_at:
            self._agent.progress()
            return False
        self._end(piece, PageOutcome.FAILED, piece.reason)
        return True

    def _end(self, piece: Piece, outcome: PageOutcome, error: str | None) -> None:
        """Give the destinations back."""
        if piece.watch is not None:
            self._watch.discard(piece.watch)
        if piece.registration is not None:
            try:
                self._agent.deregister(piece.registration)
            except TierIOError as problem:
                log.warning("nixl=%s %s", self._agent.name, problem)
            piece.registration = None
        with self.changed:
            piece.state = State.ENDED
        if piece.handle is None:
            self._retire(piece)
        self._tell(piece, outcome, error)

    def _retire(self, piece: Piece) -> None:
        """NIXL has nothing of this piece any more."""
        with self.changed:
            if piece not in self._running:
                return
            self._running.remove(piece)
            piece.remote.running -= 1
            assert piece.slot is not None
            self._slots.append(piece.slot)
            self._forget_locked(piece.remote)
            self.changed.notify_all()

    def _tell(self, piece: Piece, outcome: PageOutcome, error: str | None) -> None:
        outcomes = [outcome] * len(piece.copies)
        piece.views = []
        piece.told(piece, outcomes)
        piece.read.settle(piece.start, outcomes, error and f"read from peer by nixl: {error}")

    def _watch_deadline(self, piece: Piece) -> None:
        try:
            token = self._watch.add(piece.deadline, lambda: self._expire(piece))
        except RuntimeError as error:
            # The system gives no more threads: a piece that nothing would end is not kept.
            self._expire(piece, f"no thread for its deadline: {error}")
            return
        with self.changed:
            piece.watch = token
            queued = piece.state is State.QUEUED
        if not queued:
            self._watch.discard(token)

    def _expire(self, piece: Piece, why: str = "deadline passed before its turn") -> None:
        """The deadline of a piece has passed, or `why`: it ends unless it runs."""
        with self.changed:
            if piece.state is not State.QUEUED:
                return
            self._queue.remove(piece)
            piece.state = State.ENDED
        self._tell(piece, PageOutcome.FAILED, why)

    def _forget_locked(self, remote: Remote) -> None:
        unused = remote.broken is not None or not remote.users
        if not unused or remote.running or remote.forgotten:
            return
        remote.forgotten = True
        try:
            self._agent.forget(remote.name)
        except TierIOError as error:
            # It had gone by itself.
            log.debug("nixl=%s %s", self._agent.name, error)
