"""The engine a program uses: open, generate, stream, close. Puts a thread around EngineCore.

Owns the engine thread, and through it the model, the pool and the store. Everything but the core
itself may be called from any thread; what concerns the core goes through one bounded inbox.
Called by the HTTP server, the command line and programs that embed an engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import threading
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Self, TypeVar

import torch

from tierkv.engine.serve.assemble import Assembler
from tierkv.engine.serve.chat import ChatTemplate
from tierkv.engine.serve.core import EngineCore, Sink
from tierkv.engine.serve.engine_config import EngineConfig, EngineStats
from tierkv.engine.serve.model_config import ModelConfig
from tierkv.engine.serve.opening import open_parts
from tierkv.engine.serve.request import (
    FinishReason,
    Request,
    RequestOutput,
    StreamEvent,
    request_ids,
)
from tierkv.engine.serve.sampler import SamplingParams
from tierkv.engine.serve.tokenizer import Tokenizer
from tierkv.storage.base import PageStore
from tierkv.storage.clock import Clock, SystemClock
from tierkv.storage.closing import Closing
from tierkv.storage.errors import (
    EngineStoppedError,
    OverloadedError,
    RequestError,
    RequestTimeoutError,
    first_line,
)

log = logging.getLogger(__name__)

STEP_FAILURES_MAX = 3
"""Steps in a row that may break before the engine gives up."""
CLOSE_S = 10.0

Prompt = str | Sequence[int]
Result = TypeVar("Result")


class Engine(Closing):
    """One model, served. A context manager: starts on entry, closes on exit."""

    def __init__(self, config: EngineConfig, store: PageStore | None, clock: Clock) -> None:
        """Use Engine.open."""
        parts = open_parts(config, store, clock, self._wake)
        self.config: ModelConfig = parts.model_config
        self.model_name = config.model.name
        self.tokenizer: Tokenizer = parts.tokenizer
        self.max_context = parts.max_context
        self.core: EngineCore = parts.core
        """For tests and the demo, and only while the engine thread is not running."""
        self._settings = config
        self._parts = parts
        self._clock = clock
        self._inbox: deque[Callable[[], None]] = deque()
        self._inbox_max = 4 * config.max_waiting
        self._changed = threading.Condition()
        self._woken = False
        self._stopping = False
        self._stopped: str | None = "engine: not started; call start()"
        self._thread: threading.Thread | None = None

    @classmethod
    def open(
        cls, config: EngineConfig, store: PageStore | None = None, clock: Clock | None = None
    ) -> Engine:
        """Load the model and open what lies below it; does not start the engine thread.

        `store` is borrowed when given; else the one that config.store describes is opened, and
        closed with the engine. Raises ConfigError and its kinds, with nothing left open.
        """
        return cls(config, store, clock or SystemClock())

    # --- life ----------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the engine thread. Once."""
        assert self._thread is None, "an engine starts once"
        self._stopped = None
        self._thread = threading.Thread(target=self._run, name="tierkv-engine", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Abort what runs, stop the thread, close the store if it is the engine's. Idempotent."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(CLOSE_S)
            if self._thread.is_alive():
                log.error("close engine: a step has not ended within %.0f s", CLOSE_S)
                return
        elif self._stopped is not None:
            self.core.close(CLOSE_S)
        self._stopped = "engine: closed"
        self._parts.close()

    def __enter__(self) -> Self:
        self.start()
        return self

    @property
    def chat(self) -> ChatTemplate:
        """The model's chat template. Raises ModelError when it has none."""
        return self._parts.chat_template()

    @property
    def stopped(self) -> str | None:
        """Why the engine does not serve; None while it does."""
        return self._stopped

    # --- requests ------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams],
        *,
        cache_salt: str = "",
        priority: int = 0,
    ) -> list[RequestOutput]:
        """Run prompts together and wait for all; results in the order of the prompts.

        One `params` serves all prompts. Raises RequestError when a prompt can never be served
        (none is run then), EngineStoppedError when the engine has stopped. A request that breaks
        or outlasts request_timeout_s comes back with finish_reason error or abort.
        """
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
        if len(each) != len(prompts):
            raise RequestError(f"generate: {len(prompts)} prompts, {len(each)} params")
        tokens = [self._tokens(prompt) for prompt in prompts]
        for ids in tokens:
            self.core.validate(ids)
        news: queue.SimpleQueue[Request] = queue.SimpleQueue()

        def sink(request: Request, token: int | None) -> None:
            if token is None:
                news.put(request)

        requests = [
            self._request(ids, one, cache_salt, priority)
            for ids, one in zip(tokens, each, strict=True)
        ]
        for request in requests:
            self._submit(request, sink)
        deadline = self._clock.monotonic() + self._settings.request_timeout_s
        ended: set[int] = set()
        while len(ended) < len(requests):
            try:
                ended.add(news.get(timeout=1.0).request_id)
            except queue.Empty:
                self._assert_serving()
                if self._clock.monotonic() > deadline:
                    for request in requests:
                        self.abort(request.request_id)
                    deadline += CLOSE_S
        return [self._output(r, self.tokenizer.decode(r.output)) for r in requests]

    async def stream(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        stop: Sequence[str] = (),
        cache_salt: str = "",
        priority: int = 0,
    ) -> AsyncGenerator[StreamEvent, None]:
        """Run one prompt, yielding as it goes; the last event carries the whole output.

        `stop`: strings that end the output; they are not part of it. Leaving the iteration early
        aborts the request. Raises as generate() does, before the first event.
        """
        ids = self._tokens(prompt)
        self.core.validate(ids)
        request = self._request(ids, params, cache_salt, priority)
        loop = asyncio.get_running_loop()
        # Bounded by the request itself: at most max_tokens tokens and one end.
        news: asyncio.Queue[int | None] = asyncio.Queue()

        def sink(_: Request, token: int | None) -> None:
            # A loop that was closed has nobody left to tell.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(news.put_nowait, token)

        assembler = Assembler(self.tokenizer, stop)
        self._submit(request, sink)
        deadline = self._clock.monotonic() + self._settings.request_timeout_s
        try:
            while (token := await self._next(news, deadline)) is not None:
                text = assembler.push(token)
                if assembler.stopped:
                    self.abort(request.request_id, FinishReason.STOP)
                    break
                yield StreamEvent((token,), text, None)
            if assembler.stopped:
                while await self._next(news, deadline) is not None:
                    pass
            rest = assembler.finish()
            yield StreamEvent((), rest, self._output(request, assembler.text))
        finally:
            self.abort(request.request_id)

    def abort(self, request_id: int, reason: FinishReason = FinishReason.ABORT) -> None:
        """End a request early. Ids that have ended are ignored."""
        self._post(lambda: self.core.abort(request_id, reason))

    def drop_gpu_cache(self) -> int:
        """Evict every prefix that no request uses, demoting as usual; return how many pages."""
        return self._call(lambda: self.core.drop_gpu_cache(CLOSE_S))

    def flush(self, deadline_s: float) -> bool:
        """Wait until every page that is being demoted is durable in the lowest tier.

        False when that took longer than `deadline_s`, or a page could not be kept.
        """
        store = self.store
        if store is None:
            return True
        deadline = self._clock.monotonic() + deadline_s
        drained = self._call(lambda: self.core.drain(deadline_s))
        return drained and store.flush(max(0.0, deadline - self._clock.monotonic()))

    @property
    def store(self) -> PageStore | None:
        """What lies below the pool; the engine's own or borrowed."""
        return self.core.store

    def stats(self) -> EngineStats:
        """Counters and sizes now."""
        return self.core.stats()

    def check(self) -> None:
        """Assert every invariant, between two steps. Expensive; for tests."""
        self._call(self.core.check)

    # --- between threads -----------------------------------------------------------------------

    def _tokens(self, prompt: Prompt) -> list[int]:
        return self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)

    def _request(
        self, prompt: list[int], params: SamplingParams, cache_salt: str, priority: int
    ) -> Request:
        return Request(
            request_id=next(request_ids),
            prompt=prompt,
            params=params,
            max_tokens=min(params.max_tokens, self.max_context - len(prompt)),
            namespace=self._parts.namespace_for(cache_salt),
            priority=priority,
            arrival_s=self._clock.monotonic(),
        )

    def _submit(self, request: Request, sink: Sink) -> None:
        self._assert_serving()
        if not self._post(lambda: self.core.submit(request, sink)):
            raise OverloadedError(f"submit request: {self._inbox_max} calls wait; try again later")

    def _post(self, call: Callable[[], None]) -> bool:
        """Have the engine thread do something; False when its inbox is full."""
        with self._changed:
            if len(self._inbox) >= self._inbox_max:
                return False
            self._inbox.append(call)
            self._woken = True
            self._changed.notify_all()
        return True

    def _call(self, function: Callable[[], Result]) -> Result:
        """Run something on the engine thread and wait for it, within a bound."""
        if self._thread is None:
            return function()
        answer: queue.SimpleQueue[Result | AssertionError] = queue.SimpleQueue()

        def run() -> None:
            try:
                answer.put(function())
            except AssertionError as error:
                answer.put(error)

        self._assert_serving()
        self._post(run)
        try:
            result = answer.get(timeout=self._settings.request_timeout_s)
        except queue.Empty:
            raise EngineStoppedError("engine: no answer from the engine thread") from None
        if isinstance(result, AssertionError):
            raise result
        return result

    def _wake(self) -> None:
        """Called from copy threads and stores when something ended."""
        with self._changed:
            self._woken = True
            self._changed.notify_all()

    async def _next(self, news: asyncio.Queue[int | None], deadline: float) -> int | None:
        """The next token, or None at the end; aborts at the deadline."""
        while True:
            try:
                return await asyncio.wait_for(news.get(), timeout=1.0)
            except TimeoutError:
                self._assert_serving()
                if self._clock.monotonic() > deadline:
                    raise RequestTimeoutError(
                        f"stream: not finished after {self._settings.request_timeout_s:.0f} s"
                    ) from None

    def _assert_serving(self) -> None:
        if self._stopped is not None:
            raise EngineStoppedError(self._stopped)

    def _output(self, request: Request, text: str) -> RequestOutput:
        assert request.finish_reason is not None
        assert request.finished_s is not None
        start = request.arrival_s
        admitted, first = request.admitted_s, request.first_token_s
        return RequestOutput(
            request_id=request.request_id,
            prompt_token_ids=tuple(request.prompt),
            token_ids=tuple(request.output),
            text=text,
            finish_reason=request.finish_reason,
            cached=request.cached,
            queued_s=(admitted if admitted is not None else request.finished_s) - start,
            ttft_s=None if first is None else first - start,
            total_s=request.finished_s - start,
            error=request.error,
            plan=request.plan,
        )

    # --- the engine thread ---------------------------------------------------------------------

    def _run(self) -> None:
        """Serve until stopped; however it ends, those who wait are told."""
        try:
            self._serve()
        # Ending a broken step's requests broke as well: nothing here can be trusted any more.
        except Exception as error:
            log.error("engine stopped error=%r", error, exc_info=True)
            self._stopped = f"engine: stopped, its state is damaged: {first_line(error)}"
        try:
            self.core.close(CLOSE_S)
        finally:
            self._stopped = self._stopped or "engine: closed"

    def _serve(self) -> None:
        failures = 0
        while not self._stopping:
            try:
                busy = self._round()
            except torch.OutOfMemoryError as error:
                # The device is well: what runs now was too much for it. Not a broken engine.
                reason = (
                    f"no GPU memory for a step ({first_line(error)}); lower the KV pool, "
                    "max_batch_tokens or max_context"
                )
                log.error("engine step failed error=%s", reason)
                self.core.fail_running(f"engine step failed: {reason}")
            # Whatever breaks in one step must cost the requests in it, not the engine (H2): the
            # model's kernels raise RuntimeError and more.
            except Exception as error:
                failures += 1
                log.error("engine step failed error=%r", error, exc_info=True)
                reason = first_line(error)
                self.core.fail_running(f"engine step failed: {type(error).__name__}: {reason}")
                if failures >= STEP_FAILURES_MAX:
                    self._stopped = f"engine: stopped after {failures} failed steps, last: {reason}"
                    break
            else:
                if busy:
                    failures = 0
                else:
                    self._rest()

    def _round(self) -> bool:
        while self._inbox:
            self._inbox.popleft()()
        return self.core.step()

    def _rest(self) -> None:
        """Sleep until somebody posts, wakes or stops, or the next deadline."""
        with self._changed:
            if not (self._woken or self._stopping):
                self._changed.wait(self.core.idle_wait_s())
            self._woken = False
