"""A scripted engine for tests of the HTTP server: no model, no threads, no torch work.

It records what it was asked for, answers each request with the next script, and says how each
stream ended. A script can hold before a step until the test lets it go on.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from typing import Any

from tierkv.engine.cache.prefix_cache import PrefixCacheStats
from tierkv.engine.serve.engine_config import EngineStats
from tierkv.engine.serve.model_config import ModelConfig
from tierkv.engine.serve.offload import OffloadStats
from tierkv.engine.serve.request import CachedTokens, FinishReason, RequestOutput, StreamEvent
from tierkv.engine.serve.restore import RestoreStats
from tierkv.engine.serve.sampler import SamplingParams
from tierkv.storage.base import MoverStats, StoreStats, TierStats
from tierkv.storage.types import TierName

VOCAB_SIZE = 256
MAX_CONTEXT = 128
START = 1


@dataclass
class Script:
    """What one request does: its pieces of text, and where it waits or fails."""

    pieces: Sequence[str] = ("Hel", "lo")
    cached: CachedTokens = field(default_factory=CachedTokens)
    finish: FinishReason = FinishReason.STOP
    error: str | None = None
    raises: Exception | None = None
    """Raised before the first event."""
    hold_before: int | None = None
    """Index of the piece before which the request waits for `go`."""
    go: asyncio.Event = field(default_factory=asyncio.Event)
    held: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the request waits."""
    closed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the stream was left, whatever way."""
    completed: bool = False


@dataclass
class Call:
    """Arguments of one stream() call."""

    prompt: list[int]
    params: SamplingParams
    stop: tuple[str, ...]
    cache_salt: str
    priority: int


class ByteTokenizer:
    """One token per UTF-8 byte, with START before a text that is not a rendered chat."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [START] * add_special_tokens + list(text.encode())


class PlainChat:
    """Renders messages as role:content; lines and remembers its arguments."""

    def __init__(self) -> None:
        self.seen: list[tuple[list[dict[str, Any]], list[dict[str, Any]] | None]] = []

    def render(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        tools: Sequence[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
    ) -> str:
        self.seen.append((list(messages), None if tools is None else list(tools)))
        return "".join(f"{message['role']}:{message['content']};" for message in messages)


class FakeEngine:
    """Satisfies ServingEngine. Requests without a script get the default one."""

    def __init__(self, *scripts: Script) -> None:
        self.scripts = list(scripts)
        self.calls: list[Call] = []
        self.tokenizer = ByteTokenizer()
        self.chat = PlainChat()
        self.model_name = "tiny"
        self.config = tiny_config()
        self.max_context = MAX_CONTEXT
        self.stopped: str | None = None
        self.running = 0

    async def stream(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        stop: Sequence[str] = (),
        cache_salt: str = "",
        priority: int = 0,
    ) -> AsyncGenerator[StreamEvent, None]:
        script = self.scripts.pop(0) if self.scripts else Script()
        self.calls.append(Call(list(prompt), params, tuple(stop), cache_salt, priority))
        self.running += 1
        try:
            if script.raises is not None:
                raise script.raises
            for step, piece in enumerate(script.pieces):
                if step == script.hold_before:
                    script.held.set()
                    await script.go.wait()
                yield StreamEvent((step,), piece, None)
            script.completed = True
            yield StreamEvent((), "", self._output(script, prompt))
        finally:
            self.running -= 1
            script.closed.set()

    def _output(self, script: Script, prompt: Sequence[int]) -> RequestOutput:
        return RequestOutput(
            request_id=len(self.calls),
            prompt_token_ids=tuple(prompt),
            token_ids=tuple(range(len(script.pieces))),
            text="".join(script.pieces),
            finish_reason=script.finish,
            cached=script.cached,
            queued_s=0.25,
            ttft_s=0.5,
            total_s=1.0,
            error=script.error,
        )

    def stats(self) -> EngineStats:
        return EngineStats(
            model=self.model_name,
            device="cpu",
            page_tokens=16,
            page_bytes=4000,
            waiting=0,
            running=self.running,
            finished=1,
            failed=2,
            retractions=3,
            prompt_tokens=4,
            cached_tokens=5,
            generated_tokens=6,
            steps=7,
            step_failures=8,
            cache=PrefixCacheStats(
                pages_total=20,
                pages_free=15,
                pages_copying=1,
                evictable_tokens=32,
                protected_tokens=16,
            ),
            offload=OffloadStats(copied=1, present=2, dropped=3, failed=4, in_flight=5),
            restore=RestoreStats(
                loads=1,
                restored_pages=2,
                recomputed_pages=7,
                late=3,
                failed=4,
                outright=8,
                active=5,
                orphaned_pages=6,
                expected_s=0.5,
                taken_s=0.75,
            ),
            store=store_stats(),
        )


def tiny_config() -> ModelConfig:
    """A model that fits nothing real."""
    return ModelConfig(
        architecture="llama",
        vocab_size=VOCAB_SIZE,
        hidden_size=8,
        intermediate_size=8,
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=8,
        rms_norm_eps=1e-5,
        rope_theta=1e4,
        rope_scaling=None,
        max_context=MAX_CONTEXT,
        tie_word_embeddings=True,
        attention_bias=False,
        eos_token_ids=(0,),
        bos_token_id=None,
    )


def tier_stats(name: TierName, degraded: str | None = None) -> TierStats:
    """A tier of 10 slots of 4 KiB, 3 of them in use."""
    return TierStats(
        name=name,
        page_bytes=4000,
        slot_bytes=4096,
        capacity_pages=10,
        free_pages=7,
        reserved_pages=0,
        committed_pages=3,
        leased_pages=1,
        quarantined_pages=0,
        hits=5,
        misses=2,
        writes=4,
        duplicates=1,
        evictions=1,
        corrupt=0,
        io_errors=6,
        rejected=2,
        recovered_pages=0,
        degraded=degraded,
    )


def store_stats() -> StoreStats:
    """A healthy host tier over a failing disk."""
    return StoreStats(
        tiers=(tier_stats(TierName.HOST), tier_stats(TierName.NVME, "write: disk full")),
        mover=MoverStats(
            queued=1,
            in_flight=2,
            completed=3,
            dropped=4,
            cancelled=5,
            failed=6,
            worker_restarts=0,
            read_bytes_per_s={TierName.NVME: 1e9},
        ),
        admission_rejected=7,
        restored_pages={TierName.HOST: 8},
    )
