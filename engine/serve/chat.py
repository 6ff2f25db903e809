"""Renders chat messages to a prompt with the template that the model brings along.

Owns the template and its sandbox: templates come with downloaded models and are not trusted; they
can neither reach the interpreter nor change what they are given. Does not know tokens. Called by
the API server and the demo. Behaves like transformers' apply_chat_template(tokenize=False).
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tierkv.engine.serve.model_folder import read_json
from tierkv.storage.errors import ModelError, RequestError

TEMPLATE_FILE = "chat_template.jinja"
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
TEMPLATE_BYTES_MAX = 1 << 20

Message = Mapping[str, Any]
"""Role and content, and whatever else the template knows (tool_calls, name ...)."""

_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token")


class ChatTemplate:
    """One model's chat template, compiled. Immutable; safe to use from several threads."""

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str] | None = None,
        now: Callable[[], datetime.datetime] = datetime.datetime.now,
    ) -> None:
        """`now` is what strftime_now() shows. Raises ModelError when the source is no template."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda form: now().strftime(form)
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise ModelError(f"read chat template: {error}; fix the model's template") from error
        self._special_tokens = dict(special_tokens or {})

    @classmethod
    def from_folder(cls, folder: Path) -> ChatTemplate:
        """The template in chat_template.jinja or tokenizer_config.json.

        Raises ModelError when the model has none: it was not trained to chat.
        """
        config_path = folder / TOKENIZER_CONFIG_FILE
        config = read_json(config_path) if config_path.exists() else {}
        source = _template_file(folder / TEMPLATE_FILE) or _named(config.get("chat_template"))
        if source is None:
            raise ModelError(
                f"chat: {folder} has no chat template; use plain completions or an instruct model"
            )
        return cls(source, _special_tokens(config))

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """The prompt for `messages`; `tools` are JSON schemas, `variables` go to the template.

        Encode the result with add_special_tokens=False. Raises RequestError when the template
        refuses the messages or cannot work with them.
        """
        context = {
            **self._special_tokens,
            **variables,
            "messages": messages,
            "tools": tools,
            "documents": variables.get("documents"),
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return self._template.render(context)
        except (
            jinja2.TemplateError,
            ArithmeticError,
            AttributeError,
            LookupError,
            TypeError,
            ValueError,
            RecursionError,
        ) as error:
            # Templates are programs that run over the client's data: these are its mistakes.
            raise RequestError(
                f"chat: the model's template cannot render these messages ({error}); "
                "check roles and contents"
            ) from error


class _Generation(Extension):
    """{% generation %} marks the assistant's text for training; here it only shows its body."""

    tags = {"generation"}  # noqa: RUF012 (the base class declares it so)

    def parse(self, parser: Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as models saw it in training: jinja's own filter would escape HTML."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _template_file(path: Path) -> str | None:
    if not path.is_file():
        return None
    try:
        if path.stat().st_size > TEMPLATE_BYTES_MAX:
            raise ModelError(f"read {path}: larger than {TEMPLATE_BYTES_MAX} bytes; no template")
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"read {path}: {error}; download the file again") from error


def _named(value: Any) -> str | None:
    """The template in tokenizer_config.json: one, or a list of which one is the default."""
    if isinstance(value, list):
        named = {
            entry.get("name"): entry.get("template") for entry in value if isinstance(entry, dict)
        }
        value = named.get("default")
    return value if isinstance(value, str) else None


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """bos_token and the like, which are text or, in older files, objects with a content."""
    tokens: dict[str, str] = {}
    for name in _SPECIAL_NAMES:
        value = config.get(name)
        if isinstance(value, Mapping):
            value = value.get("content")
        if isinstance(value, str):
            tokens[name] = value
    return tokens
