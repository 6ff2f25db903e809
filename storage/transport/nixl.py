"""The nixl data plane: one-sided reads by NIXL's UCX backend. RDMA, or memory of this machine.

Owns this node's end: one agent, the registered memories with their cookies, and the peers. Parts:
nixl_agent.py calls NIXL, nixl_driver.py runs reads and says when a destination is free again,
nixl_offer.py has the bytes of an offer. Called by planes.py.

Only where it is safe: both nodes have an RDMA device, or are processes of one machine that may
read each other's memory (checked with the system call that UCX uses). Over TCP, UCX would have
the peer's process copy from addresses that come off the wire, and abort when the reader leaves in
the middle of it (measured); TierKV's own tcp does that better. UCX asks nobody for a key: whoever
reaches its port on the pool's interface may try. So nixl is for networks that are trusted.

Invariants: a memory's cookie is right only while it is registered, and random, so that no memory
of another process behind the same address is taken for it; unregister() breaks the cookie before
anything else. A page read while that happens is GONE or FAILED. Memory that is unregistered while
a peer reads it costs the peer its connection, not us ours.
"""

from __future__ import annotations

import logging
import mmap
import os
import secrets
import threading
from collections.abc import Sequence
from dataclasses import dataclass

from tierkv.storage.clock import Clock, SystemClock
from tierkv.storage.device import address_of
from tierkv.storage.errors import TierClosedError, TierIOError
from tierkv.storage.transport.base import PageOutcome, PageRange, PeerRead, TransportLimits
from tierkv.storage.transport.nixl_agent import Agent, Copy
from tierkv.storage.transport.nixl_driver import Driver, Piece, Remote
from tierkv.storage.transport.nixl_memory import read_process
from tierkv.storage.transport.nixl_offer import (
    AGENT_BYTES,
    COOKIE_BYTES,
    COOKIE_CLOSED,
    NixlOffer,
    OfferedMemory,
    pack_offer,
    unpack_offer,
)
from tierkv.storage.transport.plane import DataPlane, PlanePeer, PlanePeerStats
from tierkv.storage.transport.ucx_environment import (
    MACHINE_BYTES,
    copies_directly,
    machine,
    rdma_devices,
)

PIECE_BYTES = 16 << 20
"""A read is cut into transfers of about so much: a deadline is looked at between them."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Memory:
    view: memoryview
    address: int
    slot: int
    """Of its cookie."""
    cookie: bytes
    registration: object


class NixlPlane(DataPlane):
    """One node's end."""

    name = "nixl"

    def __init__(
        self, host: str, *, limits: TransportLimits | None = None, clock: Clock | None = None
    ) -> None:
        """`host`: numeric address of this node in the pool; UCX listens on its interface only.
        ConfigError when NIXL is not installed (the extra to install is named) or cannot run."""
        self._limits = limits or TransportLimits()
        clock = clock or SystemClock()
        self._agent = Agent(secrets.token_hex(AGENT_BYTES // 2), host)
        self._machine = machine()
        self._rdma = bool(rdma_devices())
        self._lock = threading.Lock()
        self._memories: dict[int, _Memory] = {}
        self._runs: tuple[tuple[int, int], ...] = ()
        """Where the memories are: replaced as a whole, read without the lock."""
        # One more than memories: planes.py registers its probe area.
        slots = self._limits.memories + 1
        self._cookies = mmap.mmap(-1, slots * COOKIE_BYTES)
        self._cookies_at = address_of(memoryview(self._cookies))
        self._agent.register(self._cookies_at, len(self._cookies))
        self._slots = list(range(slots))
        self._metadata: bytes | None = None
        self._driver = Driver(self._agent, clock)
        self._clock = clock
        self._remotes: dict[str, Remote] = {}
        self._peers: list[NixlPeer] = []
        self._closed = False

    def register(self, memory: memoryview, generation: int) -> None:
        view = memory.cast("B")
        address = address_of(view)
        with self._lock:
            self._check_open("register memory")
            assert generation not in self._memories, "a generation names one memory"
            if not self._slots:
                raise TierIOError(
                    f"register memory by nixl: {len(self._memories)} are registered, no more"
                )
            registration = self._agent.register(address, view.nbytes)
            slot, cookie = self._slots.pop(), secrets.token_bytes(COOKIE_BYTES)
            self._memories[generation] = _Memory(view, address, slot, cookie, registration)
            self._set_cookie(slot, cookie)
            self._changed_locked()

    def unregister(self, generation: int) -> None:
        with self._lock:
            memory = self._memories.pop(generation, None)
            if memory is None:
                return
            self._set_cookie(memory.slot, bytes(COOKIE_BYTES))
            self._slots.append(memory.slot)
            self._changed_locked()
            self._deregister(memory)

    def offer(self) -> bytes:
        with self._lock:
            self._check_open("offer memory")
            if self._metadata is None:
                self._metadata = self._agent.metadata()
            memories = [
                OfferedMemory(
                    generation,
                    memory.address,
                    memory.view.nbytes,
                    self._cookies_at + memory.slot * COOKIE_BYTES,
                    memory.cookie,
                )
                for generation, memory in sorted(self._memories.items())
            ]
            own = (self._machine, os.getpid(), self._rdma, self._agent.name)
            return pack_offer(NixlOffer(*own, memories, self._metadata))

    def connect(self, offer: bytes, peer_name: str, timeout_s: float) -> NixlPeer:
        """Waits for nothing: the first read connects."""
        theirs = unpack_offer(offer)
        self._check_reachable(theirs)
        with self._lock:
            self._check_open("connect peer")
            remote = self._load(theirs)
            with self._driver.changed:
                remote.users += 1
            peer = NixlPeer(self, peer_name, remote, self._driver, self._limits, self._clock)
            self._peers = [known for known in self._peers if not known.closed]
            self._peers.append(peer)
            return peer

    def refresh(self, remote: Remote, offer: bytes) -> None:
        """See PlanePeer.refresh()."""
        theirs = unpack_offer(offer)
        if theirs.agent != remote.name:
            raise TierIOError("refresh peer by nixl: the offer is of another process")
        with self._lock:
            self._check_open("refresh peer")
            if self._load(theirs) is not remote:
                raise TierIOError("refresh peer by nixl: it was lost; connect again")

    def registered(self, address: int, length: int) -> bool:
        """Whether this local memory is known to NIXL as a whole. O(memories)."""
        return any(start <= address and address + length <= end for start, end in self._runs)

    def check(self) -> None:
        with self._lock:
            used = [memory.slot for memory in self._memories.values()]
            assert len(set(used + self._slots)) == len(used) + len(self._slots)
            for memory in self._memories.values():
                at = memory.slot * COOKIE_BYTES
                assert self._cookies[at : at + COOKIE_BYTES] == memory.cookie
            peers = list(self._peers)
        self._driver.check()
        for peer in peers:
            peer.check()

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            peers, self._peers = self._peers, []
        with self._lock:
            # Before anything is unregistered: to a peer it is no miss that this node leaves.
            self._cookies[:] = COOKIE_CLOSED * (len(self._cookies) // COOKIE_BYTES)
            self._closed = True
            memories, self._memories = self._memories, {}
            self._changed_locked()
            for memory in memories.values():
                self._deregister(memory)
        for peer in peers:
            peer.close()
        self._driver.close()
        self._agent.close()
        self._driver.abandon()

    def _check_open(self, what: str) -> None:
        if self._closed:
            raise TierClosedError(f"{what} by nixl: the plane was closed")

    def _check_reachable(self, theirs: NixlOffer) -> None:
        """TierIOError unless its memory can be read without its process doing anything."""
        if theirs.machine == self._machine != bytes(MACHINE_BYTES):
            if not copies_directly():
                raise TierIOError("UCX_TLS leaves shared memory out; add sm to it")
            for memory in theirs.memories[:1]:
                cookie = read_process(theirs.pid, memory.cookie_address, COOKIE_BYTES)
                if cookie != memory.cookie:
                    raise TierIOError(f"process {theirs.pid} is not the one that offers memory")
        elif not (self._rdma and theirs.rdma):
            where = "this node" if not self._rdma else "the peer"
            raise TierIOError(f"{where} has no RDMA device and the peer is on another machine")

    def _load(self, theirs: NixlOffer) -> Remote:
        """The peer in NIXL with the memories of this offer. Under the lock."""
        known = self._remotes.get(theirs.agent)
        with self._driver.changed:
            if known is not None and known.forgotten:
                known = None
            elif known is not None and known.broken is not None:
                raise TierIOError(f"a transfer of it has not ended yet: {known.broken}")
        if theirs.agent == self._agent.name:
            raise TierIOError("that is this plane itself")
        memories = {memory.generation: memory for memory in theirs.memories}
        with self._driver.changed:
            # NIXL adds to what it knows of a peer. After memory has gone, another may be at its
            # address with other keys, so the peer is learnt anew when nothing of it is under way.
            if known is not None and known.memories.keys() - memories.keys() and not known.running:
                self._agent.forget(known.name)
            name = self._agent.load(theirs.metadata)
        if name != theirs.agent:
            if name not in self._remotes:
                self._agent.forget(name)
            raise TierIOError(f"its metadata is of agent {name!r}, its offer of {theirs.agent!r}")
        if known is None:
            known = Remote(name, memories)
            self._remotes = {
                key: remote for key, remote in self._remotes.items() if not remote.forgotten
            }
            self._remotes[name] = known
        known.memories = memories
        return known

    def _deregister(self, memory: _Memory) -> None:
        try:
            self._agent.deregister(memory.registration)
        except TierIOError as error:
            # The cookie is broken, so what a peer reads of it counts for nothing.
            log.warning("nixl=%s %s", self._agent.name, error)

    def _changed_locked(self) -> None:
        """Memories came or went."""
        self._metadata = None
        self._runs = tuple(
            (memory.address, memory.address + memory.view.nbytes)
            for memory in self._memories.values()
        )

    def _set_cookie(self, slot: int, cookie: bytes) -> None:
        self._cookies[slot * COOKIE_BYTES : (slot + 1) * COOKIE_BYTES] = cookie


class NixlPeer(PlanePeer):
    """A peer over NIXL. Made by NixlPlane.connect().

    A read that is late: see nixl_driver.py for when its destinations are free again.
    """

    name = "nixl"

    def __init__(
        self,
        plane: NixlPlane,
        peer_name: str,
        remote: Remote,
        driver: Driver,
        limits: TransportLimits,
        clock: Clock,
    ) -> None:
        """`remote` counts this peer as a user already."""
        self.peer_name = peer_name
        self._plane = plane
        self._remote = remote
        self._driver = driver
        self._limits = limits
        self._clock = clock
        self._lock = threading.Lock()
        self._open: dict[PeerRead, int] = {}
        """Pieces that have not ended, by read."""
        self._outcomes = dict.fromkeys(PageOutcome, 0)
        self._bytes = 0
        self._rejected = 0
        self.closed = False

    @property
    def broken(self) -> str | None:
        return "it was closed" if self.closed else self._remote.broken

    def knows(self, generation: int) -> bool:
        return generation in self._remote.memories

    def read(
        self,
        generation: int,
        ranges: Sequence[PageRange],
        into: Sequence[memoryview],
        timeout_s: float,
    ) -> PeerRead:
        read = PeerRead(len(ranges))
        memory = self._remote.memories.get(generation)
        if memory is None:
            return self._refuse(read, len(ranges), PageOutcome.GONE, None)
        for offset, length in ranges:
            if offset + length > memory.length:
                problem = (
                    f"{length} bytes at {offset} are outside a memory of {memory.length} bytes"
                )
                return self._refuse(read, len(ranges), PageOutcome.FAILED, problem)
        deadline = self._clock.monotonic() + timeout_s
        pieces = self._pieces(read, memory, ranges, into, deadline)
        with self._lock:
            refusal = self.broken
            if refusal is None and len(self._open) >= self._limits.queued_reads:
                refusal = f"{len(self._open)} reads are under way, no more are taken"
                self._rejected += 1
            if refusal is None:
                self._open[read] = len(pieces)
        if refusal is not None:
            return self._refuse(read, len(ranges), PageOutcome.FAILED, refusal)
        self._driver.submit(pieces)
        return read

    def refresh(self, offer: bytes) -> None:
        self._plane.refresh(self._remote, offer)

    def stats(self) -> PlanePeerStats:
        with self._lock:
            return PlanePeerStats(
                open_reads=len(self._open),
                pages_ok=self._outcomes[PageOutcome.OK],
                pages_gone=self._outcomes[PageOutcome.GONE],
                pages_failed=self._outcomes[PageOutcome.FAILED],
                bytes_read=self._bytes,
                rejected_reads=self._rejected,
                worker_restarts=self._driver.restarts,
            )

    def check(self) -> None:
        with self._lock:
            assert len(self._open) <= self._limits.queued_reads, len(self._open)
            assert all(pieces > 0 for pieces in self._open.values())

    def close(self) -> None:
        with self._lock:
            if self.closed:
                return
            self.closed = True
        self._driver.drop(self._told)
        self._driver.release_remote(self._remote)

    def _pieces(
        self,
        read: PeerRead,
        memory: OfferedMemory,
        ranges: Sequence[PageRange],
        into: Sequence[memoryview],
        deadline: float,
    ) -> list[Piece]:
        """The read as transfers of about PIECE_BYTES."""
        pieces: list[Piece] = []
        size = PIECE_BYTES
        for index, ((offset, length), view) in enumerate(zip(ranges, into, strict=True)):
            if size + length > PIECE_BYTES:
                fixed = (memory, self._remote, deadline, self._told)
                pieces.append(Piece(read, index, [], [], [], *fixed))
                size = 0
            piece, local = pieces[-1], address_of(view)
            piece.copies.append(Copy(local, memory.address + offset, length))
            piece.views.append(view)
            if not self._plane.registered(local, length):
                piece.foreign.append((local, length))
            size += length
        return pieces

    def _refuse(
        self, read: PeerRead, pages: int, outcome: PageOutcome, problem: str | None
    ) -> PeerRead:
        with self._lock:
            self._outcomes[outcome] += pages
        if problem is None:
            read.settle(0, [outcome] * pages)
        else:
            read.refuse(f"read from peer by nixl: {problem}")
        return read

    def _told(self, piece: Piece, outcomes: Sequence[PageOutcome]) -> None:
        """A piece has ended."""
        with self._lock:
            for copy, outcome in zip(piece.copies, outcomes, strict=True):
                self._outcomes[outcome] += 1
                self._bytes += copy.length if outcome is PageOutcome.OK else 0
            self._open[piece.read] -= 1
            if not self._open[piece.read]:
                del self._open[piece.read]
