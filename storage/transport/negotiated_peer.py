"""One connected peer that is read by the fastest path that works.

Owns the choice: the control channel (a TcpPeer, which is also the path that is always there), the
plane in use and why others are not, a breaker a plane. Nothing here waits in read(): what has to
be asked of the peer is asked by a Worker. Called by planes.py.

    path       leaves by
    plane      a read fails and the plane calls the peer broken, or its breaker trips -> tcp,
               and the worker tries again: at once below the breaker's limit, else after OPEN_S
    tcp        the worker connected a plane and its probe read the right bytes -> plane

A read stays with the path it began on. Memory that the plane does not know yet is read over tcp,
and the worker asks for a new offer.
"""

from __future__ import annotations

import hashlib
import logging
import threading
from collections.abc import Callable, Mapping, Sequence

from tierkv.storage.breaker import Breaker
from tierkv.storage.clock import Clock
from tierkv.storage.errors import TierIOError, TierKVError
from tierkv.storage.transport.base import (
    PageOutcome,
    PageRange,
    Peer,
    PeerRead,
    PeerStats,
    TransportLimits,
    check_read,
)
from tierkv.storage.transport.introduction import (
    APPLICATION,
    PROBE_BYTES,
    PROBE_GENERATION,
    Introduction,
    pack_question,
    unpack_introduction,
)
from tierkv.storage.transport.plane import DataPlane, PlanePeer, PlanePeerStats
from tierkv.storage.transport.plane_worker import Worker
from tierkv.storage.transport.tcp_peer import TcpPeer

FAILURES_MAX = 3
"""Failed reads in a row that make a plane be left alone for OPEN_S."""
OPEN_S = 30.0
NEGOTIATE_S = 5.0
PROBE_S = 2.0
HURRY_S = 0.02
"""A read that was given less time than this and is late says nothing about its plane."""
REFRESH_PAUSE_S = 1.0
"""Between questions for a newer offer."""

log = logging.getLogger(__name__)


class NegotiatedPeer(Peer):
    """Made by NegotiatedTransport.connect()."""

    def __init__(
        self,
        control: TcpPeer,
        planes: Sequence[DataPlane],
        limits: TransportLimits,
        clock: Clock,
        worker: Worker,
    ) -> None:
        """Takes over `control`. Uses tcp until negotiate() was called."""
        self.address = control.address
        self.identity = control.identity
        self._control = control
        self._planes = planes
        self._limits = limits
        self._clock = clock
        self._worker = worker
        self._lock = threading.Lock()
        self._path: PlanePeer | None = None
        self._declined: dict[str, str] = {}
        self._breakers = {plane.name: Breaker(clock, FAILURES_MAX, OPEN_S) for plane in planes}
        self._retry: set[str] = set()
        """Planes that were in use and were lost: tried again when their breaker lets them."""
        self._negotiating = False
        """Whether the worker has been asked to negotiate."""
        self._refresh_at = 0.0
        self._lost: list[PlanePeer] = []
        """Paths that are not used any more and not closed yet."""
        self._resting: list[PlanePeer] = []
        """Paths that a better one replaced: closed when their last read has ended."""
        self._past: list[PlanePeerStats] = []
        """Of paths that were closed."""
        self._probes = 0
        """Probe reads that went well: pages of our own."""
        self._questions = [0, 0]
        """Messages of our own that were answered, and that were not."""
        self.closed = False

    # What the contract says

    @property
    def transport(self) -> str:
        path = self._path
        return self._control.transport if path is None else path.name

    @property
    def declined(self) -> Mapping[str, str]:
        with self._lock:
            return dict(self._declined)

    def read(
        self,
        generation: int,
        ranges: Sequence[PageRange],
        into: Sequence[memoryview],
        timeout_s: float,
    ) -> PeerRead:
        if self._retry:
            self._revive()
        path = self._path
        if path is None:
            return self._control.read(generation, ranges, into, timeout_s)
        check_read(generation, ranges, into, timeout_s, self._limits)
        broken = path.broken
        if broken is None and path.knows(generation):
            read = path.read(generation, ranges, into, timeout_s)
            broken = path.broken
            if broken is None or not read.refused:
                read.add_done_callback(lambda: self._judge(path, read, timeout_s))
                return read
            # Nothing was asked for, so nothing can be written any more: tcp may have the memory.
        if broken is None:
            self._ask_for_offer()
        else:
            self._lose(path, broken)
        return self._control.read(generation, ranges, into, timeout_s)

    def message(self, payload: bytes, timeout_s: float) -> bytes:
        if len(payload) > self._limits.message_bytes:
            raise ValueError(
                f"message to peer: expected at most {self._limits.message_bytes} bytes, "
                f"got {len(payload)}"
            )
        return self._control.message(APPLICATION + payload, timeout_s)

    def stats(self) -> PeerStats:
        tcp = self._control.stats()
        with self._lock:
            paths = list(self._past)
            answered, failed = self._questions
            paths += [path.stats() for path in self._paths_locked()]
            probes = self._probes
        return PeerStats(
            connections=tcp.connections,
            open_reads=tcp.open_reads + sum(path.open_reads for path in paths),
            pages_ok=tcp.pages_ok + sum(path.pages_ok for path in paths) - probes,
            pages_gone=tcp.pages_gone + sum(path.pages_gone for path in paths),
            pages_failed=tcp.pages_failed + sum(path.pages_failed for path in paths),
            bytes_read=tcp.bytes_read
            + sum(path.bytes_read for path in paths)
            - probes * PROBE_BYTES,
            messages=tcp.messages - answered,
            messages_failed=tcp.messages_failed - failed,
            rejected_reads=tcp.rejected_reads + sum(path.rejected_reads for path in paths),
            worker_restarts=tcp.worker_restarts + sum(path.worker_restarts for path in paths),
        )

    def check(self) -> None:
        self._control.check()
        path = self._path
        if path is not None:
            path.check()
        with self._lock:
            assert self._path is None or self._path.name not in self._declined
            assert set(self._declined) <= set(self._breakers)
        for breaker in self._breakers.values():
            breaker.check()

    def close(self) -> None:
        with self._lock:
            self.closed = True
            self._lost = paths = self._paths_locked()
            self._resting, self._path = [], None
        for path in list(paths):
            self._retire(path)
        self._control.close()

    def _paths_locked(self) -> list[PlanePeer]:
        """All that are not closed yet."""
        used = [] if self._path is None else [self._path]
        return [*self._lost, *self._resting, *used]

    # Which path

    def negotiate(self, timeout_s: float) -> None:
        """Choose a plane, or none; says why in `declined`. Waits. In connect() and the worker."""
        deadline = self._clock.monotonic() + min(timeout_s, NEGOTIATE_S)
        wanted = [plane for plane in self._planes if self._breakers[plane.name].closed]
        if not wanted:
            return
        try:
            introduction = self._introduce([plane.name for plane in wanted], deadline)
        except TierIOError as error:
            for plane in wanted:
                self._breakers[plane.name].failed()
            with self._lock:
                # That says nothing about them.
                self._retry.update(plane.name for plane in wanted)
            self._settle(None, dict.fromkeys(self._breakers, str(error)))
            return
        reasons: dict[str, str] = {}
        for plane in self._planes:
            path, reason = self._attempt(plane, introduction, deadline)
            if path is not None:
                self._settle(path, reasons)
                return
            reasons[plane.name] = reason
        self._settle(None, reasons)

    def refresh(self, timeout_s: float) -> None:
        """Give the plane in use the peer's newest offer. Waits. In the worker."""
        path = self._path
        if path is None:
            return
        deadline = self._clock.monotonic() + timeout_s
        try:
            introduction = self._introduce([path.name], deadline)
            if path.name in introduction.offers:
                path.refresh(introduction.offers[path.name])
        except TierIOError as error:
            log.warning("peer=%s plane=%s refresh=%s", self.address, path.name, error)

    def _attempt(
        self, plane: DataPlane, introduction: Introduction, deadline: float
    ) -> tuple[PlanePeer | None, str]:
        """One plane: a path that read the right bytes, or why not."""
        name, path = plane.name, self._path
        breaker = self._breakers[name]
        if not breaker.closed:
            return None, self._declined.get(name, "it failed") + "; left alone for a while"
        if name not in introduction.offers:
            return None, introduction.refusals.get(name, "the peer does not have it")
        try:
            if path is not None and path.name == name and path.broken is None:
                path.refresh(introduction.offers[name])
                return path, ""
            left_s = deadline - self._clock.monotonic()
            path = plane.connect(introduction.offers[name], self.address, max(left_s, 0.001))
            try:
                self._probe(path, introduction.digest, deadline)
            except BaseException:
                path.close()
                raise
        except TierKVError as error:
            breaker.failed()
            return None, str(error)
        except Exception as error:
            # A bug of one plane must cost neither the connection nor the others (lesson H2).
            log.exception("peer=%s plane=%s", self.address, name)
            breaker.failed()
            return None, f"{type(error).__name__} in this node: {error}"
        breaker.succeeded()
        return path, ""

    def _probe(self, path: PlanePeer, digest: bytes, deadline: float) -> None:
        """Read bytes that only this peer has. TierIOError unless they come."""
        buffer = bytearray(PROBE_BYTES)
        # Half of what is left is for a read that does not end at its deadline.
        wait_s = max(0.002, min(2 * PROBE_S, deadline - self._clock.monotonic()))
        whole = [PageRange(0, PROBE_BYTES)]
        read = path.read(PROBE_GENERATION, whole, [memoryview(buffer)], wait_s / 2)
        outcome = read.take(wait_s)[0]
        if outcome is not PageOutcome.OK:
            raise TierIOError(f"probe read: {outcome.value}, {read.error or 'no reason given'}")
        if hashlib.sha256(buffer).digest() != digest:
            raise TierIOError("probe read: other bytes came than the peer says it has")

    def _introduce(self, names: Sequence[str], deadline: float) -> Introduction:
        left_s = deadline - self._clock.monotonic()
        if left_s <= 0:
            raise TierIOError("ask peer for offers: no time left")
        good = 0
        try:
            answer = self._control.message(pack_question(names), left_s)
            good = 1
        finally:
            with self._lock:
                self._questions[1 - good] += 1
        return unpack_introduction(answer)

    def _settle(self, path: PlanePeer | None, reasons: dict[str, str]) -> None:
        """From now on `path`."""
        with self._lock:
            if path is not None and path is not self._path:
                self._probes += 1
            old = path if self.closed else self._path
            if old is not None and (self.closed or old is not path):
                (self._lost if self.closed or old.broken else self._resting).append(old)
            if not self.closed:
                self._path = path
                self._declined = reasons
            if path is not None:
                self._retry.discard(path.name)
            lost = list(self._lost)
        for unwanted in lost:
            self._retire(unwanted)
        log.info("peer=%s transport=%s", self.address, self.transport)
        for name, reason in reasons.items():
            log.warning("peer=%s declined=%s reason=%s", self.address, name, reason)

    def _judge(self, path: PlanePeer, read: PeerRead, timeout_s: float) -> None:
        """A read on `path` that was given `timeout_s` has ended."""
        if read.refused:
            return
        breaker = self._breakers[path.name]
        if PageOutcome.FAILED not in read.take(0.0):
            breaker.succeeded()
            if self._resting:
                self._sweep()
            return
        broken = path.broken is not None
        if broken or timeout_s >= HURRY_S:
            breaker.failed()
        if broken or not breaker.closed:
            self._lose(path, read.error or "reads failed")

    def _lose(self, path: PlanePeer, reason: str) -> None:
        """Use tcp instead of `path`. Waits for nothing."""
        with self._lock:
            if self._path is not path:
                return
            self._path = None
            self._lost.append(path)
            self._declined = {**self._declined, path.name: reason}
            self._retry.add(path.name)
            self._negotiating = True
        log.warning("peer=%s lost=%s reason=%s transport=tcp", self.address, path.name, reason)
        self._ask_worker(lambda: self._replace(path))

    def _replace(self, path: PlanePeer) -> None:
        """In the worker: let go of a lost path and look for another."""
        self._retire(path)
        self._negotiate_again()

    def _negotiate_again(self) -> None:
        """In the worker."""
        try:
            if not self.closed:
                self.negotiate(NEGOTIATE_S)
        finally:
            with self._lock:
                self._negotiating = False

    def _revive(self) -> None:
        """Have the planes tried again when a breaker lets one through. Waits for nothing."""
        with self._lock:
            if self.closed or self._negotiating:
                return
            if not any(self._breakers[name].closed for name in self._retry):
                return
            self._negotiating = True
        self._ask_worker(self._negotiate_again)

    def _ask_worker(self, task: Callable[[], None]) -> None:
        """For a task that ends with a negotiation."""
        if not self._worker.ask(task):
            with self._lock:
                self._negotiating = False

    def _sweep(self) -> None:
        """Have replaced paths closed that nobody reads from any more."""
        with self._lock:
            idle = [path for path in self._resting if not path.stats().open_reads]
            self._resting = [path for path in self._resting if path not in idle]
            self._lost += idle
        for path in idle:
            self._worker.ask(lambda path=path: self._retire(path))  # type: ignore[misc]

    def _ask_for_offer(self) -> None:
        now = self._clock.monotonic()
        with self._lock:
            if now < self._refresh_at:
                return
            self._refresh_at = now + REFRESH_PAUSE_S
        self._worker.ask(lambda: self.refresh(NEGOTIATE_S))

    def _retire(self, path: PlanePeer) -> None:
        """Close a lost path and keep its counters. Waits for what it has under way."""
        path.close()
        with self._lock:
            if path in self._lost:
                self._lost.remove(path)
                self._past.append(path.stats())
