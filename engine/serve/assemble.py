"""Text of one output as it grows: whole characters, and an end at stop strings.

Owns the text that was made so far. Belongs to one request; knows tokens only through the
tokenizer's stream decoder.
"""

from __future__ import annotations

from collections.abc import Sequence

from tierkv.engine.serve.tokenizer import Tokenizer


class Assembler:
    """Tokens in, text out. Holds back what may be the beginning of a stop string."""

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()) -> None:
        self._decoder = tokenizer.stream()
        self._stop = [each for each in stop if each]
        self._held = ""
        self.text = ""
        """Everything given out so far."""
        self.stopped = False
        """True once a stop string came: the output ends before it."""

    def push(self, token: int) -> str:
        """Add a token; return the text that is certain now. O(held text * stop strings)."""
        return self._take(self._decoder.push(token), last=False)

    def finish(self) -> str:
        """The rest, at the end of the output."""
        return "" if self.stopped else self._take(self._decoder.flush(), last=True)

    def _take(self, new: str, *, last: bool) -> str:
        if self.stopped:
            return ""
        self._held += new
        found = [at for each in self._stop if (at := self._held.find(each)) >= 0]
        if found:
            self.stopped = True
            certain, self._held = self._held[: min(found)], ""
        else:
            keep = 0 if last else self._possible_start()
            cut = len(self._held) - keep
            certain, self._held = self._held[:cut], self._held[cut:]
        self.text += certain
        return certain

    def _possible_start(self) -> int:
        """Length of the longest end of the held text that a stop string begins with."""
        longest = 0
        for each in self._stop:
            for size in range(min(len(each) - 1, len(self._held)), longest, -1):
                if self._held.endswith(each[:size]):
                    longest = size
                    break
        return longest
