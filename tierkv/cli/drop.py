"""`tierkv drop`: remove a namespace's pages from every tier of a running daemon."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from tierkv.cli import options as shared
from tierkv.cli.console import write_json, write_line, write_note
from tierkv.cli.daemon_settings import ConfigOption
from tierkv.cli.ls import DIGITS, model_of
from tierkv.cli.operator import DaemonSocket, SocketOption, endpoint
from tierkv.storage.errors import ConfigError

HEX_DIGITS_MIN = 4


def drop(
    namespace: Annotated[
        str | None,
        typer.Argument(metavar="[NAMESPACE]", help="First digits of a namespace, as ls shows it."),
    ] = None,
    tenant: Annotated[
        str | None, typer.Option("--tenant", help="Every namespace of this tenant.")
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    socket: SocketOption = None,
    config: ConfigOption = None,
    as_json: shared.JsonOption = False,
) -> int:
    """Remove pages of one namespace or one tenant. Cannot be undone; they are computed again."""
    if (namespace is None) == (tenant is None):
        raise ConfigError("drop: expected either a namespace or --tenant, exactly one of them")
    with DaemonSocket(endpoint(config, socket).socket) as daemon:
        rows = [row for row in daemon.namespaces() if bytes(row["namespace"])]
        chosen = _of_tenant(rows, tenant) if tenant is not None else [_named(rows, namespace or "")]
        if not yes and not _confirmed(chosen):
            write_note("tierkv: nothing was dropped")
            return 1
        dropped = [
            {"namespace": row["namespace"].hex(), "pages": daemon.drop(row["namespace"])}
            for row in chosen
        ]
    if as_json:
        write_json({"dropped": dropped})
    else:
        for each in dropped:
            write_line(f"dropped {each['namespace'][:DIGITS]}: {each['pages']:,} pages")
    return 0


def _named(rows: list[dict[str, Any]], prefix: str) -> dict[str, Any]:
    text = prefix.lower()
    if len(text) < HEX_DIGITS_MIN or any(digit not in "0123456789abcdef" for digit in text):
        raise ConfigError(
            f"drop: expected at least {HEX_DIGITS_MIN} hex digits of a namespace, got {prefix!r}; "
            "see tierkv ls"
        )
    found = [row for row in rows if row["namespace"].hex().startswith(text)]
    if len(found) != 1:
        count = "no namespace" if not found else f"{len(found)} namespaces"
        raise ConfigError(f"drop: {count} begin with {prefix}; see tierkv ls")
    return found[0]


def _of_tenant(rows: list[dict[str, Any]], tenant: str) -> list[dict[str, Any]]:
    found = [row for row in rows if row["tenant"] == tenant]
    if not found:
        raise ConfigError(f"drop: tenant {tenant!r} has no namespace here; see tierkv ls")
    return found


def _confirmed(rows: list[dict[str, Any]]) -> bool:
    """Ask on a terminal. Raises ConfigError where nobody can be asked."""
    if not sys.stdin.isatty():
        raise ConfigError("drop: nobody to ask on this standard input; add --yes")
    for row in rows:
        pages = ", ".join(f"{count:,} in {tier}" for tier, count in row["pages"].items())
        write_note(
            f"{row['namespace'].hex()[:DIGITS]}  {model_of(row['fingerprint'])}  {pages or 'empty'}"
        )
    return typer.confirm("Remove these pages?", default=False, err=True)
