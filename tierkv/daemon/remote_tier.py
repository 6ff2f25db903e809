"""The daemon's remote tier: a pool of nodes or a Mooncake Store, or why there is none.

Owns what serves every page size at once (storage.pool's Pool, or the Mooncake settings) and gives
each store its end of it. What the user set wrong about it costs the remote tier, never the local
ones: one line in the log, the same in /status, and the daemon serves on. Called by
tierkv.daemon.server, service and http; all but status() wait, so they run in worker threads.

Invariants: start() and attach() raise nothing for what a user or a peer did; a store has at most
one remote tier; close() comes before the stores are closed.
"""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from tierkv.daemon.page_class import PageClass
from tierkv.daemon.settings import DaemonConfig
from tierkv.storage.clock import Clock
from tierkv.storage.errors import ConfigError, TierKVError
from tierkv.storage.pool.config import KEY_BYTES_MIN, PoolConfig
from tierkv.storage.remote import Remote

KEY_FILE_BYTES_MAX = 4096
POOL = "pool"
MOONCAKE = "mooncake"
OFF = "off"
SERVING = "serving"

OpenClass = Callable[[int, float], bool]
"""(page size, seconds) -> whether this node serves that size now; waits, any thread but the
loop's."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Drained:
    """What a drain came to."""

    complete: bool
    """Nothing that is in host is held by this node alone."""
    moved_pages: int
    """Copies that others acknowledged meanwhile."""
    left_pages: int
    """Pages in host that are held nowhere else at the end."""


class Source(Protocol):
    """What gives each page size its remote tier."""

    def attach(self, page_bytes: int) -> Remote:
        """The remote tier of one page size, unbound."""
        ...

    def status(self) -> dict[str, Any]:
        """For /status: maps, lists, numbers and text."""
        ...

    def drain(self, timeout_s: float) -> bool:
        """Give what is hot and held nowhere else to others; False when not all was placed."""
        ...

    def check(self) -> None:
        """Assert the invariants."""
        ...

    def close(self, timeout_s: float) -> bool:
        """Leave; False when something may still move bytes. Idempotent."""
        ...


SourceOpener = Callable[[DaemonConfig, Path, Clock, OpenClass], Source]


class RemoteTier:
    """See the module docstring."""

    def __init__(
        self,
        config: DaemonConfig,
        epoch_path: Path,
        clock: Clock,
        open_class: OpenClass,
        opener: SourceOpener | None = None,
    ) -> None:
        """`opener`: open_source, or a test's."""
        self._config = config
        self._opener = opener or open_source
        self._epoch_path = epoch_path
        self._clock = clock
        self._open_class = open_class
        self._source: Source | None = None
        self._fault: str | None = None
        self._class_faults: dict[int, str] = {}
        self._attached: dict[int, tuple[PageClass, Remote]] = {}

    @property
    def kind(self) -> str | None:
        """ "pool" or "mooncake", as the user asked for; None for none."""
        if self._config.pool is not None:
            return POOL
        return None if self._config.mooncake is None else MOONCAKE

    @property
    def serving(self) -> bool:
        """Whether there is one."""
        return self._source is not None

    def start(self) -> None:
        """Open it as configured. What cannot work is logged, once, and told by status()."""
        if self.kind is None:
            return
        try:
            self._source = self._opener(
                self._config, self._epoch_path, self._clock, self._open_class
            )
        except TierKVError as error:
            self._fault = str(error)
            log.error("remote tier is off: %s", error)

    def attach(self, pages: PageClass) -> None:
        """Give a page class's store its remote tier, before its first client."""
        if self._source is None:
            return
        try:
            remote = self._source.attach(pages.page_bytes)
            pages.store.attach_remote(remote)
        except TierKVError as error:
            known = str(error) in self._class_faults.values()
            self._class_faults[pages.page_bytes] = str(error)
            if not known:
                log.error("page_bytes=%d remote tier is off: %s", pages.page_bytes, error)
        else:
            self._class_faults.pop(pages.page_bytes, None)
            self._attached[pages.page_bytes] = (pages, remote)

    def status(self) -> dict[str, Any] | None:
        """For /status; None when none is configured."""
        if self.kind is None:
            return None
        if self._source is None:
            return {"state": OFF, "why": self._fault or "not started yet"}
        faults = {str(size): text for size, text in self._class_faults.items()}
        return {"state": SERVING, "why": None, "page_faults": faults, **self._source.status()}

    def drain(self, timeout_s: float) -> Drained | None:
        """Have what is hot and held nowhere else copied to others; None without a remote tier.

        O(host pages).
        """
        if self._source is None:
            return None
        before = self._pushed()
        complete = self._source.drain(timeout_s)
        left = self._nowhere_else() if self.kind == POOL else 0
        drained = Drained(complete, self._pushed() - before, left)
        log.info("drain complete=%s moved=%d left=%d", complete, drained.moved_pages, left)
        return drained

    def check(self) -> None:
        """Assert the invariants. Expensive."""
        assert self._source is None or self.kind is not None, "a remote tier that nobody asked for"
        if self._source is not None:
            self._source.check()

    def close(self, timeout_s: float) -> bool:
        """Leave; the stores are still open. Idempotent."""
        source = self._source
        if source is None:
            return True
        done = source.close(timeout_s)
        if not done:
            log.error("close remote tier: something still moves after %.1f s", timeout_s)
        return done

    def _pushed(self) -> int:
        """Copies that others acknowledged so far."""
        return sum(remote.stats().pushed for _, remote in list(self._attached.values()))

    def _nowhere_else(self) -> int:
        """Pages in host that no other member is known to have."""
        left = 0
        for pages, remote in list(self._attached.values()):
            left += remote.holds(pages.store.host.keys_of()).count(False)
        return left


def open_source(
    config: DaemonConfig, epoch_path: Path, clock: Clock, open_class: OpenClass
) -> Source:
    """The remote tier that `config` asks for, serving. Raises ConfigError and its kinds.

    What is not installed is asked for here only: the daemon runs without it.
    """
    if config.mooncake is not None:
        from tierkv.storage.mooncake.service import open_mooncake

        return open_mooncake(config.mooncake, clock)

    assert config.pool is not None, "nothing to open"
    pool = pool_settings(config.pool, config.pool_key_file)

    from tierkv.storage.pool.pool import open_pool

    opened = open_pool(pool, epoch_path, clock, open_class)
    try:
        opened.start()
    except BaseException:
        opened.close(config.stop_s)
        raise
    return opened


def pool_settings(pool: PoolConfig, key_file: Path | None) -> PoolConfig:
    """`pool` with the key of its file. Raises ConfigError for what cannot work."""
    if key_file is not None:
        pool = replace(pool, key=read_key(key_file))
    pool.validate()
    for name in ("tls_certificate", "tls_key", "tls_authority"):
        if (path := getattr(pool, name)) is not None:
            _check_pem(name, path)
    return pool


def read_key(path: Path) -> bytes:
    """The shared secret in a file, without newlines at its end.

    Raises ConfigError, one line, when it cannot be read, is too short, or others than its owner
    may read it.
    """
    data = _read_secret(path)
    if len(data) > KEY_FILE_BYTES_MAX:
        raise ConfigError(
            f"pool: key_file {path} is longer than {KEY_FILE_BYTES_MAX} bytes; is it the secret?"
        )
    # However many an editor adds: two files that look equal are equal.
    key = data.rstrip(b"\r\n")
    if len(key) < KEY_BYTES_MIN or not key.strip():
        found = f"has {len(key)} bytes" if key.strip() else "is empty"
        raise ConfigError(
            f"pool: key_file {path} {found}, expected at least {KEY_BYTES_MIN} bytes; "
            "make one with openssl rand -hex 32, the same for every member"
        )
    return key


def _read_secret(path: Path) -> bytes:
    """Up to KEY_FILE_BYTES_MAX + 1 bytes of a file that is its owner's alone. ConfigError."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            found = os.fstat(fd)
            if not stat.S_ISREG(found.st_mode):
                raise ConfigError(f"pool: key_file {path} is no file; name one with the secret")
            if found.st_mode & 0o077:
                raise ConfigError(
                    f"pool: key_file {path} has mode {found.st_mode & 0o777:04o}: others may read "
                    "the secret; run chmod 600"
                )
            return os.read(fd, KEY_FILE_BYTES_MAX + 1)
        finally:
            os.close(fd)
    except OSError as error:
        raise ConfigError(
            f"pool: read key_file {path}: {error.strerror}; name a file with the shared secret"
        ) from error


def _check_pem(name: str, path: Path) -> None:
    """ConfigError when this file of the TLS settings cannot be read, or everybody can read the
    key. What is in it is found out when it is used."""
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
    except OSError as error:
        raise ConfigError(
            f"pool: read {name} {path}: {error.strerror}; name a PEM file, readable by the daemon"
        ) from error
    if name == "tls_key" and mode & 0o007:
        raise ConfigError(
            f"pool: tls_key {path} has mode {mode & 0o777:04o}: everybody may read it; "
            "run chmod 600"
        )
