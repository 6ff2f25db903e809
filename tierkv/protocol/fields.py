"""Checks of single fields, and the table that turns a frame's map into a typed value.

Owns the kinds of fields there are and what each may be. Does not know the verbs: requests.py and
answers.py declare those. Invariants: a check returns a value that fits its declaration or raises
ProtocolError with the field's name; nothing it does costs more than O(length of the value).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from tierkv.protocol.errors import ProtocolError
from tierkv.protocol.frames import ID_MAX, TEXT_BYTES_MAX
from tierkv.protocol.messages import Limits, WireCode
from tierkv.storage.types import KEY_BYTES

COUNT_MAX = (1 << 32) - 1
NAME_CHARS_MAX = 256

Check = Callable[[Any, Limits], str | None]
"""Says what was expected when the value is not that; None when it is."""

Parsed = TypeVar("Parsed")


def whole(highest: int, lowest: int = 0) -> Check:
    """An integer from `lowest` to `highest`."""

    def check(value: Any, limits: Limits) -> str | None:
        if type(value) is int and lowest <= value <= highest:
            return None
        return f"an integer from {lowest} to {highest}"

    return check


def whole_up_to(name: str) -> Check:
    """An integer from 0 to the limit called `name`."""

    def check(value: Any, limits: Limits) -> str | None:
        highest: int = getattr(limits, name)
        if type(value) is int and 0 <= value <= highest:
            return None
        return f"an integer from 0 to {highest}"

    return check


def packed(item_bytes: int) -> Check:
    """Bytes that are up to limits.keys items of `item_bytes` each."""

    def check(value: Any, limits: Limits) -> str | None:
        longest = item_bytes * limits.keys
        if type(value) is bytes and len(value) <= longest and len(value) % item_bytes == 0:
            return None
        return f"bytes in multiples of {item_bytes}, at most {longest}"

    return check


def codes(highest: int, lowest: int = 0) -> Check:
    """Up to limits.keys bytes, each a code from `lowest` to `highest`."""

    def check(value: Any, limits: Limits) -> str | None:
        known = type(value) is bytes and len(value) <= limits.keys
        if known and (not value or lowest <= min(value) <= max(value) <= highest):
            return None
        return f"at most {limits.keys} bytes from {lowest} to {highest}"

    return check


def exactly(*lengths: int) -> Check:
    """Bytes of one of these lengths."""

    def check(value: Any, limits: Limits) -> str | None:
        if type(value) is bytes and len(value) in lengths:
            return None
        return f"bytes, {' or '.join(map(str, lengths))} long"

    return check


def text(highest: int) -> Check:
    """Text of at most `highest` characters."""

    def check(value: Any, limits: Limits) -> str | None:
        if type(value) is str and len(value) <= highest:
            return None
        return f"text of at most {highest} characters"

    return check


def one_of(*values: str) -> Check:
    """One of these texts."""

    def check(value: Any, limits: Limits) -> str | None:
        return None if type(value) is str and value in values else " or ".join(values)

    return check


def ids(value: Any, limits: Limits) -> str | None:
    """A list of ids."""
    if (
        type(value) is list
        and len(value) <= limits.ids
        and all(type(item) is int and 0 <= item <= ID_MAX for item in value)
    ):
        return None
    return f"a list of at most {limits.ids} ids"


def blob(value: Any, limits: Limits) -> str | None:
    """Bytes of any length that fits a frame."""
    return None if type(value) is bytes else "bytes"


def truth(value: Any, limits: Limits) -> str | None:
    """True or false."""
    return None if type(value) is bool else "true or false"


def mapping(value: Any, limits: Limits) -> str | None:
    """A map with text for keys."""
    if type(value) is dict and all(type(key) is str for key in value):
        return None
    return "a map"


def optional_mapping(value: Any, limits: Limits) -> str | None:
    """A map, or nothing."""
    return None if value is None else mapping(value, limits)


def mappings(value: Any, limits: Limits) -> str | None:
    """A list of maps."""
    if type(value) is list and all(mapping(item, limits) is None for item in value):
        return None
    return "a list of maps"


keys = packed(KEY_BYTES)
an_id = whole(ID_MAX)
count = whole(COUNT_MAX)
name = text(NAME_CHARS_MAX)
long_text = text(TEXT_BYTES_MAX)


def read(
    what: str,
    kind: Callable[..., Parsed],
    checks: Mapping[str, Check],
    values: Mapping[str, Any],
    limits: Limits,
) -> Parsed:
    """A `kind` made of the checked `values`. Raises ProtocolError: none missing, none unknown."""
    for field, check in checks.items():
        if field not in values:
            raise ProtocolError(WireCode.FIELD, f"{what}: field {field} is missing")
        expected = check(values[field], limits)
        if expected is not None:
            raise ProtocolError(
                WireCode.FIELD,
                f"{what}: expected {field} to be {expected}, got {shown(values[field])}",
            )
    if len(values) != len(checks):
        unknown = next(field for field in values if field not in checks)
        raise ProtocolError(WireCode.FIELD, f"{what}: unknown field {shown(unknown)}")
    return kind(**values)


def shown(value: object) -> str:
    """A value as an error message may repeat it: short, whatever a peer sent."""
    if isinstance(value, bytes):
        return f"{len(value)} bytes"
    if isinstance(value, list | dict):
        return f"a {type(value).__name__} of {len(value)}"
    return repr(value)[:64] if not isinstance(value, str) else repr(value[:64])
