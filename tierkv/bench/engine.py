"""`tierkv bench engine`: the model runner against transformers and against a plain memory read.

Three jobs in float32 on two threads: prefill of 1,024 tokens, decode of 8 sequences from 256
tokens on, one decode step at 2,048. transformers runs the first two with the same weights, turn
by turn in the same process: its sdpa attention, KV cache on, logits of the last position only,
inference mode, no generate() around it. The third is compared with reading the bytes that one
step must read, weights once (a tied embedding once) and K and V once.

Contexts before a decode hold random K and V on both sides: speed does not depend on the values,
and computing them would take longer than everything that is measured. transformers is not needed
otherwise: without it its ratios are left out.
"""

from __future__ import annotations

import gc
import importlib
import statistics
import sys
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from tierkv.bench.report import BenchReport, samples
from tierkv.engine.serve.batch import SequenceInput
from tierkv.engine.serve.gguf import resolve_model
from tierkv.engine.serve.kv_pool import KVPool
from tierkv.engine.serve.model import DecoderModel
from tierkv.engine.serve.model_config import ModelConfig
from tierkv.engine.serve.model_folder import load_config, load_weights
from tierkv.engine.serve.runner import ModelRunner
from tierkv.models import bundled_gguf, default_model_cache
from tierkv.storage.errors import ConfigError

THREADS = 2
PAGE_TOKENS = 16
PREFILL_TOKENS = 1024
BATCH = 8
BATCH_CONTEXT = 256
BATCH_STEPS = 4
LONG_CONTEXT = 2048
SEED = 20261129


def run(quick: bool, model: Path | None = None) -> BenchReport:
    """Measure `model`, a Hugging Face folder or GGUF file (default: the bundled SmolLM2).

    Sets torch's threads for the process. Raises ModelError or ConfigError when the model cannot
    be loaded or its context is shorter than the longest job.
    """
    folder = resolve_model(model or bundled_gguf(), default_model_cache())
    config = load_config(folder)
    if config.max_context < LONG_CONTEXT:
        raise ConfigError(
            f"bench engine: {folder} has a context of {config.max_context} tokens, the longest "
            f"job needs {LONG_CONTEXT}; choose another model"
        )
    torch.set_num_threads(THREADS)
    torch.manual_seed(SEED)
    prompt = torch.randint(config.vocab_size, (PREFILL_TOKENS,)).tolist()
    weights = load_weights(folder, torch.float32)
    step_bytes = _step_bytes(config, weights)
    ours = _Ours(config, weights, prompt)
    del weights
    gc.collect()
    peer = _load_peer(folder, config, prompt)
    report = BenchReport(
        "engine",
        config={
            "model": folder.name,
            "threads": THREADS,
            "page_tokens": PAGE_TOKENS,
            "prefill_tokens": PREFILL_TOKENS,
            "decode8_context": BATCH_CONTEXT,
            "decode1_context": LONG_CONTEXT,
            "decode1_bytes": step_bytes,
            "torch": torch.__version__,
        },
    )
    with torch.inference_mode():
        for name, tokens in (("prefill", PREFILL_TOKENS), ("decode8", BATCH * BATCH_STEPS)):
            jobs = {"ours": getattr(ours, name)}
            if peer is not None:
                jobs["peer"] = getattr(peer, name)
            _compare(report, name, tokens, jobs, quick)
        del peer
        gc.collect()
        _against_read(report, ours, step_bytes, quick)
    return report


class _Ours:
    """The jobs on the engine's runner."""

    def __init__(
        self, config: ModelConfig, weights: Mapping[str, torch.Tensor], prompt: list[int]
    ) -> None:
        longest = max(LONG_CONTEXT, PREFILL_TOKENS, BATCH * _padded(BATCH_CONTEXT + BATCH_STEPS))
        pool = KVPool(
            config,
            _padded(longest) // PAGE_TOKENS,
            PAGE_TOKENS,
            torch.float32,
            torch.device("cpu"),
        )
        pool.kv.normal_()
        self._runner = ModelRunner(DecoderModel(config, weights), pool)
        self._prompt = prompt

    def prefill(self) -> None:
        pages = range(_padded(PREFILL_TOKENS) // PAGE_TOKENS)
        self._runner.run([SequenceInput(self._prompt, PREFILL_TOKENS, pages)]).argmax(-1).tolist()

    def decode8(self) -> None:
        share = _padded(BATCH_CONTEXT + BATCH_STEPS) // PAGE_TOKENS
        tables = [range(index * share, (index + 1) * share) for index in range(BATCH)]
        tokens = self._prompt[:BATCH]
        for context in range(BATCH_CONTEXT + 1, BATCH_CONTEXT + BATCH_STEPS + 1):
            logits = self._runner.run(
                [
                    SequenceInput([token], context, pages)
                    for token, pages in zip(tokens, tables, strict=True)
                ]
            )
            tokens = logits.argmax(-1).tolist()

    def decode1(self) -> None:
        pages = range(_padded(LONG_CONTEXT) // PAGE_TOKENS)
        logits = self._runner.run([SequenceInput(self._prompt[:1], LONG_CONTEXT, pages)])
        logits.argmax(-1).tolist()


class _Peer:
    """The jobs on transformers, called directly so that generate()'s own work is not counted."""

    def __init__(self, folder: Path, config: ModelConfig, prompt: list[int]) -> None:
        transformers: Any = importlib.import_module("transformers")

        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        self._model: Any = transformers.AutoModelForCausalLM.from_pretrained(
            folder, attn_implementation="sdpa", local_files_only=True
        )
        self._model = self._model.float().eval()
        # The cache's argument is being renamed; the old name works in every release we accept.
        warnings.filterwarnings("ignore", message=".*past_key_values.*", category=FutureWarning)
        self._prompt = torch.tensor([prompt])
        self._cache: Any = transformers.DynamicCache()
        shape = (BATCH, config.num_kv_heads, BATCH_CONTEXT, config.head_dim)
        for layer in range(config.num_layers):
            self._cache.update(torch.randn(shape), torch.randn(shape), layer)

    def prefill(self) -> None:
        out = self._model(self._prompt, use_cache=True, logits_to_keep=1)
        out.logits[:, -1].argmax(-1).tolist()

    def decode8(self) -> None:
        tokens = self._prompt[0, :BATCH].unsqueeze(1)
        for _ in range(BATCH_STEPS):
            out = self._model(tokens, past_key_values=self._cache, use_cache=True, logits_to_keep=1)
            tokens = out.logits[:, -1:].argmax(-1)
        self._cache.crop(-BATCH_STEPS)


def _load_peer(folder: Path, config: ModelConfig, prompt: list[int]) -> _Peer | None:
    try:
        return _Peer(folder, config, prompt)
    except ImportError as error:
        sys.stderr.write(
            f"bench engine: no comparison with transformers ({error}); pip install tierkv[dev]\n"
        )
        return None


def _compare(
    report: BenchReport, name: str, tokens: int, jobs: Mapping[str, Callable[[], None]], quick: bool
) -> None:
    """Record `name`_tok_s, and the ratio of rates when there is a peer among `jobs`."""
    rounds = {"prefill": 2 if quick else 7, "decode8": 7 if quick else 25}[name]
    seconds = {who: statistics.median(taken) for who, taken in samples(jobs, rounds).items()}
    report.results[f"{name}_tok_s"] = tokens / seconds["ours"]
    if "peer" in seconds:
        report.results[f"transformers_{name}_tok_s"] = tokens / seconds["peer"]
        report.ratios[f"{name}_vs_transformers"] = seconds["peer"] / seconds["ours"]


def _against_read(report: BenchReport, ours: _Ours, step_bytes: int, quick: bool) -> None:
    """Record decode1_ms and its ratio to the fastest plain read of `step_bytes`."""
    memory = torch.ones(step_bytes // 4)
    reads: dict[str, Callable[[], object]] = {
        "sum": memory.sum,
        "dot": lambda: torch.dot(memory, memory),
        "integers": memory.view(torch.int64).sum if step_bytes % 8 == 0 else memory.sum,
    }
    taken = samples({"ours": ours.decode1} | reads, 9 if quick else 31)
    seconds = {name: statistics.median(times) for name, times in taken.items()}
    read_s = min(seconds[name] for name in reads)
    report.results["decode1_ms"] = seconds["ours"] * 1e3
    report.limits["decode1_read_ms"] = read_s * 1e3
    report.limits["read_gbs"] = step_bytes / read_s / 1e9
    report.ratios["decode1_vs_read"] = seconds["ours"] / read_s


def _step_bytes(config: ModelConfig, weights: Mapping[str, torch.Tensor]) -> int:
    """Bytes that one decode step at LONG_CONTEXT must read, in float32."""
    unread = "lm_head.weight" if config.tie_word_embeddings else "model.embed_tokens.weight"
    numbers = sum(tensor.numel() for name, tensor in weights.items() if name != unread)
    return numbers * 4 + LONG_CONTEXT * config.kv_bytes_per_token(4)


def _padded(tokens: int) -> int:
    return -(-tokens // PAGE_TOKENS) * PAGE_TOKENS
