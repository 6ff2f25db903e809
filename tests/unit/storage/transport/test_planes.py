"""The negotiated transport: the conformance suite, and which path is taken when."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import pytest

from tests.support.clock import ManualClock
from tests.unit.storage.transport.fake_plane import FakePlane
from tests.unit.storage.transport.transport_conformance import (
    GEOMETRY,
    LIMIT_S,
    LIMITS,
    TransportConformance,
    content,
    echo,
    fetch,
)
from tierkv.storage.errors import ConfigError, TierIOError
from tierkv.storage.transport.base import PageOutcome, PageRange, Transport, TransportLimits
from tierkv.storage.transport.introduction import (
    ANSWER_BYTES_MAX,
    NAME_BYTES_MAX,
    PLANES_MAX,
    Introduction,
    pack_introduction,
    pack_question,
    unpack_introduction,
    unpack_question,
)
from tierkv.storage.transport.negotiated_peer import FAILURES_MAX, OPEN_S, NegotiatedPeer
from tierkv.storage.transport.plane import OFFER_BYTES_MAX
from tierkv.storage.transport.plane_worker import TASKS_MAX, Worker
from tierkv.storage.transport.planes import NegotiatedTransport
from tierkv.storage.transport.tcp import TcpTransport

KEY = bytes(range(32))
OK, GONE, FAILED = PageOutcome.OK, PageOutcome.GONE, PageOutcome.FAILED
PAGE = GEOMETRY.payload(3)
SEED = 20261129


class TestWithoutPlanes(TransportConformance):
    def open_transport(self, limits: TransportLimits = LIMITS) -> Transport:
        return NegotiatedTransport(KEY, limits=limits)


@contextmanager
def pair(
    ours: list[FakePlane], theirs: list[FakePlane], clock: ManualClock | None = None
) -> Iterator[tuple[NegotiatedTransport, NegotiatedPeer]]:
    """A serving transport with content() as memory 1, and a peer connected to it."""
    with ExitStack() as stack:
        server = stack.enter_context(NegotiatedTransport(KEY, planes=theirs, limits=LIMITS))
        client = stack.enter_context(
            NegotiatedTransport(KEY, planes=ours, limits=LIMITS, clock=clock)
        )
        assert server.register(memoryview(content())) == 1
        peer = client.connect(*server.listen("127.0.0.1", 0, echo), LIMIT_S)
        yield server, peer
        server.check()
        client.check()


def read_page(peer: NegotiatedPeer, generation: int = 1) -> PageOutcome:
    """Read a page; when it is there it is right."""
    outcomes, buffers = fetch(peer, [PAGE], generation)
    start, length = PAGE
    assert outcomes[0] is not OK or buffers[0] == content(generation)[start : start + length]
    return outcomes[0]


def read_until(peer: NegotiatedPeer, true: Callable[[], bool]) -> None:
    """Read, as an application does, until something is so. Every page is there all the while."""
    for _ in range(5000):
        if true():
            return
        assert read_page(peer) is OK
    raise AssertionError(f"never came: {peer.transport}, {dict(peer.declined)}")


def test_the_first_plane_that_both_have_is_taken() -> None:
    ours = [FakePlane("fast"), FakePlane("slow")]
    with pair(ours, [FakePlane("slow"), FakePlane("fast")]) as (_, peer):
        assert peer.transport == "fast" and dict(peer.declined) == {}
        assert read_page(peer) is OK
        assert (ours[0].reads, ours[1].connects) == (2, 0), "a probe and a read"
        stats = peer.stats()
        assert (stats.pages_ok, stats.bytes_read, stats.messages) == (1, PAGE.length, 0)


def test_planes_that_cannot_be_taken_say_why() -> None:
    absent, dumb, stuck = FakePlane("absent"), FakePlane("dumb"), FakePlane("stuck")
    lying, dead = FakePlane("lying"), FakePlane("dead")
    theirs = [FakePlane("dumb"), FakePlane("stuck")]
    theirs[0].refuses_offers = True
    stuck.refuses_peers = True
    with pair([absent, dumb, stuck], theirs) as (_, peer):
        assert peer.transport == "tcp"
        assert dict(peer.declined) == {
            "absent": "the peer does not have it",
            "dumb": "the peer cannot offer it: offer memory by fake: not today",
            "stuck": "connect by fake: no cable",
        }
        assert read_page(peer) is OK
    lying.flips, dead.fails = True, True
    with pair([lying, dead], [FakePlane("lying"), FakePlane("dead")]) as (_, peer):
        assert peer.transport == "tcp"
        assert "other bytes" in peer.declined["lying"]
        assert "probe read: failed" in peer.declined["dead"]
        assert read_page(peer) is OK


def test_the_second_plane_when_the_first_cannot() -> None:
    ours = [FakePlane("fast"), FakePlane("slow")]
    ours[0].refuses_peers = True
    with pair(ours, [FakePlane("fast"), FakePlane("slow")]) as (_, peer):
        assert peer.transport == "slow"
        assert list(peer.declined) == ["fast"]
        assert read_page(peer) is OK


def test_nodes_with_and_without_planes_understand_each_other() -> None:
    with pair([FakePlane()], []) as (_, peer):
        assert dict(peer.declined) == {"fake": "the peer does not have it"}
        assert read_page(peer) is OK and peer.message(b"x", LIMIT_S).endswith(b"x")
    with pair([], [FakePlane()]) as (_, peer):
        assert peer.transport == "tcp" and dict(peer.declined) == {}
        assert read_page(peer) is OK and peer.message(b"x", LIMIT_S).endswith(b"x")


def test_a_plain_tcp_peer_costs_the_plane_not_the_connection() -> None:
    with TcpTransport(KEY, limits=LIMITS) as server:
        server.register(memoryview(content()))
        address = server.listen("127.0.0.1", 0, lambda peer, payload: b"?")
        with NegotiatedTransport(KEY, planes=[FakePlane()], limits=LIMITS) as client:
            peer = client.connect(*address, LIMIT_S)
            assert peer.transport == "tcp" and "read offers of peer" in peer.declined["fake"]
            assert read_page(peer) is OK


def test_memory_that_a_plane_cannot_offer_goes_over_tcp() -> None:
    theirs = FakePlane()
    with pair([FakePlane()], [theirs]) as (server, peer):
        theirs.refuses_memory = True
        assert server.register(memoryview(content(2))) == 2
        assert read_page(peer, 2) is OK and read_page(peer) is OK
        assert peer.transport == "fake"
        assert theirs.memories.keys() & {1, 2} == {1}


def test_memory_registered_later_comes_to_the_plane() -> None:
    ours = FakePlane()
    with pair([ours], [FakePlane()]) as (server, peer):
        assert server.register(memoryview(content(2))) == 2
        before = ours.reads
        assert read_page(peer, 2) is OK
        assert ours.reads == before, "the plane did not know it: tcp did it"
        path = peer._path
        assert path is not None
        read_until(peer, lambda: path.knows(2))
        before = ours.reads
        assert read_page(peer, 2) is OK and ours.reads == before + 1
        server.unregister(2)
        assert read_page(peer, 2) is GONE
        assert server.stats().served_messages == 0, "our own messages are not the application's"


def test_h4_a_plane_that_breaks_is_replaced_and_comes_back() -> None:
    clock = ManualClock()
    ours = FakePlane()
    with pair([ours], [FakePlane()], clock) as (_, peer):
        ours.breaks = "cable cut"
        # Known to be broken before a read begins: no page fails.
        read_until(peer, lambda: "probe read" in peer.declined.get("fake", ""))
        read_until(peer, lambda: not peer._breakers["fake"].closed)
        assert peer.transport == "tcp"
        tries = ours.connects
        ours.breaks = None
        for _ in range(20):
            assert read_page(peer) is OK
        assert ours.connects == tries, "left alone while the breaker is open"
        clock.advance(OPEN_S)
        read_until(peer, lambda: peer.transport == "fake")
        assert dict(peer.declined) == {} and peer.stats().pages_failed == 0


def test_reads_that_fail_again_and_again_trip_the_breaker() -> None:
    ours = FakePlane()
    clock = ManualClock()
    with pair([ours], [FakePlane()], clock) as (_, peer):
        ours.fails = True
        # The breaker hears of a read right after the reader does.
        outcomes = [read_page(peer) for _ in range(FAILURES_MAX)]
        while outcomes[-1] is FAILED and len(outcomes) < 1000:
            outcomes.append(read_page(peer))
        assert outcomes[:FAILURES_MAX] == [FAILED] * FAILURES_MAX and outcomes[-1] is OK
        assert peer.transport == "tcp" and "of the test" in peer.declined["fake"]
        assert peer._breakers["fake"].trips == 1
        ours.fails = False
        clock.advance(OPEN_S)
        read_until(peer, lambda: peer.transport == "fake")


def test_a_plane_of_second_choice_is_left_when_the_first_comes_back() -> None:
    clock = ManualClock()
    ours = [FakePlane("fast"), FakePlane("slow")]
    with pair(ours, [FakePlane("fast"), FakePlane("slow")], clock) as (_, peer):
        ours[0].breaks = "cable cut"
        read_until(peer, lambda: peer.transport == "slow")
        ours[0].breaks = None
        clock.advance(OPEN_S)
        read_until(peer, lambda: peer.transport == "fast")
        assert dict(peer.declined) == {}


def test_closing_closes_the_planes() -> None:
    ours, theirs = FakePlane(), FakePlane()
    with pair([ours], [theirs]) as (server, peer):
        server.close()
        assert theirs.closed and not ours.closed
        peer.close()
        assert fetch(peer, [PAGE])[0] == [FAILED]
    assert ours.closed


def test_planes_are_named_once_and_bounded() -> None:
    with pytest.raises(ConfigError, match="different data planes"):
        NegotiatedTransport(KEY, planes=[FakePlane(), FakePlane()])
    many = [FakePlane(f"p{number}") for number in range(PLANES_MAX + 1)]
    with pytest.raises(ConfigError, match="at most"):
        NegotiatedTransport(KEY, planes=many)


@pytest.mark.parametrize("message", [b"", b"\x02", b"\x01", b"\x01\x05", b"\x01\x01\x00"])
def test_a1_messages_of_no_kind_are_refused(message: bytes) -> None:
    with NegotiatedTransport(KEY, limits=LIMITS) as server:
        told: list[bytes] = []

        def handler(peer: object, payload: bytes) -> bytes:
            told.append(payload)
            return b""

        address = server.listen("127.0.0.1", 0, handler)
        with TcpTransport(KEY) as client, client.connect(*address, LIMIT_S) as peer:
            with pytest.raises(TierIOError, match="it refused"):
                peer.message(message, LIMIT_S)
            assert peer.message(b"\0application", LIMIT_S) == b""
        assert told == [b"application"]


def test_introductions_go_there_and_back() -> None:
    offers = {"nixl": bytes(OFFER_BYTES_MAX), "ucx": b""}
    whole = Introduction(bytes(range(32)), offers, {"other": "not here"})
    packed = pack_introduction(whole)
    assert unpack_introduction(packed) == whole and len(packed) <= ANSWER_BYTES_MAX
    names = ["nixl", "u" * NAME_BYTES_MAX]
    assert unpack_question(pack_question(names)) == names
    line = unpack_introduction(pack_introduction(replace(whole, refusals={"x": "a\nb" * 999})))
    assert line.refusals["x"].startswith("a ba b") and len(line.refusals["x"]) <= 512


def test_a1_introductions_that_are_none() -> None:
    print(f"seed={SEED}")
    rng = random.Random(SEED)
    good = pack_introduction(Introduction(bytes(32), {"nixl": b"abc"}, {"ucx": "why"}))
    for cut in range(len(good)):
        with pytest.raises(TierIOError, match="read offers of peer"):
            unpack_introduction(good[:cut])
    with pytest.raises(TierIOError, match="too many"):
        unpack_introduction(good + b"x")
    for _ in range(2000):
        bad = bytearray(good)
        for _ in range(rng.randint(1, 3)):
            bad[rng.randrange(32, len(bad))] = rng.randrange(256)
        try:
            found = unpack_introduction(bytes(bad))
        except TierIOError:
            continue
        assert len(found.offers) + len(found.refusals) <= PLANES_MAX


def test_h2_a_task_with_a_bug_ends_no_worker() -> None:
    worker = Worker()
    done = threading.Event()
    worker.ask(lambda: [][1])
    worker.ask(done.set)
    assert done.wait(LIMIT_S) and worker.failed == 1
    worker.close()
    assert not worker.ask(done.set)


def test_c4_tasks_are_bounded_and_counted() -> None:
    worker = Worker()
    entered, leave = threading.Event(), threading.Event()

    def block() -> None:
        entered.set()
        leave.wait(LIMIT_S)

    worker.ask(block)
    assert entered.wait(LIMIT_S)
    taken = [worker.ask(leave.set) for _ in range(TASKS_MAX + 2)]
    assert taken.count(True) == TASKS_MAX and worker.dropped == 2
    leave.set()
    worker.close()


def test_ranges_are_looked_at_before_a_plane_is_asked() -> None:
    ours = FakePlane()
    with pair([ours], [FakePlane()]) as (_, peer):
        before = ours.reads
        with pytest.raises(ValueError, match="read from peer"):
            peer.read(1, [PageRange(0, 10)], [memoryview(bytearray(9))], LIMIT_S)
        assert ours.reads == before
