"""The daemon in figures, for /status, the verb `stats` and the list of namespaces.

No state: reads what the parts tell of themselves. Called on the loop's thread, but for
namespace_rows(), which asks the tiers and runs in a worker.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from tierkv.protocol.stats import stats_fields
from tierkv.storage.base import StoreStats
from tierkv.storage.remote import POOL_OWNER
from tierkv.storage.types import TierName

if TYPE_CHECKING:
    from tierkv.daemon.page_class import PageClass
    from tierkv.daemon.service import Service

POOL_TENANT = "pool"
"""Whose the pages are that are kept for other nodes, in the list of namespaces."""


def status_fields(service: Service) -> dict[str, Any]:
    """Everything /status shows, made of maps, lists, numbers and text.

    O(classes * namespaces + members).
    """
    return {
        "pid": os.getpid(),
        "boot_token": service.boot_token.hex(),
        "closing": service.closing,
        "config_digest": service.config.digest(),
        "classes": [_class_fields(each) for each in service.classes],
        "sessions": _session_fields(service),
        "requests": _request_fields(service),
        "background": service.background_fields(),
        **_remote_fields(service),
    }


def namespace_rows(service: Service) -> list[dict[str, Any]]:
    """One row a namespace: who it is and what it has in each tier. O(pages)."""
    usage = {each.page_bytes: each.store.owners() for each in service.classes}
    rows: list[dict[str, Any]] = []
    for known in service.namespaces.all():
        used = usage.get(known.page_bytes, {}).pop(known.owner, None)
        rows.append(
            {
                "namespace": known.digest,
                "owner": known.owner,
                "tenant": known.tenant,
                "page_bytes": known.page_bytes,
                "fingerprint": known.fingerprint,
                "pages": {} if used is None else _by_tier(used.pages),
                "bytes": {} if used is None else _by_tier(used.bytes),
                "last_use": 0.0 if used is None else used.last_use,
            }
        )
    for page_bytes, left in usage.items():
        rows += [
            {
                "namespace": b"",
                "owner": owner,
                "tenant": POOL_TENANT if owner == POOL_OWNER else "",
                "page_bytes": page_bytes,
                "fingerprint": "",
                "pages": _by_tier(used.pages),
                "bytes": _by_tier(used.bytes),
                "last_use": used.last_use,
            }
            for owner, used in sorted(left.items())
        ]
    return rows


def _remote_fields(service: Service) -> dict[str, Any]:
    """`pool` and `mooncake`: what each says of itself, None where it is not configured."""
    fields: dict[str, Any] = {"pool": None, "mooncake": None}
    if service.remote is not None and service.remote.kind is not None:
        fields[service.remote.kind] = service.remote.status()
    return fields


def _class_fields(pages: PageClass) -> dict[str, Any]:
    stats = pages.store.stats()
    fields = stats_fields(stats)
    fields["tiers"] = {tier["name"]: tier for tier in fields["tiers"]}
    kept = pages.store.owners().get(POOL_OWNER)
    return {
        "page_bytes": pages.page_bytes,
        "host_bytes": pages.host_bytes,
        "nvme_bytes": pages.nvme_bytes,
        "commit_mismatches": pages.commit_mismatches,
        "ready": ready(stats),
        "pool_pages": {} if kept is None else _by_tier(kept.pages),
        **fields,
    }


def ready(stats: StoreStats) -> bool:
    """Whether the store serves at all: a degraded nvme still leaves host memory."""
    return any(tier.name is TierName.HOST for tier in stats.tiers)


def _session_fields(service: Service) -> dict[str, Any]:
    sessions = service.sessions.values()
    return {
        "connected": service.connected,
        "greeted": len(sessions),
        "leases": sum(len(each.leases) for each in sessions),
        "leased_pages": sum(each.leased_pages for each in sessions),
        "reservations": sum(len(each.reservations) for each in sessions),
        "reserved_pages": sum(each.reserved_pages for each in sessions),
        "expired_holds": service.timer.expired,
        "quarantined_pages": service.quarantine.pages,
        "quarantined_pages_total": service.quarantine.total_pages,
    }


def _request_fields(service: Service) -> dict[str, Any]:
    counts = service.counts
    verbs: dict[str, dict[str, int]] = {}
    for (verb, code), count in counts.answered.items():
        verbs.setdefault(verb, {})[code or "ok"] = count
    return {
        "connections": counts.connections,
        "refused_connections": counts.refused_connections,
        "internal_errors": counts.internal_errors,
        "answered": verbs,
        "seconds": dict(counts.seconds),
    }


def _by_tier(values: dict[TierName, int]) -> dict[str, int]:
    return {tier.value: value for tier, value in values.items()}
