"""Figures of the remote tier for Prometheus: what each page size moves, and each member of a pool.

No state: reads a status. Called by tierkv.daemon.metrics. O(page sizes + members). A member is
labelled by its address, which is known before its name is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
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


def remote_metrics(status: Mapping[str, Any]) -> Iterator[Metric]:
    """Everything about the remote tier; nothing when there is none."""
    classes = [each for each in status["classes"] if each.get("remote")]
    if classes:
        yield from _classes(classes)
    for kind in ("pool", "mooncake"):
        if (found := status.get(kind)) is not None:
            yield _gauge(f"tierkv_{kind}_up", "1 while it serves.", found["state"] == "serving")


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


def _gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, text, value=value)
