"""`tierkv pool status`: the pool as one of its members sees it, or the Mooncake Store it uses.

No state. Tables fit a terminal of 80 columns as long as names do. Called by the command line.
"""

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
POOL = "pool"
MOONCAKE = "mooncake"
_CALLED = {POOL: "the pool", MOONCAKE: "Mooncake"}
_NOBODY = {
    POOL: "no member had room, or this node is missing in their list of members",
    MOONCAKE: "the store had no room, or did not answer",
}


def status(
    socket: SocketOption = None, config: ConfigOption = None, as_json: shared.JsonOption = False
) -> int:
    """Show members, epochs, copies, bandwidth and transports. Exits 1 when the pool is off."""
    found = read(endpoint(config, socket)).status
    remote = remote_of(found)
    kind = POOL if isinstance(found.get(POOL), Mapping) else MOONCAKE
    if as_json:
        write_json(dict(remote))
    elif remote.get("state") == OFF:
        write_line(f"{_CALLED[kind]} is off: {remote.get('why')}")
    elif kind == MOONCAKE:
        write_line(f"Mooncake Store at {remote.get('master', '?')}, {remote.get('protocol', '?')}")
    else:
        write_table(own_table(remote))
        for table in member_tables(remote):
            write_table(table)
    if not as_json and remote.get("state") != OFF:
        for line in (*notes(remote), *copy_notes(found, _NOBODY[kind])):
            write_line(line)
    return 1 if remote.get("state") == OFF else 0


def remote_of(found: Mapping[str, Any]) -> Mapping[str, Any]:
    """The remote tier's part of a status. Raises ConfigError when that daemon has none."""
    for kind in (POOL, MOONCAKE):
        if isinstance(remote := found.get(kind), Mapping):
            return remote
    raise ConfigError("pool status: this daemon is in no pool; set pool.listen")


def own_table(pool: Mapping[str, Any]) -> Table:
    """This member, and what holds for the whole pool."""
    table = new_table(
        f"member {pool.get('name', '?')} at {pool.get('address', '?')}",
        *("epoch", "state", "members", "replicas", "host\nshare", "nvme\nshare", "leased"),
    )
    settings = _map(pool, "settings")
    table.add_row(
        str(pool.get("epoch", "-")),
        "leaving" if pool.get("leaving") else str(pool.get("state", "-")),
        str(pool.get("membership", "-")),
        f"{settings.get('replicas', '-')} (hot {settings.get('hot_replicas', '-')})",
        _percent(settings.get("host_share")),
        _percent(settings.get("nvme_share")),
        f"{_map(pool, 'leases').get('pages', 0):,} pages",
    )
    return table


def member_tables(pool: Mapping[str, Any]) -> tuple[Table, Table]:
    """The other members, one a row: who they are, and what has passed between them and this one."""
    members = members_of(pool)
    several = "member" if len(members) == 1 else "members"
    live = sum(bool(each.get("live")) for each in members)
    who = new_table(
        f"{len(members)} other {several}, {live} live",
        *("member", "address", "epoch", "state", "transport"),
    )
    for column in who.columns:
        column.justify = "left"
        column.overflow = "fold"
    traffic = new_table(
        "pages", "member", "it has", "read from it", "sent to it", "reads", "latency", "breaker"
    )
    for each in members:
        who.add_row(
            str(each.get("name") or "-"),
            str(each.get("address", "-")),
            str(each.get("epoch") or "-"),
            state_of(each),
            str(each.get("transport") or "-"),
        )
        reads = each.get("read_bytes_per_s")
        latency = each.get("read_latency_s")
        traffic.add_row(
            str(each.get("name") or each.get("address", "-")),
            f"{each.get('known_pages', 0):,}",
            format_size(each.get("bytes_in", 0)),
            format_size(each.get("bytes_out", 0)),
            "-" if not reads else f"{format_size(int(reads))}/s",
            "-" if not latency else f"{latency * 1e3:.1f} ms",
            str(each.get("breaker", "-")),
        )
    return who, traffic


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
    if pool.get("degraded"):
        yield str(pool["degraded"])
    if (fences := pool.get("fences", 0)) > 1:
        yield (
            f"this name was met {fences} times with a later epoch: when that goes on, two nodes "
            f"are called {pool.get('name')}"
        )
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


def copy_notes(found: Mapping[str, Any], why: str) -> Iterator[str]:
    """Copies that were wanted and not made, one line a page size."""
    for each in found.get("classes", ()):
        remote = _map(each, "remote")
        if failed := remote.get("push_failed", 0) + remote.get("push_dropped", 0):
            yield (
                f"{failed:,} copies of pages of {each.get('page_bytes')} bytes were not made since "
                f"the start: {why}"
            )


def _percent(share: object) -> str:
    return f"{share * 100:g}%" if isinstance(share, int | float) else "-"


def _map(values: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = values.get(name)
    return found if isinstance(found, Mapping) else {}
