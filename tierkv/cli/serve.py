"""`tierkv engine serve`: the OpenAI-compatible HTTP server over one engine."""

from __future__ import annotations

import asyncio
import ipaddress
import signal
from typing import Annotated

import typer

from tierkv.cli import options as shared
from tierkv.cli.console import write_json, write_line, write_note
from tierkv.config import parse_size
from tierkv.storage.errors import ConfigError


def serve(
    model: shared.ModelOption = None,
    bind: Annotated[
        str, typer.Option("--bind", help="Address to listen on; others than loopback are public.")
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option("--port", min=0, max=65535, help="0 lets the system choose.")
    ] = 8000,
    api_key: Annotated[
        str | None,
        typer.Option(
            "--api-key",
            envvar="TIERKV_API_KEY",
            help="Ask clients for this bearer token. Safer in the environment than here.",
        ),
    ] = None,
    model_name: Annotated[
        str | None, typer.Option("--model-name", help="Name that clients see.")
    ] = None,
    max_requests: Annotated[
        int, typer.Option("--max-requests", min=1, help="Past it clients get status 429.")
    ] = 256,
    max_body: Annotated[
        str, typer.Option("--max-body", metavar="SIZE", help="Largest request body.")
    ] = "8MiB",
    drain_s: Annotated[
        float,
        typer.Option("--drain-s", min=0.0, help="After SIGTERM, seconds for running requests."),
    ] = 30.0,
    max_batch_tokens: Annotated[
        int, typer.Option("--max-batch-tokens", min=1, help="New tokens of one forward pass.")
    ] = 512,
    max_running: Annotated[
        int, typer.Option("--max-running", min=1, help="Requests in one batch.")
    ] = 64,
    schedule: Annotated[
        shared.ScheduleChoice, typer.Option("--schedule", help="Order of admission.")
    ] = shared.ScheduleChoice.FCFS,
    evict_policy: Annotated[
        str, typer.Option("--evict-policy", help="What leaves the pool first.")
    ] = "lru",
    page_tokens: shared.PageTokensOption = 16,
    pool: shared.PoolOption = "1GiB",
    host: shared.HostOption = shared.HOST_DEFAULT,
    host_arena: shared.HostArenaOption = None,
    nvme_dir: shared.NvmeDirOption = None,
    nvme: shared.NvmeOption = None,
    write_policy: shared.WritePolicyOption = shared.WritePolicyChoice.WRITE_BACK,
    admission: shared.AdmissionOption = shared.AdmissionChoice.HOTNESS,
    max_context: shared.MaxContextOption = None,
    device: shared.DeviceOption = shared.DeviceChoice.AUTO,
    threads: shared.ThreadsOption = None,
    as_json: shared.JsonOption = False,
) -> int:
    """Serve a model over HTTP, in the OpenAI API's shape."""
    body_bytes_max = parse_size(max_body, "--max-body")
    if api_key == "":
        raise ConfigError("--api-key: expected a key, got nothing; leave the option out for none")
    if api_key is None and not _is_loopback(bind):
        write_note(f"tierkv: warning: anybody who reaches {bind} can use this server; set a key")
    cache = shared.CacheOptions(
        page_tokens=page_tokens,
        pool=pool,
        host=host,
        host_arena=host_arena,
        nvme_dir=nvme_dir,
        nvme=nvme,
        write_policy=write_policy,
        admission=admission,
    )
    engine_options = shared.EngineOptions(
        model=model,
        device=device,
        threads=threads,
        max_context=max_context,
        max_batch_tokens=max_batch_tokens,
        max_running=max_running,
        schedule=schedule,
        evict_policy=evict_policy,
    )
    config = shared.engine_config_from_options(engine_options, cache)

    from tierkv.engine.serve.api import ApiOptions, ApiServer
    from tierkv.engine.serve.api_server import BindOptions
    from tierkv.engine.serve.api_server import serve as run_server
    from tierkv.engine.serve.engine import Engine

    def announce(url: str) -> None:
        if as_json:
            write_json({"url": url, "model": model_name or engine.model_name})
        else:
            write_line(f"listening on {url}")

    with Engine.open(config) as engine:
        api = ApiServer(
            engine,
            ApiOptions(
                api_key=api_key,
                model_name=model_name,
                body_bytes_max=body_bytes_max,
                requests_max=max_requests,
            ),
        )
        received = asyncio.run(run_server(api, BindOptions(bind, port, drain_s), announce))
        if cache.outlives_process and engine.stopped is None:
            shared.keep_prefixes(engine)
    return 130 if received == signal.SIGINT else 0


def _is_loopback(host: str) -> bool:
    """True for addresses that only this machine reaches."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
