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
from tierkv.storage.errors import ConfigError

if TYPE_CHECKING:
    from tierkv.bench.report import BenchReport


class BenchName(StrEnum):
    """Modules of tierkv.bench that have a run()."""

    RADIX = "radix"
    TIER = "tier"
    ENGINE = "engine"
    RESTORE = "restore"


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
    as_json: shared.JsonOption = False,
) -> int:
    """Measure: radix, tier, engine or restore. Exits 0 when it measured, whatever the figures."""
    run: Callable[..., BenchReport] = importlib.import_module(f"tierkv.bench.{name.value}").run
    given = {"model": model, "directory": directory}
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
    flags = {"model": "--model", "directory": "--dir"}
    for option in wanted:
        if option not in known:
            raise ConfigError(f"bench {name.value}: takes no {flags[option]}; leave it out")
    return dict(wanted)


def show(report: BenchReport) -> None:
    """Print a report as one table: every figure with the group it belongs to."""
    table = new_table(f"bench {report.bench}", "figure", "value", "kind")
    for kind, figures in (
        ("result", report.results),
        ("limit", report.limits),
        ("ratio", report.ratios),
        ("config", report.config),
    ):
        for figure, value in figures.items():
            table.add_row(figure, _text(value), kind)
    write_table(table)


def _text(value: Any) -> str:
    return f"{value:,.4g}" if isinstance(value, float) else str(value)
