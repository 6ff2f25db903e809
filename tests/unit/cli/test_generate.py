"""`tierkv generate` on a tiny model: text, JSON, prompts from files, prefixes kept on disk."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.unit.cli.conftest import Cli

WORDS = "the and " * 40
SMALL = ("--pool", "8MiB")


def _json(result: tuple[int, str, str]) -> dict[str, Any]:
    code, out, err = result
    assert (code, err, out.count("\n")) == (0, "", 1), err
    parsed: dict[str, Any] = json.loads(out)
    return parsed


def test_json_is_the_whole_output(cli: Cli, tiny: Path) -> None:
    output = _json(
        cli("generate", *SMALL, "--model", tiny, "--prompt", "the", "--max-tokens", "3", "--json")
    )
    assert len(output["token_ids"]) == 3
    assert output["finish_reason"] == "length"
    assert output["cached"] == {"gpu": 0, "host": 0, "nvme": 0, "remote": 0}
    assert output["ttft_s"] > 0


def test_text_goes_to_standard_output_and_figures_to_standard_error(cli: Cli, tiny: Path) -> None:
    arguments = ("generate", *SMALL, "--model", tiny, "--prompt", "the", "--max-tokens", "3")
    expected = _json(cli(*arguments, "--json"))["text"]
    code, out, err = cli(*arguments)
    assert (code, out) == (0, expected + "\n")
    assert "3 generated, ended by length" in err


def test_prompt_from_file_and_standard_input(
    cli: Cli, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "prompt"
    file.write_text("the", encoding="utf-8")
    common = ("generate", *SMALL, "--model", tiny, "--max-tokens", "2", "--json", "--prompt")
    expected = _json(cli(*common, "the"))["token_ids"]
    assert _json(cli(*common, f"@{file}"))["token_ids"] == expected
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(b"the")))
    assert _json(cli(*common, "-"))["token_ids"] == expected


def test_chat_puts_the_prompt_into_the_template(cli: Cli, tiny: Path) -> None:
    common = ("generate", *SMALL, "--model", tiny, "--max-tokens", "1", "--json", "--prompt", "the")
    plain = _json(cli(*common))["prompt_token_ids"]
    chat = _json(cli(*common, "--chat"))["prompt_token_ids"]
    assert len(chat) > len(plain) and chat[0] == 1, "the template opens with <|im_start|>"


def test_stop_ends_the_text_before_it(cli: Cli, tiny: Path) -> None:
    common = (
        "generate",
        *SMALL,
        "--model",
        tiny,
        "--prompt",
        "the",
        "--max-tokens",
        "24",
        "--json",
    )
    text = _json(cli(*common))["text"]
    stop = next(char for char in text[1:] if char != "\ufffd" and char.strip())
    output = _json(cli(*common, "--stop", stop))
    assert output["text"] == text.partition(stop)[0]
    assert output["finish_reason"] == "stop"


def test_r1_prefix_is_found_again_by_the_next_process(cli: Cli, tiny: Path, tmp_path: Path) -> None:
    """Host arena first; when that is gone, the disk."""
    arena = tmp_path / "arena"
    common = ("generate", *SMALL, "--model", tiny, "--prompt", WORDS, "--max-tokens", "4", "--json")
    sizes = ("--host", "8MiB", "--nvme", "8MiB")
    places = ("--nvme-dir", tmp_path / "nvme", "--host-arena", arena, "--restore", "load")
    cold = _json(cli(*common, *sizes, *places))
    assert cold["cached"]["host"] == cold["cached"]["nvme"] == 0
    again = _json(cli(*common, *sizes, *places))
    assert again["cached"]["host"] >= 64 and again["cached"]["nvme"] == 0
    arena.unlink()
    from_disk = _json(cli(*common, *sizes, *places))
    assert from_disk["cached"]["nvme"] == again["cached"]["host"]
    assert cold["token_ids"] == again["token_ids"] == from_disk["token_ids"]
