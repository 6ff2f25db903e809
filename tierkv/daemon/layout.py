"""Where a daemon keeps its files, and the locks that make it the only one there.

Owns the names of arenas, class folders and control files, the instance's identity, the locks and
the sweep of arenas whose cache is gone. Opens no store. Called by tierkv.daemon.server at start
and stop; tierkv.cli asks it where an instance's files are.

    <arena directory>/<instance>.<page_bytes>.arena     host pages of one page size
                     /<instance>.<page_bytes>.holders   who may be writing which slot
                     /<instance>.owner                  JSON: whose arenas these are
                     /<instance>.lock                   held while the daemon runs
    <cache root>/class-<page_bytes>/                    nvme root of one page size
                /namespaces.json, pool-epoch.json       (in the arena directory without nvme, as
                                                        <instance>.namespaces.json and so on)

Invariant: nothing of another instance is removed unless its lock is free and its cache is gone.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tierkv.daemon.settings import DaemonConfig
from tierkv.storage.device import try_lock
from tierkv.storage.errors import ConfigError, DirectoryInUseError
from tierkv.storage.tiers.nvme_layout import write_json

CLASS_PREFIX = "class-"
_OWNER_BYTES_MAX = 1 << 16

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Layout:
    """The paths of one instance."""

    arena_directory: Path
    cache_root: Path | None
    socket_path: Path
    instance: str
    """16 hex digits that follow from the cache root, or from the socket path without one."""

    @classmethod
    def of(cls, config: DaemonConfig) -> Layout:
        """The layout that `config` asks for. Touches no file."""
        cache_root = None if config.cache_root is None else _absolute(config.cache_root)
        socket_path = _absolute(config.socket_path)
        text = f"socket:{socket_path}" if cache_root is None else f"cache:{cache_root}"
        instance = hashlib.sha256(os.fsencode(text)).hexdigest()[:16]
        return cls(_absolute(config.arena_directory), cache_root, socket_path, instance)

    def arena_path(self, page_bytes: int) -> Path:
        """The arena file of one page size."""
        return self.arena_directory / f"{self.instance}.{page_bytes}.arena"

    def holders_path(self, page_bytes: int) -> Path:
        """Beside the arena: which process may be writing which slot."""
        return self.arena_directory / f"{self.instance}.{page_bytes}.holders"

    def nvme_root(self, page_bytes: int) -> Path | None:
        """The nvme tier's root for one page size; None without a cache root."""
        return None if self.cache_root is None else self.cache_root / f"{CLASS_PREFIX}{page_bytes}"

    @property
    def namespaces_path(self) -> Path:
        """The record of namespaces and their owner numbers."""
        return self._control_path("namespaces.json")

    @property
    def epoch_path(self) -> Path:
        """How often this node has joined its pool."""
        return self._control_path("pool-epoch.json")

    @property
    def owner_path(self) -> Path:
        """Says whose arenas these are."""
        return self.arena_directory / f"{self.instance}.owner"

    def _control_path(self, name: str) -> Path:
        if self.cache_root is not None:
            return self.cache_root / name
        return self.arena_directory / f"{self.instance}.{name}"

    def known_classes(self) -> list[int]:
        """Page sizes that have an arena or an nvme folder, ascending."""
        found = {
            int(path.name.split(".")[1])
            for path in self.arena_directory.glob(f"{self.instance}.*.arena")
            if path.name.split(".")[1].isdigit()
        }
        if self.cache_root is not None:
            found.update(nvme_classes(self.cache_root))
        return sorted(found)


def nvme_classes(cache_root: Path) -> dict[int, Path]:
    """The nvme roots under a daemon's cache root by page size, ascending."""
    found = {
        int(digits): path
        for path in cache_root.glob(f"{CLASS_PREFIX}*")
        if (digits := path.name.removeprefix(CLASS_PREFIX)).isdigit() and path.is_dir()
    }
    return dict(sorted(found.items()))


class InstanceLock:
    """Makes this process the only daemon on a cache root, an arena directory and a socket."""

    def __init__(self, layout: Layout) -> None:
        """Take the locks and create the folders.

        Raises DirectoryInUseError when another daemon has one of them, ConfigError when a folder
        cannot be used.
        """
        self._fds: list[int] = []
        self._layout = layout
        try:
            _private_folder(layout.arena_directory)
            if layout.cache_root is not None:
                _make_folder(layout.cache_root)
                self._take(layout.cache_root / "LOCK", f"cache directory {layout.cache_root}")
            self._take(
                layout.arena_directory / f"{layout.instance}.lock",
                f"arenas of {layout.cache_root or layout.socket_path}",
            )
            socket_lock = layout.socket_path.with_name(layout.socket_path.name + ".lock")
            self._take(socket_lock, f"socket {layout.socket_path}")
        except BaseException:
            self.release()
            raise
        write_json(
            layout.owner_path,
            {
                "cache_root": None if layout.cache_root is None else str(layout.cache_root),
                "socket": str(layout.socket_path),
            },
        )

    def release(self) -> None:
        """Let others in. Idempotent. Lock files stay: removing one could let two daemons in."""
        fds, self._fds = self._fds, []
        for fd in fds:
            os.close(fd)

    def _take(self, path: Path, subject: str) -> None:
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise ConfigError(
                f"start daemon: lock {path}: {error.strerror}; make its folder writable or choose "
                "another"
            ) from error
        self._fds.append(fd)
        try:
            if not try_lock(fd):
                owner = os.pread(fd, 32, 0).decode("ascii", "replace").strip() or "unknown"
                raise DirectoryInUseError(
                    f"start daemon: {subject}: in use by process {owner}; stop it or choose another"
                )
            os.ftruncate(fd, 0)
            os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
        except OSError as error:
            raise ConfigError(
                f"start daemon: lock {path}: {error.strerror}; use a file system with locks"
            ) from error


def sweep(layout: Layout) -> int:
    """Remove arenas of instances that are not running and whose cache is gone; count the files.

    Called with this instance's lock held.
    """
    removed = 0
    for owner_path in sorted(layout.arena_directory.glob("*.owner")):
        instance = owner_path.name.removesuffix(".owner")
        if instance != layout.instance and not _may_return(owner_path):
            removed += _sweep_instance(layout.arena_directory, instance, owner_path)
    return removed


def _sweep_instance(folder: Path, instance: str, owner_path: Path) -> int:
    lock_path = folder / f"{instance}.lock"
    try:
        lock = os.open(lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        log.warning("sweep instance=%s skipped=yes error=%s", instance, error)
        return 0
    try:
        if not try_lock(lock):
            return 0
        removed = 0
        for path in _files_of(folder, instance):
            if path != lock_path and path != owner_path and _remove_unused(path):
                removed += 1
        if not any(path.suffix == ".arena" for path in _files_of(folder, instance)):
            owner_path.unlink(missing_ok=True)
            lock_path.unlink(missing_ok=True)
        log.info("sweep instance=%s removed_files=%d", instance, removed)
        return removed
    except OSError as error:
        log.warning("sweep instance=%s error=%s", instance, error)
        return 0
    finally:
        os.close(lock)


def _files_of(folder: Path, instance: str) -> Iterator[Path]:
    return folder.glob(f"{instance}.*")


def _remove_unused(path: Path) -> bool:
    """Remove one file unless a process holds its lock."""
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        if not try_lock(fd):
            log.warning("sweep file=%s kept=yes reason=in_use", path)
            return False
        path.unlink()
        return True
    finally:
        os.close(fd)


def _may_return(owner_path: Path) -> bool:
    """Whether the instance's daemon could be started again and would want its arenas."""
    try:
        with owner_path.open("rb") as file:
            found = json.loads(file.read(_OWNER_BYTES_MAX))
        root, socket_path = found["cache_root"], found["socket"]
        wanted = Path(socket_path).parent if root is None else Path(root)
    except (OSError, ValueError, TypeError, KeyError) as error:
        # Unreadable is not "gone": leave it for a person to look at.
        log.warning("sweep owner=%s kept=yes error=%s", owner_path, error)
        return True
    return wanted.exists()


def _private_folder(path: Path) -> None:
    """Make the arena folder; refuse one that others could have prepared or can look into."""
    _make_folder(path)
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise ConfigError(
            f"start daemon: arena directory {path} must be a folder of uid {os.geteuid()} that "
            f"nobody else can enter, found uid {found.st_uid} mode {found.st_mode & 0o777:o}; "
            "choose another or run chmod 700"
        )


def _make_folder(path: Path) -> None:
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"start daemon: make folder {path}: {error.strerror}; choose another"
        ) from error


def _absolute(path: Path) -> Path:
    return Path(os.path.realpath(path))
