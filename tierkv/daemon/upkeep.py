"""What the daemon does by itself: expire, scrub, preload, and tell the service manager it lives.

Owns one task a duty. Each is paced, waits for disks in worker threads, and survives any failure
of one round (lesson H2): counted, logged, tried again after a pause. Called by tierkv.daemon.server
at start and stop, and by the admin half of HTTP.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from functools import partial
from typing import Any

import sdnotify  # type: ignore[import-untyped]

from tierkv.daemon.page_class import PageClass
from tierkv.daemon.service import Service
from tierkv.storage.errors import OverloadedError, TierError
from tierkv.storage.preload import Preload

EXPIRE_S = 10.0
"""Pause between two looks for pages past their time to live."""
EXPIRE_ROUNDS = 64
"""Batches of one look: what is left waits for the next."""
SCRUB_STEP_BYTES = 32 << 20
"""Read at once by the scrubber; the pause after it makes the rate."""
FAILED_S = 30.0
"""Pause after a round that failed."""

log = logging.getLogger(__name__)


class Upkeep:
    """See the module docstring. On the loop's thread."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._tasks: list[asyncio.Task[None]] = []
        self._preloads: dict[int, Preload] = {}
        self._notifier = sdnotify.SystemdNotifier()
        self.failures = 0
        self.expired_pages = 0
        self.scrubbed_pages = 0
        self.scrub_corrupt = 0
        self.scrub_failed = 0
        self.scrub_positions: dict[int, float] = {}

    def start(self) -> None:
        """Begin all duties, and tell the service manager that the daemon is ready."""
        config = self._service.config
        if any(rule.ttl_s is not None for rule in config.quotas):
            self._begin("expire", self._expire)
        if config.scrub_bytes_per_s and config.cache_root is not None:
            self._begin("scrub", self._scrub_round)
        if config.preload_fraction and config.cache_root is not None:
            self._tasks.append(self._service.loop.create_task(self._preload_all()))
        self._notifier.notify("READY=1\nSTATUS=serving")
        watchdog_s = _watchdog_s()
        if watchdog_s is not None:
            self._begin("watchdog", partial(self._alive, watchdog_s / 2))

    async def stop(self) -> None:
        """End all duties; a step in a worker thread runs to its end there."""
        self._notifier.notify("STOPPING=1\nSTATUS=flushing")
        for preload in self._preloads.values():
            preload.cancel()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()

    def fields(self) -> dict[str, Any]:
        """For /status."""
        return {
            "failures": self.failures,
            "expired_pages": self.expired_pages,
            "scrub": {
                "bytes_per_s": self._service.config.scrub_bytes_per_s,
                "checked_pages": self.scrubbed_pages,
                "corrupt_pages": self.scrub_corrupt,
                "failed_pages": self.scrub_failed,
                "position": {str(size): at for size, at in self.scrub_positions.items()},
            },
            "preload": {
                str(size): asdict(preload.progress()) for size, preload in self._preloads.items()
            },
        }

    async def preload(self, pages: PageClass, budget_pages: int | None = None) -> int:
        """Start bringing the hottest nvme pages up; returns how many are planned."""
        started = await self._service.waiters.submit(partial(pages.store.preload, budget_pages))
        self._preloads[pages.page_bytes] = started
        return started.progress().total_pages

    async def scrub(self, pages: PageClass, max_pages: int) -> dict[str, Any]:
        """Reread up to `max_pages` pages now."""
        report = await self._service.waiters.submit(partial(pages.store.scrub_step, max_pages))
        self.scrubbed_pages += report.checked
        self.scrub_corrupt += report.corrupt
        self.scrub_failed += report.failed
        self.scrub_positions[pages.page_bytes] = report.position
        return asdict(report)

    async def _preload_all(self) -> None:
        for pages in self._service.classes:
            try:
                planned = await self.preload(pages)
                log.info("preload page_bytes=%d pages=%d", pages.page_bytes, planned)
            except (TierError, OSError, OverloadedError) as error:
                self.failures += 1
                log.warning("preload page_bytes=%d error=%s", pages.page_bytes, error)

    async def _expire(self) -> None:
        for pages in self._service.classes:
            for _ in range(EXPIRE_ROUNDS):
                gone = await self._service.waiters.submit(pages.store.expire)
                self.expired_pages += gone
                if not gone:
                    break
        await asyncio.sleep(EXPIRE_S)

    async def _scrub_round(self) -> None:
        rate = self._service.config.scrub_bytes_per_s
        for pages in self._service.classes:
            step = max(1, min(SCRUB_STEP_BYTES, rate) // pages.page_bytes)
            report = await self.scrub(pages, step)
            await asyncio.sleep(max(1, report["checked"]) * pages.page_bytes / rate)
        # With nothing to read, or pages that all were read lately, this is the pace.
        await asyncio.sleep(1.0)

    async def _alive(self, pause_s: float) -> None:
        self._notifier.notify("WATCHDOG=1")
        await asyncio.sleep(pause_s)

    def _begin(self, name: str, step: Callable[[], Awaitable[None]]) -> None:
        self._tasks.append(self._service.loop.create_task(self._forever(name, step)))

    async def _forever(self, name: str, step: Callable[[], Awaitable[None]]) -> None:
        while True:
            try:
                await step()
            except Exception as error:  # The supervisor of the duties: see the module docstring.
                self.failures += 1
                log.warning("upkeep=%s error=%s", name, error, exc_info=error)
                await asyncio.sleep(FAILED_S)


def _watchdog_s() -> float | None:
    """Within what time the service manager wants to hear of this process; None: it does not."""
    text, pid = os.environ.get("WATCHDOG_USEC", ""), os.environ.get("WATCHDOG_PID", "")
    if not text.isdigit() or (pid and pid != str(os.getpid())) or int(text) == 0:
        return None
    return int(text) / 1e6
