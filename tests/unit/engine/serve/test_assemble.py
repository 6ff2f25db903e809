"""Text of an output: stop strings across tokens, whole characters, nothing lost."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.support.model_files import write_model
from tierkv.engine.serve.assemble import Assembler
from tierkv.engine.serve.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder: Path = tmp_path_factory.mktemp("model")
    write_model(folder)
    return Tokenizer.from_folder(folder)


def feed(assembler: Assembler, ids: list[int]) -> list[str]:
    pieces = []
    for token in ids:
        pieces.append(assembler.push(token))
        if assembler.stopped:
            break
    pieces.append(assembler.finish())
    return pieces


def test_without_stop_strings_all_text_comes_through(tokenizer: Tokenizer) -> None:
    text = "naïve façade — 😀 end"
    pieces = feed(Assembler(tokenizer), tokenizer.encode(text, add_special_tokens=False))
    assert "".join(pieces) == text
    assert all("�" not in piece for piece in pieces)


def test_the_output_ends_before_the_stop_string(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("one two END three", add_special_tokens=False)
    assembler = Assembler(tokenizer, ["END"])
    assert "".join(feed(assembler, ids)) == "one two "
    assert assembler.stopped
    assert assembler.text == "one two "


def test_what_only_looks_like_a_stop_string_is_given_out(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("one EN two EN", add_special_tokens=False)
    assembler = Assembler(tokenizer, ["END"])
    assert "".join(feed(assembler, ids)) == "one EN two EN"
    assert not assembler.stopped


def test_never_gives_out_a_part_of_a_stop_string(tokenizer: Tokenizer) -> None:
    seed = 20
    rng = random.Random(seed)
    for _ in range(200):
        text = "".join(rng.choice("abE") for _ in range(20))
        stop = "".join(rng.choice("abE") for _ in range(rng.randint(1, 4)))
        assembler = Assembler(tokenizer, [stop, ""])
        pieces = feed(assembler, tokenizer.encode(text, add_special_tokens=False))
        expected = text.split(stop)[0]
        assert "".join(pieces) == expected == assembler.text, (seed, text, stop)
        assert assembler.stopped == (stop in text)
