"""Keeps one connection to the daemon, and makes a new one when it is gone.

Owns the supervisor thread, the present link and the arena's mapping. Does not know what is asked
over the link. Called by client.client.

    state      link     leaves by
    AWAY       None     an attempt succeeds -> CONNECTED; attempts are backoff_first_s apart at
                        first, doubling up to backoff_max_s
    CONNECTED  a Link   the connection ends, or its silence is too long -> AWAY

Invariants: `link` is None from the moment the loss is known, so that nobody waits for a daemon
that is away; the supervisor survives every failed attempt; mistakes in the configuration raise at
the first attempt, in open(), and are logged afterwards.
"""

from __future__ import annotations

import logging
import threading

from tierkv.client.handshake import Greeting, greet
from tierkv.client.kick import Kick
from tierkv.client.link import Link
from tierkv.client.mapping import ArenaMapping
from tierkv.client.settings import ClientSettings
from tierkv.storage.clock import Clock
from tierkv.storage.errors import ConfigError

log = logging.getLogger(__name__)


class Keeper:
    """See the module. Thread-safe; open() once, then close()."""

    def __init__(self, greeting: Greeting, settings: ClientSettings, clock: Clock) -> None:
        self.link: Link | None = None
        self.connections = 0
        """Greetings that succeeded so far."""
        self.boot_token = b""
        self.why_away = "not connected yet"
        self._greeting = greeting
        self._settings = settings
        self._clock = clock
        self._mapping: ArenaMapping | None = None
        self._kick = Kick()
        self._closing = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="tierkv-client", daemon=True)

    def open(self) -> None:
        """Connect if the daemon is there, and keep trying if it is not. Raises ConfigError."""
        try:
            self._attempt()
        except OSError as error:
            self._away(error)
        self._thread.start()

    def wait_connected(self, timeout_s: float) -> bool:
        """Wait until there is a connection; False past the timeout."""
        with self._changed:
            return self._changed.wait_for(lambda: self.link is not None, timeout_s)

    def close(self) -> None:
        """End the connection and the thread, within a bound. Idempotent."""
        self._closing = True
        self._kick.kick()
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join(self._settings.close_s)
        link = self.link
        if link is not None:
            link.close(self._settings.close_s)

    def _run(self) -> None:
        wait_s = self._settings.backoff_first_s
        while not self._closing:
            link = self.link
            if link is not None:
                link.watch()
                if link.lost is not None:
                    link.close(self._settings.close_s)
                    wait_s = self._settings.backoff_first_s
                continue
            if self._kick.rest(wait_s):
                # Somebody wants attention: see whether it is close().
                continue
            wait_s = min(2 * wait_s, self._settings.backoff_max_s)
            try:
                self._attempt()
            except (ConfigError, OSError) as error:
                self._away(error)

    def _attempt(self) -> None:
        session = greet(
            self._greeting, self._clock, self._mapping, populate=self._settings.populate
        )
        self._mapping = session.mapping
        link = Link(
            session,
            self._clock,
            self._kick,
            self._lost,
            send_timeout_s=self._settings.call_s,
            silence_s=self._settings.silence_s,
        )
        with self._changed:
            restarted = self.boot_token not in (b"", session.boot_token)
            self.boot_token = session.boot_token
            self.connections += 1
            self.why_away = ""
            self.link = link
            self._changed.notify_all()
        log.info("connected path=%s restarted=%s", self._greeting.path, restarted)
        if link.lost is not None:
            # It was lost before it was the link: _lost() found another one.
            self._lost()

    def _lost(self) -> None:
        with self._changed:
            link = self.link
            if link is None or link.lost is None:
                return
            self.link = None
            self.why_away = link.lost
        if not self._closing:
            log.warning("daemon away path=%s reason=%s", self._greeting.path, self.why_away)

    def _away(self, error: Exception) -> None:
        reason = str(error) or type(error).__name__
        if reason != self.why_away:
            # Once a reason, not once an attempt.
            level = logging.ERROR if isinstance(error, ConfigError) else logging.WARNING
            log.log(level, "daemon away path=%s reason=%s", self._greeting.path, reason)
        self.why_away = reason
