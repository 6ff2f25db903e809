"""Routes of the OpenAI-compatible HTTP server.

Owns the aiohttp application: routes, authentication, limits and the mapping of errors to
answers. Knows the engine only as ServingEngine; does not bind sockets and takes no signals
(engine/serve/api_server.py does). Every generation request holds a place in `in_flight` while it
runs, and gives up its engine streams whatever way its handler ends, so that a client that goes
away frees its request.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hmac
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from typing import Any, Protocol

from aiohttp import web

from tierkv.engine.serve.api_answer import (
    Answer,
    ApiError,
    ChatAnswer,
    CompletionAnswer,
    api_error,
    unfinished_error,
)
from tierkv.engine.serve.api_metrics import ApiMetrics
from tierkv.engine.serve.api_schema import (
    Body,
    ChatBody,
    CompletionBody,
    GenerationBody,
    InvalidField,
    parse_body,
)
from tierkv.engine.serve.api_stream import ClientGone, EventStream, EventWriter, merge
from tierkv.engine.serve.engine_config import EngineStats
from tierkv.engine.serve.model_config import ModelConfig
from tierkv.engine.serve.request import RequestOutput, StreamEvent
from tierkv.engine.serve.sampler import SamplingParams
from tierkv.storage.clock import Clock, SystemClock
from tierkv.storage.errors import TierKVError

COMPLETION_TOKENS_DEFAULT = 16
"""OpenAI's default of max_tokens for completions. Chat goes up to the end of the context."""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Json = dict[str, Any]
Prompt = str | list[int]
MergedEvents = AsyncGenerator[tuple[int, StreamEvent], None]


class TextCodec(Protocol):
    """Text to token ids. Called from worker threads."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...


class ChatRenderer(Protocol):
    """Messages to prompt text. Called from worker threads."""

    def render(
        self,
        messages: Sequence[Json],
        *,
        tools: Sequence[Json] | None = None,
        add_generation_prompt: bool = True,
    ) -> str: ...


class ServingEngine(Protocol):
    """What the server asks of an engine (engine/serve/engine.py)."""

    @property
    def tokenizer(self) -> TextCodec: ...

    @property
    def chat(self) -> ChatRenderer: ...

    @property
    def model_name(self) -> str: ...

    @property
    def config(self) -> ModelConfig: ...

    @property
    def max_context(self) -> int: ...

    @property
    def stopped(self) -> str | None:
        """Why the engine does not serve; None while it does."""
        ...

    def stream(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        stop: Sequence[str] = (),
        cache_salt: str = "",
        priority: int = 0,
    ) -> AsyncIterator[StreamEvent]:
        """An async generator: closing it aborts the request. RequestError comes before events."""
        ...

    def stats(self) -> EngineStats:
        """Thread-safe; called for each scrape."""
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class ApiOptions:
    """Limits and identity of one server."""

    api_key: str | None = None
    """Asked of every route but /health as a bearer token; None: nobody is asked."""
    model_name: str | None = None
    """Name shown to clients; None: the engine's."""
    body_bytes_max: int = 8 * 2**20
    requests_max: int = 256
    """Prompts in work or waiting at once; past it the answer is 429."""
    body_timeout_s: float = 30.0
    """Longest wait for a request's body."""
    write_timeout_s: float = 30.0
    """Longest wait for a client to take one chunk."""
    event_timeout_s: float = 600.0
    """Longest wait for the engine's next token, queueing included."""


class ApiServer:
    """Routes and limits over one engine. Owned by one event loop."""

    def __init__(
        self, engine: ServingEngine, options: ApiOptions, clock: Clock | None = None
    ) -> None:
        self._engine = engine
        self._options = options
        self._clock = clock or SystemClock()
        self._metrics = ApiMetrics(engine.stats)
        self._model = options.model_name or engine.model_name
        self._started_s = int(self._clock.wall())
        self._handlers: dict[asyncio.Task[Any], int] = {}
        """Prompts of every generation handler that runs, by its task."""
        self._idle = asyncio.Event()
        self._idle.set()
        self.draining = False

    @property
    def in_flight(self) -> int:
        """Prompts that clients wait for now."""
        return sum(self._handlers.values())

    def app(self) -> web.Application:
        """A fresh application with every route."""
        app = web.Application(
            middlewares=[self._observe, self._shape_errors, self._authenticate],
            client_max_size=self._options.body_bytes_max,
        )
        app.router.add_post("/v1/completions", self._completions)
        app.router.add_post("/v1/chat/completions", self._chat_completions)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/health", self._health)
        app.router.add_get("/metrics", self._metrics_text)
        app.router.add_get("/stats", self._stats)
        return app

    async def drain(self, timeout_s: float) -> bool:
        """Refuse new requests, wait for running ones, then abort the rest.

        Returns True when every request finished by itself within `timeout_s`.
        """
        self.draining = True
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            self.abort_all()
            return False
        return True

    def abort_all(self) -> None:
        """Cancel every generation handler; their clients see the connection end."""
        for task in self._handlers:
            task.cancel()

    def check(self) -> None:
        """Assert that the idle flag and the places in use agree. O(requests)."""
        assert self._idle.is_set() == (not self._handlers)
        assert 0 <= self.in_flight <= self._options.requests_max
        assert all(count > 0 for count in self._handlers.values())

    # Routes

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        body = await self._body(request, CompletionBody)
        prompts = body.prompts()
        with self._place(len(prompts)):
            encoded = [await self._encode(prompt, "prompt") for prompt in prompts]
            limit = body.max_tokens or COMPLETION_TOKENS_DEFAULT
            return await self._generate(request, body, encoded, limit, CompletionAnswer)

    async def _chat_completions(self, request: web.Request) -> web.StreamResponse:
        body = await self._body(request, ChatBody)
        with self._place(1):
            messages = [message.for_template() for message in body.messages]
            text = await asyncio.to_thread(
                self._engine.chat.render, messages, tools=body.template_tools()
            )
            # The template wrote the special tokens already.
            prompt = await self._encode(text, "messages", add_special_tokens=False)
            room = self._engine.max_context - len(prompt)
            limit = body.token_limit or max(1, room)
            return await self._generate(request, body, [prompt], limit, ChatAnswer)

    async def _models(self, request: web.Request) -> web.Response:
        model = {
            "id": self._model,
            "object": "model",
            "created": self._started_s,
            "owned_by": "tierkv",
            "max_model_len": self._engine.max_context,
        }
        return web.json_response({"object": "list", "data": [model]})

    async def _health(self, request: web.Request) -> web.Response:
        if self.draining:
            return web.json_response({"status": "draining"}, status=503)
        if self._engine.stopped is not None:
            body = {"status": "stopped", "reason": self._engine.stopped}
            return web.json_response(body, status=503)
        return web.json_response({"status": "ok"})

    async def _metrics_text(self, request: web.Request) -> web.Response:
        text, content_type = self._metrics.render()
        return web.Response(body=text, headers={"Content-Type": content_type})

    async def _stats(self, request: web.Request) -> web.Response:
        return web.json_response(dataclasses.asdict(self._engine.stats()))

    # One generation request

    async def _body(self, request: web.Request, kind: type[Body]) -> Body:
        if self.draining:
            raise ApiError(503, "the server is shutting down", "server_error", code="draining")
        try:
            async with asyncio.timeout(self._options.body_timeout_s):
                raw = await request.read()
        except TimeoutError:
            raise ApiError(408, "the request body did not arrive in time") from None
        body = parse_body(kind, raw)
        if body.model is not None and body.model != self._model:
            message = f"model: expected {self._model!r}, got {body.model!r}"
            raise ApiError(404, message, param="model", code="model_not_found")
        return body

    @contextmanager
    def _place(self, prompts: int) -> Iterator[None]:
        """Hold `prompts` places while the handler runs; answers 429 when there are too few."""
        if self.in_flight + prompts > self._options.requests_max:
            message = (
                f"too many requests: {self.in_flight} running or waiting, {prompts} more asked, "
                f"at most {self._options.requests_max}; try again later"
            )
            raise ApiError(429, message, "rate_limit_error", code="too_many_requests")
        task = asyncio.current_task()
        assert task is not None
        self._handlers[task] = prompts
        self._idle.clear()
        try:
            yield
        finally:
            del self._handlers[task]
            if not self._handlers:
                self._idle.set()

    async def _encode(
        self, prompt: Prompt, param: str, *, add_special_tokens: bool = True
    ) -> list[int]:
        """Token ids of one prompt, checked against vocabulary and context."""
        ids = prompt
        if isinstance(ids, str):
            ids = await asyncio.to_thread(
                self._engine.tokenizer.encode, ids, add_special_tokens=add_special_tokens
            )
        config = self._engine.config
        if not ids:
            raise InvalidField(f"{param}: expected at least one token, got none", param)
        if min(ids) < 0 or max(ids) >= config.vocab_size:
            raise InvalidField(
                f"{param}: expected token ids of 0 to {config.vocab_size - 1}, "
                f"got {min(ids)} to {max(ids)}",
                param,
            )
        if len(ids) >= self._engine.max_context:
            message = (
                f"{param}: {len(ids)} tokens do not fit the model's context of "
                f"{self._engine.max_context} with room for an answer; shorten the prompt"
            )
            raise ApiError(400, message, param=param, code="context_length_exceeded")
        return ids

    async def _generate(
        self,
        request: web.Request,
        body: GenerationBody,
        prompts: Sequence[Sequence[int]],
        max_tokens: int,
        kind: type[Answer],
    ) -> web.StreamResponse:
        params = _sampling(body, max_tokens)
        answer = kind(secrets.token_hex(12), int(self._clock.wall()), self._model)
        streams = [self._open_stream(prompt, params, body) for prompt in prompts]
        async with aclosing(merge(streams, self._options.event_timeout_s)) as events:
            if body.stream:
                return await self._streamed(request, answer, events, body.include_usage)
            outputs: dict[int, RequestOutput] = {}
            async for index, event in events:
                if event.output is not None:
                    outputs[index] = self._finished(event.output)
        return web.json_response(answer.whole([outputs[index] for index in sorted(outputs)]))

    def _open_stream(
        self, prompt: Sequence[int], params: SamplingParams, body: GenerationBody
    ) -> EventStream:
        """One prompt's events. Nothing is submitted before the first is asked for."""
        stream = self._engine.stream(
            prompt,
            params,
            stop=body.stops,
            cache_salt=body.cache_salt or "",
            priority=body.priority,
        )
        assert isinstance(stream, AsyncGenerator), "closing a stream is what aborts its request"
        return stream

    async def _streamed(
        self, request: web.Request, answer: Answer, events: MergedEvents, include_usage: bool
    ) -> web.StreamResponse:
        # A request that can never be served fails before its first event, and so before the
        # status line: it still gets a proper 400.
        first = await anext(events)
        writer = EventWriter(self._options.write_timeout_s)
        try:
            await writer.open(request)
            try:
                async for chunk in self._chunks(answer, first, events, include_usage):
                    await writer.send(chunk)
            except (TierKVError, ApiError, TimeoutError) as error:
                await writer.send(api_error(error).body)
            await writer.end()
        except ClientGone:
            # Leaving closes the engine's streams, which aborts the request.
            self._metrics.client_gone()
        return writer.response

    async def _chunks(
        self,
        answer: Answer,
        first: tuple[int, StreamEvent],
        events: MergedEvents,
        include_usage: bool,
    ) -> AsyncIterator[Json]:
        """Every chunk of a streamed answer. Raises ApiError when the engine gave up."""
        # OpenAI clients that asked for usage expect the field in every chunk.
        filler = {"usage": None} if include_usage else {}
        outputs: list[RequestOutput] = []
        opened: set[int] = set()
        item: tuple[int, StreamEvent] | None = first
        while item is not None:
            index, event = item
            chunks = answer.chunks(index, event)
            if index not in opened:
                opened.add(index)
                chunks = answer.opening_chunks(index) + chunks
            if event.output is not None:
                outputs.append(self._finished(event.output))
            for chunk in chunks:
                yield chunk | filler
            item = await anext(events, None)
        if include_usage:
            yield answer.usage_chunk(outputs)

    def _finished(self, output: RequestOutput) -> RequestOutput:
        """Count a finished request. Raises ApiError when it ended in an error."""
        self._metrics.finished(output)
        error = unfinished_error(output)
        if error is not None:
            raise error
        return output

    # Middlewares, outermost first

    @web.middleware
    async def _observe(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        resource = request.match_info.route.resource
        route = resource.canonical if resource is not None else "unmatched"
        response = await handler(request)
        self._metrics.answered(route, response.status)
        return response

    @web.middleware
    async def _shape_errors(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            return await handler(request)
        except (ApiError, InvalidField, TierKVError, TimeoutError) as error:
            told = api_error(error)
        except web.HTTPRequestEntityTooLarge:
            limit = self._options.body_bytes_max
            told = ApiError(413, f"the request body is larger than {limit} bytes")
        except web.HTTPException as error:
            told = ApiError(error.status, f"{request.method} {request.path}: {error.reason}")
        headers = {"Retry-After": "1"} if told.status in (429, 503) else {}
        if told.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return web.json_response(told.body, status=told.status, headers=headers)

    @web.middleware
    async def _authenticate(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        key = self._options.api_key
        if key is not None and request.path != "/health":
            expected = f"Bearer {key}".encode()
            given = request.headers.get("Authorization", "").encode(errors="surrogateescape")
            if not hmac.compare_digest(given, expected):
                message = "expected the server's API key as a bearer token in Authorization"
                raise ApiError(401, message, "authentication_error", code="invalid_api_key")
        return await handler(request)


def _sampling(body: GenerationBody, max_tokens: int) -> SamplingParams:
    """The engine's sampling parameters; OpenAI's defaults where the client is silent."""
    return SamplingParams(
        temperature=1.0 if body.temperature is None else body.temperature,
        top_k=max(0, body.top_k or 0),
        top_p=1.0 if body.top_p is None else body.top_p,
        seed=body.seed,
        max_tokens=max_tokens,
        ignore_eos=body.ignore_eos,
    )
