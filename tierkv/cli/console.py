"""Where the command line writes: tables for people, one JSON object for programs.

Owns the two consoles. With --json exactly one object goes to standard output; progress, logs and
errors always go to standard error. Progress bars show on a terminal only. Called by every command.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

PIPE_COLUMNS = 200


def write_json(value: Any) -> None:
    """Print one JSON object and a newline on standard output."""
    write_line(json.dumps(value))


def write_line(text: str) -> None:
    """Print one line on standard output at once, even into a pipe."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def output_console() -> Console:
    """Standard output for tables; into a pipe or file as wide as they like to be.

    Text is shown as it is: an address like [fd00::2] is no style.
    """
    console = Console(markup=False, emoji=False)
    if not console.is_terminal:
        console.width = PIPE_COLUMNS
    return console


def write_table(table: Table) -> None:
    """Print a table on standard output."""
    output_console().print(table)


def write_note(text: str) -> None:
    """Print one line for people on standard error."""
    sys.stderr.write(text + "\n")


def new_table(title: str, *columns: str) -> Table:
    """A table whose first column is text and whose others are right-aligned."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right")
    return table


@contextmanager
def progress(text: str) -> Iterator[Callable[[int, int], None]]:
    """Show a bar on standard error when that is a terminal; yields report(done, total)."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task(text, total=None)

        def report(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)

        yield report


@contextmanager
def spinner(text: str) -> Iterator[Callable[[str], None]]:
    """Show that work goes on, on a terminal's standard error; yields tell(what is done now)."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda stage: None
        return
    with console.status(text) as status:
        yield lambda stage: status.update(f"{text}: {stage}")


def configure_logging(verbose: bool) -> None:
    """Send logs to standard error: warnings, and with `verbose` the life of every part."""
    logging.basicConfig(
        stream=sys.stderr,
        level=logging.INFO if verbose else logging.WARNING,
        format="tierkv: %(levelname)s %(name)s: %(message)s",
    )
