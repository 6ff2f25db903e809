"""What all connections of a daemon share: its parts, its boot token and its counters.

Owns the table of connections' sessions and the counters of requests; the parts are the server's.
Called by the connections, the verbs, HTTP and the background work, on the loop's thread.
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tierkv.daemon.classes import PageClasses
from tierkv.daemon.namespaces import Namespace, NamespaceRegistry
from tierkv.daemon.page_class import PageClass
from tierkv.daemon.peers import Quarantine
from tierkv.daemon.session import HoldTimer, Session
from tierkv.daemon.settings import DaemonConfig
from tierkv.daemon.workers import Workers
from tierkv.protocol.messages import BOOT_TOKEN_BYTES

if TYPE_CHECKING:
    from tierkv.daemon.connection import Connection


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
        self.namespaces = namespaces
        self.workers = workers
        """For what reads or copies payloads: it ends soon."""
        self.waiters = waiters
        """For what waits for disks: flush, drop, opening."""
        self.timer = HoldTimer(loop)
        self.quarantine = Quarantine(loop)
        self.boot_token = os.urandom(BOOT_TOKEN_BYTES)
        self.counts = RequestCounts()
        self.sessions: dict[int, Session] = {}
        self.connections: set[Connection] = set()
        self.tasks: set[asyncio.Task[None]] = set()
        """Requests at work: the loop itself keeps only weak references."""
        self.connected = 0
        self.closing = False
        """Once true, requests that start something are answered with CLOSING."""

    def apply_quota(self, pages: PageClass, known: Namespace) -> None:
        """Give a namespace the bounds that the configuration has for it."""

    def background_fields(self) -> dict[str, Any]:
        """What the background work says of itself."""
        return {}

    def check(self) -> None:
        """Assert the invariants of every part. Expensive."""
        self.classes.check()
        self.namespaces.check()
        self.quarantine.check()
        for number, session in self.sessions.items():
            assert number == session.number
            session.check()
        assert len(self.sessions) <= self.connected, (len(self.sessions), self.connected)
