"""Which life of each member is the present one, and which process speaks for it.

Owns the latest epoch seen under each name, the boot tokens that greeted, and which of them are
second nodes of one name. Knows neither links nor leases: whoever adds a new life is told that it is
one, and forgets what belonged to the old. Used by pool.py, for members that greet this node and for
those that it greets.

    a greeting (name, epoch, token)         becomes
    own name                                refused: two nodes of one name
    unknown name, or a later epoch          the present life; a new one if the name was known
    present epoch, present token            as before
    an earlier epoch, or the present one    fenced: it is told the present epoch and takes one
    from another process                    above it
    a process that had to give its name     it gets it back with a later epoch; whoever had taken
    away, greets again                      it is a twin from now on
    a twin                                  refused, while the other was heard lately

A process does not come back once it has ended, and a restarted one is another: so two that greet by
turns under one name are two living nodes. The one that was there first keeps it, else they would go
above each other for ever. Invariants: the epoch of a name never falls; a boot token speaks for one
name at most; one token a name. Bounded: past the limit whoever was not heard for FORGET_S makes
way; where nobody was silent for so long the newcomer is refused. Thread-safe.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from enum import Enum

from tierkv.storage.clock import Clock, SystemClock

NAMES_MAX = 1024
FORGET_S = 3600.0
"""A name silent for so long may be forgotten, and its epoch with it, when there are too many."""
TWIN_S = 30.0
"""Silent for so long, a node has no claim to its name against another one any more. A twin is told
of as long as it was heard in this time."""
TWINS_MAX = 8
"""Twins of one name that are known apart."""


class Standing(Enum):
    """What a greeting is worth. See the table at the top."""

    KNOWN = "known"
    NEW_LIFE = "new life"
    """A life that was not known; what belonged to an older one of this name is void."""
    FENCED = "fenced"
    OWN_NAME = "own name"
    TWIN = "twin"
    TOO_MANY = "too many members"


@dataclass(slots=True)
class _Life:
    epoch: int
    boot_token: bytes
    since: float
    heard: float
    address: str
    former: bytes = b""
    """The process that had the name before, if that was another one."""
    rival: tuple[str, float] | None = None
    """That process was heard after this life had begun: where it says it is, and when."""
    twins: dict[bytes, tuple[str, float]] = field(default_factory=dict)
    """Other nodes that use the name: where they say they are, and when they were last heard."""


class Roster:
    """See the module docstring."""

    def __init__(self, own_name: str, clock: Clock | None = None) -> None:
        self._own_name = own_name
        self._clock = clock or SystemClock()
        self._lock = threading.Lock()
        self._lives: dict[str, _Life] = {}
        self._names: dict[bytes, str] = {}

    def greet(self, name: str, epoch: int, boot_token: bytes, address: str = "") -> Standing:
        """Judge a greeting and remember it when it is good. `address`: where it says it is."""
        if name == self._own_name:
            return Standing.OWN_NAME
        now = self._clock.monotonic()
        with self._lock:
            known = self._lives.get(name)
            if known is None:
                if len(self._lives) >= NAMES_MAX and not self._make_way(now):
                    return Standing.TOO_MANY
                life = _Life(epoch, boot_token, now, now, address)
            else:
                standing = _against(known, epoch, boot_token, address, now)
                if standing is not Standing.NEW_LIFE:
                    if standing is Standing.KNOWN:
                        # It may have called itself otherwise in between.
                        self._names[boot_token] = name
                    return standing
                self._names.pop(known.boot_token, None)
                life = _next_life(known, epoch, boot_token, address, now)
            # A process that calls itself otherwise now speaks for its former name no more.
            self._names.pop(boot_token, None)
            self._lives[name] = life
            self._names[boot_token] = name
            return Standing.NEW_LIFE

    def epoch_of(self, name: str) -> int:
        """The latest epoch seen under a name; 0 when there is none."""
        with self._lock:
            life = self._lives.get(name)
            return life.epoch if life is not None else 0

    def address_of(self, name: str) -> str:
        """Where the present life of a name says it is; empty when that is not known."""
        with self._lock:
            life = self._lives.get(name)
            return life.address if life is not None else ""

    def twin_of(self, name: str) -> str | None:
        """Where another node of that name says it is; None when none was heard in TWIN_S."""
        now = self._clock.monotonic()
        with self._lock:
            life = self._lives.get(name)
            found = [] if life is None else [*life.twins.values()]
            if life is not None and life.rival is not None:
                found.append(life.rival)
        return next((address for address, heard in found if now - heard < TWIN_S), None)

    def greeted_s(self, name: str) -> float | None:
        """For how long the present life of a name has been known here; None when it said nothing in
        the last TWIN_S."""
        now = self._clock.monotonic()
        with self._lock:
            life = self._lives.get(name)
            return None if life is None or now - life.heard >= TWIN_S else now - life.since

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
            for name, life in self._lives.items():
                assert life.boot_token not in life.twins, f"{name} is its own twin"
                assert len(life.twins) <= TWINS_MAX, len(life.twins)


def _against(known: _Life, epoch: int, boot_token: bytes, address: str, now: float) -> Standing:
    """What a greeting under a known name is worth; notes who was heard."""
    same = known.boot_token == boot_token
    if boot_token in known.twins:
        known.twins[boot_token] = (address, now)
        if now - known.heard < TWIN_S:
            return Standing.TWIN
    elif boot_token == known.former:
        # It lives, and so did the one that took its name: two nodes. It may take it back.
        known.rival = (address, now)
    if epoch < known.epoch or (epoch == known.epoch and not same):
        return Standing.FENCED
    if epoch > known.epoch:
        return Standing.NEW_LIFE
    known.heard, known.address = now, address
    return Standing.KNOWN


def _next_life(known: _Life, epoch: int, boot_token: bytes, address: str, now: float) -> _Life:
    """The life that follows, of the same process or another; what is known of twins is kept."""
    life = _Life(epoch, boot_token, now, now, address, twins=dict(known.twins))
    if boot_token == known.boot_token:
        life.former, life.rival = known.former, known.rival
    elif boot_token == known.former:
        while len(life.twins) >= TWINS_MAX:
            del life.twins[min(life.twins, key=lambda token: life.twins[token][1])]
        life.twins[known.boot_token] = (known.address, known.heard)
    else:
        life.former = known.boot_token
        life.twins.pop(boot_token, None)
    return life
