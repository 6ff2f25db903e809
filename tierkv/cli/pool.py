"""`tierkv pool status`: the pool as one of its members sees it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from tierkv.cli import options as shared
from tierkv.cli.console import new_table, write_json, write_line, write_table
from tierkv.cli.daemon_settings import ConfigOption
from tierkv.cli.operator import SocketOption, endpoint
from tierkv.cli.top import read
from tierkv.config import format_size
from tierkv.storage.errors import ConfigError

if TYPE_CHECKING:
    from rich.table import Table

OFF = "off"


def status(
    socket: SocketOption = None, config: ConfigOption = None, as_json: shared.JsonOption = False
) -> int:
    """Show members, epochs, copies, bandwidth and transports. Exits 1 when the pool is off."""
    found = read(endpoint(config, socket)).status
    pool = pool_of(found)
    if as_json:
        write_json(dict(pool))
    elif pool.get("state") == OFF:
        write_line(f"the pool is off: {pool.get('why')}")
    else:
        write_table(own_table(pool))
        write_table(member_table(pool))
        for line in notes(pool):
            write_line(line)
    return 1 if pool.get("state") == OFF else 0


def pool_of(found: Mapping[str, Any]) -> Mapping[str, Any]:
    """The pool's part of a status. Raises ConfigError when that daemon has none."""
    pool = found.get("pool")
    if not isinstance(pool, Mapping):
        other = " (its remote tier is a Mooncake Store)" if found.get("mooncake") else ""
        raise ConfigError(f"pool status: this daemon is in no pool{other}; set pool.listen")
    return pool


def own_table(pool: Mapping[str, Any]) -> Table:
    """This member, and what holds for the whole pool."""
    table = new_table(
        f"member {pool.get('name', '?')} at {pool.get('address', '?')}",
        "epoch",
        "state",
        "membership",
        "replicas",
        "host share",
        "nvme share",
        "leases held",
        "pages leased",
    )
    settings = _map(pool, "settings")
    table.add_row(
        str(pool.get("epoch", "-")),
        "leaving" if pool.get("leaving") else str(pool.get("state", "-")),
        str(pool.get("membership", "-")),
        f"{settings.get('replicas', '-')} (hot {settings.get('hot_replicas', '-')})",
        _percent(settings.get("host_share")),
        _percent(settings.get("nvme_share")),
        f"{_map(pool, 'leases').get('held', 0):,}",
        f"{_map(pool, 'leases').get('pages', 0):,}",
    )
    return table


def member_table(pool: Mapping[str, Any]) -> Table:
    """The other members, one a row."""
    members = members_of(pool)
    table = new_table(
        f"{len(members)} other members, {sum(bool(each.get('live')) for each in members)} live",
        *("member", "address", "epoch", "state", "transport", "knows of"),
        *("in", "out", "reads", "latency", "breaker"),
    )
    for column in table.columns[:5]:
        column.justify = "left"
    for each in members:
        reads = each.get("read_bytes_per_s")
        latency = each.get("read_latency_s")
        table.add_row(
            str(each.get("name") or "-"),
            str(each.get("address", "-")),
            str(each.get("epoch") or "-"),
            state_of(each),
            str(each.get("transport") or "-"),
            f"{each.get('known_pages', 0):,} pages",
            format_size(each.get("bytes_in", 0)),
            format_size(each.get("bytes_out", 0)),
            "-" if not reads else f"{format_size(int(reads))}/s",
            "-" if not latency else f"{latency * 1e3:.1f} ms",
            str(each.get("breaker", "-")),
        )
    return table


def members_of(pool: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The other members; empty while the pool is off."""
    members = pool.get("members")
    return [each for each in members if isinstance(each, Mapping)] if members else []


def state_of(member: Mapping[str, Any]) -> str:
    """Live, leaving, silent, or what the link to it is doing."""
    if member.get("live"):
        return "leaving" if member.get("leaving") else "live"
    state = str(member.get("state", "away"))
    return "silent" if state == "live" else state


def notes(pool: Mapping[str, Any]) -> Iterator[str]:
    """What somebody should know, one line each."""
    if pool.get("problem"):
        yield f"members: {pool['problem']}"
    for size, text in _map(pool, "page_faults").items():
        yield f"pages of {size} bytes are not in the pool: {text}"
    for name, text in _map(pool, "declined").items():
        yield f"{name} is not used here: {text}"
    for member in members_of(pool):
        who = member.get("name") or member.get("address")
        if member.get("problem"):
            yield f"{who}: {member['problem']}"
        for name, text in _map(member, "declined").items():
            yield f"{who}: {name} is not taken: {text}"


def _percent(share: object) -> str:
    return f"{share * 100:g}%" if isinstance(share, int | float) else "-"


def _map(values: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = values.get(name)
    return found if isinstance(found, Mapping) else {}
