"""Peers that hang, lie or die: a page is whole or it has failed, and nothing waits for ever."""

from __future__ import annotations

import random
import re
import threading
from collections.abc import Callable

import pytest

from tests.unit.storage.transport.scripted import (
    GEOMETRY,
    KEY,
    LIMIT_S,
    next_request,
    page,
    scripted,
    wait_end,
)
from tests.unit.storage.transport.transport_conformance import UNTOUCHED, begin, destinations, fetch
from tierkv.storage.errors import TierIOError
from tierkv.storage.transport.base import PageOutcome, PageRange, TransportLimits
from tierkv.storage.transport.stream import Stream
from tierkv.storage.transport.tcp import TcpTransport
from tierkv.storage.transport.tcp_jobs import PIECE_BYTES
from tierkv.storage.transport.tcp_peer import TcpPeer
from tierkv.storage.transport.wire import Kind, pack_error, pack_frame

OK, GONE, FAILED = PageOutcome.OK, PageOutcome.GONE, PageOutcome.FAILED
LIMITS = TransportLimits(queued_reads=3, read_connections=1, message_connections=1)
PAGES = [GEOMETRY.payload(slot) for slot in range(3)]
PAYLOADS = [random.Random(slot).randbytes(GEOMETRY.page_bytes) for slot in range(3)]
FORGED_SEED = 7


def connect(address: tuple[str, int], limits: TransportLimits = LIMITS) -> TcpPeer:
    """A peer of a transport that is only needed to connect."""
    return TcpTransport(KEY, limits=limits).connect(*address, LIMIT_S)


def test_h1_a_peer_that_accepts_and_never_greets() -> None:
    with scripted(wait_end, greets=False) as address:
        with pytest.raises(TierIOError, match="deadline passed"):
            TcpTransport(KEY).connect(*address, 0.2)


def test_h4_a_peer_that_takes_a_read_and_never_answers() -> None:
    with scripted(wait_end) as address, connect(address) as peer:
        buffers = destinations(PAGES)
        read = peer.read(1, PAGES, [memoryview(buffer) for buffer in buffers], 0.2)
        assert read.take(LIMIT_S) == [FAILED] * 3
        assert read.error is not None and "deadline passed" in read.error
        assert buffers == destinations(PAGES)
        peer.check()


def test_h1_queued_reads_end_at_their_deadline_without_a_worker() -> None:
    with scripted(wait_end) as address, connect(address) as peer:
        stuck = begin(peer, PAGES)
        queued = [peer.read(1, [PAGES[0]], [memoryview(bytearray(4096))], 0.2) for _ in range(2)]
        peer.check()
        for read in queued:
            assert read.take(LIMIT_S) == [FAILED]
            assert read.error is not None and "before a connection was free" in read.error
        assert not stuck.done
        peer.check()
        peer.close()
        assert stuck.take(LIMIT_S) == [FAILED] * 3


def test_take_returns_before_the_read_is_done() -> None:
    with scripted(wait_end) as address, connect(address) as peer:
        read = begin(peer, PAGES)
        with pytest.raises(TierIOError, match="3 pages left"):
            read.take(0.01)
        assert not read.done


def test_c4_reads_above_the_bound_are_refused_and_counted() -> None:
    with scripted(wait_end) as address, connect(address) as peer:
        reads = [begin(peer, PAGES[:1]) for _ in range(LIMITS.queued_reads)]
        refused = begin(peer, PAGES)
        assert refused.done and refused.take(0.0) == [FAILED] * 3
        assert refused.error is not None and "no more are taken" in refused.error
        assert (peer.stats().rejected_reads, peer.stats().pages_failed) == (1, 3)
        peer.check()
        peer.close()
        assert [read.take(LIMIT_S) for read in reads] == [[FAILED]] * len(reads)
        assert peer.stats().open_reads == 0


@pytest.mark.parametrize("cut", [0, 1, 15, 16, 17, 4096, 4111, 4112 + 16, 4112 + 4000])
def test_w6_a_peer_that_closes_in_the_middle(cut: int) -> None:
    def script(stream: Stream) -> None:
        request = next_request(stream)
        answer = b"".join(page(request, payload) for payload in PAYLOADS)
        stream.send([answer[:cut]], LIMIT_S)

    with scripted(script) as address, connect(address) as peer:
        outcomes, buffers = fetch(peer, PAGES)
        whole = cut // 4112
        assert outcomes == [OK] * whole + [FAILED] * (3 - whole)
        assert [bytes(buffer) for buffer in buffers[:whole]] == PAYLOADS[:whole]
        stats = peer.stats()
        assert (stats.pages_ok, stats.bytes_read) == (whole, whole * 4096)


@pytest.mark.parametrize(
    ("forge", "said"),
    [
        (lambda request: page(request, PAYLOADS[0], 4095), "expected a PAGE of 4096 to 4096"),
        (lambda request: page(request, PAYLOADS[0], 4097), "got 4097"),
        (lambda request: page(request, b"", 0xFFFFFFFF), "got 4294967295"),
        (lambda request: page(request, b"", 0), "got 0"),
        (lambda request: page(request + 1, PAYLOADS[0]), "expected pages of"),
        (lambda request: page(request, PAYLOADS[0], kind=Kind.ANSWER), "got kind 9"),
        (lambda request: page(request, b"x", kind=Kind.GONE), "expected a GONE of 0 to 0"),
        (lambda request: bytes([0, 0, 0, 0, 99]) + bytes(11), "got kind 99"),
        (lambda request: pack_error(request, "full\nof\x1b[31m it"), r"full of\?\[31m it"),
    ],
)
def test_w7_answers_that_lie(forge: Callable[[int], bytes], said: str) -> None:
    def script(stream: Stream) -> None:
        stream.send([forge(next_request(stream))], LIMIT_S)
        wait_end(stream)

    with scripted(script) as address, connect(address) as peer:
        buffers = destinations(PAGES)
        read = peer.read(1, PAGES, [memoryview(buffer) for buffer in buffers], LIMIT_S)
        assert read.take(LIMIT_S) == [FAILED] * 3
        assert read.error is not None
        assert re.search(said, read.error), read.error
        assert all(set(buffer) == {UNTOUCHED} for buffer in buffers)


def test_gone_pages_between_good_ones() -> None:
    def script(stream: Stream) -> None:
        request = next_request(stream)
        gone = page(request, b"", kind=Kind.GONE)
        stream.send([page(request, PAYLOADS[0]), gone, page(request, PAYLOADS[2])], LIMIT_S)
        wait_end(stream)

    with scripted(script) as address, connect(address) as peer:
        assert fetch(peer, PAGES)[0] == [OK, GONE, OK]


def test_a_failed_connection_is_replaced() -> None:
    calls: list[int] = []

    def script(stream: Stream) -> None:
        request = next_request(stream)
        calls.append(request)
        if len(calls) == 1:
            stream.send([page(request, PAYLOADS[0])[:100]], LIMIT_S)
        else:
            stream.send([page(request, PAYLOADS[0])], LIMIT_S)
            wait_end(stream)

    with scripted(script) as address, connect(address) as peer:
        assert fetch(peer, PAGES[:1])[0] == [FAILED]
        assert fetch(peer, PAGES[:1])[0] == [OK]


@pytest.mark.parametrize(
    "forge",
    [
        lambda request: pack_frame(Kind.ANSWER, request + 1, b"x"),
        lambda request: pack_frame(Kind.PAGE, request, b"x"),
        lambda request: pack_frame(Kind.ANSWER, request, b"xyz")[:17],
        lambda request: page(request, b"", 1 << 31, Kind.ANSWER),
    ],
)
def test_messages_answered_wrongly(forge: Callable[[int], bytes]) -> None:
    def script(stream: Stream) -> None:
        stream.send([forge(next_request(stream))], LIMIT_S)

    with scripted(script) as address, connect(address) as peer:
        for _ in range(2):
            with pytest.raises(TierIOError, match="message to peer"):
                peer.message(b"?", LIMIT_S)
        assert peer.stats().messages == 0
        peer.check()


def test_random_garbage_is_never_a_page() -> None:
    print(f"seed={FORGED_SEED}")
    rng = random.Random(FORGED_SEED)

    def script(stream: Stream) -> None:
        request = next_request(stream)
        data = bytearray(b"".join(page(request, payload) for payload in PAYLOADS))
        # Anywhere in the first header: everything after it would be shifted or unwanted.
        data[rng.randrange(5)] ^= 1 << rng.randrange(8)
        stream.send([data], LIMIT_S)
        wait_end(stream)

    with scripted(script) as address, connect(address) as peer:
        for _ in range(50):
            assert fetch(peer, PAGES)[0] == [FAILED] * 3


def test_large_reads_use_several_connections() -> None:
    gate = threading.Barrier(2)
    length = PIECE_BYTES // 2

    def script(stream: Stream) -> None:
        while True:
            request = next_request(stream)
            # Passes only when both halves of the read are asked for at once.
            gate.wait(LIMIT_S)
            stream.send([page(request, bytes([7]) * length)] * 2, LIMIT_S)

    limits = TransportLimits(read_connections=2)
    with scripted(script) as address, connect(address, limits) as peer:
        outcomes, buffers = fetch(peer, [PageRange(0, length)] * 4)
        assert outcomes == [OK] * 4
        assert all(buffer == bytes([7]) * length for buffer in buffers)
        assert peer.stats().connections == 3, "two for reads, one for messages"


def test_h1_a_callback_that_blocks_makes_no_read_late() -> None:
    entered, leave = threading.Event(), threading.Event()

    def script(stream: Stream) -> None:
        go.wait(LIMIT_S)
        stream.send([page(next_request(stream), PAYLOADS[0])], LIMIT_S)
        wait_end(stream)

    def block() -> None:
        entered.set()
        leave.wait(LIMIT_S)

    go = threading.Event()
    with scripted(script) as address, connect(address) as peer:
        first = begin(peer, PAGES[:1])
        first.add_done_callback(block)
        go.set()
        assert entered.wait(LIMIT_S)
        late = peer.read(1, [PAGES[0]], [memoryview(bytearray(4096))], 0.2)
        ended = threading.Event()
        late.add_done_callback(ended.set)
        assert ended.wait(LIMIT_S)
        assert late.take(0.0) == [FAILED]
        assert late.error is not None and "before a worker was free" in late.error
        # Whoever waits for a read needs no worker.
        assert fetch(peer, PAGES[:1])[0] == [OK]
        assert not leave.is_set()
        peer.check()
        leave.set()


def test_p4_callbacks_may_close_the_peer() -> None:
    with scripted(wait_end) as address, connect(address) as peer:
        ended = threading.Event()
        read = peer.read(1, [PAGES[0]], [memoryview(bytearray(4096))], 0.2)
        read.add_done_callback(peer.close)
        read.add_done_callback(ended.set)
        assert ended.wait(LIMIT_S)
        peer.check()
