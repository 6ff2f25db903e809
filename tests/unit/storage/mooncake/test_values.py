"""The value's header and the key's text, as docs/formats/mooncake.md says them."""

from __future__ import annotations

import random
import re
from pathlib import Path

from tests.support.pages import page_content, page_key
from tierkv.storage.checksum import payload_checksum
from tierkv.storage.mooncake.values import (
    FORMAT_VERSION,
    HEADER_BYTES,
    MAGIC,
    HeaderScratch,
    ValueHeader,
    key_text,
    parse_header,
)
from tierkv.storage.types import PageKey

FORMAT = Path(__file__).parents[4] / "docs/formats/mooncake.md"
KEY = page_key(1)
HEADER = ValueHeader(KEY, 4096, payload_checksum(page_content(KEY, 4096)))


def test_a_header_is_read_back() -> None:
    packed = HEADER.pack()
    assert len(packed) == HEADER_BYTES
    assert parse_header(packed) == HEADER
    assert packed[:10] == MAGIC + FORMAT_VERSION.to_bytes(2, "little")


def test_w7_no_header_with_a_flipped_bit_is_believed() -> None:
    packed = HEADER.pack()
    # What lies after the seal is padding.
    for bit in range(72 * 8):
        damaged = bytearray(packed)
        damaged[bit // 8] ^= 1 << bit % 8
        assert parse_header(damaged) is None, f"bit {bit}"


def test_random_bytes_and_short_ones_are_no_header() -> None:
    seed = random.randrange(1 << 32)
    source = random.Random(seed)
    for length in [*range(73), *(source.randrange(300) for _ in range(200))]:
        assert parse_header(source.randbytes(length)) is None, f"seed {seed}"
    assert parse_header(bytes(HEADER_BYTES)) is None


def test_pages_of_two_sizes_have_two_keys() -> None:
    assert key_text(KEY, 4096) != key_text(KEY, 8192)
    assert key_text(KEY, 4096) == f"tierkv/1/4096/{KEY.hex()}"


def test_the_worked_example_of_the_format_is_what_is_written() -> None:
    text = FORMAT.read_text(encoding="utf-8")
    block = re.search(r"```hex\n(.*?)```", text, re.DOTALL)
    assert block is not None
    shown = bytes.fromhex(block[1])
    key = PageKey(bytes(range(32)))
    payload = b"TierKV" * 2
    header = ValueHeader(key, len(payload), payload_checksum(payload)).pack()
    assert header[: len(shown)] == shown and not any(header[len(shown) :])
    assert f"`{key_text(key, len(payload))}`" in text


def test_scratch_blocks_are_apart_and_cleared() -> None:
    scratch = HeaderScratch(3)
    scratch.block(1)[:] = b"\xff" * HEADER_BYTES
    assert bytes(scratch.block(0)) == bytes(scratch.block(2)) == bytes(HEADER_BYTES)
    assert scratch.address(2) - scratch.address(1) == HEADER_BYTES
    scratch.clear()
    assert bytes(scratch.block(1)) == bytes(HEADER_BYTES)
