"""One link: its states, what it says and heeds, what it survives."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.support.pages import page_keys
from tests.support.pool_nodes import (
    KEY,
    NEVER,
    PAGE_BYTES,
    WAIT_S,
    Gate,
    OffsetClock,
    free_address,
    running_nodes,
    start_node,
    until,
)
from tierkv.storage.clock import SystemClock
from tierkv.storage.errors import TierIOError
from tierkv.storage.pool.config import Address, PoolConfig
from tierkv.storage.pool.link import PAUSE_S_MIN, Link, LinkState
from tierkv.storage.pool.messages import (
    Answer,
    Hello,
    Refusal,
    Status,
    Sync,
    SyncAnswer,
    Verb,
    read_request,
    write_answer,
)
from tierkv.storage.pool.opening import transport_limits
from tierkv.storage.transport.base import PeerIdentity
from tierkv.storage.transport.tcp import TcpTransport


class ScriptedPeer:
    """A node of which only the answers are there. `answers` by verb; HELLO and SYNC are given."""

    def __init__(self, address: Address, epoch: int = 7) -> None:
        self.address = address
        self.epoch = epoch
        self.leaving = False
        self.answers: dict[Verb, Answer | Refusal] = {}
        self.garbage: bytes | None = None
        self.hellos: list[Hello] = []
        self.syncs = 0
        self.transport = TcpTransport(KEY)
        self.transport.listen(address.host, address.port, self._handle)

    def _handle(self, identity: PeerIdentity, payload: bytes) -> bytes:
        parts = read_request(payload)
        assert parts is not None
        envelope, request = parts
        if isinstance(request, Hello):
            self.hellos.append(request)
        if isinstance(request, Sync):
            self.syncs += 1
            if self.garbage is not None:
                return self.garbage
        usual: dict[Verb, Answer] = {
            Verb.HELLO: Hello("scripted", self.epoch, (), self.leaving),
            Verb.SYNC: SyncAnswer(self.leaving, (), ()),
        }
        answer = self.answers.get(envelope.verb) or usual[envelope.verb]
        return write_answer(envelope.verb, answer, self.epoch, envelope.sender_epoch)


class Owner:
    """What a link tells its pool."""

    def __init__(self) -> None:
        self.own_epoch = 100
        self.fences: list[int] = []
        self.refusals: list[str] = []
        self.changes = 0
        self.refusal: str | None = None
        self.sizes: tuple[int, ...] = (PAGE_BYTES,)
        self.bug = False

    def hello(self) -> Hello:
        return Hello("owner", self.own_epoch, self.sizes)

    def page_sizes(self) -> tuple[int, ...]:
        if self.bug:
            self.bug = False
            raise RuntimeError("a bug of ours")
        return self.sizes

    def met(self, link: Link, identity: PeerIdentity, hello: Hello) -> str | None:
        return self.refusal

    def refused_by(self, link: Link, text: str) -> None:
        self.refusals.append(text)

    def told(self, text: str) -> bool:
        return False

    def fenced(self, epoch: int, told_by: str, address: str) -> None:
        self.fences.append(epoch)
        self.own_epoch = max(self.own_epoch, epoch + 1)

    def link_changed(self, link: Link) -> None:
        self.changes += 1


@contextmanager
def linked(clock: OffsetClock | None = None) -> Iterator[tuple[Link, Owner, ScriptedPeer]]:
    """A link to a scripted peer, live."""
    address = free_address()
    peer, owner = ScriptedPeer(address), Owner()
    config = PoolConfig(
        listen=free_address(),
        members=(address,),
        key=KEY,
        heartbeat_s=0.02,
        suspect_s=1.0,
        connect_s=1.0,
    )
    transport = Gate(TcpTransport(KEY, limits=transport_limits(config)))
    link = Link(address, owner, transport, config, clock or SystemClock())
    link.start()
    try:
        until(lambda: link.live, lambda: link.problem)
        yield link, owner, peer
        link.check()
    finally:
        assert link.close(WAIT_S)
        assert link.state is LinkState.CLOSED and not link.live
        transport.close()
        peer.transport.close()


def await_greetings(peer: ScriptedPeer, count: int) -> None:
    until(lambda: len(peer.hellos) >= count, lambda: peer.hellos)


def test_a_peer_is_greeted_followed_and_live() -> None:
    with linked() as (link, owner, peer):
        assert (link.name, link.epoch, link.leaving) == ("scripted", 7, False)
        assert peer.hellos[0] == Hello("owner", 100, (PAGE_BYTES,))
        assert link.askable and link.takes_copies and link.problem is None
        heard = peer.syncs
        until(lambda: peer.syncs > heard + 3, lambda: peer.syncs)
        assert owner.changes >= 1
        session = link.session()
        assert session is not None and session.epoch == 7


def test_a_peer_that_leaves_is_asked_but_gets_no_copies() -> None:
    with linked() as (link, owner, peer):
        changes = owner.changes
        peer.leaving = True
        until(lambda: link.leaving, lambda: link.leaving)
        assert link.askable and not link.takes_copies
        until(lambda: owner.changes > changes, lambda: owner.changes)


def test_stale_says_that_the_peer_has_a_new_epoch_it_is_greeted_anew() -> None:
    with linked() as (link, _owner, peer):
        index = link.index(PAGE_BYTES)
        assert index is not None
        peer.epoch = 9
        until(lambda: link.live and link.epoch == 9, lambda: (link.epoch, link.problem))
        assert len(peer.hellos) >= 2 and link.known_pages == 0


def test_not_being_known_leads_to_a_greeting_not_to_a_lost_connection() -> None:
    with linked() as (link, _owner, peer):
        peer.answers[Verb.SYNC] = Refusal(Status.STALE)
        await_greetings(peer, 2)
        del peer.answers[Verb.SYNC]
        until(lambda: link.live, lambda: link.problem)


def test_a_peer_that_always_asks_to_be_greeted_is_greeted_with_pauses() -> None:
    with linked() as (link, _owner, peer):
        peer.answers[Verb.SYNC] = Refusal(Status.STALE)
        until(lambda: link.state is LinkState.REFUSED, lambda: link.state)
        assert "greeted again" in (link.problem or "")
        await_greetings(peer, len(peer.hellos) + 2)
        assert link.pause_s >= 4 * PAUSE_S_MIN, "it is tried less and less often"
        del peer.answers[Verb.SYNC]
        until(lambda: link.live, lambda: link.problem)


def test_fenced_is_told_to_the_pool_and_the_next_greeting_has_its_new_epoch() -> None:
    with linked() as (link, owner, peer):
        peer.answers[Verb.SYNC] = Refusal(Status.FENCED, 250)
        until(lambda: owner.fences != [], lambda: owner.fences)
        del peer.answers[Verb.SYNC]
        until(lambda: peer.hellos[-1].epoch == 251, lambda: peer.hellos)
        until(lambda: link.live, lambda: link.problem)
        assert set(owner.fences) == {250}


def test_a_peer_that_refuses_is_tried_again() -> None:
    with linked() as (link, _owner, peer):
        peer.answers[Verb.HELLO] = Refusal(Status.REFUSED, text="not you")
        link.greet_again()
        until(lambda: link.state is LinkState.REFUSED, lambda: link.state)
        assert "not you" in (link.problem or "") and link.session() is None
        del peer.answers[Verb.HELLO]
        until(lambda: link.live, lambda: link.problem)


def test_a_peer_that_the_pool_does_not_want_is_not_live() -> None:
    with linked() as (link, owner, _peer):
        owner.refusal = "twice"
        link.greet_again()
        until(lambda: link.state is LinkState.REFUSED, lambda: link.state)
        assert link.problem == "twice" and not link.live
        owner.refusal = None
        until(lambda: link.live, lambda: link.problem)


@pytest.mark.parametrize("garbage", [b"", b"TKVP", bytes(100), bytes([0xFF]) * 3000])
def test_answers_that_cannot_be_read_cost_the_connection_only(garbage: bytes) -> None:
    with linked() as (link, _owner, peer):
        peer.garbage = garbage
        until(lambda: link.counts()["lost"] > 0, lambda: link.counts())
        peer.garbage = None
        until(lambda: link.live, lambda: link.problem)
        assert link.counts()["restarts"] == 0, "expected trouble, no bug of ours"


def test_h2_the_heartbeat_survives_a_bug() -> None:
    with linked() as (link, owner, _peer):
        owner.bug = True
        until(lambda: link.counts()["restarts"] == 1, lambda: link.counts())
        until(lambda: link.live, lambda: link.problem)


def test_silence_ends_liveness_with_nobodys_help() -> None:
    clock = OffsetClock()
    with linked(clock) as (link, _owner, _peer):
        session = link.session()
        held = threading.Event()
        waiting = threading.Event()

        def mute(payload: bytes, timeout_s: float) -> None:
            waiting.set()
            held.wait(WAIT_S)

        assert session is not None
        gate = session.peer._gate  # type: ignore[attr-defined]
        gate.before_message = mute
        assert waiting.wait(WAIT_S)
        assert link.state is LinkState.LIVE
        clock.offset_s += 1.5
        assert not link.live and not link.askable and not link.takes_copies
        gate.before_message = None
        held.set()
        until(lambda: link.live, lambda: link.problem)


def test_h4_a_peer_that_goes_is_told_at_once_and_found_when_it_is_back() -> None:
    with linked() as (link, owner, peer):
        peer.transport.close()
        until(lambda: not link.live, lambda: link.state)
        assert link.state is LinkState.CONNECTING and link.problem
        changes = owner.changes
        fresh = ScriptedPeer(peer.address, epoch=8)
        try:
            until(lambda: link.live, lambda: link.problem)
            assert link.epoch == 8 and owner.changes > changes
        finally:
            fresh.transport.close()


def test_asking_a_life_that_is_over_fails_and_asks_nobody_else() -> None:
    with linked() as (link, _owner, peer):
        old = link.session()
        assert old is not None
        old.peer.close()
        until(lambda: link.session() not in (None, old) and link.live, lambda: link.problem)
        syncs = peer.syncs
        with pytest.raises(TierIOError):
            link.ask(old, Sync(()), 1.0)
        assert link.live and peer.syncs >= syncs


def test_a_breaker_belongs_to_one_life() -> None:
    with linked() as (link, _owner, peer):
        for _ in range(3):
            link.breaker.failed()
        assert link.live and not link.askable
        peer.epoch = 11
        until(lambda: link.epoch == 11 and link.live, lambda: link.epoch)
        assert link.askable, "the next life did nothing wrong"


def test_a_node_never_links_to_itself() -> None:
    address = free_address()
    alias = Address("127.0.0.1", 0)
    node = start_node(address, [free_address()])
    try:
        link = Link(address, node.pool, node.gate, node.config, SystemClock())
        link.start()
        until(lambda: "this node itself" in (link.problem or ""), lambda: link.problem)
        assert not link.live and alias != address
        assert link.close(WAIT_S)
    finally:
        node.stop()


def test_what_a_peer_gains_and_loses_is_known_by_heartbeat() -> None:
    with running_nodes(2, copy_after=NEVER, hot_after=NEVER) as nodes:
        near, far = nodes
        keys = page_keys(*range(40))
        far.put(keys[:30])
        until(lambda: near.link(far).known_pages == 30, lambda: near.link(far).known_pages)
        far.store.drop(keys[:10], far.store.host.name)
        far.put(keys[30:])
        there = [False] * 10 + [True] * 30
        until(lambda: near.remote.holds(keys) == there, lambda: near.remote.holds(keys))


def test_a_lost_member_is_one_line_without_what_was_tried(
    caplog: pytest.LogCaptureFixture,
) -> None:
    quick = {"heartbeat_s": 0.05, "suspect_s": 0.2}
    with running_nodes(2, **quick, copy_after=NEVER, hot_after=NEVER) as nodes:
        near, far = nodes
        link = near.link(far)
        # What was logged while it was not there yet is forgotten.
        until(lambda: not link._told, lambda: link._told)
        caplog.clear()
        far.stop()
        until(lambda: "refused" in (link.problem or ""), lambda: link.problem)
        # Some tries later it is still one line.
        until(lambda: link.pause_s > 4 * PAUSE_S_MIN, lambda: link.pause_s)
        told = [r.getMessage() for r in caplog.records if f"link={link.lane}" in r.getMessage()]
    (line,) = told
    assert line.startswith(f"link={link.lane} lost: Connection refused"), line


def test_a_connection_lost_for_a_moment_is_one_line(caplog: pytest.LogCaptureFixture) -> None:
    with running_nodes(2, heartbeat_s=0.05, copy_after=NEVER, hot_after=NEVER) as nodes:
        near, far = nodes
        link = near.link(far)
        caplog.clear()
        session = link.session()
        assert session is not None
        session.peer.close()
        until(lambda: link.live and link.counts()["lost"] == 1, lambda: link.counts())
        nodes.await_live()
    told = [r.getMessage() for r in caplog.records if f"link={link.lane} was" in r.getMessage()]
    assert len(told) == 1 and "was lost for a moment" in told[0], told
