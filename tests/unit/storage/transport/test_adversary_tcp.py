"""What a buggy peer, a careless caller or the moment may do to a tcp peer."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from typing import Any

import pytest

from tests.unit.storage.transport.scripted import (
    KEY,
    LIMIT_S,
    far,
    next_request,
    page,
    scripted,
    wait_end,
)
from tests.unit.storage.transport.test_tcp_faults import PAGES, PAYLOADS, connect
from tests.unit.storage.transport.test_tcp_takers import no_workers, read_first, serve_first_page
from tests.unit.storage.transport.transport_conformance import UNTOUCHED, begin, echo
from tierkv.storage.errors import TierIOError
from tierkv.storage.transport import tcp_reads
from tierkv.storage.transport.base import PageOutcome, PageRange, TransportLimits
from tierkv.storage.transport.stream import Stream
from tierkv.storage.transport.tcp import TcpTransport
from tierkv.storage.transport.tcp_connections import Connections
from tierkv.storage.transport.tcp_jobs import Job
from tierkv.storage.transport.tcp_reads import Reads
from tierkv.storage.transport.tcp_server import Exports
from tierkv.storage.transport.wire import Kind, pack_frame, pack_read

__all__ = ["no_workers"]
OK, FAILED = PageOutcome.OK, PageOutcome.FAILED


def test_h1_a_forked_child_keeps_no_connection_open() -> None:
    """A child has the descriptors too, so closing them alone would tell the peer nothing."""
    ended = threading.Event()

    def script(stream: Stream) -> None:
        next_request(stream)
        wait_end(stream)
        ended.set()

    with scripted(script) as address, connect(address) as peer:
        read = peer.read(1, [PAGES[0]], [memoryview(bytearray(4096))], 0.5)
        asked = threading.Event()
        until, go = os.pipe()
        while peer.stats().connections < 2:
            asked.wait(0.001)
        child = os.fork()
        if child == 0:
            os.close(go)
            os.read(until, 1)
            os._exit(0)
        try:
            assert read.take(LIMIT_S) == [FAILED]
            assert ended.wait(5.0), "the peer was not told"
        finally:
            os.close(go)
            os.close(until)
            os.waitpid(child, 0)


def test_w7_an_answer_to_nothing_is_no_answer() -> None:
    def script(stream: Stream) -> None:
        next_request(stream)
        stream.send([pack_frame(Kind.ANSWER, 0, b"another's")], LIMIT_S)
        wait_end(stream)

    with scripted(script) as address, connect(address) as peer:
        with pytest.raises(TierIOError, match="expected the answer of"):
            peer.message(b"ask", LIMIT_S)
        assert peer.stats().connections == 0
        peer.check()


def test_h4_what_a_restarted_peer_is_asked_has_failed_and_was_not_refused() -> None:
    """Refused would say that the reason is on this side."""
    with TcpTransport(KEY) as client:
        first = TcpTransport(KEY)
        address = first.listen("127.0.0.1", 0, echo)
        peer = client.connect(*address, LIMIT_S)
        first.close()
        with TcpTransport(KEY) as second:
            second.listen(*address, echo)
            for _ in range(3):
                read = begin(peer, PAGES)
                assert read.take(LIMIT_S) == [FAILED] * 3 and not read.refused
                assert read.error is not None
            assert "it was restarted" in read.error
        peer.check()
        assert peer.stats().pages_failed == 9
        peer.close()
        assert begin(peer, PAGES).refused, "that is this side's doing"


@pytest.mark.usefixtures("no_workers")
def test_the_invariants_hold_while_an_asked_read_expires(monkeypatch: pytest.MonkeyPatch) -> None:
    drop = Reads._drop
    wrong: list[BaseException] = []

    def checked(reads: Reads, job: Job, error: str) -> None:
        try:
            reads.check()
        except AssertionError as failure:
            wrong.append(failure)
        drop(reads, job, error)

    monkeypatch.setattr(Reads, "_drop", checked)
    with scripted(serve_first_page) as address, connect(address) as peer:
        assert read_first(peer)[0].take(LIMIT_S) == [OK]
        read, _ = read_first(peer, 0.05)
        done = threading.Event()
        read.add_done_callback(done.set)
        assert done.wait(LIMIT_S)
        assert read_first(peer)[0].take(LIMIT_S) == [OK]
        read_first(peer)
        peer.close()
    assert not wrong


def test_a_message_counts_as_out_while_its_connection_is_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Otherwise another would open one too many."""
    out: list[int] = []
    discard = Connections.discard

    def script(stream: Stream) -> None:
        next_request(stream)

    with scripted(script) as address, connect(address) as peer:

        def counted(connections: Connections, stream: Stream | None) -> None:
            if stream is not None:
                out.append(peer._out)
            discard(connections, stream)

        with monkeypatch.context() as patched:
            patched.setattr(Connections, "discard", counted)
            with pytest.raises(TierIOError):
                peer.message(b"ask", LIMIT_S)
        assert out == [1]


def test_h1_callbacks_that_close_at_once_do_not_wait_for_each_other(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tcp_reads, "STOP_S", 0.2)
    limits = TransportLimits(read_connections=2, handshake_s=0.2)
    both = threading.Barrier(3)
    closed = threading.Semaphore(0)

    def script(stream: Stream) -> None:
        request = next_request(stream)
        both.wait(LIMIT_S)
        stream.send([page(request, PAYLOADS[0])], LIMIT_S)
        wait_end(stream)

    with scripted(script) as address, connect(address, limits) as peer:
        together = threading.Barrier(2)

        def close() -> None:
            together.wait(LIMIT_S)
            peer.close()
            closed.release()

        for _ in range(2):
            begin(peer, PAGES[:1]).add_done_callback(close)
        both.wait(LIMIT_S)
        for _ in range(2):
            assert closed.acquire(timeout=LIMIT_S)
        peer.check()
    errors = [line for line in caplog.records if line.levelno >= logging.ERROR]
    assert not errors, errors


@pytest.mark.usefixtures("no_workers")
def test_h1_a_callback_of_the_watch_and_one_of_a_taker_close_at_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tcp_reads, "STOP_S", 0.2)
    together = threading.Barrier(2)
    closed = threading.Semaphore(0)
    gate = threading.Event()

    def script(stream: Stream) -> None:
        request = next_request(stream)
        gate.wait(LIMIT_S)
        stream.send([page(request, PAYLOADS[0])], LIMIT_S)
        wait_end(stream)

    with scripted(script) as address, connect(address) as peer:

        def close() -> None:
            gate.set()
            together.wait(LIMIT_S)
            peer.close()
            closed.release()

        read, _ = read_first(peer)
        read.add_done_callback(close)
        taker = threading.Thread(target=read.take, args=(LIMIT_S,))
        taker.start()
        late, buffer = read_first(peer, 0.2)
        late.add_done_callback(close)
        for _ in range(2):
            assert closed.acquire(timeout=LIMIT_S)
        taker.join(LIMIT_S)
        assert late.take(0.0) == [FAILED] and set(buffer) == {UNTOUCHED}
    assert not [line for line in caplog.records if line.levelno >= logging.ERROR]


def test_w5_a_trickle_ends_at_the_deadline() -> None:
    """One byte now and then is no reason to wait longer, whoever receives."""

    def script(stream: Stream) -> None:
        whole = page(next_request(stream), PAYLOADS[0])
        for at in range(len(whole)):
            stream.send([whole[at : at + 1]], LIMIT_S)
            threading.Event().wait(0.02)

    with scripted(script) as address, connect(address) as peer:
        for _ in range(2):
            read, _ = read_first(peer, 0.2)
            assert read.take(LIMIT_S) == [FAILED]
            assert read.error is not None and "deadline passed" in read.error
        peer.check()
        with pytest.raises(TierIOError, match="deadline passed"):
            peer.message(b"ask", 0.2)


def test_w5_an_answer_that_comes_too_late_is_no_later_reads_answer() -> None:
    """Even when the peer numbers it as the later one's."""
    first: list[Stream] = []

    def script(stream: Stream) -> None:
        request = next_request(stream)
        first.append(stream)
        if len(first) == 1:
            wait_end(stream)
            return
        stale = page(request, PAYLOADS[1])
        # On the connection that was abandoned: nobody may be reading there.
        with contextlib.suppress(TierIOError):
            first[0].send([stale], LIMIT_S)
        stream.send([page(request, PAYLOADS[0])], LIMIT_S)
        wait_end(stream)

    with scripted(script) as address, connect(address) as peer:
        abandoned, untouched = read_first(peer, 0.2)
        assert abandoned.take(LIMIT_S) == [FAILED]
        read, buffer = read_first(peer)
        assert read.take(LIMIT_S) == [OK] and buffer == PAYLOADS[0]
        assert set(untouched) == {UNTOUCHED}


def test_read_never_waits_for_a_peer_that_takes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its question does not fit: the read is asked by who begins it, and ends in time."""
    stop = threading.Event()

    def script(stream: Stream) -> None:
        stream.send([page(next_request(stream), PAYLOADS[0])], LIMIT_S)
        stop.wait(LIMIT_S)

    limits = TransportLimits(read_connections=1, read_pages=1 << 19)
    with scripted(script) as address, connect(address, limits) as peer:
        assert read_first(peer)[0].take(LIMIT_S) == [OK]
        blocking: list[Any] = []
        send = Stream.send
        monkeypatch.setattr(Stream, "send", lambda *a: blocking.append(a) or send(*a))
        count = 1 << 19
        view = memoryview(bytearray(1))
        read = peer.read(1, [PAGES[0]._replace(length=1)] * count, [view] * count, 0.5)
        assert not blocking
        assert read.take(LIMIT_S) == [FAILED] * count
        peer.check()
        stop.set()


def test_memory_that_was_unregistered_is_held_by_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also while the thread that was sending it is on its way out: its owner may unmap it now."""
    memory = bytearray(64 << 20)
    left, resized = threading.Event(), threading.Event()
    end = Exports.end

    def held(exports: Exports, stream: Stream) -> None:
        end(exports, stream)
        left.set()
        assert resized.wait(LIMIT_S)

    with TcpTransport(KEY) as server, TcpTransport(KEY) as client:
        view = memoryview(memory)
        generation = server.register(view)
        view.release()
        peer = client.connect(*server.listen("127.0.0.1", 0, echo), LIMIT_S)
        monkeypatch.setattr(Exports, "end", held)
        # Nobody receives what is asked for here.
        stream = peer._connections.usable(None, far())
        ranges = [PageRange(0, len(memory))]
        stream.send([pack_frame(Kind.READ, 1, pack_read(generation, ranges))], LIMIT_S)
        assert stream.wait_readable(LIMIT_S)
        server.unregister(generation)
        assert left.wait(LIMIT_S)
        try:
            memory.append(0)
        finally:
            resized.set()
            peer._connections.discard(stream)


@pytest.mark.parametrize("outcome", [OK, FAILED])
@pytest.mark.parametrize("takes", [True, False])
def test_destinations_of_a_read_that_is_done_are_held_by_nobody(
    outcome: PageOutcome, takes: bool
) -> None:
    def script(stream: Stream) -> None:
        whole = page(next_request(stream), PAYLOADS[0])
        stream.send([whole if outcome is OK else whole[:-1]], LIMIT_S)
        if outcome is OK:
            wait_end(stream)

    with scripted(script) as address, connect(address) as peer:
        buffer = bytearray(4096)
        wrong: list[BaseException] = []
        done = threading.Event()

        def resize() -> None:
            try:
                buffer.append(0)
            except BufferError as error:
                wrong.append(error)
            done.set()

        with memoryview(buffer) as view:
            read = peer.read(1, [PAGES[0]], [view], LIMIT_S)
        read.add_done_callback(resize)
        if takes:
            read.take(LIMIT_S)
        assert done.wait(LIMIT_S) and not wrong
        assert read.take(0.0) == [outcome]
