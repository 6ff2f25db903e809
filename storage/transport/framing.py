"""Receives one whole frame, a small one with one system call.

Owns no state. Knows headers and lengths, wire.py's, and no meaning. Invariants: a header is checked
before memory is taken for its body; bytes after a frame end the connection, because nobody may
ask or answer twice at once. Pages are not received here: they go in place. Called by tcp_peer.py
and tcp_server.py.
"""

from __future__ import annotations

from tierkv.storage.errors import TierIOError
from tierkv.storage.transport.stream import Stream
from tierkv.storage.transport.wire import HEADER_BYTES, Header, Kind, unpack_header

FIRST_BYTES = 8192
"""Frames up to this size come with one system call: a look-up of 32 keys has 1100 bytes."""


def receive_frame(
    stream: Stream, bounds: dict[Kind, range], deadline: float, *, ready: bool = False
) -> tuple[Header, bytes] | None:
    """The next frame; None when the peer closed before its first byte. O(body).

    `ready`: wait_readable() has just said so. TierIOError when the connection fails, `deadline`
    passes, or the frame is not in `bounds`.
    """
    first = bytearray(FIRST_BYTES)
    with memoryview(first) as view:
        got = stream.receive_some(view, deadline, ready=ready)
        if got == 0:
            return None
        if got < HEADER_BYTES:
            _receive_rest(stream, view[:HEADER_BYTES], got, deadline)
            got = HEADER_BYTES
        header = unpack_header(view, bounds)
        end = HEADER_BYTES + header.length
        if got > end:
            raise TierIOError(f"read frame: {got - end} bytes came before it was answered")
        if end <= FIRST_BYTES:
            if got < end:
                _receive_rest(stream, view[:end], got, deadline)
            return header, bytes(view[HEADER_BYTES:end])
        body = bytearray(header.length)
        with memoryview(body) as whole:
            whole[: got - HEADER_BYTES] = view[HEADER_BYTES:got]
            _receive_rest(stream, whole, got - HEADER_BYTES, deadline)
        return header, bytes(body)


def _receive_rest(stream: Stream, view: memoryview, got: int, deadline: float) -> None:
    """Fill `view` from `got` on. TierIOError when the peer closes first."""
    count = stream.fill(view, deadline, got)
    if count < view.nbytes:
        raise TierIOError(f"receive from peer: closed after {count} of {view.nbytes} bytes")
