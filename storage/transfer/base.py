"""The contract for copies between a device's paged KV pool and page payloads in host memory.

Owns no pages: the caller says which pages and which host views take part. What keeps a page from
being freed or written while it is copied is its token (`PagesUnderCopy`, made by the page pool):
the transfer ties the copy's end to the token, and the pool takes no page back before it. Host
views stay the caller's: it may neither write nor release them before the copy's end.

    waiting ──► issued ──► ended           error is None
       │           └─────► ended           error says why; nothing writes to the pages any more
       └─cancel()────────► ended           nothing was written

Implementations: streams.py over a DeviceOps (cpu.py, cuda.py, the tests' simulated device).
Called by engine/serve/{offload,restore}.py.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from tierkv.storage.errors import TierIOError, TierKVError

CLOSE_TIMEOUT_S = 30.0
"""Longest wait of close() for copies under way."""


class Completion(Protocol):
    """What a token of pages under copy needs to know of the copy."""

    @property
    def done(self) -> bool:
        """True once the copy has ended, well or badly."""
        ...


class PagesUnderCopy(Protocol):
    """Pool pages that nobody can free until the copy they are handed to has ended."""

    def page_list(self) -> list[int]:
        """Their indexes."""
        ...

    def attach(self, completion: Completion) -> None:
        """Tie the pages to one copy; called once, by the transfer."""
        ...


Pages = Sequence[int] | PagesUnderCopy
"""Bare indexes are for pages that something else protects (a lock in the tree) or for tests."""


class CopyEvent:
    """Completion of one copy. Set once by the transfer, waited on by anybody. Thread-safe."""

    __slots__ = ("_callbacks", "_changed", "_error", "_set")

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._set = False
        self._error: TierKVError | None = None
        self._callbacks: list[Callable[[CopyEvent], None]] = []

    @property
    def done(self) -> bool:
        """True once the copy has ended, well or badly: no byte of it moves any more."""
        return self._set

    @property
    def error(self) -> TierKVError | None:
        """Why the copy failed; None when it went well or has not ended."""
        return self._error

    def wait(self, timeout_s: float) -> bool:
        """Wait at most `timeout_s`; True when the copy has ended."""
        with self._changed:
            return self._changed.wait_for(lambda: self._set, max(0.0, timeout_s))

    def add_done_callback(self, callback: Callable[[CopyEvent], None]) -> None:
        """Call `callback(self)` once when the copy ends, from the thread that ends it; at once
        when it has ended already."""
        with self._changed:
            if not self._set:
                self._callbacks.append(callback)
                return
        callback(self)

    def finish(self, error: TierKVError | None = None) -> None:
        """Called by the transfer, once."""
        with self._changed:
            assert not self._set, "a copy ends once"
            self._error = error
            self._set = True
            self._changed.notify_all()
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback(self)


class LayeredCopy(CopyEvent):
    """A copy into pool pages that arrives layer by layer, in layer order."""

    __slots__ = ("_cancel", "_fence", "_steps", "cancel_requested")

    def __init__(
        self, fence: Callable[[object], None], cancel: Callable[[LayeredCopy], bool]
    ) -> None:
        """`fence(event)` makes the caller's compute stream wait for a step's device event;
        `cancel(copy)` takes the copy out of the queue if it is still there."""
        super().__init__()
        self._fence = fence
        self._cancel = cancel
        self._steps: list[tuple[int, object]] = []
        self.cancel_requested = False

    @property
    def layers_issued(self) -> int:
        """Layers whose copy has been handed to the device; wait_layer() of these never blocks."""
        return self._steps[-1][0] if self._steps else 0

    def wait_layer(self, layer: int, timeout_s: float) -> None:
        """Order the compute stream of the calling thread behind the arrival of one layer.

        On CUDA the host waits only until the layer's copy has been issued, and the device for
        its end; on the CPU the host waits for the bytes. On return, work launched on that stream
        may read this layer of the pages. Raises TierIOError when the copy failed or was cancelled
        before this layer, or when it was not issued within `timeout_s`: the pass that needs it
        must be given up.
        """
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while self.layers_issued <= layer and not self._set:
                rest = deadline - time.monotonic()
                if rest <= 0 or not self._changed.wait(rest):
                    break
            if self._set and self._error is None:
                return
            step = next((event for end, event in self._steps if end > layer), None)
            if self._error is not None or step is None:
                raise TierIOError(
                    f"restore layer {layer}: "
                    f"{self._error or f'not there within {timeout_s:.3g} s'}; compute it instead"
                )
        self._fence(step)

    def cancel(self) -> bool:
        """Give the copy up. True: it had not started, has ended now, and wrote nothing.

        False: it runs or has ended; a running one stops at the next layer step and ends with an
        error. The pages stay under copy until then, as always.
        """
        self.cancel_requested = True
        return self._cancel(self)

    def step_issued(self, layers_end: int, event: object) -> None:
        """Called by the transfer: layers below `layers_end` are there once `event` is done."""
        with self._changed:
            assert layers_end > self.layers_issued, "layers are issued in order"
            self._steps.append((layers_end, event))
            self._changed.notify_all()


@dataclass(frozen=True, slots=True)
class TransferStats:
    """One transfer at one moment; counters from its opening."""

    method: str
    """How bytes move: "cpu", "kernel" (a kernel reads and writes pinned host memory) or "copies"
    (staging on the device and one copy a page)."""
    pinned_bytes: int
    """Host memory registered with the device."""
    out_bytes: int
    in_bytes: int
    out_copies: int
    in_copies: int
    failed: int
    cancelled: int
    bounced_pages: int
    """Pages that went through the transfer's own pinned buffer because their host memory is not
    registered: one more copy by the CPU."""
    out_bytes_waiting: int
    in_bytes_waiting: int
    """Bytes of copies that were asked for and have not ended."""
    broken: str | None
    """None while the device answers; else one line. Every later copy fails at once."""


class PageTransfer(ABC):
    """Asynchronous copies for one paged pool. Methods are called from the engine thread.

    Copies in one direction end in the order they were started; the two directions are unordered.
    Both wait for work already queued on the compute stream at the time of the call: a gather for
    the forward pass that wrote the pages, a scatter for the last one that read them.
    """

    page_bytes: int
    layers: int

    @abstractmethod
    def gather(self, pages: Pages, views: Sequence[memoryview]) -> CopyEvent:
        """Copy pool page `pages[i]` into `views[i]` (page_bytes long, writable), for all i.

        Payload order is that of docs/formats/page.md. The views hold the bytes, for any reader,
        once the event is done without error. Raises TierClosedError after close().
        """

    @abstractmethod
    def scatter(self, views: Sequence[memoryview], pages: Pages) -> LayeredCopy:
        """Copy `views[i]` into pool page `pages[i]`, for all i, layer by layer.

        Attention may read the pages once the event is done without error, or layer i of them
        after wait_layer(i). Raises TierClosedError after close().
        """

    @abstractmethod
    def register(
        self, memory: memoryview, *, unit_bytes: int | None = None, first_bytes: int = 0
    ) -> int:
        """Let the device reach this host memory itself; return how many bytes of it it can.

        For the host arena, once, before the first copy: views outside registered memory work,
        with one more copy by the CPU. `first_bytes`, then whole units (slots): no registration
        ends inside one. Refusals are logged with what to change. No reference is kept; the memory
        must stay mapped until close(). O(bytes): the system locks every page.
        """

    @abstractmethod
    def stats(self) -> TransferStats:
        """Counters now. O(1), from any thread."""

    @abstractmethod
    def check(self) -> None:
        """Assert that counters and queues agree. For tests and idle moments."""

    @abstractmethod
    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """End the copies under way and stop, within a bound. Idempotent.

        Called before the host memory that was registered is unmapped.
        """
