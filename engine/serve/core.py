"""The engine without its thread: submit, abort and one step at a time.

Owns the scheduler, the pool's cache and the copies to and from the store; runs the model. One
thread calls it, so that a test can drive it step by step. engine.py puts a thread around it.

Life of a step: copies that ended -> admit -> plan -> copies that may start -> forward -> sample
-> commit -> tell sinks.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from tierkv.engine.cache.node import Evicted, PageArray
from tierkv.engine.cache.page_pool import PagePool
from tierkv.engine.cache.prefix_cache import PrefixCache
from tierkv.engine.cache.radix import RadixTree
from tierkv.engine.serve.batch import SequenceInput
from tierkv.engine.serve.engine_config import EngineConfig, EngineStats
from tierkv.engine.serve.model import BeforeLayer
from tierkv.engine.serve.offload import Offload
from tierkv.engine.serve.pacing import DecodePace
from tierkv.engine.serve.request import FinishReason, Request, RequestState
from tierkv.engine.serve.restore import Restore
from tierkv.engine.serve.runner import ModelRunner
from tierkv.engine.serve.sampler import Sampler
from tierkv.engine.serve.scheduler import Scheduler, SchedulerLimits, Work
from tierkv.storage.base import PageStore
from tierkv.storage.clock import Clock
from tierkv.storage.errors import RequestError, TierIOError
from tierkv.storage.policy import WritePolicy
from tierkv.storage.transfer.base import PageTransfer

log = logging.getLogger(__name__)

Sink = Callable[[Request, int | None], None]
"""Told on the engine thread of each new token, and of the end with None. Must be quick."""

IDLE_WAIT_S = 1.0
"""Longest sleep of an idle engine; wake-ups make it shorter, nothing depends on it."""


@dataclass(frozen=True, slots=True)
class Tiers:
    """A store with the copies to and from it."""

    store: PageStore
    transfer: PageTransfer
    policy: WritePolicy
    selective_hits: int


class EngineCore:
    """Scheduler, cache and model of one engine. Not thread-safe."""

    def __init__(
        self,
        config: EngineConfig,
        runner: ModelRunner,
        eos: frozenset[int],
        max_context: int,
        clock: Clock,
        tiers: Tiers | None,
        wake: Callable[[], None],
    ) -> None:
        self._config = config
        self._runner = runner
        self._eos = eos
        self._max_context = max_context
        self._clock = clock
        self._tiers = tiers
        pages = runner.pool.num_pages
        tree = RadixTree(config.page_tokens, config.evict_policy)
        pool = PagePool(pages, config.page_tokens)
        self.cache = PrefixCache(tree, pool, self._evicted if tiers else None)
        self._copies_max = max(1, pages // 4)
        self.pace = DecodePace()
        self.offload: Offload | None = None
        self.restore: Restore | None = None
        if tiers is not None:
            self.offload = Offload(
                self.cache,
                tiers.store,
                tiers.transfer,
                tiers.policy,
                selective_hits=tiers.selective_hits,
                in_flight_pages_max=self._copies_max,
                wake=wake,
            )
            self.restore = Restore(
                self.cache,
                tiers.store,
                tiers.transfer,
                clock,
                deadline_s=config.restore_deadline_s,
                loads_max=config.max_running,
                chunk_tokens=config.max_batch_tokens,
                mode=config.restore,
                wake=wake,
            )
        limits = SchedulerLimits(
            batch_tokens_max=config.max_batch_tokens,
            running_max=config.max_running,
            watermark_pages=int(config.watermark * pages),
        )
        self.scheduler = Scheduler(
            self.cache, limits, config.schedule, clock, self.restore, self.offload
        )
        self._sampler = Sampler()
        self._live: dict[int, tuple[Request, Sink]] = {}
        self._finished = 0
        self._failed = 0
        self._prompt_tokens = 0
        self._cached_tokens = 0
        self._generated_tokens = 0
        self._steps = 0
        self.step_failures = 0

    @property
    def store(self) -> PageStore | None:
        """What lies below the pool."""
        return self._tiers.store if self._tiers else None

    def validate(self, prompt: list[int]) -> None:
        """Raise RequestError when a prompt can never be served. Thread-safe: reads constants."""
        vocab = self._runner.model.config.vocab_size
        if not prompt:
            raise RequestError("submit request: the prompt is empty, expected at least one token")
        if not all(0 <= token < vocab for token in prompt):
            raise RequestError(f"submit request: token ids must be 0 to {vocab - 1}")
        if len(prompt) >= self._max_context:
            raise RequestError(
                f"submit request: the prompt has {len(prompt)} tokens, the context holds "
                f"{self._max_context} with at least one generated; shorten the prompt"
            )
        pool_tokens = self._runner.pool.num_pages * self._config.page_tokens
        if len(prompt) >= pool_tokens:
            raise RequestError(
                f"submit request: the prompt has {len(prompt)} tokens, the KV pool holds "
                f"{pool_tokens} with at least one generated; enlarge the pool or shorten the prompt"
            )

    def submit(self, request: Request, sink: Sink) -> None:
        """Queue a validated request. `sink` hears of it until its end."""
        self._live[request.request_id] = (request, sink)
        if len(self.scheduler.waiting) >= self._config.max_waiting:
            message = f"submit request: {self._config.max_waiting} requests wait already"
            request.state, request.finish_reason = RequestState.FINISHED, FinishReason.ERROR
            request.error = f"{message}; try again later"
            request.finished_s = self._clock.monotonic()
            self._close_ended()
            return
        self.scheduler.add(request)

    def abort(self, request_id: int, reason: FinishReason = FinishReason.ABORT) -> None:
        """End a request early; unknown ids are ignored, they have ended."""
        live = self._live.get(request_id)
        if live is not None:
            self.scheduler.finish(live[0], reason)
            self._close_ended()

    def fail_running(self, error: str) -> None:
        """End every running request after a step that broke; waiting ones stay."""
        self.step_failures += 1
        for request in list(self.scheduler.running):
            self.scheduler.finish(request, FinishReason.ERROR, error)
        self._close_ended()

    def abort_all(self) -> None:
        """End every request."""
        for request, _ in list(self._live.values()):
            self.scheduler.finish(request, FinishReason.ABORT)
        self._close_ended()

    def step(self) -> bool:
        """Do one round; False when there was nothing to compute."""
        self._note_copies()
        self.scheduler.admit()
        work = self.scheduler.plan()
        self._start_copies()
        if not work:
            self._close_ended()
            return False
        began = self._clock.monotonic()
        layered = any(each.layered for each in work)
        decoding = all(each.request.state is RequestState.DECODE for each in work)
        copying = self.offload is not None and self.offload.copying
        work, tokens = self._compute(work)
        # A pass that waited for copies says nothing of what computing costs.
        if self.restore is not None and not layered:
            seconds = self._clock.monotonic() - began
            count = sum(each.end - each.start for each in work)
            context = sum((each.end - each.start) * each.start for each in work) / count
            self.restore.cost.note(count, context, seconds)
        if decoding:
            self.pace.note(self._clock.monotonic() - began, len(work), copying=copying)
        self.scheduler.commit(work, tokens, self._eos)
        self._steps += 1
        self._generated_tokens += len(tokens)
        for each in work:
            token = tokens.get(each.request.request_id)
            if token is not None:
                self._live[each.request.request_id][1](each.request, token)
        self._close_ended()
        return True

    def idle_wait_s(self) -> float:
        """How long an idle engine may sleep without missing a deadline."""
        recheck = self.restore.recheck_s() if self.restore else None
        return IDLE_WAIT_S if recheck is None else min(IDLE_WAIT_S, recheck)

    def close(self, timeout_s: float) -> None:
        """End all requests and wait for the copies under way, each within `timeout_s`."""
        self.abort_all()
        if self.restore is not None:
            self.restore.close(timeout_s)
        self.drain(timeout_s)

    def drop_gpu_cache(self, timeout_s: float) -> int:
        """Evict every page nobody holds, demoting as on any eviction; return how many went.

        Waits for the copies, in groups, each within `timeout_s`.
        """
        self.drain(timeout_s)
        evicted = 0
        while self.cache.tree.evictable_tokens:
            evicted += self.cache.evict(self._copies_max)
            self.drain(timeout_s)
        return evicted

    def drain(self, timeout_s: float) -> bool:
        """Wait for copies into the store, each within `timeout_s`; True when none is left."""
        return self.offload is None or self.offload.drain(timeout_s)

    def stats(self) -> EngineStats:
        """Counters and sizes now. Reads only numbers: safe from another thread."""
        config = self._runner.model.config
        return EngineStats(
            model=self._config.model.name,
            device=str(self._runner.model.device),
            page_tokens=self._config.page_tokens,
            page_bytes=config.kv_bytes_per_token(self._runner.pool.kv.itemsize)
            * self._config.page_tokens,
            waiting=len(self.scheduler.waiting),
            running=len(self.scheduler.running),
            finished=self._finished,
            failed=self._failed,
            retractions=self.scheduler.retractions,
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self._cached_tokens,
            generated_tokens=self._generated_tokens,
            steps=self._steps,
            step_failures=self.step_failures,
            cache=self.cache.stats(),
            offload=self.offload.stats() if self.offload else None,
            restore=self.restore.stats() if self.restore else None,
            store=self._tiers.store.stats() if self._tiers else None,
        )

    def check(self) -> None:
        """Assert every invariant of the engine. O(pool)."""
        self.scheduler.check()
        if self.offload is not None:
            self.offload.check()
        if self.restore is not None:
            self.restore.check()
        for request, _ in self._live.values():
            assert request.state is not RequestState.FINISHED, "an ended request is still live"

    def _evicted(self, run: Evicted) -> PageArray:
        assert self.offload is not None
        return self.offload.evicted(run)

    def _start_copies(self) -> None:
        """Let computed pages leave: as many as decoding bears, or all when nothing decodes."""
        if self.offload is not None:
            decodes = sum(r.state is RequestState.DECODE for r in self.scheduler.running)
            self.offload.start_pending(self.pace.grant(decodes) if decodes else None)

    def _note_copies(self) -> None:
        if self.restore is not None:
            self.restore.poll()
        if self.offload is not None:
            self.offload.poll()

    def _compute(self, work: list[Work]) -> tuple[list[Work], dict[int, int]]:
        """Run a pass and choose its tokens; returns what of it counts, and tokens by request id.

        A restore that fails in the middle of the pass costs the pass, which is run again without
        it; one that turns out bad at the end costs its own part.
        """
        layered = next((each for each in work if each.layered), None)
        if layered is None:
            return work, self._sample(work, self._forward(work, None))
        assert self.restore is not None
        others = [each for each in work if each is not layered]
        try:
            logits = self._forward(work, self.restore.layer_gate(layered.request))
        except TierIOError as error:
            log.warning("restore failed request=%d: %s", layered.request.request_id, error)
            self.restore.stop_layered(layered.request)
            return others, self._sample(others, self._forward(others, None)) if others else {}
        if self.scheduler.settle(layered):
            return work, self._sample(work, logits)
        rows = [each is not layered for each in work if each.wants_token]
        return others, self._sample(
            others, logits[torch.tensor(rows, dtype=torch.bool, device=logits.device)]
        )

    def _forward(self, work: list[Work], gate: BeforeLayer | None) -> torch.Tensor:
        """Run the planned tokens; logits of those that reached their request's end, in order."""
        inputs = []
        for each in work:
            table = each.request.table
            assert table is not None
            inputs.append(
                SequenceInput(
                    token_ids=each.request.tokens(each.start, each.end),
                    context_len=each.end,
                    pages=table.pages,
                    no_logits=not each.wants_token,
                )
            )
        self._check_writable(work)
        return self._runner.run(inputs, gate)

    def _sample(self, work: list[Work], logits: torch.Tensor) -> dict[int, int]:
        """The next token of each request that reached its end."""
        wanting = [each.request for each in work if each.wants_token]
        tokens = self._sampler.sample(logits, [request.sampling for request in wanting])
        return {request.request_id: token for request, token in zip(wanting, tokens, strict=True)}

    def _check_writable(self, work: list[Work]) -> None:
        """Assert that no copy reads or writes the pages that a pass is about to write."""
        size = self._config.page_tokens
        written = []
        for each in work:
            assert each.request.table is not None
            written.append(each.request.table.pages[each.start // size : -(-each.end // size)])
        self.cache.pool.check_writable(np.concatenate(written))

    def _close_ended(self) -> None:
        """Tell the sinks of requests that have ended."""
        ended = [r for r, _ in self._live.values() if r.state is RequestState.FINISHED]
        for request in ended:
            _, sink = self._live.pop(request.request_id)
            if request.finish_reason is FinishReason.ERROR:
                self._failed += 1
            else:
                self._finished += 1
            self._prompt_tokens += len(request.prompt)
            self._cached_tokens += request.cached.total
            sink(request, None)
