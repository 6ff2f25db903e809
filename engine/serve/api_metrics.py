"""Prometheus metrics of one server: its own counters, and the engine's and store's figures.

Owns a private registry, so that two servers in one process do not mix. The engine's figures are
read when somebody scrapes, never per token. Names are tierkv_<noun>_<unit> in base units. Called
by engine/serve/api.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from tierkv.engine.serve.engine_config import EngineStats
from tierkv.engine.serve.offload import OffloadStats
from tierkv.engine.serve.request import RequestOutput
from tierkv.engine.serve.restore import RestoreStats
from tierkv.storage.base import MoverStats, RemoteStats, StoreStats, TierStats

LATENCY_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class ApiMetrics:
    """Counters of one server. All methods run on the server's event loop."""

    def __init__(self, stats: Callable[[], EngineStats]) -> None:
        self._registry = CollectorRegistry()
        self._answers = Counter(
            "tierkv_http_requests",
            "HTTP requests answered",
            ["route", "status"],
            registry=self._registry,
        )
        self._gone = Counter(
            "tierkv_http_clients_gone",
            "Clients that went away during a streamed answer",
            registry=self._registry,
        )
        self._finished = Counter(
            "tierkv_requests_finished",
            "Generation requests by how they ended",
            ["reason"],
            registry=self._registry,
        )
        self._tokens = Counter(
            "tierkv_request_tokens",
            "Tokens of finished requests",
            ["kind"],
            registry=self._registry,
        )
        self._cached = Counter(
            "tierkv_request_cached_tokens",
            "Prompt tokens not computed, by the tier they came from",
            ["tier"],
            registry=self._registry,
        )
        self._ttft = Histogram(
            "tierkv_request_ttft_seconds",
            "Submit to first generated token",
            buckets=LATENCY_BUCKETS_S,
            registry=self._registry,
        )
        self._queued = Histogram(
            "tierkv_request_queued_seconds",
            "Submit to first admission",
            buckets=LATENCY_BUCKETS_S,
            registry=self._registry,
        )
        self._registry.register(_EngineCollector(stats))

    def answered(self, route: str, status: int) -> None:
        """Count one HTTP answer."""
        self._answers.labels(route, str(status)).inc()

    def client_gone(self) -> None:
        """Count one client that left before its answer was complete."""
        self._gone.inc()

    def finished(self, output: RequestOutput) -> None:
        """Count one finished generation."""
        self._finished.labels(output.finish_reason.value).inc()
        self._tokens.labels("prompt").inc(len(output.prompt_token_ids))
        self._tokens.labels("generated").inc(len(output.token_ids))
        cached = output.cached
        for tier, tokens in (
            ("gpu", cached.gpu),
            ("host", cached.host),
            ("nvme", cached.nvme),
            ("remote", cached.remote),
        ):
            self._cached.labels(tier).inc(tokens)
        self._queued.observe(output.queued_s)
        if output.ttft_s is not None:
            self._ttft.observe(output.ttft_s)

    def render(self) -> tuple[bytes, str]:
        """The text exposition and its content type."""
        return generate_latest(self._registry), CONTENT_TYPE_PLAIN_0_0_4


class _EngineCollector(Collector):
    """Reads EngineStats at each scrape."""

    def __init__(self, stats: Callable[[], EngineStats]) -> None:
        self._stats = stats

    def describe(self) -> Iterator[Metric]:
        # Registration asks what will come; answering from here keeps it from reading the stats.
        return iter(())

    def collect(self) -> Iterator[Metric]:
        stats = self._stats()
        for name, text, value in _engine_gauges(stats):
            yield GaugeMetricFamily(f"tierkv_{name}", text, value)
        for name, text, value in _engine_counters(stats):
            yield CounterMetricFamily(f"tierkv_{name}", text, value)
        if stats.offload is not None:
            yield from _offload_metrics(stats.offload)
        if stats.restore is not None:
            yield from _restore_metrics(stats.restore)
        if stats.store is not None:
            yield from _tier_metrics(stats.store)
            yield from _mover_metrics(stats.store.mover)
            if stats.store.remote is not None:
                yield from _remote_metrics(stats.store.remote)


def _engine_gauges(stats: EngineStats) -> tuple[tuple[str, str, float], ...]:
    cache = stats.cache
    return (
        ("engine_running_requests", "Requests in the batch", stats.running),
        ("engine_waiting_requests", "Requests in the queue", stats.waiting),
        ("pool_capacity_pages", "Pages of the pool", cache.pages_total),
        ("pool_free_pages", "Pages nobody uses", cache.pages_free),
        ("pool_copying_pages", "Pages on their way to a lower tier", cache.pages_copying),
        ("pool_page_bytes", "Size of one page", stats.page_bytes),
        ("tree_evictable_tokens", "Cached tokens nobody holds", cache.evictable_tokens),
        ("tree_protected_tokens", "Cached tokens in use", cache.protected_tokens),
    )


def _engine_counters(stats: EngineStats) -> tuple[tuple[str, str, float], ...]:
    return (
        ("engine_finished_requests", "Requests that ended", stats.finished),
        ("engine_failed_requests", "Requests that ended with an error", stats.failed),
        ("engine_retractions", "Requests put back when the pool ran out", stats.retractions),
        ("engine_prompt_tokens", "Prompt tokens of ended requests", stats.prompt_tokens),
        ("engine_cached_tokens", "Prompt tokens not computed", stats.cached_tokens),
        ("engine_generated_tokens", "Tokens generated", stats.generated_tokens),
        ("engine_steps", "Forward passes", stats.steps),
        ("engine_step_failures", "Forward passes that failed", stats.step_failures),
    )


def _offload_metrics(stats: OffloadStats) -> Iterator[Metric]:
    yield GaugeMetricFamily("tierkv_offload_running_pages", "Pages under copy", stats.in_flight)
    yield GaugeMetricFamily("tierkv_offload_pending_pages", "Pages to be copied", stats.pending)
    for name, text, value in (
        ("copied", "Pages committed to the store", stats.copied),
        ("present", "Pages a lower tier had already", stats.present),
        ("dropped", "Pages not copied", stats.dropped),
        ("put_off", "Pages left for their eviction, copies being paced", stats.put_off),
        ("failed", "Pages whose copy failed", stats.failed),
    ):
        yield CounterMetricFamily(f"tierkv_offload_{name}_pages", text, value)


def _restore_metrics(stats: RestoreStats) -> Iterator[Metric]:
    yield GaugeMetricFamily("tierkv_restore_active_loads", "Loads under way", stats.active)
    for name, text, value in (
        ("loads", "Loads planned", stats.loads),
        ("outright", "Tier hits computed outright, being cheaper", stats.outright),
        ("pages", "Pages copied into the pool", stats.restored_pages),
        ("layered_passes", "Passes begun while pages were still arriving", stats.layered),
        ("recomputed_pages", "Pages computed before they came", stats.recomputed_pages),
        ("late_loads", "Loads past their deadline", stats.late),
        ("failed_pages", "Pages whose fetch or copy failed", stats.failed),
        ("expected_seconds", "Time the plans expected", stats.expected_s),
        ("taken_seconds", "Time the loads took", stats.taken_s),
    ):
        yield CounterMetricFamily(f"tierkv_restore_{name}", text, value)


_TIER_GAUGES: tuple[tuple[str, str, Callable[[TierStats], float]], ...] = (
    ("capacity_pages", "Pages the tier can hold", lambda tier: tier.capacity_pages),
    ("free_pages", "Slots free", lambda tier: tier.free_pages),
    ("reserved_pages", "Slots being written", lambda tier: tier.reserved_pages),
    ("committed_pages", "Pages readable", lambda tier: tier.committed_pages),
    ("leased_pages", "Pages held by a reader", lambda tier: tier.leased_pages),
    ("quarantined_pages", "Slots never used again", lambda tier: tier.quarantined_pages),
    ("used_bytes", "Bytes of committed slots", lambda tier: tier.committed_pages * tier.slot_bytes),
    ("degraded_state", "1 when the tier refuses work", lambda tier: tier.degraded is not None),
)
_TIER_COUNTERS: tuple[tuple[str, str, Callable[[TierStats], float]], ...] = (
    ("hit_pages", "Pages handed out", lambda tier: tier.hits),
    ("missed_pages", "Pages asked for and absent", lambda tier: tier.misses),
    ("written_pages", "Pages committed", lambda tier: tier.writes),
    ("duplicate_pages", "Pages that were there already", lambda tier: tier.duplicates),
    ("evicted_pages", "Pages evicted", lambda tier: tier.evictions),
    ("corrupt_pages", "Pages that failed verification", lambda tier: tier.corrupt),
    ("io_errors", "Device errors", lambda tier: tier.io_errors),
    ("rejected_writes", "Writes refused or lost", lambda tier: tier.rejected),
)


def _tier_metrics(store: StoreStats) -> Iterator[Metric]:
    for name, text, read in _TIER_GAUGES:
        gauge = GaugeMetricFamily(f"tierkv_tier_{name}", text, labels=["tier"])
        for tier in store.tiers:
            gauge.add_metric([tier.name.value], float(read(tier)))
        yield gauge
    for name, text, read in _TIER_COUNTERS:
        counter = CounterMetricFamily(f"tierkv_tier_{name}", text, labels=["tier"])
        for tier in store.tiers:
            counter.add_metric([tier.name.value], float(read(tier)))
        yield counter
    restored = CounterMetricFamily(
        "tierkv_store_restored_pages", "Pages restored, by the tier they came from", labels=["tier"]
    )
    for source, pages in store.restored_pages.items():
        restored.add_metric([source.value], pages)
    yield restored
    yield CounterMetricFamily(
        "tierkv_store_admission_rejected_pages", "Pages not hot enough", store.admission_rejected
    )


def _mover_metrics(mover: MoverStats) -> Iterator[Metric]:
    yield GaugeMetricFamily("tierkv_mover_queued_jobs", "Jobs waiting", mover.queued)
    yield GaugeMetricFamily("tierkv_mover_running_jobs", "Jobs under way", mover.in_flight)
    for name, value in (
        ("completed", mover.completed),
        ("dropped", mover.dropped),
        ("cancelled", mover.cancelled),
        ("failed", mover.failed),
    ):
        yield CounterMetricFamily(f"tierkv_mover_{name}_jobs", f"Jobs {name}", value)
    yield CounterMetricFamily(
        "tierkv_mover_worker_restarts", "Worker threads started again", mover.worker_restarts
    )
    for name, text, by_tier in (
        ("read_bytes_per_second", "Estimated read speed", mover.read_bytes_per_s),
        ("write_bytes_per_second", "Estimated write speed", mover.write_bytes_per_s),
        ("read_latency_seconds", "Estimated time of one read", mover.read_latency_s),
        ("write_latency_seconds", "Estimated time of one write", mover.write_latency_s),
    ):
        gauge = GaugeMetricFamily(f"tierkv_mover_{name}", text, labels=["tier"])
        for source, estimate in by_tier.items():
            gauge.add_metric([source.value], estimate)
        yield gauge


def _remote_metrics(remote: RemoteStats) -> Iterator[Metric]:
    for name, text, value in (
        ("queued_pages", "Pages waiting to be brought", remote.queued),
        ("running_pages", "Pages being brought", remote.running),
        ("known_pages", "Pages known to be elsewhere", remote.known_pages),
        ("pushes_queued_pages", "Pages to be copied to others", remote.pushes_queued),
        ("degraded_state", "1 when it cannot serve", remote.degraded is not None),
    ):
        yield GaugeMetricFamily(f"tierkv_remote_{name}", text, float(value))
    for name, text, value in (
        ("landed_pages", "Pages brought and found sound", remote.landed),
        ("missed_pages", "Pages that nobody had", remote.missed),
        ("corrupt_pages", "Pages that arrived damaged", remote.corrupt),
        ("failed_pages", "Pages that did not arrive in time or at all", remote.failed),
        ("cancelled_pages", "Pages nobody wanted any more", remote.cancelled),
        ("refused_pages", "Pages not asked for, the queue being full", remote.refused),
        ("pushed_pages", "Copies that others acknowledged", remote.pushed),
        ("push_duplicate_pages", "Copies of pages that were there", remote.push_duplicates),
        ("push_dropped_pages", "Copies not queued, the queue being full", remote.push_dropped),
        ("push_failed_pages", "Copies that failed", remote.push_failed),
        ("worker_restarts", "Worker threads started again", remote.worker_restarts),
    ):
        yield CounterMetricFamily(f"tierkv_remote_{name}", text, value)
