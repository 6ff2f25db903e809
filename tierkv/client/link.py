"""One live connection, shared by many threads: requests out, answers matched by id.

Owns the socket, the answers that are expected and the role of reading. Does not know verbs beyond
their names, nor how a connection is made. Called by the client's verbs and by its supervisor.

Who reads. A thread that waits for an answer reads the socket itself when nobody else does
(leader), and hands the role to the next waiting thread when it leaves: no thread switch lies
between the socket and the caller. Answers that nobody waits for (`background`) are read by the
supervisor in watch(), which otherwise only watches for the connection's end.

    pending state   leaves by
    WAITING         its answer -> DONE; loss of the connection -> DONE with an error
    ABANDONED       as WAITING; its callback sees to what the late answer grants
    DONE            final

Invariants: each request is answered once or ends with the connection; somebody reads, or is about
to, while a thread waits or a background answer is due; callbacks run with no lock held and must
neither wait nor ask.
"""

from __future__ import annotations

import contextlib
import select
import socket
import threading
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from tierkv.client.errors import DaemonAwayError, RefusedError
from tierkv.client.handshake import Session
from tierkv.client.kick import Kick
from tierkv.protocol.errors import ProtocolError
from tierkv.protocol.frames import Frame, encode_request
from tierkv.protocol.messages import Verb
from tierkv.storage.clock import Clock
from tierkv.storage.errors import OverloadedError, TierKVError

RECEIVE_BYTES = 256 << 10
SILENT_MAX = 32
"""Answers that nobody waits for and that may lie unread before the supervisor fetches them."""
IDLE_S = 1.0
"""The supervisor looks at deadlines at least this often."""
_FOREVER = float("inf")


class Pending:
    """One request whose answer is due. Guarded by its link's lock until `done`."""

    __slots__ = (
        "answer",
        "background",
        "deadline",
        "done",
        "error",
        "on_done",
        "request_id",
        "signalled",
        "wake",
    )

    def __init__(self, on_done: Callable[[Pending], None] | None) -> None:
        self.on_done = on_done
        self.request_id = 0
        self.answer: dict[str, Any] = {}
        self.error: TierKVError | None = None
        self.done = False
        self.background = False
        self.deadline: tuple[float, Callable[[], None]] | None = None
        self.wake: threading.Lock | None = None
        self.signalled = False


class Link:
    """See the module. `on_lost` is called once, from the thread that finds the loss."""

    def __init__(
        self,
        session: Session,
        clock: Clock,
        kick: Kick,
        on_lost: Callable[[], None],
        *,
        send_timeout_s: float,
        silence_s: float,
    ) -> None:
        self.session = session
        self.limits = session.limits
        self.leases: set[int] = set()
        self.reservations: set[int] = set()
        self._clock = clock
        self._on_lost = on_lost
        self._silence_s = silence_s
        self._silent_since: float | None = None
        # Two objects over one connection, because a socket object has one timeout.
        self._out, self._in = session.sock, session.sock.dup()
        self._out.settimeout(send_timeout_s)
        self._reader = session.reader
        self._received = bytearray(RECEIVE_BYTES)
        self._received_view = memoryview(self._received)
        self._lock = threading.Lock()
        self._room = threading.Condition(self._lock)
        self._send_lock = threading.Lock()
        self._pending: dict[int, Pending] = {}
        self._followers: deque[Pending] = deque()
        self._next_id = 1
        self._background = 0
        self._silent = 0
        self._reading = False
        self._lost: str | None = None
        self._next_deadline = _FOREVER
        self._watch_until = _FOREVER
        self._kick = kick
        self._closed = False

    @property
    def lost(self) -> str | None:
        """Why the connection is no more; None while it is."""
        return self._lost

    # --- asking ----------------------------------------------------------------------------------

    def start(
        self,
        verb: Verb,
        fields: Mapping[str, object],
        on_done: Callable[[Pending], None] | None = None,
        room_s: float = 0.0,
    ) -> Pending:
        """Send one request. Its answer is read by whoever waits, or see in_background().

        Never raises: what goes wrong is the pending's error. Waits at most `room_s` when as many
        requests are in flight as the daemon allows.
        """
        pending = Pending(on_done)
        with self._lock:
            if self._lost is None and len(self._pending) >= self.limits.in_flight:
                self._room.wait_for(self._has_room, room_s)
            refused = self._refusal_locked()
            if refused is None:
                pending.request_id = self._next_id
                self._next_id += 1
                self._pending[pending.request_id] = pending
        if refused is not None:
            pending.error, pending.done = refused, True
            if on_done is not None:
                on_done(pending)
            return pending
        self._send(encode_request(pending.request_id, verb, fields))
        return pending

    def post(self, verb: Verb, fields: Mapping[str, object]) -> None:
        """Send one request whose answer does not matter."""
        pending = self.start(verb, fields)
        with self._lock:
            self._silent += 1
            if self._silent < SILENT_MAX or pending.done:
                return
            self._silent = 0
        self.in_background(pending)

    def in_background(
        self, pending: Pending, deadline: tuple[float, Callable[[], None]] | None = None
    ) -> None:
        """Have the supervisor read this answer. At `deadline` (a moment of the clock, and what to
        do) it does that unless the answer has come."""
        with self._lock:
            if pending.done or (pending.background and deadline is None):
                return
            if not pending.background:
                pending.background = True
                self._background += 1
            if deadline is not None:
                pending.deadline = deadline
                self._next_deadline = min(self._next_deadline, deadline[0])
            kick = not self._reading or self._next_deadline < self._watch_until
        if kick:
            self._kick.kick()

    def wait(self, pending: Pending, timeout_s: float) -> bool:
        """Wait for the answer, reading the socket if nobody else does; True when it is there."""
        deadline = self._clock.monotonic() + timeout_s
        while True:
            left_s = deadline - self._clock.monotonic()
            with self._lock:
                if pending.done:
                    return True
                if left_s <= 0:
                    # The role may have been offered to this thread, which does not take it.
                    self._pass_on_locked()
                    return False
                lead = not self._reading
                if lead:
                    self._reading = True
                else:
                    wake = self._follow_locked(pending)
            if lead:
                self._lead(pending, deadline)
                continue
            woken = wake.acquire(timeout=left_s)
            with self._lock:
                if pending.signalled and not woken:
                    # Signalled just after the time was up: leave the wake-up as it was found.
                    wake.acquire(blocking=False)
                pending.signalled = False
                self._followers.remove(pending)

    def abandon(self, pending: Pending, on_late: Callable[[Pending], None] | None) -> None:
        """Wait no longer. `on_late` is called with the pending if its answer still comes.

        Called at once when it has come already.
        """
        with self._lock:
            if not pending.done:
                pending.on_done = on_late
                pending.deadline = None
                done = False
                if self._silent_since is None:
                    self._silent_since = self._clock.monotonic()
            else:
                done = True
        if not done:
            self.in_background(pending)
        elif on_late is not None and pending.error is None:
            on_late(pending)

    # --- the supervisor's part -------------------------------------------------------------------

    def watch(self) -> None:
        """One step of supervision: reads background answers, meets deadlines, sees the end.

        Returns after something happened, or within IDLE_S. Only one thread may call it.
        """
        lead = False
        with self._lock:
            if self._lost is not None:
                return
            if self._background and not self._reading and not self._followers:
                self._reading = lead = True
            until = min(self._next_deadline, self._clock.monotonic() + IDLE_S)
            self._watch_until = until
        wait_s = max(0.0, until - self._clock.monotonic())
        try:
            self._poll(lead, wait_s)
        except (OSError, ProtocolError) as error:
            self.fail(str(error) or type(error).__name__)
        finally:
            if lead:
                with self._lock:
                    self._reading = False
                    self._pass_on_locked(to_supervisor=False)
        self._meet_deadlines()
        silent_since = self._silent_since
        if silent_since is not None and self._clock.monotonic() - silent_since > self._silence_s:
            self.fail(f"no answer for {self._silence_s:.0f} s")

    def fail(self, reason: str) -> None:
        """The connection is over: everything pending ends with an error. Idempotent."""
        with self._lock:
            if self._lost is not None:
                return
            self._lost = reason
        # First, so that whoever is told of the loss does not find this link again.
        self._on_lost()
        with self._lock:
            ended = list(self._pending.values())
            self._pending.clear()
            for pending in ended:
                self._end_locked(pending, {}, DaemonAwayError(f"daemon: {reason}"))
            self._background = 0
            self._next_deadline = _FOREVER
            self._room.notify_all()
        # Wakes whoever reads; the descriptors are closed by close(). It may not be connected any
        # more, which is what is wanted.
        with contextlib.suppress(OSError):
            self._out.shutdown(socket.SHUT_RDWR)
        for pending in ended:
            if pending.on_done is not None:
                pending.on_done(pending)
        self._kick.kick()

    def close(self, wait_s: float) -> None:
        """End the connection and close the descriptors once no thread reads. Idempotent."""
        self.fail("closed")
        with self._lock:
            idle = self._room.wait_for(lambda: not self._reading, wait_s)
            if self._closed or not idle:
                return
            self._closed = True
        with self._send_lock:
            self._out.close()
        self._in.close()

    def check(self) -> None:
        """Assert the invariants. O(requests in flight)."""
        with self._lock:
            background = sum(each.background for each in self._pending.values())
            assert self._background == background, (self._background, background)
            assert not any(each.done for each in self._pending.values())
            assert len(self._pending) <= self.limits.in_flight, len(self._pending)
            assert self._lost is None or not self._pending

    # --- inside ----------------------------------------------------------------------------------

    def _has_room(self) -> bool:
        return self._lost is not None or len(self._pending) < self.limits.in_flight

    def _refusal_locked(self) -> TierKVError | None:
        if self._lost is not None:
            return DaemonAwayError(f"daemon: {self._lost}")
        if len(self._pending) >= self.limits.in_flight:
            return OverloadedError(
                f"daemon: {self.limits.in_flight} requests are in flight, as many as it allows"
            )
        return None

    def _send(self, frame: bytes) -> None:
        try:
            with self._send_lock:
                self._out.sendall(frame)
        except OSError as error:
            # Part of the frame may be out: nothing that follows would be understood.
            self.fail(f"send: {error}")

    def _lead(self, pending: Pending, deadline: float) -> None:
        """Read until `pending` is done or `deadline`, then hand the role on."""
        try:
            while not pending.done:
                left_s = deadline - self._clock.monotonic()
                if left_s <= 0:
                    return
                self._in.settimeout(left_s)
                self._receive()
        except TimeoutError:
            return
        except (OSError, ProtocolError) as error:
            self.fail(str(error) or type(error).__name__)
        finally:
            with self._lock:
                self._reading = False
                self._pass_on_locked()

    def _receive(self) -> None:
        """One read of the socket and the delivery of what came. By the reading thread only."""
        count = self._in.recv_into(self._received)
        if count == 0:
            raise ConnectionResetError("the daemon closed the connection")
        self._silent_since = None
        for frame in self._reader.feed(self._received_view[:count]):
            self._deliver(frame)

    def _deliver(self, frame: Frame) -> None:
        with self._lock:
            pending = self._pending.pop(frame.request_id, None)
            if pending is None:
                if self._lost is not None:
                    return
                raise ConnectionAbortedError(f"answer to unknown request {frame.request_id}")
            error = None
            if frame.name:
                message = str(frame.fields.get("message", ""))[:300]
                error = RefusedError(frame.name[:64], f"daemon: {message} ({frame.name[:64]})")
            self._end_locked(pending, frame.fields, error)
            if pending.background:
                self._background -= 1
            if len(self._pending) == self.limits.in_flight - 1:
                self._room.notify_all()
            callback = pending.on_done
        if callback is not None:
            callback(pending)

    def _end_locked(
        self, pending: Pending, answer: dict[str, Any], error: TierKVError | None
    ) -> None:
        pending.answer, pending.error = answer, error
        pending.done = True
        self._signal_locked(pending)

    def _follow_locked(self, pending: Pending) -> threading.Lock:
        if pending.wake is None:
            pending.wake = threading.Lock()
            pending.wake.acquire()
        self._followers.append(pending)
        return pending.wake

    def _signal_locked(self, pending: Pending) -> None:
        if pending.wake is not None and not pending.signalled:
            pending.signalled = True
            pending.wake.release()

    def _pass_on_locked(self, to_supervisor: bool = True) -> None:
        """Offer the role of reading to a waiting thread, or to the supervisor."""
        self._room.notify_all()
        if self._reading:
            return
        if self._followers:
            self._signal_locked(self._followers[0])
        elif self._background and to_supervisor:
            self._kick.kick()

    def _poll(self, lead: bool, wait_s: float) -> None:
        """Wait for a kick, the end of the connection and, when leading, for answers."""
        poll = select.poll()
        poll.register(self._kick, select.POLLIN)
        poll.register(self._in, select.POLLIN if lead else select.POLLRDHUP)
        for fd, event in poll.poll(wait_s * 1000):
            if fd == self._kick.fileno():
                self._kick.clear()
            elif lead:
                self._in.settimeout(0.0)
                self._receive()
            elif event:
                raise ConnectionResetError("the daemon closed the connection")

    def _meet_deadlines(self) -> None:
        now = self._clock.monotonic()
        due: list[Callable[[], None]] = []
        with self._lock:
            if now < self._next_deadline:
                return
            self._next_deadline = _FOREVER
            for pending in self._pending.values():
                if pending.deadline is None:
                    continue
                moment, action = pending.deadline
                if moment <= now:
                    pending.deadline = None
                    due.append(action)
                else:
                    self._next_deadline = min(self._next_deadline, moment)
        for action in due:
            action()
