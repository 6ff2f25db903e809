"""What a client is opened with. Frozen values, checked when they are made."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from tierkv.storage.errors import ConfigError


class ChecksumPolicy(StrEnum):
    """Who computes the checksum of a page that is committed."""

    DAEMON = "daemon"
    CLIENT = "client"
    """In the thread that commits; the daemon compares as it is configured to."""


@dataclass(frozen=True, slots=True)
class ClientSettings:
    """How long a client waits, and what it checks. Times in seconds."""

    call_s: float = 1.0
    """Longest wait for lookup, reserve and touch; past it the answer is a miss."""
    commit_s: float = 10.0
    """Longest wait for a commit, in which the daemon may read every byte."""
    connect_s: float = 5.0
    hold_s: float = 120.0
    """How long leases and reservations are asked for; the daemon may allow less."""
    backoff_first_s: float = 0.05
    backoff_max_s: float = 2.0
    """Between attempts to reach a daemon that is away."""
    breaker_failures: int = 3
    """Late answers in a row after which the daemon is not asked for breaker_open_s."""
    breaker_open_s: float = 1.0
    silence_s: float = 15.0
    """A daemon that owes answers and says nothing for so long is given up, and met anew."""
    close_s: float = 2.0
    checksum_policy: ChecksumPolicy = ChecksumPolicy.DAEMON
    verify: bool = False
    """Whether take() compares every page with its checksum in this process too."""
    populate: bool = True
    """Fill the page tables of the arena when connecting: 0.1 s a GiB, once."""

    def __post_init__(self) -> None:
        for name in self.__slots__:
            value = getattr(self, name)
            if isinstance(value, int | float) and not isinstance(value, bool) and value <= 0:
                raise ConfigError(f"client: {name} is {value}, expected above 0; raise it")
