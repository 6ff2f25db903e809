"""What a person is told of the pool: maps, lists, numbers and text, for JSON.

Owns no state. Called by Pool.status().
"""

from __future__ import annotations

from typing import Any

from tierkv.storage.pool.config import PoolConfig
from tierkv.storage.pool.link import Link
from tierkv.storage.pool.remote import PoolRemote
from tierkv.storage.pool.serving import ServerStats


def member_row(link: Link) -> dict[str, Any]:
    """One member, as this node sees it."""
    session = link.session()
    counts = link.counts()
    return {
        "name": link.name,
        "address": str(link.address),
        "epoch": link.epoch,
        "state": link.state.value,
        "live": link.live,
        "leaving": link.leaving,
        "transport": None if session is None else session.peer.transport,
        "declined": {} if session is None else dict(session.peer.declined),
        "breaker": "closed" if link.breaker.closed else "open",
        "breaker_trips": link.breaker.trips,
        "known_pages": link.known_pages,
        "page_sizes": list(link.page_sizes),
        "bytes_in": counts["pulled_bytes"],
        "bytes_out": counts["pushed_bytes"],
        "pages_in": counts["pulled"],
        "pages_out": counts["pushed"],
        "read_bytes_per_s": link.reads.bytes_per_s,
        "read_latency_s": link.reads.latency_s,
        "write_bytes_per_s": link.writes.bytes_per_s,
        "write_latency_s": link.writes.latency_s,
        "failures": counts["failures"],
        "corrupt_pages": counts["corrupt"],
        "expired_leases": counts["expired"],
        "connections_lost": counts["lost"],
        "problem": link.problem or link.complaint,
        "last_error": link.last_error,
    }


def class_row(remote: PoolRemote) -> dict[str, Any]:
    """One page size: what waits, and what came of the rest."""
    stats = remote.stats()
    return {
        "page_bytes": remote.page_bytes,
        "generation": remote.generation,
        "pulls_queued": stats.queued,
        "pulls_running": stats.running,
        "pulled": stats.landed,
        "pull_missed": stats.missed,
        "pull_failed": stats.failed,
        "pull_corrupt": stats.corrupt,
        "pushes_queued": stats.pushes_queued,
        "pushed": stats.pushed,
        "push_failed": stats.push_failed,
        "push_dropped": stats.push_dropped,
        "known_pages": stats.known_pages,
        "rebalanced": remote.rebalanced,
        "balance_passes": remote.balance_passes,
        "late_reads": remote.late_reads,
        "quarantined_batches": remote.quarantined,
    }


def lease_row(stats: ServerStats) -> dict[str, Any]:
    """What the others hold of this node's pages."""
    return {
        "held": stats.leases.leases,
        "pages": stats.leases.pages,
        "quarantined_pages": stats.leases.quarantined_pages,
        "granted_pages": stats.leases.granted,
        "expired_pages": stats.leases.expired,
        "refused_pages": stats.leases.refused,
    }


def settings_row(config: PoolConfig) -> dict[str, Any]:
    """What this node gives, and how many copies it has made."""
    return {
        "replicas": config.replicas,
        "hot_replicas": config.hot_replicas,
        "host_share": config.host_share,
        "nvme_share": config.nvme_share,
        "rebalance_bytes_per_s": config.rebalance_bytes_per_s,
    }


def server_row(stats: ServerStats) -> dict[str, Any]:
    """What is done for the others."""
    return {
        "requests": dict(stats.requests),
        "answers": dict(stats.answers),
        "stored": dict(stats.stored),
        "late_pages": stats.late_pages,
        "errors": stats.errors,
    }
