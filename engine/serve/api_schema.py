"""What an OpenAI-compatible client may send: the bodies of the two generation requests.

Owns their pydantic models and limits. Does no I/O, knows neither HTTP nor the engine. Fields that
TierKV does not know are ignored, because clients send many; a known field of a wrong type, or one
whose effect TierKV cannot give, is refused with its name. Called by engine/serve/api.py;
described in docs/guides/http-api.md.
"""

from __future__ import annotations

import json
from typing import Any, Self, TypeVar, cast

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

PROMPTS_MAX = 64
"""Prompts in one completions request."""
STOPS_MAX = 16
STOP_CHARS_MAX = 256
MESSAGES_MAX = 4096
SALT_CHARS_MAX = 256


class InvalidField(ValueError):
    """A request body that cannot be served; `param` names the field, None: the whole body."""

    def __init__(self, message: str, param: str | None) -> None:
        super().__init__(message)
        self.param = param


class StreamOptions(BaseModel):
    """Options of a streamed answer."""

    model_config = ConfigDict(strict=True, extra="ignore")

    include_usage: bool = False


class GenerationBody(BaseModel):
    """What completions and chat have in common. Defaults are OpenAI's."""

    model_config = ConfigDict(strict=True, extra="ignore")

    model: str | None = None
    max_tokens: int | None = Field(default=None, ge=1)
    temperature: float | None = Field(default=None, ge=0.0, le=100.0, allow_inf_nan=False)
    top_p: float | None = Field(default=None, gt=0.0, le=1.0, allow_inf_nan=False)
    top_k: int | None = Field(default=None, ge=-1)
    """0 and -1 mean no limit."""
    seed: int | None = Field(default=None, ge=0, lt=2**63)
    stop: str | list[str] | None = None
    ignore_eos: bool = False
    stream: bool = False
    stream_options: StreamOptions | None = None
    cache_salt: str | None = Field(default=None, max_length=SALT_CHARS_MAX)
    """Requests share cached pages only with requests of the same salt."""
    priority: int = Field(default=0, ge=-(2**31), lt=2**31)
    user: str | None = None
    """Accepted and ignored."""

    n: int | None = None
    best_of: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    response_format: dict[str, Any] | None = None

    @field_validator("stop")
    @classmethod
    def _stop_is_bounded(cls, value: str | list[str] | None) -> str | list[str] | None:
        stops = [value] if isinstance(value, str) else value or []
        if len(stops) > STOPS_MAX:
            raise ValueError(f"expected at most {STOPS_MAX} stop strings, got {len(stops)}")
        if any(not 1 <= len(stop) <= STOP_CHARS_MAX for stop in stops):
            raise ValueError(f"expected stop strings of 1 to {STOP_CHARS_MAX} characters")
        return value

    @model_validator(mode="after")
    def _stream_options_need_stream(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise InvalidField("stream_options: only allowed with stream=true", "stream_options")
        return self

    @property
    def stops(self) -> tuple[str, ...]:
        """Stop strings, none when absent."""
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def include_usage(self) -> bool:
        """True when the stream ends with a usage chunk."""
        return self.stream_options is not None and self.stream_options.include_usage

    def unsupported(self) -> str | None:
        """Name the first field that asks for what TierKV cannot do; None when there is none."""
        text_only = self.response_format is None or self.response_format.get("type") == "text"
        refused = {
            "n": self.n not in (None, 1),
            "best_of": self.best_of not in (None, 1),
            "presence_penalty": bool(self.presence_penalty),
            "frequency_penalty": bool(self.frequency_penalty),
            "logit_bias": bool(self.logit_bias),
            "response_format": not text_only,
        }
        return next((name for name, asked in refused.items() if asked), None)


class CompletionBody(GenerationBody):
    """POST /v1/completions."""

    prompt: str | list[str] | list[int] | list[list[int]]
    echo: bool = False
    logprobs: int | None = None
    suffix: str | None = None

    def unsupported(self) -> str | None:
        """As GenerationBody.unsupported, with this route's own fields."""
        refused = {
            "echo": self.echo,
            "logprobs": self.logprobs is not None,
            "suffix": bool(self.suffix),
        }
        return next((name for name, asked in refused.items() if asked), super().unsupported())

    def prompts(self) -> list[str | list[int]]:
        """One entry per prompt, text or token ids. Raises InvalidField when empty or too many."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if not self.prompt:
            raise InvalidField("prompt: expected at least one prompt, got an empty list", "prompt")
        if isinstance(self.prompt[0], int):
            # Validation let only lists of one kind through: this one is one prompt's ids.
            return [self.prompt]
        if len(self.prompt) > PROMPTS_MAX:
            raise InvalidField(
                f"prompt: expected at most {PROMPTS_MAX} prompts, got {len(self.prompt)}", "prompt"
            )
        return list(cast("list[str | list[int]]", self.prompt))


class TextPart(BaseModel):
    """One part of a message's content. Only text can be read."""

    model_config = ConfigDict(strict=True, extra="ignore")

    type: str
    text: str | None = None


class Message(BaseModel):
    """One chat message. Further fields (name, tool_calls...) reach the template as they are."""

    model_config = ConfigDict(strict=True, extra="allow")

    role: str
    content: str | list[TextPart] | None = None

    def for_template(self) -> dict[str, Any]:
        """The message as chat templates expect it: content is a string.

        Raises InvalidField for parts that are not text and for tool calls whose arguments are
        not JSON.
        """
        fields = dict(self.model_extra or {})
        if "tool_calls" in fields:
            fields["tool_calls"] = _decoded_tool_calls(fields["tool_calls"])
        return {"role": self.role, "content": self._text()} | fields

    def _text(self) -> str:
        if self.content is None or isinstance(self.content, str):
            return self.content or ""
        for part in self.content:
            if part.type != "text" or part.text is None:
                raise InvalidField(
                    f"messages: expected content parts of type text, got {part.type!r}", "messages"
                )
        return "".join(part.text or "" for part in self.content)


class ChatBody(GenerationBody):
    """POST /v1/chat/completions."""

    messages: list[Message] = Field(min_length=1, max_length=MESSAGES_MAX)
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = None

    def unsupported(self) -> str | None:
        """As GenerationBody.unsupported, with this route's own fields."""
        refused = {
            "logprobs": bool(self.logprobs),
            "top_logprobs": self.top_logprobs is not None and self.top_logprobs > 0,
            "tool_choice": self.tool_choice not in (None, "auto", "none"),
        }
        return next((name for name, asked in refused.items() if asked), super().unsupported())

    @property
    def token_limit(self) -> int | None:
        """Generated tokens asked for: max_completion_tokens before the older max_tokens."""
        return self.max_completion_tokens or self.max_tokens

    def template_tools(self) -> list[dict[str, Any]] | None:
        """Tools to render into the prompt; None when there are none or the client forbids them."""
        return None if self.tool_choice == "none" else self.tools or None


Body = TypeVar("Body", bound=GenerationBody)


def parse_body(kind: type[Body], raw: bytes) -> Body:
    """Validate a request body. Raises InvalidField with one line that names the field."""
    try:
        body = kind.model_validate_json(raw)
    except ValidationError as error:
        raise _first_fault(error) from None
    refused = body.unsupported()
    if refused is not None:
        raise InvalidField(f"{refused}: not supported by this server, leave it out", refused)
    return body


def _first_fault(error: ValidationError) -> InvalidField:
    """Turn pydantic's list of faults into one line about the first field at fault."""
    faults = error.errors(include_url=False)
    place = faults[0]["loc"]
    if not place:
        cause = faults[0].get("ctx", {}).get("error")
        if isinstance(cause, InvalidField):
            return cause
        return InvalidField(f"body: {_lower(faults[0]['msg'])}", None)
    field = str(place[0])
    # A union reports one fault per member: the line names what each would have accepted.
    same = [fault["msg"] for fault in faults if fault["loc"][:1] == place[:1]]
    messages = list(dict.fromkeys(map(_lower, same)))
    return InvalidField(f"{field}: {' or '.join(messages[:4])}", field)


def _lower(message: str) -> str:
    message = message.removeprefix("Value error, ")
    return message[:1].lower() + message[1:]


def _decoded_tool_calls(calls: Any) -> Any:
    """Give templates the arguments of earlier tool calls as objects; OpenAI sends them as text."""
    if not isinstance(calls, list):
        return calls
    return [_decoded_tool_call(call) for call in calls]


def _decoded_tool_call(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    arguments = function.get("arguments") if isinstance(function, dict) else None
    if not isinstance(function, dict) or not isinstance(arguments, str):
        return call
    try:
        decoded = json.loads(arguments or "{}")
    except json.JSONDecodeError as error:
        raise InvalidField(
            f"messages: expected tool call arguments to be JSON, got {error}", "messages"
        ) from None
    return {**call, "function": {**function, "arguments": decoded}}
