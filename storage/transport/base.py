"""The transport contract: page bytes and small messages between two nodes.

Owns the values that cross the contract and PeerRead, the handle of a read under way. Knows no
keys, leases or checksums: storage above it leases before a read and checks lease and checksum
after it. Implementations: tcp.py, planes.py. Each passes transport_conformance.py.

What a read says about each page:

    OK      every byte of the range arrived, from the memory that was asked for
    GONE    the peer answered: that memory is not registered (any more). A miss, not a failure
    FAILED  nothing is known: connection lost, deadline passed, refused. Counts against the peer

Invariants: a page is OK or its destination is undefined, never part of a page; destinations
belong to the transport from read() until the read is done, and after that it never writes to
them; every wait ends at a deadline; a failure raises TierIOError, or is FAILED in a read.
"""

from __future__ import annotations

import logging
import secrets
import threading
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from tierkv.storage.closing import Closing
from tierkv.storage.errors import ConfigError, TierIOError

BOOT_TOKEN_BYTES = 16
GENERATION_MAX = (1 << 64) - 1
PAGE_BYTES_MAX = (1 << 32) - 1

log = logging.getLogger(__name__)


class PageRange(NamedTuple):
    """A run of bytes in a peer's memory: half-open, from `offset` for `length` bytes."""

    offset: int
    length: int


class PageOutcome(Enum):
    """See the table at the top."""

    OK = "ok"
    GONE = "gone"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class PeerIdentity:
    """Who a peer is: another boot token is another process, whatever its address."""

    boot_token: bytes


@dataclass(frozen=True, slots=True)
class TransportLimits:
    """Bounds of one transport. Checked before anything is allocated."""

    read_pages: int = 4096
    """Ranges of one read."""
    page_bytes: int = 1 << 30
    """Length of one range."""
    memories: int = 64
    """Memories registered at once."""
    message_bytes: int = 1 << 20
    """Length of a message and of its answer."""
    queued_reads: int = 256
    """Reads of one peer that have not ended; more are refused and counted."""
    read_connections: int = 2
    message_connections: int = 2
    peer_connections: int = 128
    """Connections that peers may have open to this node, all together."""
    handshake_s: float = 5.0
    io_s: float = 10.0
    """Longest silence in the middle of a frame."""
    idle_s: float = 600.0
    """A connection that asks nothing for so long is closed; the peer opens another."""
    wait_s: float = 600.0
    """Longest timeout a caller may ask for."""

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if getattr(self, name) <= 0:
                raise ConfigError(
                    f"transport limits: {name} must be positive, got {getattr(self, name)}"
                )
        if self.page_bytes > PAGE_BYTES_MAX:
            raise ConfigError(
                f"transport limits: page_bytes must be at most {PAGE_BYTES_MAX}, "
                f"got {self.page_bytes}"
            )


@dataclass(frozen=True, slots=True)
class PeerStats:
    """One connected peer. Counters run from connect()."""

    connections: int
    open_reads: int
    pages_ok: int
    pages_gone: int
    pages_failed: int
    bytes_read: int
    """Of pages that are OK."""
    messages: int
    messages_failed: int
    rejected_reads: int
    """Reads refused because too many were under way; their pages are in pages_failed."""
    worker_restarts: int


@dataclass(frozen=True, slots=True)
class TransportStats:
    """What this node serves to others. Counters run from the start."""

    connections: int
    served_pages: int
    served_bytes: int
    served_messages: int
    gone_pages: int
    refused_connections: int
    """Too many, wrong key, another version, or no TierKV at all."""
    broken_connections: int
    """Ended by an error after they were accepted."""
    thread_restarts: int


class PeerRead:
    """A read under way. Thread-safe; done once, at the latest at its deadline."""

    def __init__(self, pages: int) -> None:
        self._lock = threading.Lock()
        self._changed: threading.Condition | None = None
        """Of the lock, once somebody waits: most reads are done before, or have a callback."""
        self._outcomes = [PageOutcome.FAILED] * pages
        self._left = pages
        self._error: str | None = None
        self._done = False
        self._refused = False
        self._callbacks: list[Callable[[], None]] = []

    @property
    def done(self) -> bool:
        """True once no byte of it moves any more."""
        return self._done

    @property
    def error(self) -> str | None:
        """The first failure, one line; None while there is none."""
        return self._error

    @property
    def refused(self) -> bool:
        """True when nothing was asked of the peer, for a reason on this side: too many reads
        under way, a range outside the memory. Says nothing about the peer's health."""
        return self._refused

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        """Call `callback()` once when done, from the thread that ends the read; at once when it
        is done already. What it raises is logged.

        To be brief: the thread may be the one that ends other reads at their deadlines, or a
        taker's. It may call anything here, close() too.
        """
        with self._lock:
            if not self._done:
                self._callbacks.append(callback)
                return
        _call(callback)

    def take(self, timeout_s: float) -> list[PageOutcome]:
        """Wait, then say what became of each page, in the order asked. Does not end the read.

        TierIOError when it is not done in `timeout_s`: the destinations are not the caller's yet.
        """
        with self._lock:
            if self._changed is None and not self._done:
                self._changed = threading.Condition(self._lock)
            changed = self._changed
            if changed is not None and not changed.wait_for(
                lambda: self._done, max(0.0, timeout_s)
            ):
                raise TierIOError(
                    f"read from peer: not done after {timeout_s:g} s, {self._left} pages left; "
                    "wait for its deadline before the memory is used again"
                )
            return list(self._outcomes)

    def refuse(self, error: str) -> None:
        """By the transport, in the place of settle(): no page was asked for, all are FAILED."""
        self._refused = True
        self.settle(0, [PageOutcome.FAILED] * len(self._outcomes), error)

    def settle(self, start: int, outcomes: Sequence[PageOutcome], error: str | None = None) -> bool:
        """By the transport, once for each page: pages from `start` on have ended so.

        True when that was the last of them, so that the read is done. O(pages settled).
        """
        with self._lock:
            assert len(outcomes) <= self._left, "a page is settled once"
            self._outcomes[start : start + len(outcomes)] = outcomes
            self._left -= len(outcomes)
            self._error = self._error or error
            if self._left or self._done:
                return False
            self._done = True
            if self._changed is not None:
                self._changed.notify_all()
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            _call(callback)
        return True


class Peer(Closing):
    """A node that was connected. All methods are thread-safe.

    Its identity does not change: when the peer restarts, everything fails until the caller
    connects again and thereby learns the new one.
    """

    address: str
    identity: PeerIdentity

    @property
    @abstractmethod
    def transport(self) -> str:
        """Name of the data path that the next read takes: "tcp", or that of a faster one."""

    @property
    @abstractmethod
    def declined(self) -> Mapping[str, str]:
        """Faster paths that are not taken, and why, one line each. Empty where there are none."""

    @abstractmethod
    def read(
        self,
        generation: int,
        ranges: Sequence[PageRange],
        into: Sequence[memoryview],
        timeout_s: float,
    ) -> PeerRead:
        """Copy ranges of the peer's memory into local memory, without asking its application.

        `generation`: of the memory that the offsets belong to, as the peer's register() gave it.
        `into`: one writable view a range, of its length; they may not overlap. They belong to the
        transport until the read is done. Never waits: a read above the limits in number is
        refused, all its pages FAILED. ValueError when generation, ranges, views or the timeout
        cannot be meant.
        """

    @abstractmethod
    def message(self, payload: bytes, timeout_s: float) -> bytes:
        """Hand `payload` to the peer's handler and return its answer. Waits.

        TierIOError when there is no answer in time or the handler refused; it may have run all
        the same. TierClosedError after close(). ValueError for a payload above the limit.
        """

    @abstractmethod
    def stats(self) -> PeerStats:
        """Counters, consistent with each other. O(1)."""

    @abstractmethod
    def check(self) -> None:
        """Assert the invariants. O(open reads)."""

    @abstractmethod
    def close(self) -> None:
        """End all reads (FAILED) and let the connections go. Idempotent."""


Handler = Callable[[PeerIdentity, bytes], bytes]
"""Answers a message. Called from several threads; what it raises is the sender's failure."""


class Transport(Closing):
    """One node's end. All methods are thread-safe."""

    name: str
    boot_token: bytes

    @abstractmethod
    def register(self, memory: memoryview) -> int:
        """Let peers read `memory` too; returns its generation, from 1, never the same twice.

        `memory` is read in place until it is unregistered or close(). ConfigError when it is
        empty or not contiguous, or when `memories` are registered already.
        """

    @abstractmethod
    def unregister(self, generation: int) -> None:
        """Let peers read that memory no more. When it returns, no byte of it is read any more.

        Reads of it under way fail, later ones are GONE; other memories stay. TierIOError when a
        copy does not end in io_s. Idempotent.
        """

    @abstractmethod
    def listen(self, host: str, port: int, handler: Handler) -> tuple[str, int]:
        """Serve peers at this address; returns it with the port that was taken (port 0: any).

        ConfigError when the address cannot be used, or is all interfaces and that was not asked
        for; the message says which. Once a transport.
        """

    @abstractmethod
    def connect(self, host: str, port: int, timeout_s: float) -> Peer:
        """Connect and prove to each other who is there.

        TierIOError, one line, when nobody answers in time, the peer has another version or key.
        """

    @abstractmethod
    def stats(self) -> TransportStats:
        """Counters, consistent with each other. O(1)."""

    @abstractmethod
    def check(self) -> None:
        """Assert the invariants. O(connections)."""

    @abstractmethod
    def close(self) -> None:
        """Stop serving, close the peers, read nothing more. Idempotent."""


def new_boot_token() -> bytes:
    """A token that no other process has."""
    return secrets.token_bytes(BOOT_TOKEN_BYTES)


def check_read(
    generation: int,
    ranges: Sequence[PageRange],
    into: Sequence[memoryview],
    timeout_s: float,
    limits: TransportLimits,
) -> None:
    """ValueError unless these can be the arguments of Peer.read(). O(pages)."""
    if not 1 <= generation <= GENERATION_MAX:
        raise ValueError(f"read from peer: expected a generation from 1, got {generation}")
    if not 1 <= len(ranges) <= limits.read_pages or len(into) != len(ranges):
        raise ValueError(
            f"read from peer: expected 1 to {limits.read_pages} ranges with a view each, "
            f"got {len(ranges)} and {len(into)}"
        )
    if not 0 < timeout_s <= limits.wait_s:
        raise ValueError(
            f"read from peer: expected a timeout up to {limits.wait_s:g} s, got {timeout_s}"
        )
    for (offset, length), view in zip(ranges, into, strict=True):
        if offset < 0 or not 1 <= length <= limits.page_bytes or offset + length >= 1 << 63:
            raise ValueError(
                f"read from peer: expected 1 to {limits.page_bytes} bytes at an offset, "
                f"got {length} at {offset}"
            )
        if view.readonly or not view.c_contiguous or view.nbytes != length:
            raise ValueError(
                f"read from peer: expected a writable view of {length} bytes, got {view.nbytes}"
            )


def _call(callback: Callable[[], None]) -> None:
    try:
        callback()
    except Exception:
        # A careless callback must not end the thread that happens to run it (lesson H2).
        log.exception("transport: a read's callback failed")
