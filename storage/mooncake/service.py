"""A node's connection to a Mooncake Store, shared by the stores of all its page sizes.

Owns the client, the gate and the list of remotes it gave out. Called by tierkv.daemon, and by
whoever attaches a store of its own. Invariant: the client is left only when no remote uses it.
"""

from __future__ import annotations

import logging
import threading
from typing import Any

from tierkv.storage.clock import Clock, SystemClock
from tierkv.storage.errors import TierClosedError
from tierkv.storage.mooncake.client import MooncakeClient, open_client
from tierkv.storage.mooncake.config import MooncakeConfig
from tierkv.storage.mooncake.gate import Gate
from tierkv.storage.mooncake.remote import MooncakeRemote

log = logging.getLogger(__name__)


class Mooncake:
    """See the module docstring. Thread-safe."""

    def __init__(self, config: MooncakeConfig, client: MooncakeClient, clock: Clock) -> None:
        self._config = config
        self._client = client
        self._clock = clock
        self._gate = Gate(config, clock)
        self._lock = threading.Lock()
        self._remotes: list[MooncakeRemote] = []
        self._closed = False

    def attach(self, page_bytes: int) -> MooncakeRemote:
        """The remote tier of a store of this page size, unbound. Raises TierClosedError after
        close().
        """
        with self._lock:
            if self._closed:
                raise TierClosedError(f"mooncake: attach pages of {page_bytes} bytes after close()")
            made = MooncakeRemote(
                self._config, self._clock, self._client, self._gate, page_bytes, self._forget
            )
            self._remotes.append(made)
            return made

    def status(self) -> dict[str, Any]:
        """For /status: plain values."""
        return {
            "kind": "mooncake",
            "master": self._config.master,
            "protocol": self._config.protocol,
            "degraded": self._gate.problem,
            "breaker_trips": self._gate.trips,
            "late_calls": self._gate.late,
        }

    def drain(self, timeout_s: float) -> bool:
        """Wait for the copies that were wanted so far; False when not all were made.

        The store's nodes hold the pages, so there is nothing to move before this node leaves.
        """
        deadline = self._clock.monotonic() + timeout_s
        done = True
        for remote in self._used():
            done &= remote.flush(deadline - self._clock.monotonic())
        return done

    def check(self) -> None:
        """Assert the invariants of every remote in use. O(queued)."""
        for remote in self._used():
            remote.check()
        self._gate.check()
        self._client.check()

    def close(self, timeout_s: float) -> bool:
        """End the remotes and leave the store; False while a call is stuck in the library: its
        memory and the connection stay. Idempotent: a later call waits again."""
        deadline = self._clock.monotonic() + timeout_s
        with self._lock:
            self._closed = True
            remotes = list(self._remotes)
        done = True
        for remote in remotes:
            done &= remote.close(deadline - self._clock.monotonic())
        done = done and self._client.close(deadline - self._clock.monotonic())
        if done:
            self._gate.close(max(0.0, deadline - self._clock.monotonic()))
        else:
            log.error("close mooncake: a call has not returned, the connection stays")
        return done

    def _used(self) -> list[MooncakeRemote]:
        with self._lock:
            return [remote for remote in self._remotes if remote.bound]

    def _forget(self, remote: MooncakeRemote) -> None:
        with self._lock:
            if remote in self._remotes:
                self._remotes.remove(remote)


def open_mooncake(config: MooncakeConfig, clock: Clock | None = None) -> Mooncake:
    """Connect to the store that `config` names; raises what client.open_client() raises."""
    return Mooncake(config, open_client(config), clock or SystemClock())
