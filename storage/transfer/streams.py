"""Copies of page groups over two streams of a device: the one transfer, whatever the device.

Owns the two lanes, what a copy does step by step, and its waits (device_ops.Wait lists them). How
bytes move is the DeviceOps' business; which pages, the caller's.

    gather    demote stream waits for the pass so far; pages -> views; host waits; end
    scatter   restore stream waits for the pass so far; for each group of layers, in order:
              views -> pages, event for wait_layer(); host waits for the last; end

Host memory that the device cannot reach goes through a pinned bounce buffer of two halves: one is
on the device while the CPU copies the other. A copy that fails or is cancelled ends only when
what it had started has ended. Invariant: a CopyEvent is finished exactly once, and after it no
byte of the copy moves. Called by engine/serve/{offload,restore}.py; driven by lane.py.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from tierkv.storage.errors import TierClosedError, TierIOError, TierKVError, first_line
from tierkv.storage.transfer.base import (
    CLOSE_TIMEOUT_S,
    CopyEvent,
    LayeredCopy,
    Pages,
    PageTransfer,
    TransferStats,
)
from tierkv.storage.transfer.device_ops import DeviceOps, Wait
from tierkv.storage.transfer.lane import HostWait, Lane, LaneThread

log = logging.getLogger(__name__)

DEVICE_ERRORS = (RuntimeError, ValueError, IndexError, TypeError, OSError, BufferError, MemoryError)
"""What torch, cupy and numpy raise for a copy that cannot be made."""


@dataclass(slots=True)
class _Half:
    """Half of a bounce buffer: reachable page buffers, and the last event of their use."""

    views: list[memoryview]
    event: object | None = None


@dataclass(slots=True)
class _Counters:
    """Of one direction."""

    bytes: int = 0
    copies: int = 0
    waiting_bytes: int = 0
    failed: int = 0
    cancelled: int = 0
    bounced_pages: int = 0


class _CopyJob:
    """One gather or scatter. `event` ends when the job does."""

    def __init__(
        self,
        owner: StreamTransfer,
        lane: Lane,
        stream: object,
        pages: list[int],
        views: list[memoryview],
        counters: _Counters,
    ) -> None:
        self._owner = owner
        self._ops = owner.ops
        self._lane = lane
        self._stream = stream
        self.fence: object = None
        """The compute stream's end when the copy was asked for; set before the job begins."""
        self._pages = pages
        self._views = views
        self._counters = counters
        self.event = self._new_event()

    def _new_event(self) -> CopyEvent:
        return CopyEvent()

    def run(self) -> Generator[HostWait]:
        """Copy, then end the event; what goes wrong becomes its error."""
        try:
            self._check_lengths()
            yield from self._copy()
        except TierKVError as error:
            yield from self._fail(error)
        except DEVICE_ERRORS as error:
            yield from self._fail(
                TierIOError(f"copy {len(self._pages)} pages: {first_line(error)}")
            )
        else:
            self._end(None)

    def abandon(self, reason: str) -> None:
        self._end(TierIOError(f"copy {len(self._pages)} pages: {reason}"))

    def _copy(self) -> Generator[HostWait]:
        raise AssertionError("each direction has its own")

    def _check_lengths(self) -> None:
        wrong = next((v for v in self._views if v.nbytes != self._ops.page_bytes), None)
        if wrong is not None:
            raise ValueError(
                f"a view has {wrong.nbytes} bytes, a page {self._ops.page_bytes}; "
                "the store was opened for another model"
            )

    def _fail(self, error: TierKVError) -> Generator[HostWait]:
        """End with an error once nothing of the copy can touch pages or views any more."""
        try:
            # What is on the stream may still run: its pages and views are not free before it.
            yield HostWait(self._ops.record(self._stream), Wait.FAILED)
        except DEVICE_ERRORS as second:
            # The context is lost, and with it every copy under way.
            self._owner.mark_broken(f"the device takes no work any more ({first_line(second)})")
        self._end(error)

    def _end(self, error: TierKVError | None) -> None:
        page_bytes = len(self._pages) * self._ops.page_bytes
        self._owner.note_end(self._counters, page_bytes, error, self._cancelled())
        self._views = []
        self.event.finish(error)

    def _cancelled(self) -> bool:
        return False

    def _groups(self, size: int) -> Iterator[tuple[list[int], list[memoryview]]]:
        for start in range(0, len(self._pages), size):
            yield self._pages[start : start + size], self._views[start : start + size]


class _Gather(_CopyJob):
    """Pages to views."""

    def _copy(self) -> Generator[HostWait]:
        ops, stream = self._ops, self._stream
        ops.stream_wait(stream, self.fence, Wait.FORWARD_PASS)
        planes = range(ops.layers * ops.planes_per_layer)
        if ops.reachable(self._views):
            ops.move_out(stream, self._pages, self._views, planes)
            yield HostWait(ops.record(stream), Wait.GATHERED, last=True)
            return
        self._counters.bounced_pages += len(self._pages)
        halves = self._owner.bounce_out
        pending: deque[tuple[_Half, list[memoryview]]] = deque()
        for number, (pages, views) in enumerate(self._groups(len(halves[0].views))):
            if len(pending) == len(halves):
                yield from self._land(*pending.popleft())
            half = halves[number % len(halves)]
            ops.move_out(stream, pages, half.views[: len(pages)], planes)
            half.event = ops.record(stream)
            pending.append((half, views))
        while pending:
            yield from self._land(*pending.popleft())

    def _land(self, half: _Half, views: list[memoryview]) -> Generator[HostWait]:
        yield HostWait(half.event, Wait.BOUNCE_OUT)
        for view, bounce in zip(views, half.views, strict=False):
            copy_bytes(view, bounce)


class _Scatter(_CopyJob):
    """Views to pages, a few layers at a time."""

    event: LayeredCopy

    def _new_event(self) -> LayeredCopy:
        return LayeredCopy(self._fence_layer, self._cancel)

    def _copy(self) -> Generator[HostWait]:
        ops, stream = self._ops, self._stream
        ops.stream_wait(stream, self.fence, Wait.LAST_READER)
        reachable = ops.reachable(self._views)
        if not reachable:
            self._counters.bounced_pages += len(self._pages)
        step = ops.step_layers(len(self._pages), reachable=reachable)
        done: object = None
        for first in range(0, ops.layers, step):
            if self.event.cancel_requested:
                raise TierIOError(f"restore {len(self._pages)} pages: cancelled at layer {first}")
            end = min(first + step, ops.layers)
            planes = range(first * ops.planes_per_layer, end * ops.planes_per_layer)
            if reachable:
                ops.move_in(stream, self._views, self._pages, planes)
            else:
                yield from self._bounce_in(planes)
            done = ops.record(stream)
            self.event.step_issued(end, done)
        yield HostWait(done, Wait.SCATTERED, last=True)

    def _bounce_in(self, planes: range) -> Generator[HostWait]:
        ops = self._ops
        halves = self._owner.bounce_in
        piece = slice(planes.start * ops.row_bytes, planes.stop * ops.row_bytes)
        for pages, views in self._groups(len(halves[0].views)):
            # The one that was used longest ago, over the ends of steps and of jobs.
            half = halves[0]
            halves.reverse()
            if half.event is not None:
                yield HostWait(half.event, Wait.BOUNCE_IN)
            for view, bounce in zip(views, half.views, strict=False):
                copy_bytes(bounce[piece], view[piece])
            ops.move_in(self._stream, half.views[: len(pages)], pages, planes)
            half.event = ops.record(self._stream)

    def _fence_layer(self, event: object) -> None:
        self._ops.stream_wait(self._ops.compute_stream(), event, Wait.LAYER)

    def _cancel(self, copy: LayeredCopy) -> bool:
        if not self._lane.take_back(self):
            return False
        self.abandon("cancelled before it began")
        return True

    def _cancelled(self) -> bool:
        return self.event.cancel_requested


class StreamTransfer(PageTransfer):
    """Transfer over any DeviceOps, which it owns and closes."""

    def __init__(self, ops: DeviceOps, *, threads: bool = True) -> None:
        """`threads=False`: the caller drives `lanes` by pump(), on one thread."""
        self.ops = ops
        self.page_bytes = ops.page_bytes
        self.layers = ops.layers
        self.bounce_out = [_Half(views) for views in ops.bounce_halves("out")]
        self.bounce_in = [_Half(views) for views in ops.bounce_halves("in")]
        self.out_stream = ops.new_stream("demote")
        self.in_stream = ops.new_stream("restore")
        self._out = Lane("demote", ops.event_done)
        self._in = Lane("restore", ops.event_done)
        self.lanes = (self._out, self._in)
        self._lock = threading.Lock()
        self._closed = False
        self._broken: str | None = None
        self._out_counters = _Counters()
        self._in_counters = _Counters()
        self._threads = [LaneThread(lane, self.mark_broken) for lane in self.lanes if threads]

    def gather(self, pages: Pages, views: Sequence[memoryview]) -> CopyEvent:
        indexes, tied = _indexes(pages, views)
        counters = self._out_counters
        self._refuse_if_over()
        job = _Gather(self, self._out, self.out_stream, indexes, list(views), counters)
        self._begin(job, self._out, counters, len(indexes), tied)
        return job.event

    def scatter(self, views: Sequence[memoryview], pages: Pages) -> LayeredCopy:
        indexes, tied = _indexes(pages, views)
        counters = self._in_counters
        self._refuse_if_over()
        job = _Scatter(self, self._in, self.in_stream, indexes, list(views), counters)
        self._begin(job, self._in, counters, len(indexes), tied)
        return job.event

    def register(
        self, memory: memoryview, *, unit_bytes: int | None = None, first_bytes: int = 0
    ) -> int:
        return self.ops.register(
            memory, unit_bytes=unit_bytes or memory.nbytes, first_bytes=first_bytes
        )

    def stats(self) -> TransferStats:
        out, into = self._out_counters, self._in_counters
        with self._lock:
            return TransferStats(
                method=self.ops.method,
                pinned_bytes=self.ops.pinned_bytes(),
                out_bytes=out.bytes,
                in_bytes=into.bytes,
                out_copies=out.copies,
                in_copies=into.copies,
                failed=out.failed + into.failed,
                cancelled=out.cancelled + into.cancelled,
                bounced_pages=out.bounced_pages + into.bounced_pages,
                out_bytes_waiting=out.waiting_bytes,
                in_bytes_waiting=into.waiting_bytes,
                broken=self._broken,
            )

    def check(self) -> None:
        with self._lock:
            for counters, lane in zip(
                (self._out_counters, self._in_counters), self.lanes, strict=True
            ):
                assert counters.waiting_bytes >= 0, f"{lane.name}: more ended than began"
                assert not lane.idle or counters.waiting_bytes == 0, f"{lane.name}: a copy is lost"

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
        ended = [thread.stop(timeout_s) for thread in self._threads]
        for lane in self.lanes:
            lane.abandon_queue("the transfer was closed")
        if all(ended) and all(lane.idle for lane in self.lanes):
            self.ops.close()
        else:
            # Unregistering memory under a running copy would be worse than keeping it.
            log.error("transfer=%s closed=no reason=copies_under_way", self.ops.method)

    def mark_broken(self, reason: str) -> None:
        """Refuse every later copy, with this reason. Called when the device has failed."""
        with self._lock:
            if self._broken is not None:
                return
            self._broken = reason
        log.error("transfer=%s broken=%s", self.ops.method, reason)

    def note_end(
        self, counters: _Counters, page_bytes: int, error: TierKVError | None, cancelled: bool
    ) -> None:
        """Called by a job that ends, before its event is set."""
        with self._lock:
            counters.waiting_bytes -= page_bytes
            counters.copies += 1
            if error is None:
                counters.bytes += page_bytes
            elif cancelled:
                counters.cancelled += 1
            else:
                counters.failed += 1

    def _refuse_if_over(self) -> None:
        if self._closed:
            raise TierClosedError("copy pages: the transfer is closed")

    def _begin(
        self,
        job: _Gather | _Scatter,
        lane: Lane,
        counters: _Counters,
        page_count: int,
        tied: Pages | None,
    ) -> None:
        if tied is not None and not isinstance(tied, Sequence):
            tied.attach(job.event)
        try:
            job.fence = self.ops.record(self.ops.compute_stream())
        except DEVICE_ERRORS as error:
            # The caller's pages are under copy by now: the copy must end, not its call.
            self.mark_broken(f"the device takes no work any more ({first_line(error)})")
        with self._lock:
            counters.waiting_bytes += page_count * self.page_bytes
            refusal = self._broken
            if refusal is None and self._closed:
                refusal = "the transfer was closed"
            if refusal is None:
                lane.submit(job)
        if refusal is not None:
            job.abandon(refusal)


def _indexes(pages: Pages, views: Sequence[memoryview]) -> tuple[list[int], Pages | None]:
    """Page indexes, and the token to tie to the copy if there is one."""
    if isinstance(pages, Sequence):
        indexes, tied = list(pages), None
    else:
        indexes, tied = pages.page_list(), pages
    assert len(indexes) == len(views), f"{len(indexes)} pages for {len(views)} views"
    return indexes, tied


def copy_bytes(target: memoryview, source: memoryview) -> None:
    """Copy equal lengths between host buffers; numpy lets go of the GIL meanwhile."""
    np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))
