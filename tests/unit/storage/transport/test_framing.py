"""Frames come whole, in however many parts; what is no frame ends the connection."""

from __future__ import annotations

import random
import socket
import threading
from collections.abc import Iterator

import pytest

from tierkv.storage.clock import SystemClock
from tierkv.storage.errors import TierIOError
from tierkv.storage.transport.framing import FIRST_BYTES, receive_frame
from tierkv.storage.transport.stream import PlainStream
from tierkv.storage.transport.wire import HEADER_BYTES, Kind, pack_frame, pack_header

LIMIT_S = 30.0
BOUNDS = {Kind.MESSAGE: range(1 << 20)}
SEED = 20261129


@pytest.fixture
def ends() -> Iterator[tuple[PlainStream, socket.socket]]:
    """A stream to receive from, and the socket at its other end."""
    ours, theirs = socket.socketpair()
    with theirs:
        stream = PlainStream(ours, SystemClock())
        yield stream, theirs
        stream.close()


def far() -> float:
    return SystemClock().monotonic() + LIMIT_S


def receive(stream: PlainStream, deadline: float | None = None) -> tuple[int, bytes] | None:
    frame = receive_frame(stream, BOUNDS, far() if deadline is None else deadline)
    return None if frame is None else (frame[0].request, frame[1])


@pytest.mark.parametrize(
    "length", [0, 1, FIRST_BYTES - HEADER_BYTES, FIRST_BYTES - HEADER_BYTES + 1, 300_000]
)
def test_frames_of_any_length(ends: tuple[PlainStream, socket.socket], length: int) -> None:
    stream, other = ends
    body = random.Random(SEED).randbytes(length)
    sender = threading.Thread(target=other.sendall, args=(pack_frame(Kind.MESSAGE, 7, body),))
    sender.start()
    assert receive(stream) == (7, body)
    sender.join(LIMIT_S)


def test_a_frame_in_many_parts(ends: tuple[PlainStream, socket.socket]) -> None:
    stream, other = ends
    frame = pack_frame(Kind.MESSAGE, 9, b"abcdef")

    def send() -> None:
        for at in range(len(frame)):
            other.sendall(frame[at : at + 1])

    sender = threading.Thread(target=send)
    sender.start()
    assert receive(stream) == (9, b"abcdef")
    sender.join(LIMIT_S)


@pytest.mark.parametrize("cut", [0, 1, HEADER_BYTES, HEADER_BYTES + 3])
def test_h1_the_rest_of_a_frame_is_not_waited_for(
    ends: tuple[PlainStream, socket.socket], cut: int
) -> None:
    stream, other = ends
    other.sendall(pack_frame(Kind.MESSAGE, 9, b"abcdef")[:cut])
    with pytest.raises(TierIOError, match=f"deadline passed after {cut} of " if cut else "passed$"):
        receive(stream, SystemClock().monotonic() + 0.05)


@pytest.mark.parametrize("cut", [1, HEADER_BYTES, HEADER_BYTES + 3])
def test_a_peer_that_closes_in_a_frame(ends: tuple[PlainStream, socket.socket], cut: int) -> None:
    stream, other = ends
    other.sendall(pack_frame(Kind.MESSAGE, 9, b"abcdef")[:cut])
    other.shutdown(socket.SHUT_WR)
    with pytest.raises(TierIOError, match=f"closed after {cut} of "):
        receive(stream)


def test_a_peer_that_closes_between_frames(ends: tuple[PlainStream, socket.socket]) -> None:
    stream, other = ends
    other.shutdown(socket.SHUT_WR)
    assert receive(stream) is None


def test_two_frames_at_once_are_refused(ends: tuple[PlainStream, socket.socket]) -> None:
    stream, other = ends
    other.sendall(pack_frame(Kind.MESSAGE, 1, b"one") + pack_frame(Kind.MESSAGE, 2, b"two"))
    with pytest.raises(TierIOError, match="19 bytes came before it was answered"):
        receive(stream)


def test_a_length_is_checked_before_the_body_comes(
    ends: tuple[PlainStream, socket.socket],
) -> None:
    stream, other = ends
    other.sendall(pack_header(Kind.MESSAGE, 1 << 20, 1))
    with pytest.raises(TierIOError, match="expected a MESSAGE of 0 to 1048575 bytes"):
        receive(stream)
