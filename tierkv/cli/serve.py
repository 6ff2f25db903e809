"""`tierkv engine serve`: the OpenAI-compatible HTTP server over one engine."""

from __future__ import annotations

import asyncio
import ipaddress
import signal
from dataclasses import dataclass
from typing import Annotated

import typer

from tierkv.cli import options as shared
from tierkv.cli.console import write_json, write_line, write_note
from tierkv.config import parse_size
from tierkv.storage.errors import ConfigError

BindOption = Annotated[
    str, typer.Option("--bind", help="Address to listen on; others than loopback are public.")
]
PortOption = Annotated[
    int, typer.Option("--port", min=0, max=65535, help="0 lets the system choose.")
]
ApiKeyOption = Annotated[
    str | None,
    typer.Option(
        "--api-key",
        envvar="TIERKV_API_KEY",
        help="Ask clients for this bearer token. Safer in the environment than here.",
    ),
]
ModelNameOption = Annotated[
    str | None, typer.Option("--model-name", help="Name that clients see. Default: the folder's.")
]
MaxRequestsOption = Annotated[
    int, typer.Option("--max-requests", min=1, help="Past it clients get status 429.")
]
MaxBodyOption = Annotated[
    str, typer.Option("--max-body", metavar="SIZE", help="Largest request body.")
]
DrainOption = Annotated[
    float, typer.Option("--drain-s", min=0.0, help="After SIGTERM, seconds for running requests.")
]
MaxBatchTokensOption = Annotated[
    int, typer.Option("--max-batch-tokens", min=1, help="New tokens of one forward pass.")
]
MaxRunningOption = Annotated[
    int, typer.Option("--max-running", min=1, help="Requests in one batch.")
]
ScheduleOption = Annotated[
    shared.ScheduleChoice, typer.Option("--schedule", help="Order of admission.")
]
EvictPolicyOption = Annotated[
    str, typer.Option("--evict-policy", help="What leaves the pool first: lru, lfu, fifo...")
]


@dataclass(frozen=True, slots=True)
class _ServerOptions:
    """The server's own options as the user wrote them."""

    bind: str
    port: int
    api_key: str | None
    model_name: str | None
    max_requests: int
    max_body: str
    drain_s: float


def serve(
    model: shared.ModelOption = None,
    bind: BindOption = "127.0.0.1",
    port: PortOption = 8000,
    api_key: ApiKeyOption = None,
    model_name: ModelNameOption = None,
    max_requests: MaxRequestsOption = 256,
    max_body: MaxBodyOption = "8MiB",
    drain_s: DrainOption = 30.0,
    max_batch_tokens: MaxBatchTokensOption = 512,
    max_running: MaxRunningOption = 64,
    schedule: ScheduleOption = shared.ScheduleChoice.FCFS,
    evict_policy: EvictPolicyOption = "lru",
    page_tokens: shared.PageTokensOption = 16,
    pool: shared.PoolOption = "1GiB",
    store: shared.StoreOption = None,
    host: shared.HostOption = None,
    host_arena: shared.HostArenaOption = None,
    nvme_dir: shared.NvmeDirOption = None,
    nvme: shared.NvmeOption = None,
    write_policy: shared.WritePolicyOption = shared.WritePolicyChoice.WRITE_THROUGH,
    admission: shared.AdmissionOption = shared.AdmissionChoice.HOTNESS,
    max_context: shared.MaxContextOption = None,
    device: shared.DeviceOption = shared.DeviceChoice.AUTO,
    restore: shared.RestoreOption = shared.RestoreChoice.AUTO,
    threads: shared.ThreadsOption = None,
    as_json: shared.JsonOption = False,
) -> int:
    """Serve a model over HTTP, in the OpenAI API's shape."""
    server = _ServerOptions(bind, port, api_key, model_name, max_requests, max_body, drain_s)
    cache = shared.CacheOptions(
        page_tokens=page_tokens,
        pool=pool,
        host=shared.HOST_DEFAULT if host is None and store is None else host,
        host_arena=host_arena,
        nvme_dir=nvme_dir,
        nvme=nvme,
        write_policy=write_policy,
        admission=admission,
        store=store,
    )
    engine = shared.EngineOptions(
        model=model,
        device=device,
        threads=threads,
        max_context=max_context,
        max_batch_tokens=max_batch_tokens,
        max_running=max_running,
        schedule=schedule,
        evict_policy=evict_policy,
        restore=restore,
    )
    return _run(server, cache, engine, as_json)


def _run(
    server: _ServerOptions,
    cache: shared.CacheOptions,
    engine_options: shared.EngineOptions,
    as_json: bool,
) -> int:
    """Serve until a signal; keep the pool's prefixes when pages outlive the process."""
    body_bytes_max = parse_size(server.max_body, "--max-body")
    _check_access(server)
    config = shared.engine_config_from_options(engine_options, cache)

    from tierkv.engine.serve.api import ApiOptions, ApiServer
    from tierkv.engine.serve.api_server import BindOptions
    from tierkv.engine.serve.api_server import serve as run_server
    from tierkv.engine.serve.engine import Engine

    def announce(url: str) -> None:
        if as_json:
            write_json({"url": url, "model": server.model_name or engine.model_name})
        else:
            write_line(f"listening on {url}")

    options = ApiOptions(
        api_key=server.api_key,
        model_name=server.model_name,
        body_bytes_max=body_bytes_max,
        requests_max=server.max_requests,
    )
    bind = BindOptions(server.bind, server.port, server.drain_s)
    with Engine.open(config) as engine:
        received = asyncio.run(run_server(ApiServer(engine, options), bind, announce))
        if cache.outlives_process and engine.stopped is None:
            shared.keep_prefixes(engine)
    return 130 if received == signal.SIGINT else 0


def _check_access(server: _ServerOptions) -> None:
    """Refuse an empty key; warn when strangers can reach a server without one."""
    if server.api_key == "":
        raise ConfigError("--api-key: expected a key, got nothing; leave the option out for none")
    if server.api_key is None and not _is_loopback(server.bind):
        write_note(
            f"tierkv: warning: anybody who reaches {server.bind} can use this server; set a key"
        )


def _is_loopback(host: str) -> bool:
    """True for addresses that only this machine reaches."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
