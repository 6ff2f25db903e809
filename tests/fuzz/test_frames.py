"""The frame parser against bytes that nobody meant well (lesson A1)."""

from __future__ import annotations

import struct
import tracemalloc
from typing import Any

import msgpack
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tierkv.protocol.errors import ProtocolError
from tierkv.protocol.frames import (
    Frame,
    FrameBounds,
    FrameReader,
    encode_answer,
    encode_request,
    request_bounds,
)
from tierkv.protocol.messages import Limits, Verb
from tierkv.protocol.requests import parse_request

LIMITS = Limits(frame_bytes=1 << 16)
GROWTH_MAX = 8
"""Bytes that decoding may take for each byte of a frame's limit, whatever the frame says."""
NESTING_BYTES = 1 << 20
"""On top of that: msgpack gives up past 1024 levels, of lists of at most 64 items."""

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 64) - 1)
    | st.floats(allow_nan=False)
    | st.text(max_size=20)
    | st.binary(max_size=80)
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=20,
)
FIELDS = st.dictionaries(st.text(max_size=12), SCALARS | st.lists(SCALARS, max_size=4), max_size=6)


def read_all(data: bytes, limits: Limits = LIMITS) -> int:
    """Frames and requests in `data`; refusals are how it may end, nothing else is."""
    reader = FrameReader(request_bounds(limits))
    count = 0
    try:
        for frame in reader.feed(data):
            count += 1
            try:
                parse_request(frame, limits)
            except ProtocolError as error:
                assert error.request_id == frame.request_id
    except ProtocolError:
        assert reader.pending_bytes == 0
    return count


@given(st.binary(max_size=600))
@example(struct.pack("<I", 0xFFFFFFFF))
def test_a1_any_bytes_are_frames_or_refused(data: bytes) -> None:
    read_all(data)


@given(st.binary(max_size=600))
def test_a1_any_body_is_a_message_or_refused(body: bytes) -> None:
    read_all(struct.pack("<I", len(body)) + body)


@given(VALUES)
def test_a1_any_value_is_a_message_or_refused(value: Any) -> None:
    body = msgpack.packb(value)
    read_all(struct.pack("<I", len(body)) + body)


@given(st.sampled_from([*Verb, "other"]), FIELDS, st.data())
def test_a1_any_fields_are_a_request_or_refused(
    verb: str, fields: dict[str, Any], data: st.DataObject
) -> None:
    names = ["keys", "wait_ms", "hold_ms", "count", "reservation", "leases", "namespace", "version"]
    for name in data.draw(st.lists(st.sampled_from(names), max_size=4)):
        fields[name] = data.draw(SCALARS)
    body = msgpack.packb([1, str(verb), fields])
    assert read_all(struct.pack("<I", len(body)) + body) <= 1


@given(st.lists(st.tuples(st.integers(0, (1 << 64) - 1), FIELDS), max_size=6), st.data())
def test_frames_split_anywhere_come_back(
    messages: list[tuple[int, dict[str, Any]]], data: st.DataObject
) -> None:
    sent = b"".join(encode_answer(number, fields) for number, fields in messages)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(sent)), max_size=12)))
    reader = FrameReader(FrameBounds(1 << 16))
    got: list[Frame] = []
    for start, end in zip([0, *cuts], [*cuts, len(sent)], strict=True):
        got += reader.feed(sent[start:end])
    assert got == [Frame(number, "", fields) for number, fields in messages]
    assert reader.pending_bytes == 0


def bombs(size: int) -> list[bytes]:
    """Bodies as long as a frame may be, made to cost much more than that."""
    deep = b"\xdc\x00\x40" + b"\xa2ab" * 63
    return [
        b"\xdd" + struct.pack(">I", size) + b"\x90" * (size - 5),
        b"\xdc\x00\x40" * (size // 3),
        (deep * (size // len(deep) + 1))[:size],
        (b"\xdc\x00\x40" + (b"\xdc\x00\x40" + b"\x80" * 64) * 64 + b"\x80" * size)[:size],
        (b"\x93\x01\xa1x\xde\x00\x40" + b"\xa1k\xdc\x00\x40" + b"\x91" * size)[:size],
        b"\xc6" + struct.pack(">I", 0x7FFFFFFF) + bytes(size - 5),
    ]


@pytest.mark.parametrize("limits", [LIMITS, Limits()], ids=["small", "default"])
def test_a1_no_frame_costs_more_than_a_multiple_of_its_limit(limits: Limits) -> None:
    read_all(encode_request(1, Verb.STATS, {}))
    for number, body in enumerate(bombs(limits.frame_bytes)):
        data = struct.pack("<I", len(body)) + body
        tracemalloc.start()
        read_all(data, limits)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        bound = GROWTH_MAX * limits.frame_bytes + NESTING_BYTES
        assert peak <= bound, f"bomb {number}: {peak} bytes"


@settings(max_examples=30)
@given(st.binary(min_size=1, max_size=200), st.integers(1, 40))
def test_a1_an_endless_stream_keeps_at_most_one_frame(data: bytes, times: int) -> None:
    reader = FrameReader(request_bounds(LIMITS))
    try:
        for _ in range(times):
            for _frame in reader.feed(data):
                pass
            assert reader.pending_bytes <= LIMITS.frame_bytes + 4 + len(data)
    except ProtocolError:
        assert reader.pending_bytes == 0
