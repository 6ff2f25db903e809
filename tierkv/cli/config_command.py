"""`tierkv config show` and `tierkv config check`: what is in force, and what is wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from tierkv.cli import options as shared
from tierkv.cli.console import new_table, write_json, write_line, write_note, write_table
from tierkv.cli.daemon_settings import (
    ConfigOption,
    SetOption,
    check_remote,
    daemon_config,
    load_configuration,
    with_key_flags,
)
from tierkv.config import schema
from tierkv.config.loading import load


@with_key_flags
def show(
    config: ConfigOption = None,
    assignments: SetOption = None,
    explain: Annotated[
        bool, typer.Option("--explain", help="Say what each key means, too.")
    ] = False,
    as_json: shared.JsonOption = False,
    **flags: Any,
) -> int:
    """Print every key, the value in force and where it came from. Exits 2 on a mistake."""
    loaded = load_configuration(config, assignments, flags)
    meanings = {value.key: _meaning(value.key) for value in loaded.in_force} if explain else {}
    if as_json:
        values = {
            value.key: {"value": value.value, "source": value.source}
            | ({"meaning": meanings[value.key]} if explain else {})
            for value in loaded.in_force
        }
        write_json({"values": values, "mistakes": [str(mistake) for mistake in loaded.mistakes]})
    else:
        columns = ("key", "value", "from", *(("meaning",) if explain else ()))
        table = new_table("configuration in force", *columns)
        for column in table.columns:
            column.justify = "left"
        for value in loaded.in_force:
            more = (meanings[value.key],) if explain else ()
            table.add_row(value.key, value.value, value.source, *more)
        write_table(table)
    if loaded.mistakes:
        loaded.settings()
    return 0


def _meaning(name: str) -> str:
    key = schema.find(name)
    assert key is not None
    return key.help


def check(
    file: Annotated[Path, typer.Argument(help="YAML file.", metavar="FILE")],
    as_json: shared.JsonOption = False,
) -> int:
    """Check a file against its keys and this machine: exit 0, or 2 with one line per mistake.

    The environment is left out: a file is right or wrong by itself. A pool that could not be
    opened is a mistake here, although a daemon would serve on without it.
    """
    loaded = load(file, {})
    if not loaded.mistakes:
        check_remote(daemon_config(loaded.settings()))
    if as_json:
        write_json({"file": str(file), "mistakes": [str(mistake) for mistake in loaded.mistakes]})
    elif not loaded.mistakes:
        write_line(f"{file}: ok")
    else:
        for mistake in loaded.mistakes:
            write_note(f"tierkv: error: {mistake}")
    return 2 if loaded.mistakes else 0
