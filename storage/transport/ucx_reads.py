"""A read over UCX, as its reader holds it and as the peer's queue does.

Owns no state machine: ucx_peer.py, the only caller, moves jobs from state to state.
Invariant: whoever waits in take() first offers the peer to move the bytes itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tierkv.storage.transport.base import PageOutcome, PageRange, PeerRead
from tierkv.storage.transport.ucx_lane import Transfer


class UcxRead(PeerRead):
    """A read whose taker may do the transfer."""

    def __init__(self, pages: int, assist: Callable[[UcxRead, float], float]) -> None:
        """`assist` moves bytes of the read, at most for the time given, and says what is left."""
        super().__init__(pages)
        self._assist = assist

    def take(self, timeout_s: float) -> list[PageOutcome]:
        return super().take(timeout_s if self.done else self._assist(self, timeout_s))


class Job:
    """One read in the hands of the peer."""

    __slots__ = ("attempts", "deadline", "generation", "ranges", "read", "transfer", "views")

    def __init__(
        self,
        read: UcxRead,
        generation: int,
        ranges: Sequence[PageRange],
        views: list[memoryview],
        deadline: float,
    ) -> None:
        self.read = read
        self.generation = generation
        self.ranges = ranges
        self.views = views
        self.deadline = deadline
        self.transfer: Transfer | None = None
        self.attempts = 0
