"""`tierkv bench NAME`: runs one benchmark and prints its report."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tierkv.cli import options as shared
from tierkv.cli.console import new_table, spinner, write_line, write_table
from tierkv.cli.plan import bandwidth
from tierkv.storage.errors import ConfigError

if TYPE_CHECKING:
    from tierkv.bench.report import BenchReport


class BenchName(StrEnum):
    """Modules of tierkv.bench that have a run()."""

    RADIX = "radix"
    TIER = "tier"
    ENGINE = "engine"
    RESTORE = "restore"
    OFFLOAD = "offload"
    REMOTE = "remote"
    DAEMON = "daemon"


def bench(
    name: Annotated[BenchName, typer.Argument(help="Which benchmark.", metavar="NAME")],
    quick: Annotated[
        bool, typer.Option("--quick", help="Fewer repetitions: at most 40 seconds on 2 cores.")
    ] = False,
    model: shared.ModelOption = None,
    directory: Annotated[
        Path | None,
        typer.Option("--dir", help="Folder for its pages. Default: a fresh temporary one."),
    ] = None,
    throttle: Annotated[
        str | None,
        typer.Option("--throttle", help="Slow the disk down to this, such as 3GB/s (offload)."),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", help="Folder for CSV, JSON and PNG files (offload)."),
    ] = None,
    as_json: shared.JsonOption = False,
) -> int:
    """Measure: radix, tier, engine, restore, offload, daemon or remote.

    Exits 0 when it measured, whatever the figures.
    """
    run: Callable[..., BenchReport] = importlib.import_module(f"tierkv.bench.{name.value}").run
    rate = None if throttle is None else bandwidth(throttle, "--throttle")
    given = {"model": model, "directory": directory, "throttle": rate, "output": output}
    wanted = {option: value for option, value in given.items() if value is not None}
    accepted = _accepted(name, run, wanted)
    with spinner(f"bench {name.value}"):
        report = run(quick=quick, **accepted)
    if as_json:
        write_line(report.to_json())
    else:
        show(report)
    return 0


def _accepted(
    name: BenchName, run: Callable[..., BenchReport], wanted: Mapping[str, Any]
) -> dict[str, Any]:
    """The options that were given. Raises ConfigError for one this benchmark has no use for."""
    known = inspect.signature(run).parameters
    flags = {"directory": "--dir"}
    for option in wanted:
        if option not in known:
            flag = flags.get(option, f"--{option}")
            raise ConfigError(f"bench {name.value}: takes no {flag}; leave it out")
    return dict(wanted)


def show(report: BenchReport) -> None:
    """Print one table of single figures, and one for each list of rows."""
    table = new_table(f"bench {report.bench}", "figure", "value", "kind")
    lists: dict[str, list[dict[str, Any]]] = {}
    for kind, figures in (
        ("result", report.results),
        ("limit", report.limits),
        ("ratio", report.ratios),
        ("config", report.config),
    ):
        for figure, value in figures.items():
            if isinstance(value, list):
                lists[figure] = value
            else:
                table.add_row(figure, _text(value), kind)
    write_table(table)
    for figure, rows in lists.items():
        part = new_table(figure, *rows[0])
        for row in rows:
            part.add_row(*(_text(value) for value in row.values()))
        write_table(part)


def _text(value: Any) -> str:
    return f"{value:,.4g}" if isinstance(value, float) else str(value)
