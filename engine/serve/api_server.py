"""Runs one ApiServer as a process's main job: binds, announces, takes signals, drains.

Owns the socket and the signal handlers while it runs. The engine is started and closed by the
caller. Called by tierkv/cli/serve.py.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable
from dataclasses import dataclass

from aiohttp import web

from tierkv.engine.serve.api import ApiServer
from tierkv.storage.errors import ConfigError

CLEANUP_TIMEOUT_S = 5.0
"""For connections that are still open after every request was finished or aborted."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class BindOptions:
    """Where to listen and how long to wait at the end."""

    host: str = "127.0.0.1"
    port: int = 8000
    """0 lets the system choose; the announced address says which."""
    drain_s: float = 30.0
    """After SIGTERM, how long running requests may take to finish."""


async def serve(server: ApiServer, options: BindOptions, announce: Callable[[str], None]) -> int:
    """Serve until SIGTERM or SIGINT; return that signal's number.

    `announce` gets the base URL once the socket accepts connections. After the first signal no
    connection is accepted and running requests have `drain_s` to finish; then, or at a second
    signal, they are aborted. Raises ConfigError when the address cannot be bound.
    """
    loop = asyncio.get_running_loop()
    received: asyncio.Queue[int] = asyncio.Queue(maxsize=16)
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, _note_signal, received, number)
    runner = web.AppRunner(
        server.app(),
        # A handler whose client went away is cancelled, which aborts its request.
        handler_cancellation=True,
        shutdown_timeout=CLEANUP_TIMEOUT_S,
        access_log=None,
    )
    try:
        await runner.setup()
        site = await _bind(runner, options)
        announce(_url(options.host, runner))
        first = await received.get()
        _log.info("shutdown signal=%d in_flight=%d", first, server.in_flight)
        await site.stop()
        await _drain(server, options.drain_s, received)
        return first
    finally:
        await runner.cleanup()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)


def _note_signal(received: asyncio.Queue[int], number: int) -> None:
    if not received.full():
        received.put_nowait(number)


async def _bind(runner: web.AppRunner, options: BindOptions) -> web.TCPSite:
    site = web.TCPSite(runner, options.host, options.port)
    try:
        await site.start()
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"listen on {options.host}:{options.port}: {error}; choose another address or port"
        ) from error
    return site


def _url(host: str, runner: web.AppRunner) -> str:
    port = runner.addresses[0][1]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


async def _drain(server: ApiServer, drain_s: float, received: asyncio.Queue[int]) -> None:
    """Wait for running requests; a second signal ends the wait."""
    draining = asyncio.create_task(server.drain(drain_s))
    again = asyncio.create_task(received.get())
    await asyncio.wait({draining, again}, return_when=asyncio.FIRST_COMPLETED)
    if not draining.done():
        server.abort_all()
    await draining
    again.cancel()
