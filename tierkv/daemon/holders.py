"""Who may be writing which slot, written down where it outlives the daemon.

Owns one small file beside an arena, mapped: 16 bytes a slot. A worker keeps its mapping when the
daemon is killed, so the next daemon must not hand out what that worker may still be writing
(lesson R3, design section 6 rule 5). Knows no sessions. Called by tierkv.daemon.page_class and
tierkv.daemon.session.

    per slot, little-endian: u32 process id (0: nobody), u32 zero, u64 start time of that process

Invariant: from before a client is told of a slot until it can no longer write it, its entry names
the client's process.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from tierkv.storage.errors import ConfigError

_ENTRY = np.dtype([("pid", "<u4"), ("zero", "<u4"), ("start", "<u8")])


class Holders:
    """See the module docstring. On the loop's thread, but for the opening."""

    def __init__(self, path: Path, slot_count: int) -> None:
        """Open or make the file; entries of another slot count are forgotten. O(slots)."""
        size = slot_count * _ENTRY.itemsize
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                if os.fstat(fd).st_size != size:
                    os.ftruncate(fd, 0)
                    os.posix_fallocate(fd, 0, size)
                self._map = mmap.mmap(fd, size)
            finally:
                os.close(fd)
        except OSError as error:
            raise ConfigError(
                f"open {path}: {error.strerror}; make its folder writable or choose another"
            ) from error
        self._entries = np.frombuffer(self._map, _ENTRY)

    def hold(self, slots: Sequence[int], pid: int, start: int) -> None:
        """Say that a process may write these slots."""
        rows = self._entries[list(slots)]
        rows["pid"], rows["start"] = pid, start
        self._entries[list(slots)] = rows

    def free(self, slots: Sequence[int]) -> None:
        """Say that nobody writes these slots any more."""
        self._entries["pid"][list(slots)] = 0

    def living(self) -> dict[int, tuple[int, int]]:
        """Slots whose process still runs, with its pid and start time. O(slots)."""
        found: dict[int, tuple[int, int]] = {}
        running: dict[tuple[int, int], bool] = {}
        for slot in np.flatnonzero(self._entries["pid"]).tolist():
            who = (int(self._entries["pid"][slot]), int(self._entries["start"][slot]))
            if who not in running:
                running[who] = process_start(who[0]) == who[1]
            if running[who]:
                found[slot] = who
        return found


def process_start(pid: int) -> int:
    """When a process started, in ticks since the machine did; 0 when it does not run."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        # The name before it may hold anything, parentheses too.
        return int(text.rpartition(")")[2].split()[19])
    except (OSError, IndexError, ValueError):
        return 0
