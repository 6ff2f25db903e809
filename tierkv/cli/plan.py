"""`tierkv plan`: what restoring is worth on a machine that is not here."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from tierkv.cli import options as shared
from tierkv.cli.console import new_table, write_line, write_table
from tierkv.config import parse_size
from tierkv.storage.errors import ConfigError

CONTEXTS = (4096, 32768, 131072)


def plan(
    gpu: Annotated[str, typer.Option("--gpu", help="a100, l40s, h100, h200 or b200.")] = "h100",
    model: Annotated[str, typer.Option("--model", help="Such as llama-3.1-8b.")] = "llama-3.1-8b",
    nvme: Annotated[
        str, typer.Option("--nvme", help="Bandwidth of the tier for one GPU, such as 3GB/s.")
    ] = "3GB/s",
    mfu: Annotated[
        float, typer.Option("--mfu", help="Share of the peak rate that prefill reaches.")
    ] = 0.5,
    context: Annotated[
        list[int] | None, typer.Option("--context", help="Context length in tokens; repeat.")
    ] = None,
    as_json: shared.JsonOption = False,
) -> int:
    """Show prefill time, break-even bandwidth and the plan per context length."""
    from tierkv.machines import forecast, gpu_named, model_named

    if not 0 < mfu <= 1:
        raise ConfigError(f"plan: --mfu is {mfu}, expected above 0, at most 1")
    lengths = tuple(context) if context else CONTEXTS
    if min(lengths) < 1:
        raise ConfigError(f"plan: --context is {min(lengths)}, expected at least 1")
    rate = bandwidth(nvme, "--nvme")
    chosen, shape = gpu_named(gpu), model_named(model)
    rows = [forecast(chosen, shape, tokens, rate, mfu) for tokens in lengths]
    if as_json:
        body = {
            "gpu": chosen.name,
            "model": shape.name,
            "kv_bytes_per_token": shape.kv_bytes_per_token,
            "bytes_per_s": rate,
            "rows": [
                {
                    "context_tokens": row.context_tokens,
                    "prefill_s": row.prefill_s,
                    "prefill_ms_per_1k_tokens": row.prefill_s * 1e6 / row.context_tokens,
                    "break_even_bytes_per_s": row.break_even_bytes_per_s,
                    "load_s": row.plan.load_all_s,
                    "expected_s": row.plan.expected_s,
                    "compute_tokens": row.plan.compute_tokens,
                    "load_tokens": row.plan.load_tokens,
                }
                for row in rows
            ],
        }
        write_line(json.dumps(body))
        return 0
    title = f"{shape.name} on {chosen.name}, {shape.kv_bytes_per_token / 1024:.0f} KiB a token"
    table = new_table(
        title, "context", "prefill", "ms per 1k", "break-even", "load all", "best plan", "takes"
    )
    for row in rows:
        split = row.plan
        table.add_row(
            f"{row.context_tokens:,}",
            f"{row.prefill_s:.2f} s",
            f"{row.prefill_s * 1e6 / row.context_tokens:.1f}",
            f"{row.break_even_bytes_per_s / 1e9:.1f} GB/s",
            f"{split.load_all_s:.2f} s",
            f"compute {split.compute_tokens:,}, load {split.load_tokens:,}",
            f"{split.expected_s:.2f} s",
        )
    write_table(table)
    return 0


def bandwidth(text: str, name: str) -> int:
    """Bytes a second from "3GB/s", "800MB" or plain bytes. Raises ConfigError."""
    rate = parse_size(text.removesuffix("/s"), name)
    if rate < 1:
        raise ConfigError(f"{name} is {text!r}, expected above 0")
    return rate
