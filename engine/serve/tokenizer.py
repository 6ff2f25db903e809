"""Text to token ids and back, from a model folder's tokenizer.json.

Owns decoding for streams: a client never sees half a character. Does not know chat templates
(engine/serve/chat.py) nor models. Called by the engine's front ends; the `tokenizers` library is
thread-safe, a StreamDecoder belongs to one request.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

import tokenizers

from tierkv.engine.serve.model_folder import read_json
from tierkv.storage.errors import ModelError, RequestError

TOKENIZER_FILE = "tokenizer.json"

_HALF = "\ufffd"
"""What the decoder gives for bytes that are not, or not yet, a character."""


class Tokenizer:
    """One model's tokenizer. Immutable."""

    def __init__(self, inner: tokenizers.Tokenizer) -> None:
        # Stored tokenizers may ask for truncation or padding, which would falsify prompts.
        inner.no_truncation()
        inner.no_padding()
        self._inner = inner
        added = inner.get_added_tokens_decoder()
        self.special_ids = frozenset(index for index, token in added.items() if token.special)
        """Ids of control tokens, which decode() leaves out unless told otherwise."""
        self.vocab_size = inner.get_vocab_size(with_added_tokens=True)

    @classmethod
    def from_folder(cls, folder: Path) -> Tokenizer:
        """Read tokenizer.json. Raises ModelError when it is missing or broken."""
        path = folder / TOKENIZER_FILE
        read_json(path)
        with _PlainErrors(path):
            return cls(tokenizers.Tokenizer.from_file(str(path)))

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Ids of `text`. Control tokens spelled out in it become their ids, as templates need.

        `add_special_tokens` puts in front what the model was trained to see there (bos), if
        anything: leave it out for text that a chat template has made. Raises RequestError for
        text with lone surrogates, which has no UTF-8 form. O(text).
        """
        try:
            ids: list[int] = self._inner.encode(text, add_special_tokens=add_special_tokens).ids
        except TypeError as error:
            # The library takes such a string for no string at all.
            raise RequestError(
                "encode prompt: text has lone surrogates; send valid UTF-8"
            ) from error
        return ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of `ids`; bytes that form no character become U+FFFD. O(ids)."""
        text: str = self._inner.decode(ids, skip_special_tokens=skip_special_tokens)
        return text

    def token_id(self, token: str) -> int | None:
        """Id of one token as spelled in the vocabulary, or None."""
        index: int | None = self._inner.token_to_id(token)
        return index

    def stream(self, *, skip_special_tokens: bool = True) -> StreamDecoder:
        """A fresh decoder for one request's output."""
        return StreamDecoder(self, skip_special_tokens=skip_special_tokens)


class StreamDecoder:
    """Decodes one output token by token; all pushes plus flush() make decode() of all ids.

    A token can end in the middle of a character, and how a token decodes can depend on those
    before it. So a short window is decoded again with each token and only what is new and
    complete is given out. Amortised O(window) per token.
    """

    WINDOW_MIN = 4
    """Tokens kept before the newest, as context for decoding."""
    WINDOW_MAX = 16

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._window: list[int] = []
        self._given = 0
        """Characters of the decoded window that were given out."""

    def push(self, token_id: int) -> str:
        """The text that became complete with this token; often empty inside a character."""
        self._window.append(token_id)
        text = self._decode()
        whole = len(text.rstrip(_HALF))
        if len(self._window) >= self.WINDOW_MAX and whole < len(text):
            # This long a run is no character in the making: only its last bytes may become one.
            whole = len(text) - 1
        new = text[self._given : whole]
        self._given = max(self._given, whole)
        if len(self._window) >= 2 * self.WINDOW_MIN and self._given == len(text):
            del self._window[: -self.WINDOW_MIN]
            self._given = len(self._decode())
        return new

    def flush(self) -> str:
        """The rest, at the end of the output: U+FFFD for a character that never was completed."""
        text = self._decode()
        new = text[self._given :]
        self._window.clear()
        self._given = 0
        return new

    def check(self) -> None:
        """Assert that nothing was given out that is not there. O(window)."""
        assert 0 <= self._given <= len(self._decode()), "gave out more than was decoded"

    def _decode(self) -> str:
        return self._tokenizer.decode(self._window, skip_special_tokens=self._skip)


class _PlainErrors:
    """Makes a ModelError of what the tokenizers library raises about a file.

    It raises the class Exception itself. An except clause for that would take every bug of ours
    with it; this takes exactly that class.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> None:
        return None

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is Exception:
            raise ModelError(
                f"read {self._path}: not a tokenizer ({error}); download the file again"
            ) from error
