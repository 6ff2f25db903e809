"""The contract of a data plane: a faster path for page bytes between nodes that TCP introduced.

Owns the two interfaces and their counters. A plane has no messages, no keys and no handshake:
planes.py carries offers over the authenticated control channel, probes a plane before it trusts
it, and takes TCP when it fails. A plane never connects to anybody whose offer did not come that
way. Implementations: nixl.py, ucx.py. Both are called by planes.py only.

    node A                                    node B
    plane.register(memory, 7)
    plane.offer()  -- control channel -->     peer = plane.connect(offer, "A", ...)
                                              peer.read(7, ranges, into, ...)
    plane.register(more, 8)
    plane.offer()  -- control channel -->     peer.refresh(offer)

Invariants, for every implementation: what PeerRead and the table in base.py promise; a page is OK
only when its generation was still registered after the page's last byte was read; a range is
checked against the size that the offer names before anything is asked of the peer; a peer that
dies, stalls or lies costs FAILED pages, never the process; nothing is unpickled; every queue is
bounded and every wait has a deadline.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from tierkv.storage.transport.base import PageRange, PeerRead

OFFER_BYTES_MAX = 64 << 10
"""Length of an offer. Longer ones are neither sent nor read."""


@dataclass(frozen=True, slots=True)
class PlanePeerStats:
    """One peer of one plane. Counters run from connect()."""

    open_reads: int
    pages_ok: int
    pages_gone: int
    pages_failed: int
    bytes_read: int
    """Of pages that are OK."""
    rejected_reads: int
    """Reads refused because too many were under way; their pages are in pages_failed."""
    worker_restarts: int


class PlanePeer(ABC):
    """A peer's memory as one plane reaches it. All methods are thread-safe.

    It never becomes another process: when the peer restarts, everything fails until planes.py
    connects again.
    """

    name: str
    """Of the plane."""

    @property
    @abstractmethod
    def broken(self) -> str | None:
        """Why this peer is of no more use, one line; None while a read may succeed. Once set it
        stays: planes.py closes this peer and connects again after a while."""

    @abstractmethod
    def knows(self, generation: int) -> bool:
        """Whether the last offer named this memory. O(1), waits for nothing."""

    @abstractmethod
    def read(
        self,
        generation: int,
        ranges: Sequence[PageRange],
        into: Sequence[memoryview],
        timeout_s: float,
    ) -> PeerRead:
        """Copy ranges of the peer's memory `generation` into local memory.

        The arguments have passed base.check_read(). Never waits. A generation that was never
        offered, or that the peer has unregistered, is GONE. A range outside it is refused
        (PeerRead.refuse) with "outside" in the error; more than `queued_reads` at once and a
        closed or broken peer are refused too.

        Destinations that lie in memory registered with this node's own plane are written to
        directly; for others the plane may register them for this read, or copy. They belong to
        the plane until the read is done. The deadline ends a read; where a transfer under way
        cannot be stopped, the read is done as soon after it as nothing writes any more, and the
        implementation says how it knows.
        """

    @abstractmethod
    def refresh(self, offer: bytes) -> None:
        """The peer's newest offer: memory registered since, memory that is gone.

        TierIOError, one line, when it cannot be used; what was known before stays.
        """

    @abstractmethod
    def stats(self) -> PlanePeerStats:
        """Counters, consistent with each other. O(1)."""

    @abstractmethod
    def check(self) -> None:
        """Assert the invariants. O(open reads)."""

    @abstractmethod
    def close(self) -> None:
        """End all reads (FAILED) and forget the peer. Idempotent."""


class DataPlane(ABC):
    """One node's end of a plane. All methods are thread-safe.

    Constructors take `limits: TransportLimits` and `clock: Clock` by keyword, besides what the
    plane needs, and raise ConfigError, one line naming the extra to install, when their library is
    absent or cannot run here.
    """

    name: str

    @abstractmethod
    def register(self, memory: memoryview, generation: int) -> None:
        """Let peers read `memory`, in place, under this number. The number is the caller's,
        from 1, never the same twice. TierIOError when the plane cannot reach such memory."""

    @abstractmethod
    def unregister(self, generation: int) -> None:
        """Let peers read it no more. When it returns, no byte of it is read by this process, and
        no page of it that a peer reads later can be OK there. Idempotent; TierIOError when
        that cannot be had in io_s.
        """

    @abstractmethod
    def offer(self) -> bytes:
        """What a peer needs to read from this node: at most OFFER_BYTES_MAX, no secrets of the
        pool. Changes with register() and unregister(). TierIOError when it cannot be made."""

    @abstractmethod
    def connect(self, offer: bytes, peer_name: str, timeout_s: float) -> PlanePeer:
        """Make a peer's memory reachable. `offer` is a peer's and is validated; `peer_name` is
        for logs and thread names.

        TierIOError, one line, when the plane does not reach that peer in time.
        """

    @abstractmethod
    def check(self) -> None:
        """Assert the invariants. O(peers)."""

    @abstractmethod
    def close(self) -> None:
        """Close the peers, unregister everything. Idempotent."""
