"""Chat templates: the same prompts as transformers, in a sandbox."""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any

import pytest
import transformers

from tests.support.model_files import CHAT_TEMPLATE, write_json, write_tokenizer
from tierkv.engine.serve.chat import ChatTemplate
from tierkv.storage.errors import ModelError, RequestError

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Wetter für <b>München</b> & 'Umgebung'",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]

CONVERSATIONS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "hi"}],
    [
        {"role": "system", "content": "Be brief.\n"},
        {"role": "user", "content": "  spaces  and <|im_end|> "},
        {"role": "assistant", "content": '日本 🙂 "quoted" & <b>'},
        {"role": "user", "content": ""},
    ],
    [],
]

LOOPS = """\
{% for message in messages %}
    {% if message['role'] == 'system' %}{% continue %}{% endif %}
    {% if loop.index > 2 %}{% break %}{% endif %}
{% generation %}{{ bos_token }}{{ message.content | trim }}{{ eos_token }}{% endgeneration %}
{% endfor %}
{{ tools is none }} {{ documents is none }} {{ flag | default('off') }}
"""


def _both(folder: Path, messages: Any, **options: Any) -> tuple[str, str]:
    theirs = transformers.AutoTokenizer.from_pretrained(folder).apply_chat_template(
        messages, tokenize=False, **options
    )
    return ChatTemplate.from_folder(folder).render(messages, **options), theirs


@pytest.mark.parametrize("tools", [None, TOOLS], ids=["plain", "tools"])
@pytest.mark.parametrize("prompt", [True, False])
@pytest.mark.parametrize("messages", CONVERSATIONS[:2], ids=["short", "long"])
@pytest.mark.parametrize("template", [CHAT_TEMPLATE, LOOPS], ids=["chatml", "loops"])
def test_renders_like_transformers(
    tmp_path: Path, template: str, messages: Any, prompt: bool, tools: Any
) -> None:
    write_tokenizer(tmp_path, template)
    ours, theirs = _both(tmp_path, messages, tools=tools, add_generation_prompt=prompt)
    assert ours == theirs
    assert ours


def test_extra_variables_reach_the_template(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, LOOPS)
    ours, theirs = _both(tmp_path, CONVERSATIONS[0], add_generation_prompt=True, flag="on")
    assert ours == theirs
    assert "on" in ours


def test_tools_are_json_without_html_escapes() -> None:
    text = ChatTemplate(CHAT_TEMPLATE).render([], tools=TOOLS)
    line = text.split("\n")[2].removesuffix("<|im_end|>")
    assert json.loads(line) == TOOLS[0]
    assert "für <b>München</b> & 'Umgebung'" in text


def test_no_messages_is_the_templates_choice() -> None:
    assert ChatTemplate(CHAT_TEMPLATE).render([]) == "<|im_start|>assistant\n"


def test_date_comes_from_the_clock_given() -> None:
    template = ChatTemplate(
        "{{ strftime_now('%d %b %Y') }}", now=lambda: datetime.datetime(2026, 11, 29)
    )
    assert template.render([]) == "29 Nov 2026"


def test_template_file_wins_over_the_config(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, "from the config")
    assert ChatTemplate.from_folder(tmp_path).render([]) == "from the config"
    (tmp_path / "chat_template.jinja").write_text("from the file, {{ bos_token }}")
    assert ChatTemplate.from_folder(tmp_path).render([]) == "from the file, <|im_start|>"


def test_default_of_several_templates(tmp_path: Path) -> None:
    named = [
        {"name": "tool_use", "template": "tools"},
        {"name": "default", "template": "default {{ eos_token }}"},
    ]
    tokens = {"eos_token": {"content": "</s>", "special": True}}
    write_json(tmp_path / "tokenizer_config.json", {"chat_template": named} | tokens)
    assert ChatTemplate.from_folder(tmp_path).render([]) == "default </s>"


@pytest.mark.parametrize("template", [None, 7, [], [{"name": "rag", "template": "x"}], [3]])
def test_model_without_a_template(tmp_path: Path, template: Any) -> None:
    write_json(tmp_path / "tokenizer_config.json", {"chat_template": template})
    with pytest.raises(ModelError, match="has no chat template"):
        ChatTemplate.from_folder(tmp_path)


def test_folder_without_tokenizer_config(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="has no chat template"):
        ChatTemplate.from_folder(tmp_path)


def test_broken_template_is_found_when_loading() -> None:
    with pytest.raises(ModelError, match="read chat template"):
        ChatTemplate("{% for message in messages %}")


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "wizard", "content": "x"}],
        [{"role": "user", "content": None}],
        [{"role": "user"}],
        [{}],
        ["text"],
    ],
    ids=str,
)
def test_messages_the_template_refuses(messages: Any) -> None:
    with pytest.raises(RequestError, match="cannot render these messages"):
        ChatTemplate(CHAT_TEMPLATE).render(messages)


def test_reason_given_by_the_template_is_shown() -> None:
    with pytest.raises(RequestError, match="unknown role wizard"):
        ChatTemplate(CHAT_TEMPLATE).render([{"role": "wizard", "content": "x"}])


@pytest.mark.parametrize(
    "attack",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ raise_exception.__globals__.json }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role='system') }}",
        "{{ range(999999999) | list }}",
        "{% include '/etc/hostname' %}",
    ],
)
def test_templates_are_sandboxed(attack: str) -> None:
    messages = [{"role": "user", "content": "x"}]
    with pytest.raises(RequestError):
        ChatTemplate(attack).render(messages)
    assert messages == [{"role": "user", "content": "x"}]
