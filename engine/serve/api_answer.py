"""What the OpenAI-compatible server sends: response bodies, stream chunks, errors.

Pure functions of finished requests and stream events. Knows neither HTTP nor the engine. Beside
OpenAI's fields every answer has a `tierkv` object: where the prompt's tokens came from and how
long they took. Called by engine/serve/api.py; described in docs/guides/http-api.md.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from tierkv.engine.serve.api_schema import InvalidField
from tierkv.engine.serve.request import FinishReason, RequestOutput, StreamEvent
from tierkv.storage.errors import ConfigError, RequestError, TierKVError

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Answer(ABC):
    """Head of one response, whole or streamed."""

    answer_id: str
    created_s: int
    """Unix time."""
    model: str

    id_prefix: ClassVar[str]
    whole_object: ClassVar[str]
    chunk_object: ClassVar[str]

    def whole(self, outputs: Sequence[RequestOutput]) -> Json:
        """The body of a response that is not streamed; one choice per output."""
        choices = [self._whole_choice(index, output) for index, output in enumerate(outputs)]
        return self._head(self.whole_object) | {
            "choices": choices,
            "usage": usage_body(outputs),
            "tierkv": tierkv_body(outputs),
        }

    def opening_chunks(self, index: int) -> list[Json]:
        """Chunks sent before the first event of choice `index`."""
        return []

    def chunks(self, index: int, event: StreamEvent) -> list[Json]:
        """Chunks of one event: none when it brings no text, a closing one when it is the last."""
        chunks = [self._chunk([self._text_choice(index, event.text)])] if event.text else []
        if event.output is not None:
            last = self._chunk([self._last_choice(index, event.output)])
            chunks.append(last | {"tierkv": tierkv_body([event.output])})
        return chunks

    def usage_chunk(self, outputs: Sequence[RequestOutput]) -> Json:
        """The chunk without choices that `stream_options.include_usage` asks for."""
        return self._chunk([]) | {"usage": usage_body(outputs), "tierkv": tierkv_body(outputs)}

    def _head(self, kind: str) -> Json:
        return {
            "id": self.id_prefix + self.answer_id,
            "object": kind,
            "created": self.created_s,
            "model": self.model,
        }

    def _chunk(self, choices: list[Json]) -> Json:
        return self._head(self.chunk_object) | {"choices": choices}

    @abstractmethod
    def _whole_choice(self, index: int, output: RequestOutput) -> Json: ...

    @abstractmethod
    def _text_choice(self, index: int, text: str) -> Json: ...

    @abstractmethod
    def _last_choice(self, index: int, output: RequestOutput) -> Json: ...


class CompletionAnswer(Answer):
    """Answer of /v1/completions."""

    __slots__ = ()
    id_prefix = "cmpl-"
    whole_object = "text_completion"
    chunk_object = "text_completion"

    def _whole_choice(self, index: int, output: RequestOutput) -> Json:
        return self._choice(index, output.text, output.finish_reason.value)

    def _text_choice(self, index: int, text: str) -> Json:
        return self._choice(index, text, None)

    def _last_choice(self, index: int, output: RequestOutput) -> Json:
        return self._choice(index, "", output.finish_reason.value)

    def _choice(self, index: int, text: str, reason: str | None) -> Json:
        return {"index": index, "text": text, "logprobs": None, "finish_reason": reason}


class ChatAnswer(Answer):
    """Answer of /v1/chat/completions."""

    __slots__ = ()
    id_prefix = "chatcmpl-"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def opening_chunks(self, index: int) -> list[Json]:
        opening = {"role": "assistant", "content": ""}
        return [self._chunk([self._delta(index, opening, None)])]

    def _whole_choice(self, index: int, output: RequestOutput) -> Json:
        return {
            "index": index,
            "message": {"role": "assistant", "content": output.text},
            "logprobs": None,
            "finish_reason": output.finish_reason.value,
        }

    def _text_choice(self, index: int, text: str) -> Json:
        return self._delta(index, {"content": text}, None)

    def _last_choice(self, index: int, output: RequestOutput) -> Json:
        return self._delta(index, {}, output.finish_reason.value)

    def _delta(self, index: int, delta: Json, reason: str | None) -> Json:
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": reason}


def error_body(message: str, kind: str, param: str | None = None, code: str | None = None) -> Json:
    """The one shape of every error."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def usage_body(outputs: Sequence[RequestOutput]) -> Json:
    """Token counts over all prompts of one response."""
    prompt = sum(len(output.prompt_token_ids) for output in outputs)
    generated = sum(len(output.token_ids) for output in outputs)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": generated,
        "total_tokens": prompt + generated,
        "prompt_tokens_details": {"cached_tokens": sum(out.cached.total for out in outputs)},
    }


def tierkv_body(outputs: Sequence[RequestOutput]) -> Json:
    """Where the prompts' tokens came from (summed) and how long they took (the slowest)."""
    firsts = [output.ttft_s for output in outputs if output.ttft_s is not None]
    return {
        "cached_tokens": {
            "gpu": sum(output.cached.gpu for output in outputs),
            "host": sum(output.cached.host for output in outputs),
            "nvme": sum(output.cached.nvme for output in outputs),
            "remote": sum(output.cached.remote for output in outputs),
        },
        "ttft_s": max(firsts, default=None),
        "queued_s": max((output.queued_s for output in outputs), default=0.0),
        "plans": [plan_body(output) for output in outputs if output.plan is not None],
    }


def plan_body(output: RequestOutput) -> Json:
    """How a missing prefix was to be brought back, to be held against what came of it."""
    plan = output.plan
    assert plan is not None
    return {
        "compute_tokens": plan.compute_tokens,
        "load_tokens": plan.load_tokens,
        "expected_s": plan.expected_s,
        "compute_all_s": plan.compute_all_s,
        "load_all_s": plan.load_all_s,
        "loaded_tokens": output.cached.total - output.cached.gpu,
    }


class ApiError(Exception):
    """An answer other than success: HTTP status and OpenAI error fields."""

    def __init__(
        self,
        status: int,
        message: str,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.param = param
        self.code = code

    @property
    def body(self) -> Json:
        """The error as its JSON body."""
        return error_body(str(self), self.kind, self.param, self.code)


def api_error(error: Exception) -> ApiError:
    """Say how an error that the server expects is told to the client."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, InvalidField):
        return ApiError(400, str(error), param=error.param)
    if isinstance(error, (RequestError, ConfigError)):
        return ApiError(400, str(error), code=error.code)
    if isinstance(error, TimeoutError):
        return ApiError(504, "the engine gave no token in time", "server_error", code="timeout")
    assert isinstance(error, TierKVError), error
    return ApiError(503, str(error), "server_error", code=error.code)


def unfinished_error(output: RequestOutput) -> ApiError | None:
    """The error of a request that ended without an answer; None when it has one."""
    if output.finish_reason is FinishReason.ERROR:
        message = output.error or "the engine could not finish the request"
        return ApiError(500, message, "server_error", code="engine_error")
    if output.finish_reason is FinishReason.ABORT:
        return ApiError(503, "the request was aborted", "server_error", code="aborted")
    return None
