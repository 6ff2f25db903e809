"""A device that does what CUDA allows and no more than that, on one thread and from a seed.

Work put on a stream runs in its order, whenever the simulation feels like it: streams advance at
random, each can be held up for a while, and one move is torn into pieces between which other
streams run. Only events order streams. Waits can be left out by name, so that a test can show that
each is needed. The transfer code that runs over it is the real one (storage/transfer/streams.py).
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from tierkv.storage.device import address_of
from tierkv.storage.transfer.device_ops import DeviceOps, Wait
from tierkv.storage.transfer.pinned import PinnedRanges

POISON = 0xDB
PIECES_MAX = 4
COMPUTE = "compute"

Action = Callable[[], None]
Bytes = npt.NDArray[np.uint8]


@dataclass(eq=False)
class SimEvent:
    """Recorded on a stream; done once the stream has come to it."""

    done: bool = False


@dataclass(eq=False)
class SimStream:
    """Entries are pieces of work, events to set, and events to wait for."""

    name: str
    queue: deque[Action | SimEvent | tuple[SimEvent]] = field(default_factory=deque)
    held_up: int = 0

    @property
    def runnable(self) -> bool:
        if not self.queue:
            return False
        head = self.queue[0]
        return head[0].done if isinstance(head, tuple) else True


class SimulatedDevice:
    """Streams and their clock."""

    def __init__(self, rng: random.Random, skipped: frozenset[Wait] = frozenset()) -> None:
        self.rng = rng
        self.skipped = skipped
        self.streams: dict[str, SimStream] = {COMPUTE: SimStream(COMPUTE)}

    @property
    def compute(self) -> SimStream:
        return self.streams[COMPUTE]

    def put(self, stream: SimStream, pieces: list[Action]) -> None:
        """Put work on a stream: its pieces run in an order that nobody may rely on."""
        self.rng.shuffle(pieces)
        stream.queue.extend(pieces)

    def step(self) -> bool:
        """Run one entry of one stream; False when no stream can go on."""
        ready = [s for s in self.streams.values() if s.runnable]
        if not ready:
            return False
        for stream in ready:
            stream.held_up = max(0, stream.held_up - 1)
        free = [s for s in ready if s.held_up == 0] or ready
        stream = self.rng.choice(free)
        if self.rng.random() < 0.05:
            stream.held_up = self.rng.randrange(1, 40)
        entry = stream.queue.popleft()
        if isinstance(entry, SimEvent):
            entry.done = True
        elif callable(entry):
            entry()
        return True


class SimulatedOps(DeviceOps):
    """Device operations over `kv`, uint8 [planes, pages, row_bytes]."""

    @property
    def method(self) -> str:
        return "simulated"

    def __init__(
        self,
        device: SimulatedDevice,
        kv: Bytes,
        planes_per_layer: int,
        *,
        bounce_pages: int,
        failure_rate: float = 0.0,
    ) -> None:
        self.device = device
        self.kv = kv
        self.planes_per_layer = planes_per_layer
        self.layers = kv.shape[0] // planes_per_layer
        self.row_bytes = kv.shape[2]
        self.pages = kv.shape[1]
        self.failure_rate = failure_rate
        self.failures = 0
        self._bounce_pages = bounce_pages
        self._pinned = PinnedRanges(lambda address, size: None, lambda address: None, 4096)
        self._bounce: list[bytearray] = []

    def new_stream(self, name: str) -> SimStream:
        stream = SimStream(name)
        self.device.streams[name] = stream
        return stream

    def compute_stream(self) -> SimStream:
        return self.device.compute

    def record(self, stream: object) -> SimEvent:
        assert isinstance(stream, SimStream)
        event = SimEvent()
        stream.queue.append(event)
        return event

    def stream_wait(self, stream: object, event: object, why: Wait) -> None:
        assert isinstance(stream, SimStream)
        assert isinstance(event, SimEvent)
        if why not in self.device.skipped:
            stream.queue.append((event,))

    def event_done(self, event: object, why: Wait) -> bool:
        assert isinstance(event, SimEvent)
        return event.done or why in self.device.skipped

    def reachable(self, views: Sequence[memoryview]) -> bool:
        return all(self._pinned.covers(address_of(v), v.nbytes) for v in views)

    def bounce_halves(self, name: str) -> list[list[memoryview]]:
        halves = []
        for _ in range(2):
            buffer = bytearray([POISON]) * (self._bounce_pages * self.page_bytes)
            self._bounce.append(buffer)
            whole = memoryview(buffer)
            starts = range(0, len(buffer), self.page_bytes)
            halves.append([whole[start : start + self.page_bytes] for start in starts])
        return halves

    def step_layers(self, page_count: int, *, reachable: bool) -> int:
        return self.device.rng.randrange(1, self.layers + 1)

    def move_out(
        self, stream: object, pages: Sequence[int], views: Sequence[memoryview], planes: range
    ) -> None:
        self._move(stream, pages, views, planes, out=True)

    def move_in(
        self, stream: object, views: Sequence[memoryview], pages: Sequence[int], planes: range
    ) -> None:
        self._move(stream, pages, views, planes, out=False)

    def register(self, memory: memoryview, *, unit_bytes: int, first_bytes: int) -> int:
        return self._pinned.add(memory, unit_bytes=unit_bytes, first_bytes=first_bytes)

    def pinned_bytes(self) -> int:
        return self._pinned.nbytes

    def close(self) -> None:
        assert not any(s.queue for n, s in self.device.streams.items() if n != COMPUTE), (
            "closed with copies on the device"
        )
        self._pinned.close()

    def _move(
        self,
        stream: object,
        pages: Sequence[int],
        views: Sequence[memoryview],
        planes: range,
        *,
        out: bool,
    ) -> None:
        assert isinstance(stream, SimStream)
        rng = self.device.rng
        rows = [
            (self.kv[plane, page], payload[plane])
            for page, view in zip(pages, views, strict=True)
            for payload in [np.frombuffer(view, np.uint8).reshape(-1, self.row_bytes)]
            for plane in planes
        ]
        rng.shuffle(rows)
        count = min(len(rows), PIECES_MAX)
        pieces = [_copies(rows[i::count], out=out) for i in range(count)]
        if rng.random() < self.failure_rate:
            # A device may refuse in the middle of a group: what it took still runs.
            self.failures += 1
            self.device.put(stream, pieces[: rng.randrange(count + 1)])
            raise RuntimeError("simulated failure of a launch")
        self.device.put(stream, pieces)


def _copies(rows: list[tuple[Bytes, Bytes]], *, out: bool) -> Action:
    def run() -> None:
        for paged, payload in rows:
            if out:
                payload[:] = paged
            else:
                paged[:] = payload

    return run
