"""Parts of a read over TCP, each for one connection, and the read they belong to.

Owns how a read is cut, what a part's question says, and the states that a part goes through. Does
not know threads or queues: tcp_reads.py moves jobs from state to state, under its lock.

    job state   who holds its views    leaves by
    QUEUED      nobody writes          worker or taker begins -> RUNNING; deadline, close -> ENDED
                                       (with a connection: its question was sent)
    RUNNING     that thread            transferred, failed, deadline -> ENDED
    ENDED       the caller, again      final
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum

from tierkv.storage.transport.base import PageOutcome, PageRange, PeerRead
from tierkv.storage.transport.stream import Stream
from tierkv.storage.transport.wire import Kind, pack_frame, pack_read

PIECE_BYTES = 8 << 20
"""A read is cut for several connections only into pieces of at least so much."""


class State(Enum):
    QUEUED = "queued"
    RUNNING = "running"
    ENDED = "ended"


class TcpRead(PeerRead):
    """A read whose taker may do the transfer."""

    def __init__(
        self, pages: int, assist: Callable[[TcpRead, float], float], hurry: Callable[[], None]
    ) -> None:
        super().__init__(pages)
        self._assist = assist
        self._hurry = hurry

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        super().add_done_callback(callback)
        if not self.done:
            self._hurry()

    def take(self, timeout_s: float) -> list[PageOutcome]:
        return super().take(timeout_s if self.done else self._assist(self, timeout_s))


class Job:
    """Consecutive pages of one read, on one connection."""

    __slots__ = (
        "deadline",
        "generation",
        "lane",
        "ranges",
        "read",
        "request",
        "start",
        "state",
        "stream",
        "views",
        "watch",
    )

    def __init__(
        self,
        read: TcpRead,
        start: int,
        ranges: Sequence[PageRange],
        views: list[memoryview],
        generation: int,
        deadline: float,
    ) -> None:
        self.read = read
        self.start = start
        self.ranges = ranges
        self.views = views
        self.generation = generation
        self.deadline = deadline
        self.state = State.QUEUED
        self.watch: int | None = None
        self.lane = False
        """Whether it has, or is about to have, one of the read connections."""
        self.stream: Stream | None = None
        """The connection on which `request` was sent, while it is queued."""
        self.request = 0


def question(job: Job, request: int) -> bytes:
    """The READ frame of a job."""
    return pack_frame(Kind.READ, request, pack_read(job.generation, job.ranges))


def pieces(ranges: Sequence[PageRange], connections: int) -> list[tuple[int, int]]:
    """Cut ranges into runs [start, end) of about equal bytes, one a connection at most."""
    if len(ranges) == 1:
        return [(0, 1)]
    total = sum(length for _, length in ranges)
    count = max(1, min(connections, len(ranges), total // PIECE_BYTES))
    pieces: list[tuple[int, int]] = []
    start = done = 0
    for index, (_, length) in enumerate(ranges):
        done += length
        if done * count >= total * (len(pieces) + 1):
            pieces.append((start, index + 1))
            start = index + 1
    return pieces
