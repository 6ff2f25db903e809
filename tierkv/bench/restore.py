"""`tierkv bench restore`: time to first token recomputed, and restored from each tier.

One engine on a real model, one long prefix, rounds interleaved. Each case begins with the prefix
in exactly one place. Recomputing uses a fresh cache salt, so that no tier can help.
"""

from __future__ import annotations

import itertools
import os
import statistics
import tempfile
from pathlib import Path

from tierkv.bench.report import BenchReport
from tierkv.engine.serve.engine import Engine
from tierkv.engine.serve.engine_config import EngineConfig
from tierkv.engine.serve.gguf import resolve_model
from tierkv.engine.serve.request import RequestOutput
from tierkv.engine.serve.restore import RestoreMode
from tierkv.engine.serve.sampler import SamplingParams
from tierkv.models import bundled_gguf, default_model_cache
from tierkv.scenario import system_prompt
from tierkv.storage.errors import TierKVError
from tierkv.storage.policy import WritePolicy
from tierkv.storage.store import StoreConfig, StoreRules, TieredStore
from tierkv.storage.types import TierName

PREFIX_TOKENS = 2000
SUFFIX = "\n\nQuestion: which desk decides when nobody answers? Answer:"
NEW_TOKENS = 8
MANUAL_SECTIONS = 60
FLUSH_S = 60.0


def run(quick: bool, model: Path | None = None, directory: Path | None = None) -> BenchReport:
    """Measure with `model` (default: the bundled SmolLM2); nvme files go below `directory`."""
    rounds = 2 if quick else 5
    folder = resolve_model(model or bundled_gguf(), default_model_cache())
    with tempfile.TemporaryDirectory(prefix="tierkv-bench-", dir=directory) as scratch:
        store = StoreConfig(
            page_bytes=1,  # the engine knows its model's
            host_bytes=1 << 30,
            nvme_root=Path(scratch) / "nvme",
            nvme_bytes=2 << 30,
            rules=StoreRules(write_policy=WritePolicy.WRITE_THROUGH),
        )
        config = EngineConfig(model=folder, store=store, restore=RestoreMode.LOAD)
        with Engine.open(config) as engine:
            return _Restore(engine, rounds).measure()


class _Restore:
    """The cases on one engine."""

    def __init__(self, engine: Engine, rounds: int) -> None:
        assert isinstance(engine.store, TieredStore)
        self._engine = engine
        self._store = engine.store
        self._rounds = rounds
        prefix = engine.tokenizer.encode(system_prompt(MANUAL_SECTIONS))[:PREFIX_TOKENS]
        self._prompt = prefix + engine.tokenizer.encode(SUFFIX)
        self._salts = map(str, itertools.count(1))

    def measure(self) -> BenchReport:
        """Run the rounds; medians of time to first token."""
        cold = self._ask(salt="first")
        self._ask()
        taken: dict[str, list[float]] = {"recompute": [], "gpu": [], "host": [], "nvme": []}
        identical = True
        for _ in range(self._rounds):
            for case, seconds in taken.items():
                output = self._case(case)
                assert output.ttft_s is not None
                seconds.append(output.ttft_s)
                identical = identical and output.token_ids == cold.token_ids
        times = {case: statistics.median(seconds) for case, seconds in taken.items()}
        settings = self._engine.stats()
        report = BenchReport(
            "restore",
            config={
                "model": settings.model,
                "device": settings.device,
                "page_tokens": settings.page_tokens,
                "page_bytes": settings.page_bytes,
                "prompt_tokens": len(self._prompt),
                "rounds": self._rounds,
                "cpus": len(os.sched_getaffinity(0)),
            },
        )
        report.results = {f"{case}_s": seconds for case, seconds in times.items()}
        report.results |= {"prefix_tokens": PREFIX_TOKENS, "identical": int(identical)}
        report.ratios = {
            f"{case}_speedup": times["recompute"] / times[case] for case in ("gpu", "host", "nvme")
        }
        return report

    def _case(self, case: str) -> RequestOutput:
        """Put the prefix in one place, then ask. Raises TierKVError when it came from another."""
        if case == "recompute":
            return self._ask(salt=next(self._salts))
        if case != "gpu":
            self._engine.drop_gpu_cache()
        if case == "nvme":
            if not self._engine.flush(FLUSH_S):
                raise TierKVError("bench restore: pages did not become durable; is the disk full?")
            self._store.trim(TierName.HOST, 0)
        output = self._ask()
        reused = getattr(output.cached, case)
        if reused < PREFIX_TOKENS - self._engine.stats().page_tokens:
            raise TierKVError(f"bench restore: {case} gave {reused} of {PREFIX_TOKENS} tokens")
        return output

    def _ask(self, salt: str = "") -> RequestOutput:
        params = SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True)
        return self._engine.generate([self._prompt], params, cache_salt=salt)[0]
