"""Pages of a peer while this node reads them: how long they are believed to hold still.

Owns one lease's time and what may be landed of it. Knows no sockets. The rule that it keeps
(docs/adr/0010-the-pool.md, 1): the reader counts from before it asked, so that whatever the two
clocks say, it believes in the lease for less long than the holder does; pages whose transfer ended
later are thrown away, all of them, since no byte of them is known to be the page's. Used by
puller.py, which lands what judge() gives and nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from tierkv.storage.clock import Clock
from tierkv.storage.pool.messages import LeasedPage, LeaseGrant
from tierkv.storage.remote import Pull, PullState
from tierkv.storage.transport.base import PageOutcome, PageRange


class Verdict(NamedTuple):
    """What came of the pages of one lease."""

    arrived: list[tuple[Pull, bytes]]
    """Whole, while the lease was believed; with the checksum that the holder recorded."""
    lost: list[tuple[Pull, PullState]]
    """Why not: MISSED where the holder has it no more, FAILED else."""
    expired: bool
    """The transfer ended when the lease was not believed any more (lesson L1)."""


class Borrow:
    """One lease: made before it is asked for, granted, read, judged. Owned by one thread."""

    def __init__(self, pulls: Sequence[Pull], hold_s: float, clock: Clock) -> None:
        self._clock = clock
        self._pulls = list(pulls)
        self.asked = clock.monotonic()
        self._believed_until = self.asked + hold_s
        self._held: list[tuple[Pull, LeasedPage]] = []

    def granted(self, grant: LeaseGrant) -> list[Pull]:
        """Take note of what is held; returns the pulls whose pages are not there."""
        pairs = list(zip(self._pulls, grant.pages, strict=True))
        self._held = [(pull, page) for pull, page in pairs if page is not None]
        return [pull for pull, page in pairs if page is None]

    @property
    def held(self) -> list[Pull]:
        """The pulls whose pages are held, in order."""
        return [pull for pull, _ in self._held]

    def ranges(self, page_bytes: int) -> list[PageRange]:
        """Where they lie in the holder's memory, in order."""
        return [PageRange(page.offset, page_bytes) for _, page in self._held]

    @property
    def left_s(self) -> float:
        """How long the lease will be believed; not above 0: no more."""
        return self._believed_until - self._clock.monotonic()

    def judge(self, outcomes: Sequence[PageOutcome]) -> Verdict:
        """The read of ranges() has ended so, just now. The only way to learn what may be landed."""
        if self.left_s <= 0:
            return Verdict([], [(pull, PullState.FAILED) for pull in self.held], True)
        arrived: list[tuple[Pull, bytes]] = []
        lost: list[tuple[Pull, PullState]] = []
        for (pull, page), outcome in zip(self._held, outcomes, strict=True):
            if outcome is PageOutcome.OK:
                arrived.append((pull, page.checksum))
            else:
                gone = outcome is PageOutcome.GONE
                lost.append((pull, PullState.MISSED if gone else PullState.FAILED))
        return Verdict(arrived, lost, False)
