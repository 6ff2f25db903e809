"""What the machine has room for: the seam between a configuration and real file systems.

Owns the question, not the answer to a misfit: tierkv/config/fit.py asks and judges. Reads only, and
creates nothing. Tests hand in a machine of their own.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

FILES_MAX = 100_000
"""Files looked at below one folder when counting what is ours already."""


@dataclass(frozen=True, slots=True)
class Space:
    """One file system, seen from a folder on it. Bytes."""

    total_bytes: int
    available_bytes: int
    """Free for this user, plus what the folder's own files occupy already."""


class Machine(Protocol):
    """Where sizes are looked up."""

    def space(self, folder: Path) -> Space:
        """The file system that `folder` is on or would be created on. Raises OSError."""
        ...


class SystemMachine:
    """The machine this process runs on."""

    def space(self, folder: Path) -> Space:
        existing = folder
        while not existing.exists() and existing != existing.parent:
            existing = existing.parent
        if not existing.is_dir():
            raise NotADirectoryError(20, "not a folder", str(existing))
        found = os.statvfs(existing)
        own_bytes = _allocated(folder) if existing == folder else 0
        return Space(found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize + own_bytes)


def _allocated(folder: Path) -> int:
    """Bytes that files below `folder` occupy; at most FILES_MAX of them are asked."""
    total = 0
    seen = 0
    for place, _, names in os.walk(folder):
        for name in names:
            seen += 1
            if seen > FILES_MAX:
                return total
            try:
                total += Path(place, name).lstat().st_blocks * 512
            except FileNotFoundError:
                continue
    return total
