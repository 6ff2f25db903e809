"""The few things a transfer asks of a device: streams, events and moves of groups of pages.

Owns no state. A stream runs what was put on it in order; nothing orders two streams but an event
that one records and the other (or the host) waits for. Every wait carries its reason, so that the
simulated device of the tests can leave one out and show that something breaks. Implementations:
HostOps (cpu.py), CudaOps (cuda.py), SimulatedOps (tests/support/simulated_device.py).

Streams and events are opaque to the transfer: it passes them back to the device they came from.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from enum import Enum

from tierkv.storage.errors import ConfigError


class Wait(Enum):
    """Every wait on the data path, and what goes wrong without it."""

    FORWARD_PASS = "forward_pass"
    """Demote stream for the pass that wrote the pages: else half-written KV is stored."""
    LAST_READER = "last_reader"
    """Restore stream for work queued before, which may still read or write what the pages held:
    else a running pass reads another prefix's KV."""
    LAYER = "layer"
    """Compute stream for the arrival of a layer: else attention reads what was there before."""
    GATHERED = "gathered"
    """Host for the end of a gather: else the page is handed out, or the payload published, too
    early."""
    SCATTERED = "scattered"
    """Host for the end of a scatter: else the host page is evicted under the copy."""
    BOUNCE_OUT = "bounce_out"
    """Host for the bytes in the bounce buffer, before it copies them on."""
    BOUNCE_IN = "bounce_in"
    """Host for the copy out of the bounce buffer, before it fills it again."""
    FAILED = "failed"
    """Host for what a failed or cancelled copy had started: else pages are let go under it."""


class DeviceOps(ABC):
    """One device and its paged KV. Methods are called from the engine thread and the two copy
    threads; a stream is used by one thread at a time."""

    layers: int
    planes_per_layer: int
    row_bytes: int
    pages: int
    """Pages of the pool."""

    @property
    def page_bytes(self) -> int:
        return self.layers * self.planes_per_layer * self.row_bytes

    @property
    @abstractmethod
    def method(self) -> str:
        """How bytes move now, for people."""

    @property
    def methods(self) -> tuple[str, ...]:
        """Ways to move bytes that this machine has."""
        return (self.method,)

    def choose(self, out_method: str, in_method: str) -> None:
        """Use these from now on; no copy is under way. ConfigError for one it does not have."""
        for name in (out_method, in_method):
            if name not in self.methods:
                raise ConfigError(
                    f"choose transfer method {name!r}: this machine has {', '.join(self.methods)}"
                )

    @abstractmethod
    def new_stream(self, name: str) -> object:
        """A stream of the lowest priority."""

    @abstractmethod
    def compute_stream(self) -> object:
        """The stream that the calling thread's forward pass uses."""

    @abstractmethod
    def record(self, stream: object) -> object:
        """An event that is done when everything on `stream` up to now is."""

    @abstractmethod
    def stream_wait(self, stream: object, event: object, why: Wait) -> None:
        """Let later work on `stream` begin only after `event`; the host does not wait."""

    @abstractmethod
    def event_done(self, event: object, why: Wait) -> bool:
        """Whether the event is done, so that the host may act on it. Never blocks."""

    @abstractmethod
    def reachable(self, views: Sequence[memoryview]) -> bool:
        """True when the device can read and write all these views itself."""

    @abstractmethod
    def bounce_halves(self, name: str) -> list[list[memoryview]]:
        """Two groups of reachable page buffers for one direction, of equal length, at least one
        page each."""

    @abstractmethod
    def step_layers(self, page_count: int, *, reachable: bool) -> int:
        """Layers to move at once so that a step is worth its launch; at least 1."""

    @abstractmethod
    def move_out(
        self, stream: object, pages: Sequence[int], views: Sequence[memoryview], planes: range
    ) -> None:
        """Put on `stream`: planes of pool pages into their places of the reachable views.

        Raises RuntimeError when the device refuses; nothing more was put on the stream then.
        """

    @abstractmethod
    def move_in(
        self, stream: object, views: Sequence[memoryview], pages: Sequence[int], planes: range
    ) -> None:
        """Put on `stream`: planes of the reachable views into pool pages. Errors as move_out()."""

    @abstractmethod
    def register(self, memory: memoryview, *, unit_bytes: int, first_bytes: int) -> int:
        """Make host memory reachable; bytes that could be. See PageTransfer.register()."""

    @abstractmethod
    def pinned_bytes(self) -> int:
        """Host memory registered now."""

    @abstractmethod
    def close(self) -> None:
        """Let registrations and buffers go; no copy is under way. Idempotent."""
