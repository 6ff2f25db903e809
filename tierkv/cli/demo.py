"""`tierkv demo`: the main job on a real model, as one table."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tierkv.cli import options as shared
from tierkv.cli.console import new_table, spinner, write_json, write_note, write_table
from tierkv.config import parse_size

if TYPE_CHECKING:
    from tierkv.demo import DemoResult, DemoRow


def demo(
    model: shared.ModelOption = None,
    directory: Annotated[
        Path | None,
        typer.Option("--dir", help="Folder for pages. Default: a fresh temporary one."),
    ] = None,
    prefix_tokens: Annotated[
        int, typer.Option("--prefix-tokens", min=1, help="Least length of the shared prefix.")
    ] = 2000,
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", min=1, help="Tokens generated per case.")
    ] = 16,
    pool: shared.PoolOption = "1GiB",
    host: Annotated[
        str, typer.Option("--host", metavar="SIZE", help="Host memory for pages.")
    ] = "1GiB",
    nvme: Annotated[
        str, typer.Option("--nvme", metavar="SIZE", help="Disk space for pages.")
    ] = "2GiB",
    remote: Annotated[
        bool,
        typer.Option("--remote", help="Also over three daemons in network namespaces; needs root."),
    ] = False,
    as_json: shared.JsonOption = False,
) -> int:
    """Restore one prefix from every tier and compare with computing it."""
    pool_bytes = parse_size(pool, "--pool")
    host_bytes = parse_size(host, "--host")
    nvme_bytes = parse_size(nvme, "--nvme")

    from tierkv.demo import DemoOptions, run_demo

    options = DemoOptions(
        model=model,
        directory=directory,
        prefix_tokens=prefix_tokens,
        max_tokens=max_tokens,
        pool_bytes=pool_bytes,
        host_bytes=host_bytes,
        nvme_bytes=nvme_bytes,
        remote=remote,
    )
    with spinner("demo") as tell:
        result = run_demo(options, tell)
    if as_json:
        write_json({"rows": [_row_json(row) for row in result.rows]})
    else:
        _show(result)
    different = [row.case for row in result.rows if not row.identical]
    if different:
        write_note(f"tierkv: demo: output differs from the cold run in: {', '.join(different)}")
    return 1 if different else 0


def _row_json(row: DemoRow) -> dict[str, object]:
    return {
        "case": row.case,
        "ttft_s": row.ttft_s,
        "reused_tokens": row.reused_tokens,
        "identical": row.identical,
    }


def _show(result: DemoResult) -> None:
    table = new_table(
        f"{result.model} on {result.device}: one prompt of {result.prompt_tokens:,} tokens",
        "case",
        "prefix from",
        "time to first token",
        "speed-up",
        "tokens reused",
        "identical output",
    )
    cold_s = next((row.ttft_s for row in result.rows if row.case == "cold"), None)
    for row in result.rows:
        speedup = "" if cold_s is None or row.case == "cold" else f"{cold_s / row.ttft_s:.1f} x"
        table.add_row(
            row.case,
            row.source,
            f"{row.ttft_s * 1000:.1f} ms",
            speedup,
            f"{row.reused_tokens:,}",
            "yes" if row.identical else "NO",
        )
    write_table(table)
