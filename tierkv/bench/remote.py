"""`tierkv bench remote`: what pages and answers from another node cost. Real processes throughout.

Owns the processes it starts and their memory, all gone at the end. Each part is a module of its
own; parts whose software is not installed are left out, and standard error says so.

- tcp: reads of a batch of pages, as the pool reads them, and of a page alone over TcpTransport,
  beside a plain socket loop of the same bytes.
- nixl, ucx: the same over a data plane, beside the library used directly.
- lookup: batches of 32 keys answered by a pool's server, one after the other.
- pool, mooncake: a batch of pages stored on another node until it is acknowledged (put), and
  brought back into host memory, verified (get), beside Mooncake Store over TCP.
- dead: time to first token with a pool whose members do not answer, over the pool switched off.
"""

from __future__ import annotations

import importlib.util
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

from tierkv.bench.remote_dead import dead_pool_ttft
from tierkv.bench.remote_lookup import lookup_batches_per_s
from tierkv.bench.remote_mooncake import MooncakePair
from tierkv.bench.remote_nixl import NixlPair
from tierkv.bench.remote_pool import PoolPair
from tierkv.bench.remote_tcp import TcpPair
from tierkv.bench.remote_ucx import UcxPair
from tierkv.bench.report import BenchReport, samples
from tierkv.storage.errors import ConfigError

PAGE_SIZES = (1 << 20, 4 << 20)
BATCH_PAGES = 16
MOONCAKE_PAGE_BYTES = 4 << 20
LOOKUP_S = 3.0


def run(quick: bool, model: Path | None = None) -> BenchReport:
    """Measure. Uses about 1.5 GB of memory. Quick: under 40 s on two cores.

    `model`: folder or GGUF file for the time to first token; None: the bundled one.
    """
    report = BenchReport("remote")
    report.config = {"page_bytes": list(PAGE_SIZES), "batch_pages": BATCH_PAGES, "quick": quick}
    _measure_tcp(report, rounds=15 if quick else 60)
    _measure_planes(report, rounds=25 if quick else 100)
    report.results["lookup_batches_per_s"] = lookup_batches_per_s(1.0 if quick else LOOKUP_S)
    _measure_pool(report, rounds=5 if quick else 25)
    cold = dead_pool_ttft(rounds=12 if quick else 60, model=model)
    report.results["dead_ttft_s"] = cold.dead_s
    report.limits["off_ttft_s"] = cold.off_s
    report.ratios["dead_pool_ttft"] = cold.ratio
    return report


def _measure_tcp(report: BenchReport, rounds: int) -> None:
    shares: dict[int, list[float]] = {BATCH_PAGES: [], 1: []}
    for page_bytes in PAGE_SIZES:
        size = f"{page_bytes >> 20}mib"
        for batch, found in shares.items():
            with TcpPair(page_bytes, batch) as pair:
                taken = samples({"plain": pair.plain, "tcp": pair.tcp}, rounds, warmup=4)
            found.append(_paired(taken["plain"], taken["tcp"]))
            if batch > 1:
                moved = page_bytes * batch
                report.results[f"tcp_{size}_gbs"] = moved / statistics.median(taken["tcp"]) / 1e9
                report.limits[f"socket_{size}_gbs"] = (
                    moved / statistics.median(taken["plain"]) / 1e9
                )
    report.results["tcp_gbs"] = report.results[f"tcp_{size}_gbs"]
    for batch, found in shares.items():
        name = "tcp_vs_socket" if batch > 1 else "tcp_lone_page_vs_socket"
        for page_bytes, share in zip(PAGE_SIZES, found, strict=True):
            report.ratios[f"{name}_{page_bytes >> 20}mib"] = share
        report.ratios[name] = min(found)


def _measure_planes(report: BenchReport, rounds: int) -> None:
    for name, libraries, pair_of in (
        ("nixl", ("nixl_cu12", "nixl_cu13"), NixlPair),
        ("ucx", ("ucxx", "ucp"), UcxPair),
    ):
        if not any(importlib.util.find_spec(library) for library in libraries):
            _left_out(name, f"none of {', '.join(libraries)} is installed")
            continue
        worst: list[float] = []
        for page_bytes in PAGE_SIZES:
            with pair_of(page_bytes, BATCH_PAGES) as pair:
                taken = samples({"direct": pair.direct, "plane": pair.plane}, rounds, warmup=4)
            moved = page_bytes * BATCH_PAGES
            size = f"{page_bytes >> 20}mib"
            report.limits[f"{name}_direct_{size}_gbs"] = (
                moved / statistics.median(taken["direct"]) / 1e9
            )
            report.results[f"{name}_{size}_gbs"] = moved / statistics.median(taken["plane"]) / 1e9
            worst.append(_paired(taken["direct"], taken["plane"]))
            report.ratios[f"{name}_vs_direct_{size}"] = worst[-1]
        report.results[f"{name}_gbs"] = report.results[f"{name}_{size}_gbs"]
        report.ratios[f"{name}_vs_direct"] = min(worst)


def _measure_pool(report: BenchReport, rounds: int) -> None:
    with PoolPair(MOONCAKE_PAGE_BYTES, BATCH_PAGES) as pool:
        actions: dict[str, Callable[[], object]] = {"put": pool.put, "get": pool.get}
        mooncake = _mooncake()
        if mooncake is None:
            taken = samples(actions, rounds, warmup=2)
        else:
            with mooncake as other:
                actions |= {"mooncake_put": other.put, "mooncake_get": other.get}
                taken = samples(actions, rounds, warmup=2)
    moved = MOONCAKE_PAGE_BYTES * BATCH_PAGES
    for way in ("put", "get"):
        report.results[f"pool_{way}_gbs"] = moved / statistics.median(taken[way]) / 1e9
        if f"mooncake_{way}" in taken:
            theirs = taken[f"mooncake_{way}"]
            report.results[f"mooncake_{way}_gbs"] = moved / statistics.median(theirs) / 1e9
            report.ratios[f"{way}_vs_mooncake"] = _paired(theirs, taken[way])
    if "mooncake_get" in taken:
        report.results["mooncake_gbs"] = report.results["mooncake_get_gbs"]


def _mooncake() -> MooncakePair | None:
    """A pair of Mooncake processes like PoolPair; None where it is not installed."""
    try:
        return MooncakePair(MOONCAKE_PAGE_BYTES, BATCH_PAGES)
    except ConfigError as error:
        _left_out("mooncake", str(error))
        return None


def _paired(limit: list[float], spent: list[float]) -> float:
    """How much of the limit was reached: median of the turns' ratios."""
    return statistics.median(a / b for a, b in zip(limit, spent, strict=True))


def _left_out(name: str, reason: str) -> None:
    sys.stderr.write(f"bench remote: {name} left out: {reason}\n")
