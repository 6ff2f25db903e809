"""`tierkv bench offload`: recompute, load or both, for tiers of any speed.

Points: one prefix, a disk throttled to several shares of the bandwidth at which loading takes as
long as computing. Curves: recompute and restore from each real tier against prefix length. Each
figure is a median of interleaved rounds; the prefix is in one place before each of them. Last,
what demotion costs decoding: time from token to token with and without copies under way.
"""

from __future__ import annotations

import asyncio
import csv
import random
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tierkv.bench.report import BenchReport
from tierkv.engine.serve.engine import Engine
from tierkv.engine.serve.engine_config import EngineConfig
from tierkv.engine.serve.gguf import resolve_model
from tierkv.engine.serve.model_folder import load_config
from tierkv.engine.serve.opening import choose_device, page_size
from tierkv.engine.serve.request import RequestOutput
from tierkv.engine.serve.restore import RestoreMode
from tierkv.engine.serve.sampler import SamplingParams
from tierkv.models import bundled_gguf, default_model_cache
from tierkv.scenario import system_prompt
from tierkv.storage.device import DirectDevice
from tierkv.storage.errors import TierKVError
from tierkv.storage.policy import WritePolicy
from tierkv.storage.store import StoreRules, TieredStore
from tierkv.storage.throttle import ThrottledDevice
from tierkv.storage.tiers.host import HostTier
from tierkv.storage.tiers.nvme import NvmeTier
from tierkv.storage.types import TierName

SHARES = (0.25, 0.5, 1.0, 2.0, 8.0)
"""Of the bandwidth at which loading and computing take the same time."""
UNTHROTTLED = 1e15
FLUSH_S = 60.0
MANUAL_SECTIONS = 60
SUFFIX = "\n\nQuestion: which desk decides when nobody answers? Answer:"
NEW_TOKENS = 8
DECODE_PROMPT_TOKENS = 640
DECODE_TOKENS = 64
DECODE_SEED = 7
MODES = (RestoreMode.RECOMPUTE, RestoreMode.LOAD, RestoreMode.AUTO)


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much is measured."""

    prefix_tokens: int
    rounds: int
    curve: tuple[int, ...]


FULL = Sizes(2000, 7, (128, 256, 512, 1024, 2000))
QUICK = Sizes(384, 2, (128, 384))


def run(
    quick: bool,
    model: Path | None = None,
    directory: Path | None = None,
    throttle: int | None = None,
    output: Path | None = None,
) -> BenchReport:
    """Measure with `model` (default: the bundled SmolLM2); nvme files go below `directory`.

    throttle: bytes a second of the disk in the curves (None: as fast as it is). output: folder
    for offload.csv, offload.json and offload.png.
    """
    folder = resolve_model(model or bundled_gguf(), default_model_cache())
    # The slowest point must be allowed to load to the end.
    config = EngineConfig(model=folder, restore_deadline_s=300.0)
    page_bytes = page_size(config, load_config(folder), choose_device(config.device)[1])
    with tempfile.TemporaryDirectory(prefix="tierkv-bench-", dir=directory) as scratch:
        device = ThrottledDevice(DirectDevice(), UNTHROTTLED)
        host = HostTier(None, page_bytes, 1 << 30)
        nvme = NvmeTier(Path(scratch) / "nvme", page_bytes, 2 << 30, device=device)
        store = TieredStore(host, nvme, StoreRules(write_policy=WritePolicy.WRITE_THROUGH))
        try:
            with Engine.open(config, store=store) as engine:
                bench = _Offload(engine, store, device, QUICK if quick else FULL)
                report = bench.measure(throttle)
        finally:
            store.close()
    if output is not None:
        write_files(report, output)
    return report


class _Offload:
    """The measurements on one engine."""

    def __init__(
        self, engine: Engine, store: TieredStore, device: ThrottledDevice, sizes: Sizes
    ) -> None:
        self._engine = engine
        self._store = store
        self._device = device
        self._sizes = sizes
        self._text = engine.tokenizer.encode(system_prompt(MANUAL_SECTIONS))
        self._suffix = engine.tokenizer.encode(SUFFIX)
        assert engine.core.restore is not None
        self._restore = engine.core.restore
        self._reference: tuple[int, ...] = ()
        self.identical = True

    def measure(self, throttle: int | None) -> BenchReport:
        """Points, then curves."""
        prefix = self._sizes.prefix_tokens
        self._store_prompt(prefix)
        recompute_s = self._median(prefix, RestoreMode.RECOMPUTE, TierName.NVME, 1)
        nbytes = prefix * self._engine.stats().page_bytes / self._engine.stats().page_tokens
        even = nbytes / recompute_s
        points = [self._point(prefix, share * even) for share in SHARES]
        self._device.set_rate(throttle or UNTHROTTLED)
        curve = [self._lengths(tokens) for tokens in self._sizes.curve]
        stats = self._engine.stats()
        report = BenchReport(
            "offload",
            config={
                "model": stats.model,
                "device": stats.device,
                "prefix_tokens": prefix,
                "rounds": self._sizes.rounds,
                "throttle_bytes_per_s": throttle,
            },
        )
        decode = self._decode_cost()
        report.results = {
            "points": points,
            "curve": curve,
            "identical": int(self.identical),
            **decode,
        }
        report.limits = {"even_gbs": even / 1e9}
        report.ratios = summary(points)
        report.ratios["decode_cost"] = decode["decode_while_demoting_ms"] / decode["decode_ms"]
        return report

    def _point(self, tokens: int, bytes_per_s: float) -> dict[str, float]:
        """All three ways at one bandwidth, interleaved."""
        self._device.set_rate(bytes_per_s)
        # What was learned at another speed would stand for a machine that changed under way.
        self._restore.rates.clear()
        self._time(tokens, RestoreMode.AUTO, TierName.NVME)
        taken: dict[str, list[float]] = {mode: [] for mode in MODES}
        for _ in range(self._sizes.rounds):
            for mode in MODES:
                taken[mode].append(self._time(tokens, mode, TierName.NVME))
        median = {mode: statistics.median(times) for mode, times in taken.items()}
        return {
            "gbs": bytes_per_s / 1e9,
            "load_s": median[RestoreMode.LOAD],
            "recompute_s": median[RestoreMode.RECOMPUTE],
            "combined_s": median[RestoreMode.AUTO],
        }

    def _lengths(self, tokens: int) -> dict[str, float]:
        """One prefix length: recompute, and load and combined from each tier."""
        self._store_prompt(tokens)
        rounds = max(1, self._sizes.rounds // 2)
        row: dict[str, float] = {"prefix_tokens": tokens}
        row["recompute_s"] = self._median(tokens, RestoreMode.RECOMPUTE, TierName.NVME, rounds)
        for tier in (TierName.HOST, TierName.NVME):
            row[f"{tier}_load_s"] = self._median(tokens, RestoreMode.LOAD, tier, rounds)
            row[f"{tier}_combined_s"] = self._median(tokens, RestoreMode.AUTO, tier, rounds)
        return row

    def _median(self, tokens: int, mode: RestoreMode, tier: TierName, rounds: int) -> float:
        return statistics.median(self._time(tokens, mode, tier) for _ in range(rounds))

    def _time(self, tokens: int, mode: RestoreMode, tier: TierName) -> float:
        """Time to first token with the prefix in `tier` only."""
        self._engine.drop_gpu_cache()
        if tier is TierName.NVME:
            if not self._engine.flush(FLUSH_S):
                raise TierKVError("bench offload: pages did not become durable; is the disk full?")
            self._store.trim(TierName.HOST, 0)
        self._restore.mode = mode
        output = self._ask(tokens)
        self._restore.mode = RestoreMode.AUTO
        self.identical = self.identical and output.token_ids == self._reference
        if mode == RestoreMode.LOAD and output.cached.total < tokens - 2 * 16:
            raise TierKVError(f"bench offload: only {output.cached.total} of {tokens} came back")
        assert output.ttft_s is not None
        return output.ttft_s

    def _decode_cost(self) -> dict[str, float]:
        """p50 from token to token of one request, alone and while its prompt is demoted."""
        offload = self._engine.core.offload
        assert offload is not None
        policy = offload.policy
        rng = random.Random(DECODE_SEED)
        taken: dict[bool, list[float]] = {False: [], True: []}
        for _ in range(2 * self._sizes.rounds):
            for demoting in (False, True):
                offload.policy = WritePolicy.WRITE_THROUGH if demoting else WritePolicy.WRITE_BACK
                # Drawn anew, so that no tier holds it.
                prompt = rng.sample(self._text, min(DECODE_PROMPT_TOKENS, len(self._text)))
                taken[demoting] += asyncio.run(self._gaps(prompt, demoting))
                self._engine.drop_gpu_cache()
        offload.policy = policy
        return {
            "decode_ms": 1e3 * statistics.median(taken[False]),
            "decode_while_demoting_ms": 1e3 * statistics.median(taken[True]),
            "demoting_steps": len(taken[True]),
            "demotion_pages_per_step": self._engine.core.pace.rate,
        }

    async def _gaps(self, prompt: list[int], demoting: bool) -> list[float]:
        """Seconds between tokens, while pages leave (or none does)."""
        offload = self._engine.core.offload
        assert offload is not None
        params = SamplingParams(max_tokens=DECODE_TOKENS, ignore_eos=True)
        gaps: list[float] = []
        last: float | None = None
        async for event in self._engine.stream(prompt, params):
            if event.output is not None:
                break
            now = time.perf_counter()
            if last is not None:
                gaps.append(now - last)
            last = now
            stats = offload.stats()
            if demoting and len(gaps) > 1 and stats.in_flight + stats.pending == 0:
                break
        return gaps

    def _store_prompt(self, tokens: int) -> None:
        self._reference = self._ask(tokens).token_ids
        if not self._engine.flush(FLUSH_S):
            raise TierKVError("bench offload: pages did not become durable; is the disk full?")

    def _ask(self, tokens: int) -> RequestOutput:
        params = SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True)
        return self._engine.generate([self._text[:tokens] + self._suffix], params)[0]


def summary(points: list[dict[str, float]]) -> dict[str, float]:
    """worst_vs_best and gain_at_crossover, as docs of the result shape define them."""
    best = [min(point["load_s"], point["recompute_s"]) for point in points]
    nearest = min(points, key=lambda p: abs(p["load_s"] - p["recompute_s"]) / p["recompute_s"])
    return {
        "worst_vs_best": max(
            point["combined_s"] / pure for point, pure in zip(points, best, strict=True)
        ),
        "gain_at_crossover": min(nearest["load_s"], nearest["recompute_s"]) / nearest["combined_s"],
    }


def write_files(report: BenchReport, folder: Path) -> None:
    """offload.json, offload.csv (one row a prefix length) and, with matplotlib, offload.png."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "offload.json").write_text(report.to_json() + "\n")
    curve: list[dict[str, Any]] = report.results["curve"]
    with (folder / "offload.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(curve[0]))
        writer.writeheader()
        writer.writerows(curve)
    from tierkv.bench.offload_plot import plot

    plot(report, folder / "offload.png")
