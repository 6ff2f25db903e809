"""The slot image: docs/formats/slot.md, byte for byte."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierkv.storage.checksum import copy_bytes, copy_with_checksum, payload_checksum
from tierkv.storage.slot_header import (
    HEADER_BYTES,
    LAST_USE_OFFSET,
    STATE_COMMITTED,
    STATE_FREE,
    STATE_OFFSET,
    SlotHeader,
    parse_header,
    set_last_use,
    set_state,
    slot_bytes_for,
)
from tierkv.storage.types import PageKey

# The worked example of docs/formats/slot.md.
EXAMPLE = SlotHeader(
    key=PageKey(bytes(range(32))),
    payload_bytes=5000,
    checksum=payload_checksum(bytes(5000)),
    generation=7,
    last_use=9,
)
EXAMPLE_HEX = (
    "544b56534c4f5400"  # magic
    "0100"  # version
    "0100"  # flags
    "4d4d4f43"  # state
    "000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f"  # key
    "8813000000000000"  # payload bytes
    "4f64c6c36836832295929931b75a6d9f"  # checksum
    "0700000000000000"  # generation
    "8bfd7cb1cf623566"  # header checksum
    "0900000000000000"  # last use
)


def block_with(header: SlotHeader) -> memoryview:
    block = memoryview(bytearray(HEADER_BYTES))
    header.pack_into(block, 0)
    return block


def test_the_worked_example_of_the_format_document() -> None:
    assert EXAMPLE.pack().hex() == EXAMPLE_HEX
    assert parse_header(block_with(EXAMPLE)) == EXAMPLE


def test_an_owner_shares_the_word_of_the_payload_length_and_is_sealed() -> None:
    owned = replace(EXAMPLE, owner=2**32 - 1)
    packed = owned.pack()
    assert packed[48:56].hex() == "88130000ffffffff"
    assert parse_header(packed) == owned
    # A page without one has the image it had before there were owners.
    assert parse_header(bytes.fromhex(EXAMPLE_HEX)) == replace(EXAMPLE, owner=0)


def test_slot_sizes_are_header_and_payload_in_whole_blocks() -> None:
    assert [slot_bytes_for(n) for n in (1, 4096, 4097, 5000)] == [8192, 8192, 12288, 12288]


def test_pack_into_and_pack_agree_and_leave_the_rest_zero() -> None:
    block = block_with(EXAMPLE)
    packed = EXAMPLE.pack()
    assert bytes(block) == packed.ljust(HEADER_BYTES, b"\0")


def test_state_and_last_use_change_in_place_without_breaking_the_seal() -> None:
    block = block_with(EXAMPLE)
    set_state(block, 0, STATE_FREE)
    set_last_use(block, 0, 77)
    assert parse_header(block) == replace(EXAMPLE, state=STATE_FREE, last_use=77)


@given(st.integers(0, 95), st.integers(0, 7))
def test_w7_any_flipped_bit_is_seen_or_harmless(offset: int, bit: int) -> None:
    block = block_with(EXAMPLE)
    block[offset] ^= 1 << bit
    found = parse_header(block)
    if STATE_OFFSET <= offset < STATE_OFFSET + 4:
        assert found is not None
        assert found.state != STATE_COMMITTED
    elif offset >= LAST_USE_OFFSET:
        assert found is not None
        assert replace(found, last_use=EXAMPLE.last_use) == EXAMPLE
    else:
        assert found is None


@given(st.binary(max_size=200))
def test_w7_arbitrary_bytes_never_raise_and_are_no_header(data: bytes) -> None:
    assert parse_header(data) is None


def test_no_digest_is_told_from_a_digest_of_zeros() -> None:
    without = replace(EXAMPLE, checksum=b"")
    zeros = replace(EXAMPLE, checksum=bytes(16))
    assert parse_header(without.pack()) == without
    assert parse_header(zeros.pack()) == zeros


@pytest.mark.parametrize("nbytes", [1, 4096, (1 << 20) - 1, 1 << 20, (1 << 20) + 1, 3 << 20])
def test_copies_in_pieces_give_the_digest_of_the_whole(nbytes: int) -> None:
    source = bytes(i % 251 for i in range(1024)) * (nbytes // 1024 + 1)
    out = memoryview(bytearray(nbytes))
    assert copy_with_checksum(out, source[:nbytes]) == payload_checksum(source[:nbytes])
    assert out == source[:nbytes]
    again = memoryview(bytearray(nbytes))
    copy_bytes(again, out)
    assert again == out
