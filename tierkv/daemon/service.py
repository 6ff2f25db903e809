"""What all connections of a daemon share: its parts, its boot token and its counters.

Owns the table of connections' sessions and the counters of requests; the parts are the server's.
Called by the connections, the verbs, HTTP and the background work, on the loop's thread.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections import Counter, defaultdict
from concurrent.futures import CancelledError
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from tierkv.daemon.classes import PageClasses
from tierkv.daemon.namespaces import Namespace, NamespaceRegistry
from tierkv.daemon.page_class import PageClass
from tierkv.daemon.peers import Peer, Quarantine
from tierkv.daemon.quotas import apply_rules
from tierkv.daemon.session import HoldTimer, Session
from tierkv.daemon.settings import DaemonConfig
from tierkv.daemon.workers import Workers
from tierkv.protocol.messages import BOOT_TOKEN_BYTES
from tierkv.storage.clock import SystemClock
from tierkv.storage.errors import TierKVError
from tierkv.storage.identity import Fingerprint, namespace

if TYPE_CHECKING:
    from tierkv.daemon.connection import Connection
    from tierkv.daemon.remote_tier import RemoteTier
    from tierkv.daemon.upkeep import Upkeep

REFUSED_SIZES_MAX = 64
"""Page sizes of members whose refusal is logged: a member cannot fill the log."""

log = logging.getLogger(__name__)


@dataclass(slots=True)
class RequestCounts:
    """Of all connections since the start."""

    answered: Counter[tuple[str, str]] = field(default_factory=Counter)
    """By verb and code; "" is a request that went well."""
    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    """By verb, from the request's last byte to its answer's first."""
    connections: int = 0
    refused_connections: int = 0
    internal_errors: int = 0


class Service:
    """See the module docstring."""

    def __init__(
        self,
        config: DaemonConfig,
        loop: asyncio.AbstractEventLoop,
        classes: PageClasses,
        namespaces: NamespaceRegistry,
        workers: Workers,
        waiters: Workers,
    ) -> None:
        self.config = config
        self.loop = loop
        self.classes = classes
        classes.prepare = self._prepare
        self.namespaces = namespaces
        self.workers = workers
        """For what reads or copies payloads: it ends soon."""
        self.waiters = waiters
        """For what waits for disks: flush, drop, opening."""
        self.askers = waiters
        """For look-ups that ask a remote tier: a flush must not keep them waiting."""
        self.clock = SystemClock()
        self.timer = HoldTimer(loop)
        self.quarantine = Quarantine(loop)
        self.boot_token = os.urandom(BOOT_TOKEN_BYTES)
        self.counts = RequestCounts()
        self.sessions: dict[int, Session] = {}
        self.connections: set[Connection] = set()
        self.tasks: set[asyncio.Task[None]] = set()
        """Requests at work: the loop itself keeps only weak references."""
        self.connected = 0
        self.upkeep: Upkeep | None = None
        self.remote: RemoteTier | None = None
        self._refused_sizes: set[int] = set()
        self.closing = False
        """Once true, requests that start something are answered with CLOSING."""

    async def _prepare(self, pages: PageClass) -> None:
        """What a class needs before its first client; other clients of it wait meanwhile."""
        self.namespaces.skip_past(pages.store.owners())
        await self.apply_quotas(pages)
        held = await self.waiters.submit(pages.still_held)
        peers: dict[tuple[int, int], Peer] = {}
        for pid, start, reservation in held:
            peer = peers.setdefault((pid, start), Peer.remembered(pid, start))
            slots = list(reservation.slots)
            self.quarantine.add(peer, reservation, 1, partial(pages.holders.free, slots))
        for peer in peers.values():
            self.quarantine.leave(peer)
        if held:
            log.warning(
                "page_bytes=%d quarantined_pages=%d processes=%d reason=former_daemon",
                *(pages.page_bytes, len(held), len(peers)),
            )
        if self.remote is not None:
            await self.waiters.submit(partial(self.remote.attach, pages))

    def open_for_member(self, page_bytes: int, timeout_s: float) -> bool:
        """Serve a page size because a member of the pool has it, as a client's hello does.

        For the pool's threads: waits for the loop, at most `timeout_s`. False when the budgets
        have no room for it or the daemon stops; the first such refusal of a size is logged.
        """
        if self.closing or self.loop.is_closed():
            return False
        opening = asyncio.run_coroutine_threadsafe(self.classes.open(page_bytes), self.loop)
        try:
            opening.result(timeout_s)
        except (TierKVError, TimeoutError, CancelledError) as error:
            if len(self._refused_sizes) < REFUSED_SIZES_MAX and page_bytes not in (
                self._refused_sizes
            ):
                self._refused_sizes.add(page_bytes)
                log.warning(
                    "pool: a member has pages of %d bytes, not served here: %s",
                    *(page_bytes, str(error) or "not opened in time"),
                )
            return False
        return True

    async def reopen(self, page_sizes: list[int]) -> None:
        """Open what a former daemon left, so that the first hello finds it warm."""
        for page_bytes in page_sizes:
            try:
                await self.classes.open(page_bytes)
            except TierKVError as error:
                log.warning("reopen page_bytes=%d skipped=yes error=%s", page_bytes, error)

    async def register(self, pages: PageClass, fingerprint: Fingerprint, tenant: str) -> Namespace:
        """The namespace of a fingerprint; a new one is made durable and gets its quota."""
        known = self.namespaces.find(namespace(fingerprint))
        if known is not None and known.page_bytes == pages.page_bytes:
            return known
        known = await self.waiters.submit(
            partial(self.namespaces.register, fingerprint, tenant, pages.page_bytes)
        )
        await self.apply_quotas(pages)
        return known

    async def apply_quotas(self, pages: PageClass) -> None:
        """Bound the namespaces of a page class as configured."""
        if self.config.quotas:
            known = [each for each in self.namespaces.all() if each.page_bytes == pages.page_bytes]
            await self.waiters.submit(partial(apply_rules, self.config, pages, known))

    def background_fields(self) -> dict[str, Any]:
        """What the background work says of itself; nothing before it begins."""
        return {} if self.upkeep is None else self.upkeep.fields()

    def check(self) -> None:
        """Assert the invariants of every part. Expensive."""
        self.classes.check()
        self.namespaces.check()
        self.quarantine.check()
        if self.remote is not None:
            self.remote.check()
        for number, session in self.sessions.items():
            assert number == session.number
            session.check()
        assert len(self.sessions) <= self.connected, (len(self.sessions), self.connected)
