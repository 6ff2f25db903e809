"""Who moves the bytes of a read over the ucx plane: its taker, or the thread of the peer."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator

import pytest

from tests.unit.storage.transport.test_ucx import (
    GENERATION,
    LIMIT_S,
    LIMITS,
    MEMORY_BYTES,
    SEED,
    SHORT_S,
    content,
    fetch,
    open_plane,
    until,
)
from tierkv.storage.errors import TierIOError
from tierkv.storage.transport import ucx_peer
from tierkv.storage.transport.base import PageOutcome, PageRange, PeerRead, TransportLimits
from tierkv.storage.transport.ucx import UcxPlane
from tierkv.storage.transport.ucx_lane import Lane
from tierkv.storage.transport.ucx_peer import UcxPeer
from tierkv.storage.transport.ucx_server import UcxServer
from tierkv.storage.transport.ucx_wire import ReadRequest


@pytest.fixture
def serving() -> Iterator[UcxPlane]:
    plane = open_plane()
    plane.register(memoryview(content()), GENERATION)
    yield plane
    plane.check()
    plane.close()


@pytest.fixture
def peer(serving: UcxPlane) -> Iterator[UcxPeer]:
    plane = open_plane()
    yield plane.connect(serving.offer(), "serving", LIMIT_S)
    plane.check()
    plane.close()


class TestTakers:
    """Who takes a lone read moves its bytes; everything else is the thread's."""

    @pytest.fixture
    def drivers(self, monkeypatch: pytest.MonkeyPatch) -> list[int]:
        """Threads that have driven a read to its end."""
        seen: list[int] = []
        genuine = UcxPeer._drive_job

        def noted(peer: UcxPeer, *call: object) -> object:
            outcomes = genuine(peer, *call)  # type: ignore[arg-type]
            if outcomes is not None:
                seen.append(threading.get_ident())
            return outcomes

        monkeypatch.setattr(UcxPeer, "_drive_job", noted)
        return seen

    def begin(self, peer: UcxPeer, length: int = 100_000, timeout_s: float = LIMIT_S) -> PeerRead:
        into = memoryview(bytearray(length))
        return peer.read(GENERATION, [PageRange(0, length)], [into], timeout_s)

    @pytest.fixture
    def quiet(self, peer: UcxPeer, monkeypatch: pytest.MonkeyPatch) -> UcxPeer:
        """A peer whose thread does not drive, and leaves a lone read to its taker for long."""
        monkeypatch.setattr(ucx_peer, "LOOK_S", 1.0)
        fetch(peer, [PageRange(0, 10)])
        until(lambda: not peer._drive.locked() and peer._turn_due > time.monotonic() + 0.05)
        return peer

    def test_the_taker_of_a_lone_read_moves_its_bytes(
        self, peer: UcxPeer, drivers: list[int]
    ) -> None:
        for _ in range(50):
            outcomes, buffers, _ = fetch(peer, [PageRange(5, 1 << 20)])
            assert outcomes == [PageOutcome.OK] and buffers[0] == content()[5 : 5 + (1 << 20)]
        # Now and then the thread's look comes first.
        assert set(drivers) == {threading.get_ident()} and len(drivers) > 10
        assert not peer._takers

    def test_p4_a_read_that_nobody_takes_ends_all_the_same(
        self, peer: UcxPeer, drivers: list[int]
    ) -> None:
        for _ in range(3):
            ended = threading.Event()
            read = self.begin(peer)
            read.add_done_callback(ended.set)
            assert ended.wait(LIMIT_S) and read.take(0.0) == [PageOutcome.OK]
        assert not drivers

    def test_h1_a_read_that_nobody_takes_ends_at_its_deadline(
        self, peer: UcxPeer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        fetch(peer, [PageRange(0, 10)])
        monkeypatch.setattr(UcxServer, "_begin", lambda *call: None)
        ended = threading.Event()
        read = self.begin(peer, timeout_s=SHORT_S)
        read.add_done_callback(ended.set)
        assert ended.wait(LIMIT_S) and "deadline" in str(read.error)

    def test_h1_a_taker_that_waits_no_longer_leaves_the_read_to_the_thread(
        self, peer: UcxPeer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        held: list[tuple[UcxServer, ReadRequest, float]] = []
        genuine = UcxServer._begin
        monkeypatch.setattr(UcxServer, "_begin", lambda *call: held.append(call))
        read = self.begin(peer)
        with pytest.raises(TierIOError, match="not done"):
            read.take(0.05)
        peer.check()
        until(lambda: held)
        # Asked for once more, now that the server answers.
        monkeypatch.setattr(UcxServer, "_begin", genuine)
        second = self.begin(peer)
        assert second.take(LIMIT_S) == [PageOutcome.OK] and not read.done
        peer.close()
        assert read.take(LIMIT_S) == [PageOutcome.FAILED]

    def test_another_read_ends_a_takers_drive(
        self, quiet: UcxPeer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        peer, held = quiet, list[ReadRequest]()
        genuine = UcxServer._begin

        def in_pairs(server: UcxServer, request: ReadRequest, now: float) -> None:
            held.append(request)
            if len(held) == 2:
                for waiting in held:
                    genuine(server, waiting, now)

        monkeypatch.setattr(UcxServer, "_begin", in_pairs)
        first = self.begin(peer)
        came: list[PageOutcome] = []
        taker = threading.Thread(target=lambda: came.extend(first.take(LIMIT_S)))
        taker.start()
        until(lambda: peer._driven)
        second = self.begin(peer)
        assert second.take(LIMIT_S) == [PageOutcome.OK]
        taker.join(LIMIT_S)
        assert came == [PageOutcome.OK]
        peer.check()

    def test_h1_closing_sends_a_taker_away(
        self, quiet: UcxPeer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        peer = quiet
        monkeypatch.setattr(UcxServer, "_begin", lambda *call: None)
        read = self.begin(peer)
        came: list[PageOutcome] = []
        taker = threading.Thread(target=lambda: came.extend(read.take(LIMIT_S)))
        taker.start()
        until(lambda: peer._driven)
        peer.close()
        assert read.done and not peer.running
        taker.join(LIMIT_S)
        assert came == [PageOutcome.FAILED]

    def test_h2_an_exception_in_a_taker_costs_a_lane_and_no_read(
        self, quiet: UcxPeer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        peer = quiet
        genuine, calls = Lane.collect, []

        def once(lane: Lane, *call: object) -> object:
            calls.append(threading.get_ident())
            if len(calls) == 1:
                raise RuntimeError("made by the test")
            return genuine(lane, *call)  # type: ignore[arg-type]

        monkeypatch.setattr(Lane, "collect", once)
        outcomes, buffers, _ = fetch(peer, [PageRange(1, 5000)])
        assert outcomes == [PageOutcome.OK] and buffers[0] == content()[1:5001]
        assert peer.stats().worker_restarts == 1 and calls[0] == threading.get_ident()

    def test_a_callback_that_runs_in_a_taker_may_read_and_close(self, peer: UcxPeer) -> None:
        more: list[PeerRead] = []
        read = self.begin(peer)
        read.add_done_callback(lambda: more.append(self.begin(peer)))
        assert read.take(LIMIT_S) == [PageOutcome.OK]
        until(lambda: more)
        assert more[0].take(LIMIT_S) == [PageOutcome.OK]
        last = self.begin(peer)
        last.add_done_callback(peer.close)
        last.take(LIMIT_S)
        until(lambda: not peer.running)

    def test_takers_of_many_threads_and_reads_nobody_takes(self, serving: UcxPlane) -> None:
        plane = open_plane(TransportLimits())
        peer = plane.connect(serving.offer(), "serving", LIMIT_S)
        print(f"seed {SEED}")
        wrong: list[object] = []

        def run(seed: int) -> None:
            rng = random.Random(seed)
            for _ in range(40):
                reads = [
                    self.begin(peer, rng.choice([10, 50_000])) for _ in range(rng.choice([1, 1, 3]))
                ]
                for read in reads[: rng.randrange(4)]:
                    outcome = read.take(LIMIT_S)
                    wrong.extend(o for o in outcome if o is not PageOutcome.OK)
                peer.check()

        threads = [threading.Thread(target=run, args=(SEED + at,)) for at in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LIMIT_S)
        until(lambda: peer.stats().open_reads == 0)
        assert not wrong and peer.stats().pages_failed == 0
        plane.close()

    def test_reads_refused_on_this_side_say_so(
        self, serving: UcxPlane, peer: UcxPeer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        into = memoryview(bytearray(10))
        outside = peer.read(GENERATION, [PageRange(MEMORY_BYTES, 10)], [into], LIMIT_S)
        assert outside.refused and outside.done
        monkeypatch.setattr(UcxServer, "_begin", lambda *call: None)
        reads = [self.begin(peer, timeout_s=SHORT_S) for _ in range(LIMITS.queued_reads + 1)]
        assert [read.refused for read in reads] == [False] * LIMITS.queued_reads + [True]
        for read in reads:
            read.take(LIMIT_S)
        assert not reads[0].refused, "the peer was asked, and did not answer"
        peer.close()
        assert self.begin(peer).refused
