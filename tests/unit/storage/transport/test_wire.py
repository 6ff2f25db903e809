"""docs/formats/transport.md: its worked example is what the code sends; and frames that are not."""

from __future__ import annotations

import hashlib
import hmac
import random
import re
from pathlib import Path

import pytest

from tests.unit.storage.transport.layout import Layout
from tierkv.storage.errors import TierIOError
from tierkv.storage.transport.base import PageRange, TransportLimits
from tierkv.storage.transport.handshake import Credentials
from tierkv.storage.transport.introduction import (
    Introduction,
    pack_introduction,
    pack_question,
    unpack_introduction,
    unpack_question,
)
from tierkv.storage.transport.nixl_offer import (
    NixlOffer,
    OfferedMemory,
    pack_offer,
    unpack_offer,
)
from tierkv.storage.transport.wire import (
    ERROR_TEXT_BYTES,
    GREETING_BYTES,
    HEADER_BYTES,
    Greeting,
    Header,
    Kind,
    error_bounds,
    exactly,
    pack_error,
    pack_frame,
    pack_greeting,
    pack_header,
    pack_read,
    request_bounds,
    unpack_error,
    unpack_greeting,
    unpack_header,
    unpack_read,
)

DOCUMENT = Path(__file__).parents[4] / "docs" / "formats" / "transport.md"
KEY = bytes(range(32))
GEOMETRY = Layout(28672, 4096, 12288, 4096, 5000, 2)
HELLO = Greeting(1, True, bytes(range(32, 64)), bytes(range(16)))
WELCOME = Greeting(1, True, bytes(range(64, 96)), bytes(range(16, 32)))
TRANSCRIPT = pack_greeting(HELLO) + pack_greeting(WELCOME)
SEED = 20261129


def dumped(name: str) -> bytes:
    """The bytes of one hex dump; each line's offset is checked."""
    text = DOCUMENT.read_text(encoding="utf-8")
    block = text.split(f"\n{name}\n")[1].split("\n\n")[0].split("```")[0]
    out = b""
    for line in block.splitlines():
        offset, rest = line.split("  ", 1)
        assert int(offset) == len(out), line
        out += bytes.fromhex(re.split(r" {2,}", rest)[0])
    return out


def documented_proof(role: bytes, transcript: bytes) -> bytes:
    """As the document has it, by other code than the transport's."""
    domain = b"tierkv transport v1\0"
    secret = hashlib.sha256(domain + KEY).digest()
    return hmac.digest(secret, domain + role + transcript, "sha256")


def test_worked_greeting() -> None:
    assert dumped("hello") == pack_frame(Kind.HELLO, 0, pack_greeting(HELLO))
    assert unpack_greeting(dumped("hello")[HEADER_BYTES:]) == HELLO


def test_worked_proofs() -> None:
    proof = Credentials(KEY).prove(b"client\0", TRANSCRIPT)
    assert proof == documented_proof(b"client\0", TRANSCRIPT)
    assert dumped("proof") == pack_frame(Kind.PROOF, 0, proof)
    proof = Credentials(KEY).prove(b"server\0", TRANSCRIPT)
    assert proof == documented_proof(b"server\0", TRANSCRIPT)
    assert dumped("ready") == pack_frame(Kind.READY, 0, proof)


def test_worked_read() -> None:
    ranges = [GEOMETRY.payload(1), GEOMETRY.payload(0)]
    assert dumped("read") == pack_frame(Kind.READ, 7, pack_read(1, ranges))
    assert unpack_read(dumped("read")[HEADER_BYTES:]) == (1, ranges)
    assert dumped("page") == pack_header(Kind.PAGE, 5000, 7)


def test_worked_introduction() -> None:
    assert dumped("question") == pack_question(["nixl", "ucx"])
    assert unpack_question(dumped("question")) == ["nixl", "ucx"]
    whole = Introduction(bytes(range(32)), {"nixl": b"offer"}, {"ucx": "not here"})
    assert dumped("introduction") == pack_introduction(whole)
    assert unpack_introduction(dumped("introduction")) == whole


def test_worked_nixl_offer() -> None:
    cookie = bytes(range(0x60, 0x70))
    memory = OfferedMemory(1, 0x7F0000001000, 28672, 0x7F0000100010, cookie)
    offer = NixlOffer(bytes(range(16)), 4660, False, "a1b2" * 8, [memory], b"metadata")
    assert dumped("nixl offer") == pack_offer(offer)
    assert unpack_offer(dumped("nixl offer")) == offer


@pytest.mark.parametrize("kind", Kind)
def test_every_kind_is_there(kind: Kind) -> None:
    assert f"| {kind.value} | {kind.name} |" in DOCUMENT.read_text(encoding="utf-8")


def test_a1_random_headers_are_refused_or_within_bounds() -> None:
    print(f"seed={SEED}")
    rng = random.Random(SEED)
    limits = TransportLimits(read_pages=3, message_bytes=9)
    bounds = request_bounds(limits)
    taken = 0
    for _ in range(5000):
        data = bytearray(pack_header(rng.choice(list(bounds)), rng.randrange(64), 1))
        if rng.random() < 0.5:
            data[rng.randrange(8)] = rng.randrange(256)
        try:
            header = unpack_header(data, bounds)
        except TierIOError:
            continue
        taken += 1
        assert header.length in bounds[header.kind] and header.length <= 48
        assert pack_header(*_reordered(header)) == bytes(data)
    assert taken > 100


def test_a1_random_reads_are_refused_or_bounded() -> None:
    print(f"seed={SEED}")
    rng = random.Random(SEED)
    for _ in range(2000):
        body = bytearray(pack_read(1, [PageRange(i, 1) for i in range(rng.randint(1, 4))]))
        body[8 + rng.randrange(4)] ^= 1 << rng.randrange(8)
        with pytest.raises(TierIOError, match=r"ranges need \d+ bytes"):
            unpack_read(body)


def test_strangers_are_no_greeting() -> None:
    for body in (bytes(GREETING_BYTES), pack_greeting(HELLO)[:10] + b"\2" + bytes(49)):
        with pytest.raises(TierIOError, match="does not speak"):
            unpack_greeting(body)


def test_errors_are_one_printable_bounded_line() -> None:
    frame = pack_error(9, "a\nb\t" + "ü" * 1000)
    header = unpack_header(frame, {Kind.ERROR: error_bounds()})
    assert header == Header(ERROR_TEXT_BYTES, Kind.ERROR, 9)
    text = unpack_error(frame[HEADER_BYTES:])
    assert text.startswith("a b ü") and text.isprintable()
    assert unpack_error(b"\xff\x00\x1b[0m").isprintable()


def test_exactly_is_one_length() -> None:
    assert [length for length in range(10) if length in exactly(5)] == [5]


def _reordered(header: Header) -> tuple[Kind, int, int]:
    return header.kind, header.length, header.request
