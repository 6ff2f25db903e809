"""The one shape of every benchmark result, and the interleaved timing all of them use.

Knows nothing of what is measured. A ratio compares two things timed in the same run, turn by
turn, so that a machine whose speed drifts slows both.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(slots=True)
class BenchReport:
    """Collects what one benchmark measured. Names end in their unit (`_s`, `_ms`, `_us`)."""

    bench: str
    config: dict[str, Any] = field(default_factory=dict)
    results: dict[str, Any] = field(default_factory=dict)
    limits: dict[str, float] = field(default_factory=dict)
    """What the machine could do at best, measured beside the results."""
    ratios: dict[str, float] = field(default_factory=dict)

    def to_json(self) -> str:
        """One JSON object, as `--json` prints it."""
        return json.dumps(
            {
                "bench": self.bench,
                "commit": commit_id(),
                "machine": machine(),
                "config": self.config,
                "results": self.results,
                "limits": self.limits,
                "ratios": self.ratios,
            }
        )


def samples(
    actions: Mapping[str, Callable[[], object]], rounds: int, warmup: int = 1
) -> dict[str, list[float]]:
    """Time each action `rounds` times, in turn (A B A B ...); return all samples in seconds."""
    for _ in range(warmup):
        for action in actions.values():
            action()
    taken: dict[str, list[float]] = {name: [] for name in actions}
    for _ in range(rounds):
        for name, action in actions.items():
            start = time.perf_counter()
            action()
            taken[name].append(time.perf_counter() - start)
    return taken


def machine() -> dict[str, Any]:
    """What a reader needs to know of the hardware."""
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                model = line.split(":", 1)[1].strip()
                break
    return {
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
    }


def commit_id() -> str | None:
    """Short commit of the checkout this file lies in; None outside a checkout."""
    try:
        done = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"],
            cwd=Path(__file__).resolve().parent,
            capture_output=True,
            text=True,
            timeout=5,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None
