"""An etcd without manners, and a system without threads."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import pytest

from tierkv.storage.clock import SystemClock
from tierkv.storage.pool.config import Address, PoolConfig
from tierkv.storage.pool.etcd import EtcdMembership

LIMIT_S = 30.0
TIMEOUT_S = 0.1


@pytest.fixture
def trickle() -> Iterator[tuple[str, threading.Event]]:
    """Address of an HTTP server whose answers come a byte at a time and do not end."""
    listener = socket.create_server(("127.0.0.1", 0))
    stop, asked = threading.Event(), threading.Event()

    def serve() -> None:
        connection, _ = listener.accept()
        with connection:
            connection.recv(1 << 16)
            asked.set()
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n")
            while not stop.wait(TIMEOUT_S / 4):
                connection.sendall(b" ")

    thread = threading.Thread(target=serve)
    thread.start()
    yield f"127.0.0.1:{listener.getsockname()[1]}", asked
    stop.set()
    listener.close()
    thread.join(LIMIT_S)


def membership(etcd: str) -> EtcdMembership:
    config = PoolConfig(Address("127.0.0.1", 7001), open_pool=True, etcd=etcd)
    return EtcdMembership(config, SystemClock(), timeout_s=TIMEOUT_S)


def test_h1_an_answer_that_does_not_end_is_a_problem(
    trickle: tuple[str, threading.Event],
) -> None:
    """The client's timeout is from one byte to the next, so it never says so."""
    address, asked = trickle
    members = membership(address)
    members.start(lambda: None)
    try:
        assert asked.wait(LIMIT_S)
        deadline, pause = time.monotonic() + LIMIT_S, threading.Event()
        while "has not come to its end" not in (members.problem() or ""):
            assert time.monotonic() < deadline, members.problem()
            pause.wait(0.01)
        members.leave()
    finally:
        members.close()


def test_no_thread_for_etcd_is_a_problem_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    members = membership("127.0.0.1:1")
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refused)
        with pytest.raises(RuntimeError):
            members.start(lambda: None)
    members.leave()
    members.close()
    assert members.members() == ()
