"""Which life of each member is the present one, and which process speaks for it.

Owns the latest epoch seen under each name and the boot tokens that greeted. Knows neither links
nor leases: whoever adds a new life is told that it is one, and forgets what belonged to the old.
Used by pool.py, for members that greet this node and for those that it greets.

    a greeting (name, epoch, token)         becomes
    own name                                refused: two nodes of one name
    unknown name, or a later epoch          the present life; a new one if the name was known
    present epoch, present token            as before
    an earlier epoch, or the present one    fenced: it is told the present epoch and takes one
    from another process                    above it

Invariants: the epoch of a name never falls; a boot token speaks for one name at most; one token a
name. Bounded: past the limit whoever was not heard for FORGET_S makes way; where nobody was
silent for so long the newcomer is refused. Thread-safe.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from enum import Enum

from tierkv.storage.clock import Clock, SystemClock

NAMES_MAX = 1024
FORGET_S = 3600.0
"""A name silent for so long may be forgotten, and its epoch with it, when there are too many."""


class Standing(Enum):
    """What a greeting is worth. See the table at the top."""

    KNOWN = "known"
    NEW_LIFE = "new life"
    """A life that was not known; what belonged to an older one of this name is void."""
    FENCED = "fenced"
    OWN_NAME = "own name"
    TOO_MANY = "too many members"


@dataclass(slots=True)
class _Life:
    epoch: int
    boot_token: bytes
    heard: float


class Roster:
    """See the module docstring."""

    def __init__(self, own_name: str, clock: Clock | None = None) -> None:
        self._own_name = own_name
        self._clock = clock or SystemClock()
        self._lock = threading.Lock()
        self._lives: dict[str, _Life] = {}
        self._names: dict[bytes, str] = {}

    def greet(self, name: str, epoch: int, boot_token: bytes) -> Standing:
        """Judge a greeting and remember it when it is good."""
        if name == self._own_name:
            return Standing.OWN_NAME
        now = self._clock.monotonic()
        with self._lock:
            known = self._lives.get(name)
            if known is not None:
                same = known.boot_token == boot_token
                if epoch < known.epoch or (epoch == known.epoch and not same):
                    return Standing.FENCED
                known.heard = now
                if epoch == known.epoch:
                    # It may have called itself otherwise in between.
                    self._names[boot_token] = name
                    return Standing.KNOWN
                self._names.pop(known.boot_token, None)
            elif len(self._lives) >= NAMES_MAX and not self._make_way(now):
                return Standing.TOO_MANY
            # A process that calls itself otherwise now speaks for its former name no more.
            self._names.pop(boot_token, None)
            self._lives[name] = _Life(epoch, boot_token, now)
            self._names[boot_token] = name
            return Standing.NEW_LIFE

    def epoch_of(self, name: str) -> int:
        """The latest epoch seen under a name; 0 when there is none."""
        with self._lock:
            life = self._lives.get(name)
            return life.epoch if life is not None else 0

    def member_of(self, boot_token: bytes) -> tuple[str, int] | None:
        """Name and epoch of the member that this process is; None: it has not greeted."""
        with self._lock:
            name = self._names.get(boot_token)
            if name is None:
                return None
            life = self._lives[name]
            life.heard = self._clock.monotonic()
            return name, life.epoch

    def _make_way(self, now: float) -> bool:
        """Forget whoever was silent longest, if that is long enough. O(names), under the lock."""
        name = min(self._lives, key=lambda name: self._lives[name].heard)
        life = self._lives[name]
        if now - life.heard < FORGET_S:
            return False
        del self._lives[name]
        self._names.pop(life.boot_token, None)
        return True

    def check(self) -> None:
        """Assert the invariants. O(names)."""
        with self._lock:
            assert len(self._lives) <= NAMES_MAX, len(self._lives)
            assert self._own_name not in self._lives, "a peer with this node's name"
            for token, name in self._names.items():
                assert self._lives[name].boot_token == token, f"an old token speaks for {name}"
