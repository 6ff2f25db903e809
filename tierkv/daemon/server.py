"""The daemon put together: started, serving, stopped.

Owns the locks, the socket, the worker threads and every part's life. Called by
tierkv.daemon.run, and by tests that build a daemon with a device of their own.

Order of a start: locks, sweep, namespaces, remote tier, known page classes, HTTP, socket,
background work.
Order of a stop: no new connections, CLOSING to new requests, flush within the bound, connections,
socket, remote tier (ends what moves), stores, locks.
"""

from __future__ import annotations

import asyncio
import grp
import logging
import os
import socket
import stat
from functools import partial
from pathlib import Path

from tierkv.daemon.classes import PageClasses
from tierkv.daemon.connection import Connection
from tierkv.daemon.http import HttpServer
from tierkv.daemon.layout import InstanceLock, Layout, sweep
from tierkv.daemon.namespaces import NamespaceRegistry
from tierkv.daemon.page_class import StoreOpener
from tierkv.daemon.remote_tier import RemoteTier, SourceOpener
from tierkv.daemon.service import Service
from tierkv.daemon.settings import DaemonConfig
from tierkv.daemon.upkeep import Upkeep
from tierkv.daemon.verbs import flush_classes
from tierkv.daemon.workers import Workers
from tierkv.storage.errors import ConfigError, DirectoryInUseError, TierKVError
from tierkv.storage.store import TieredStore

BACKLOG = 256
CONNECT_S = 1.0
ASKERS = 4
"""Threads for look-ups that wait for a remote tier."""
CLOSE_MARGIN_S = 0.5
"""Beyond the time that the remote tier was given to close."""

log = logging.getLogger(__name__)


class Daemon:
    """See the module docstring. On one event loop."""

    def __init__(
        self,
        config: DaemonConfig,
        open_store: StoreOpener = TieredStore.open,
        open_remote: SourceOpener | None = None,
    ) -> None:
        """`open_store`, `open_remote`: the real ones, or a test's.

        Raises ConfigError and its kinds for what cannot work; nothing is opened yet."""
        config.validate()
        self.config = config
        self.layout = Layout.of(config)
        self._open_store = open_store
        self._open_remote = open_remote
        self._lock: InstanceLock | None = None
        self._server: asyncio.AbstractServer | None = None
        self._service: Service | None = None
        self._http: HttpServer | None = None

    @property
    def http_port(self) -> int:
        """The port HTTP listens on; 0 without HTTP."""
        return 0 if self._http is None else self._http.port

    @property
    def service(self) -> Service:
        """The parts; only between start() and stop()."""
        assert self._service is not None, "the daemon is not started"
        return self._service

    async def start(self) -> None:
        """Take the locks, open what is known and listen.

        Raises DirectoryInUseError when another daemon is there, ConfigError and its kinds for
        other things the user must change; then everything is undone.
        """
        loop = asyncio.get_running_loop()
        self._lock = InstanceLock(self.layout)
        try:
            sweep(self.layout)
            namespaces = NamespaceRegistry(self.layout.namespaces_path, self.config.namespaces_max)
            workers = Workers(self.config.workers, loop, "bytes")
            waiters = Workers(self.config.workers, loop, "waits")
            classes = PageClasses(self.config, self.layout, waiters, self._open_store)
            self._service = Service(self.config, loop, classes, namespaces, workers, waiters)
            await self._start_remote(self._service)
            await self._service.reopen(self._known_classes(namespaces))
            upkeep = Upkeep(self._service)
            self._service.upkeep = upkeep
            if self.config.http_host is not None:
                self._http = HttpServer(self._service, upkeep)
                await self._http.start()
            self._server = await self._listen(loop)
            upkeep.start()
        except BaseException:
            await self._close_parts(self.config.stop_s)
            raise
        log.info("listening socket=%s instance=%s", self.config.socket_path, self.layout.instance)

    async def stop(self) -> bool:
        """Stop within config.stop_s; whether everything was durable at the end."""
        service = self.service
        deadline = service.loop.time() + self.config.stop_s
        service.closing = True
        if self._server is not None:
            # Not wait_closed(): it waits for connections, which end below.
            self._server.close()
        durable = True
        if service.upkeep is not None:
            await service.upkeep.stop()
        try:
            # A quarter of the time is for closing.
            wait_s = self.config.stop_s * 0.75
            flushing = flush_classes(service, list(service.classes), wait_s)
            durable = await asyncio.wait_for(flushing, wait_s + 0.5)
        except (TierKVError, TimeoutError) as error:
            durable = False
            log.error("stop: flush failed: %s", str(error) or "timeout")
        for connection in list(service.connections):
            connection.close()
        await asyncio.sleep(0)
        for connection in list(service.connections):
            connection.abort()
        self._remove_socket()
        await self._close_parts(max(0.1, deadline - service.loop.time()))
        log.info("stopped durable=%s", durable)
        return durable

    def _known_classes(self, namespaces: NamespaceRegistry) -> list[int]:
        """Page sizes to reopen, the first ones greeted first: they had the budget."""
        there = self.layout.known_classes()
        greeted = dict.fromkeys(known.page_bytes for known in namespaces.all())
        return [*(size for size in greeted if size in there), *(set(there) - greeted.keys())]

    async def _start_remote(self, service: Service) -> None:
        """Before any store is opened: each gets its end of the remote tier."""
        remote = RemoteTier(
            self.config,
            self.layout.epoch_path,
            service.clock,
            service.open_for_member,
            self._open_remote,
        )
        service.remote = remote
        if self.config.mooncake is not None:
            service.askers = Workers(ASKERS, service.loop, "asks")
        await service.waiters.submit(remote.start)

    async def _listen(self, loop: asyncio.AbstractEventLoop) -> asyncio.AbstractServer:
        path = self.layout.socket_path
        _clear_socket_path(path)
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            # Nobody gets in between bind and chmod: without this, the mode would be the umask's.
            former = os.umask(0o777 & ~0o600)
            try:
                listening.bind(str(path))
            finally:
                os.umask(former)
            _give_access(path, self.config)
            service = self.service
            return await loop.create_unix_server(
                lambda: Connection(service), sock=listening, backlog=BACKLOG
            )
        except OSError as error:
            listening.close()
            raise ConfigError(
                f"listen on {path}: {error.strerror}; choose a path that can be written"
            ) from error
        except BaseException:
            listening.close()
            raise

    def _remove_socket(self) -> None:
        # The lock on the socket is ours, so the file is too.
        self.layout.socket_path.unlink(missing_ok=True)

    async def _close_parts(self, timeout_s: float) -> None:
        if self._http is not None:
            await self._http.stop()
            self._http = None
        if self._service is not None:
            service = self._service
            service.timer.close()
            service.quarantine.close()
            deadline = service.loop.time() + timeout_s
            await _close_remote(service, timeout_s / 2)
            await service.classes.close(max(0.1, deadline - service.loop.time()))
            for pool in {service.workers, service.waiters, service.askers}:
                pool.close(0.1)
            self._service = None
        if self._lock is not None:
            self._lock.release()
            self._lock = None


async def _close_remote(service: Service, timeout_s: float) -> None:
    """Leave the pool, so that nothing moves any more when the stores are closed."""
    if service.remote is None:
        return
    closing = service.waiters.submit(partial(service.remote.close, timeout_s))
    try:
        await asyncio.wait_for(closing, timeout_s + CLOSE_MARGIN_S)
    except (TierKVError, TimeoutError) as error:
        log.error("close remote tier: %s", str(error) or "stuck, left behind")


def _clear_socket_path(path: Path) -> None:
    """Remove the socket of a dead daemon; refuse one that answers, and any other file."""
    try:
        found = path.lstat()
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(found.st_mode):
        raise ConfigError(
            f"listen on {path}: it exists and is no socket; choose another path or remove it"
        )
    probe = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    probe.settimeout(CONNECT_S)
    try:
        probe.connect(str(path))
    except (ConnectionRefusedError, FileNotFoundError):
        path.unlink(missing_ok=True)
    except OSError as error:
        raise DirectoryInUseError(
            f"listen on {path}: somebody else's socket ({error.strerror or error}); stop its "
            "process or choose another path"
        ) from error
    else:
        raise DirectoryInUseError(
            f"listen on {path}: another process listens there; stop it or choose another path"
        )
    finally:
        probe.close()


def _give_access(path: Path, config: DaemonConfig) -> None:
    if config.socket_group is not None:
        try:
            group = grp.getgrnam(config.socket_group).gr_gid
        except KeyError as error:
            raise ConfigError(
                f"listen on {path}: group {config.socket_group!r} does not exist; create it or "
                "change socket_group"
            ) from error
        os.chown(path, -1, group)
    path.chmod(config.socket_mode)
