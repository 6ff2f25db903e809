"""Who is at the other end of a socket, and when that process is gone.

Owns one process descriptor a connection and the quarantine: reservations whose holder may still
write into its mapping of the arena. Knows nothing of verbs. Called by tierkv.daemon.connection
and tierkv.daemon.session, on the loop's thread.

Invariant: a quarantined reservation keeps its slots until the kernel says that its peer's process
has ended (lesson L2, design section 6 rule 5).
"""

from __future__ import annotations

import asyncio
import os
import select
import socket
import struct
from collections.abc import Callable

from tierkv.daemon.holders import process_start
from tierkv.storage.base import StoreReservation

_CREDENTIALS = struct.Struct("3i")
_NO_PROCESS = -1


class Peer:
    """The process that connected. Close it when nobody needs to know its end any more."""

    def __init__(self, pid: int, uid: int, process_fd: int) -> None:
        self.pid = pid
        self._start: int | None = None
        self.uid = uid
        self.process_fd = process_fd
        """A pidfd, or -1 when there is none: gone already, or of another pid namespace."""

    @classmethod
    def of(cls, connected: socket.socket) -> Peer:
        """The peer of a unix socket, by the kernel's word."""
        size = _CREDENTIALS.size
        found = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
        pid, uid, _ = _CREDENTIALS.unpack(found)
        try:
            process_fd = os.pidfd_open(pid) if pid > 0 else _NO_PROCESS
        except OSError:
            # It ended between its connect and now, or the kernel has no pidfd: hello refuses it
            # the arena, so nothing will ever wait for its end.
            process_fd = _NO_PROCESS
        return cls(pid, uid, process_fd)

    @classmethod
    def remembered(cls, pid: int, start: int) -> Peer:
        """A process that was noted down; it counts as gone unless it is the very same."""
        try:
            process_fd = os.pidfd_open(pid)
        except OSError:
            return cls(pid, -1, _NO_PROCESS)
        peer = cls(pid, -1, process_fd)
        if peer.start != start:
            # Another process has its number now.
            peer.close()
        return peer

    @property
    def start(self) -> int:
        """When the process started: with the pid, its name for ever on this boot."""
        if self._start is None:
            self._start = process_start(self.pid)
        return self._start

    @property
    def known(self) -> bool:
        """Whether its end can be seen."""
        return self.process_fd >= 0

    @property
    def gone(self) -> bool:
        """True once the process has ended, and its mappings with it."""
        if self.process_fd < 0:
            return True
        poll = select.poll()
        poll.register(self.process_fd, select.POLLIN)
        return bool(poll.poll(0))

    def close(self) -> None:
        """Give the descriptor back. Idempotent."""
        fd, self.process_fd = self.process_fd, _NO_PROCESS
        if fd >= 0:
            os.close(fd)


class Quarantine:
    """Reservations of peers that may still be writing. On the loop's thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._held: dict[Peer, list[tuple[StoreReservation, Callable[[], None]]]] = {}
        self._leaving: set[Peer] = set()
        self.pages = 0
        self.total_pages = 0
        """Pages that were ever put here."""

    def add(
        self, peer: Peer, reservation: StoreReservation, pages: int, freed: Callable[[], None]
    ) -> None:
        """Keep `reservation` until `peer` has ended, then release it and call `freed`.

        Releases it at once when the peer is gone already.
        """
        self.total_pages += pages
        if peer.gone:
            reservation.release()
            freed()
            return
        self.pages += pages

        def free() -> None:
            self.pages -= pages
            freed()

        waiting = self._held.get(peer)
        if waiting is None:
            self._held[peer] = waiting = []
            self._loop.add_reader(peer.process_fd, self._ended, peer)
        waiting.append((reservation, free))

    def leave(self, peer: Peer) -> None:
        """The peer's connection has ended: its descriptor is closed as soon as it may be."""
        if peer in self._held:
            self._leaving.add(peer)
        else:
            peer.close()

    def close(self) -> None:
        """Stop watching. What is held stays reserved: the arena's next opener must not trust it."""
        for peer in list(self._held):
            self._loop.remove_reader(peer.process_fd)
            peer.close()
        self._held.clear()
        self._leaving.clear()
        self.pages = 0

    def check(self) -> None:
        """Assert that what is held is held for a living watch."""
        assert self.pages >= 0, self.pages
        assert bool(self.pages) == bool(self._held), (self.pages, len(self._held))
        assert self._leaving <= self._held.keys(), "a peer waits for nothing"
        assert all(peer.known for peer in self._held), "a peer's end cannot be seen"

    def _ended(self, peer: Peer) -> None:
        self._loop.remove_reader(peer.process_fd)
        for reservation, free in self._held.pop(peer):
            reservation.release()
            free()
        if peer in self._leaving:
            self._leaving.discard(peer)
            peer.close()
