"""The two storage contracts: Tier (one medium) and PageStore (the tiers put together).

Owns no state. Pages are opaque bytes under opaque keys: nothing here knows tokens, layers or
models. Implementations: storage/tiers/*.py for Tier; storage/store.py for PageStore. Every Tier
passes tests/unit/storage/tier_conformance.py.

Life of a slot, the same in every tier:

    state        who may touch it        leaves by
    FREE         nobody                  reserve
    RESERVED     the reservation's       commit -> COMMITTED (or FREE when EXISTS / FAILED)
                 holder, write only      release -> FREE
    COMMITTED    anybody, read only      evict, drop -> FREE (never while leased)
                                         failed check -> QUARANTINED
    QUARANTINED  nobody                  close (the medium is suspect; counted)

At any time free + reserved + committed + quarantined == capacity, and `check()` says so.

Every page carries an owner, a 32-bit tag chosen by whoever stores it (0: none). It says on whose
behalf the page is kept, moves with the page from tier to tier and survives what the page
survives. Tiers count pages by owner and can be asked to evict only some owners' pages; what an
owner may use is decided above them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from tierkv.storage.types import Buffer, CommitOutcome, PageKey, ReadOutcome, SlotId, TierName


@dataclass(frozen=True, slots=True)
class TierStats:
    """One tier at one moment. Counters run from the tier's opening; sizes are what is there."""

    name: TierName
    page_bytes: int
    slot_bytes: int
    """Bytes one page occupies in this tier, header and rounding included."""
    capacity_pages: int
    free_pages: int
    reserved_pages: int
    committed_pages: int
    leased_pages: int
    """Committed pages that at least one lease holds."""
    quarantined_pages: int
    hits: int
    """Pages handed out by lease()."""
    misses: int
    """Keys asked of lease() and not handed out."""
    writes: int
    """Pages committed."""
    duplicates: int
    evictions: int
    corrupt: int
    """Pages that failed key, length or checksum."""
    io_errors: int
    rejected: int
    """Writes refused or lost, whatever the reason; never silent."""
    recovered_pages: int
    """Pages found again when the tier was opened."""
    degraded: str | None
    """None when healthy; else one line that says why writes or reads are refused now."""


class Held(ABC):
    """Something that is given back: by release(), or by leaving its with block."""

    __slots__ = ()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()

    @abstractmethod
    def release(self) -> None:
        """Give it back. Idempotent."""


class Reservation(Held):
    """Slots that their holder may write and nobody can read. A context manager.

    Leaving the block without commit gives the slots back. Not thread-safe as a whole, but
    different indexes may be written from different threads.
    """

    __slots__ = ("_tier", "open", "slots")

    def __init__(self, tier: Tier, slots: list[SlotId]) -> None:
        self._tier = tier
        self.slots = slots
        self.open = True

    def __len__(self) -> int:
        return len(self.slots)

    def release(self) -> None:
        """Give uncommitted slots back. Safe to call twice and after commit."""
        if self.open:
            self._tier.release(self)


class Lease(Held):
    """Committed pages that cannot be evicted while it is held. A context manager."""

    __slots__ = ("_tier", "checksums", "keys", "open", "owners", "slots")

    def __init__(
        self,
        tier: Tier,
        keys: list[PageKey],
        slots: list[SlotId],
        checksums: list[bytes],
        owners: list[int],
    ) -> None:
        self._tier = tier
        self.keys = keys
        self.slots = slots
        self.checksums = checksums
        """One per page, as recorded when it was written: pass it on to the next tier."""
        self.owners = owners
        """One per page, as committed: pass it on to the next tier."""
        self.open = True

    def __len__(self) -> int:
        return len(self.slots)

    def release(self) -> None:
        """Let the pages go. Safe to call twice."""
        if self.open:
            self._tier.release(self)


class Tier(ABC):
    """Fixed-size pages on one medium. All methods are thread-safe; none holds a lock over I/O.

    One tier holds one size class: every payload is exactly `page_bytes` long.
    """

    name: TierName
    page_bytes: int

    @abstractmethod
    def lookup(self, keys: Sequence[PageKey]) -> list[bool]:
        """Say for each key whether a committed page is there. No side effects, no recency."""

    @abstractmethod
    def reserve(self, count: int) -> Reservation:
        """Take up to `count` free slots. Never evicts, never waits: may be shorter, even empty.

        Empty as well when the tier is degraded for writing.
        """

    @abstractmethod
    def write(
        self,
        reservation: Reservation,
        index: int,
        payload: Buffer,
        checksum: bytes | None = None,
        *,
        key: PageKey | None = None,
        owner: int = 0,
    ) -> None:
        """Copy `payload` (page_bytes long) into the reserved slot at `index`.

        `checksum` is the payload's known digest when it comes from another tier; it is stored
        as it is, so that corruption on the way is found at the next read. None: computed here.
        `key` and `owner`, when known already, are what the page will be committed under: they
        save a tier the second header write. Only commit() decides, and may name others.
        Raises ValueError on a wrong length, TierFullError or TierIOError when the device
        refuses; the reservation stays open and the slot can be written again or released.
        """

    @abstractmethod
    def commit(
        self,
        reservation: Reservation,
        keys: Sequence[PageKey],
        owners: Sequence[int] | int = 0,
    ) -> list[CommitOutcome]:
        """Make the first len(keys) slots visible under `keys`, in one step, and close it.

        `owners`: one u32 for all pages, or one per key. A page that EXISTS keeps its owner.
        ValueError, and nothing done, when a key or an owner cannot be one. Slots past len(keys)
        are freed. When this returns, COMMITTED pages survive what the
        tier survives (host: death of the process; nvme: power loss).
        """

    @abstractmethod
    def lease(self, keys: Sequence[PageKey], *, quiet: bool = False) -> Lease:
        """Pin the longest leading run of `keys` that is committed. May be empty.

        Counts hits and misses and refreshes recency of the pages handed out, unless `quiet`:
        for the mover, the scrubber and other readers that say nothing about demand.
        """

    @abstractmethod
    def read(self, lease: Lease, index: int, out: memoryview) -> ReadOutcome:
        """Copy the leased page at `index` into `out` (page_bytes long, writable), verified.

        After anything but OK the content of `out` is undefined and the key is gone from
        lookup; the lease must still be released.
        """

    @abstractmethod
    def release(self, held: Reservation | Lease) -> None:
        """End a reservation or a lease. Idempotent."""

    @abstractmethod
    def evict(self, count: int, owners: Collection[int] | None = None) -> list[PageKey]:
        """Remove up to `count` pages that nobody leases, coldest first; return their keys.

        With `owners`, only pages of these owners; an empty collection names no page. When it
        returns, the slots can be reserved, and the removal is as durable as a commit. Amortised
        O(1) a page while callers keep to a few sets of owners; a set not asked for lately costs
        O(capacity) once, about 10 ms in a million pages.
        """

    @abstractmethod
    def victims(self, count: int, owners: Collection[int] | None = None) -> list[PageKey]:
        """Name up to `count` pages that evict() would take next. No side effects."""

    @abstractmethod
    def owner_of(self, keys: Sequence[PageKey]) -> list[int | None]:
        """The owner of each committed page, None where there is none. No side effects."""

    @abstractmethod
    def owners(self) -> dict[int, int]:
        """Pages that lookup() finds, by owner; owners without pages are absent. O(owners)."""

    @abstractmethod
    def keys_of(self, owner: int | None = None) -> list[PageKey]:
        """Every page of one owner (None: of all), coldest first, leased ones too. O(capacity)."""

    @abstractmethod
    def touch(self, keys: Sequence[PageKey]) -> None:
        """Refresh recency of the pages that are there."""

    @abstractmethod
    def drop(self, keys: Sequence[PageKey]) -> int:
        """Remove these pages (leased ones when their last lease ends); return how many."""

    @abstractmethod
    def stats(self) -> TierStats:
        """Counters and sizes, consistent with each other. O(1)."""

    @abstractmethod
    def check(self) -> None:
        """Assert every invariant above. O(capacity). For tests and idle moments."""

    @abstractmethod
    def close(self) -> None:
        """Release the medium; committed pages stay on it. Idempotent."""


class MappedTier(Tier):
    """A tier whose slots are addressable memory, so that pages need not be copied to be used."""

    @abstractmethod
    def payload(self, reservation: Reservation, index: int) -> memoryview:
        """Writable view of one reserved slot's payload, page_bytes long, 4 KiB aligned.

        Valid until the reservation closes. Whoever fills it calls seal() before commit().
        """

    @abstractmethod
    def seal(self, reservation: Reservation, index: int, checksum: bytes | None = None) -> None:
        """Record the checksum of a payload that was written through payload().

        None: computed here from the bytes that are there.
        """

    @abstractmethod
    def view(self, lease: Lease, index: int) -> memoryview:
        """Read-only view of one leased page's payload. Valid while the lease is held.

        Does not verify: see verify().
        """

    @abstractmethod
    def verify(self, lease: Lease, index: int) -> ReadOutcome:
        """Check key, length and checksum of a leased page in place. Quarantines on failure."""


@dataclass(frozen=True, slots=True)
class MoverStats:
    """The background copier between tiers. Counters run from its start."""

    queued: int
    in_flight: int
    completed: int
    dropped: int
    """Jobs refused because the queue was full. Stores are dropped, the engine never waits."""
    cancelled: int
    failed: int
    worker_restarts: int
    read_bytes_per_s: dict[TierName, float] = field(default_factory=dict)
    """Moving estimate per tier; absent until something was moved."""
    write_bytes_per_s: dict[TierName, float] = field(default_factory=dict)
    read_latency_s: dict[TierName, float] = field(default_factory=dict)
    """Moving estimate of one operation, per tier; absent until something was moved."""
    write_latency_s: dict[TierName, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RemoteStats:
    """A remote tier as one store sees it. Counters run from bind(), in pages."""

    queued: int
    running: int
    landed: int
    missed: int
    corrupt: int
    failed: int
    cancelled: int
    refused: int
    """Pulls not taken over: the queue was full."""
    pushes_queued: int
    pushed: int
    """Copies that another node acknowledged."""
    push_duplicates: int
    """Of pages that were there already."""
    push_dropped: int
    """Not queued: the queue was full. Stores are dropped, the engine never waits."""
    push_failed: int
    """Refused for want of room, lost with a connection, or gone from here before their turn."""
    worker_restarts: int
    known_pages: int
    """Pages elsewhere that `holds` knows of."""
    degraded: str | None
    """None when it serves; else one line that says why not."""


@dataclass(frozen=True, slots=True)
class OwnerUsage:
    """What one owner has in a store."""

    pages: dict[TierName, int]
    bytes: dict[TierName, int]
    """Of the tier: headers and rounding included, so that the owners add up to the tier."""
    last_use: float
    """Seconds since the Unix epoch, to the second: the last commit, hit or touch of a page."""


@dataclass(frozen=True, slots=True)
class StoreStats:
    """The whole store at one moment."""

    tiers: tuple[TierStats, ...]
    """Fastest first."""
    mover: MoverStats
    admission_rejected: int
    """Pages not written to a lower tier because they were not hot enough."""
    restored_pages: dict[TierName, int]
    """Pages handed out by fetch(), by the tier they came from."""
    missed_pages: int = 0
    """Keys asked of fetch() and not handed out, whatever the reason."""
    rejected_pages: int = 0
    """Host slots asked of reserve() and not given, plus pages whose commit failed."""
    demote_skipped: int = 0
    """Pages not queued for nvme because it is degraded; those a full queue lost are in mover."""
    late_fetches: int = 0
    """Fetches cut because a lower tier had not answered by the deadline."""
    quota_refused: dict[TierName, int] = field(default_factory=dict)
    """Pages kept out of a tier because their owner had reached a ceiling there."""
    evictions: dict[str, int] = field(default_factory=dict)
    """Pages that left a tier, by EvictionReason; all tiers together."""
    reuse_gaps: dict[TierName, tuple[int, ...]] = field(default_factory=dict)
    """Pages handed out, by tier and by the time since their last use: one count for each bucket
    of last_use.REUSE_GAP_BOUNDS_S and one above."""
    budget_skipped: int = 0
    """Copies to nvme not made because the write budget was spent, or too little of it was left
    for a page that cold."""
    budget_left_bytes: int | None = None
    """What may be written to nvme now; below 0 after a flush. None: no limit."""
    breaker_trips: int = 0
    breaker_open: bool = False
    """True while nvme is not asked because it kept failing or being late."""
    remote: RemoteStats | None = None
    """None without a remote tier."""
    degraded: str | None = None
    """None when every configured tier serves; else one line that says which does not and why."""


class StoreReservation(Held):
    """Host slots that the caller fills in place. A context manager; owned by one thread."""

    views: list[memoryview]
    """Writable payload views, page_bytes each. May be fewer than asked for, even none."""
    slots: list[int]
    """Where each view lies in the arena, for writers that map it themselves (a daemon's clients).
    Empty once committed or released, like `views`."""

    @abstractmethod
    def commit(
        self,
        keys: Sequence[PageKey],
        checksums: Sequence[bytes] | None = None,
        owner: int = 0,
    ) -> list[CommitOutcome]:
        """Publish the first len(keys) views under `keys`, after their bytes are complete.

        `checksums`, one a key, are recorded as they are and no payload byte is touched; whoever
        distrusts them calls verify() first. None: computed here, O(bytes). `owner` tags the
        pages for quotas, time to live and drop_owner(); 0 is nobody. A page its owner has no
        room for is FAILED and counted. ValueError for a checksum of the wrong length.
        """

    @abstractmethod
    def verify(self, index: int, checksum: bytes) -> bool:
        """Say whether the payload at `index` has this checksum now. No side effects. O(bytes)."""

    @abstractmethod
    def release(self) -> None:
        """Give back what was not committed. Idempotent."""


class PageLease(Held):
    """A leading run of verified pages in host memory. A context manager."""

    keys: list[PageKey]
    views: list[memoryview]
    """Read-only payload views, page_bytes each, valid until release()."""
    slots: list[int]
    """Where each page lies in the arena, valid until release()."""
    checksums: list[bytes]
    """Payload digest of each page as recorded when it was written; empty if checksums are off."""
    tiers: list[TierName]
    """Where each page was when it was asked for."""

    @property
    def intact(self) -> bool:
        """True while the pages have been held without a break since they were taken.

        A lease that is held for a client elsewhere can end on its own: whoever copied from the
        views asks afterwards, and on False throws the copy away (lesson L1).
        """
        return True

    @abstractmethod
    def release(self) -> None:
        """Let the pages go. Idempotent."""


class Fetch(ABC):
    """A request for pages that is under way. Whoever holds it calls take() or cancel()."""

    keys: list[PageKey]

    @property
    @abstractmethod
    def done(self) -> bool:
        """True once take() would not wait."""

    @abstractmethod
    def add_done_callback(self, callback: Callable[[], None]) -> None:
        """Call `callback` once when done; at once if it is. From any thread: it must be quick."""

    @abstractmethod
    def take(self, timeout_s: float) -> PageLease:
        """Wait at most `timeout_s`, then hand over the leading run that has arrived.

        What is late, lost or corrupt ends the run: the caller recomputes from there. Ends the
        fetch: what is still under way is cancelled. The lease is the caller's to release.
        """

    @abstractmethod
    def cancel(self) -> None:
        """Give up: frees every slot and pin the fetch holds. Idempotent."""


class PageStore(ABC):
    """What an engine asks for: pages by key, wherever they are. All methods are thread-safe."""

    page_bytes: int

    @abstractmethod
    def lookup(self, keys: Sequence[PageKey]) -> list[TierName | None]:
        """Name the fastest tier that holds each key, or None. No side effects.

        What a remote tier holds is what is known of it: a fetch says what is true.
        """

    def lookup_here(self, keys: Sequence[PageKey]) -> list[bool]:
        """Whether each page is in a tier of this node. No side effects."""
        return [tier not in (None, TierName.REMOTE) for tier in self.lookup(keys)]

    @abstractmethod
    def reserve(self, count: int, owner: int = 0) -> StoreReservation:
        """Take up to `count` host slots to fill, evicting colder pages when needed.

        Never waits for I/O: returns fewer when room cannot be made at once. `owner`: who will
        commit them; pages that a floor keeps from others may go for their own owner's sake.
        """

    @abstractmethod
    def fetch(
        self, keys: Sequence[PageKey], deadline_s: float, *, verify: bool | None = None
    ) -> Fetch:
        """Start bringing the leading run of `keys` into host memory; returns at once.

        `deadline_s` bounds the whole fetch from now on: past it, what is missing is a miss.
        `verify`: whether take() checks pages that were in host already; None: the store's rule.
        What comes from a lower tier is always verified by that read.
        """

    @abstractmethod
    def touch(self, keys: Sequence[PageKey]) -> None:
        """Tell every tier that these pages were used (for instance by a GPU hit)."""

    @abstractmethod
    def flush(self, deadline_s: float) -> bool:
        """Wait until everything queued for a lower tier is durable; False past the deadline."""

    @abstractmethod
    def stats(self) -> StoreStats:
        """Counters and sizes of every tier and of the mover."""

    @abstractmethod
    def check(self) -> None:
        """Assert every invariant of every tier. Expensive; for tests and idle moments."""

    @abstractmethod
    def close(self) -> None:
        """Stop the mover within a bound and close the tiers. Idempotent."""
