"""A data plane that reads memory of this process, and does as the test says."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence

from tierkv.storage.errors import TierIOError
from tierkv.storage.transport.base import PageOutcome, PageRange, PeerRead
from tierkv.storage.transport.plane import DataPlane, PlanePeer, PlanePeerStats


class FakePlane(DataPlane):
    """Both ends of a test share the process, so an offer is the number of a plane."""

    planes: dict[int, FakePlane] = {}  # noqa: RUF012

    def __init__(self, name: str = "fake") -> None:
        self.name = name
        self.memories: dict[int, memoryview] = {}
        self.refuses_memory = False
        self.refuses_offers = False
        self.refuses_peers = False
        self.flips = False
        """Whether its reads bring other bytes."""
        self.fails = False
        """Whether its reads fail, and the peer stays."""
        self.breaks: str | None = None
        self.reads = 0
        """Reads that peers of this plane began, probes too."""
        self.connects = 0
        self.closed = False
        FakePlane.planes[id(self)] = self

    def register(self, memory: memoryview, generation: int) -> None:
        if self.refuses_memory:
            raise TierIOError("register memory by fake: not today")
        assert generation not in self.memories
        self.memories[generation] = memory

    def unregister(self, generation: int) -> None:
        self.memories.pop(generation, None)

    def offer(self) -> bytes:
        if self.refuses_offers:
            raise TierIOError("offer memory by fake: not\ntoday")
        return json.dumps([id(self), sorted(self.memories)]).encode()

    def connect(self, offer: bytes, peer_name: str, timeout_s: float) -> FakePeer:
        self.connects += 1
        assert timeout_s > 0
        if self.refuses_peers:
            raise TierIOError("connect by fake: no cable")
        return FakePeer(self, offer)

    def check(self) -> None:
        assert not self.closed or not self.memories

    def close(self) -> None:
        self.closed = True
        self.memories.clear()
        FakePlane.planes.pop(id(self), None)


class FakePeer(PlanePeer):
    """Reads end in a thread of their own, as a plane's do."""

    def __init__(self, plane: FakePlane, offer: bytes) -> None:
        self.name = plane.name
        self._plane = plane
        self._known: list[int] = []
        self._remote = -1
        self._pages = dict.fromkeys(PageOutcome, 0)
        self._bytes = 0
        self._open = 0
        self.closed = False
        self.refresh(offer)

    @property
    def broken(self) -> str | None:
        return "it was closed" if self.closed else self._plane.breaks

    def knows(self, generation: int) -> bool:
        return generation in self._known

    def read(
        self,
        generation: int,
        ranges: Sequence[PageRange],
        into: Sequence[memoryview],
        timeout_s: float,
    ) -> PeerRead:
        self._plane.reads += 1
        self._open += 1
        read = PeerRead(len(ranges))
        threading.Thread(target=self._run, args=(read, generation, ranges, into)).start()
        return read

    def _run(
        self,
        read: PeerRead,
        generation: int,
        ranges: Sequence[PageRange],
        into: Sequence[memoryview],
    ) -> None:
        memory = FakePlane.planes[self._remote].memories.get(generation)
        outcome = PageOutcome.GONE if memory is None else PageOutcome.OK
        if self._plane.fails or self.broken is not None:
            outcome = PageOutcome.FAILED
        elif memory is not None:
            for (offset, length), view in zip(ranges, into, strict=True):
                view[:] = memory[offset : offset + length]
                view[0] ^= self._plane.flips
                self._bytes += length
        self._pages[outcome] += len(ranges)
        self._open -= 1
        error = "read from peer by fake: of the test" if outcome is PageOutcome.FAILED else None
        read.settle(0, [outcome] * len(ranges), error)

    def refresh(self, offer: bytes) -> None:
        self._remote, self._known = json.loads(offer)

    def stats(self) -> PlanePeerStats:
        ok, gone, failed = (self._pages[outcome] for outcome in PageOutcome)
        return PlanePeerStats(self._open, ok, gone, failed, self._bytes, 0, 0)

    def check(self) -> None:
        assert self._bytes >= self._pages[PageOutcome.OK]

    def close(self) -> None:
        self.closed = True
