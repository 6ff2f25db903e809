"""Tokenizer against transformers, and streams that never show half a character."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import transformers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Inner
from tokenizers import decoders, models

from tests.support.model_files import vocab_size, write_tokenizer
from tierkv.engine.serve.tokenizer import StreamDecoder, Tokenizer
from tierkv.storage.errors import ModelError, RequestError

TEXTS = [
    "",
    " ",
    "The cat and the dog in the on er",
    "tabs\tand\n\nnewlines \r\n",
    "naïve café, Ελληνικά, 日本語, עברית",
    "emoji 🙂👩‍👩‍👧 and 🇩🇪",
    "<|im_start|>user\nhello<|im_end|>\n",
    "half a special <|im_star and more|>",
    "\u0000 control \u200b zero width \ufffd replacement",
    "x" * 1000,
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(path)
    return path


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.from_folder(folder)


def _streamed(decoder: StreamDecoder, ids: list[int]) -> list[str]:
    pieces = []
    for index in ids:
        pieces.append(decoder.push(index))
        decoder.check()
    return [*pieces, decoder.flush()]


@pytest.mark.parametrize("text", TEXTS)
def test_encodes_and_decodes_like_transformers(
    folder: Path, tokenizer: Tokenizer, text: str
) -> None:
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    ids = tokenizer.encode(text)
    assert ids == theirs(text).input_ids
    for skip in (True, False):
        assert tokenizer.decode(ids, skip_special_tokens=skip) == theirs.decode(
            ids, skip_special_tokens=skip
        )


def test_special_ids(tokenizer: Tokenizer) -> None:
    assert tokenizer.special_ids == {0, 1, 2}
    assert tokenizer.vocab_size == vocab_size()
    assert tokenizer.token_id("<|im_end|>") == 2
    assert tokenizer.token_id("no such token") is None
    ids = tokenizer.encode("a<|im_end|>")
    assert ids[-1] == 2
    assert tokenizer.decode(ids) == "a"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "a<|im_end|>"


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("skip", [True, False])
def test_stream_gives_the_whole_text(tokenizer: Tokenizer, text: str, skip: bool) -> None:
    ids = tokenizer.encode(text)
    pieces = _streamed(tokenizer.stream(skip_special_tokens=skip), ids)
    assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens=skip)


def test_stream_never_shows_half_a_character(tokenizer: Tokenizer) -> None:
    """The tiny vocabulary has one token per byte, so these take two to four pushes each."""
    decoder = tokenizer.stream()
    pieces = [decoder.push(index) for index in tokenizer.encode("é日🙂!")]
    assert pieces == ["", "é", "", "", "日", "", "", "", "🙂", "!"]
    assert decoder.flush() == ""


def test_stream_gives_text_as_soon_as_it_is_complete(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("plain text only " * 20)
    decoder = tokenizer.stream()
    assert all(decoder.push(index) for index in ids)
    assert decoder.flush() == ""


def test_cut_off_character_comes_out_with_flush(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a🙂")[:-1]
    decoder = tokenizer.stream()
    assert [decoder.push(index) for index in ids] == ["a", "", "", ""]
    assert decoder.flush() == tokenizer.decode(ids)[1:] == "\ufffd"
    assert decoder.flush() == ""


def test_bytes_that_never_become_text_do_not_pile_up(tokenizer: Tokenizer) -> None:
    """Bounded memory and delay, whatever a model puts out."""
    stray = tokenizer.encode("é")[1]
    decoder = tokenizer.stream()
    pieces = [decoder.push(stray) for _ in range(1000)]
    waiting = 1000 - len("".join(pieces))
    assert waiting <= StreamDecoder.WINDOW_MAX
    assert len("".join(pieces) + decoder.flush()) == 1000
    assert decoder.push(tokenizer.encode("x")[0]) == "x"


@given(st.lists(st.integers(0, vocab_size() - 1), max_size=60))
def test_stream_of_any_ids_is_their_decoding(tokenizer: Tokenizer, ids: list[int]) -> None:
    pieces = _streamed(tokenizer.stream(), ids)
    assert "".join(pieces) == tokenizer.decode(ids)


@given(st.text(max_size=40))
def test_text_round_trips(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    pieces = _streamed(tokenizer.stream(skip_special_tokens=False), ids)
    assert "".join(pieces) == text
    assert "\ufffd" in text or not any("\ufffd" in piece for piece in pieces)


def test_stream_of_a_word_start_decoder() -> None:
    """Tokenizers of the sentencepiece kind strip the first space: only the context tells."""
    inner = Inner(models.WordLevel({"▁the": 0, "▁cat": 1, "s": 2}, unk_token="s"))
    inner.decoder = decoders.Metaspace(replacement="▁", prepend_scheme="always")
    tokenizer = Tokenizer(inner)
    generator = random.Random(7)
    ids = [0, 1, 2, *(generator.randrange(3) for _ in range(60))]
    pieces = _streamed(tokenizer.stream(), ids)
    assert "".join(pieces) == tokenizer.decode(ids)
    assert pieces[:3] == ["the", " cat", "s"]


def test_stored_truncation_and_padding_are_ignored(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    path = str(tmp_path / "tokenizer.json")
    inner = Inner.from_file(path)
    inner.enable_truncation(3)
    inner.enable_padding(length=64)
    inner.save(path)
    assert len(Tokenizer.from_folder(tmp_path).encode("x" * 10)) == 10


def test_lone_surrogates_are_a_request_error(tokenizer: Tokenizer) -> None:
    with pytest.raises(RequestError, match="surrogates"):
        tokenizer.encode("a\ud800b")


def test_missing_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"has no tokenizer\.json"):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"model": {"type": "BPE"}}'])
def test_broken_tokenizer(tmp_path: Path, text: str) -> None:
    (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        Tokenizer.from_folder(tmp_path)
