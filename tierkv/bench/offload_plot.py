"""The picture of `tierkv bench offload`: times against bandwidth and against prefix length."""

from __future__ import annotations

from pathlib import Path

from tierkv.bench.report import BenchReport
from tierkv.storage.errors import ConfigError


def plot(report: BenchReport, target: Path) -> None:
    """Write a PNG. Raises ConfigError when matplotlib is not installed."""
    try:
        import matplotlib
    except ImportError as error:
        raise ConfigError(
            "bench offload: the plot needs matplotlib; pip install matplotlib"
        ) from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.2))
    points = report.results["points"]
    for name, mark in (("recompute", "s"), ("load", "o"), ("combined", "D")):
        times = [point[f"{name}_s"] for point in points]
        left.plot([p["gbs"] * 1000 for p in points], times, marker=mark, label=name)
    left.axvline(report.limits["even_gbs"] * 1000, linestyle=":", color="grey", label="crossover")
    left.set_xscale("log")
    left.set_yscale("log")
    left.set_xlabel("tier bandwidth, MB/s")
    left.set_title(f"prefix of {report.config['prefix_tokens']} tokens")
    curve = report.results["curve"]
    for name in [key for key in curve[0] if key.endswith("_s")]:
        label = name.removesuffix("_s").replace("_", " ")
        lengths = [row["prefix_tokens"] for row in curve]
        right.plot(lengths, [row[name] for row in curve], marker=".", label=label)
    right.set_yscale("log")
    right.set_xlabel("prefix, tokens")
    right.set_title(f"{report.config['model']} on {report.config['device']}", fontsize=9)
    for axis in (left, right):
        axis.set_ylabel("time to first token, s")
        axis.grid(True, which="both", alpha=0.3)
        axis.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(target, dpi=120)
    pyplot.close(figure)
