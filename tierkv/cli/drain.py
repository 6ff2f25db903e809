"""`tierkv drain`: a daemon takes no new work, makes what it has durable, and leaves its pool."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import typer

from tierkv.cli import options as shared
from tierkv.cli.console import spinner, write_json, write_line, write_note
from tierkv.cli.daemon_settings import ConfigOption
from tierkv.cli.operator import (
    STATUS_PATH,
    TIMEOUT_S,
    DaemonSocket,
    Endpoint,
    SocketOption,
    endpoint,
    http_json,
)
from tierkv.config.kinds import parse_duration
from tierkv.storage.errors import ConfigError

DRAIN_PATH = "/admin/drain"


def drain(
    wait: Annotated[
        str,
        typer.Option(
            "--wait", "--timeout", metavar="TIME", help="Longest wait for the flush and the pool."
        ),
    ] = "30s",
    flush_only: Annotated[
        bool, typer.Option("--flush-only", help="Make pages durable; go on taking work.")
    ] = False,
    socket: SocketOption = None,
    config: ConfigOption = None,
    as_json: shared.JsonOption = False,
) -> int:
    """Stop taking new work, flush, give hot pages to the pool. Exits 1 when some was not done."""
    try:
        wait_s = parse_duration(wait)
    except ValueError as error:
        raise ConfigError(f"--wait: {error}") from None
    where = endpoint(config, socket)
    pool: Mapping[str, Any] | None = None
    with spinner("drain"):
        if flush_only:
            with DaemonSocket(where.socket) as daemon:
                durable = daemon.flush(wait_s)
        else:
            _check_same(where)
            durable, pool = _drain(where, wait_s)
    done = durable and (pool is None or bool(pool.get("complete")))
    if as_json:
        more = {} if pool is None else {"pool": dict(pool)}
        write_json({"drained": not flush_only, "durable": durable, **more})
        return 0 if done else 1
    if durable:
        write_line("every page is durable" + ("" if flush_only else "; no new work is taken"))
    else:
        write_note(f"tierkv: error: not every page was durable within {wait}; try again")
    if pool is not None:
        _tell_pool(pool, wait)
    return 0 if done else 1


def _tell_pool(pool: Mapping[str, Any], wait: str) -> None:
    moved, left = pool.get("moved_pages", 0), pool.get("left_pages", 0)
    if pool.get("complete"):
        write_line(f"{moved:,} pages were copied to other members; none is held here alone")
        return
    write_note(
        f"tierkv: error: {moved:,} pages were copied to other members, {left:,} found no place "
        f"within {wait}; see tierkv pool status"
    )


def _check_same(where: Endpoint) -> None:
    """Socket and HTTP must be of one daemon: draining another would end its work."""
    if not where.by_socket:
        return
    with DaemonSocket(where.socket) as daemon:
        token = daemon.boot_token.hex()
    status = http_json(where, STATUS_PATH)
    if not isinstance(status, dict) or status.get("boot_token") != token:
        raise ConfigError(
            f"drain: the daemon at {where.url} is not the one at {where.socket}; name its "
            "configuration with --config"
        )


def _drain(where: Endpoint, wait_s: float) -> tuple[bool, Mapping[str, Any] | None]:
    """Whether all is durable, and what became of the pool's part; None without a pool."""
    answer = http_json(where, DRAIN_PATH, {"wait_s": wait_s}, wait_s + TIMEOUT_S)
    if not isinstance(answer, dict) or not isinstance(answer.get("durable"), bool):
        raise ConfigError(f"drain {where.url}: no answer to drain; is this a TierKV daemon?")
    pool = answer.get("pool")
    return answer["durable"], pool if isinstance(pool, Mapping) else None
