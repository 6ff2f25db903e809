"""Brings pages from a Mooncake Store into the host slots of pulls.

Owns the headers of the batch under way. Each page's bytes go from the library straight into its
slot's payload, its header beside it into scratch; nothing else of the arena is written. What
arrived is believed only when header, key, length and checksum agree. Called by its worker thread
(storage.mooncake.threads); one for each.

Invariants: a pull is ended only after the library's call returned, so that no late byte finds its
slot in other hands; a call of the library belongs to one batch.
"""

from __future__ import annotations

from collections.abc import Sequence

from tierkv.storage.bandwidth import TransferMeter
from tierkv.storage.clock import Clock
from tierkv.storage.device import address_of
from tierkv.storage.mooncake.client import Answer, MooncakeClient, Piece
from tierkv.storage.mooncake.config import MooncakeConfig
from tierkv.storage.mooncake.gate import Gate
from tierkv.storage.mooncake.knowledge import Knowledge
from tierkv.storage.mooncake.values import (
    HEADER_BYTES,
    HeaderScratch,
    key_text,
    parse_header,
)
from tierkv.storage.pulls import PullQueue
from tierkv.storage.remote import Pull, PullState

LANE = "mooncake"
"""All pulls wait for the one service there is."""
IDLE_WAIT_S = 5.0


class Puller:
    """See the module docstring. work() belongs to one thread."""

    def __init__(
        self,
        config: MooncakeConfig,
        clock: Clock,
        client: MooncakeClient,
        gate: Gate,
        known: Knowledge,
        queue: PullQueue,
        meter: TransferMeter,
        page_bytes: int,
    ) -> None:
        self._clock = clock
        self._client = client
        self._gate = gate
        self._known = known
        self._queue = queue
        self._meter = meter
        self._page_bytes = page_bytes
        self._stopping = False
        self.headers = HeaderScratch(config.batch_pages)

    def stop(self) -> None:
        """Let work() end when it comes round. The queue's closing wakes it."""
        self._stopping = True

    def work(self) -> bool:
        """One batch of pulls, waited for; False when the worker should end."""
        pulls = self._queue.take(LANE, len(self.headers), IDLE_WAIT_S)
        try:
            if pulls:
                self._bring(pulls)
        finally:
            for pull in pulls:
                if pull.state is PullState.RUNNING:
                    self._queue.end(pull, PullState.FAILED)
        return not self._stopping

    def _bring(self, pulls: Sequence[Pull]) -> None:
        """End every pull, or leave to the caller what failed."""
        wanted = [pull for pull in pulls if not self._known.is_corrupt(pull.key)]
        for pull in pulls:
            if pull not in wanted:
                self._queue.end(pull, PullState.MISSED)
        if not wanted or not self._gate.open:
            return
        answers = self._get(wanted)
        for index, (pull, answer) in enumerate(zip(wanted, answers, strict=True)):
            self._settle(pull, answer, index)

    def _get(self, pulls: Sequence[Pull]) -> list[Answer]:
        """The library's answers, one a pull; the gate and the meter are told."""
        self.headers.clear()
        views = [self._queue.view(pull) for pull in pulls]
        targets = [
            (
                Piece(self.headers.address(index), HEADER_BYTES),
                Piece(address_of(view), self._page_bytes),
            )
            for index, view in enumerate(views)
        ]
        texts = [key_text(pull.key, self._page_bytes) for pull in pulls]
        deadline = max(pull.deadline for pull in pulls)
        started = self._meter.begin()
        arrived = 0
        try:
            answers, in_time = self._gate.run(
                f"get of {len(pulls)} pages",
                deadline,
                lambda: self._client.get(texts, targets),
            )
            arrived = answers.count(Answer.DONE)
        finally:
            self._meter.end(started, arrived * self._page_bytes)
            for view in views:
                view.release()
        answered = any(answer is not Answer.FAILED for answer in answers)
        self._gate.judge("get", in_time, answered, self._client.last_code)
        return answers

    def _settle(self, pull: Pull, answer: Answer, index: int) -> None:
        if answer is Answer.DONE and pull.deadline < self._clock.monotonic():
            # It is there, but for whoever waited it is a failure.
            self._known.found([pull.key])
            self._queue.end(pull, PullState.FAILED)
        elif answer is Answer.DONE:
            self._land(pull, index)
        elif answer is Answer.OTHER_LENGTH:
            self._known.wrong([pull.key])
            self._queue.end(pull, PullState.CORRUPT)
        elif answer is Answer.MISS:
            self._known.missed([pull.key])
            self._queue.end(pull, PullState.MISSED)
        else:
            self._known.failed([pull.key])
            self._queue.end(pull, PullState.FAILED)

    def _land(self, pull: Pull, index: int) -> None:
        """Commit a page whose value proves what it is; else it is corrupt."""
        header = parse_header(self.headers.block(index))
        if header is None or header.key != pull.key or header.payload_bytes != self._page_bytes:
            self._queue.end(pull, PullState.CORRUPT)
        else:
            self._queue.land(pull, header.checksum)
        if pull.state is PullState.CORRUPT:
            self._known.wrong([pull.key])
        else:
            self._known.found([pull.key])
