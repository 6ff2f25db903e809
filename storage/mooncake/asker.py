"""Asks a Mooncake Store which pages it has, for look-ups that wait a little for the answer.

Owns the questions that nobody has asked yet. The store keeps no list that could be read ahead, so
a look-up has to ask; its question is answered by the worker, later than the caller waits if need
be, and what was learned is remembered either way. Asking renews the keys' leases at the master,
which knows no question without that (lesson L1): what is known is therefore not asked again.

Invariants: at most QUESTIONS_MAX questions of KEYS_MAX keys; a caller waits no longer than it
said. Called by the remote and by its worker thread.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence

from tierkv.storage.clock import Clock
from tierkv.storage.mooncake.client import MooncakeClient
from tierkv.storage.mooncake.config import MooncakeConfig
from tierkv.storage.mooncake.gate import Gate
from tierkv.storage.mooncake.knowledge import Knowledge
from tierkv.storage.mooncake.values import key_text
from tierkv.storage.types import PageKey

IDLE_WAIT_S = 5.0
QUESTIONS_MAX = 64
KEYS_MAX = 4096


class _Question:
    __slots__ = ("answered", "keys")

    def __init__(self, keys: list[PageKey]) -> None:
        self.keys = keys
        self.answered = threading.Event()


class Asker:
    """See the module docstring."""

    def __init__(
        self,
        config: MooncakeConfig,
        clock: Clock,
        client: MooncakeClient,
        gate: Gate,
        known: Knowledge,
        page_bytes: int,
    ) -> None:
        self._call_s = config.call_s
        self._clock = clock
        self._client = client
        self._gate = gate
        self._known = known
        self._page_bytes = page_bytes
        self._changed = threading.Condition()
        self._questions: deque[_Question] = deque()
        self._stopping = False

    def ask(self, keys: Sequence[PageKey], timeout_s: float) -> None:
        """Have `keys` asked for, those past KEYS_MAX left out; wait at most `timeout_s`."""
        if not keys:
            return
        question = _Question(list(keys[:KEYS_MAX]))
        with self._changed:
            if self._stopping or len(self._questions) >= QUESTIONS_MAX:
                return
            self._questions.append(question)
            self._changed.notify_all()
        question.answered.wait(max(0.0, timeout_s))

    def stop(self) -> None:
        """Let every caller go and work() end. Never waits."""
        with self._changed:
            self._stopping = True
            left = list(self._questions)
            self._questions.clear()
            self._changed.notify_all()
        for question in left:
            question.answered.set()

    def check(self) -> None:
        """Assert the bounds. O(questions)."""
        with self._changed:
            assert len(self._questions) <= QUESTIONS_MAX, len(self._questions)
            assert all(0 < len(one.keys) <= KEYS_MAX for one in self._questions)

    def work(self) -> bool:
        """Every question there is, at least one waited for; False when the worker should end."""
        with self._changed:
            self._changed.wait_for(lambda: self._questions or self._stopping, IDLE_WAIT_S)
            questions = list(self._questions)
            self._questions.clear()
            stopping = self._stopping
        try:
            # Many ask for the same pages at once: prefixes are shared.
            keys = list(dict.fromkeys(key for one in questions for key in one.keys))
            for start in range(0, len(keys), KEYS_MAX):
                self._learn(keys[start : start + KEYS_MAX])
        finally:
            for question in questions:
                question.answered.set()
        return not stopping

    def _learn(self, keys: Sequence[PageKey]) -> None:
        unknown = [key for key in keys if not self._known.answers(key)]
        if not unknown or not self._gate.open:
            return
        texts = [key_text(key, self._page_bytes) for key in unknown]
        found, in_time = self._gate.run(
            f"look-up of {len(unknown)} pages",
            self._clock.monotonic() + self._call_s,
            lambda: self._client.exist(texts),
        )
        pairs = list(zip(unknown, found, strict=True))
        self._known.found([key for key, there in pairs if there])
        self._known.missed([key for key, there in pairs if there is False])
        answered = any(there is not None for there in found)
        self._gate.judge("look-up", in_time, answered, self._client.last_code)
