"""`tierkv top`: a daemon's tiers, clients and requests, live."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console, Group
from rich.live import Live

from tierkv.cli import options as shared
from tierkv.cli.console import new_table, output_console, write_json
from tierkv.cli.daemon_settings import ConfigOption
from tierkv.cli.operator import (
    STATUS_PATH,
    DaemonSocket,
    Endpoint,
    SocketOption,
    endpoint,
    http_json,
)
from tierkv.config import format_size
from tierkv.config.kinds import parse_duration
from tierkv.storage.clock import SystemClock
from tierkv.storage.errors import ConfigError, TierIOError, TierKVError

if TYPE_CHECKING:
    from rich.console import RenderableType

INTERVAL_S_MIN = 0.1
COUNTERS = ("hits", "misses", "writes", "evictions")
"""Of a tier: shown as rates."""
REMOTE_COUNTERS = ("landed", "missed", "pushed")
"""Of a remote tier, in their place: pages that came, that were not there, copies made."""


@dataclass(frozen=True, slots=True)
class Reading:
    """What the daemon told at one moment."""

    at_s: float
    status: Mapping[str, Any]


def top(
    interval: Annotated[
        str, typer.Option("--interval", metavar="TIME", help="Between two looks.")
    ] = "2s",
    once: Annotated[bool, typer.Option("--once", help="Look once and end; for scripts.")] = False,
    socket: SocketOption = None,
    config: ConfigOption = None,
    as_json: shared.JsonOption = False,
) -> int:
    """Show tiers, clients and requests of a running daemon until Ctrl-C. --json looks once."""
    try:
        interval_s = parse_duration(interval)
    except ValueError as error:
        raise ConfigError(f"--interval: {error}") from None
    if interval_s < INTERVAL_S_MIN:
        raise ConfigError(f"--interval: expected at least {INTERVAL_S_MIN:g} s, got {interval}")
    where = endpoint(config, socket)
    first = read(where)
    console = output_console()
    if as_json:
        write_json(dict(first.status))
    elif once or not console.is_terminal:
        console.print(screen(None, first))
    else:
        _watch(where, first, interval_s, console)
    return 0


def read(where: Endpoint) -> Reading:
    """Ask once, on a connection of its own: a daemon that was restarted is met again.

    A daemon that drains greets nobody, but its HTTP still tells.
    """
    status: Any
    try:
        with DaemonSocket(where.socket) as daemon:
            status = daemon.stats()
    except TierIOError as away:
        if where.by_socket or where.url is None:
            raise
        try:
            status = http_json(where, STATUS_PATH)
        except TierKVError:
            raise away from None
    if not isinstance(status, dict):
        raise ConfigError(f"status {where.url}: expected an object; is this a TierKV daemon?")
    return Reading(SystemClock().monotonic(), status)


def _watch(where: Endpoint, first: Reading, interval_s: float, console: Console) -> None:
    """Refresh until Ctrl-C, which ends the command as everywhere else: status 130."""
    pause = threading.Event()
    before = first
    with Live(screen(None, first), console=console, screen=True, auto_refresh=False) as live:
        while not pause.wait(interval_s):
            now = read(where)
            live.update(screen(before, now), refresh=True)
            before = now


def screen(before: Reading | None, now: Reading) -> RenderableType:
    """Tables of one reading; rates need the one before."""
    status = now.status
    sessions = _map(status, "sessions")
    state = "draining" if status.get("closing") else "serving"
    clients = new_table(f"daemon {status.get('pid', '?')}: {state}", "clients", *_SESSION_COLUMNS)
    clients.add_row(
        str(sessions.get("connected", 0)),
        *(f"{sessions.get(name, 0):,}" for name in _SESSION_COLUMNS.values()),
    )
    return Group(clients, _tiers(before, now), _requests(before, now))


_SESSION_COLUMNS = {
    "leases": "leases",
    "leased pages": "leased_pages",
    "reservations": "reservations",
    "reserved pages": "reserved_pages",
    "expired holds": "expired_holds",
    "quarantined": "quarantined_pages",
}


def _tiers(before: Reading | None, now: Reading) -> RenderableType:
    table = new_table("tiers", "page", "tier", "pages", "bytes", *_rate_columns(), "state")
    former = {} if before is None else tiers_of(before.status)
    for place, tier in tiers_of(now.status).items():
        page_bytes, name = place
        used = tier["capacity_pages"] - tier["free_pages"]
        slot_bytes = tier["slot_bytes"]
        table.add_row(
            format_size(page_bytes),
            name,
            f"{tier['committed_pages']:,} / {tier['capacity_pages']:,}",
            f"{format_size(used * slot_bytes)} / "
            f"{format_size(tier['capacity_pages'] * slot_bytes)}",
            *(_rate(former.get(place), tier, counter, before, now) for counter in COUNTERS),
            "ok" if tier.get("degraded") is None else f"degraded: {tier['degraded']}",
        )
    remotes = {} if before is None else remotes_of(before.status)
    for page_bytes, remote in remotes_of(now.status).items():
        table.add_row(
            format_size(page_bytes),
            "remote",
            f"{remote['known_pages']:,} known",
            format_size(remote["known_pages"] * page_bytes),
            *(
                _rate(remotes.get(page_bytes), remote, name, before, now)
                for name in REMOTE_COUNTERS
            ),
            "-",
            "ok" if remote.get("degraded") is None else f"degraded: {remote['degraded']}",
        )
    return table


def remotes_of(status: Mapping[str, Any]) -> dict[int, Mapping[str, Any]]:
    """The remote tier of every page size that has one, as its counters."""
    found = {}
    for each in status.get("classes", ()):
        if isinstance(remote := each.get("remote"), Mapping):
            found[each["page_bytes"]] = remote
    return found


def tiers_of(status: Mapping[str, Any]) -> dict[tuple[int, str], Mapping[str, Any]]:
    """Every tier of every page size. Raises ConfigError when that is no daemon's status."""
    try:
        return {
            (each["page_bytes"], name): tier
            for each in status["classes"]
            for name, tier in each["tiers"].items()
        }
    except (KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"status: unexpected answer ({error!r}); install the same TierKV on both sides"
        ) from None


def _requests(before: Reading | None, now: Reading) -> RenderableType:
    table = new_table("requests", "verb", "answered", "refused", "rate", "mean")
    former = {} if before is None else _map(_map(before.status, "requests"), "answered")
    requests = _map(now.status, "requests")
    seconds = _map(requests, "seconds")
    for verb, codes in sorted(_map(requests, "answered").items()):
        total = sum(codes.values())
        good = codes.get("ok", 0)
        rate = "-"
        if before is not None:
            since = total - sum(_map(former, verb).values())
            rate = f"{since / max(now.at_s - before.at_s, 1e-9):,.0f}/s"
        mean = f"{seconds.get(verb, 0.0) / total * 1e6:,.0f} us" if total else "-"
        table.add_row(verb, f"{good:,}", f"{total - good:,}", rate, mean)
    return table


def _rate_columns() -> list[str]:
    return [f"{counter}/s" for counter in COUNTERS]


def _rate(
    former: Mapping[str, Any] | None,
    tier: Mapping[str, Any],
    counter: str,
    before: Reading | None,
    now: Reading,
) -> str:
    """A counter's growth a second; its total until there are two readings, or after a restart."""
    if before is None or former is None or tier[counter] < former[counter]:
        return f"({tier[counter]:,})"
    return f"{(tier[counter] - former[counter]) / max(now.at_s - before.at_s, 1e-9):,.0f}"


def _map(values: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = values.get(name)
    return found if isinstance(found, Mapping) else {}
