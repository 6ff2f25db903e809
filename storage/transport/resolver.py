"""Addresses of host names, in a bounded time: the system's own resolver has no deadline.

Owns the threads that ask it. Knows no sockets. Invariants: numbers need no thread; a name that is
being looked up is not looked up once more, whoever asks next waits for the same answer; no more
than RESOLVING_MAX names are under way, however long the system hangs. Called by tcp.py.
"""

from __future__ import annotations

import socket
import threading

from tierkv.storage.errors import TierIOError

PORT_MAX = 65535
RESOLVING_MAX = 8
"""Names looked up at once. Each may hang for minutes, where a name server does not answer."""

Address = tuple[socket.AddressFamily, tuple[str, int]]


class _Lookup:
    """One name under way. `done` is set when the other two do not change any more."""

    __slots__ = ("done", "found", "problem")

    def __init__(self) -> None:
        self.done = threading.Event()
        self.found: list[Address] = []
        self.problem = ""

    def ask(self, host: str, flags: int = 0) -> None:
        """Ask the system. Takes as long as it takes."""
        try:
            rows = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=flags)
        except (OSError, UnicodeError) as error:
            self.problem = getattr(error, "strerror", None) or str(error)
            return
        self.found = [(row[0], row[4]) for row in rows]  # type: ignore[misc]


class Resolver:
    """Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._under_way: dict[str, _Lookup] = {}

    def resolve(self, host: str, port: int, timeout_s: float) -> list[Address]:
        """One address at least. TierIOError when there is none, or not in `timeout_s`."""
        if not host or not 0 <= port <= PORT_MAX:
            raise TierIOError(f"expected a host and a port up to {PORT_MAX}, got {host!r} {port}")
        lookup = _Lookup()
        lookup.ask(host, socket.AI_NUMERICHOST)
        if not lookup.found:
            lookup = self._join(host)
            if not lookup.done.wait(max(0.0, timeout_s)):
                raise TierIOError(f"the name {host!r} was not resolved in {timeout_s:.3g} s")
        if not lookup.found:
            raise TierIOError(f"the name {host!r} cannot be resolved: {lookup.problem}")
        return [(family, (at[0], port, *at[2:])) for family, at in lookup.found]

    def _join(self, host: str) -> _Lookup:
        """The look-up of `host` that is under way, or a new one."""
        with self._lock:
            lookup = self._under_way.get(host)
            if lookup is not None:
                return lookup
            if len(self._under_way) >= RESOLVING_MAX:
                raise TierIOError(
                    f"the name {host!r} was not looked up: {RESOLVING_MAX} names are being looked "
                    "up already; check the name server, or give addresses"
                )
            lookup = self._under_way[host] = _Lookup()
            thread = threading.Thread(
                target=self._look_up, args=(host, lookup), name="tierkv-resolve", daemon=True
            )
            try:
                thread.start()
            except RuntimeError as error:
                del self._under_way[host]
                raise TierIOError(f"no thread to look the name {host!r} up: {error}") from error
            return lookup

    def _look_up(self, host: str, lookup: _Lookup) -> None:
        """Life of one thread."""
        try:
            lookup.ask(host)
        finally:
            with self._lock:
                del self._under_way[host]
            lookup.done.set()
