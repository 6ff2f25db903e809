"""The answering side of the ucx plane: sends registered memory to readers that know the offer.

Owns one worker, one thread, the registered memories, and a lane for each reader that greeted.
The thread alone touches UCX. Invariants: nothing is sent to anybody, and no endpoint is made,
before a message's proof was checked; ranges are checked against the memory before they are read;
a memory has a use count of the reads that are sending from it, and unregister() returns only
when it is 0; reads and lanes are bounded, and end at their deadlines. Called by ucx.py.

A page is called OK before it is sent. That is sound because its memory stays registered, whatever
unregister() was asked, until UCX has let go of the page: either all of it was sent, or the lane was
aborted, and then the reader's receive never completes.
"""

from __future__ import annotations

import logging
import threading
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field

from tierkv.storage.clock import Clock
from tierkv.storage.errors import TierIOError
from tierkv.storage.transport.base import PageOutcome, TransportLimits
from tierkv.storage.transport.ucx_address import Addresses
from tierkv.storage.transport.ucx_lane import tag_of
from tierkv.storage.transport.ucx_library import UcxEndpoint, UcxRequest, UcxWorker, Waker
from tierkv.storage.transport.ucx_wire import (
    MARKER,
    Hello,
    ReadRequest,
    pack_result,
    unpack_request,
)

LANE_READS_MAX = 16
"""Reads of one lane under way; a reader of ours asks for fewer."""
BUSY_WAIT_S = 0.1
IDLE_WAIT_S = 1.0
GRACE_S = 1.0
"""So much longer than a reader does the server wait: it is the reader that breaks off."""
STOP_S = 5.0

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class UcxServerStats:
    """Counters run from the start."""

    lanes: int
    served_pages: int
    served_bytes: int
    gone_pages: int
    refused_messages: int
    """No reader's, too many lanes, another lane's, or no message of ours at all."""
    broken_lanes: int
    thread_restarts: int


@dataclass(slots=True, eq=False)
class _Sending:
    """A read that is being answered, or a greeting."""

    generation: int
    holds: bool
    """Counts in the use count of its memory."""
    deadline: float
    sends: list[UcxRequest] = field(default_factory=list)
    bytes_out: int = 0
    ok: int = 0
    gone: int = 0


class _Lane:
    """A reader that greeted."""

    __slots__ = ("doomed", "endpoint", "lane", "nonce", "sendings", "used")

    def __init__(self, lane: bytes, nonce: int, endpoint: UcxEndpoint, used: float) -> None:
        self.lane = lane
        self.nonce = nonce
        self.endpoint = endpoint
        self.used = used
        self.sendings: list[_Sending] = []
        self.doomed = False
        """Aborted; it goes when its requests are done."""


class UcxServer:
    """All methods are thread-safe."""

    def __init__(
        self,
        worker: UcxWorker,
        addresses: Addresses,
        secret: bytes,
        limits: TransportLimits,
        clock: Clock,
    ) -> None:
        """Takes over `worker`."""
        self._worker = worker
        self._addresses = addresses
        self._secret = secret
        self._limits = limits
        self._clock = clock
        self._waker = Waker()
        self._changed = threading.Condition()
        self._memories: dict[int, memoryview] = {}
        self._uses: dict[int, int] = {}
        self._evicted: set[int] = set()
        self._lanes: dict[bytes, _Lane] = {}
        self._reaped = 0.0
        self._closing = False
        self._counts = dict.fromkeys(("pages", "bytes", "gone", "refused", "broken", "restarts"), 0)
        self._thread = threading.Thread(target=self._run, name="tierkv-ucx-serve", daemon=True)
        self._thread.start()

    # By callers

    def register(self, memory: memoryview, generation: int) -> None:
        """Answer reads of `memory`. O(1)."""
        with self._changed:
            if self._closing:
                raise TierIOError("register memory with ucx: the plane was closed")
            assert generation > 0 and generation not in self._memories, generation
            assert generation not in self._uses, "a generation is never the same twice"
            self._memories[generation] = memory

    def unregister(self, generation: int) -> None:
        """Stop answering reads of it; waits until none sends from it. TierIOError after io_s."""
        with self._changed:
            self._memories.pop(generation, None)
            wait_s = self._limits.io_s / 2
            if self._idle_locked(generation, wait_s):
                return
            # Readers that do not take their pages: their lanes go.
            self._evicted.add(generation)
        self._waker.wake()
        with self._changed:
            idle = self._idle_locked(generation, wait_s)
            self._evicted.discard(generation)
        if not idle:
            raise TierIOError(
                f"unregister memory {generation} from ucx: still being sent after "
                f"{self._limits.io_s:g} s; it must stay allocated"
            )

    def _idle_locked(self, generation: int, timeout_s: float) -> bool:
        return self._changed.wait_for(lambda: generation not in self._uses, timeout_s)

    def sizes(self) -> Mapping[int, int]:
        """Bytes of each registered memory."""
        with self._changed:
            return {generation: view.nbytes for generation, view in self._memories.items()}

    def stats(self) -> UcxServerStats:
        """Consistent with each other. O(1)."""
        with self._changed:
            return UcxServerStats(
                lanes=len(self._lanes),
                served_pages=self._counts["pages"],
                served_bytes=self._counts["bytes"],
                gone_pages=self._counts["gone"],
                refused_messages=self._counts["refused"] + self._worker.strays,
                broken_lanes=self._counts["broken"],
                thread_restarts=self._counts["restarts"],
            )

    def check(self) -> None:
        """Assert the invariants. O(reads under way)."""
        with self._changed:
            held: dict[int, int] = {}
            for lane in self._lanes.values():
                assert len(lane.sendings) <= LANE_READS_MAX
                for sending in lane.sendings:
                    if sending.holds:
                        held[sending.generation] = held.get(sending.generation, 0) + 1
            assert held == self._uses, (held, self._uses)
            assert len(self._lanes) <= self._limits.peer_connections
            assert self._closing or self._thread.is_alive(), "nobody answers"

    def close(self) -> None:
        """Answer nothing more, let go of all memory. Idempotent."""
        with self._changed:
            self._closing = True
            self._memories.clear()
        self._waker.wake()
        self._thread.join(STOP_S + self._limits.io_s)
        if self._thread.is_alive():
            log.error("plane=ucx thread=%s did not end", self._thread.name)

    # By the thread

    def _run(self) -> None:
        while not self._closing:
            try:
                self._turn()
            except Exception:  # noqa: BLE001
                # One lane's trouble must not end the thread that all others need (lesson H2).
                log.error("plane=ucx serving: %s", traceback.format_exc())
                with self._changed:
                    self._counts["restarts"] += 1
                for lane in list(self._lanes.values()):
                    self._doom(lane, "an error in the serving thread")
        for lane in list(self._lanes.values()):
            self._doom(lane, "it was closed")
        late = self._clock.monotonic() + self._limits.io_s
        while self._lanes and self._clock.monotonic() < late:
            self._worker.progress()
            self._advance_all(self._clock.monotonic())
            if self._lanes and self._worker.arm():
                self._waker.wait(self._worker, BUSY_WAIT_S)
        if self._lanes:
            log.error("plane=ucx lanes=%d did not settle", len(self._lanes))
            return
        self._waker.close()
        self._worker.close()

    def _turn(self) -> None:
        moved = self._worker.progress()
        now = self._clock.monotonic()
        for raw in self._worker.take_messages():
            self._take(raw, now)
        self._advance_all(now)
        if now - self._reaped > IDLE_WAIT_S or self._evicted:
            self._reaped = now
            self._reap(now)
        if not moved and self._worker.arm():
            busy = any(lane.sendings for lane in self._lanes.values())
            self._waker.wait(self._worker, BUSY_WAIT_S if busy else IDLE_WAIT_S)

    def _take(self, raw: bytes, now: float) -> None:
        """One message of anybody."""
        try:
            request = unpack_request(self._secret, raw)
            if isinstance(request, Hello):
                self._greet(request, now)
            else:
                self._begin(request, now)
        except TierIOError as error:
            log.info("plane=ucx message=refused reason=%s", error)
            with self._changed:
                self._counts["refused"] += 1

    def _greet(self, hello: Hello, now: float) -> None:
        if hello.lane in self._lanes:
            raise TierIOError("ucx greeting: of a lane that is there")
        if hello.replaces in self._lanes:
            self._doom(self._lanes[hello.replaces], "replaced by the reader")
        if len(self._lanes) >= self._limits.peer_connections:
            # Some may be of readers that are gone.
            self._reap(now)
            self._worker.progress()
            self._advance_all(now)
        if len(self._lanes) >= self._limits.peer_connections:
            raise TierIOError(f"ucx greeting: {len(self._lanes)} lanes are open, no more are taken")
        endpoint = self._worker.connect(self._addresses.build(hello.address))
        lane = _Lane(hello.lane, hello.nonce, endpoint, now)
        greeting = _Sending(0, holds=False, deadline=now + self._limits.handshake_s)
        with self._changed:
            self._lanes[hello.lane] = lane
            lane.sendings.append(greeting)
        try:
            welcome = pack_result(self._secret, lane.lane, 0, [])
            tag = tag_of(lane.nonce, 0, 0)
            greeting.sends.extend(self._worker.send(endpoint, [welcome], tag))
        except TierIOError as error:
            self._doom(lane, str(error))

    def _begin(self, request: ReadRequest, now: float) -> None:
        lane = self._lanes.get(request.lane)
        if lane is None or lane.doomed:
            raise TierIOError("ucx read: of a lane that never greeted or has ended")
        if len(lane.sendings) >= LANE_READS_MAX or len(request.ranges) > self._limits.read_pages:
            self._doom(lane, "more asked for than allowed")
            return
        lane.used = now
        generation = request.generation
        with self._changed:
            memory = self._memories.get(generation)
            if memory is not None:
                self._uses[generation] = self._uses.get(generation, 0) + 1
            sending = _Sending(
                generation,
                holds=memory is not None,
                deadline=now + min(request.timeout_s, self._limits.wait_s) + GRACE_S,
            )
            lane.sendings.append(sending)
        try:
            self._send_pages(lane, sending, memory, request)
        except TierIOError as error:
            self._doom(lane, str(error))

    def _send_pages(
        self, lane: _Lane, sending: _Sending, memory: memoryview | None, request: ReadRequest
    ) -> None:
        """Begin to send each page, straight from the memory, or the marker in its place."""
        outcomes: list[PageOutcome] = []
        pages: list[bytes | memoryview] = []
        for offset, length in request.ranges:
            inside = memory is not None and 0 < length <= self._limits.page_bytes
            if memory is None or not inside or offset + length > memory.nbytes:
                outcomes.append(PageOutcome.GONE if memory is None else PageOutcome.FAILED)
                pages.append(MARKER)
                continue
            outcomes.append(PageOutcome.OK)
            pages.append(memory[offset : offset + length])
            sending.bytes_out += length
        sending.ok = outcomes.count(PageOutcome.OK)
        sending.gone = outcomes.count(PageOutcome.GONE)
        message = pack_result(self._secret, lane.lane, request.number, outcomes)
        tag = tag_of(lane.nonce, request.number, 0)
        sending.sends.extend(self._worker.send(lane.endpoint, [message, *pages], tag))

    def _advance_all(self, now: float) -> None:
        for lane in list(self._lanes.values()):
            self._advance(lane, now)
            if lane.doomed and not lane.sendings:
                with self._changed:
                    del self._lanes[lane.lane]

    def _advance(self, lane: _Lane, now: float) -> None:
        """End what was sent, give up what was not taken in time."""
        for sending in list(lane.sendings):
            failure: str | None = None
            while sending.sends and sending.sends[-1].done:
                failure = sending.sends.pop().failure() or failure
            if failure is not None:
                self._doom(lane, failure)
            if not sending.sends:
                self._finish(lane, sending)
            elif sending.deadline <= now:
                self._doom(lane, "the reader did not take its pages in time")

    def _finish(self, lane: _Lane, sending: _Sending) -> None:
        """All of a read was sent, or will not be: let go of the memory."""
        with self._changed:
            lane.sendings.remove(sending)
            if sending.holds:
                self._uses[sending.generation] -= 1
                if not self._uses[sending.generation]:
                    del self._uses[sending.generation]
                    self._changed.notify_all()
            if not lane.doomed:
                self._counts["pages"] += sending.ok
                self._counts["bytes"] += sending.bytes_out
                self._counts["gone"] += sending.gone

    def _reap(self, now: float) -> None:
        """End lanes whose reader is gone, idle for long, or in the way of unregister()."""
        with self._changed:
            evicted = set(self._evicted)
        for lane in list(self._lanes.values()):
            if lane.doomed:
                continue
            if not lane.endpoint.alive:
                self._doom(lane, "connection lost")
            elif not lane.sendings and now - lane.used > self._limits.idle_s:
                self._doom(lane, "idle")
            elif any(sending.generation in evicted for sending in lane.sendings):
                self._doom(lane, "its pages were not taken before the memory went")

    def _doom(self, lane: _Lane, reason: str) -> None:
        """Break a lane off; it goes when nothing of it is under way any more."""
        if lane.doomed:
            return
        lane.doomed = True
        log.info("plane=ucx lane=ended reason=%s", reason)
        if reason != "idle" or lane.sendings:
            with self._changed:
                self._counts["broken"] += 1
        try:
            lane.endpoint.abort()
        except TierIOError as error:
            log.warning("plane=ucx lane=not closed reason=%s", error)
