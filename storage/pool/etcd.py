"""Who belongs to the pool, as an etcd v3 says: one leased key a member under a prefix.

Owns the thread that talks to etcd, this node's key and lease, and the last known list. Knows no
peers: an address is only where to connect. The list is asked for once in `poll_s`; a watch would
say it sooner, but the client's waits for its next event without a deadline.

    key     PREFIX/NAME, bound to a lease of `lease_s` that is renewed at a third of it
    value   JSON: {"format": 1, "name", "address": "host:port", "epoch", "life": 32 hex digits}

Other entries under the prefix are ignored and counted. `life` is new in each process: it tells
this node's own key, also after an answer was lost, from one that another process wrote under the
same name. Such a key with a lower epoch is of a former life and is replaced; otherwise this node
is told to take a later epoch. Where the process that was replaced comes back it lives, so it is
another node: it was there first, and this one is not announced while it is.

Invariants: members() never holds this node and never waits; while etcd is away the last list
stays, and after it has come back a member that is missing stays for one lease, the time it has
for announcing itself again; the key is only replaced as it was seen; every wait has a deadline.
Lock order: none; callbacks are called with no lock held. Called by storage.pool.members.
"""

from __future__ import annotations

import json
import logging
import secrets
import threading
from collections.abc import Callable
from dataclasses import dataclass

from tierkv.storage.clock import Clock
from tierkv.storage.errors import ConfigError, TierClosedError, TierIOError
from tierkv.storage.pool.config import MEMBERS_MAX, Address, PoolConfig
from tierkv.storage.pool.epoch import EPOCH_MAX
from tierkv.storage.pool.etcd_keys import KEYS_MAX, EtcdKeys, Listed
from tierkv.storage.pool.members import Membership
from tierkv.storage.pool.notices import Notices, two_nodes

ETCD_PORT = 2379
LEASE_S = 10.0
POLL_S = 1.0
TIMEOUT_S = 2.0
BACKOFF_S = (0.1, 2.0)
"""First and longest pause after a request that failed; it doubles in between."""
STUCK = 10
"""So many times TIMEOUT_S is more than all requests of a turn may take."""
VALUE_BYTES_MAX = 4096
NAME_CHARS_MAX = 256
_FORMAT = 1

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Announcement:
    """What one member says of itself."""

    name: str
    address: Address
    epoch: int
    life: str

    def encode(self) -> str:
        """The value of its key."""
        return json.dumps(
            {
                "format": _FORMAT,
                "name": self.name,
                "address": str(self.address),
                "epoch": self.epoch,
                "life": self.life,
            }
        )

    @classmethod
    def decode(cls, name: str, value: bytes) -> Announcement:
        """Read the value found under `name`. ValueError saying what is wrong with it."""
        if len(value) > VALUE_BYTES_MAX or len(name) > NAME_CHARS_MAX:
            raise ValueError(f"value of {len(value)} bytes, name of {len(name)} characters")
        try:
            found = json.loads(value)
        except RecursionError as error:
            raise ValueError("brackets too deep") from error
        if not isinstance(found, dict) or found.get("format") != _FORMAT:
            raise ValueError(f"not an object of format {_FORMAT}")
        address, epoch, life = found.get("address"), found.get("epoch"), found.get("life")
        if found.get("name") != name or not (isinstance(address, str) and isinstance(life, str)):
            raise ValueError("name is not the key's, or address or life is no text")
        if type(epoch) is not int or not 1 <= epoch <= EPOCH_MAX:
            raise ValueError(f"epoch is not 1 to {EPOCH_MAX}")
        try:
            return cls(name, Address.parse(address), epoch, life)
        except ConfigError as error:
            raise ValueError(str(error)) from error


class EtcdMembership(Membership):
    """Thread-safe; see Membership. One thread from start() to close()."""

    name = "etcd"

    def __init__(
        self,
        config: PoolConfig,
        clock: Clock,
        *,
        lease_s: float = LEASE_S,
        poll_s: float = POLL_S,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        """Connects to nothing yet. ConfigError when the client is not installed."""
        assert config.etcd is not None, "the static list is another class"
        self._clock = clock
        self._lease_s, self._poll_s, self._timeout_s = lease_s, poll_s, timeout_s
        self._etcd = EtcdKeys(Address.parse(config.etcd, ETCD_PORT), config.etcd_prefix, timeout_s)
        self._own_addresses = {config.listen, config.own_address}
        self._own_name = config.own_name
        self._life = secrets.token_hex(16)
        self._notices = Notices(clock)
        self._changed = threading.Condition()
        # Guarded by _changed.
        self._wanted: Announcement | None = None
        self._leaving = self._woken = self._stop = False
        self._members: tuple[Address, ...] = ()
        self._problem: str | None = f"etcd {self._etcd.address}: has not answered yet"
        self._restarts = self._ignored = 0
        self._began: float | None = None
        """When the turn that is under way did."""
        # The thread's own.
        self._thread: threading.Thread | None = None
        self._on_change: Callable[[], None] = lambda: None
        self._on_later_epoch: Callable[[int], None] | None = None
        self._lease: int | None = None
        self._renewed = 0.0
        self._replaced = ""
        """Whose key this node's has taken the place of."""
        self._known: dict[str, Address] = {}
        self._grace_until: float | None = None
        self._away = True
        self._revision = 0
        self._warned: set[str] = set()
        self._told: tuple[Address, ...] = ()

    def start(
        self,
        on_change: Callable[[], None],
        on_later_epoch: Callable[[int], None] | None = None,
    ) -> None:
        assert self._thread is None, "started once"
        self._on_change, self._on_later_epoch = on_change, on_later_epoch
        thread = threading.Thread(target=self._run, name="tierkv-pool-etcd", daemon=True)
        thread.start()
        self._thread = thread

    def members(self) -> tuple[Address, ...]:
        with self._changed:
            return self._members

    def join(self, own: Address, name: str, epoch: int) -> None:
        assert 1 <= epoch <= EPOCH_MAX and name, (name, epoch)
        with self._changed:
            self._wanted = Announcement(name, own, epoch, self._life)
            self._own_name = name
            self._own_addresses.add(own)
            self._leaving = False
            self._woken = True
            self._changed.notify_all()

    def leave(self) -> None:
        with self._changed:
            self._wanted, self._leaving, self._woken = None, True, True
            self._changed.notify_all()
            thread = self._thread
            if thread is None or thread is threading.current_thread():
                return
            # One turn may be under way, and one request takes the announcement back.
            self._changed.wait_for(
                lambda: not self._leaving or not thread.is_alive(), 4 * self._timeout_s
            )

    def problem(self) -> str | None:
        with self._changed:
            began, problem = self._began, self._problem
        # The client's timeouts are from one byte to the next: an answer may take for ever.
        if began is not None and self._clock.monotonic() - began > STUCK * self._timeout_s:
            return f"etcd {self._etcd.address}: its answer has not come to its end; the list stays"
        return problem

    @property
    def ignored(self) -> int:
        """Entries under the prefix that could not be read, counted each time they are listed."""
        with self._changed:
            return self._ignored

    @property
    def restarts(self) -> int:
        """Turns of the thread that a bug or a callback ended."""
        with self._changed:
            return self._restarts

    def close(self) -> None:
        with self._changed:
            self._stop = True
            self._changed.notify_all()
        self._etcd.closed = True
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(3 * self._timeout_s)
            if self._thread.is_alive():
                log.warning("pool etcd=%s still waits for an answer", self._etcd.address)

    def _run(self) -> None:
        pause, failures = 0.0, 0
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._woken or self._stop, pause)
                self._woken = False
                if self._stop:
                    break
                self._began = self._clock.monotonic()
            failures = 0 if self._supervised_turn() else failures + 1
            with self._changed:
                self._began = None
            pause = min(BACKOFF_S[0] * 2 ** min(failures - 1, 10), BACKOFF_S[1])
            if not failures:
                pause = min(self._poll_s, self._lease_s / 3)
        self._etcd.close()

    def _supervised_turn(self) -> bool:
        """False when it failed: then the list stays as it is and problem() says why."""
        try:
            self._turn()
        except TierClosedError:
            return False
        except TierIOError as error:
            self._failed(str(error))
            return False
        except Exception as error:
            # Lesson H2: no single failure ends the thread for ever.
            log.exception("pool etcd=%s turn failed", self._etcd.address)
            with self._changed:
                self._restarts += 1
            self._failed(f"etcd {self._etcd.address}: {type(error).__name__} in this node")
            return False
        return True

    def _turn(self) -> None:
        with self._changed:
            leaving, wanted = self._leaving, self._wanted
        if leaving:
            self._take_back()
        listed, revision = self._etcd.list()
        problem = self._learn(listed, revision)
        if wanted is not None:
            mine = next((entry for entry in listed if entry.name == wanted.name), None)
            problem = self._announce(wanted, mine) or problem
        self._say(problem)

    def _learn(self, listed: list[Listed], revision: int) -> str | None:
        """Take over the list; tell when it changed. Returns what is wrong with it."""
        now = self._clock.monotonic()
        if (self._away or revision < self._revision) and self._known:
            # It was away, or is another one. Who is missing may not have heard that it is back.
            self._grace_until = now + self._lease_s
        self._away, self._revision = False, revision
        found = {entry.name: said.address for entry in listed if (said := self._read(entry))}
        if self._grace_until is not None and now < self._grace_until:
            found = {**self._known, **found}
        self._known = found
        with self._changed:
            others = {
                address
                for name, address in found.items()
                if name != self._own_name and address not in self._own_addresses
            }
            ordered = sorted(others, key=lambda address: (address.host, address.port))
            members = tuple(ordered[:MEMBERS_MAX])
            self._members = members
        if members != self._told:
            self._on_change()
            # Only now: a callback that failed is called again.
            self._told = members
            log.info("pool members=%d etcd=%s", len(members), self._etcd.address)
        if len(ordered) > MEMBERS_MAX:
            return (
                f"etcd {self._etcd.address}: {len(ordered)} members under {self._etcd.prefix}, "
                f"at most {MEMBERS_MAX} are used; make several pools"
            )
        return None

    def _announce(self, wanted: Announcement, mine: Listed | None) -> str | None:
        """Keep this node's key there and its lease alive. Returns what is in the way."""
        now = self._clock.monotonic()
        value = wanted.encode()
        if mine is not None and mine.value == value.encode() and mine.lease == self._lease:
            if now - self._renewed >= self._lease_s / 3:
                self._renew(now)
            return None
        said = self._read(mine) if mine is not None else None
        other = said is not None and said.life != self._life
        if said is not None and other and said.life == self._replaced:
            return self._told_of_two(wanted, said)
        if said is not None and other and said.epoch >= wanted.epoch:
            if self._on_later_epoch is not None:
                self._on_later_epoch(said.epoch)
            if said.address != wanted.address:
                return self._told_of_two(wanted, said)
            # Without the epochs: a text that is always new is told without end.
            return (
                f"etcd {self._etcd.address}: {wanted.name!r} at {said.address} is announced with a "
                "later epoch than this node has; it takes one above, nothing is to be done"
            )
        if self._lease is None:
            self._lease = self._etcd.grant(self._lease_s)
            self._renewed = now
        try:
            self._etcd.put(wanted.name, value, self._lease, mine.mod_revision if mine else 0)
        except TierIOError:
            # Perhaps etcd knows the lease no more; an unused one ends by itself.
            self._lease = None
            raise
        if said is not None and other:
            self._replaced = said.life
        log.info(
            "pool announced=%s epoch=%d etcd=%s", wanted.name, wanted.epoch, self._etcd.address
        )
        return None

    def _told_of_two(self, wanted: Announcement, said: Announcement) -> str:
        text = two_nodes(wanted.name, str(wanted.address), str(said.address))
        self._notices.tell(text)
        return text

    def _renew(self, now: float) -> None:
        assert self._lease is not None, "what is announced has a lease"
        if self._etcd.renew(self._lease):
            self._renewed = now
        else:
            log.warning("pool lease ended etcd=%s; announcing again", self._etcd.address)
            self._lease = None
            with self._changed:
                self._woken = True

    def _take_back(self) -> None:
        """One try: a lease that cannot be revoked ends by itself."""
        lease, self._lease = self._lease, None
        try:
            if lease is not None:
                self._etcd.revoke(lease)
        except TierIOError as error:
            log.warning("pool leave: %s; the announcement ends with its lease", error)
        finally:
            with self._changed:
                self._leaving = False
                self._changed.notify_all()

    def _read(self, entry: Listed) -> Announcement | None:
        try:
            return Announcement.decode(entry.name, entry.value)
        except ValueError as error:
            with self._changed:
                self._ignored += 1
            if entry.name not in self._warned and len(self._warned) < KEYS_MAX:
                self._warned.add(entry.name)
                name = entry.name[:NAME_CHARS_MAX]
                log.warning("pool etcd key=%s/%s ignored: %s", self._etcd.prefix, name, error)
            return None

    def _failed(self, problem: str) -> None:
        self._away = True
        with self._changed:
            count = len(self._members)
        self._say(f"{problem}; the last list of {count} members stays")

    def _say(self, problem: str | None) -> None:
        with self._changed:
            before, self._problem = self._problem, problem
        if problem == before or self._notices.told(problem or before or ""):
            # What comes and goes in the same words was logged when it came first.
            return
        if problem is not None:
            log.warning("pool %s", problem)
        else:
            log.info("pool etcd=%s answers, the list is up to date", self._etcd.address)
