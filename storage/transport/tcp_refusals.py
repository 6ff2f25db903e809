"""Tells the log of refused connections, each address now and then and not at each try.

Owns a bounded table of addresses. A member with a wrong key tries every few seconds, for ever, from
another port each time. Knows no sockets. Invariants: an address is told of at its first refusal and
then at most once in REPEAT_S, with how many there were; so are, together, all addresses that the
table has no room for. Counters elsewhere go on counting. Called by tcp_server.py.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict

from tierkv.storage.clock import Clock

REPEAT_S = 600.0
ADDRESSES_MAX = 256
OTHERS = "others"

log = logging.getLogger(__name__)


class RefusalLog:
    """Thread-safe."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._told: OrderedDict[str, tuple[float, int]] = OrderedDict()
        """By host: when it was told of, and how many refusals there were since. Oldest first."""

    def note(self, peer: str, reason: object) -> None:
        """A connection from `peer`, host:port, was refused."""
        host = peer.rpartition(":")[0]
        now = self._clock.monotonic()
        with self._lock:
            if host not in self._told and not self._room(now):
                host = OTHERS
            told, more = self._told.get(host, (None, 0))
            if told is not None and now - told < REPEAT_S:
                self._told[host] = (told, more + 1)
                return
            self._told[host] = (now, 0)
            self._told.move_to_end(host)
        if told is None:
            log.warning("peer=%s refused=%s", peer, reason)
        else:
            log.warning("peer=%s refused=%s times=%d in_s=%.0f", peer, reason, more + 1, now - told)

    def _room(self, now: float) -> bool:
        """Whether one more address may be added, after the oldest has gone if it is due again."""
        if len(self._told) < ADDRESSES_MAX:
            return True
        host, (told, _) = next(iter(self._told.items()))
        if now - told < REPEAT_S:
            return False
        del self._told[host]
        return True

    def check(self) -> None:
        """Assert the bound. O(1)."""
        with self._lock:
            # OTHERS may be one more than the addresses.
            assert len(self._told) <= ADDRESSES_MAX + 1, len(self._told)
