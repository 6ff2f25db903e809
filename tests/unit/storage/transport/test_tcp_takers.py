"""Who waits for a read may do the transfer: whoever does it, the read ends once and in time."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from tests.unit.storage.transport.scripted import (
    LIMIT_S,
    next_request,
    page,
    scripted,
    wait_end,
)
from tests.unit.storage.transport.test_tcp_faults import PAGES, PAYLOADS, connect
from tests.unit.storage.transport.transport_conformance import UNTOUCHED, begin, destinations
from tierkv.storage.errors import TierIOError
from tierkv.storage.transport.base import PageOutcome, PageRange, PeerRead, TransportLimits
from tierkv.storage.transport.stream import Stream
from tierkv.storage.transport.tcp_jobs import PIECE_BYTES
from tierkv.storage.transport.tcp_peer import TcpPeer
from tierkv.storage.transport.tcp_reads import Reads

OK, FAILED = PageOutcome.OK, PageOutcome.FAILED


@pytest.fixture
def no_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """No worker threads: what is read is read by who takes it."""
    monkeypatch.setattr(Reads, "_start_workers", lambda reads: None)


def serve_first_page(stream: Stream) -> None:
    while True:
        stream.send([page(next_request(stream), PAYLOADS[0])], LIMIT_S)


def read_first(peer: TcpPeer, timeout_s: float = LIMIT_S) -> tuple[PeerRead, bytearray]:
    buffer = bytearray([UNTOUCHED]) * 4096
    return peer.read(1, [PAGES[0]], [memoryview(buffer)], timeout_s), buffer


def settled(peer: TcpPeer, connections: int) -> None:
    """Nothing is left of any read, and no connection leaked."""
    peer.check()
    stats = peer.stats()
    assert (stats.open_reads, stats.worker_restarts) == (0, 0)
    assert stats.connections == connections


@pytest.mark.usefixtures("no_workers")
def test_a_taker_reads_without_a_worker() -> None:
    with scripted(serve_first_page) as address, connect(address) as peer:
        for _ in range(3):
            read, buffer = read_first(peer)
            told: list[threading.Thread] = []
            read.add_done_callback(lambda told=told: told.append(threading.current_thread()))  # type: ignore[misc]
            assert not read.done
            assert read.take(LIMIT_S) == read.take(0.0) == [OK]
            assert buffer == PAYLOADS[0]
            assert told == [threading.current_thread()]
            settled(peer, connections=2)


@pytest.mark.usefixtures("no_workers")
def test_h1_a_taker_is_let_go_at_the_deadline() -> None:
    with scripted(wait_end) as address, connect(address) as peer:
        read, buffer = read_first(peer, 0.2)
        assert read.take(LIMIT_S) == [FAILED]
        assert read.error is not None and "deadline passed after 0 of 16 bytes" in read.error
        assert set(buffer) == {UNTOUCHED}
        settled(peer, connections=1)


@pytest.mark.usefixtures("no_workers")
def test_a_taker_with_less_time_than_the_read_leaves_it_alone() -> None:
    with scripted(serve_first_page) as address, connect(address) as peer:
        read, buffer = read_first(peer)
        for timeout_s in (0.0, 0.01):
            with pytest.raises(TierIOError, match=f"not done after {timeout_s:g} s, 1 pages left"):
                read.take(timeout_s)
        assert not read.done and set(buffer) == {UNTOUCHED}
        assert read.take(LIMIT_S) == [OK] and buffer == PAYLOADS[0]


def test_a_taker_gives_up_and_a_worker_reads_on() -> None:
    answer = threading.Event()

    def script(stream: Stream) -> None:
        request = next_request(stream)
        assert answer.wait(LIMIT_S)
        stream.send([page(request, PAYLOADS[0])], LIMIT_S)
        wait_end(stream)

    with scripted(script) as address, connect(address) as peer:
        read, buffer = read_first(peer)
        with pytest.raises(TierIOError, match="1 pages left"):
            read.take(0.05)
        done = threading.Event()
        read.add_done_callback(done.set)
        assert not read.done
        answer.set()
        assert done.wait(LIMIT_S)
        assert read.take(0.0) == [OK] and buffer == PAYLOADS[0]
        settled(peer, connections=2)


def test_two_takers_get_the_same_answer() -> None:
    takers = 4
    together = threading.Barrier(takers)
    wrong: list[object] = []

    def take(read: PeerRead) -> None:
        together.wait(LIMIT_S)
        outcomes = read.take(LIMIT_S)
        if outcomes != [OK]:
            wrong.append((outcomes, read.error))

    with scripted(serve_first_page) as address, connect(address) as peer:
        for _ in range(20):
            read, buffer = read_first(peer)
            threads = [threading.Thread(target=take, args=(read,)) for _ in range(takers)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(LIMIT_S)
            assert not wrong and buffer == PAYLOADS[0]
            settled(peer, connections=2)
        assert peer.stats().pages_ok == 20


@pytest.mark.usefixtures("no_workers")
def test_takers_begin_reads_in_the_order_they_were_asked() -> None:
    with scripted(serve_first_page) as address, connect(address) as peer:
        first, _ = read_first(peer)
        second, _ = read_first(peer)
        waiting = threading.Thread(target=second.take, args=(LIMIT_S,))
        with pytest.raises(TierIOError):
            # Not its turn, and no worker to wait for.
            second.take(0.01)
        assert not second.done
        assert first.take(LIMIT_S) == [OK] and not second.done
        waiting.start()
        waiting.join(LIMIT_S)
        assert second.take(0.0) == [OK]
        settled(peer, connections=2)


def test_w6_one_piece_of_a_read_fails_and_the_other_arrives() -> None:
    """A read cut over two connections: pages of the one that breaks have FAILED, no others."""
    length = PIECE_BYTES // 2
    gate = threading.Barrier(2)

    def script(stream: Stream) -> None:
        request = next_request(stream)
        whole = page(request, bytes([7]) * length)
        if gate.wait(LIMIT_S):
            stream.send([whole, whole], LIMIT_S)
            wait_end(stream)
        else:
            stream.send([whole, whole[:-1]], LIMIT_S)

    limits = TransportLimits(read_connections=2)
    with scripted(script) as address, connect(address, limits) as peer:
        ranges = [PageRange(0, length)] * 4
        buffers = destinations(ranges)
        read = peer.read(1, ranges, [memoryview(buffer) for buffer in buffers], LIMIT_S)
        outcomes = read.take(LIMIT_S)
        assert sorted(outcome.value for outcome in outcomes) == ["failed", "ok", "ok", "ok"]
        assert outcomes.index(FAILED) in (1, 3)
        for outcome, buffer in zip(outcomes, buffers, strict=True):
            assert outcome is FAILED or buffer == bytes([7]) * length
        settled(peer, connections=2)


@pytest.mark.usefixtures("no_workers")
def test_closing_ends_what_a_taker_reads() -> None:
    asked = threading.Event()

    def script(stream: Stream) -> None:
        next_request(stream)
        asked.set()
        wait_end(stream)

    with scripted(script) as address, connect(address) as peer:
        read, _ = read_first(peer)
        queued = begin(peer, PAGES)
        outcomes: list[PageOutcome] = []
        taker = threading.Thread(target=lambda: outcomes.extend(read.take(LIMIT_S)))
        taker.start()
        assert asked.wait(LIMIT_S)
        peer.check()
        peer.close()
        assert read.done, "after close() nothing is written any more"
        taker.join(LIMIT_S)
        assert outcomes == [FAILED] and queued.take(0.0) == [FAILED] * 3
        settled(peer, connections=0)


@pytest.mark.usefixtures("no_workers")
def test_h2_a_taker_that_is_interrupted_ends_the_read(monkeypatch: pytest.MonkeyPatch) -> None:
    with scripted(serve_first_page) as address, connect(address) as peer:

        def interrupt(*_: object) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patched:
            patched.setattr(Reads, "_receive", interrupt)
            read, _ = read_first(peer)
            with pytest.raises(KeyboardInterrupt):
                read.take(LIMIT_S)
        assert read.done and read.take(0.0) == [FAILED]
        settled(peer, connections=1)
        again, buffer = read_first(peer)
        assert again.take(LIMIT_S) == [OK] and buffer == PAYLOADS[0]
        settled(peer, connections=2)


@pytest.mark.usefixtures("no_workers")
def test_h1_what_was_asked_and_nobody_takes_ends_at_its_deadline() -> None:
    asked = threading.Semaphore(0)

    def script(stream: Stream) -> None:
        stream.send([page(next_request(stream), PAYLOADS[0])], LIMIT_S)
        request = next_request(stream)
        asked.release()
        stream.send([page(request, PAYLOADS[1])], LIMIT_S)
        wait_end(stream)

    with scripted(script) as address, connect(address) as peer:
        assert read_first(peer)[0].take(LIMIT_S) == [OK]
        read, buffer = read_first(peer, 0.2)
        assert asked.acquire(timeout=LIMIT_S), "the peer is asked before anybody waits"
        peer.check()
        done = threading.Event()
        read.add_done_callback(done.set)
        assert done.wait(LIMIT_S)
        assert read.take(0.0) == [FAILED] and set(buffer) == {UNTOUCHED}
        # The answer that came is thrown away with its connection.
        settled(peer, connections=1)
        again, buffer = read_first(peer)
        assert again.take(LIMIT_S) == [OK] and buffer == PAYLOADS[0]


@pytest.mark.usefixtures("no_workers")
def test_closing_ends_what_was_asked_and_not_begun() -> None:
    with scripted(serve_first_page) as address, connect(address) as peer:
        assert read_first(peer)[0].take(LIMIT_S) == [OK]
        read, buffer = read_first(peer)
        peer.check()
        peer.close()
        assert read.done and read.take(0.0) == [FAILED]
        assert set(buffer) == {UNTOUCHED}
        settled(peer, connections=0)


def test_a_read_that_nobody_waits_for_is_read_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also when a worker was about to look anyway, and so was not woken."""
    ended = threading.Semaphore(0)
    end = Reads._end

    def tell(reads: Reads, *arguments: Any) -> None:
        end(reads, *arguments)
        ended.release()

    monkeypatch.setattr(Reads, "_end", tell)
    with scripted(serve_first_page) as address, connect(address) as peer:
        for _ in range(10):
            taken, _ = read_first(peer)
            assert taken.take(LIMIT_S) == [OK] and ended.acquire(timeout=LIMIT_S)
            read, buffer = read_first(peer)
            assert ended.acquire(timeout=LIMIT_S)
            assert read.take(0.0) == [OK] and buffer == PAYLOADS[0]
            settled(peer, connections=2)
