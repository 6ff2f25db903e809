"""The daemon's figures for Prometheus, as tierkv_<noun>_<unit> in base units.

No state: a scrape reads the parts. Called by tierkv.daemon.http. O(classes).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from tierkv.daemon.pool_metrics import remote_metrics
from tierkv.daemon.status import status_fields

if TYPE_CHECKING:
    from tierkv.daemon.service import Service

_TIER_COUNTERS = {
    "hits": "Pages handed out.",
    "misses": "Keys asked for and not handed out.",
    "writes": "Pages committed.",
    "duplicates": "Pages committed again.",
    "evictions": "Pages evicted.",
    "corrupt": "Pages that failed key, length or checksum.",
    "io_errors": "Operations the device failed.",
    "rejected": "Writes refused or lost.",
}
_TIER_STATES = ("free", "reserved", "committed", "leased", "quarantined")
_MOVER_COUNTERS = ("completed", "dropped", "cancelled", "failed", "worker_restarts")
_SESSION_GAUGES = (
    "connected",
    "greeted",
    "leases",
    "leased_pages",
    "reservations",
    "reserved_pages",
    "quarantined_pages",
)


def render(service: Service) -> bytes:
    """One scrape, in the text format."""
    registry = CollectorRegistry()
    registry.register(_Figures(service))
    return generate_latest(registry)


class _Figures(Collector):
    def __init__(self, service: Service) -> None:
        self._service = service

    def describe(self) -> list[Metric]:
        """Nothing to say before a scrape."""
        return []

    def collect(self) -> Iterator[Metric]:
        status = status_fields(self._service)
        yield from _tiers(status["classes"])
        yield from _movers(status["classes"])
        yield from _sessions(status)
        yield from _upkeep(status["background"])
        yield from remote_metrics(status)


def _tiers(classes: list[dict[str, Any]]) -> Iterator[Metric]:
    labels = ("page_bytes", "tier")
    pages = GaugeMetricFamily(
        "tierkv_tier_pages", "Slots of a tier by state.", labels=(*labels, "state")
    )
    capacity = GaugeMetricFamily("tierkv_tier_capacity_bytes", "Size of a tier.", labels=labels)
    used = GaugeMetricFamily("tierkv_tier_used_bytes", "Bytes of committed pages.", labels=labels)
    degraded = GaugeMetricFamily(
        "tierkv_tier_degraded", "1 while a tier refuses reads or writes.", labels=labels
    )
    counters = {
        name: CounterMetricFamily(f"tierkv_tier_{name}", text, labels=labels)
        for name, text in _TIER_COUNTERS.items()
    }
    gaps = CounterMetricFamily(
        "tierkv_tier_reuses",
        "Hits by the time since the page was used before, in growing buckets.",
        labels=(*labels, "bucket"),
    )
    for each in classes:
        for name, tier in each["tiers"].items():
            where = (str(each["page_bytes"]), name)
            for state in _TIER_STATES:
                pages.add_metric((*where, state), tier[f"{state}_pages"])
            capacity.add_metric(where, tier["capacity_pages"] * tier["slot_bytes"])
            used.add_metric(where, tier["committed_pages"] * tier["slot_bytes"])
            degraded.add_metric(where, tier["degraded"] is not None)
            for counter, family in counters.items():
                family.add_metric(where, tier[counter])
            for bucket, count in enumerate(each["reuse_gaps"].get(name, ())):
                gaps.add_metric((*where, str(bucket)), count)
    yield from (pages, capacity, used, degraded, *counters.values(), gaps)


def _movers(classes: list[dict[str, Any]]) -> Iterator[Metric]:
    labels = ("page_bytes",)
    queued = GaugeMetricFamily("tierkv_mover_pages", "Copies by state.", labels=(*labels, "state"))
    ended = CounterMetricFamily(
        "tierkv_mover_copies", "Copies that ended, by how.", labels=(*labels, "outcome")
    )
    restored = CounterMetricFamily(
        "tierkv_restored_pages", "Pages handed out, by where they were.", labels=(*labels, "tier")
    )
    counts = {
        name: CounterMetricFamily(f"tierkv_{name}", text, labels=labels)
        for name, text in (
            ("missed_pages", "Keys asked for and not handed out."),
            ("rejected_pages", "Slots not given and pages not committed."),
            ("late_fetches", "Fetches cut because nvme had not answered."),
            ("breaker_trips", "Times nvme was put aside for being late or failing."),
            ("admission_rejected", "Pages not written to nvme: not hot enough."),
            ("commit_mismatches", "Pages whose bytes were not what their client said."),
        )
    }
    opened = GaugeMetricFamily("tierkv_breaker_open", "1 while nvme is not asked.", labels=labels)
    for each in classes:
        where = (str(each["page_bytes"]),)
        mover = each["mover"]
        for state in ("queued", "in_flight"):
            queued.add_metric((*where, state), mover[state])
        for outcome in _MOVER_COUNTERS:
            ended.add_metric((*where, outcome), mover[outcome])
        for tier, count in each["restored_pages"].items():
            restored.add_metric((*where, str(tier)), count)
        for name, family in counts.items():
            family.add_metric(where, each[name])
        opened.add_metric(where, each["breaker_open"])
    yield from (queued, ended, restored, *counts.values(), opened)


def _sessions(status: dict[str, Any]) -> Iterator[Metric]:
    sessions, requests = status["sessions"], status["requests"]
    held = GaugeMetricFamily("tierkv_sessions_held", "What clients hold now.", labels=("what",))
    for name in _SESSION_GAUGES:
        held.add_metric((name,), sessions[name])
    answered = CounterMetricFamily(
        "tierkv_requests", "Requests answered, by verb and code.", labels=("verb", "code")
    )
    seconds = CounterMetricFamily(
        "tierkv_request_seconds", "Time from a request to its answer.", labels=("verb",)
    )
    for verb, codes in requests["answered"].items():
        for code, count in codes.items():
            answered.add_metric((verb, code), count)
    for verb, spent in requests["seconds"].items():
        seconds.add_metric((verb,), spent)
    yield from (held, answered, seconds)
    for name, text in (
        ("connections", "Connections accepted."),
        ("refused_connections", "Connections refused at once."),
        ("internal_errors", "Requests that met a bug."),
    ):
        yield CounterMetricFamily(f"tierkv_{name}", text, value=requests[name])
    yield CounterMetricFamily(
        "tierkv_expired_holds",
        "Leases and reservations that outlasted their time.",
        value=sessions["expired_holds"],
    )


def _upkeep(background: dict[str, Any]) -> Iterator[Metric]:
    if not background:
        return
    scrub = background["scrub"]
    yield CounterMetricFamily(
        "tierkv_scrubbed_pages", "Pages reread.", value=scrub["checked_pages"]
    )
    yield CounterMetricFamily(
        "tierkv_scrub_corrupt_pages", "Of those, bad ones.", value=scrub["corrupt_pages"]
    )
    yield CounterMetricFamily(
        "tierkv_expired_pages", "Pages past their time.", value=background["expired_pages"]
    )
    yield CounterMetricFamily(
        "tierkv_upkeep_failures", "Rounds of upkeep that failed.", value=background["failures"]
    )
    preload = GaugeMetricFamily(
        "tierkv_preload_pages", "Preload after a start.", labels=("page_bytes", "state")
    )
    for size, progress in background["preload"].items():
        preload.add_metric((size, "done"), progress["done_pages"])
        preload.add_metric((size, "total"), progress["total_pages"])
    yield preload
