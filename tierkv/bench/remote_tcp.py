"""Reads over TcpTransport beside a plain socket loop: the tcp part of `tierkv bench remote`.

Owns one child process that serves both from the same kind of memory.

    python -m tierkv.bench.remote_tcp PAGE_BYTES BATCH        is the child
"""

from __future__ import annotations

import secrets
import socket
import sys
import threading

from tierkv.bench.child import HOST, Child, say_ready
from tierkv.bench.filled import filled
from tierkv.storage.closing import Closing
from tierkv.storage.transport.base import PageOutcome, PageRange, PeerIdentity
from tierkv.storage.transport.tcp import TcpTransport

WAIT_S = 30.0


class TcpPair(Closing):
    """Two processes; plain() and tcp() each move one batch of pages into this one."""

    def __init__(self, page_bytes: int, batch: int) -> None:
        self._page_bytes = page_bytes
        self._key = secrets.token_bytes(32)
        self._child = Child("tierkv.bench.remote_tcp", str(page_bytes), str(batch), self._key.hex())
        plain_port, tcp_port, generation = map(int, self._child.words)
        memory = filled(page_bytes * batch)
        self._views = [memory[at : at + page_bytes] for at in range(0, len(memory), page_bytes)]
        self._ranges = [PageRange(n * page_bytes, page_bytes) for n in range(batch)]
        self._generation = generation
        self._plain = socket.create_connection((HOST, plain_port), WAIT_S)
        self._plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._transport = TcpTransport(self._key)
        self._peer = self._transport.connect(HOST, tcp_port, WAIT_S)

    def close(self) -> None:
        """End both connections and the child."""
        self._plain.close()
        self._transport.close()
        self._child.close()

    def plain(self) -> None:
        """Ask for a batch with one byte and receive it page by page in place."""
        self._plain.sendall(b"x")
        for view in self._views:
            got = 0
            while got < len(view):
                got += self._plain.recv_into(view[got:])

    def tcp(self) -> None:
        """Read a batch through the transport."""
        outcomes = self._peer.read(self._generation, self._ranges, self._views, WAIT_S).take(WAIT_S)
        assert set(outcomes) == {PageOutcome.OK}, outcomes


def _serve(page_bytes: int, batch: int, key: bytes) -> int:
    memory = filled(page_bytes * batch)
    listener = socket.create_server((HOST, 0))
    threading.Thread(target=_serve_plain, args=(listener, memory, page_bytes), daemon=True).start()
    with TcpTransport(key) as transport:
        generation = transport.register(memory)
        _, port = transport.listen(HOST, 0, _no_messages)
        say_ready(listener.getsockname()[1], port, generation)
        sys.stdin.read()
    return 0


def _serve_plain(listener: socket.socket, memory: memoryview, page_bytes: int) -> None:
    connection, _ = listener.accept()
    with connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while connection.recv(1):
            for start in range(0, len(memory), page_bytes):
                connection.sendall(memory[start : start + page_bytes])


def _no_messages(sender: PeerIdentity, payload: bytes) -> bytes:
    raise ValueError("this benchmark sends no messages")


if __name__ == "__main__":
    sys.exit(_serve(int(sys.argv[1]), int(sys.argv[2]), bytes.fromhex(sys.argv[3])))
