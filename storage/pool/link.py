"""One peer of the pool: its connection, its present life, its heartbeat and what is known of it.

Owns the transport's Peer, the thread that connects, greets and follows it, the breaker, the meters
and the counters. Knows no stores: pulls and copies to and from the peer are puller.py's and
pusher.py's, who ask through ask() and the Peer. Called by them, by remote.py and pool.py.

    state        meaning                         leaves by
    CONNECTING   no connection; tried again      greeted and followed -> LIVE; refused -> REFUSED
                 after a pause that grows
    REFUSED      one of the two does not want    tried again after a pause, as CONNECTING
                 the other: `problem` says why
    LIVE         greeted; tells its changes      no answer, connection lost -> CONNECTING;
                 with every heartbeat            one of the two has another epoch -> greeted anew
    CLOSED       no member any more              final

LIVE says that the peer was; `live` that it was heard of within suspect_s too, and `askable` that
its breaker is closed as well. Both look at the clock, so nobody has to notice that a peer fell
silent. Invariants: what is known of the peer belongs to one life of it (epoch and boot token); a
Peer is never used for another life; every wait has a deadline; the thread survives what it meets.
"""

from __future__ import annotations

import logging
import re
import threading
import traceback
from collections import Counter
from enum import Enum
from typing import Protocol, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from tierkv.storage.bandwidth import TransferMeter
from tierkv.storage.breaker import Breaker
from tierkv.storage.clock import Clock
from tierkv.storage.errors import TierError, TierIOError
from tierkv.storage.pool.config import Address, PoolConfig
from tierkv.storage.pool.exchange import Session, exchange, refusal_text
from tierkv.storage.pool.follower import Follower
from tierkv.storage.pool.holdings import Fingerprints
from tierkv.storage.pool.messages import AnyRequest, Hello, Refusal, Request, Status
from tierkv.storage.pool.peer_index import PeerIndex
from tierkv.storage.transport.base import Peer, PeerIdentity, Transport

PAUSE_S_MIN = 0.1
PAUSE_S_MAX = 2.0
"""Between two tries to connect; it doubles from one to the other."""
STOP_S = 10.0
TOLD_MAX = 16
"""Lines that are remembered as told."""
_AGAIN = "it asks to be greeted again at once"
_OPERATIONS = re.compile(r"\b(?:(?:message to|connect|greet) peer|follow)(?: \S+)?: ")
"""What was tried, and at whom, in front of why it failed: a link's line and its row say both."""
BYTES_PER_S = 500e6
"""Assumed of a peer that nothing was read from yet."""
LATENCY_S = 1e-3

log = logging.getLogger(__name__)

_A = TypeVar("_A")


class LinkState(Enum):
    """See the table at the top."""

    CONNECTING = "connecting"
    REFUSED = "refused"
    LIVE = "live"
    CLOSED = "closed"


class LinkOwner(Protocol):
    """What a link needs of the pool. Called with no lock of the link held."""

    @property
    def own_epoch(self) -> int:
        """This node's epoch now."""
        ...

    def hello(self) -> Hello:
        """What this node says of itself."""
        ...

    def page_sizes(self) -> tuple[int, ...]:
        """Page sizes that this node has stores for."""
        ...

    def met(self, link: Link, identity: PeerIdentity, hello: Hello) -> str | None:
        """A peer answered a greeting: None when it is to be dealt with, else why not."""
        ...

    def fenced(self, epoch: int, told_by: str, address: str) -> None:
        """A peer knows this node's name with `epoch`, which is not below its own, of a node that
        says it is at `address`."""
        ...

    def refused_by(self, link: Link, text: str) -> None:
        """A peer does not want this node, for a reason that others may say in the same words."""
        ...

    def told(self, text: str) -> bool:
        """Whether the pool has logged this very text lately."""
        ...

    def link_changed(self, link: Link) -> None:
        """`live`, `askable`, `leaving` or the life of the peer may have changed."""
        ...


class Link:
    """See the module docstring. Thread-safe; start() once, close() ends it."""

    def __init__(
        self,
        address: Address,
        owner: LinkOwner,
        transport: Transport,
        config: PoolConfig,
        clock: Clock,
    ) -> None:
        self.address = address
        self.lane = str(address)
        """The name of its pulls' queue."""
        self.breaker = _breaker(config, clock)
        self.reads = TransferMeter(clock)
        self.writes = TransferMeter(clock)
        self.name: str | None = None
        """What the member calls itself; None until it was met."""
        self.epoch = 0
        self.leaving = False
        self.page_sizes: tuple[int, ...] = ()
        """That the peer serves, as it said last."""
        self.problem: str | None = "not connected yet"
        """Why it is not LIVE; None while it is."""
        self.complaint: str | None = None
        """Why it takes no copies from this node, though it is LIVE; None when it does."""
        self.last_error: str | None = None
        """What failed last, however long ago."""
        self._owner = owner
        self._transport = transport
        self._config = config
        self._clock = clock
        self._changed = threading.Condition()
        self._state = LinkState.CONNECTING
        self._peer: Peer | None = None
        self._token = b""
        self._heard = 0.0
        self._live_since = 0.0
        self._told: set[str] = set()
        """What was logged since it was live for long, so that each is logged once."""
        self._lost: str | None = None
        """Why it is not LIVE any more, until that is logged with what the next try meets."""
        self._greet_due = False
        self._hurry = False
        self._pause_s = PAUSE_S_MIN
        self._follower = Follower()
        self._counts: Counter[str] = Counter()
        self._thread = threading.Thread(
            target=self._run, name=f"tierkv-link-{self.lane}", daemon=True
        )

    def start(self) -> None:
        """Begin to connect. Does not wait."""
        self._thread.start()

    # --- what others ask ------------------------------------------------------------------

    @property
    def state(self) -> LinkState:
        """See the table at the top."""
        return self._state

    @property
    def pause_s(self) -> float:
        """How long it rests before the next try to connect."""
        return self._pause_s

    @property
    def live(self) -> bool:
        """True while the peer is greeted and was heard of lately. O(1), takes no lock."""
        return (
            self._state is LinkState.LIVE
            and self._clock.monotonic() - self._heard < self._config.suspect_s
        )

    @property
    def askable(self) -> bool:
        """True while it is live and its breaker lets it be asked."""
        return self.live and self.breaker.closed

    @property
    def takes_copies(self) -> bool:
        """True while copies may be made there."""
        return self.askable and not self.leaving

    def index(self, page_bytes: int) -> PeerIndex | None:
        """What the peer holds of this page size; None before it was heard."""
        return self._follower.index(page_bytes)

    def holds(self, page_bytes: int, prints: Fingerprints) -> NDArray[np.bool_]:
        """Which of these pages of one size the peer is known to hold; a new array. No side
        effects."""
        index = self._follower.index(page_bytes)
        return np.zeros(len(prints), np.bool_) if index is None else index.holds(prints)

    @property
    def known_pages(self) -> int:
        """Pages of all sizes that it is known to hold."""
        return self._follower.known

    def expected_s(self, nbytes: int) -> float:
        """How long reading `nbytes` from it takes, as far as it was measured."""
        rate = self.reads.bytes_per_s or BYTES_PER_S
        return (self.reads.latency_s or LATENCY_S) + nbytes / rate

    def session(self) -> Session | None:
        """The present life of the peer; None while it is not LIVE."""
        with self._changed:
            if self._peer is None or self._state is not LinkState.LIVE:
                return None
            return Session(self._peer, self.epoch)

    def ask(self, session: Session, request: Request[_A], timeout_s: float) -> _A | Refusal:
        """Send a request to that life of the peer. TierIOError when no sound answer came.

        A refusal that concerns epochs has been acted on when it is returned: greeting anew, or
        this node's own next epoch, is under way.
        """
        return self._exchange(session, request, timeout_s)

    def hurry(self) -> None:
        """Do now what waits for a pause to end: the peer was heard of elsewhere."""
        with self._changed:
            self._hurry = True
            self._pause_s = PAUSE_S_MIN
            self._changed.notify_all()

    def greet_again(self) -> None:
        """One of the two has another epoch: greet before the next heartbeat, now."""
        with self._changed:
            self._greet_due = True
            self._changed.notify_all()

    def count(self, what: str, number: int = 1) -> None:
        """Count something for status()."""
        with self._changed:
            self._counts[what] += number

    def note_error(self, reason: str) -> None:
        """Remember what failed last, for status(); the connection may be sound."""
        self.last_error = reason

    def refused(self, refusal: Refusal) -> None:
        """Copies were not taken: for status(), and for the log now and then, if it said why."""
        if refusal.status is Status.REFUSED:
            self.complaint = refusal.text
            self._owner.refused_by(self, refusal.text)

    def counts(self) -> Counter[str]:
        """Copy of the counters: pulled, pulled_bytes, pushed, pushed_bytes, corrupt, ..."""
        with self._changed:
            return Counter(self._counts)

    def check(self) -> None:
        """Assert the invariants. O(pages known)."""
        with self._changed:
            live = self._state is LinkState.LIVE
            assert not live or (self._peer is not None and self.epoch > 0), "live without a peer"
            assert self._state is not LinkState.CLOSED or self._peer is None, "closed with a peer"
        self.breaker.check()
        self._follower.check()

    def stop(self) -> None:
        """End what is under way with this peer and begin nothing more. Idempotent."""
        with self._changed:
            self._state = LinkState.CLOSED
            self.problem = "no member any more"
            self._changed.notify_all()
        self._drop_peer()

    def close(self, timeout_s: float = STOP_S) -> bool:
        """stop(), and wait for the thread; False past the timeout. Idempotent."""
        self.stop()
        if self._thread.ident is None or self._thread is threading.current_thread():
            return True
        self._thread.join(timeout_s)
        # The thread may have connected while it was told to stop.
        self._drop_peer()
        return not self._thread.is_alive()

    # --- its thread -----------------------------------------------------------------------

    def _run(self) -> None:
        """Life of the link's thread."""
        while self._state is not LinkState.CLOSED:
            try:
                pause_s = self._step()
            except Exception:  # noqa: BLE001
                # The one supervisor: a bug met once must not leave the peer unheard for ever
                # (lesson H2).
                log.error("link=%s %s", self.lane, traceback.format_exc())
                self.count("restarts")
                self._lose("an error of this node, see its log", LinkState.CONNECTING)
                pause_s = PAUSE_S_MAX
            self._rest(pause_s)

    def _step(self) -> float:
        """Connect, greet or follow, whatever is next; returns how long to rest after it."""
        try:
            if self._peer is None:
                self._connect()
            elif self._greet_due:
                self._greet(self._peer)
            if self._state is LinkState.LIVE:
                self._follow()
        except TierError as error:
            self._lose(str(error), LinkState.CONNECTING)
        if self._state is LinkState.LIVE:
            if self._clock.monotonic() - self._live_since > self._config.suspect_s:
                # What comes and goes at once is neither tried nor told of without pause.
                self._pause_s = PAUSE_S_MIN
                self._told.clear()
            return 0.0 if self._greet_due else self._config.heartbeat_s
        pause_s, self._pause_s = self._pause_s, min(2 * self._pause_s, PAUSE_S_MAX)
        return pause_s

    def _rest(self, pause_s: float) -> None:
        with self._changed:
            if self._state is not LinkState.LIVE:
                # Two that greet and cannot follow each other hurry each other without end.
                self._changed.wait_for(lambda: self._state is LinkState.CLOSED, PAUSE_S_MIN)
                pause_s = max(0.0, pause_s - PAUSE_S_MIN)
            self._changed.wait_for(
                lambda: (
                    self._hurry
                    or self._state is LinkState.CLOSED
                    or (self._greet_due and self._peer is not None)
                ),
                pause_s,
            )
            self._hurry = False

    def _connect(self) -> None:
        host, port = self.address.host, self.address.port
        peer = self._transport.connect(host, port, self._config.connect_s)
        with self._changed:
            closed = self._state is LinkState.CLOSED
            if not closed:
                self._peer = peer
        if closed:
            peer.close()
            return
        self._greet(peer)

    def _greet(self, peer: Peer) -> None:
        """Say HELLO and take over what the peer says of itself. TierIOError."""
        with self._changed:
            self._greet_due = False
        answer = self._exchange(Session(peer, 0), self._owner.hello(), self._config.suspect_s)
        if isinstance(answer, Refusal):
            if answer.status is Status.REFUSED:
                self._owner.refused_by(self, answer.text)
            # What it says of epochs the pool has told, or took up without a word.
            self._lose(refusal_text(answer), LinkState.REFUSED, told=True)
            return
        problem = self._owner.met(self, peer.identity, answer)
        if problem is not None:
            self._lose(problem, LinkState.REFUSED, told=self._owner.told(problem))
            return
        with self._changed:
            life = (self._token, self.epoch)
            new = life != (peer.identity.boot_token, answer.epoch)
            self._token, self.epoch = peer.identity.boot_token, answer.epoch
            self.name, self.leaving = answer.name, answer.leaving
            self.page_sizes = answer.page_sizes
        if new:
            # Nothing that an earlier life held or was late with says anything about this one.
            self._follower.reset()
            self.complaint = None
            self.breaker = _breaker(self._config, self._clock)
            self._owner.link_changed(self)
        self._follow()
        if self._greet_due:
            # Once is no trouble: one of the two took another epoch just now.
            first = _AGAIN not in self._told
            self._told.add(_AGAIN)
            self._lose(_AGAIN, LinkState.REFUSED, told=first)
            return
        with self._changed:
            was, closed = self._state, self._state is LinkState.CLOSED
            if not closed:
                self._state = LinkState.LIVE
                self.problem = None
                if was is not LinkState.LIVE:
                    self._live_since = self._clock.monotonic()
                lost, self._lost = self._lost, None
        if not closed and was is not LinkState.LIVE:
            if lost is not None:
                self._warn(f"was lost for a moment: {lost}")
            log.info("link=%s member=%s epoch=%d live", self.lane, self.name, self.epoch)
            self._owner.link_changed(self)

    def _follow(self) -> None:
        """One heartbeat. TierIOError."""

        # Silence is noticed when suspect_s have passed since the last heartbeat, not later.
        timeout_s = self._config.suspect_s - self._config.heartbeat_s

        def ask(request: AnyRequest) -> object:
            peer = self._peer
            if peer is None:
                raise TierIOError(f"follow {self.lane}: {self.problem}")
            session = Session(peer, self.epoch)
            answer = self._exchange(session, cast(Request[object], request), timeout_s)
            if isinstance(answer, Refusal) and answer.status is not Status.NO_CLASS:
                raise TierIOError(f"follow {self.lane}: {refusal_text(answer)}")
            return answer

        was_silent = self._state is LinkState.LIVE and not self.live
        try:
            answer = self._follower.follow(self._owner.page_sizes(), ask)
        except TierIOError:
            if self._greet_due:
                # The answer was about epochs: the connection is sound, the greeting is old.
                return
            raise
        with self._changed:
            changed = was_silent or self.leaving != answer.leaving
            self.leaving = answer.leaving
            self.page_sizes = answer.page_sizes
        if changed:
            self._owner.link_changed(self)

    def _exchange(self, session: Session, request: Request[_A], timeout_s: float) -> _A | Refusal:
        answer = exchange(session, request, self._owner.own_epoch, timeout_s)
        if isinstance(answer, Refusal):
            self._heed(answer)
        else:
            self._heard = self._clock.monotonic()
        return answer

    def _heed(self, refusal: Refusal) -> None:
        """Act on what a refusal says about epochs and leaving."""
        if refusal.status is Status.FENCED:
            self._owner.fenced(refusal.epoch, self.name or self.lane, refusal.text)
            self.greet_again()
        elif refusal.status is Status.STALE:
            self.greet_again()
        elif refusal.status is Status.LEAVING:
            self.leaving = True

    def _lose(self, reason: str, state: LinkState, told: bool = False) -> None:
        """Let the connection go; what is under way on it fails. `told`: no line is needed."""
        reason = _OPERATIONS.sub("", reason)
        with self._changed:
            was = self._state
            if was is LinkState.CLOSED:
                return
            # A lost connection is tried again at once, and that says more: one line for both.
            wait = was is LinkState.LIVE and state is LinkState.CONNECTING
            lost, self._lost = self._lost, reason if wait else None
            word = "lost" if lost is not None and state is LinkState.CONNECTING else state.value
            self._state = state
            self.problem = reason
        if was is LinkState.LIVE:
            self.count("lost")
        if not (told or wait):
            self._warn(f"{word}: {reason}")
            if word == "lost":
                # The tries that follow meet the same.
                self._told.add(f"{state.value}: {reason}")
        self._drop_peer()
        if was is LinkState.LIVE:
            self._owner.link_changed(self)

    def _warn(self, text: str) -> None:
        """Log what has not been logged since it was live for long. Called by its thread."""
        if text not in self._told:
            if len(self._told) >= TOLD_MAX:
                self._told.clear()
            self._told.add(text)
            log.warning("link=%s %s", self.lane, text)

    def _drop_peer(self) -> None:
        with self._changed:
            peer, self._peer = self._peer, None
        if peer is not None:
            peer.close()


def _breaker(config: PoolConfig, clock: Clock) -> Breaker:
    return Breaker(clock, config.breaker_failures, config.breaker_open_s)
