"""The daemon's arena in this process.

Owns one mapping. Does not know which slots hold what. Invariant: the memory stays mapped while a
view of it is alive anywhere - views keep it, nobody unmaps it by hand - so a thread that still
copies when the daemon has gone writes into memory that is there. Called by handshake and held.
"""

from __future__ import annotations

import mmap
import os

from tierkv.protocol.messages import Arena
from tierkv.storage.errors import ConfigError

POPULATE_CHUNK_BYTES = 64 << 20
"""Page tables are filled in pieces, because Python holds its lock during the call."""
_POPULATE_WRITE = 23
"""MADV_POPULATE_WRITE, which the mmap module does not name."""


class ArenaMapping:
    """One descriptor's arena, mapped for reading and writing."""

    def __init__(self, fd: int, arena: Arena) -> None:
        """Map it; `fd` stays the caller's. Raises ConfigError when the file is too short."""
        found = os.fstat(fd)
        if found.st_size < arena.total_bytes:
            raise ConfigError(
                f"map arena: the daemon says {arena.total_bytes} bytes, the file has "
                f"{found.st_size}; restart the daemon"
            )
        self.arena = arena
        self.file = (found.st_dev, found.st_ino)
        """Which file this is: the same one need not be mapped twice."""
        self._memory = _map(fd, arena.total_bytes)
        self._view = memoryview(self._memory)

    def populate(self) -> None:
        """Fill the page tables, so that the first copies do not pay for it. O(arena)."""
        for start in range(0, self.arena.total_bytes, POPULATE_CHUNK_BYTES):
            length = min(POPULATE_CHUNK_BYTES, self.arena.total_bytes - start)
            try:
                self._memory.madvise(_POPULATE_WRITE, start, length)
            except OSError:
                # An older kernel, or memory limits: pages are then mapped as they are touched.
                return

    def writable(self, slot: int) -> memoryview:
        """The payload of a slot, page_bytes long. IndexError for a slot that is not there."""
        arena = self.arena
        if not 0 <= slot < arena.slot_count:
            raise IndexError(f"slot {slot} of {arena.slot_count}")
        start = arena.first_slot + slot * arena.slot_bytes + arena.payload_offset
        return self._view[start : start + arena.page_bytes]

    def readable(self, slot: int) -> memoryview:
        """As writable(), but read-only."""
        return self.writable(slot).toreadonly()


def _map(fd: int, length: int) -> mmap.mmap:
    """Map `fd` without keeping its open file description alive, where that can be done.

    The daemon locks its arena, and a lock lives as long as any copy of the descriptor: the one
    that a mapping keeps would lock out the daemon's successor. Opened anew, it has no lock.
    """
    try:
        own = os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        # No /proc, or a file that only its descriptor opens to us.
        return mmap.mmap(fd, length, mmap.MAP_SHARED)
    try:
        return mmap.mmap(own, length, mmap.MAP_SHARED)
    finally:
        os.close(own)
