"""What peers hold of this node's pages: until when, and how it comes back.

Owns the store's leases that were granted to members, from grant() on. Does not know keys, messages
or who is alive: serving.py grants and releases, pool.py says when a member is gone. Time is the
clock's. Thread-safe; the store is never called with the table's lock held.

    lease state   whose           leaves by
    HELD          the member's    release -> freed; its hold passed -> OVERDUE;
                                  the member is gone or has a new epoch -> QUARANTINED
    OVERDUE       the member's    release -> freed; quarantine_s passed -> freed
    QUARANTINED   nobody's        quarantine_s passed -> freed
    any                           its memory is unregistered, nobody can read it -> freed

The pages of a freed lease may be evicted and their slots written again. Until then a late read can
only see what it was promised (docs/adr/0010-the-pool.md): whoever reads longer than its hold
throws the bytes away, but its network card may be reading still, for up to the longest transfer.

Invariants: a lease is freed once; granted == freed + what is here; a member's pages and the slots
leased of a page size stay within their bounds, overdue and quarantined ones included. A slot that
several leases hold is one slot of its page size: it is no more than one that others cannot use.
"""

from __future__ import annotations

import heapq
import itertools
import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tierkv.storage.base import PageLease
from tierkv.storage.clock import Clock


@dataclass(frozen=True, slots=True)
class LeaseCounts:
    """The table at one moment. Counters run from its start, in pages."""

    leases: int
    pages: int
    quarantined_pages: int
    """Of `pages`: those that nobody may read any more, but perhaps does."""
    granted: int
    released: int
    """Given back by their members."""
    expired: int
    """Freed because their time, or their memory, was over."""
    refused: int
    """Not granted: a bound was reached."""


@dataclass(slots=True)
class _Entry:
    member: str | None
    """None: quarantined."""
    page_bytes: int
    parts: Sequence[PageLease]
    slots: tuple[int, ...]
    """Of `parts`, which forget theirs when they are released."""
    held_until: float
    free_at: float

    @property
    def pages(self) -> int:
        return len(self.slots)


class LeaseTable:
    """See the module docstring."""

    def __init__(self, clock: Clock, quarantine_s: float, pages_max: int) -> None:
        """`quarantine_s`: the longest transfer. `pages_max`: pages that one member may hold."""
        self._clock = clock
        self._quarantine_s = quarantine_s
        self._pages_max = pages_max
        self._lock = threading.Lock()
        self._ids = itertools.count(1)
        self._entries: dict[int, _Entry] = {}
        self._due: list[tuple[float, int]] = []
        """A heap of (free_at, id). May name leases that are gone, or with an earlier time."""
        self._of_member: Counter[str | None] = Counter()
        self._slots: dict[int, Counter[int]] = {}
        """By page size: how many leases hold each slot."""
        self._granted = self._released = self._expired = self._refused = 0

    def grant(
        self,
        member: str,
        page_bytes: int,
        parts: Sequence[PageLease],
        hold_s: float,
        class_pages_max: int,
    ) -> int | None:
        """Hold these pages for `member`, from now on for `hold_s`; returns the lease's number.

        The table owns `parts` from then on. None when the member would hold too much, or all
        members together too many slots of this page size (`class_pages_max`): nothing is taken
        over.
        """
        slots = tuple(slot for part in parts for slot in part.slots)
        pages = len(slots)
        assert pages, "a lease holds something"
        with self._lock:
            held = self._slots.setdefault(page_bytes, Counter())
            if (
                self._of_member[member] + pages > self._pages_max
                or len(held) + sum(slot not in held for slot in set(slots)) > class_pages_max
            ):
                self._refused += pages
                return None
            lease = next(self._ids)
            until = self._clock.monotonic() + hold_s
            free_at = until + self._quarantine_s
            self._entries[lease] = _Entry(member, page_bytes, parts, slots, until, free_at)
            self._of_member[member] += pages
            held.update(slots)
            self._granted += pages
            self._add_due(free_at, lease)
            return lease

    def release(self, member: str, lease: int) -> bool:
        """`member` reads no byte of it any more: free it. False when it holds no such lease."""
        with self._lock:
            entry = self._entries.get(lease)
            if entry is None or entry.member != member:
                return False
            self._remove(lease)
            self._released += entry.pages
        _free([entry])
        return True

    def expire(self) -> int:
        """Free what nobody can be reading any more; returns how many pages. O(1) if none is due."""
        now = self._clock.monotonic()
        over: list[_Entry] = []
        with self._lock:
            while self._due and self._due[0][0] <= now:
                _, lease = heapq.heappop(self._due)
                entry = self._entries.get(lease)
                if entry is not None and entry.free_at <= now:
                    over.append(self._remove(lease))
            pages = sum(entry.pages for entry in over)
            self._expired += pages
        _free(over)
        return pages

    def drop_member(self, member: str) -> int:
        """The member is gone, or is another process: its leases are nobody's now, and freed when
        the longest transfer has passed. Returns how many pages. O(leases)."""
        with self._lock:
            latest = self._clock.monotonic() + self._quarantine_s
            dropped = 0
            for lease, entry in self._entries.items():
                if entry.member != member:
                    continue
                entry.member = None
                entry.free_at = min(entry.free_at, latest)
                self._of_member[None] += entry.pages
                dropped += entry.pages
                heapq.heappush(self._due, (entry.free_at, lease))
            del self._of_member[member]
            return dropped

    def drop_class(self, page_bytes: int) -> int:
        """Free every lease of a page size at once, quarantined ones too; returns how many pages.

        Only when its memory is not registered any more: then no byte of it can be read. O(leases).
        """
        with self._lock:
            leases = [id_ for id_, entry in self._entries.items() if entry.page_bytes == page_bytes]
            entries = [self._remove(lease) for lease in leases]
            pages = sum(entry.pages for entry in entries)
            self._expired += pages
        _free(entries)
        return pages

    def counts(self) -> LeaseCounts:
        """O(leases)."""
        now = self._clock.monotonic()
        with self._lock:
            quarantined = sum(
                entry.pages
                for entry in self._entries.values()
                if entry.member is None or entry.held_until <= now
            )
            return LeaseCounts(
                len(self._entries),
                sum(self._of_member.values()),
                quarantined,
                self._granted,
                self._released,
                self._expired,
                self._refused,
            )

    def pages_of(self, member: str) -> int:
        """How many pages a member holds, overdue ones included."""
        with self._lock:
            return self._of_member[member]

    def check(self) -> None:
        """Assert the invariants. O(leases)."""
        with self._lock:
            entries = self._entries
            here = sum(entry.pages for entry in entries.values())
            ended = self._released + self._expired
            assert self._granted == here + ended, (self._granted, here, ended)
            members: Counter[str | None] = Counter()
            classes: dict[int, Counter[int]] = {}
            for entry in entries.values():
                members[entry.member] += entry.pages
                classes.setdefault(entry.page_bytes, Counter()).update(entry.slots)
                slots = sum(len(part.slots) for part in entry.parts)
                assert slots == entry.pages, "a lease was freed behind the table's back"
            assert +self._of_member == members, (self._of_member, members)
            held = {page_bytes: slots for page_bytes, slots in self._slots.items() if slots}
            assert held == classes, (held, classes)
            named = [n for member, n in members.items() if member is not None]
            assert all(n <= self._pages_max for n in named), "a member holds too much"
            due = {(at, lease) for at, lease in self._due}
            for lease, entry in entries.items():
                assert (entry.free_at, lease) in due, "a lease would never be freed"

    def close(self) -> None:
        """Free everything: no memory is registered any more. Idempotent."""
        with self._lock:
            entries = [self._remove(lease) for lease in list(self._entries)]
            self._expired += sum(entry.pages for entry in entries)
            self._due.clear()
        _free(entries)

    def _add_due(self, free_at: float, lease: int) -> None:
        heapq.heappush(self._due, (free_at, lease))
        # Most leases are released long before they are due, and leave their entries behind.
        if len(self._due) > 2 * len(self._entries) + 64:
            self._due = [(entry.free_at, number) for number, entry in self._entries.items()]
            heapq.heapify(self._due)

    def _remove(self, lease: int) -> _Entry:
        entry = self._entries.pop(lease)
        self._of_member[entry.member] -= entry.pages
        held = self._slots[entry.page_bytes]
        for slot in entry.slots:
            held[slot] -= 1
            if not held[slot]:
                del held[slot]
        if not held:
            del self._slots[entry.page_bytes]
        if not self._of_member[entry.member]:
            del self._of_member[entry.member]
        return entry


def _free(entries: Iterable[_Entry]) -> None:
    for entry in entries:
        for part in entry.parts:
            part.release()
