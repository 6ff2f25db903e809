"""Payloads over the socket, for clients that cannot map the daemon's memory.

Owns local buffers in place of views. The same requests as in shared mode, and in addition a put
for each page before its commit and a get for each page of a lease, a few under way at a time.
Invariants as in held.py; a lease is given back as soon as its payloads are here. Called by
client.client.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from tierkv.client.held import ClientLease, ClientReservation, Holder, no_pages
from tierkv.client.link import Link, Pending
from tierkv.protocol.answers import GetAnswer, LeaseAnswer, parse_answer
from tierkv.protocol.errors import ProtocolError
from tierkv.protocol.messages import Verb
from tierkv.protocol.packing import split_checksums, unpack_tiers
from tierkv.storage.base import Fetch, PageLease
from tierkv.storage.clock import Clock
from tierkv.storage.types import PageKey

WINDOW = 8
"""Payloads under way at a time."""


def put_pages(held: ClientReservation, count: int, deadline: float, clock: Clock) -> bool:
    """Send the first `count` buffers of a reservation; False when one did not arrive."""
    link = held.link
    assert link is not None, "a reservation without a link has no pages"
    under_way: list[Pending] = []
    for index in range(count):
        if len(under_way) == WINDOW and not _arrived(link, under_way.pop(0), deadline, clock):
            return False
        fields = {
            "reservation": held.reservation,
            "index": index,
            # Read-only for msgpack, and not copied before it is packed.
            "payload": held.views[index].toreadonly(),
        }
        under_way.append(link.start(Verb.PUT, fields, room_s=deadline - clock.monotonic()))
    return all(_arrived(link, pending, deadline, clock) for pending in under_way)


def _arrived(link: Link, pending: Pending, deadline: float, clock: Clock) -> bool:
    if link.wait(pending, deadline - clock.monotonic()):
        return pending.error is None
    link.abandon(pending, None)
    return False


class StreamFetch(Fetch):
    """A lease and its payloads under way; see Fetch. Thread-safe.

    Moves on in the thread that reads the socket: each payload that comes asks for the next.
    """

    def __init__(
        self,
        holder: Holder,
        link: Link,
        keys: Sequence[PageKey],
        page_bytes: int,
        deadline: float,
        verify: bool,
        clock: Clock,
    ) -> None:
        self.keys = list(keys)
        self._holder = holder
        self._link = link
        self._page_bytes = page_bytes
        self._deadline = deadline
        self._verify = verify
        self._clock = clock
        self._cond = threading.Condition()
        self._answer: LeaseAnswer | None = None
        self._payloads: list[bytes | None] = []
        self._next = 0
        self._missing = 0
        self._settled = False
        self._closed = False
        self._callbacks: Future[None] = Future()

    @property
    def done(self) -> bool:
        with self._cond:
            return self._settled or self._closed or self._clock.monotonic() >= self._deadline

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        self._callbacks.add_done_callback(lambda _: callback())

    def take(self, timeout_s: float) -> PageLease:
        with self._cond:
            assert not self._closed, "a fetch is taken or cancelled once"
            wait_s = min(timeout_s, self._deadline - self._clock.monotonic())
            self._cond.wait_for(lambda: self._settled, max(0.0, wait_s))
            self._closed = True
            lease = self._lease_locked()
        self.expire()
        corrupt = 0
        if self._verify:
            bad = next((i for i in range(len(lease.keys)) if not lease.verify(i)), None)
            if bad is not None:
                corrupt = 1
                lease.keep(bad)
        self._holder.handed_out(len(self.keys), lease.tiers, corrupt)
        return lease

    def cancel(self) -> None:
        with self._cond:
            self._closed = True
        self.expire()

    def leased(self, pending: Pending) -> None:
        """The lease's answer came. By the reading thread."""
        answer = self._holder.granted(self._link, pending, len(self.keys))
        if answer is None or not answer.slots:
            self.expire()
            return
        with self._cond:
            late = self._settled or self._closed
            if not late:
                self._answer = answer
                self._link.leases.add(answer.lease)
                self._payloads = [None] * len(answer.tiers)
                self._missing = len(answer.tiers)
        if late:
            self._give_back(answer)
            return
        for _ in range(min(WINDOW, len(answer.tiers))):
            self._ask_next()

    def expire(self) -> None:
        """Settle for what has come. Idempotent; the callbacks run here."""
        with self._cond:
            first, self._settled = not self._settled, True
            answer = self._answer
            self._cond.notify_all()
        if not first:
            return
        if answer is not None:
            self._give_back(answer)
        self._callbacks.set_result(None)

    def _ask_next(self) -> None:
        with self._cond:
            answer, index = self._answer, self._next
            if self._settled or answer is None or index >= len(self._payloads):
                return
            self._next += 1
        pending = self._link.start(
            Verb.GET,
            {"lease": answer.lease, "index": index},
            lambda done: self._came(index, done),
        )
        self._link.in_background(pending, (self._deadline, self.expire))

    def _came(self, index: int, pending: Pending) -> None:
        payload = None
        if pending.error is None:
            try:
                got = parse_answer(GetAnswer, pending.answer, self._link.limits)
            except ProtocolError:
                got = GetAnswer(b"")
            payload = got.payload if len(got.payload) == self._page_bytes else None
        with self._cond:
            self._payloads[index] = payload
            self._missing -= 1
            # What is lost ends the run: the pages after it are not worth waiting for.
            finished = self._missing == 0 or payload is None
        if finished:
            self.expire()
        else:
            self._ask_next()

    def _lease_locked(self) -> ClientLease:
        """The leading run of payloads that are here."""
        if self._answer is None:
            return no_pages()
        run = next(
            (i for i, payload in enumerate(self._payloads) if payload is None),
            len(self._payloads),
        )
        views = [memoryview(payload) for payload in self._payloads[:run] if payload is not None]
        tiers = [tier for tier in unpack_tiers(self._answer.tiers) if tier is not None]
        sums = split_checksums(self._answer.checksums)
        return ClientLease(self.keys[:run], views, tiers[:run], [0] * run, sums[:run])

    def _give_back(self, answer: LeaseAnswer) -> None:
        self._link.leases.discard(answer.lease)
        if self._link.lost is None:
            self._link.post(Verb.RELEASE, {"leases": [answer.lease], "reservations": []})
