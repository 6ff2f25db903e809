"""A system that gives no more threads or descriptors costs reads and messages, never more."""

from __future__ import annotations

import os
import resource
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from tests.unit.storage.transport.scripted import KEY, LIMIT_S, scripted, wait_end
from tests.unit.storage.transport.test_nixl import nixl
from tests.unit.storage.transport.test_tcp_faults import PAGES, connect
from tests.unit.storage.transport.transport_conformance import (
    UNTOUCHED,
    begin,
    destinations,
    echo,
)
from tierkv.storage.errors import ConfigError, TierIOError
from tierkv.storage.transport import resolver
from tierkv.storage.transport.base import PageOutcome, PageRange
from tierkv.storage.transport.resolver import RESOLVING_MAX
from tierkv.storage.transport.tcp import TcpTransport

OK, FAILED = PageOutcome.OK, PageOutcome.FAILED
NoThreads = Callable[[str], None]


@contextmanager
def no_descriptors() -> Iterator[None]:
    """Whatever is open stays; nothing more can be opened."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.open("/dev/null", os.O_RDONLY)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.fixture
def no_threads(monkeypatch: pytest.MonkeyPatch) -> NoThreads:
    """Have the system give no threads whose name begins so."""
    start = threading.Thread.start

    def refuse(prefix: str) -> None:
        def refused(thread: threading.Thread) -> None:
            if thread.name.startswith(prefix):
                raise RuntimeError("can't start new thread")
            start(thread)

        monkeypatch.setattr(threading.Thread, "start", refused)

    return refuse


def test_no_descriptor_is_an_io_error_of_a_line() -> None:
    with scripted(wait_end) as address, connect(address) as peer:
        # The connection of messages is in use, so the next one would have to be opened.
        peer._connections.discard(peer._idle.pop())
        transport = TcpTransport(KEY)
        with no_descriptors():
            with pytest.raises(TierIOError, match="Too many open files"):
                peer.message(b"ask", LIMIT_S)
            with pytest.raises(TierIOError, match="Too many open files"):
                transport.connect(*address, LIMIT_S)
            with pytest.raises(ConfigError, match="Too many open files"):
                transport.listen("127.0.0.1", 0, echo)
            read = begin(peer, PAGES)
            assert read.take(LIMIT_S) == [FAILED] * 3
        assert peer.stats().worker_restarts == 0, "that is no bug of ours"
        peer.check()
        transport.listen("127.0.0.1", 0, echo)
        transport.close()


def test_h1_no_thread_for_deadlines_ends_the_read(no_threads: NoThreads) -> None:
    """read() neither raises nor leaves views to a job whose deadline nobody watches."""
    with scripted(wait_end) as address, connect(address) as peer:
        no_threads("tierkv-")
        buffer = bytearray([UNTOUCHED]) * 4096
        read = peer.read(1, [PAGES[0]], [memoryview(buffer)], LIMIT_S)
        assert read.done and read.take(0.0) == [FAILED]
        assert read.error is not None and "no thread" in read.error
        peer.check()
        assert peer.stats().open_reads == 0
        peer.close()
        assert set(buffer) == {UNTOUCHED}


def test_threads_that_come_back_watch_deadlines(
    no_threads: NoThreads, monkeypatch: pytest.MonkeyPatch
) -> None:
    with scripted(wait_end) as address, connect(address) as peer:
        with monkeypatch.context():
            no_threads("tierkv-")
            assert begin(peer, PAGES).take(0.0) == [FAILED] * 3
        monkeypatch.undo()
        no_threads("tierkv-read-")
        read = peer.read(1, [PAGES[0]], [memoryview(bytearray(4096))], 0.1)
        ended = threading.Event()
        read.add_done_callback(ended.set)
        assert ended.wait(LIMIT_S) and read.take(0.0) == [FAILED]


def test_no_thread_to_accept_is_a_config_error(no_threads: NoThreads) -> None:
    with TcpTransport(KEY) as transport:
        no_threads("tierkv-transport-accept")
        with pytest.raises(ConfigError, match="no thread"):
            transport.listen("127.0.0.1", 0, echo)


def test_no_thread_to_resolve_is_an_io_error(no_threads: NoThreads) -> None:
    with TcpTransport(KEY) as transport:
        no_threads("tierkv-resolve")
        with pytest.raises(TierIOError, match="no thread"):
            transport.connect("localhost", 1, LIMIT_S)


class StuckNames:
    """The system's resolver, stuck until it is let go."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.asked: list[str] = []

    def __call__(self, host: str, port: None, **options: int) -> list[object]:
        if options.get("flags") == socket.AI_NUMERICHOST:
            raise socket.gaierror(-2, "Name or service not known")
        self.asked.append(host)
        assert self.go.wait(LIMIT_S)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", 0))]


@pytest.fixture
def stuck(monkeypatch: pytest.MonkeyPatch) -> Iterator[StuckNames]:
    names = StuckNames()
    monkeypatch.setattr(resolver.socket, "getaddrinfo", names)
    yield names
    names.go.set()
    for thread in threading.enumerate():
        if thread.name.startswith("tierkv-resolve"):
            thread.join(LIMIT_S)


def resolving() -> int:
    return sum(thread.name.startswith("tierkv-resolve") for thread in threading.enumerate())


def test_h1_a_name_under_way_is_not_looked_up_again(stuck: StuckNames) -> None:
    with TcpTransport(KEY) as transport:
        for _ in range(5):
            with pytest.raises(TierIOError, match="was not resolved in"):
                transport.connect("stuck.test", 1, 0.01)
        assert resolving() == 1 and stuck.asked == ["stuck.test"]
        stuck.go.set()


def test_c1_names_under_way_are_bounded(stuck: StuckNames) -> None:
    with TcpTransport(KEY) as transport:
        for number in range(RESOLVING_MAX):
            with pytest.raises(TierIOError, match="was not resolved in"):
                transport.connect(f"stuck{number}.test", 1, 0.01)
        with pytest.raises(TierIOError, match="names are being looked up"):
            transport.connect("one-more.test", 1, 0.01)
        assert resolving() == RESOLVING_MAX


def test_who_waits_for_a_name_under_way_gets_its_answer(stuck: StuckNames) -> None:
    """With a port of their own."""
    with scripted(wait_end) as (_, port), TcpTransport(KEY) as transport:
        with pytest.raises(TierIOError, match="was not resolved in"):
            transport.connect("stuck.test", port + 1, 0.01)
        peers: list[object] = []
        thread = threading.Thread(
            target=lambda: peers.append(transport.connect("stuck.test", port, LIMIT_S))
        )
        thread.start()
        stuck.go.set()
        thread.join(LIMIT_S)
        assert len(peers) == 1


def test_h1_no_thread_for_deadlines_ends_pieces_of_a_plane(no_threads: NoThreads) -> None:
    """What runs goes on, what would wait its turn without an end does not."""
    length = 1 << 20
    memory = memoryview(bytearray(b"\x07" * length))
    server, client = nixl(), nixl()
    try:
        server.register(memory, 1)
        peer = client.connect(server.offer(), "peer", LIMIT_S)
        no_threads("tierkv-deadlines")
        ranges = [PageRange(0, length)] * 20
        buffers = destinations(ranges)
        read = peer.read(1, ranges, [memoryview(buffer) for buffer in buffers], LIMIT_S)
        outcomes = read.take(LIMIT_S)
        for outcome, buffer in zip(outcomes, buffers, strict=True):
            assert set(buffer) == {7 if outcome is OK else UNTOUCHED}
        client.check()
        assert peer.stats().open_reads == 0
    finally:
        client.close()
        server.close()
