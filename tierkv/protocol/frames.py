"""Frames: a length and a msgpack body, as docs/formats/protocol.md shows them. No I/O.

Owns the bytes between messages. Does not know which fields a verb has: requests.py and answers.py
check those. Invariants: a frame is refused by its length before any of it is kept; whatever the
bytes are, decoding one frame makes at most `containers` lists and maps of bounded size, no
extension types and no numbers above 64 bits; a reader that refused once refuses for ever. Called
by the daemon and the clients.

Measured: about 1 us a frame each way for a lookup of 32 keys.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

import msgpack  # type: ignore[import-untyped]

from tierkv.protocol.errors import FrameError
from tierkv.protocol.messages import PAYLOAD_FRAME_EXTRA_BYTES, Limits, Verb

LENGTH_BYTES = 4
ID_MAX = (1 << 64) - 1
TEXT_BYTES_MAX = 1 << 16
PACKER_BYTES = 1 << 14
"""First size of an encoder's buffer; msgpack's own choice is 16 times as much."""

_LENGTH = struct.Struct("<I")
_PAYLOAD_FIELD = "payload"

Value = TypeVar("Value")


class Frame(NamedTuple):
    """One message. `name` is a request's verb or an answer's code."""

    request_id: int
    name: str
    fields: dict[str, Any]


@dataclass(frozen=True, slots=True)
class FrameBounds:
    """What a reader accepts. Lengths without the four bytes of the prefix."""

    frame_bytes: int
    """Longest body without a payload."""
    payload_frame_bytes: int = 0
    """Longest body that has a field "payload"; 0 when there can be none."""
    items: int = 64
    """Entries of one list or map."""
    containers: int = 8
    """Lists and maps of one message, the message itself included."""

    @property
    def longest(self) -> int:
        """Longest body of any kind."""
        return max(self.frame_bytes, self.payload_frame_bytes)

    def with_payload(self, page_bytes: int) -> FrameBounds:
        """These bounds on a connection that carries payloads of `page_bytes`."""
        return replace(self, payload_frame_bytes=page_bytes + PAYLOAD_FRAME_EXTRA_BYTES)


def request_bounds(limits: Limits) -> FrameBounds:
    """Bounds of what a daemon reads from a client."""
    return FrameBounds(limits.frame_bytes, items=max(16, limits.ids))


def answer_bounds(limits: Limits) -> FrameBounds:
    """Bounds of what a client reads: the daemon lists namespaces and nests its counters."""
    return FrameBounds(limits.frame_bytes, items=16384, containers=65536)


class FrameReader:
    """Cuts a stream of bytes into frames. Not thread-safe.

    Holds at most one frame within the bounds plus what the last feed() brought. `bounds` may be
    set again between frames (a hello may allow payloads).
    """

    def __init__(self, bounds: FrameBounds) -> None:
        self.bounds = bounds
        self._buffer = bytearray()
        self._broken: str | None = None
        self._containers_left = 0

    @property
    def pending_bytes(self) -> int:
        """Bytes received that are no whole frame yet."""
        return len(self._buffer)

    def feed(self, data: bytes | bytearray | memoryview) -> Iterator[Frame]:
        """Take in `data` at once and return the frames that are whole now, lazily.

        The iterator raises FrameError in the place of the first bad frame, after the good ones
        before it. What it is not asked for waits for the next feed(). O(len(data)) amortised.
        """
        if self._broken is not None:
            raise FrameError(self._broken)
        self._buffer += data
        return self._frames()

    def _frames(self) -> Iterator[Frame]:
        buffer = self._buffer
        while True:
            if self._broken is not None:
                raise FrameError(self._broken)
            if len(buffer) < LENGTH_BYTES:
                return
            (length,) = _LENGTH.unpack_from(buffer)
            if not 0 < length <= self.bounds.longest:
                raise self._break(
                    f"read frame: expected a body of 1 to {self.bounds.longest} bytes, got {length}"
                )
            end = LENGTH_BYTES + length
            if len(buffer) < end:
                return
            frame = self._decode(end)
            del buffer[:end]
            yield frame

    def _decode(self, end: int) -> Frame:
        """The message in the buffer up to `end`."""
        bounds = self.bounds
        self._containers_left = bounds.containers
        try:
            with memoryview(self._buffer) as view, view[LENGTH_BYTES:end] as body:
                message = msgpack.unpackb(
                    body,
                    raw=False,
                    strict_map_key=True,
                    max_str_len=TEXT_BYTES_MAX,
                    max_bin_len=bounds.longest,
                    max_array_len=bounds.items,
                    max_map_len=bounds.items,
                    max_ext_len=0,
                    list_hook=self._count,
                    object_hook=self._count,
                    ext_hook=_refuse_extension,
                )
        except (ValueError, msgpack.UnpackException) as error:
            raise self._break(f"read frame: {str(error) or type(error).__name__}") from None
        if end - LENGTH_BYTES > bounds.frame_bytes and not _carries_payload(message):
            raise self._break(
                f"read frame: expected at most {bounds.frame_bytes} bytes without a payload, "
                f"got {end - LENGTH_BYTES}"
            )
        if not _is_message(message):
            raise self._break("read frame: expected [request id, name, fields]")
        return Frame(*message)

    def _count(self, container: Value) -> Value:
        """Called by msgpack for each list and map it has finished."""
        self._containers_left -= 1
        if self._containers_left < 0:
            raise ValueError(f"more than {self.bounds.containers} lists and maps in a message")
        return container

    def _break(self, message: str) -> FrameError:
        self._broken = message
        # Nothing of it will be read again: do not keep what a hostile peer sent.
        self._buffer = bytearray()
        return FrameError(message)


def encode_request(request_id: int, verb: Verb, fields: Mapping[str, object]) -> bytes:
    """One request with its length prefix. O(size of the fields)."""
    return _encode((request_id, verb.value, fields))


def encode_answer(request_id: int, fields: Mapping[str, object]) -> bytes:
    """One answer of a request that went well."""
    return _encode((request_id, "", fields))


def encode_error(request_id: int, code: str, message: str) -> bytes:
    """One refusal: a stable code and a line for people."""
    return _encode((request_id, str(code), {"message": message}))


class _Packers(threading.local):
    """A packer per thread: making one costs more than packing a lookup."""

    def __init__(self) -> None:
        self.packer = msgpack.Packer(buf_size=PACKER_BYTES)


_packers = _Packers()


def _encode(message: tuple[int, str, Mapping[str, object]]) -> bytes:
    body: bytes = _packers.packer.pack(message)
    return _LENGTH.pack(len(body)) + body


def _is_message(message: object) -> bool:
    if type(message) is not list or len(message) != 3:
        return False
    request_id, name, fields = message
    return (
        type(request_id) is int
        and 0 <= request_id <= ID_MAX
        and type(name) is str
        and type(fields) is dict
        # Keys may be bytes as far as msgpack is concerned.
        and all(type(field) is str for field in fields)
    )


def _carries_payload(message: object) -> bool:
    return _is_message(message) and _PAYLOAD_FIELD in message[2]  # type: ignore[index]


def _refuse_extension(code: int, data: bytes) -> object:
    raise ValueError(f"extension type {code}, expected none")
