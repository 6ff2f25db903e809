"""Who may connect: keys, versions, roles; and what a server does with those who may not."""

from __future__ import annotations

import logging
import socket
from collections.abc import Iterator

import pytest

from tests.unit.storage.transport.scripted import GEOMETRY, KEY, LIMIT_S, far, scripted
from tests.unit.storage.transport.transport_conformance import echo
from tierkv.storage.clock import SystemClock
from tierkv.storage.errors import ConfigError, TierIOError
from tierkv.storage.transport.base import PageRange, PeerIdentity, TransportLimits
from tierkv.storage.transport.handshake import Credentials, greet_server
from tierkv.storage.transport.stream import PlainStream, Stream
from tierkv.storage.transport.tcp import TcpTransport
from tierkv.storage.transport.wire import (
    GREETING_BYTES,
    HEADER_BYTES,
    NONCE_BYTES,
    PROOF_BYTES,
    READ_BYTES,
    VERSION,
    Greeting,
    Kind,
    pack_frame,
    pack_greeting,
    pack_header,
    pack_read,
    unpack_greeting,
)

OTHER_KEY = bytes(32)
LIMITS = TransportLimits(peer_connections=2, read_pages=4, message_bytes=64, handshake_s=5.0)
ARENA = bytearray(GEOMETRY.total_bytes)
TOKEN = bytes(16)
LARGE_BYTES = 64 << 20
"""More than the buffers of two sockets."""


@pytest.fixture
def server() -> Iterator[TcpTransport]:
    with TcpTransport(KEY, limits=LIMITS) as transport:
        transport.register(memoryview(ARENA))
        yield transport
        transport.check()


@pytest.fixture
def stream(server: TcpTransport) -> Iterator[PlainStream]:
    """A connection to the server that has said nothing yet."""
    sock = socket.create_connection(server.listen("127.0.0.1", 0, echo), LIMIT_S)
    stream = PlainStream(sock, SystemClock())
    yield stream
    stream.close()


def said(stream: Stream) -> str:
    """The text of the ERROR that comes next; then the connection has ended."""
    head = stream.receive_bytes(HEADER_BYTES, far())
    assert head[4] == Kind.ERROR, head
    text = stream.receive_bytes(int.from_bytes(head[:4], "little"), far())
    assert ended(stream)
    return text.decode()


def ended(stream: Stream) -> bool:
    """Whether the server closes without another byte."""
    try:
        return not stream.receive_or_end(memoryview(bytearray(1)), far())
    except TierIOError as error:
        # It closed with something of ours unread.
        return "reset" in str(error)


def hello(version: int = VERSION, keyed: bool = True) -> bytes:
    return pack_greeting(Greeting(version, keyed, bytes(NONCE_BYTES), TOKEN))


def send(stream: Stream, kind: Kind, body: bytes) -> None:
    stream.send([pack_frame(kind, 0, body)], LIMIT_S)


@pytest.mark.parametrize("key", [OTHER_KEY, KEY + b"\0", KEY[:-1]])
def test_a_wrong_key_is_refused_on_both_sides(
    server: TcpTransport, key: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    address = server.listen("127.0.0.1", 0, echo)
    with TcpTransport(key) as stranger, caplog.at_level(logging.WARNING):
        with pytest.raises(TierIOError, match="does not have this pool's key") as failure:
            stranger.connect(*address, LIMIT_S)
    assert "\n" not in str(failure.value)
    server.close()
    assert server.stats().refused_connections == 1
    assert "does not have this pool's key" in caplog.text


def test_a_server_without_the_key_learns_nothing_and_is_refused() -> None:
    def impostor(stream: Stream) -> None:
        stream.receive_bytes(HEADER_BYTES + GREETING_BYTES, far())
        send(stream, Kind.WELCOME, hello())
        proof = stream.receive_bytes(HEADER_BYTES + PROOF_BYTES, far())[HEADER_BYTES:]
        # The best it can do is to send the client's own proof back.
        send(stream, Kind.READY, bytes(proof))

    with scripted(impostor, greets=False) as address, TcpTransport(KEY) as client:
        with pytest.raises(TierIOError, match="does not have this pool's key"):
            client.connect(*address, LIMIT_S)


def test_a_replayed_proof_is_refused(server: TcpTransport) -> None:
    address = server.listen("127.0.0.1", 0, echo)
    proofs: list[bytes] = []
    for _ in range(2):
        stream = PlainStream(socket.create_connection(address, LIMIT_S), SystemClock())
        send(stream, Kind.HELLO, hello())
        welcome = bytes(stream.receive_bytes(HEADER_BYTES + GREETING_BYTES, far()))[HEADER_BYTES:]
        proofs.append(Credentials(KEY).prove(b"client\0", hello() + welcome))
        send(stream, Kind.PROOF, proofs[0])
        if len(proofs) == 1:
            assert stream.receive_bytes(HEADER_BYTES, far())[4] == Kind.READY
        else:
            assert "does not have this pool's key" in said(stream)
        stream.close()


def test_another_version_is_refused_by_a_server(stream: PlainStream) -> None:
    send(stream, Kind.HELLO, hello(version=2))
    welcome = bytes(stream.receive_bytes(HEADER_BYTES + GREETING_BYTES, far()))[HEADER_BYTES:]
    assert unpack_greeting(welcome).version == VERSION
    assert "transport version 2, this TierKV 1" in said(stream)


def test_another_version_is_refused_by_a_client() -> None:
    def newer(stream: Stream) -> None:
        stream.receive_bytes(HEADER_BYTES + GREETING_BYTES, far())
        send(stream, Kind.WELCOME, hello(version=7))

    with scripted(newer, greets=False) as address, TcpTransport(KEY) as client:
        with pytest.raises(TierIOError, match="transport version 7, this TierKV 1"):
            client.connect(*address, LIMIT_S)


def test_something_else_that_listens_there() -> None:
    def web(stream: Stream) -> None:
        stream.send([b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n"], LIMIT_S)

    with scripted(web, greets=False) as address, TcpTransport(KEY) as client:
        with pytest.raises(TierIOError, match="expected WELCOME, ERROR, got kind"):
            client.connect(*address, LIMIT_S)


def test_an_open_pool_is_asked_for_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ConfigError, match="no shared key"):
        TcpTransport(None)
    with pytest.raises(ConfigError, match="choose one"):
        TcpTransport(KEY, open_pool=True)
    with pytest.raises(ConfigError, match="16 bytes or more, got 15"):
        TcpTransport(KEY[:15])
    assert not caplog.records
    with TcpTransport(None, open_pool=True) as server, TcpTransport(None, open_pool=True) as client:
        assert [record.levelname for record in caplog.records] == ["WARNING"] * 2
        server.register(memoryview(ARENA))
        peer = client.connect(*server.listen("127.0.0.1", 0, echo), LIMIT_S)
        assert peer.message(b"hi", LIMIT_S) == client.boot_token + b"hi"


@pytest.mark.parametrize("server_key", [KEY, None])
def test_keyed_and_open_do_not_mix(server_key: bytes | None) -> None:
    client_key = None if server_key else KEY
    with TcpTransport(server_key, open_pool=server_key is None) as server:
        address = server.listen("127.0.0.1", 0, echo)
        with TcpTransport(client_key, open_pool=client_key is None) as client:
            with pytest.raises(TierIOError, match="make them equal"):
                client.connect(*address, LIMIT_S)


def test_a_key_is_never_shown() -> None:
    assert repr(Credentials(b"a very secret key of the pool")) == "Credentials(keyed=True)"


@pytest.mark.parametrize(
    "frame",
    [
        pack_frame(Kind.READ, 1, pack_read(1, [PageRange(0, 4096)])),
        pack_frame(Kind.MESSAGE, 1, b"x"),
        pack_frame(Kind.PROOF, 1, bytes(PROOF_BYTES)),
    ],
)
@pytest.mark.parametrize("greeted", [False, True])
def test_a1_nothing_is_served_before_the_proof(
    server: TcpTransport, stream: PlainStream, frame: bytes, greeted: bool
) -> None:
    if greeted:
        send(stream, Kind.HELLO, hello())
        stream.receive_bytes(HEADER_BYTES + GREETING_BYTES, far())
    stream.send([frame], LIMIT_S)
    assert "expected" in said(stream) or greeted
    server.close()
    stats = server.stats()
    assert stats.served_pages == stats.served_messages == 0
    assert stats.refused_connections == 1


@pytest.mark.parametrize(
    ("frame", "text"),
    [
        (pack_header(Kind.READ, 0xFFFFFFFF, 1), "got 4294967295"),
        (pack_header(Kind.READ, READ_BYTES, 1), "expected a READ of 24 to 60 bytes, got 12"),
        (pack_header(Kind.MESSAGE, 65, 1), "expected a MESSAGE of 0 to 64 bytes, got 65"),
        (pack_frame(Kind.READ, 1, pack_read(1, [PageRange(0, 1)] * 5)), "got 72"),
        (pack_header(Kind.PAGE, 1, 1), "expected READ, MESSAGE, got kind 6"),
        (pack_header(Kind.HELLO, GREETING_BYTES, 1), "got kind 1"),
        (bytes(16), "got kind 0"),
        (
            pack_header(Kind.READ, 36, 1) + pack_read(1, [PageRange(0, 1)] * 3)[:36],
            "3 ranges need 48 bytes, got 36",
        ),
        (pack_frame(Kind.READ, 1, pack_read(1, [PageRange(1 << 20, 1)])), "outside a memory"),
        (pack_frame(Kind.READ, 1, pack_read(1, [PageRange(0, 0)])), "outside a memory"),
        (pack_frame(Kind.READ, 1, pack_read(1, [PageRange((1 << 64) - 1, 1)])), "outside"),
    ],
)
def test_w7_members_that_ask_nonsense_lose_their_connection(
    server: TcpTransport, stream: PlainStream, frame: bytes, text: str
) -> None:
    identity = greet_server(stream, Credentials(KEY), TOKEN, far())
    assert identity == PeerIdentity(server.boot_token)
    stream.send([frame], LIMIT_S)
    assert text in said(stream)
    server.close()
    stats = server.stats()
    assert (stats.broken_connections, stats.served_pages, stats.thread_restarts) == (1, 0, 0)


def test_h1_a_stranger_that_says_nothing_is_let_go() -> None:
    limits = TransportLimits(handshake_s=0.2)
    with TcpTransport(KEY, limits=limits) as server:
        sock = socket.create_connection(server.listen("127.0.0.1", 0, echo), LIMIT_S)
        stream = PlainStream(sock, SystemClock())
        assert "deadline passed" in said(stream) and server.stats().refused_connections == 1
        stream.close()


def test_h1_half_a_frame_is_not_waited_for() -> None:
    with TcpTransport(KEY, limits=TransportLimits(io_s=0.2)) as server:
        sock = socket.create_connection(server.listen("127.0.0.1", 0, echo), LIMIT_S)
        stream = PlainStream(sock, SystemClock())
        greet_server(stream, Credentials(KEY), TOKEN, far())
        stream.send([pack_header(Kind.MESSAGE, 64, 1)[:9]], LIMIT_S)
        assert "deadline passed after 9 of 16 bytes" in said(stream)
        stream.close()


def begin_large_read(server: TcpTransport, memory: bytearray) -> PlainStream:
    """A member that has asked for all of `memory`, and has taken the header of the answer."""
    size = len(memory)
    server.register(memoryview(memory))
    sock = socket.create_connection(server.listen("127.0.0.1", 0, echo), LIMIT_S)
    stream = PlainStream(sock, SystemClock())
    greet_server(stream, Credentials(KEY), TOKEN, far())
    stream.send([pack_frame(Kind.READ, 1, pack_read(1, [PageRange(0, size)]))], LIMIT_S)
    assert stream.receive_bytes(HEADER_BYTES, far())[4] == Kind.PAGE
    return stream


def test_h4_a_member_that_takes_nothing_is_let_go() -> None:
    with TcpTransport(KEY, limits=TransportLimits(io_s=0.2)) as server:
        stream = begin_large_read(server, bytearray(LARGE_BYTES))
        exports = server._exports
        with exports._changed:
            assert exports._changed.wait_for(lambda: not exports.reading, LIMIT_S)
        assert 0 < stream.fill(memoryview(bytearray(LARGE_BYTES)), far()) < LARGE_BYTES
        assert server.stats().served_pages == 0
        server.check()
        stream.close()


def test_unregister_ends_reads_under_way() -> None:
    with TcpTransport(KEY, limits=TransportLimits(io_s=LIMIT_S)) as server:
        memory = bytearray(LARGE_BYTES)
        stream = begin_large_read(server, memory)
        assert server._exports.reading == 1
        server.unregister(1)
        assert server._exports.reading == 0
        memory[:] = b"\1" * LARGE_BYTES
        got = bytearray(LARGE_BYTES)
        count = stream.fill(memoryview(got), far())
        assert 0 < count < LARGE_BYTES
        assert not any(got), "bytes from after unregister() were sent"
        stream.close()


def test_connections_are_bounded(server: TcpTransport) -> None:
    address = server.listen("127.0.0.1", 0, echo)
    with TcpTransport(KEY) as client:
        first, second = (client.connect(*address, LIMIT_S) for _ in range(2))
        with pytest.raises(TierIOError, match="connect peer"):
            client.connect(*address, LIMIT_S)
        server.check()
        assert server.stats().connections == LIMITS.peer_connections
        assert first.message(b"still", LIMIT_S).endswith(b"still")
        assert second.message(b"here", LIMIT_S).endswith(b"here")


def test_idle_connections_are_replaced_unseen() -> None:
    with TcpTransport(KEY, limits=TransportLimits(idle_s=0.5)) as server:
        server.register(memoryview(ARENA))
        with TcpTransport(KEY) as client:
            peer = client.connect(*server.listen("127.0.0.1", 0, echo), LIMIT_S)
            # The only way to see the server close an idle connection is that one can be read.
            for stream in list(peer._connections._open):
                assert stream.wait_readable(LIMIT_S)
            assert peer.message(b"a", LIMIT_S).endswith(b"a")
            assert peer.stats().messages_failed == 0
