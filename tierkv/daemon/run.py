"""`tierkv serve`: one daemon in this process, from its start to a signal.

Owns the process's event loop, signals and limits. Called by the command line.
"""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import signal
import sys
from collections.abc import Callable
from typing import NoReturn

from tierkv.daemon.page_class import StoreOpener
from tierkv.daemon.server import Daemon
from tierkv.daemon.settings import DaemonConfig
from tierkv.storage.store import TieredStore

FILES_PER_CLIENT = 3
"""A socket, a process descriptor and a copy of the socket while it is greeted."""
FILES_BESIDES = 512

log = logging.getLogger(__name__)


def run_daemon(
    config: DaemonConfig,
    open_store: StoreOpener = TieredStore.open,
    on_ready: Callable[[Daemon], None] | None = None,
) -> int:
    """Serve until SIGTERM or SIGINT; returns 0 after a stop within its bound.

    `on_ready` is called with the daemon, on its loop, once it listens. Raises ConfigError and its
    kinds when it cannot start: the command line ends with 2 then.
    """
    logging.getLogger("tierkv").setLevel(config.log_level.upper())
    _raise_file_limit(config.clients_max)
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        code = runner.run(_serve(config, open_store, on_ready))
    if config.mooncake is not None:
        _end_at_once(code)
    return code


async def _serve(
    config: DaemonConfig, open_store: StoreOpener, on_ready: Callable[[Daemon], None] | None
) -> int:
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    daemon = Daemon(config, open_store)
    await daemon.start()
    if on_ready is not None:
        on_ready(daemon)
    await stopping.wait()
    await daemon.stop()
    return 0


def _end_at_once(code: int) -> NoReturn:
    """End the process without its libraries' own ends.

    A Mooncake library whose master is away has threads that wait for it still; when they are
    destroyed with the process it aborts, which looks like a crash though all is closed.
    """
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop's where it is installed: about twice the calls a second."""
    try:
        import uvloop
    except ModuleNotFoundError:
        log.info("loop=asyncio reason=uvloop_missing")
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory


def _raise_file_limit(clients_max: int) -> None:
    """Let the process open what its clients need, as far as the system allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = clients_max * FILES_PER_CLIENT + FILES_BESIDES
    unlimited = resource.RLIM_INFINITY
    allowed = needed if hard == unlimited else min(needed, hard)
    if soft != unlimited and soft < allowed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    if allowed < needed:
        log.warning("open files: %d allowed, %d clients need %d", allowed, clients_max, needed)
