"""Values of a configuration: each kind read, refused and printed."""

from __future__ import annotations

import os
from decimal import Decimal
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierkv.config import kinds, schema
from tierkv.config.kinds import Size, parse_duration, show_duration, show_size
from tierkv.config.sizes import parse_size


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("30s", 30), ("5m", 300), ("2h", 7200), ("1d", 86400), ("250ms", 0.25), ("0.5 s", 0.5)],
)
def test_durations_are_exact(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "30", "s", "-1s", "1w", "1e3s", "1h30m", "99999d", "٣s"])
def test_durations_need_a_unit(text: str) -> None:
    with pytest.raises(ValueError, match="expected"):
        parse_duration(text)


@given(st.integers(1, 3600 * 1000))
def test_a_duration_prints_as_it_is_read(milliseconds: int) -> None:
    assert parse_duration(show_duration(milliseconds / 1000)) == milliseconds / 1000


@given(st.integers(0, 2**50))
def test_a_size_prints_exactly(size: int) -> None:
    assert parse_size(show_size(size)) == size


def test_sizes_print_in_the_largest_unit_that_is_exact() -> None:
    assert [show_size(size) for size in (0, 1000, 1536, 3 << 20, 20 << 30)] == [
        "0",
        "1000",
        "1536",
        "3MiB",
        "20GiB",
    ]


@pytest.mark.parametrize(
    ("text", "whole", "size"),
    [("10%", 1000, 100), ("12.5 %", 1000, 125), ("0%", 7, 0), ("100%", 7, 7), ("1KiB", 1, 1024)],
)
def test_shares_become_bytes(text: str, whole: int, size: int) -> None:
    assert kinds.SHARE_OR_SIZE.parse(text).of(whole) == size


@pytest.mark.parametrize("text", ["101%", "-1%", "ten%", "10 GiBs", "%", "lots"])
def test_bad_shares(text: str) -> None:
    with pytest.raises(ValueError, match="expected"):
        kinds.SHARE_OR_SIZE.parse(text)


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [
        (kinds.MODE, "0600", 0o600),
        (kinds.MODE, "0o660", 0o660),
        (kinds.MODE, "600", 0o600),
        (kinds.FLAG, "Yes", True),
        (kinds.FLAG, "off", False),
        (kinds.RATIO, "50%", 0.5),
        (kinds.RATIO, "0.25", 0.25),
        (kinds.UIDS, "0, 7", (0, 7)),
        (kinds.UIDS, "root", (0,)),
        (kinds.UIDS, "self", (os.getuid(),)),
        (kinds.PATH, "/a/b", Path("/a/b")),
        (kinds.HEX_PREFIX, "a1b2", "a1b2"),
        (kinds.whole_number(1, 9), "9", 9),
        (kinds.choice(("a", "b")), "b", "b"),
        (kinds.optional(kinds.SIZE), "none", None),
        (kinds.optional(kinds.SIZE), "", None),
        (kinds.optional(kinds.SIZE), "1KiB", 1024),
    ],
)
def test_each_kind_reads_and_prints(kind: kinds.Kind, text: str, value: object) -> None:
    assert kind.parse(text) == value
    assert kind.parse(kind.show(value)) == value


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (kinds.MODE, "0888"),
        (kinds.MODE, "rw"),
        (kinds.MODE, "01777"),
        (kinds.FLAG, "1"),
        (kinds.RATIO, "1.5"),
        (kinds.RATIO, "101%"),
        (kinds.RATIO, "10"),
        (kinds.UIDS, "no-such-user-here"),
        (kinds.UIDS, ","),
        (kinds.PATH, "a\0b"),
        (kinds.PATH, "~no-such-user-here/x"),
        (kinds.HEX_PREFIX, "A1"),
        (kinds.HEX_PREFIX, "a" * 65),
        (kinds.TEXT, ""),
        (kinds.TEXT, "a\nb"),
        (kinds.whole_number(1, 9), "0"),
        (kinds.whole_number(1, 9), "10"),
        (kinds.whole_number(1, 9), "1.0"),
        (kinds.choice(("a", "b")), "c"),
    ],
)
def test_each_kind_refuses_in_one_line(kind: kinds.Kind, text: str) -> None:
    with pytest.raises(ValueError, match="expected") as caught:
        kind.parse(text)
    assert "\n" not in str(caught.value)


def test_every_default_is_a_value_of_its_kind() -> None:
    for name, key in schema.all_keys():
        value = key.kind.parse(key.default_text)
        assert key.kind.parse(key.kind.show(value)) == value, name
        assert isinstance(value, Size) == (key.share_of != "" and value is not None), name
        assert key.help.endswith((".", "%)")), name


def test_a_share_prints_as_a_share() -> None:
    assert str(Size(percent=Decimal("12.50"))) == "12.50%"
    assert str(Size(size_bytes=1 << 30)) == "1GiB"
