"""`tierkv ls`: the namespaces a daemon knows, and what each of them has."""

from __future__ import annotations

import json
from typing import Any

from tierkv.cli import options as shared
from tierkv.cli.console import new_table, write_json, write_table
from tierkv.cli.daemon_settings import ConfigOption
from tierkv.cli.operator import DaemonSocket, SocketOption, endpoint
from tierkv.config import format_size
from tierkv.storage.clock import SystemClock
from tierkv.storage.remote import POOL_OWNER

DIGITS = 12
"""Of a namespace's digest, as tables show it."""
TIERS = ("host", "nvme")


def ls(
    socket: SocketOption = None, config: ConfigOption = None, as_json: shared.JsonOption = False
) -> int:
    """List namespaces: tenant, model, pages and bytes per tier, last use."""
    with DaemonSocket(endpoint(config, socket).socket) as daemon:
        rows = daemon.namespaces()
    if as_json:
        write_json({"namespaces": [_plain(row) for row in rows]})
        return 0
    table = new_table(
        f"{len(rows)} namespaces",
        *("namespace", "tenant", "model", "page"),
        *(f"{tier} {what}" for tier in TIERS for what in ("pages", "bytes")),
        "last use",
    )
    for column in table.columns[:3]:
        column.justify = "left"
    for row in sorted(rows, key=lambda row: -float(row["last_use"])):
        pages, sizes = row["pages"], row["bytes"]
        table.add_row(
            bytes(row["namespace"]).hex()[:DIGITS] or _owner(int(row["owner"])),
            row["tenant"] or "-",
            model_of(row["fingerprint"]),
            format_size(row["page_bytes"]),
            *(
                text
                for tier in TIERS
                for text in (f"{pages.get(tier, 0):,}", format_size(sizes.get(tier, 0)))
            ),
            _age(float(row["last_use"])),
        )
    write_table(table)
    return 0


def model_of(fingerprint: str) -> str:
    """A model's architecture in a few words, for people; "unknown" without a fingerprint."""
    try:
        found: Any = json.loads(fingerprint)
        shape = found["architecture"]
        return (
            f"{shape.get('architecture', 'model')} {shape.get('layers', '?')}L "
            f"kv{shape.get('kv_heads', '?')}x{shape.get('head_dim', '?')} {found['kv_dtype']} "
            f"{found['page_tokens']} tok"
        )
    except (ValueError, KeyError, TypeError, AttributeError):
        return "unknown"


def _owner(number: int) -> str:
    """Whose pages without a namespace are."""
    return "pool" if number == POOL_OWNER else f"owner {number}"


def _age(last_use_s: float) -> str:
    if last_use_s <= 0:
        return "-"
    age_s = max(0.0, SystemClock().wall() - last_use_s)
    for unit, length_s in (("d", 86400), ("h", 3600), ("m", 60)):
        if age_s >= length_s:
            return f"{age_s / length_s:.0f}{unit} ago"
    return f"{age_s:.0f}s ago"


def _plain(row: dict[str, Any]) -> dict[str, Any]:
    fingerprint = row["fingerprint"]
    return {
        **row,
        "namespace": bytes(row["namespace"]).hex(),
        "fingerprint": json.loads(fingerprint) if fingerprint else None,
    }
