"""The block-device seam: every page and slot file is read and written through it.

Owns open file descriptors and turns operating-system errors into TierKV's own. Knows nothing of
slots, keys or checksums. Invariants: a transfer moves every byte it was asked for or raises;
no method retries; methods may be called from several threads at once. Called by the tiers; tests
put tests/support/fault_device.py in its place.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import mmap
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from tierkv.storage.errors import TierError, TierFullError, TierIOError
from tierkv.storage.types import Buffer

BLOCK_BYTES = 4096
"""Unit of alignment: O_DIRECT on every common disk accepts it for addresses and lengths."""

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})

log = logging.getLogger(__name__)


class BlockFile(Protocol):
    """One open file of fixed-position data. Thread-safe; offsets and sizes in bytes."""

    @property
    def direct(self) -> bool:
        """True when transfers bypass the page cache: buffers, lengths and offsets must then be
        multiples of BLOCK_BYTES."""
        ...

    def preadv(self, buffers: Sequence[Buffer], offset: int) -> None:
        """Fill all buffers from `offset` on. TierIOError on an error or a short read."""
        ...

    def pwritev(self, buffers: Sequence[Buffer], offset: int) -> None:
        """Write all buffers from `offset` on. TierFullError, or TierIOError if short or failed."""
        ...

    def fdatasync(self) -> None:
        """Make earlier writes durable. After an error none of them may be trusted."""
        ...

    def allocate(self, nbytes: int) -> None:
        """Give the file room for `nbytes` from its start; existing bytes stay."""
        ...

    def truncate(self, nbytes: int) -> None:
        """Cut the file to `nbytes`, or stretch it with a hole that takes no space."""
        ...

    def size(self) -> int:
        """Length of the file in bytes."""
        ...

    def close(self) -> None:
        """Release the descriptor. Idempotent."""
        ...


class Device(Protocol):
    """Where files live. Thread-safe."""

    def open(self, path: Path, *, create: bool = False) -> BlockFile:
        """Open for reading and writing; with `create`, make it (mode 0600) when absent."""
        ...

    def free_bytes(self, path: Path) -> int:
        """Bytes an unprivileged user may still allocate on the file system of `path`."""
        ...

    def sync_directory(self, path: Path) -> None:
        """Make creations and renames in the folder `path` durable."""
        ...


class DirectFile:
    """BlockFile on a file descriptor, O_DIRECT where the file system allows it."""

    __slots__ = ("_fd", "_path", "direct")

    def __init__(self, fd: int, path: Path, direct: bool) -> None:
        self._fd = fd
        self._path = path
        self.direct = direct

    def preadv(self, buffers: Sequence[Buffer], offset: int) -> None:
        expected = _total(buffers)
        try:
            moved = os.preadv(self._open_fd(), buffers, offset)
        except OSError as error:
            raise device_error("read", self._path, error) from error
        if moved != expected:
            raise short_transfer("read", self._path, offset, expected, moved)

    def pwritev(self, buffers: Sequence[Buffer], offset: int) -> None:
        expected = _total(buffers)
        try:
            moved = os.pwritev(self._open_fd(), buffers, offset)
        except OSError as error:
            raise device_error("write", self._path, error) from error
        if moved != expected:
            raise short_transfer("write", self._path, offset, expected, moved)

    def fdatasync(self) -> None:
        try:
            os.fdatasync(self._open_fd())
        except OSError as error:
            raise device_error("fdatasync", self._path, error) from error

    def allocate(self, nbytes: int) -> None:
        try:
            os.posix_fallocate(self._open_fd(), 0, nbytes)
        except OSError as error:
            raise device_error("allocate", self._path, error) from error

    def truncate(self, nbytes: int) -> None:
        try:
            os.ftruncate(self._open_fd(), nbytes)
        except OSError as error:
            raise device_error("truncate", self._path, error) from error

    def size(self) -> int:
        try:
            return os.fstat(self._open_fd()).st_size
        except OSError as error:
            raise device_error("stat", self._path, error) from error

    def _open_fd(self) -> int:
        if self._fd < 0:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        return self._fd

    def close(self) -> None:
        # The descriptor number is forgotten first: a second close must not hit a reused number.
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


class DirectDevice:
    """The machine's file systems."""

    def open(self, path: Path, *, create: bool = False) -> BlockFile:
        flags = os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if create else 0)
        try:
            return DirectFile(os.open(path, flags | os.O_DIRECT, 0o600), path, direct=True)
        except OSError as error:
            # EINVAL is how a file system without O_DIRECT answers; anything else is a failure.
            if error.errno != errno.EINVAL:
                raise device_error("open", path, error) from error
        log.warning("o_direct=refused path=%s fallback=buffered", path)
        try:
            return DirectFile(os.open(path, flags, 0o600), path, direct=False)
        except OSError as error:
            raise device_error("open", path, error) from error

    def free_bytes(self, path: Path) -> int:
        try:
            found = os.statvfs(path)
        except OSError as error:
            raise device_error("statvfs", path, error) from error
        return found.f_bavail * found.f_frsize

    def sync_directory(self, path: Path) -> None:
        try:
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise device_error("open", path, error) from error
        try:
            os.fsync(fd)
        except OSError as error:
            raise device_error("fsync", path, error) from error
        finally:
            os.close(fd)


class ReadOnlyDevice(DirectDevice):
    """The machine's file systems, for looking only: every write raises TierIOError.

    A missing file reads as an empty one where it may be made, so that a check makes none.
    """

    def open(self, path: Path, *, create: bool = False) -> BlockFile:
        flags = os.O_RDONLY | os.O_CLOEXEC
        try:
            return DirectFile(os.open(path, flags | os.O_DIRECT), path, direct=True)
        except FileNotFoundError as error:
            if not create:
                raise device_error("open", path, error) from error
            return DirectFile(os.open(os.devnull, flags), path, direct=False)
        except OSError as error:
            # EINVAL is how a file system without O_DIRECT answers; anything else is a failure.
            if error.errno != errno.EINVAL:
                raise device_error("open", path, error) from error
        try:
            return DirectFile(os.open(path, flags), path, direct=False)
        except OSError as error:
            raise device_error("open", path, error) from error


def aligned_buffer(nbytes: int) -> memoryview:
    """Zeroed writable memory of exactly `nbytes`, starting on a page boundary.

    Its own mapping: the memory goes back to the system with the last view of it.
    """
    if nbytes <= 0:
        raise ValueError(f"aligned buffer: expected a positive size, got {nbytes}")
    return memoryview(mmap.mmap(-1, round_up(nbytes)))[:nbytes]


def address_of(view: memoryview) -> int:
    """Where the bytes of a contiguous view lie, writable or not. The caller keeps them alive."""
    address: int = np.frombuffer(view, np.uint8).__array_interface__["data"][0]
    return address


def round_up(nbytes: int) -> int:
    """The next multiple of BLOCK_BYTES."""
    return -(-nbytes // BLOCK_BYTES) * BLOCK_BYTES


def try_lock(fd: int) -> bool:
    """Take the exclusive flock of an open file; False when another process (or open) has it.

    Released when the descriptor closes, so also by kill -9. Raises OSError where the file system
    has no locks.
    """
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def unlock(fd: int) -> None:
    """Release the flock now, also where a mapping still refers to the open file."""
    fcntl.flock(fd, fcntl.LOCK_UN)


def device_error(operation: str, path: Path, error: OSError) -> TierError:
    """The TierError that an OSError means."""
    line = f"{operation} {path}: {error.strerror or error}"
    if error.errno in _FULL:
        return TierFullError(f"{line}; free space on this file system or lower the capacity")
    return TierIOError(f"{line}; check the device under this path")


def short_transfer(
    operation: str, path: Path, offset: int, expected: int, moved: int
) -> TierIOError:
    """The error for a transfer that moved too few bytes."""
    return TierIOError(
        f"{operation} {path} at {offset}: expected {expected} bytes, moved {moved}; "
        "the file may be truncated"
    )


def _total(buffers: Sequence[Buffer]) -> int:
    return sum(len(b) for b in buffers)
