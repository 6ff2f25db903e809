"""A plane that fails, and a reader in a hurry: who is blamed, what is tried again, what is said."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence

import pytest

from tests.unit.storage.transport.fake_plane import FakePeer, FakePlane
from tests.unit.storage.transport.scripted import KEY, LIMIT_S
from tests.unit.storage.transport.test_planes import LIMITS, PAGE, pair, read_page, read_until
from tests.unit.storage.transport.transport_conformance import content, destinations, echo
from tierkv.storage.transport import negotiated_peer, plane_worker
from tierkv.storage.transport.base import PageOutcome, PageRange, PeerRead
from tierkv.storage.transport.negotiated_peer import FAILURES_MAX, NegotiatedPeer
from tierkv.storage.transport.plane import PlanePeer
from tierkv.storage.transport.planes import NegotiatedTransport

OK, FAILED = PageOutcome.OK, PageOutcome.FAILED


class OddPeer(FakePeer):
    """Its next read is what the test made of it."""

    def read(
        self,
        generation: int,
        ranges: Sequence[PageRange],
        into: Sequence[memoryview],
        timeout_s: float,
    ) -> PeerRead:
        plane = self._plane
        assert isinstance(plane, OddPlane)
        plane.timeouts.append(timeout_s)
        if plane.hangs:
            return plane.hanging
        if plane.breaks_in_read:
            plane.breaks = "it broke just now"
            read = PeerRead(len(ranges))
            read.refuse("read from peer by fake: it broke just now")
            return read
        return super().read(generation, ranges, into, timeout_s)


class Hanging(PeerRead):
    """Never done. Notes how long its taker would wait."""

    def __init__(self) -> None:
        super().__init__(1)
        self.waits: list[float] = []

    def take(self, timeout_s: float) -> list[PageOutcome]:
        self.waits.append(timeout_s)
        return super().take(0.0)


class OddPlane(FakePlane):
    def __init__(self) -> None:
        super().__init__("fake")
        self.timeouts: list[float] = []
        self.hangs = self.breaks_in_read = self.has_a_bug = False
        self.hanging = Hanging()
        self.offers = threading.Event()
        self.offers.set()
        self.asking = threading.Semaphore(0)
        """Questions for its offer."""

    def offer(self) -> bytes:
        self.asking.release()
        assert self.offers.wait(LIMIT_S)
        return super().offer()

    def connect(self, offer: bytes, peer_name: str, timeout_s: float) -> FakePeer:
        if self.has_a_bug:
            self.connects += 1
            raise ValueError("an offer nobody thought of")
        super().connect(offer, peer_name, timeout_s)
        return OddPeer(self, offer)


def test_a_probe_that_hangs_makes_no_connect_late() -> None:
    ours = OddPlane()
    ours.hangs = True
    with NegotiatedTransport(KEY, planes=[OddPlane()], limits=LIMITS) as server:
        with NegotiatedTransport(KEY, planes=[ours], limits=LIMITS) as client:
            peer = client.connect(*server.listen("127.0.0.1", 0, echo), 1.0)
            assert peer.transport == "tcp" and "not done" in peer.declined["fake"]
            (asked,), (waited,) = ours.timeouts, ours.hanging.waits
            assert 0 < asked < waited <= 1.0


def test_h2_a_bug_of_a_plane_costs_the_plane() -> None:
    ours = OddPlane()
    ours.has_a_bug = True
    with pair([ours], [OddPlane()]) as (_, peer):
        assert read_page(peer) is OK
        assert peer.transport == "tcp" and "ValueError" in peer.declined["fake"]
        peer.check()


def test_h2_a_bug_of_a_plane_that_was_lost_is_not_met_at_each_read() -> None:
    ours = OddPlane()
    with pair([ours], [OddPlane()]) as (_, peer):
        assert peer.transport == "fake"
        ours.has_a_bug, ours.breaks = True, "pulled"
        read_until(peer, lambda: "ValueError" in peer.declined.get("fake", ""))
        read_until(peer, lambda: not peer._breakers["fake"].closed)
        before = ours.connects
        for _ in range(20):
            assert read_page(peer) is OK
        assert ours.connects == before <= 1 + FAILURES_MAX


def test_offers_that_did_not_come_in_time_are_asked_for_again() -> None:
    theirs = OddPlane()
    theirs.offers.clear()
    with NegotiatedTransport(KEY, planes=[theirs], limits=LIMITS) as server:
        with NegotiatedTransport(KEY, planes=[OddPlane()], limits=LIMITS) as client:
            server.register(memoryview(content()))
            peer = client.connect(*server.listen("127.0.0.1", 0, echo), 0.3)
            assert peer.transport == "tcp" and "fake" in peer.declined
            theirs.offers.set()
            read_until(peer, lambda: peer.transport == "fake")
            assert read_page(peer) is OK
            client.check()


def test_a_read_that_a_plane_refuses_because_it_broke_goes_over_tcp() -> None:
    """Nothing was asked for, so nothing can still be written."""
    ours = OddPlane()
    with pair([ours], [OddPlane()]) as (_, peer):
        assert peer.transport == "fake"
        ours.breaks_in_read = True
        assert read_page(peer) is OK
        assert peer.transport == "tcp"


def test_a_reader_in_a_hurry_says_nothing_about_a_plane() -> None:
    ours = OddPlane()
    with pair([ours], [OddPlane()]) as (_, peer):
        ours.fails = True
        for _ in range(2 * FAILURES_MAX):
            buffers = destinations([PAGE])
            read = peer.read(1, [PAGE], [memoryview(buffer) for buffer in buffers], 0.002)
            assert read.take(LIMIT_S) == [FAILED]
        assert peer.transport == "fake" and not peer.declined
        ours.fails = False
        assert read_page(peer) is OK


def test_counters_never_count_a_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = OddPlane()
    seen: list[int] = []
    settle = NegotiatedPeer._settle

    def noted(peer: NegotiatedPeer, path: PlanePeer | None, reasons: Mapping[str, str]) -> None:
        seen.append(peer.stats().pages_ok)
        settle(peer, path, dict(reasons))
        seen.append(peer.stats().pages_ok)

    monkeypatch.setattr(NegotiatedPeer, "_settle", noted)
    with pair([ours], [OddPlane()]) as (_, peer):
        assert peer.transport == "fake" and seen == [0, 0]
        assert read_page(peer) is OK and peer.stats().pages_ok == 1


def test_h1_closing_interrupts_a_question_for_offers(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(negotiated_peer, "NEGOTIATE_S", LIMIT_S)
    monkeypatch.setattr(plane_worker, "STOP_S", 0.5)
    theirs = OddPlane()
    theirs.offers.clear()
    with NegotiatedTransport(KEY, planes=[theirs], limits=LIMITS) as server:
        server.register(memoryview(content()))
        with NegotiatedTransport(KEY, planes=[OddPlane()], limits=LIMITS) as client:
            peer = client.connect(*server.listen("127.0.0.1", 0, echo), 0.2)
            assert read_page(peer) is OK
            assert theirs.asking.acquire(timeout=LIMIT_S)
            assert theirs.asking.acquire(timeout=LIMIT_S), "the worker asks once more"
        theirs.offers.set()
    assert "planes worker=did not end" not in caplog.messages
