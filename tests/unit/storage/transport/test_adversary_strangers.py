"""Who has no key may knock, and costs the pool's members neither their place nor the log."""

from __future__ import annotations

import errno
import logging
import socket
import threading
from contextlib import ExitStack
from typing import cast

import pytest

from tests.support.clock import ManualClock
from tests.unit.storage.transport.scripted import KEY, LIMIT_S
from tests.unit.storage.transport.test_tcp import make_contexts
from tests.unit.storage.transport.transport_conformance import echo
from tierkv.storage.errors import TierIOError
from tierkv.storage.transport import tcp_server
from tierkv.storage.transport.base import TransportLimits
from tierkv.storage.transport.tcp import TcpTransport, TlsContexts

PLACES = 4
LIMITS = TransportLimits(peer_connections=PLACES, handshake_s=LIMIT_S)


@pytest.fixture(scope="module", params=["plain", "tls"])
def tls(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> TlsContexts | None:
    return make_contexts(tmp_path_factory.mktemp("tls")) if request.param == "tls" else None


def wait_for(true: threading.Event, server: TcpTransport, connections: int) -> None:
    """Until so many are connected."""
    for _ in range(3000):
        if server.stats().connections == connections:
            return
        true.wait(0.01)
    raise AssertionError(server.stats())


def test_a1_strangers_who_say_nothing_keep_no_peer_out(tls: TlsContexts | None) -> None:
    never = threading.Event()
    with (
        ExitStack() as stack,
        TcpTransport(KEY, limits=LIMITS, tls=tls) as server,
        TcpTransport(KEY, limits=LIMITS, tls=tls) as client,
    ):
        address = server.listen("127.0.0.1", 0, echo)
        for _ in range(PLACES):
            stack.enter_context(socket.create_connection(address, LIMIT_S))
        wait_for(never, server, PLACES)
        peers = [client.connect(*address, LIMIT_S) for _ in range(PLACES)]
        for peer in peers:
            assert peer.message(b"here", LIMIT_S).endswith(b"here")
        wait_for(never, server, PLACES)
        assert server.stats().refused_connections == PLACES
        # Who has proved itself gives its place to nobody.
        with pytest.raises(TierIOError):
            client.connect(*address, LIMIT_S)
        for peer in peers:
            assert peer.message(b"still", LIMIT_S).endswith(b"still")
        server.check()


def test_closing_waits_for_no_stranger(tls: TlsContexts | None) -> None:
    with ExitStack() as stack:
        server = TcpTransport(KEY, limits=LIMITS, tls=tls)
        address = server.listen("127.0.0.1", 0, echo)
        stack.enter_context(socket.create_connection(address, LIMIT_S))
        wait_for(threading.Event(), server, 1)
        server.close()
        assert server.stats().connections == 0


class NoDescriptors:
    """A listener of a system that has no descriptors left, for a while."""

    def __init__(self, server: tcp_server.Server, times: int) -> None:
        self._server = server
        self._left = times

    def accept(self) -> tuple[socket.socket, tuple[str, int]]:
        self._left -= 1
        if self._left == 0:
            self._server._closing.set()
        raise OSError(errno.EMFILE, "Too many open files")


def test_no_descriptors_are_told_of_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tcp_server, "ACCEPT_PAUSE_S", 0.0)
    with TcpTransport(KEY, clock=ManualClock()) as transport:
        server = transport._server
        listener = cast(socket.socket, NoDescriptors(server, 100))
        with caplog.at_level(logging.WARNING):
            server._accept(listener, echo)
    assert len([line for line in caplog.messages if "Too many open files" in line]) == 1
