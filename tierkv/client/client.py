"""Client: the daemon's pages behind the PageStore contract, for many threads of one process.

Owns the connection (a Keeper) and the counters. Pages are read and written in the daemon's memory
by whoever fills or copies the views; no payload crosses the socket unless the mode is "stream".

A daemon that is away, late or refuses is a store that misses everything: the verbs of PageStore
never raise for it, and while it is known to be away they answer without a system call. What an
operator asks for (namespaces, drop) raises instead. Called by engines, tools and tests.
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

from tierkv.client.errors import DaemonAwayError, RefusedError
from tierkv.client.handshake import Greeting, check_path
from tierkv.client.held import ClientFetch, ClientReservation
from tierkv.client.keeper import Keeper
from tierkv.client.link import Link, Pending
from tierkv.client.settings import ChecksumPolicy, ClientSettings
from tierkv.client.stream import StreamFetch, put_pages
from tierkv.protocol import answers
from tierkv.protocol.answers import parse_answer
from tierkv.protocol.errors import ProtocolError
from tierkv.protocol.messages import PROTOCOL_VERSION, Mode, Verb, WireCode
from tierkv.protocol.packing import unpack_outcomes, unpack_slots, unpack_tiers
from tierkv.protocol.requests import Hello
from tierkv.protocol.stats import class_stats
from tierkv.storage.base import Fetch, MoverStats, PageStore, StoreReservation, StoreStats
from tierkv.storage.breaker import Breaker
from tierkv.storage.checksum import payload_checksum
from tierkv.storage.clock import Clock, SystemClock
from tierkv.storage.identity import Fingerprint, to_json
from tierkv.storage.types import CommitOutcome, NamespaceId, PageKey, TierName

_MS = 1000.0
ANSWER_MARGIN_S = 0.005
"""The daemon is asked to answer this long before a fetch's deadline, with what it has."""
_NOTHING_COUNTED = MoverStats(0, 0, 0, 0, 0, 0, 0)

Answer = TypeVar("Answer")


class Client(PageStore):
    """See the module. A context manager; connects when made.

    `page_bytes` 0 makes an operator's client, for stats, namespaces, drop and flush.
    Raises ConfigError when the daemon is there and will not serve this client as it is; a daemon
    that is not there is met later.
    """

    def __init__(
        self,
        path: Path | str,
        page_bytes: int,
        fingerprint: Fingerprint | None = None,
        *,
        tenant: str = "",
        mode: str = "shared",
        name: str = "",
        settings: ClientSettings | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.page_bytes = page_bytes
        self._settings = settings or ClientSettings()
        self._clock = clock or SystemClock()
        self._mode = Mode(mode)
        hello = Hello(
            version=PROTOCOL_VERSION,
            client=(name or f"pid {os.getpid()}")[:256],
            page_bytes=page_bytes,
            fingerprint="" if fingerprint is None else to_json(fingerprint),
            mode=self._mode.value,
            tenant=tenant,
        )
        greeting = Greeting(check_path(Path(path)), hello, self._settings.connect_s)
        rules = self._settings
        self._breaker = Breaker(self._clock, rules.breaker_failures, rules.breaker_open_s)
        self._lock = threading.Lock()
        self._restored: Counter[TierName] = Counter()
        self._missed = 0
        self._rejected = 0
        self._late = 0
        self._corrupt = 0
        self._refusals: Counter[str] = Counter()
        self._closed = False
        self._keeper = Keeper(greeting, rules, self._clock)
        self._keeper.open()

    # --- PageStore -------------------------------------------------------------------------------

    def lookup(self, keys: Sequence[PageKey]) -> list[TierName | None]:
        link = self._usable()
        if link is None:
            return [None] * len(keys)
        found: list[TierName | None] = []
        for part in _parts(keys, link.limits.keys):
            answer = self._ask(link, Verb.LOOKUP, {"keys": b"".join(part)}, answers.LookupAnswer)
            if answer is None or len(answer.tiers) != len(part):
                # A hole in the middle would end the run anyhow.
                return found + [None] * (len(keys) - len(found))
            found += unpack_tiers(answer.tiers)
        return found

    def reserve(self, count: int, owner: int = 0) -> StoreReservation:
        """See PageStore. The daemon names the owner: it is that of the connection."""
        assert owner == 0, "the daemon names the owner of a client's pages"
        link = self._usable()
        granted: answers.ReserveAnswer | None = None
        if link is not None and count > 0:
            asked = min(count, link.limits.reserved_pages)
            fields = {"count": asked, "hold_ms": self._hold_ms(link)}
            granted = self._ask(
                link, Verb.RESERVE, fields, answers.ReserveAnswer, self._late_reservation
            )
        if link is None or granted is None or not granted.slots:
            self._count_rejected(count)
            return ClientReservation(self, None, 0, [], [])
        link.reservations.add(granted.reservation)
        slots = unpack_slots(granted.slots)
        self._count_rejected(count - len(slots))
        try:
            views = self._writable(link, slots)
        except IndexError as error:
            link.fail(f"reserve: {error}")
            return ClientReservation(self, None, 0, [], [])
        return ClientReservation(self, link, granted.reservation, slots, views)

    def fetch(
        self, keys: Sequence[PageKey], deadline_s: float, *, verify: bool | None = None
    ) -> Fetch:
        """See PageStore. `verify`: in this process too; None: as the settings say."""
        check = self._settings.verify if verify is None else verify
        now = self._clock.monotonic()
        link = self._usable()
        until = now + (0.0 if link is None else self._hold_ms(link) / _MS)
        if link is None or not keys:
            return ClientFetch(self, keys, now, until, check, self._clock)
        asked = keys[: link.limits.keys]
        wait_s = max(0.0, deadline_s - max(ANSWER_MARGIN_S, 0.05 * deadline_s))
        fields = {
            "keys": b"".join(asked),
            "wait_ms": min(link.limits.wait_ms, int(wait_s * _MS)),
            "hold_ms": self._hold_ms(link),
        }
        if self._mode is Mode.STREAM:
            stream = StreamFetch(
                self, link, asked, self.page_bytes, now + deadline_s, check, self._clock
            )
            pending = link.start(Verb.LEASE, fields, stream.leased)
            link.in_background(pending, (now + deadline_s, stream.expire))
            return stream
        fetch = ClientFetch(self, asked, now + deadline_s, until, check, self._clock)
        pending = link.start(Verb.LEASE, fields, lambda _: fetch.announce())
        mapping = link.session.mapping
        assert mapping is not None, "a shared session has a mapping"
        fetch.begin(link, mapping, pending)
        return fetch

    def touch(self, keys: Sequence[PageKey]) -> None:
        link = self._usable()
        if link is None:
            return
        for part in _parts(keys, link.limits.keys):
            link.post(Verb.TOUCH, {"keys": b"".join(part)})

    def flush(self, deadline_s: float) -> bool:
        deadline = self._clock.monotonic() + deadline_s
        while (left_s := deadline - self._clock.monotonic()) > 0:
            link = self._usable()
            if link is None:
                return False
            wait_s = min(left_s, link.limits.wait_ms / _MS)
            fields = {"wait_ms": int(wait_s * _MS)}
            answer = self._ask(
                link, Verb.FLUSH, fields, answers.FlushAnswer, timeout_s=wait_s + 1.0
            )
            if answer is None or answer.durable or wait_s >= left_s:
                return answer is not None and answer.durable
        return False

    def stats(self) -> StoreStats:
        """What the daemon says of this page class; no tiers, and why, while it is away."""
        link = self._usable()
        answer = None
        if link is not None:
            answer = self._ask(link, Verb.STATS, {}, answers.StatsAnswer)
        if answer is not None:
            try:
                found = class_stats(answer.stats, self.page_bytes)
            except ProtocolError as error:
                return self._own_stats(str(error))
            if found is not None:
                return found
        return self._own_stats(f"daemon: {self._keeper.why_away or 'no answer'}")

    def check(self) -> None:
        """Assert the invariants on this side of the socket. O(requests in flight)."""
        self._breaker.check()
        link = self._keeper.link
        if link is not None:
            link.check()

    def close(self) -> None:
        """End the connection; what was held is free then. Views stay valid memory."""
        self._closed = True
        self._keeper.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # --- beyond PageStore ------------------------------------------------------------------------

    @property
    def connected(self) -> bool:
        """True while there is a connection. No system call."""
        return self._keeper.link is not None

    @property
    def connections(self) -> int:
        """How often a connection was made; above 1 after a loss."""
        return self._keeper.connections

    @property
    def boot_token(self) -> bytes:
        """Of the daemon last met; b"" before the first. Another one: it was started anew."""
        return self._keeper.boot_token

    def wait_connected(self, timeout_s: float) -> bool:
        """Wait until there is a connection; False past the timeout."""
        return self._keeper.wait_connected(timeout_s)

    def held(self) -> tuple[int, int]:
        """Leases and reservations that the daemon holds for this client."""
        link = self._keeper.link
        return (0, 0) if link is None else (len(link.leases), len(link.reservations))

    def submit_lookup(self, keys: Sequence[PageKey]) -> Future[list[TierName | None]]:
        """lookup() without waiting: many may be in flight. Done with None for all on a loss.

        At most limits.keys keys. Waits when as many are in flight as the daemon allows.
        """
        future: Future[list[TierName | None]] = Future()
        link = self._usable()
        if link is None:
            future.set_result([None] * len(keys))
            return future

        def done(pending: Pending) -> None:
            answer = self._answer(link, pending, answers.LookupAnswer)
            good = answer is not None and len(answer.tiers) == len(keys)
            future.set_result(unpack_tiers(answer.tiers) if answer and good else [None] * len(keys))

        fields = {"keys": b"".join(keys)}
        pending = link.start(Verb.LOOKUP, fields, done, self._settings.call_s)
        link.in_background(pending)
        return future

    def prefetch(self, keys: Sequence[PageKey], wait_s: float = 10.0) -> int:
        """Have pages brought into host memory, unless it takes longer; returns how many are."""
        accepted = 0
        link = self._usable()
        for part in _parts(keys, link.limits.keys) if link is not None else ():
            assert link is not None
            wait_ms = min(link.limits.wait_ms, int(wait_s * _MS))
            fields = {"keys": b"".join(part), "wait_ms": wait_ms}
            answer = self._ask(link, Verb.PREFETCH, fields, answers.PrefetchAnswer)
            accepted += 0 if answer is None else answer.accepted
            if answer is None or answer.accepted < len(part):
                break
        return accepted

    def namespaces(self) -> list[dict[str, Any]]:
        """What the daemon knows, and what each namespace has in each tier. Raises TierError."""
        return self._demand(Verb.NAMESPACES, {}, answers.NamespacesAnswer).namespaces

    def drop(self, *, namespace: NamespaceId | None = None, keys: Sequence[PageKey] = ()) -> int:
        """Remove the pages of a namespace, or these; returns how many. Raises TierError."""
        fields = {"namespace": namespace or b"", "keys": b"".join(keys)}
        return self._demand(Verb.DROP, fields, answers.DropAnswer).dropped

    # --- for held.py and stream.py ---------------------------------------------------------------

    def publish(
        self,
        held: ClientReservation,
        keys: Sequence[PageKey],
        checksums: Sequence[bytes] | None,
    ) -> list[CommitOutcome]:
        """See held.Holder."""
        failed = [CommitOutcome.FAILED] * len(keys)
        link = held.link
        if link is None or link.lost is not None:
            self._count_rejected(len(keys))
            return failed
        if checksums is None and self._settings.checksum_policy is ChecksumPolicy.CLIENT:
            checksums = [payload_checksum(view) for view in held.views[: len(keys)]]
        deadline = self._clock.monotonic() + self._settings.commit_s
        if self._mode is Mode.STREAM and not put_pages(held, len(keys), deadline, self._clock):
            self._count_rejected(len(keys))
            held.release()
            return failed
        fields = {
            "reservation": held.reservation,
            "keys": b"".join(keys),
            "checksums": b"".join(checksums or ()),
        }
        timeout_s = deadline - self._clock.monotonic()
        answer = self._ask(link, Verb.COMMIT, fields, answers.CommitAnswer, timeout_s=timeout_s)
        if answer is None or len(answer.outcomes) != len(keys):
            self._count_rejected(len(keys))
            return failed
        outcomes = unpack_outcomes(answer.outcomes)
        self._count_rejected(outcomes.count(CommitOutcome.FAILED))
        return outcomes

    def granted(self, link: Link, pending: Pending, count: int) -> answers.LeaseAnswer | None:
        """See held.Holder."""
        answer = self._answer(link, pending, answers.LeaseAnswer)
        if answer is not None and len(answer.tiers) > count:
            link.fail("lease: more pages than were asked for")
            return None
        return answer

    def handed_out(self, asked: int, tiers: Sequence[TierName], corrupt: int) -> None:
        """See held.Holder."""
        with self._lock:
            self._restored.update(tiers)
            self._missed += asked - len(tiers)
            self._corrupt += corrupt

    def late(self, link: Link, pending: Pending) -> None:
        """See held.Holder."""
        answer = self._answer(link, pending, answers.LeaseAnswer)
        if answer is not None and answer.slots:
            link.post(Verb.RELEASE, {"leases": [answer.lease], "reservations": []})

    # --- inside ----------------------------------------------------------------------------------

    def _usable(self) -> Link | None:
        """The link, unless the daemon is away or too slow to be asked now."""
        link = self._keeper.link
        if link is None or not self._breaker.closed:
            return None
        return link

    def _ask(
        self,
        link: Link,
        verb: Verb,
        fields: Mapping[str, object],
        kind: type[Answer],
        on_late: Callable[[Link, Pending], None] | None = None,
        timeout_s: float | None = None,
    ) -> Answer | None:
        """One request and its answer; None when there is none in time, or a refusal."""
        timeout_s = self._settings.call_s if timeout_s is None else timeout_s
        pending = link.start(verb, fields, room_s=timeout_s)
        if not link.wait(pending, timeout_s):
            self._breaker.failed()
            with self._lock:
                self._late += 1
            late = None if on_late is None else lambda late: on_late(link, late)
            link.abandon(pending, late)
            return None
        return self._answer(link, pending, kind)

    def _answer(self, link: Link, pending: Pending, kind: type[Answer]) -> Answer | None:
        """The checked answer of a pending that is done; None for a refusal, which is counted."""
        if pending.error is not None:
            with self._lock:
                self._refusals[pending.error.code] += 1
            return None
        self._breaker.succeeded()
        try:
            return parse_answer(kind, pending.answer, link.limits)
        except ProtocolError as error:
            link.fail(str(error))
            return None

    def _demand(self, verb: Verb, fields: Mapping[str, object], kind: type[Answer]) -> Answer:
        """As _ask, for operators: raises what _ask turns into None."""
        link = self._keeper.link
        if link is None:
            raise DaemonAwayError(f"{verb}: no daemon ({self._keeper.why_away}); is it running?")
        timeout_s = self._settings.commit_s
        pending = link.start(verb, fields, room_s=timeout_s)
        if not link.wait(pending, timeout_s):
            link.abandon(pending, None)
            raise DaemonAwayError(f"{verb}: no answer within {timeout_s:.0f} s; try again")
        if pending.error is not None:
            raise pending.error
        try:
            return parse_answer(kind, pending.answer, link.limits)
        except ProtocolError as error:
            link.fail(str(error))
            raise RefusedError(WireCode.FIELD, str(error)) from error

    def _late_reservation(self, link: Link, pending: Pending) -> None:
        answer = self._answer(link, pending, answers.ReserveAnswer)
        if answer is not None and answer.slots:
            link.post(Verb.RELEASE, {"leases": [], "reservations": [answer.reservation]})

    def _writable(self, link: Link, slots: Sequence[int]) -> list[memoryview]:
        mapping = link.session.mapping
        if mapping is None:
            return [memoryview(bytearray(self.page_bytes)) for _ in slots]
        return [mapping.writable(slot) for slot in slots]

    def _hold_ms(self, link: Link) -> int:
        return min(link.limits.hold_ms, int(self._settings.hold_s * _MS))

    def _count_rejected(self, count: int) -> None:
        if count:
            with self._lock:
                self._rejected += count

    def _own_stats(self, degraded: str) -> StoreStats:
        with self._lock:
            return StoreStats(
                tiers=(),
                mover=_NOTHING_COUNTED,
                admission_rejected=0,
                restored_pages=dict(self._restored),
                missed_pages=self._missed,
                rejected_pages=self._rejected,
                late_fetches=self._late,
                breaker_trips=self._breaker.trips,
                breaker_open=not self._breaker.closed,
                degraded=degraded,
            )


def _parts(keys: Sequence[PageKey], length: int) -> list[Sequence[PageKey]]:
    """`keys` in pieces that fit one request; none when there are none."""
    return [keys[start : start + length] for start in range(0, len(keys), length)]
