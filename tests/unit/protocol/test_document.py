"""docs/formats/protocol.md: its worked example is what the code sends, its tables what it knows."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tierkv.protocol.frames import encode_answer, encode_request
from tierkv.protocol.messages import Verb, WireCode

DOCUMENT = Path(__file__).parents[3] / "docs" / "formats" / "protocol.md"


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


def test_worked_request() -> None:
    assert dumped("request") == encode_request(7, Verb.LOOKUP, {"keys": bytes(range(64))})


def test_worked_answer() -> None:
    assert dumped("answer") == encode_answer(7, {"tiers": b"\x01\x00"})


@pytest.mark.parametrize("name", [*Verb, *WireCode])
def test_every_verb_and_code_is_there(name: str) -> None:
    assert f"`{name}`" in DOCUMENT.read_text(encoding="utf-8")
