"""`tierkv stat`: what is in each tier, of a running engine or daemon or of closed cache files."""

from __future__ import annotations

import dataclasses
import json
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from pydantic import BaseModel, ConfigDict, ValidationError

from tierkv.cli import options as shared
from tierkv.cli.console import new_table, write_json, write_table
from tierkv.cli.daemon_settings import ConfigOption
from tierkv.cli.operator import endpoint
from tierkv.config import format_size
from tierkv.storage.base import RemoteStats, StoreStats, TierStats
from tierkv.storage.errors import ConfigError, TierIOError

if TYPE_CHECKING:
    from rich.table import Table

TIMEOUT_S = 10.0
ANSWER_BYTES_MAX = 1 << 20


class PoolFigures(BaseModel):
    """The part of the engine's prefix cache that is shown."""

    model_config = ConfigDict(extra="ignore")

    pages_total: int
    pages_free: int


class EngineFigures(BaseModel):
    """The part of GET /stats that is shown."""

    model_config = ConfigDict(extra="ignore")

    model: str
    device: str
    page_bytes: int
    running: int
    waiting: int
    cache: PoolFigures
    store: StoreStats | None


def stat(
    url: Annotated[
        str | None, typer.Option("--url", help="A running engine, http://127.0.0.1:PORT.")
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option("--api-key", envvar="TIERKV_API_KEY", help="That engine's bearer token."),
    ] = None,
    socket: Annotated[
        Path | None, typer.Option("--socket", help="Unix socket of a running daemon.")
    ] = None,
    host_arena: Annotated[
        Path | None, typer.Option("--host-arena", help="Arena file of a stopped engine.")
    ] = None,
    nvme_dir: Annotated[
        Path | None, typer.Option("--nvme-dir", help="Page folder of a stopped engine.")
    ] = None,
    config: ConfigOption = None,
    as_json: shared.JsonOption = False,
) -> int:
    """Show pages, bytes, hits and state of every tier."""
    sources = (url is not None, socket is not None, host_arena is not None or nvme_dir is not None)
    if config is not None and not any(sources):
        socket = endpoint(config, None).socket
    elif sum(sources) != 1:
        raise ConfigError(
            "stat: expected either --url of a running engine, --socket or --config of a running "
            "daemon, or --host-arena or --nvme-dir of a stopped one"
        )
    if url is not None:
        _stat_running(url, api_key, as_json)
    elif socket is not None:
        _stat_daemon(socket, as_json)
    else:
        _stat_files(host_arena, nvme_dir, as_json)
    return 0


def _stat_running(url: str, api_key: str | None, as_json: bool) -> None:
    answer = _fetch(url, api_key)
    try:
        figures = EngineFigures.model_validate(answer)
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
        place = ".".join(map(str, fault["loc"]))
        raise ConfigError(
            f"stat {url}: unexpected answer at {place}: {fault['msg']}; is this a TierKV engine?"
        ) from None
    tiers = [] if figures.store is None else list(figures.store.tiers)
    remote = None if figures.store is None else figures.store.remote
    if as_json:
        write_json({"source": url, "tiers": _tiers_json(tiers), "engine": answer})
        return
    table = _tier_table(
        f"{figures.model} on {figures.device}: {figures.running} running, {figures.waiting} waiting"
    )
    used = figures.cache.pages_total - figures.cache.pages_free
    size = figures.page_bytes
    table.add_row(
        "gpu",
        f"{used:,} / {figures.cache.pages_total:,}",
        f"{format_size(used * size)} / {format_size(figures.cache.pages_total * size)}",
        *[""] * 5,
        "ok",
    )
    _show(table, tiers, [] if remote is None else [(size, remote)])


def _stat_daemon(socket: Path, as_json: bool) -> None:
    from tierkv.cli.operator import DaemonSocket
    from tierkv.protocol.stats import class_stats

    with DaemonSocket(socket) as daemon:
        status = daemon.stats()
    tiers: list[TierStats] = []
    remotes: list[tuple[int, RemoteStats]] = []
    for each in status.get("classes", ()):
        page_bytes = each.get("page_bytes", 0)
        found = class_stats(status, page_bytes)
        tiers += [] if found is None else found.tiers
        if found is not None and found.remote is not None:
            remotes.append((page_bytes, found.remote))
    if as_json:
        write_json({"source": str(socket), "tiers": _tiers_json(tiers), "daemon": status})
    else:
        _show(_tier_table(f"daemon at {socket}"), tiers, remotes)


def _stat_files(host_arena: Path | None, nvme_dir: Path | None, as_json: bool) -> None:
    from tierkv.storage.inspection import inspect_arena, inspect_nvme

    tiers = [] if host_arena is None else [inspect_arena(host_arena)]
    tiers += [] if nvme_dir is None else inspect_nvme(nvme_dir)
    if as_json:
        write_json({"source": "files", "tiers": _tiers_json(tiers), "engine": None})
    else:
        _show(_tier_table("cache files; counters start with an engine"), tiers)


def _fetch(url: str, api_key: str | None) -> Any:
    """The JSON of GET /stats. Raises ConfigError for what the user must change."""
    address = url.rstrip("/") + "/stats"
    if not address.startswith(("http://", "https://")):
        raise ConfigError(f"--url: expected http://HOST:PORT, got {url!r}")
    headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
    try:
        request = urllib.request.Request(address, headers=headers)
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response:
            return json.loads(response.read(ANSWER_BYTES_MAX))
    except urllib.error.HTTPError as error:
        hint = "give its --api-key" if error.code == 401 else "is this a TierKV engine?"
        raise ConfigError(f"stat {url}: status {error.code}; {hint}") from None
    except ValueError as error:
        raise ConfigError(f"stat {url}: {error}; is this a TierKV engine?") from None
    except OSError as error:
        reason = error.reason if isinstance(error, urllib.error.URLError) else error
        raise TierIOError(f"stat {url}: {reason}; is the engine running?") from None


def _tiers_json(tiers: list[TierStats]) -> list[dict[str, Any]]:
    return [dataclasses.asdict(tier) for tier in tiers]


def _tier_table(title: str) -> Table:
    return new_table(
        title,
        "tier",
        "pages",
        "bytes",
        "hits",
        "misses",
        "evictions",
        "corrupt",
        "io errors",
        "state",
    )


def _show(
    table: Table, tiers: list[TierStats], remotes: Sequence[tuple[int, RemoteStats]] = ()
) -> None:
    """The tiers, then each remote tier: its pages are those known of elsewhere."""
    for tier in tiers:
        used = tier.capacity_pages - tier.free_pages
        table.add_row(
            tier.name.value,
            f"{tier.committed_pages:,} / {tier.capacity_pages:,}",
            f"{format_size(used * tier.slot_bytes)} / "
            f"{format_size(tier.capacity_pages * tier.slot_bytes)}",
            f"{tier.hits:,}",
            f"{tier.misses:,}",
            f"{tier.evictions:,}",
            f"{tier.corrupt:,}",
            f"{tier.io_errors:,}",
            "ok" if tier.degraded is None else f"degraded: {tier.degraded}",
        )
    for page_bytes, remote in remotes:
        table.add_row(
            "remote",
            f"{remote.known_pages:,} known",
            format_size(remote.known_pages * page_bytes),
            f"{remote.landed:,}",
            f"{remote.missed:,}",
            "",
            f"{remote.corrupt:,}",
            f"{remote.failed:,}",
            "ok" if remote.degraded is None else f"degraded: {remote.degraded}",
        )
    write_table(table)
