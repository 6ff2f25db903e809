"""Do the values fit together, and fit the machine? Shares become bytes here.

Owns the rules between keys. Each finding is blamed on the place of the value that has to change.
Asks the machine through tierkv/config/machine.py and changes nothing. Called by loading.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tierkv.config import schema
from tierkv.config.kinds import Size
from tierkv.config.machine import Machine, Space
from tierkv.config.schema import QUOTAS
from tierkv.config.sizes import format_size
from tierkv.config.sources import DEFAULT, Layers, Mistake

SOCKET_BYTES_MAX = 107
"""What the kernel has room for in the address of a unix socket."""


@dataclass(slots=True)
class Fitted:
    """Values with every share resolved to bytes, by dotted key."""

    values: dict[str, Any]
    mistakes: list[Mistake]


def fit(layers: Layers, machine: Machine) -> Fitted:
    """Resolve shares and apply every rule."""
    fitted = Fitted({name: value.parsed for name, value in layers.values.items()}, [])
    for section, what in (("host", "tmpfs"), ("nvme", "disk")):
        _fit_tier(section, what, layers, machine, fitted)
    _resolve_rest(layers, fitted)
    found = (
        *_class_mistakes(fitted.values),
        *_nvme_mistakes(fitted.values),
        *_daemon_mistakes(fitted.values),
        *_limit_mistakes(fitted.values),
        *_remote_mistakes(layers, fitted.values),
        *_quota_mistakes(layers, fitted.values),
    )
    fitted.mistakes += [
        Mistake(layers.place_of(name), f"{name}: {text}")
        for name, text in found
        if not any(broken in f"{name} {text}" for broken in layers.broken)
    ]
    return fitted


def _fit_tier(section: str, what: str, layers: Layers, machine: Machine, fitted: Fitted) -> None:
    """Resolve the shares of one tier's file system and compare its size with the room there."""
    folder: Path | None = fitted.values[f"{section}.directory"]
    space = Space(0, 0)
    known = False
    if folder is not None:
        try:
            space = machine.space(folder)
            known = True
        except OSError as error:
            name = f"{section}.directory"
            text = f"{name}: cannot use {folder}: {error.strerror}; name a folder"
            fitted.mistakes.append(Mistake(layers.place_of(name), text))
    for key in ("size", "min_free"):
        name = f"{section}.{key}"
        if isinstance(asked := fitted.values.get(name), Size):
            fitted.values[name] = asked.of(space.total_bytes)
    if not known:
        return
    name = f"{section}.size"
    size = fitted.values[name]
    kept = fitted.values.get(f"{section}.min_free", 0)
    room = max(space.available_bytes - kept, 0)
    if size > room:
        kept_text = f" beside min_free {format_size(kept)}" if kept else ""
        text = (
            f"{name}: expected at most {room} bytes ({format_size(room)}), what the {what} at "
            f"{folder} has room for{kept_text}, got {size} ({format_size(size)}); lower it"
        )
        fitted.mistakes.append(Mistake(layers.place_of(name), text))


def _resolve_rest(layers: Layers, fitted: Fitted) -> None:
    for name, value in fitted.values.items():
        key = schema.find(name)
        assert key is not None
        if isinstance(value, Size):
            assert key.share_of in ("host.size", "nvme.size")
            fitted.values[name] = value.of(fitted.values[key.share_of])


Findings = Iterator[tuple[str, str]]
"""(key to change, what is wrong with it)."""


def _class_mistakes(values: dict[str, Any]) -> Findings:
    if values["host.size"] < 1:
        yield "host.size", "expected above 0; pages reach every other tier through host memory"
    for section in ("host", "nvme"):
        whole, share = values[f"{section}.size"], values[f"{section}.class_size"]
        if share is not None and not 0 < share <= whole:
            yield (
                f"{section}.class_size",
                f"expected 1 to {section}.size ({whole}), got {share}",
            )


def _nvme_mistakes(values: dict[str, Any]) -> Findings:
    if values["nvme.directory"] is None and values["nvme.size"]:
        yield "nvme.size", "needs nvme.directory; name the folder for the pages"
    if values["nvme.directory"] is not None and not values["nvme.size"]:
        yield "nvme.directory", "needs nvme.size above 0; say how much of the disk may be used"
    budget = values["movement.write_budget"]
    if budget is not None and budget < 1:
        yield "movement.write_budget", "expected above 0, or none for no bound"


def _daemon_mistakes(values: dict[str, Any]) -> Findings:
    length = len(bytes(values["daemon.socket"]))
    if length > SOCKET_BYTES_MAX:
        yield (
            "daemon.socket",
            f"expected at most {SOCKET_BYTES_MAX} bytes, got {length}; choose a shorter path",
        )
    if values["http.bind"] is None and values["http.token"] is not None:
        yield "http.token", "needs http.bind; without it nobody can present the token"


def _limit_mistakes(values: dict[str, Any]) -> Findings:
    needed = 64 * values["limits.keys"] + 4096
    if values["limits.frame"] < needed:
        yield (
            "limits.frame",
            f"expected at least {needed} bytes for limits.keys {values['limits.keys']}, "
            f"got {values['limits.frame']}; raise it or lower limits.keys",
        )


def _remote_mistakes(layers: Layers, values: dict[str, Any]) -> Findings:
    """What cannot be meant. Whether a pool can be opened is seen when the daemon opens it: a bad
    one costs the pool, not the local tiers."""
    if values["pool.listen"] is not None and values["mooncake.master"] is not None:
        yield "mooncake.master", "expected none beside pool.listen; a node has one remote tier"
    for section, switch in (("pool", "listen"), ("mooncake", "master")):
        if values[f"{section}.{switch}"] is not None:
            continue
        given = (
            name
            for name, value in layers.values.items()
            if name.startswith(f"{section}.")
            and value.place != DEFAULT
            and not _is_default(name, value.parsed)
        )
        if (name := next(given, None)) is not None:
            yield name, f"needs {section}.{switch}; without it there is no {section}"


def _is_default(name: str, parsed: Any) -> bool:
    key = schema.find(name)
    assert key is not None
    return bool(key.kind.parse(key.default_text) == parsed)


def _quota_mistakes(layers: Layers, values: dict[str, Any]) -> Findings:
    for index in sorted(layers.rule_places):
        rule = {name: values.get(f"{QUOTAS}.{index}.{name}") for name in ("tenant", "namespace")}
        if (rule["tenant"] is None) == (rule["namespace"] is None):
            yield f"{QUOTAS}.{index}", "expected either tenant or namespace, exactly one of them"
    for tier in ("host", "nvme"):
        whole = values[f"{tier}.size"]
        floors = 0
        for index in sorted(layers.rule_places):
            name = f"{QUOTAS}.{index}.{tier}_floor"
            floor = values.get(name) or 0
            ceiling = values.get(f"{QUOTAS}.{index}.{tier}_ceiling")
            floors += floor
            if ceiling is not None and floor > ceiling:
                yield name, f"expected at most {tier}_ceiling ({ceiling}), got {floor}"
            elif floor and floors > whole:
                yield name, f"the floors so far add up to {floors}, above {tier}.size ({whole})"
