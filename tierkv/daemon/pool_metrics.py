"""Figures of the remote tier for Prometheus: what each page size moves, and each member of a pool.

No state: reads a status. Called by tierkv.daemon.metrics. O(page sizes + members). A member is
labelled by its address, which is known before its name is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

_PULLS = ("landed", "missed", "corrupt", "failed", "cancelled", "refused")
_PUSHES = {
    "pushed": "made",
    "push_duplicates": "there",
    "push_dropped": "dropped",
    "push_failed": "failed",
}
_QUEUED = {"queued": "pulls_queued", "running": "pulls_running", "pushes_queued": "copies_queued"}

_FAILURES = {
    "failures": "request",
    "corrupt_pages": "corrupt",
    "expired_leases": "expired",
    "connections_lost": "lost",
    "breaker_trips": "breaker",
}


def remote_metrics(status: Mapping[str, Any]) -> Iterator[Metric]:
    """Everything about the remote tier; nothing when there is none."""
    classes = [each for each in status["classes"] if each.get("remote")]
    if classes:
        yield from _classes(classes)
    for kind in ("pool", "mooncake"):
        if (found := status.get(kind)) is not None:
            text = "1 while this node's part of it serves."
            yield GaugeMetricFamily(f"tierkv_{kind}_up", text, value=found["state"] == "serving")
    pool = status.get("pool")
    if pool is not None and "members" in pool:
        yield from _own(pool)
        yield from _members(pool["members"])


def _classes(classes: list[Mapping[str, Any]]) -> Iterator[Metric]:
    labels = ("page_bytes",)
    pulls = CounterMetricFamily(
        "tierkv_remote_pulls", "Pages asked of others, by outcome.", labels=(*labels, "outcome")
    )
    copies = CounterMetricFamily(
        "tierkv_remote_copies", "Copies made elsewhere, by outcome.", labels=(*labels, "outcome")
    )
    moving = GaugeMetricFamily(
        "tierkv_remote_moving_pages", "Pages under way, by what.", labels=(*labels, "what")
    )
    known = GaugeMetricFamily(
        "tierkv_remote_known_pages", "Pages elsewhere that are known of.", labels=labels
    )
    degraded = GaugeMetricFamily(
        "tierkv_remote_degraded", "1 while nobody can be asked.", labels=labels
    )
    kept = GaugeMetricFamily(
        "tierkv_pool_kept_pages", "Pages kept here for others.", labels=(*labels, "tier")
    )
    for each in classes:
        size, remote = str(each["page_bytes"]), each["remote"]
        for outcome in _PULLS:
            pulls.add_metric((size, outcome), remote[outcome])
        for name, outcome in _PUSHES.items():
            copies.add_metric((size, outcome), remote[name])
        for name, what in _QUEUED.items():
            moving.add_metric((size, what), remote[name])
        known.add_metric((size,), remote["known_pages"])
        degraded.add_metric((size,), remote["degraded"] is not None)
        for tier, count in each["pool_pages"].items():
            kept.add_metric((size, tier), count)
    yield from (pulls, copies, moving, known, degraded, kept)


def _own(pool: Mapping[str, Any]) -> Iterator[Metric]:
    """This member: its epoch, and what others hold and are answered here."""
    for name, text, value in (
        ("epoch", "This member's epoch.", pool["epoch"]),
        ("leaving", "1 while it is leaving.", pool["leaving"]),
        ("leases", "Leases that members hold here.", pool["leases"]["held"]),
        ("leased_pages", "Pages of those leases.", pool["leases"]["pages"]),
        (
            "quarantined_pages",
            "Pages of ended leases that a member may still be reading.",
            pool["leases"]["quarantined_pages"],
        ),
    ):
        yield GaugeMetricFamily(f"tierkv_pool_{name}", text, value=value)
    for name, text, value in (
        ("fences", "Times that a later epoch of this name was met.", pool["fences"]),
        ("expired_pages", "Pages of leases that ran out.", pool["leases"]["expired_pages"]),
    ):
        yield CounterMetricFamily(f"tierkv_pool_{name}", text, value=value)
    for name, label, text in (
        ("requests", "verb", "Requests of members, by verb."),
        ("answers", "status", "Answers to members, by status."),
        ("stored_pages", "outcome", "Pages that members gave, by outcome."),
    ):
        family = CounterMetricFamily(f"tierkv_pool_{name}", text, labels=(label,))
        for kind, count in pool["serving"]["stored" if label == "outcome" else name].items():
            family.add_metric((str(kind),), count)
        yield family


def _members(members: Sequence[Mapping[str, Any]]) -> Iterator[Metric]:
    """Each other member, as this node sees it."""
    labels = ("member",)
    gauges: dict[str, tuple[str, Callable[[Mapping[str, Any]], float | None]]] = {
        "live": ("1 while it is heard of.", lambda each: each["live"]),
        "leaving": ("1 while it is leaving.", lambda each: each["leaving"]),
        "epoch": ("Its epoch.", lambda each: each["epoch"]),
        "breaker_open": ("1 while it is put aside.", lambda each: each["breaker"] != "closed"),
        "known_pages": ("Pages it is known to hold.", lambda each: each["known_pages"]),
        "read_bytes_per_second": ("Measured.", lambda each: each["read_bytes_per_s"]),
        "read_latency_seconds": ("Measured.", lambda each: each["read_latency_s"]),
        "write_bytes_per_second": ("Measured.", lambda each: each["write_bytes_per_s"]),
        "write_latency_seconds": ("Measured.", lambda each: each["write_latency_s"]),
    }
    for name, (text, read) in gauges.items():
        gauge = GaugeMetricFamily(f"tierkv_pool_member_{name}", text, labels=labels)
        for each in members:
            if (value := read(each)) is not None:
                gauge.add_metric((each["address"],), value)
        yield gauge
    pages = CounterMetricFamily(
        "tierkv_pool_member_pages", "Pages moved.", labels=(*labels, "direction")
    )
    moved = CounterMetricFamily(
        "tierkv_pool_member_bytes", "Bytes moved.", labels=(*labels, "direction")
    )
    failures = CounterMetricFamily(
        "tierkv_pool_member_failures", "What went wrong, by kind.", labels=(*labels, "kind")
    )
    for each in members:
        for direction in ("in", "out"):
            pages.add_metric((each["address"], direction), each[f"pages_{direction}"])
            moved.add_metric((each["address"], direction), each[f"bytes_{direction}"])
        for name, kind in _FAILURES.items():
            failures.add_metric((each["address"], kind), each[name])
    paths = GaugeMetricFamily(
        "tierkv_pool_member_transport", "1 for the path in use.", labels=(*labels, "transport")
    )
    for each in members:
        if each["transport"] is not None:
            paths.add_metric((each["address"], each["transport"]), 1)
    yield from (pages, moved, failures, paths)
