"""A server that greets as it should and then does as the test says, on a real socket."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator

from tests.unit.storage.transport.layout import Layout
from tierkv.storage.clock import SystemClock
from tierkv.storage.errors import TierIOError
from tierkv.storage.transport.base import new_boot_token
from tierkv.storage.transport.handshake import Credentials, greet_client
from tierkv.storage.transport.stream import Stream, open_stream
from tierkv.storage.transport.wire import HEADER_BYTES, Kind, pack_header

KEY = bytes(range(32))
LIMIT_S = 30.0
GEOMETRY = Layout(1 << 20, 0, 4096, 0, 4096, 256)
BOOT_TOKEN = new_boot_token()

Script = Callable[[Stream], None]


def far() -> float:
    """A deadline that is not meant to be reached."""
    return SystemClock().monotonic() + LIMIT_S


def next_request(stream: Stream) -> int:
    """Take in one frame; its request id."""
    head = stream.receive_bytes(HEADER_BYTES, far())
    stream.receive_bytes(int.from_bytes(head[:4], "little"), far())
    return int.from_bytes(head[8:], "little")


def page(request: int, payload: bytes, length: int | None = None, kind: Kind = Kind.PAGE) -> bytes:
    """A page frame whose header may say another length."""
    return pack_header(kind, len(payload) if length is None else length, request) + payload


def wait_end(stream: Stream) -> None:
    """Hold the connection until the peer lets go of it."""
    stream.fill(memoryview(bytearray(1 << 16)), far())


@contextlib.contextmanager
def scripted(
    script: Script, *, greets: bool = True, times: int = 1 << 10
) -> Iterator[tuple[str, int]]:
    """Serve `times` connections; each, once greeted (unless not `greets`), is given to `script`.

    Whatever the script raises but a TierIOError fails the test.
    """
    listener = socket.create_server(("127.0.0.1", 0))
    listener.settimeout(LIMIT_S)
    failures: list[BaseException] = []
    threads: list[threading.Thread] = []
    streams: list[Stream] = []

    def run(sock: socket.socket) -> None:
        stream = open_stream(
            sock, SystemClock(), None, server_side=True, hostname=None, deadline=far()
        )
        streams.append(stream)
        try:
            if greets:
                greet_client(stream, Credentials(KEY), BOOT_TOKEN, far())
            script(stream)
        except TierIOError:
            return
        except BaseException as error:
            failures.append(error)
            raise
        finally:
            stream.close()

    def accept() -> None:
        for _ in range(times):
            try:
                sock, _ = listener.accept()
            except OSError:
                return
            thread = threading.Thread(target=run, args=(sock,), daemon=True)
            threads.append(thread)
            thread.start()

    acceptor = threading.Thread(target=accept, daemon=True)
    acceptor.start()
    try:
        yield listener.getsockname()[:2]
    finally:
        with contextlib.suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        acceptor.join(LIMIT_S)
        for stream in streams:
            stream.interrupt()
        for thread in threads:
            thread.join(LIMIT_S)
    assert not failures
