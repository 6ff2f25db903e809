"""What one client holds: leases and reservations, each with a deadline.

Owns the holds of one connection and counts them against its limits. Slots of a reservation that
ends without the client's word go to the quarantine. Knows no frames. Called by
tierkv.daemon.verbs and tierkv.daemon.connection on the loop's thread.

    hold     ends by                                        its slots then
    lease    release, deadline, end of the connection       may be evicted
    reserve  commit, release                                committed, or free
             deadline, end of the connection                quarantined while the process lives

A hold in use by a worker thread (`busy`) ends when that is done. Invariants: pages held are within
the limits; every hold is in its session's table or ended.
"""

from __future__ import annotations

import heapq
import itertools
from asyncio import AbstractEventLoop, TimerHandle

from tierkv.daemon.namespaces import Namespace
from tierkv.daemon.page_class import PageClass
from tierkv.daemon.peers import Peer, Quarantine
from tierkv.protocol.errors import ProtocolError
from tierkv.protocol.messages import Limits, Mode, WireCode
from tierkv.storage.base import Fetch, PageLease
from tierkv.storage.reservation import TieredReservation

_STALE_ENTRIES = 1024


class Hold:
    """A lease or a reservation of a session."""

    __slots__ = ("busy", "deadline", "number", "open", "pages", "session", "unsafe")

    def __init__(self, session: Session, number: int, pages: int, deadline: float) -> None:
        self.session = session
        self.number = number
        self.pages = pages
        self.deadline = deadline
        self.open = True
        self.busy = 0
        self.unsafe = False
        """Ended without the client's word: it may still be writing."""

    def expire(self) -> None:
        """Its deadline passed."""
        self.session.end(self, unsafe=True)

    def enter(self) -> None:
        """Somebody works with the slots: ending the hold waits until leave()."""
        assert self.open, "a hold that has ended is not used again"
        self.busy += 1

    def leave(self) -> None:
        """That work is done."""
        self.busy -= 1
        if not self.open and not self.busy:
            self.finish()

    def finish(self) -> None:
        """Give the slots back. Called once."""
        raise AssertionError("a hold is a lease or a reservation")


class LeaseHold(Hold):
    """Pages that cannot be evicted while the client reads them."""

    __slots__ = ("lease",)

    def __init__(self, session: Session, number: int, lease: PageLease, deadline: float) -> None:
        super().__init__(session, number, len(lease.keys), deadline)
        self.lease = lease

    def finish(self) -> None:
        self.lease.release()


class ReservationHold(Hold):
    """Slots that the client fills."""

    __slots__ = ("reservation", "slots")

    def __init__(
        self, session: Session, number: int, reservation: TieredReservation, deadline: float
    ) -> None:
        super().__init__(session, number, len(reservation.views), deadline)
        self.reservation = reservation
        self.slots = list(reservation.slots)

    def finish(self) -> None:
        self.session.let_go(self)


class HoldTimer:
    """Ends holds at their deadlines: one heap and one timer for all of them. On the loop."""

    def __init__(self, loop: AbstractEventLoop) -> None:
        self._loop = loop
        self._heap: list[tuple[float, int, Hold]] = []
        self._order = itertools.count()
        self._open = 0
        self._timer: TimerHandle | None = None
        self.expired = 0

    def now(self) -> float:
        """The loop's clock, in seconds."""
        return self._loop.time()

    def add(self, hold: Hold) -> None:
        """Watch a hold. O(log n)."""
        heapq.heappush(self._heap, (hold.deadline, next(self._order), hold))
        self._open += 1
        if self._heap[0][2] is hold:
            self._arm()

    def removed(self) -> None:
        """A watched hold ended before its deadline; its entry goes later. Amortised O(1)."""
        self._open -= 1
        if len(self._heap) > 2 * self._open + _STALE_ENTRIES:
            self._heap = [entry for entry in self._heap if entry[2].open]
            heapq.heapify(self._heap)

    def close(self) -> None:
        """Watch no more."""
        if self._timer is not None:
            self._timer.cancel()
        self._heap.clear()

    def _arm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_at(self._heap[0][0], self._ring) if self._heap else None

    def _ring(self) -> None:
        self._timer = None
        now = self._loop.time()
        while self._heap and (self._heap[0][0] <= now or not self._heap[0][2].open):
            hold = heapq.heappop(self._heap)[2]
            if hold.open:
                self.expired += 1
                hold.expire()
        self._arm()


class Session:
    """One greeted connection. On the loop's thread."""

    _numbers = itertools.count(1)

    def __init__(
        self,
        peer: Peer,
        mode: Mode,
        namespace: Namespace | None,
        pages: PageClass | None,
        limits: Limits,
        timer: HoldTimer,
        quarantine: Quarantine,
        client: str = "",
    ) -> None:
        self.number = next(Session._numbers)
        self.peer = peer
        self.mode = mode
        self.namespace = namespace
        self.page_class = pages
        self.limits = limits
        self.client = client
        self._timer = timer
        self._quarantine = quarantine
        self._hold_numbers = itertools.count(1)
        self.leases: dict[int, LeaseHold] = {}
        self.reservations: dict[int, ReservationHold] = {}
        self.leased_pages = 0
        self.reserved_pages = 0
        """Those in quarantine and in the hands of workers included."""
        self._awaited_leases = 0
        self._awaited_pages = 0
        self._ending = 0
        """Reserved pages of holds that are no longer in the table."""
        self.prefetches: set[Fetch] = set()
        self.closed = False

    @property
    def owner(self) -> int:
        """The number its pages are filed under; 0 without a namespace."""
        return 0 if self.namespace is None else self.namespace.owner

    def await_lease(self, pages: int) -> None:
        """Count a lease against the limits while its pages are on their way.

        Raises ProtocolError (LIMIT) when it is one too many. Ends with lease_arrived().
        """
        self._check_lease_room(pages)
        self._awaited_leases += 1
        self._awaited_pages += pages

    def lease_arrived(self, pages: int) -> None:
        """Undo await_lease(): the lease is there, or will not be."""
        self._awaited_leases -= 1
        self._awaited_pages -= pages

    def add_lease(self, lease: PageLease, hold_s: float) -> LeaseHold:
        """Keep a lease for the client; the session releases it. Limits were checked before."""
        hold = LeaseHold(self, next(self._hold_numbers), lease, self._timer.now() + hold_s)
        self.leases[hold.number] = hold
        self.leased_pages += hold.pages
        self._timer.add(hold)
        return hold

    def add_reservation(self, reservation: TieredReservation, hold_s: float) -> ReservationHold:
        """Keep a reservation for the client. Limits were checked before."""
        deadline = self._timer.now() + hold_s
        hold = ReservationHold(self, next(self._hold_numbers), reservation, deadline)
        self.reservations[hold.number] = hold
        if self.mode is Mode.SHARED and self.page_class is not None:
            self.page_class.holders.hold(hold.slots, self.peer.pid, self.peer.start)
        self.reserved_pages += hold.pages
        self._timer.add(hold)
        return hold

    def _check_lease_room(self, pages: int) -> None:
        count = len(self.leases) + self._awaited_leases
        if count >= self.limits.leases:
            raise ProtocolError(WireCode.LIMIT, f"lease: {count} are held already; release some")
        held = self.leased_pages + self._awaited_pages
        if held + pages > self.limits.leased_pages:
            raise ProtocolError(
                WireCode.LIMIT,
                f"lease: {held} pages are held already, {pages} more pass the limit of "
                f"{self.limits.leased_pages}; release some",
            )

    def check_reservation_room(self, pages: int) -> None:
        """Raise ProtocolError (LIMIT) when one more reservation of `pages` is too much."""
        if len(self.reservations) >= self.limits.reservations:
            raise ProtocolError(
                WireCode.LIMIT,
                f"reserve: {len(self.reservations)} reservations are held already; commit some",
            )
        if self.reserved_pages + pages > self.limits.reserved_pages:
            raise ProtocolError(
                WireCode.LIMIT,
                f"reserve: {self.reserved_pages} pages are held already, {pages} more pass the "
                f"limit of {self.limits.reserved_pages}; commit or release some",
            )

    def lease(self, number: int) -> LeaseHold:
        """The lease with this number; ProtocolError (NOT_LEASED) for others."""
        hold = self.leases.get(number)
        if hold is None:
            raise ProtocolError(
                WireCode.NOT_LEASED,
                f"lease {number} is not this connection's: never was, released or expired",
            )
        return hold

    def reservation(self, number: int) -> ReservationHold:
        """The reservation with this number; ProtocolError (NOT_RESERVED) for others."""
        hold = self.reservations.get(number)
        if hold is None:
            raise ProtocolError(
                WireCode.NOT_RESERVED,
                f"reservation {number} is not this connection's: never was, committed, released "
                "or expired",
            )
        return hold

    def end(self, hold: Hold, unsafe: bool = False) -> None:
        """Take a hold from the client. `unsafe`: it did not say that it is done with the slots."""
        assert hold.open, "a hold ended twice"
        hold.open = False
        hold.unsafe = unsafe
        if isinstance(hold, LeaseHold):
            del self.leases[hold.number]
            self.leased_pages -= hold.pages
        else:
            del self.reservations[hold.number]
            self._ending += hold.pages
            if not unsafe:
                # Before a slot can be another client's: its entry must not be wiped then.
                self._note_free(hold)
        self._timer.removed()
        if not hold.busy:
            hold.finish()

    def let_go(self, hold: ReservationHold) -> None:
        """Free a reservation's slots now, or once nobody can write them. Committed ones are gone
        from it already."""
        if hold.unsafe and self.mode is Mode.SHARED:
            self._quarantine.add(
                self.peer, hold.reservation, hold.pages, lambda: self._released(hold)
            )
        else:
            hold.reservation.release()
            self._freed(hold)

    def close(self) -> None:
        """The connection ended: everything it held ends. Idempotent."""
        self.closed = True
        for lease in list(self.leases.values()):
            self.end(lease)
        for reservation in list(self.reservations.values()):
            self.end(reservation, unsafe=True)
        for fetch in list(self.prefetches):
            fetch.cancel()
        self.prefetches.clear()

    def check(self) -> None:
        """Assert that what is held adds up. O(holds)."""
        assert self.leased_pages == sum(hold.pages for hold in self.leases.values())
        held = sum(hold.pages for hold in self.reservations.values())
        assert self.reserved_pages == held + self._ending, (self.reserved_pages, held)
        assert 0 <= self._ending <= self.reserved_pages
        assert len(self.leases) <= self.limits.leases
        assert len(self.reservations) <= self.limits.reservations
        assert self.leased_pages <= self.limits.leased_pages
        assert self.reserved_pages <= self.limits.reserved_pages
        for table in (self.leases, self.reservations):
            for number, hold in table.items():
                assert hold.open and hold.number == number and hold.session is self
        assert self._awaited_leases >= 0 and self._awaited_pages >= 0
        if self.closed:
            assert not self.leases and not self.reservations, "a closed session holds something"

    def _released(self, hold: ReservationHold) -> None:
        self._note_free(hold)
        self._freed(hold)

    def _note_free(self, hold: Hold) -> None:
        if isinstance(hold, ReservationHold) and self.mode is Mode.SHARED and self.page_class:
            self.page_class.holders.free(hold.slots)

    def _freed(self, hold: ReservationHold) -> None:
        self._ending -= hold.pages
        self.reserved_pages -= hold.pages
