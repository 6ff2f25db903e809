"""Checks and measures the GPU data path on the machine at hand: one command, no downloads.

    python tools/gpu_check.py                     everything, below five minutes on one GPU
    python tools/gpu_check.py --only bandwidth    one part; may be repeated
    python tools/gpu_check.py --cpu               the same code on tiny shapes, without a GPU

Parts: `tests` runs tests/gpu; `bandwidth` moves paged KV of a Llama-3.1-8B's pages both ways
beside a plain pinned copy; `decode` times decoding with and without pages leaving meanwhile;
`ttft` times the first token by recompute, from host memory, and by both together. The model has
that shape and random weights. Prints a table to standard error and one JSON object to standard
output (or to --output). Exits 1 when a check fails, 0 whatever the figures are.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tierkv.bench.report import commit_id, machine
from tierkv.engine.serve.batch import SequenceInput
from tierkv.engine.serve.kv_pool import KVPool
from tierkv.engine.serve.model import DecoderModel
from tierkv.engine.serve.model_config import ModelConfig
from tierkv.engine.serve.runner import ModelRunner
from tierkv.storage.arena import Arena
from tierkv.storage.clock import SystemClock
from tierkv.storage.transfer.base import CopyEvent
from tierkv.storage.transfer.calibration import calibrate
from tierkv.storage.transfer.opening import open_transfer
from tierkv.storage.transfer.probe import cuda_problem, missing_kernels

ROOT = Path(__file__).resolve().parent.parent
PARTS = ("tests", "bandwidth", "decode", "ttft")
PAGE_TOKENS = 16
WAIT_S = 60.0
TESTS_TIMEOUT_S = 240
SAMPLED_CHUNKS = 7
"""Chunks of a long recompute that are timed; the others are interpolated."""

LLAMA_8B = ModelConfig(
    architecture="llama",
    vocab_size=128_256,
    hidden_size=4096,
    intermediate_size=14_336,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    rms_norm_eps=1e-5,
    rope_theta=500_000.0,
    rope_scaling=None,
    max_context=131_072 + PAGE_TOKENS,
    tie_word_embeddings=False,
    attention_bias=False,
    eos_token_ids=(),
    bos_token_id=None,
)
TINY = ModelConfig(
    architecture="llama",
    vocab_size=64,
    hidden_size=32,
    intermediate_size=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    rms_norm_eps=1e-5,
    rope_theta=10_000.0,
    rope_scaling=None,
    max_context=512,
    tie_word_embeddings=False,
    attention_bias=False,
    eos_token_ids=(),
    bos_token_id=None,
)


@dataclass(frozen=True, slots=True)
class Scale:
    """How much is measured."""

    device: torch.device
    dtype: torch.dtype
    config: ModelConfig
    copy_bytes: int
    """Of one bandwidth measurement."""
    arena_bytes: int
    contexts: tuple[int, ...]
    chunk_cells: int
    """Largest chunk times context of a prefill: bounds the attention's mask and scores."""
    decode_batch: int
    decode_context: int
    decode_steps: int
    rounds: int


GPU = Scale(
    torch.device("cuda", 0),
    torch.bfloat16,
    LLAMA_8B,
    1 << 30,
    4 << 30,
    (4096, 32_768, 131_072),
    64 << 20,
    8,
    2048,
    100,
    5,
)
CPU = Scale(
    torch.device("cpu"),
    torch.float32,
    TINY,
    1 << 18,
    1 << 20,
    (64, 128),
    32 * 128,
    2,
    64,
    8,
    2,
)


@dataclass(slots=True)
class Report:
    """Figures by part, and what failed."""

    parts: dict[str, dict[str, Any]] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)

    def check(self, holds: bool, what: str) -> None:
        if not holds:
            self.failures.append(what)


class RandomWeights(Mapping[str, torch.Tensor]):
    """Weights of a shape, made on the device when they are asked for: no 16 GB on the host."""

    def __init__(self, scale: Scale) -> None:
        config = scale.config
        hidden, inner = config.hidden_size, config.intermediate_size
        q_size, kv_size = (n * config.head_dim for n in (config.num_heads, config.num_kv_heads))
        self._scale = scale
        self._shapes: dict[str, tuple[int, ...]] = {
            "model.embed_tokens.weight": (config.vocab_size, hidden),
            "lm_head.weight": (config.vocab_size, hidden),
            "model.norm.weight": (hidden,),
        }
        per_layer = {
            "self_attn.q_proj": (q_size, hidden),
            "self_attn.k_proj": (kv_size, hidden),
            "self_attn.v_proj": (kv_size, hidden),
            "self_attn.o_proj": (hidden, q_size),
            "mlp.gate_proj": (inner, hidden),
            "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner),
            "input_layernorm": (hidden,),
            "post_attention_layernorm": (hidden,),
        }
        for index in range(config.num_layers):
            for name, shape in per_layer.items():
                self._shapes[f"model.layers.{index}.{name}.weight"] = shape

    def __getitem__(self, name: str) -> torch.Tensor:
        shape = self._shapes[name]
        made = torch.empty(shape, dtype=self._scale.dtype, device=self._scale.device)
        # Norms near one, matrices small enough that 32 layers stay finite.
        return made.fill_(1.0) if len(shape) == 1 else made.normal_(0.0, 0.5 / math.sqrt(shape[1]))

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __len__(self) -> int:
        return len(self._shapes)


class Bench:
    """A model with random weights over a pool, a transfer and a registered arena."""

    def __init__(self, scale: Scale, *, with_model: bool) -> None:
        self.scale = scale
        config = scale.config
        self.page_bytes = config.kv_bytes_per_token(scale.dtype.itemsize) * PAGE_TOKENS
        pages = max(
            scale.copy_bytes // self.page_bytes,
            max(scale.contexts) // PAGE_TOKENS + 1,
            scale.decode_batch * (scale.decode_context // PAGE_TOKENS + 8),
        )
        self.pool = KVPool(config, pages, PAGE_TOKENS, scale.dtype, scale.device)
        self.pool.kv.normal_(0.0, 0.5)
        self.transfer = open_transfer(self.pool.kv)
        self.arena = Arena(None, self.page_bytes, scale.arena_bytes)
        geometry = self.arena.geometry
        self.registered = self.transfer.register(
            self.arena.memory, unit_bytes=geometry.slot_bytes, first_bytes=geometry.first_slot
        )
        self.slots = [self.arena.payload_view(i) for i in range(geometry.slot_count)]
        self.calibration = calibrate(self.transfer, SystemClock())
        self.runner: ModelRunner | None = None
        if with_model:
            with torch.inference_mode():
                weights = RandomWeights(scale)
                model = DecoderModel(config, weights, scale.device, scale.dtype)
            self.runner = ModelRunner(model, self.pool)

    def views(self, count: int) -> list[memoryview]:
        """Arena pages, used again when there are fewer than asked for."""
        return [self.slots[i % len(self.slots)] for i in range(count)]

    def forward(self, sequences: list[SequenceInput], **more: Any) -> torch.Tensor:
        assert self.runner is not None
        return self.runner.run(sequences, **more)

    def close(self) -> None:
        self.transfer.close()
        self.slots.clear()
        self.arena.close()


def synchronize(scale: Scale) -> None:
    """Wait for the device's compute stream."""
    if scale.device.type == "cuda":
        torch.cuda.current_stream(scale.device).synchronize()


def timed(scale: Scale, action: Callable[[], object], rounds: int) -> float:
    """Median seconds of an action, the device idle before and after."""
    taken = []
    for _ in range(rounds + 1):
        synchronize(scale)
        start = time.perf_counter()
        action()
        synchronize(scale)
        taken.append(time.perf_counter() - start)
    return statistics.median(taken[1:])


def finish(copy: CopyEvent) -> None:
    """Wait for a copy; its failure is this program's."""
    if not copy.wait(WAIT_S):
        raise TimeoutError(f"a copy did not end within {WAIT_S:.0f} s")
    if copy.error is not None:
        raise copy.error


def run_tests(scale: Scale, report: Report) -> None:
    """tests/gpu in a process of its own; without a GPU they are collected only."""
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "tests/gpu"]
    if scale.device.type != "cuda":
        command.append("--collect-only")
    done = subprocess.run(
        command,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=TESTS_TIMEOUT_S,
        check=False,
    )
    lines = [line for line in done.stdout.splitlines() if line.strip()]
    report.parts["tests"] = {"exit": done.returncode, "summary": lines[-1] if lines else ""}
    if done.returncode != 0:
        print(done.stdout[-4000:], file=sys.stderr)
    report.check(done.returncode == 0, "tests/gpu failed")


def run_bandwidth(scale: Scale, report: Report) -> None:
    """Paged KV both ways, by every method, beside one plain copy of as many pinned bytes."""
    bench = Bench(scale, with_model=False)
    count = scale.copy_bytes // bench.page_bytes
    pages = np.random.default_rng(5).permutation(bench.pool.num_pages)[:count].tolist()
    total = count * bench.page_bytes
    pin = scale.device.type == "cuda"
    host = torch.zeros(total, dtype=torch.uint8, pin_memory=pin)
    device = torch.zeros(total, dtype=torch.uint8, device=scale.device)
    views = bench.views(count)
    result: dict[str, Any] = {
        "page_bytes": bench.page_bytes,
        "moved_bytes": total,
        "registered_bytes": bench.registered,
        "plain_out_gbs": total / timed(scale, lambda: host.copy_(device), scale.rounds) / 1e9,
        "plain_in_gbs": total / timed(scale, lambda: device.copy_(host), scale.rounds) / 1e9,
        "calibration": bench.calibration.to_dict(),
    }
    expected = bench.pool.kv[:, :, pages].clone()
    for method in bench.transfer.ops.methods:
        bench.transfer.ops.choose(method, method)
        out_s = timed(scale, lambda: finish(bench.transfer.gather(pages, views)), scale.rounds)
        in_s = timed(scale, lambda: finish(bench.transfer.scatter(views, pages)), scale.rounds)
        result[f"{method}_out_gbs"] = total / out_s / 1e9
        result[f"{method}_in_gbs"] = total / in_s / 1e9
        result[f"{method}_out_share"] = result[f"{method}_out_gbs"] / result["plain_out_gbs"]
        result[f"{method}_in_share"] = result[f"{method}_in_gbs"] / result["plain_in_gbs"]
        if len(bench.slots) >= count:
            same = torch.equal(
                bench.pool.kv[:, :, pages].view(torch.uint8), expected.view(torch.uint8)
            )
            report.check(same, f"bandwidth: {method} changed bytes")
    for way, plain in (("out", "plain_out_gbs"), ("in", "plain_in_gbs")):
        rates = [result[f"{m}_{way}_gbs"] for m in bench.transfer.ops.methods]
        result[f"best_{way}_share"] = max(rates) / result[plain]
    report.parts["bandwidth"] = result
    bench.close()


def run_decode(scale: Scale, report: Report, bench: Bench) -> None:
    """Time of one decode step with nothing else, and while pages leave without pause."""
    each = scale.decode_context // PAGE_TOKENS + 8
    tables = [list(range(i * each, (i + 1) * each)) for i in range(scale.decode_batch)]

    def steps() -> list[float]:
        taken = []
        for step in range(scale.decode_steps):
            context = scale.decode_context + step % (7 * PAGE_TOKENS) + 1
            batch = [SequenceInput([1], context, table) for table in tables]
            start = time.perf_counter()
            bench.forward(batch).argmax(-1).cpu()
            taken.append(time.perf_counter() - start)
        return taken

    steps()
    quiet = steps()
    demoted = 0
    group = max(1, min(64, len(bench.slots)))
    pages = list(range(group))
    copies: list[CopyEvent] = []
    busy: list[float] = []
    context = scale.decode_context
    started = time.perf_counter()
    for step in range(scale.decode_steps):
        # Two groups are always under way, so that the copy engine never rests.
        copies = [copy for copy in copies if not copy.done]
        while len(copies) < 2:
            copies.append(bench.transfer.gather(pages, bench.views(group)))
            demoted += group
        batch = [
            SequenceInput([1], context + step % (7 * PAGE_TOKENS) + 1, table) for table in tables
        ]
        start = time.perf_counter()
        bench.forward(batch).argmax(-1).cpu()
        busy.append(time.perf_counter() - start)
    for copy in copies:
        finish(copy)
    elapsed = time.perf_counter() - started
    p50, p50_busy = statistics.median(quiet), statistics.median(busy)
    report.parts["decode"] = {
        "batch": scale.decode_batch,
        "context_tokens": scale.decode_context,
        "p50_ms": 1e3 * p50,
        "p50_demoting_ms": 1e3 * p50_busy,
        "slowdown": p50_busy / p50,
        "demoted_gbs": demoted * bench.page_bytes / elapsed / 1e9,
    }


def run_ttft(scale: Scale, report: Report, bench: Bench) -> None:
    """First token after a prefix of each length: computed, restored, and both at once."""
    report.parts["ttft"] = {}
    for context in scale.contexts:
        table = list(range(context // PAGE_TOKENS + 1))
        prefix_pages = context // PAGE_TOKENS
        recompute_s = measure_recompute(bench, table, context)
        load = partial(restore_and_decode, bench, table, context)
        load_s = timed(scale, partial(load, 0), scale.rounds)
        head = choose_head(recompute_s, load_s, context)
        combined_s = timed(scale, partial(load, head), scale.rounds)
        report.parts["ttft"][str(context)] = {
            "recompute_s": recompute_s,
            "host_s": load_s,
            "combined_s": combined_s,
            "head_tokens": head,
            "worst_vs_best": combined_s / min(recompute_s, load_s),
        }
        if prefix_pages <= len(bench.slots):
            check_restored(bench, table, context, report)


def chunks_of(scale: Scale, start: int, end: int) -> list[tuple[int, int]]:
    """Prefill chunks of [start, end), each small enough for its context."""
    found = []
    while start < end:
        size = max(PAGE_TOKENS, min(2048, scale.chunk_cells // max(1, end)))
        found.append((start, min(end, start + size)))
        start = found[-1][1]
    return found


def prefill(bench: Bench, table: list[int], start: int, end: int) -> torch.Tensor:
    """Compute the KV of tokens [start, end); return the logits of the last."""
    return bench.forward([SequenceInput(tokens_of(bench, start, end), end, table)])


def tokens_of(bench: Bench, start: int, end: int) -> list[int]:
    """Tokens [start, end) of the one prompt that is used throughout."""
    return [1 + i % (bench.scale.config.vocab_size - 1) for i in range(start, end)]


def measure_recompute(bench: Bench, table: list[int], context: int) -> float:
    """Seconds to compute the whole prefix and the first token.

    Long ones from a sample of chunks: cost is linear in a chunk's context, so the chunks between
    two samples are interpolated.
    """
    scale = bench.scale
    chunks = chunks_of(scale, 0, context)
    step = max(1, (len(chunks) - 1) // (SAMPLED_CHUNKS - 1))
    sampled = sorted({*range(0, len(chunks), step), len(chunks) - 1})
    prefill(bench, table, *chunks[0])
    taken = [timed(scale, partial(prefill, bench, table, *chunks[i]), 1) for i in sampled]
    whole = float(np.interp(range(len(chunks)), sampled, taken).sum())
    return whole + timed(scale, partial(prefill, bench, table, context, context + 1), 1)


def choose_head(recompute_s: float, load_s: float, context: int) -> int:
    """Tokens to compute while the rest is loaded, so that both end together; whole pages.

    From the two pure ways alone: compute at a constant rate, which overstates the head's cost.
    """
    share = load_s / (load_s + recompute_s)
    return int(context * share) // PAGE_TOKENS * PAGE_TOKENS


def restore_and_decode(bench: Bench, table: list[int], context: int, head: int) -> torch.Tensor:
    """First token with tokens [head, context) from host memory, [0, head) computed meanwhile."""
    pages = table[head // PAGE_TOKENS : context // PAGE_TOKENS]
    copy = bench.transfer.scatter(bench.views(len(pages)), pages)
    for start, end in chunks_of(bench.scale, 0, head):
        prefill(bench, table, start, end)
    # Layer by layer: the pass may begin before the last layer has come.
    last = bench.forward(
        [SequenceInput(tokens_of(bench, context, context + 1), context + 1, table)],
        before_layer=lambda layer: copy.wait_layer(layer, WAIT_S),
    )
    finish(copy)
    return last


def check_restored(bench: Bench, table: list[int], context: int, report: Report) -> None:
    """The same KV gives the same logits after a trip to host memory and back."""
    pages = table[: context // PAGE_TOKENS]
    before = prefill(bench, table, context, context + 1)
    finish(bench.transfer.gather(pages, bench.views(len(pages))))
    bench.pool.kv[:, :, pages] = 0
    after = restore_and_decode(bench, table, context, 0)
    same = bool((before.argmax(-1) == after.argmax(-1)).all()) and torch.equal(before, after)
    report.parts["ttft"][str(context)]["identical"] = int(same)
    report.check(same, f"ttft: other logits after a restore of {context} tokens")


def main(arguments: list[str] | None = None) -> int:
    """Run the parts that were asked for; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--only", action="append", choices=PARTS, help="run this part only")
    parser.add_argument("--cpu", action="store_true", help="tiny shapes on the CPU, as a dry run")
    parser.add_argument("--output", type=Path, help="write the JSON here")
    options = parser.parse_args(arguments)
    problem = None if options.cpu else cuda_problem()
    if problem is not None:
        print(f"gpu_check: {problem}", file=sys.stderr)
        return 2
    scale = CPU if options.cpu else GPU
    report = Report()
    started = time.perf_counter()
    run_parts(scale, report, options.only or list(PARTS))
    result = {
        "check": "gpu",
        "commit": commit_id(),
        "machine": {**machine(), **describe(scale)},
        "elapsed_s": time.perf_counter() - started,
        "failures": report.failures,
        "parts": report.parts,
    }
    text = json.dumps(result, indent=2)
    if options.output is not None:
        options.output.write_text(text + "\n")
    else:
        print(text)
    print_table(report)
    return 1 if report.failures else 0


def run_parts(scale: Scale, report: Report, parts: list[str]) -> None:
    """Those parts, in their order; the two that need a model share it."""
    if "tests" in parts:
        run_tests(scale, report)
    if "bandwidth" in parts:
        run_bandwidth(scale, report)
    if "decode" in parts or "ttft" in parts:
        bench = Bench(scale, with_model=True)
        if "decode" in parts:
            run_decode(scale, report, bench)
        if "ttft" in parts:
            run_ttft(scale, report, bench)
        bench.close()


def describe(scale: Scale) -> dict[str, Any]:
    """The device and the software that moves pages."""
    if scale.device.type != "cuda":
        return {"device": "cpu", "torch": torch.__version__}
    properties = torch.cuda.get_device_properties(scale.device)
    return {
        "device": properties.name,
        "device_bytes": properties.total_memory,
        "multiprocessors": properties.multi_processor_count,
        "torch": torch.__version__,
        "kernels": missing_kernels() or "cupy",
    }


def print_table(report: Report) -> None:
    """All figures, one a line, on standard error."""
    for part, figures in report.parts.items():
        for name, value in figures.items():
            shown = f"{value:.4g}" if isinstance(value, float) else value
            print(f"{part:10} {name:20} {shown}", file=sys.stderr)
    for failure in report.failures:
        print(f"FAILED     {failure}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
