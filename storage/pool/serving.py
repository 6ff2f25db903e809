"""Answers what members ask of this node: docs/formats/pool.md says in which bytes.

Owns the page sizes served and the leases that members hold here; leases.py, granting.py,
receiving.py and telling.py do the work. Does not know who is a member or where: the Directory,
pool.py, says. handle() is the transport's handler and runs in its threads, several at once.

    asked      needs                            does
    HELLO      the directory's consent          nothing here
    SYNC       a greeted member, both epochs    frees leases that are over
    SNAPSHOT   the same                         keeps the snapshot until it was read through
    LOOKUP     the same                         nothing at all (lesson L1)
    LEASE      the same                         pins pages, bounded in number and time
    RELEASE    the same                         frees them
    STORE      the same, and not leaving        reads pages from the member, commits them

Invariants: nothing is done for a message with a wrong digest, of another life of this node, or
from an earlier life of the member; handle() returns an answer whatever happens; no page of a store
is held here when remove() has returned True.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from tierkv.storage.base import PageLease
from tierkv.storage.clock import Clock
from tierkv.storage.errors import TierError
from tierkv.storage.pool.config import PoolConfig
from tierkv.storage.pool.granting import hold_each, places
from tierkv.storage.pool.holdings import Holdings
from tierkv.storage.pool.leases import LeaseCounts, LeaseTable
from tierkv.storage.pool.messages import (
    FINGERPRINTS_MAX,
    Answer,
    AnyRequest,
    Changes,
    Envelope,
    Hello,
    LeaseAsk,
    LeasedPage,
    LeaseGrant,
    Lookup,
    LookupAnswer,
    Refusal,
    ReleaseAsk,
    Released,
    SnapshotAsk,
    Status,
    StoreAnswer,
    StoreAsk,
    StoreOutcome,
    Sync,
    SyncAnswer,
    Verb,
    read_request,
    write_answer,
)
from tierkv.storage.pool.receiving import Receiver, arena_pages
from tierkv.storage.pool.telling import Teller, changes_since
from tierkv.storage.remote import LocalStore
from tierkv.storage.transport.base import Peer, PeerIdentity
from tierkv.storage.types import PageKey

MEMBER_PAGES_MAX = 4096
"""Pages one member may hold here, all page sizes together."""
WARN_S = 60.0
"""Between two lines about messages that cannot be read."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Served:
    """A page size that members are served: its store, and the memory that offsets are in."""

    page_bytes: int
    store: LocalStore
    generation: int
    holdings: Holdings


class Directory(Protocol):
    """Who is who; what serving asks of the pool. Thread-safe, and quick but for open_class()."""

    @property
    def own_epoch(self) -> int:
        """This node's epoch now."""
        ...

    @property
    def leaving(self) -> bool:
        """Whether this node takes nothing more in."""
        ...

    def page_sizes(self) -> Sequence[int]:
        """All page sizes of this node."""
        ...

    def greeted(self, identity: PeerIdentity, hello: Hello) -> Hello | Refusal:
        """A process says who it is: this node's own greeting, or why it is not dealt with."""
        ...

    def member_of(self, identity: PeerIdentity) -> tuple[str, int] | None:
        """The name that this process greeted with, and the latest epoch known of that name; None
        when it has not greeted."""
        ...

    def told(self, text: str) -> bool:
        """Whether the pool has logged this very text lately."""
        ...

    def reader(self, name: str) -> Peer | None:
        """This node's own connection to a member, to read from; None while there is none."""
        ...

    def unlisted(self, name: str) -> str | None:
        """One line, logged already, when a member that greeted is in no list of this node; None
        when it is listed or may be."""
        ...

    def open_class(self, page_bytes: int, timeout_s: float) -> Served | None:
        """Have a page size opened, and added here; None when it cannot be."""
        ...


@dataclass(frozen=True, slots=True)
class ServerStats:
    """What was asked of this node. Counters run from its start."""

    requests: dict[str, int]
    """By verb; UNREAD: what could not be read."""
    answers: dict[str, int]
    """By status."""
    stored: dict[str, int]
    """Pages of STORE, by outcome."""
    errors: int
    """Answers that a bug of ours made REFUSED: the log has it."""
    late_pages: int
    """Host slots that a late read from a member still holds."""
    leases: LeaseCounts


class _Class:
    """A page size served, and who is at work in it."""

    def __init__(self, served: Served, config: PoolConfig, clock: Clock) -> None:
        self.served = served
        self.receiver = Receiver(served.store, config, clock)
        self.leased_max = max(1, arena_pages(served.store) // 2)
        """Pages that members may hold of it: the rest stays for the node's own work."""
        self.users = 0
        self.closing = False


class PoolServer:
    """See the module docstring. Thread-safe."""

    def __init__(self, directory: Directory, config: PoolConfig, clock: Clock) -> None:
        self._directory = directory
        self._config = config
        self._clock = clock
        self._leases = LeaseTable(clock, config.transfer_s, MEMBER_PAGES_MAX)
        self._changed = threading.Condition()
        self._classes: dict[int, _Class] = {}
        self._teller = Teller(clock)
        self._requests: Counter[Verb] = Counter()
        self._answers: Counter[Status] = Counter()
        self._stored: Counter[str] = Counter()
        self._errors = 0
        self._warn_again = clock.monotonic()

    # --- the transport's handler --------------------------------------------------------------

    def handle(self, identity: PeerIdentity, payload: bytes) -> bytes:
        """The answer to a message. Raises nothing; a STORE and a LEASE wait as long as they say."""
        verb, own_epoch, asker = Verb.UNREAD, self._directory.own_epoch, 0
        answer: Answer | Refusal = Refusal(Status.DAMAGED)
        try:
            parts = read_request(payload)
            if parts is not None:
                envelope, request = parts
                verb, asker = envelope.verb, envelope.sender_epoch
                answer = self._answer(identity, envelope, request, own_epoch)
        except TierError as error:
            answer = Refusal(Status.REFUSED, text=str(error))
        except Exception:
            # A bug in answering one member must not end the thread that serves it (lesson H2).
            log.exception("answer a member: verb=%s failed", verb.name)
            answer = Refusal(Status.REFUSED, text="failed inside; the log of that node has it")
            with self._changed:
                self._errors += 1
        if isinstance(answer, Hello):
            own_epoch = answer.epoch
        self._count(verb, answer)
        return write_answer(verb, answer, own_epoch, asker)

    # --- page sizes -----------------------------------------------------------------------------

    def add(self, served: Served) -> None:
        """Serve a page size. Its memory is registered, as `generation`."""
        entry = _Class(served, self._config, self._clock)
        with self._changed:
            assert served.page_bytes not in self._classes, "a page size is served once"
            self._classes[served.page_bytes] = entry

    def remove(self, page_bytes: int, timeout_s: float) -> bool:
        """Serve a page size no more. True when no lease and no slot of its store is held here.

        The caller has unregistered its memory before: so no peer can read it, and all leases are
        freed at once, those in quarantine too. What this node is reading from others is waited
        for; False past the timeout: the store must stay. Idempotent: a later call waits again.
        """
        deadline = self._clock.monotonic() + timeout_s
        with self._changed:
            entry = self._classes.get(page_bytes)
            if entry is None:
                return True
            entry.closing = True
            if not self._changed.wait_for(lambda: not entry.users, max(0.0, timeout_s)):
                return False
        if not entry.receiver.wait_quiet(deadline - self._clock.monotonic()):
            return False
        self._leases.drop_class(page_bytes)
        self._teller.forget_class(page_bytes)
        with self._changed:
            self._classes.pop(page_bytes, None)
        return True

    # --- upkeep -------------------------------------------------------------------------------

    def drop_member(self, name: str) -> None:
        """A member is gone or is another process now: what it held here ends. O(leases)."""
        self._leases.drop_member(name)
        self._teller.forget_member(name)

    def expire(self) -> int:
        """Free leases that are over, and snapshots that nobody reads on; returns how many pages
        were freed. For a timer. O(snapshots)."""
        self._teller.expire()
        return self._leases.expire()

    def stats(self) -> ServerStats:
        """Counters. O(leases)."""
        leases = self._leases.counts()
        with self._changed:
            return ServerStats(
                {verb.name: count for verb, count in self._requests.items()},
                {status.name: count for status, count in self._answers.items()},
                dict(self._stored),
                self._errors,
                sum(entry.receiver.late_pages for entry in self._classes.values()),
                leases,
            )

    def check(self) -> None:
        """Assert the invariants. O(leases + journals)."""
        self._leases.check()
        with self._changed:
            entries = list(self._classes.values())
            assert self._requests.total() == self._answers.total(), "a message without an answer"
        for entry in entries:
            assert entry.users >= 0, entry.users
            entry.receiver.check()
            entry.served.holdings.check()

    def close(self, timeout_s: float) -> bool:
        """remove() every page size; False when something is still held. Idempotent."""
        deadline = self._clock.monotonic() + timeout_s
        ended = True
        for page_bytes in list(self._classes):
            ended &= self.remove(page_bytes, deadline - self._clock.monotonic())
        if ended:
            self._leases.close()
        return ended

    # --- who may ask --------------------------------------------------------------------------

    def _answer(
        self, identity: PeerIdentity, envelope: Envelope, request: AnyRequest, own_epoch: int
    ) -> Answer | Refusal:
        meant = envelope.receiver_epoch
        if isinstance(request, Hello):
            if request.epoch != envelope.sender_epoch:
                return Refusal(Status.REFUSED, text="greeting with two epochs")
            if meant not in (0, own_epoch):
                return Refusal(Status.STALE, own_epoch)
            return self._directory.greeted(identity, request)
        member = self._directory.member_of(identity)
        if member is None:
            return Refusal(Status.STALE)
        name, epoch = member
        if envelope.sender_epoch < epoch:
            return Refusal(Status.FENCED, epoch)
        if envelope.sender_epoch > epoch:
            return Refusal(Status.STALE)
        if meant != own_epoch:
            return Refusal(Status.STALE, own_epoch)
        return self._serve(identity, name, request)

    def _serve(self, identity: PeerIdentity, name: str, request: AnyRequest) -> Answer | Refusal:
        """The answer to a member in good standing."""
        if isinstance(request, Lookup):
            return self._lookup(request)
        if isinstance(request, Sync):
            self._leases.expire()
            return self._sync(request)
        if isinstance(request, ReleaseAsk):
            given_back = [self._leases.release(name, lease) for lease in request.leases]
            return Released(sum(given_back))
        if isinstance(request, StoreAsk):
            return self._store(identity, name, request)
        assert not isinstance(request, Hello), "greetings are answered before"
        with self._using(request.page_bytes) as entry:
            if entry is None:
                return Refusal(Status.NO_CLASS)
            if isinstance(request, SnapshotAsk):
                return self._teller.part(name, entry.served.holdings, request)
            return self._lease(name, entry, request)

    @contextmanager
    def _using(self, page_bytes: int) -> Iterator[_Class | None]:
        """A page size that stays until the block is left; None when it is not served."""
        entry = self._enter(page_bytes)
        try:
            yield entry
        finally:
            if entry is not None:
                self._leave(entry)

    def _enter(self, page_bytes: int) -> _Class | None:
        """A page size that stays until _leave(); None when it is not served."""
        with self._changed:
            entry = self._classes.get(page_bytes)
            if entry is None or entry.closing:
                return None
            entry.users += 1
            return entry

    def _leave(self, entry: _Class) -> None:
        with self._changed:
            entry.users -= 1
            if entry.closing:
                self._changed.notify_all()

    # --- the verbs ----------------------------------------------------------------------------

    def _lookup(self, request: Lookup) -> LookupAnswer | Refusal:
        # Asked far more often than all else: _using() would be a tenth of its time.
        entry = self._enter(request.page_bytes)
        if entry is None:
            return Refusal(Status.NO_CLASS)
        try:
            return LookupAnswer(tuple(entry.served.store.lookup_here(request.keys)))
        finally:
            self._leave(entry)

    def _sync(self, request: Sync) -> SyncAnswer:
        changes: list[Changes] = []
        room = FINGERPRINTS_MAX
        for want in request.wants:
            with self._using(want.page_bytes) as entry:
                if entry is not None:
                    part = changes_since(entry.served.holdings, want, room)
                    room -= len(part.added) + len(part.removed)
                    changes.append(part)
        sizes = tuple(self._directory.page_sizes())
        return SyncAnswer(self._directory.leaving, sizes, tuple(changes))

    def _lease(self, name: str, entry: _Class, ask: LeaseAsk) -> LeaseGrant | Refusal:
        self._leases.expire()
        served = entry.served
        wait_s = min(ask.wait_ms / 1000, self._config.transfer_s)
        parts: list[PageLease] = []
        found: dict[PageKey, LeasedPage] = {}
        lease: int | None = None
        try:
            hold_each(served.store, ask.keys, wait_s, self._clock, parts)
            found = places(served.store, parts)
            if found:
                lease = self._leases.grant(
                    name, ask.page_bytes, parts, ask.hold_ms / 1000, entry.leased_max
                )
        finally:
            if lease is None:
                for part in parts:
                    part.release()
        if found and lease is None:
            # They are here: "not held" would be read as a miss.
            text = f"{name} or all members hold as many pages here as they may; ask later"
            return Refusal(Status.REFUSED, text=text)
        return LeaseGrant(lease or 0, served.generation, tuple(map(found.get, ask.keys)))

    def _store(self, identity: PeerIdentity, name: str, ask: StoreAsk) -> StoreAnswer | Refusal:
        if self._directory.leaving:
            return Refusal(Status.LEAVING)
        peer = self._directory.reader(name)
        if peer is None and (text := self._directory.unlisted(name)) is not None:
            # Its pages are not to be had from here. FAILED would tell it nothing.
            return Refusal(Status.REFUSED, text=text)
        if peer is None or peer.identity != identity:
            # Not connected, or to another life of that member: its offsets would mean nothing.
            return self._stored_as((StoreOutcome.FAILED,) * len(ask.pages))
        deadline = self._clock.monotonic() + ask.wait_ms / 1000
        with self._using(ask.page_bytes) as entry:
            if entry is not None:
                return self._receive(peer, entry, ask, deadline)
        if self._directory.open_class(ask.page_bytes, ask.wait_ms / 1000) is None:
            return Refusal(Status.NO_CLASS)
        with self._using(ask.page_bytes) as entry:
            if entry is None:
                return Refusal(Status.NO_CLASS)
            return self._receive(peer, entry, ask, deadline)

    def _receive(self, peer: Peer, entry: _Class, ask: StoreAsk, deadline: float) -> StoreAnswer:
        wait_s = deadline - self._clock.monotonic()
        return self._stored_as(entry.receiver.receive(peer, ask.generation, ask.pages, wait_s))

    def _stored_as(self, outcomes: tuple[StoreOutcome, ...]) -> StoreAnswer:
        with self._changed:
            self._stored.update(outcome.name.lower() for outcome in outcomes)
        return StoreAnswer(outcomes)

    def _count(self, verb: Verb, answer: Answer | Refusal) -> None:
        status = answer.status if isinstance(answer, Refusal) else Status.OK
        with self._changed:
            self._requests[verb] += 1
            self._answers[status] += 1
        refused = isinstance(answer, Refusal) and status in (Status.REFUSED, Status.DAMAGED)
        if isinstance(answer, Refusal) and refused and not self._directory.told(answer.text):
            now = self._clock.monotonic()
            with self._changed:
                if now < self._warn_again:
                    return
                self._warn_again = now + WARN_S
            text = answer.text or "bits have flipped"
            log.warning("answer a member: verb=%s %s: %s", verb.name, status.name, text)
