"""`tierkv fsck`: an offline check of cache files, and their repair."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tierkv.cli import options as shared
from tierkv.cli.console import new_table, progress, write_json, write_line, write_note, write_table
from tierkv.config import format_size
from tierkv.storage.errors import ConfigError, TierError

if TYPE_CHECKING:
    from tierkv.storage.fsck import FsckProgress, FsckReport

CLASS_FOLDERS = "class-*"
"""A daemon's folder has one nvme root per page size; an engine's is such a root itself."""
SHOWN_MAX = 100
EXIT_PROBLEMS = 1
EXIT_CANNOT_CHECK = 2


def fsck(
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="Page folder of a stopped daemon.")
    ],
    arena: Annotated[
        list[Path] | None,
        typer.Option("--arena", help="Arena file to check as well. May be repeated."),
    ] = None,
    repair: Annotated[
        bool, typer.Option("--repair", help="Remove or rebuild what is wrong.")
    ] = False,
    quick: Annotated[
        bool, typer.Option("--quick", help="Headers and index only: do not read payloads.")
    ] = False,
    as_json: shared.JsonOption = False,
) -> int:
    """Check slots, headers, index and accounting: exit 0 clean, 1 problems left, 2 no check."""
    from tierkv.storage.fsck import check_store

    reports: list[tuple[str, FsckReport]] = []
    try:
        for name, root, file in _places(directory, arena or []):
            with progress(f"fsck {name}") as tell:
                reports.append((name, check_store(root, file, repair, not quick, _bar(tell))))
    except TierError as error:
        write_note(f"tierkv: error: {' '.join(str(error).split())}")
        return EXIT_CANNOT_CHECK
    clean = all(report.clean for _, report in reports)
    if as_json:
        write_json({"clean": clean, "places": [_plain(name, each) for name, each in reports]})
    else:
        for name, report in reports:
            _show(name, report)
    return 0 if clean else EXIT_PROBLEMS


def _places(directory: Path, arenas: list[Path]) -> Iterator[tuple[str, Path | None, Path | None]]:
    """(name, nvme root, arena file) of each check."""
    if not directory.is_dir():
        raise ConfigError(f"fsck {directory}: not a folder; check the path")
    roots = sorted(path for path in directory.glob(CLASS_FOLDERS) if path.is_dir())
    for root in roots or [directory]:
        yield str(root), root, None
    for file in arenas:
        yield str(file), None, file


def _bar(tell: Callable[[int, int], None]) -> Callable[[FsckProgress], None]:
    return lambda state: tell(state.done, state.total)


def _plain(name: str, report: FsckReport) -> dict[str, Any]:
    return {
        "place": name,
        "clean": report.clean,
        **{
            field.name: getattr(report, field.name)
            for field in dataclasses.fields(report)
            if field.name != "findings"
        },
        "findings": [
            {**dataclasses.asdict(finding), "note": finding.note} for finding in report.findings
        ],
    }


def _show(name: str, report: FsckReport) -> None:
    verdict = "clean" if report.clean else "PROBLEMS"
    write_line(
        f"{name}: {verdict}: {report.pages:,} pages in {report.slots:,} slots, "
        f"{format_size(report.read_bytes)} read in {report.elapsed_s:.1f} s"
    )
    if not report.findings:
        return
    table = new_table(name, "kind", "place", "what", "state")
    for column in table.columns:
        column.justify = "left"
    for finding in report.findings[:SHOWN_MAX]:
        state = "note" if finding.note else "repaired" if finding.repaired else "left"
        table.add_row(finding.kind.value, finding.place, finding.line, state)
    write_table(table)
    hidden = len(report.findings) - SHOWN_MAX + report.unlisted
    if hidden > 0:
        write_line(f"and {hidden:,} more; --json lists {len(report.findings):,} of them")
