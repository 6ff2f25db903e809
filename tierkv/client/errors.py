"""What a client raises to whoever asks for an answer that must be there.

    TierError
    ├── DaemonAwayError   no connection, or no answer in time; the client goes on trying
    └── RefusedError      the daemon answered with an error code

The verbs of PageStore raise neither: a store that cannot answer is a store with all misses.
"""

from __future__ import annotations

from tierkv.storage.errors import TierError


class DaemonAwayError(TierError):
    """The daemon is not there, or did not answer in time."""

    code = "daemon_away"


class RefusedError(TierError):
    """The daemon refused one request; `code` is the wire's."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
