"""`tierkv drain`: a daemon takes no new work and makes what it has durable."""

from __future__ import annotations

from typing import Annotated

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
        str, typer.Option("--wait", metavar="TIME", help="Longest wait for the flush.")
    ] = "30s",
    flush_only: Annotated[
        bool, typer.Option("--flush-only", help="Make pages durable; go on taking work.")
    ] = False,
    socket: SocketOption = None,
    config: ConfigOption = None,
    as_json: shared.JsonOption = False,
) -> int:
    """Stop taking new work, flush, report. Exits 1 when not everything became durable in time."""
    try:
        wait_s = parse_duration(wait)
    except ValueError as error:
        raise ConfigError(f"--wait: {error}") from None
    where = endpoint(config, socket)
    with spinner("drain"):
        if flush_only:
            with DaemonSocket(where.socket) as daemon:
                durable = daemon.flush(wait_s)
        else:
            _check_same(where)
            durable = _drain(where, wait_s)
    if as_json:
        write_json({"drained": not flush_only, "durable": durable})
    elif durable:
        write_line("every page is durable" + ("" if flush_only else "; no new work is taken"))
    else:
        write_note(f"tierkv: error: not every page was durable within {wait}; try again")
    return 0 if durable else 1


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


def _drain(where: Endpoint, wait_s: float) -> bool:
    answer = http_json(where, DRAIN_PATH, {"wait_s": wait_s}, wait_s + TIMEOUT_S)
    if not isinstance(answer, dict) or not isinstance(answer.get("durable"), bool):
        raise ConfigError(f"drain {where.url}: no answer to drain; is this a TierKV daemon?")
    return bool(answer["durable"])
