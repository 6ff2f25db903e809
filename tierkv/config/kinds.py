"""Kinds of configuration values: how each is written, read and printed.

Owns parsing of one value from its text, wherever the text came from: a YAML scalar, an environment
variable or a flag. Knows no key and no file. Invariant: parse(show(value)) == value. A parser
raises ValueError with "expected ..., got ..."; who knows the key and the line adds them. Called by
tierkv/config/schema.py and sources.py.
"""

from __future__ import annotations

import ipaddress
import os
import pwd
import re
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from enum import StrEnum
from pathlib import Path
from typing import Any

from tierkv.config.sizes import parse_size
from tierkv.storage.errors import ConfigError
from tierkv.storage.pool.config import Address

NONE = "none"
"""How "no value" is written for a key that may have none."""
TEXT_CHARS_MAX = 4096
DURATION_S_MAX = 10 * 365 * 86400.0
UID_MAX = 2**32 - 2

_UNITS_S = {"ms": Decimal("0.001"), "s": Decimal(1), "m": Decimal(60), "h": Decimal(3600)}
_UNITS_S["d"] = Decimal(86400)
_NUMBER = r"[0-9]{1,12}(?:\.[0-9]{1,9})?"
_DURATION = re.compile(rf"({_NUMBER}) ?(ms|s|m|h|d)")
_PERCENT = re.compile(rf"({_NUMBER}) ?%")
_INTEGER = re.compile(r"-?[0-9]{1,19}")
_MODE = re.compile(r"(?:0o?)?([0-7]{3})")
_FLAGS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}


@dataclass(frozen=True, slots=True)
class Size:
    """A byte count, or a share of something that only the machine knows."""

    size_bytes: int | None = None
    percent: Decimal | None = None

    def of(self, whole_bytes: int) -> int:
        """Bytes, when 100% is `whole_bytes`; rounded down."""
        if self.size_bytes is not None:
            return self.size_bytes
        assert self.percent is not None
        return int(whole_bytes * self.percent / 100)

    def __str__(self) -> str:
        if self.percent is not None:
            return f"{self.percent:f}%"
        assert self.size_bytes is not None
        return show_size(self.size_bytes)


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of value."""

    metavar: str
    """In help texts."""
    parse: Callable[[str], Any]
    """Text to value. Raises ValueError with one line."""
    show: Callable[[Any], str] = str
    optional: bool = False
    """The value may be None, written as "none" or left empty."""
    is_list: bool = False
    """In YAML it may be a list; elsewhere it is written with commas."""


def optional(kind: Kind) -> Kind:
    """The same kind, or no value at all."""

    def parse(text: str) -> Any:
        return None if text.strip().lower() in ("", NONE) else kind.parse(text)

    def show(value: Any) -> str:
        return NONE if value is None else kind.show(value)

    return Kind(kind.metavar, parse, show, optional=True, is_list=kind.is_list)


def whole_number(minimum: int, maximum: int) -> Kind:
    """An integer within bounds, both included."""

    def parse(text: str) -> int:
        value = int(text) if _INTEGER.fullmatch(text.strip()) else None
        if value is None or not minimum <= value <= maximum:
            raise ValueError(f"expected a number from {minimum} to {maximum}, got {text!r}")
        return value

    return Kind("N", parse)


def choice(names: type[StrEnum] | tuple[str, ...]) -> Kind:
    """One of a few names; an enum's are kept as its members."""
    values = {str(name): name for name in names}

    def parse(text: str) -> Any:
        if text.strip() not in values:
            raise ValueError(f"expected one of {', '.join(values)}, got {text!r}")
        return values[text.strip()]

    return Kind("NAME", parse)


def choices(names: tuple[str, ...]) -> Kind:
    """Some of a few names, in the order given, each at most once."""

    def parse(text: str) -> tuple[str, ...]:
        found = _parts(text)
        if not found or set(found) - set(names) or len(set(found)) < len(found):
            raise ValueError(f"expected some of {', '.join(names)}, each once, got {text!r}")
        return found

    return Kind("NAMES", parse, ",".join, is_list=True)


def address(default_port: int) -> Kind:
    """Where a process of another machine, or this one, listens: host:port."""
    return Kind("HOST:PORT", lambda text: _address(text, default_port))


def addresses(default_port: int) -> Kind:
    """Several of them. Whether they fit together is for whoever uses them."""

    def parse(text: str) -> tuple[Address, ...]:
        found = tuple(_address(part, default_port) for part in _parts(text))
        if not found:
            raise ValueError(f"expected addresses such as node2:{default_port}, got {text!r}")
        return found

    return Kind("ADDRESSES", parse, lambda value: ",".join(map(str, value)), is_list=True)


def parse_duration(text: str) -> float:
    """Seconds of "30s", "5m", "1d", "250ms" or "2h". Raises ValueError. "0" needs no unit."""
    if text.strip() == "0":
        return 0.0
    match = _DURATION.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"expected a duration such as 30s, 5m, 2h or 1d, got {text!r}")
    value = float(Decimal(match[1]) * _UNITS_S[match[2]])
    if value > DURATION_S_MAX:
        raise ValueError(f"expected at most {DURATION_S_MAX / 86400:.0f}d, got {text!r}")
    return value


def show_duration(value_s: float) -> str:
    """The shortest of the forms that parse_duration reads."""
    exact = Decimal(repr(value_s))
    for unit in ("d", "h", "m", "s"):
        count = exact / _UNITS_S[unit]
        if exact and count == count.to_integral_value():
            return f"{count:.0f}{unit}"
    return "0" if not exact else f"{(exact * 1000).normalize():f}ms"


def _duration(text: str) -> float:
    value = parse_duration(text)
    if value <= 0:
        raise ValueError(f"expected a duration above 0, got {text!r}")
    return value


def _size(text: str) -> int:
    try:
        return parse_size(text, "size")
    except ConfigError as error:
        raise ValueError(str(error).removeprefix("size: ")) from None


def show_size(size_bytes: int) -> str:
    """The shortest exact form that parse_size reads: 1GiB, 1536KiB, 1000."""
    for unit, factor in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size_bytes and size_bytes % factor == 0:
            return f"{size_bytes // factor}{unit}"
    return str(size_bytes)


def _rate(text: str) -> int:
    size, slash, unit = text.strip().partition("/")
    if slash and unit.strip() != "s":
        raise ValueError(f"expected bytes a second such as 64MB/s, got {text!r}")
    try:
        return _size(size)
    except ValueError:
        raise ValueError(f"expected bytes a second such as 64MB/s, got {text!r}") from None


def _share_or_size(text: str) -> Size:
    percent = _PERCENT.fullmatch(text.strip())
    if percent is None:
        try:
            return Size(size_bytes=_size(text))
        except ValueError as error:
            if "%" not in text and "at most" in str(error):
                raise
            raise ValueError(f"expected a size such as 20GiB or 10%, got {text!r}") from None
    value = Decimal(percent[1])
    if value > 100:
        raise ValueError(f"expected at most 100%, got {text!r}")
    return Size(percent=value)


def _ratio(text: str) -> float:
    percent = _PERCENT.fullmatch(text.strip())
    plain = re.fullmatch(_NUMBER, text.strip())
    value = Decimal(percent[1]) / 100 if percent else Decimal(plain[0]) if plain else None
    if value is None or value > 1:
        raise ValueError(f"expected a share from 0% to 100%, got {text!r}")
    return float(value)


def _show_ratio(value: float) -> str:
    return f"{(Decimal(repr(value)) * 100).normalize():f}%"


def _flag(text: str) -> bool:
    value = _FLAGS.get(text.strip().lower())
    if value is None:
        raise ValueError(f"expected true or false, got {text!r}")
    return value


def _mode(text: str) -> int:
    match = _MODE.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"expected a file mode such as 0600 or 0660, got {text!r}")
    return int(match[1], 8)


def _text(text: str) -> str:
    if not text or len(text) > TEXT_CHARS_MAX or not text.isprintable():
        raise ValueError(f"expected 1 to {TEXT_CHARS_MAX} printable characters, got {text[:40]!r}")
    return text


def _path(text: str) -> Path:
    if not text.strip() or "\0" in text:
        raise ValueError(f"expected a path, got {text!r}")
    try:
        return Path(text).expanduser().absolute()
    except RuntimeError:
        raise ValueError(f"expected a path, got {text!r}: no such user") from None


def _parts(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _address(text: str, default_port: int) -> Address:
    host = text.strip()
    try:
        if not host.isprintable() or any(each in host for each in " /@"):
            raise ValueError
        found = Address.parse(host, default_port)
        if ":" in found.host:
            ipaddress.IPv6Address(found.host)
        if host.startswith("[") and f"[{found.host}]" not in host:
            raise ValueError
    except (ValueError, ConfigError):
        raise ValueError(
            f"expected an address such as node2:{default_port}, got {text!r}"
        ) from None
    return found


def _uids(text: str) -> tuple[int, ...]:
    parts = _parts(text)
    if not parts:
        raise ValueError(f"expected user names or ids, got {text!r}")
    return tuple(_uid(part) for part in parts)


def _uid(text: str) -> int:
    if text.isascii() and text.isdigit() and int(text) <= UID_MAX:
        return int(text)
    if text == "self":
        return os.getuid()
    try:
        return pwd.getpwnam(text).pw_uid
    except KeyError:
        raise ValueError(f"expected user names or ids, got {text!r}: no such user") from None


def _hex_prefix(text: str) -> str:
    if re.fullmatch(r"[0-9a-f]{1,64}", text.strip()) is None:
        raise ValueError(f"expected 1 to 64 digits 0-9a-f, got {text!r}")
    return text.strip()


SIZE = Kind("SIZE", _size, show_size)
SHARE_OR_SIZE = Kind("SIZE|%", _share_or_size)
RATIO = Kind("%", _ratio, _show_ratio)
RATE = Kind("SIZE/s", _rate, lambda value: f"{show_size(value)}/s")
DURATION = Kind("TIME", _duration, show_duration)
FLAG = Kind("BOOL", _flag, lambda value: str(value).lower())
MODE = Kind("MODE", _mode, lambda value: f"{value:04o}")
TEXT = Kind("TEXT", _text)
PATH = Kind("PATH", _path)
UIDS = Kind("USERS", _uids, lambda value: ",".join(map(str, value)), is_list=True)
HEX_PREFIX = Kind("HEX", _hex_prefix)
