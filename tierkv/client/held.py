"""What a client holds at the daemon through shared memory: reservations, leases and fetches.

Owns the views and the ids behind them. Does not read the socket: a Link does. Invariants: what was
granted is given back once, by commit, release, or the end of the connection; a view is memory that
stays mapped, whatever happens to the daemon; a lease that the connection or its hold has ended
says so in `intact`, so that whoever copied can tell whether the bytes were held all the while.
Called by engines through PageStore; made by client.client.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Protocol

from tierkv.client.link import Link, Pending
from tierkv.client.mapping import ArenaMapping
from tierkv.protocol.answers import LeaseAnswer
from tierkv.protocol.errors import ProtocolError
from tierkv.protocol.messages import Verb
from tierkv.protocol.packing import split_checksums, unpack_slots, unpack_tiers
from tierkv.storage.base import Fetch, PageLease, StoreReservation
from tierkv.storage.checksum import payload_checksum
from tierkv.storage.clock import Clock
from tierkv.storage.types import CommitOutcome, PageKey, TierName


class Holder(Protocol):
    """What these objects need from the client."""

    def publish(
        self,
        held: ClientReservation,
        keys: Sequence[PageKey],
        checksums: Sequence[bytes] | None,
    ) -> list[CommitOutcome]:
        """Commit at the daemon; FAILED for all when it cannot be reached."""
        ...

    def granted(self, link: Link, pending: Pending, count: int) -> LeaseAnswer | None:
        """The lease in an answer, None when it is a refusal; at most `count` pages."""
        ...

    def handed_out(self, asked: int, tiers: Sequence[TierName], corrupt: int) -> None:
        """Count what a fetch gave and what it could not give."""
        ...

    def late(self, link: Link, pending: Pending) -> None:
        """A lease came after its fetch had ended: give it back."""
        ...


class ClientReservation(StoreReservation):
    """Slots of the daemon to fill in place; see StoreReservation."""

    def __init__(
        self,
        holder: Holder,
        link: Link | None,
        reservation: int,
        slots: Sequence[int],
        views: list[memoryview],
    ) -> None:
        self.link = link
        self.reservation = reservation
        self.views = views
        self.slots = list(slots)
        self._holder = holder
        self._open = link is not None

    def commit(
        self,
        keys: Sequence[PageKey],
        checksums: Sequence[bytes] | None = None,
        owner: int = 0,
    ) -> list[CommitOutcome]:
        """See StoreReservation. The daemon knows the owner: it is that of the connection."""
        assert owner == 0, "the daemon names the owner of a client's pages"
        assert len(keys) <= len(self.views), (len(keys), len(self.views))
        assert checksums is None or len(checksums) == len(keys)
        if not self._open:
            return [CommitOutcome.FAILED] * len(keys)
        outcomes = self._holder.publish(self, keys, checksums)
        self._close()
        return outcomes

    def verify(self, index: int, checksum: bytes) -> bool:
        return payload_checksum(self.views[index]) == checksum

    def release(self) -> None:
        if not self._open:
            return
        if self.link is not None and self.link.lost is None:
            fields: dict[str, object] = {"leases": [], "reservations": [self.reservation]}
            self.link.post(Verb.RELEASE, fields)
        self._close()

    def _close(self) -> None:
        self._open = False
        # Whoever still holds a view must not find it here: the slot may be another page's now.
        self.views = []
        self.slots = []
        if self.link is not None:
            self.link.reservations.discard(self.reservation)


class ClientLease(PageLease):
    """Pages that the daemon holds for this client; see PageLease."""

    def __init__(
        self,
        keys: Sequence[PageKey],
        views: list[memoryview],
        tiers: list[TierName],
        slots: Sequence[int],
        checksums: list[bytes],
        give_back: Callable[[], None] | None = None,
        held: Callable[[], bool] | None = None,
    ) -> None:
        self.keys = list(keys)
        self.views = views
        self.tiers = tiers
        self.slots = list(slots)
        self.checksums = checksums
        """One a page, b"" where none was taken; empty where none are."""
        self._give_back = give_back
        self._held = held

    @property
    def intact(self) -> bool:
        """True while nobody can have overwritten the pages: ask after copying from the views."""
        return self._held is None or self._held()

    def verify(self, index: int) -> bool:
        """True when the page has its checksum, or none was taken. O(page_bytes)."""
        expected = self.checksums[index] if self.checksums else b""
        return not expected or payload_checksum(self.views[index]) == expected

    def keep(self, count: int) -> None:
        """Shorten the run to its first `count` pages; the rest is held until release()."""
        for column in (self.keys, self.views, self.tiers, self.slots, self.checksums):
            del column[count:]

    def release(self) -> None:
        give_back, self._give_back = self._give_back, None
        self.views = []
        self.slots = []
        if give_back is not None:
            give_back()


def no_pages() -> ClientLease:
    """A lease of nothing."""
    return ClientLease([], [], [], [], [])


class LeaseLink(Protocol):
    """The connection that a lease ends with."""

    leases: set[int]

    @property
    def lost(self) -> str | None: ...

    def post(self, verb: Verb, fields: Mapping[str, object]) -> None: ...


def mapped_lease(
    link: LeaseLink,
    mapping: ArenaMapping,
    keys: Sequence[PageKey],
    answer: LeaseAnswer,
    until: float,
    clock: Clock,
) -> ClientLease:
    """The lease of an answer, over views of the arena.

    Raises IndexError or ProtocolError when the answer names slots or tiers that are not there.
    """
    slots = unpack_slots(answer.slots)
    tiers = [tier for tier in unpack_tiers(answer.tiers) if tier is not None]
    views = [mapping.readable(slot) for slot in slots]
    link.leases.add(answer.lease)

    def give_back() -> None:
        link.leases.discard(answer.lease)
        if link.lost is None:
            link.post(Verb.RELEASE, {"leases": [answer.lease], "reservations": []})

    def held() -> bool:
        return link.lost is None and clock.monotonic() < until

    checksums = split_checksums(answer.checksums)
    return ClientLease(keys[: len(slots)], views, tiers, slots, checksums, give_back, held)


class ClientFetch(Fetch):
    """A lease under way; see Fetch. Thread-safe."""

    def __init__(
        self,
        holder: Holder,
        keys: Sequence[PageKey],
        deadline: float,
        hold_until: float,
        verify: bool,
        clock: Clock,
    ) -> None:
        self.keys = list(keys)
        self._holder = holder
        self._deadline = deadline
        self._hold_until = hold_until
        self._verify = verify
        self._clock = clock
        self._lock = threading.Lock()
        self._link: Link | None = None
        self._pending: Pending | None = None
        self._mapping: ArenaMapping | None = None
        self._closed = False
        self._announced = False
        self._watched = False
        self._callbacks: Future[None] = Future()

    def begin(self, link: Link, mapping: ArenaMapping, pending: Pending) -> None:
        """Tie the fetch to its request. Once, before anybody else sees it.

        A fetch that never began is one of no pages, done at once.
        """
        self._link, self._mapping, self._pending = link, mapping, pending

    @property
    def done(self) -> bool:
        pending = self._pending
        if self._closed or pending is None or pending.done:
            return True
        if self._clock.monotonic() >= self._deadline:
            return True
        self._read_in_background()
        return pending.done

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        # The library runs it at once when done, and logs what it raises: a careless callback must
        # not end the thread that reads (lesson H2).
        self._callbacks.add_done_callback(lambda _: callback())
        if self._pending is None or self._pending.done:
            self.announce()
        else:
            self._read_in_background()

    def take(self, timeout_s: float) -> PageLease:
        with self._lock:
            assert not self._closed, "a fetch is taken or cancelled once"
            self._closed = True
        lease = self._arrived(timeout_s)
        corrupt = 0
        if self._verify:
            good = next((i for i in range(len(lease.keys)) if not lease.verify(i)), None)
            if good is not None:
                corrupt = 1
                lease.keep(good)
        self._holder.handed_out(len(self.keys), lease.tiers, corrupt)
        self.announce()
        return lease

    def cancel(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._give_up()
        self.announce()

    def announce(self) -> None:
        """Run the callbacks, the first time. By the reading thread, or whoever ends the fetch."""
        with self._lock:
            first, self._announced = not self._announced, True
        if first:
            self._callbacks.set_result(None)

    def _read_in_background(self) -> None:
        if self._link is None or self._pending is None or self._watched:
            return
        self._watched = True
        self._link.in_background(self._pending, (self._deadline, self.announce))

    def _arrived(self, timeout_s: float) -> ClientLease:
        """Wait for the answer; the lease in it."""
        link, pending, mapping = self._link, self._pending, self._mapping
        if link is None or pending is None or mapping is None:
            return no_pages()
        wait_s = min(timeout_s, self._deadline - self._clock.monotonic())
        if not link.wait(pending, wait_s):
            self._give_up()
            return no_pages()
        answer = self._holder.granted(link, pending, len(self.keys))
        if answer is None or not answer.slots:
            return no_pages()
        try:
            return mapped_lease(link, mapping, self.keys, answer, self._hold_until, self._clock)
        except (IndexError, ProtocolError) as error:
            link.fail(f"lease: {error}")
            return no_pages()

    def _give_up(self) -> None:
        link, pending = self._link, self._pending
        if link is not None and pending is not None:
            link.abandon(pending, lambda late: self._holder.late(link, late))
