"""The contract of what lies beyond the node: a store's remote tier.

Owns no state but the handle of one page on its way here (Pull). A remote tier is not a Tier: asking
it takes a network, so nothing of it may be waited for by whoever holds the store's lock. What it
knows without asking is `holds`; everything else is queued and ends by callback. Implementations:
storage/pool (nodes of ours), storage/mooncake (an existing store); each passes
tests/unit/storage/remote_conformance.py. Called by storage.store, storage.promotion and
storage.demotion.

    pull state   who holds its slot        leaves by
    QUEUED       the remote                worker takes it -> RUNNING; cancel, close -> CANCELLED;
                                           deadline passed -> FAILED
    RUNNING      the remote                bytes verified and committed -> LANDED
                                           nobody has the page -> MISSED
                                           key, length or checksum wrong -> CORRUPT
                                           no answer, late, no room in host -> FAILED
                                           another holder is to be asked -> QUEUED
    LANDED, MISSED, CORRUPT, FAILED, CANCELLED      final; the slot is given back or committed

Invariants: an accepted pull ends exactly once; its slot stays reserved while a byte may still be
written into it, however late; a page is committed only after its checksum was compared with the
bytes that arrived. Lock order: the store's lock, then the remote's own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from enum import Enum
from typing import Protocol

from tierkv.storage.bandwidth import TransferMeter
from tierkv.storage.base import (
    Fetch,
    MappedTier,
    RemoteStats,
    Reservation,
    StoreReservation,
    StoreStats,
)
from tierkv.storage.quota import Quota
from tierkv.storage.types import PageKey

__all__ = ["FINAL", "POOL_OWNER", "LocalStore", "Pull", "PullState", "Remote", "RemoteStats"]

POOL_OWNER = 2**32 - 1
"""Owner of the pages that a node keeps for others. Never a namespace's number."""


class PullState(Enum):
    """See the table at the top."""

    QUEUED = "queued"
    RUNNING = "running"
    LANDED = "landed"
    MISSED = "missed"
    CORRUPT = "corrupt"
    FAILED = "failed"
    CANCELLED = "cancelled"


FINAL = frozenset(PullState) - {PullState.QUEUED, PullState.RUNNING}


class Pull:
    """One page on its way into one reserved host slot. Read-only for all but the remote."""

    __slots__ = ("deadline", "future", "key", "owner", "state", "target")

    def __init__(
        self,
        key: PageKey,
        owner: int,
        deadline: float,
        target: Reservation,
        on_end: Callable[[Pull], None],
    ) -> None:
        """`target` is one host slot, the remote's from submit() on. `deadline`: in seconds of the
        store's clock; it may be moved later while the pull is queued. `on_end` is called once, in
        a worker or in the thread that cancels, after the slot was given back or committed."""
        assert len(target) == 1, "a pull fills one slot"
        self.key = key
        self.owner = owner
        """Whose page it is to be in host."""
        self.deadline = deadline
        self.target = target
        self.state = PullState.QUEUED
        self.future: Future[Pull] = Future()
        # The library logs what a callback raises and goes on with the next one.
        self.future.add_done_callback(lambda _: on_end(self))


class LocalStore(Protocol):
    """What a remote tier may ask of the store it belongs to. All methods are thread-safe."""

    page_bytes: int

    @property
    def host(self) -> MappedTier:
        """Where pulls land: payload(), seal(), commit() and release() of their targets, and what
        has no side effects."""
        ...

    def stats(self) -> StoreStats:
        """PageStore.stats."""
        ...

    def lookup_here(self, keys: Sequence[PageKey]) -> list[bool]:
        """Whether each page is in host or nvme. No side effects, no network."""
        ...

    def keys_here(self) -> list[PageKey]:
        """Every page in host or nvme, once; host's first, coldest first in each. O(capacity)."""
        ...

    def fetch(
        self,
        keys: Sequence[PageKey],
        deadline_s: float,
        *,
        verify: bool | None = None,
        owner: int = 0,
        here: bool = False,
        quiet: bool = False,
    ) -> Fetch:
        """PageStore.fetch; with `here`, what host and nvme have, without asking the remote.

        That is for the remote's own reading: it refreshes recency unless `quiet`, but is no use
        of the pages and makes no offer.
        """
        ...

    def let_go(self, keys: Sequence[PageKey]) -> int:
        """Drop the host copies of pages that are in nvme too and that nobody holds; returns how
        many. For what came up only to be copied elsewhere."""
        ...

    def reserve(self, count: int, owner: int = 0) -> StoreReservation:
        """PageStore.reserve. Pages kept for others are reserved and committed as POOL_OWNER."""
        ...

    def set_quota(self, owner: int, quota: Quota | None) -> None:
        """Bound what an owner may use, here: what others may use of this node."""
        ...

    def arena_memory(self) -> memoryview:
        """All of the host arena, for registering; borrowed until the remote's close() returns."""
        ...

    def payload_offset(self, slot: int) -> int:
        """Where the payload of a host slot begins in arena_memory(), in bytes."""
        ...


class Remote(ABC):
    """Pages elsewhere, of one store's page size. All methods are thread-safe.

    `holds`, `submit`, `cancel`, `offer`, `gained` and `lost` are called with the store's lock
    held: they never wait, never do I/O and never call the store back but through `on_end` of a
    pull that they end.
    """

    lookup_waits: bool
    """Whether ask() may learn something: then a lookup calls it, with no lock held."""

    @abstractmethod
    def bind(self, store: LocalStore, reads: TransferMeter, writes: TransferMeter) -> None:
        """Become the remote tier of `store`, once, before anything else. `reads` and `writes`
        are to be told of every transfer. Raises what opening raises: ConfigError and its kinds.
        """

    @abstractmethod
    def holds(self, keys: Sequence[PageKey]) -> list[bool]:
        """Whether each page is somewhere that can be asked now, as far as is known here.

        May be wrong both ways: a pull says what is true. All False while nobody can be asked.
        """

    @abstractmethod
    def ask(self, keys: Sequence[PageKey], timeout_s: float) -> None:
        """Refresh what holds() knows of `keys`. Waits at most `timeout_s`; raises nothing."""

    @abstractmethod
    def submit(self, pulls: Sequence[Pull]) -> int:
        """Take over the leading pulls, as many as the queue has room for; returns how many.

        The pulls of one call belong to one request, in the order of its pages.
        """

    @abstractmethod
    def cancel(self, pull: Pull) -> bool:
        """End a pull that is still queued; False when it runs or has ended. O(queue)."""

    @abstractmethod
    def offer(self, keys: Sequence[PageKey], uses: Sequence[int], owner: int) -> None:
        """Tell of pages in host that were committed or used: the remote may want copies.

        `uses`: an estimate of how often each was used, its commit counted once.
        """

    @abstractmethod
    def gained(self, keys: Sequence[PageKey]) -> None:
        """Pages became visible in host."""

    @abstractmethod
    def lost(self, keys: Sequence[PageKey]) -> None:
        """Pages left a tier of the store; they may be in another one still."""

    @abstractmethod
    def flush(self, timeout_s: float) -> bool:
        """Wait until every copy that was wanted so far has been acknowledged; False past the
        timeout or when one could not be made."""

    @abstractmethod
    def wait_quiet(self, timeout_s: float) -> bool:
        """Wait until no pull and no push is queued or running; False past the timeout."""

    @property
    @abstractmethod
    def quiet(self) -> bool:
        """True when no pull is queued or running, and no slot is held for one."""

    @abstractmethod
    def stats(self) -> RemoteStats:
        """Counters, consistent with each other. O(1)."""

    @abstractmethod
    def check(self) -> None:
        """Assert the invariants. O(queued)."""

    @abstractmethod
    def close(self, timeout_s: float) -> bool:
        """End queued pulls, stop serving this store's pages to others and let its memory go.

        False when something may still write into or read from the arena: the memory must stay
        then. Idempotent: a later call waits again.
        """
