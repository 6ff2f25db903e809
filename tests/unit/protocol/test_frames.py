"""Frames: round trips, limits and refusals."""

from __future__ import annotations

import struct

import msgpack
import pytest

from tierkv.protocol.errors import FrameError
from tierkv.protocol.frames import (
    ID_MAX,
    Frame,
    FrameBounds,
    FrameReader,
    answer_bounds,
    encode_answer,
    encode_error,
    encode_request,
    request_bounds,
)
from tierkv.protocol.messages import PAYLOAD_FRAME_EXTRA_BYTES, Limits, Verb

LIMITS = Limits()


def reader() -> FrameReader:
    return FrameReader(request_bounds(LIMITS))


def framed(body: bytes) -> bytes:
    return struct.pack("<I", len(body)) + body


def test_requests_answers_and_errors_come_back_as_they_went() -> None:
    sent = (
        encode_request(ID_MAX, Verb.LOOKUP, {"keys": bytes(64)})
        + encode_answer(0, {"tiers": b"\x01"})
        + encode_error(7, "limit", "too many")
    )
    assert list(reader().feed(sent)) == [
        Frame(ID_MAX, "lookup", {"keys": bytes(64)}),
        Frame(0, "", {"tiers": b"\x01"}),
        Frame(7, "limit", {"message": "too many"}),
    ]


def test_byte_by_byte_is_the_same() -> None:
    sent = encode_request(1, Verb.STATS, {}) + encode_request(2, Verb.TOUCH, {"keys": bytes(32)})
    read = reader()
    frames = [frame for byte in sent for frame in read.feed(bytes([byte]))]
    assert [frame.request_id for frame in frames] == [1, 2]
    assert read.pending_bytes == 0


def test_frames_that_were_not_asked_for_wait() -> None:
    read = reader()
    first = next(read.feed(encode_answer(1, {}) + encode_answer(2, {})))
    assert first.request_id == 1
    assert [frame.request_id for frame in read.feed(b"")] == [2]


def test_length_over_the_limit_is_refused_by_its_length_alone() -> None:
    read = FrameReader(FrameBounds(frame_bytes=100))
    with pytest.raises(FrameError, match="got 101"):
        list(read.feed(struct.pack("<I", 101)))
    assert read.pending_bytes == 0


@pytest.mark.parametrize("length", [100, 101])
def test_longest_frame(length: int) -> None:
    empty = len(msgpack.packb([1, "x", {"k": b""}]))
    body = msgpack.packb([1, "x", {"k": bytes(length - empty)}])
    assert len(body) == length
    read = FrameReader(FrameBounds(frame_bytes=100))
    if length == 100:
        assert len(list(read.feed(framed(body)))) == 1
    else:
        with pytest.raises(FrameError):
            list(read.feed(framed(body)))


def test_payload_frames_have_a_bound_of_their_own() -> None:
    bounds = FrameBounds(frame_bytes=1000).with_payload(4096)
    assert bounds.longest == 4096 + PAYLOAD_FRAME_EXTRA_BYTES
    fields = {"reservation": 1, "index": 0, "payload": bytes(4096)}
    (frame,) = FrameReader(bounds).feed(encode_request(1, Verb.PUT, fields))
    assert frame.fields["payload"] == bytes(4096)
    with pytest.raises(FrameError, match="without a payload"):
        list(FrameReader(bounds).feed(encode_request(1, Verb.TOUCH, {"keys": bytes(4096)})))


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xc1",
        b"\x93\x01",
        msgpack.packb([1, "x", {}]) + b"\x00",
        msgpack.packb([1, "x"]),
        msgpack.packb([-1, "x", {}]),
        msgpack.packb([True, "x", {}]),
        msgpack.packb([1.0, "x", {}]),
        msgpack.packb([1, 2, {}]),
        msgpack.packb([1, "x", []]),
        msgpack.packb([1, "x", {b"k": 1}]),
        msgpack.packb({"id": 1}),
        b"\x93\x01\xa1x\x81\x01\x02",
        b"\x93\x01\xa1\xff\x80",
        msgpack.packb([1, "x", {"k": msgpack.ExtType(5, b"")}]),
        msgpack.packb([1, "x", {"k": msgpack.ExtType(5, b"1234")}]),
        msgpack.packb([1, "x", {"k": msgpack.Timestamp(1, 0)}]),
        b"\x91" * 5000 + b"\x01",
        b"\xdd\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        b"\xdb\xff\xff\xff\xff",
        msgpack.packb([1, "x", {"k": list(range(65))}]),
        msgpack.packb([1, "x", {"k": [[] for _ in range(8)]}]),
    ],
)
def test_bytes_that_are_no_message_end_the_reader(body: bytes) -> None:
    read = reader()
    good = encode_request(1, Verb.STATS, {})
    frames = read.feed(good + framed(body) + good)
    assert next(frames).request_id == 1
    with pytest.raises(FrameError) as caught:
        next(frames)
    assert "\n" not in str(caught.value)
    with pytest.raises(FrameError):
        read.feed(good)


def test_answers_may_nest_where_requests_may_not() -> None:
    rows = [{"namespace": bytes(32), "pages": {"host": 1, "nvme": 2}} for _ in range(500)]
    sent = encode_answer(1, {"namespaces": rows})
    (frame,) = FrameReader(answer_bounds(LIMITS)).feed(sent)
    assert frame.fields["namespaces"] == rows
    with pytest.raises(FrameError):
        list(reader().feed(sent))
