"""Writes tokenizer.json and tokenizer_config.json from the metadata of a GGUF file.

Owns the mapping from GGUF's byte-level BPE vocabulary ("gpt2") and pre-tokenizer names to the
`tokenizers` library. Does not know weights. Called by engine/serve/gguf.py.

A wrong pre-tokenizer gives plausible, slightly wrong token ids and never an error later, so an
unknown name is refused here.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.processors import ByteLevel, TemplateProcessing

from tierkv.storage.errors import ModelError

TOKENIZER_FILE = "tokenizer.json"
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"

# Values of tokenizer.ggml.token_type.
_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4

# How text is cut into words before BPE: constants of the model families.
_LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, slots=True)
class _Style:
    """What a pre-tokenizer name stands for."""

    words: str | None = None
    """Regular expression of one word; None: that of GPT-2, built into the library."""
    single_digits: bool = False
    nfc: bool = False
    ignore_merges: bool = False
    """A word that is in the vocabulary is one token, whatever the merges say."""
    adds_bos: bool = False
    """Whether bos is put in front when the file does not say."""


_LLAMA3 = _Style(words=_LLAMA3_WORDS, ignore_merges=True, adds_bos=True)
_QWEN2 = _Style(words=_QWEN2_WORDS, nfc=True)
_STYLES = {
    "gpt-2": _Style(),
    "smollm": _Style(single_digits=True),
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "llama-bpe": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama3": _LLAMA3,
}


def write_tokenizer(source: Path, values: dict[str, Any], folder: Path) -> None:
    """Write both tokenizer files into `folder`, from the decoded metadata of `source`.

    Raises ModelError when the vocabulary is missing, inconsistent or of an unknown kind.
    O(vocabulary).
    """
    style = _style(source, values)
    tokens, types = _vocabulary(source, values)
    tokenizer = _bpe(source, values, tokens, style)
    bos = _special(source, values, tokens, "bos")
    adds_bos = bool(values.get("tokenizer.ggml.add_bos_token", style.adds_bos))
    if adds_bos and bos is not None:
        tokenizer.post_processor = TemplateProcessing(
            single=f"{bos} $A",
            pair=f"{bos} $A {bos} $B",
            special_tokens=[(bos, tokens.index(bos))],
        )
    else:
        tokenizer.post_processor = ByteLevel(trim_offsets=False)
    special = [
        token for token, kind in zip(tokens, types, strict=True) if kind in (_UNKNOWN, _CONTROL)
    ]
    plain = [token for token, kind in zip(tokens, types, strict=True) if kind == _USER_DEFINED]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in special])
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in plain])
    tokenizer.save(str(folder / TOKENIZER_FILE))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": bos,
        "eos_token": _special(source, values, tokens, "eos"),
        "unk_token": _special(source, values, tokens, "unknown"),
        "pad_token": _special(source, values, tokens, "padding"),
        "add_bos_token": adds_bos,
        "clean_up_tokenization_spaces": False,
        "chat_template": values.get("tokenizer.chat_template"),
    }
    config = {name: value for name, value in config.items() if value is not None}
    text = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
    (folder / TOKENIZER_CONFIG_FILE).write_text(text, encoding="utf-8")


def _style(source: Path, values: dict[str, Any]) -> _Style:
    model = values.get("tokenizer.ggml.model")
    if model != "gpt2":
        raise ModelError(
            f"load model: {source} has a {model!r} tokenizer; only gpt2 (byte-level BPE) is "
            "converted: use the model's Hugging Face folder"
        )
    name = values.get("tokenizer.ggml.pre")
    if not isinstance(name, str) or name not in _STYLES:
        raise ModelError(
            f"load model: {source} has pre-tokenizer {name!r}; known are {', '.join(_STYLES)}: "
            "use the model's Hugging Face folder"
        )
    return _STYLES[name]


def _vocabulary(source: Path, values: dict[str, Any]) -> tuple[list[str], list[int]]:
    """Tokens by id, and the type of each."""
    tokens = values.get("tokenizer.ggml.tokens")
    types = values.get("tokenizer.ggml.token_type")
    if not isinstance(tokens, list) or not all(isinstance(token, str) for token in tokens):
        raise ModelError(f"load model: {source} has no tokenizer.ggml.tokens; it is incomplete")
    if not isinstance(types, list) or len(types) != len(tokens):
        raise ModelError(
            f"load model: {source}: expected one token_type for each of {len(tokens)} tokens"
        )
    if len(set(tokens)) != len(tokens):
        raise ModelError(f"load model: {source} has the same token twice in its vocabulary")
    return tokens, types


def _bpe(source: Path, values: dict[str, Any], tokens: list[str], style: _Style) -> Tokenizer:
    merges = values.get("tokenizer.ggml.merges")
    if not isinstance(merges, list):
        raise ModelError(f"load model: {source} has no tokenizer.ggml.merges; it is incomplete")
    pairs = [tuple(merge.split(" ")) for merge in merges]
    known = set(tokens)
    for pair in pairs:
        if len(pair) != 2 or not known.issuperset((*pair, "".join(pair))):
            raise ModelError(
                f"load model: {source} has a merge {' '.join(pair)!r} that is not in its vocabulary"
            )
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocabulary, pairs, ignore_merges=style.ignore_merges))
    if style.nfc:
        tokenizer.normalizer = normalizers.NFC()
    steps: list[pre_tokenizers.PreTokenizer]
    if style.words is None:
        steps = [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]
    else:
        steps = [
            pre_tokenizers.Split(Regex(style.words), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    if style.single_digits:
        steps.insert(0, pre_tokenizers.Digits(individual_digits=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _special(source: Path, values: dict[str, Any], tokens: list[str], name: str) -> str | None:
    """The token that plays the role `name`, or None when the file names none."""
    index = values.get(f"tokenizer.ggml.{name}_token_id")
    if index is None:
        return None
    if type(index) is not int or not 0 <= index < len(tokens):
        raise ModelError(
            f"load model: {source}: {name}_token_id {index!r} is not in the vocabulary"
        )
    return tokens[index]
