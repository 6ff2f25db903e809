"""The connections of this node to one peer: opened when needed, never to another process.

Owns every connection that is open, idle or in use, and the reason why there can be no more. Does
not know what they are used for: tcp_reads.py and tcp_peer.py do, and each keeps its idle ones.
Invariants: all connections are to the process that was met first; after close() each open one was
interrupted, and no new one is handed out. Called by tcp_peer.py and tcp_reads.py.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from tierkv.storage.errors import TierIOError
from tierkv.storage.transport.base import PeerIdentity
from tierkv.storage.transport.stream import Stream

Opener = Callable[[float], tuple[Stream, PeerIdentity]]
"""Connects and greets the peer, by a deadline. TierIOError."""


class Connections:
    """Thread-safe. A stream is used, and discarded, by one thread at a time."""

    def __init__(self, identity: PeerIdentity, first: Stream, opener: Opener) -> None:
        """Takes over `first`, which was greeted already."""
        self._identity = identity
        self._opener = opener
        self._lock = threading.Lock()
        self._open = {first}
        self._refusal: str | None = None

    @property
    def refusal(self) -> str | None:
        """Why nothing can be asked of this peer any more; None while it can."""
        return self._refusal

    @property
    def count(self) -> int:
        """Those that are open."""
        return len(self._open)

    def usable(self, stream: Stream | None, deadline: float) -> Stream:
        """`stream`, or a new one when there is none or the peer has closed it meanwhile."""
        if stream is not None:
            if not stream.wait_readable(0.0):
                return stream
            self.discard(stream)
        refusal = self.refusal
        if refusal is not None:
            raise TierIOError(refusal)
        fresh, identity = self._opener(deadline)
        with self._lock:
            if self._refusal is None and identity.boot_token != self._identity.boot_token:
                self._refusal = "it was restarted since it was connected; connect again"
            refusal = self._refusal
            if refusal is None:
                self._open.add(fresh)
                return fresh
        fresh.close()
        raise TierIOError(refusal)

    def discard(self, stream: Stream | None) -> None:
        """Close a connection. By the thread that uses it. Idempotent."""
        if stream is None:
            return
        with self._lock:
            self._open.discard(stream)
        stream.close()

    def has(self, streams: list[Stream]) -> bool:
        """Whether all of these are open. For check()."""
        with self._lock:
            return self._open.issuperset(streams)

    def close(self) -> None:
        """Hand out no more, interrupt those in use. Who uses one discards it. Idempotent."""
        with self._lock:
            self._refusal = "it was closed"
            for stream in self._open:
                stream.interrupt()
