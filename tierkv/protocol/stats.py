"""StoreStats as a map of plain values and back: the `stats` of the verb stats.

Owns no field names: they are those of storage.base, so a counter added there travels by itself.
What a later daemon adds is passed over, what an earlier one lacks takes its default. Called by
the daemon (stats_fields) and the clients (parse_stats).
"""

from __future__ import annotations

import types
import typing
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from functools import cache
from typing import Any

from tierkv.protocol.errors import ProtocolError
from tierkv.protocol.fields import shown
from tierkv.protocol.messages import WireCode
from tierkv.storage.base import StoreStats


def stats_fields(stats: StoreStats) -> dict[str, Any]:
    """The map that goes over the wire: text, numbers, lists and maps only."""
    plain: dict[str, Any] = _plain(stats)
    return plain


def parse_stats(values: Mapping[str, Any]) -> StoreStats:
    """Inverse of stats_fields. Raises ProtocolError for a value of another type."""
    parsed = _parse("stats", StoreStats, values)
    assert isinstance(parsed, StoreStats)
    return parsed


def class_stats(values: Mapping[str, Any], page_bytes: int) -> StoreStats | None:
    """The stats of one page class out of a daemon's answer; None when it has no such class.

    The daemon's map has `classes`, a list of such maps with their `page_bytes`, whose tiers may be
    a map by name. Raises ProtocolError as parse_stats does.
    """
    classes = values.get("classes", ())
    for each in classes if isinstance(classes, list) else ():
        if isinstance(each, Mapping) and each.get("page_bytes") == page_bytes:
            tiers = each.get("tiers")
            listed = list(tiers.values()) if isinstance(tiers, Mapping) else tiers
            return parse_stats({**each, "tiers": listed})
    return None


def _plain(value: Any) -> Any:
    if is_dataclass(value):
        return {each.name: _plain(getattr(value, each.name)) for each in fields(value)}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Mapping):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


def _parse(where: str, kind: Any, value: Any) -> Any:
    """`value` as a `kind`: a dataclass, enum, number, text, or a collection or union of those."""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in inner:
            return None
        return _parse(where, next(each for each in inner if each is not type(None)), value)
    if origin is dict and isinstance(value, Mapping):
        return {
            _parse(where, inner[0], key): _parse(f"{where}.{key}", inner[1], item)
            for key, item in value.items()
        }
    if origin in (tuple, list) and isinstance(value, list):
        return origin(_parse(f"{where}[]", inner[0], item) for item in value)
    if is_dataclass(kind) and isinstance(value, Mapping):
        return _parse_dataclass(where, kind, value)
    if isinstance(kind, type) and issubclass(kind, Enum) and isinstance(value, str):
        found = next((each for each in kind if each.value == value), None)
        if found is not None:
            return found
    if kind is float and type(value) in (int, float):
        return float(value)
    if kind in (int, str, bool) and type(value) is kind:
        return value
    raise ProtocolError(
        WireCode.FIELD, f"{where}: expected {getattr(kind, '__name__', kind)}, got {shown(value)}"
    )


def _parse_dataclass(where: str, kind: Any, value: Mapping[str, Any]) -> Any:
    hints = _hints(kind)
    given: dict[str, Any] = {}
    for each in fields(kind):
        if each.name in value:
            given[each.name] = _parse(f"{where}.{each.name}", hints[each.name], value[each.name])
        elif each.default is MISSING and each.default_factory is MISSING:
            raise ProtocolError(WireCode.FIELD, f"{where}: field {each.name} is missing")
    return kind(**given)


@cache
def _hints(kind: Any) -> dict[str, Any]:
    return typing.get_type_hints(kind)
