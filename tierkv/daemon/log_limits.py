"""Keeps what strangers can cause out of the log, but for once in a while.

Owns a filter of one logger: the line about a connection that was refused. A member with a wrong key
tries every two seconds, for ever, from another port each time; the log says so once, and again
after REPEAT_S. Counters in /status go on counting. Set up by tierkv.daemon.server.
"""

from __future__ import annotations

import logging
import re
import threading
from collections import OrderedDict

from tierkv.storage.clock import Clock

LOGGER = "tierkv.storage.transport.tcp_server"
REPEAT_S = 600.0
LINES_MAX = 256
"""Different lines remembered; the oldest go first."""

_PORT = re.compile(r":\d{1,5}\b")


class RepeatFilter(logging.Filter):
    """Lets a line of severity warning pass once in REPEAT_S; lines differ by more than a port.

    Thread-safe. Lines of another severity pass.
    """

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self._clock = clock
        self._lock = threading.Lock()
        self._seen: OrderedDict[str, float] = OrderedDict()

    def filter(self, record: logging.LogRecord) -> bool:
        """False for a line that was said lately."""
        if record.levelno != logging.WARNING:
            return True
        line = _PORT.sub("", record.getMessage())
        now = self._clock.monotonic()
        with self._lock:
            said = self._seen.get(line)
            if said is not None and now - said < REPEAT_S:
                return False
            self._seen[line] = now
            self._seen.move_to_end(line)
            while len(self._seen) > LINES_MAX:
                self._seen.popitem(last=False)
        return True


def limit_refusals(clock: Clock) -> RepeatFilter:
    """Filter the lines about refused connections in this process; undo with removeFilter()."""
    made = RepeatFilter(clock)
    logging.getLogger(LOGGER).addFilter(made)
    return made
