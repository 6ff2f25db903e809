"""What each verb does, once its fields were checked and its session is known.

No state of its own. A handler returns the answer's fields at once when it touches no payload and
no disk, else a coroutine; `bytes` are an answer encoded already. Raises ProtocolError for what the
client may not, and lets errors of storage through: connection.py turns both into answers. Runs on
the loop's thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any, TypeAlias

from tierkv.daemon.page_class import PageClass, digests
from tierkv.daemon.service import Service
from tierkv.daemon.session import LeaseHold, ReservationHold, Session
from tierkv.daemon.status import namespace_rows, status_fields
from tierkv.protocol import requests
from tierkv.protocol.errors import ProtocolError
from tierkv.protocol.frames import encode_answer
from tierkv.protocol.messages import (
    CHECKSUM_BYTES,
    OUTCOME_CODES,
    TIER_CODES,
    Mode,
    Verb,
    WireCode,
)
from tierkv.protocol.packing import pack_slots, split_keys
from tierkv.protocol.requests import Request
from tierkv.storage.base import Fetch, PageLease, StoreReservation
from tierkv.storage.checksum import copy_bytes
from tierkv.storage.store import TieredStore
from tierkv.storage.types import CommitOutcome, PageKey, TierName

Fields: TypeAlias = dict[str, Any]
Result: TypeAlias = Fields | bytes | Coroutine[Any, Any, Fields | bytes]
Handler: TypeAlias = Callable[[Service, Session, Request], Result]

INLINE_BYTES = 64 << 10
"""Payloads up to this are copied on the loop: a thread would cost more."""
INLINE_PAGES = 64
"""Pages whose headers are written on the loop."""
PART_BYTES = 1 << 20
"""Checksums of more than this are shared out among workers."""

_NO_CHECKSUM = bytes(CHECKSUM_BYTES)
_MS = 1e-3


def lookup(service: Service, session: Session, request: Request) -> Result:
    """Which tier has each key."""
    body = request.body
    assert isinstance(body, requests.Lookup)
    store = _class_of(session).store
    keys = split_keys(body.keys)
    if store.lookup_waits:
        return _lookup_later(service, store, keys)
    return _tiers(store.lookup(keys))


async def _lookup_later(service: Service, store: TieredStore, keys: list[PageKey]) -> Fields:
    """The remote tier may have to be asked: that takes a network, so it takes a thread."""
    return _tiers(await service.askers.submit(partial(store.lookup, keys)))


def _tiers(found: Sequence[TierName | None]) -> Fields:
    return {"tiers": bytes([TIER_CODES[tier] for tier in found])}


def touch(service: Service, session: Session, request: Request) -> Result:
    """Say that pages were used."""
    body = request.body
    assert isinstance(body, requests.Touch)
    _class_of(session).store.touch(split_keys(body.keys))
    return {}


def lease(service: Service, session: Session, request: Request) -> Result:
    """Hold the leading run of pages that is in host memory in time."""
    body = request.body
    assert isinstance(body, requests.Lease)
    pages = _class_of(session)
    keys = split_keys(body.keys)
    hold_s = body.hold_ms * _MS
    session.await_lease(len(keys))
    taken: PageLease | None = None
    try:
        fetch = pages.fetch(keys, body.wait_ms * _MS, session.owner)
        if fetch.done and not pages.lease_touches_pages:
            taken = fetch.take(0.0)
    except BaseException:
        session.lease_arrived(len(keys))
        raise
    if taken is None:
        return _lease_later(service, session, pages, fetch, hold_s)
    session.lease_arrived(len(keys))
    return _leased(session, taken, hold_s)


async def _lease_later(
    service: Service, session: Session, pages: PageClass, fetch: Fetch, hold_s: float
) -> Fields:
    try:
        await _settled(service, fetch)
        if pages.lease_touches_pages:
            taken = await service.workers.submit(partial(fetch.take, 0.0))
        else:
            taken = fetch.take(0.0)
    finally:
        # Frees what a fetch that was not taken holds; the session counts pages it has from now on.
        fetch.cancel()
        session.lease_arrived(len(fetch.keys))
    if session.closed:
        taken.release()
        return {}
    return _leased(session, taken, hold_s)


async def _settled(service: Service, fetch: Fetch) -> None:
    """Wait until the fetch is done: by its own deadline at the latest."""
    if fetch.done:
        return
    settled: asyncio.Future[None] = service.loop.create_future()

    def tell() -> None:
        if not settled.done():
            settled.set_result(None)

    fetch.add_done_callback(partial(_call_soon, service, tell))
    await settled


def _leased(session: Session, taken: PageLease, hold_s: float) -> Fields:
    number = 0
    if taken.keys:
        number = session.add_lease(taken, hold_s).number
    else:
        taken.release()
    return {
        "lease": number,
        "slots": pack_slots(taken.slots),
        "tiers": bytes([TIER_CODES[tier] for tier in taken.tiers[: len(taken.slots)]]),
        "checksums": b"".join([each or _NO_CHECKSUM for each in taken.checksums]),
    }


def reserve(service: Service, session: Session, request: Request) -> Result:
    """Hand out slots to fill."""
    body = request.body
    assert isinstance(body, requests.Reserve)
    pages = _class_of(session)
    if body.count < 1:
        raise ProtocolError(WireCode.FIELD, "reserve: expected count from 1 up, got 0")
    session.check_reservation_room(body.count)
    held = pages.store.reserve(body.count, session.owner)
    if not held.views:
        held.release()
        return {"reservation": 0, "slots": b""}
    hold = session.add_reservation(held, body.hold_ms * _MS)
    return {"reservation": hold.number, "slots": pack_slots(held.slots)}


def commit(service: Service, session: Session, request: Request) -> Result:
    """Publish filled slots, after the checks that the configuration asks for."""
    body = request.body
    assert isinstance(body, requests.Commit)
    pages = _class_of(session)
    hold = session.reservation(body.reservation)
    keys = split_keys(body.keys)
    if len(keys) > hold.pages:
        raise ProtocolError(
            WireCode.FIELD,
            f"commit: {len(keys)} keys for a reservation of {hold.pages} slots; commit what was "
            "reserved",
        )
    if hold.busy:
        raise ProtocolError(
            WireCode.ORDER, f"commit: a put into reservation {hold.number} is not answered yet"
        )
    if len(set(keys)) < len(keys):
        raise ProtocolError(WireCode.FIELD, "commit: a key occurs twice; name each page once")
    given = _split(body.checksums, CHECKSUM_BYTES) or None
    checks = pages.checks_for(len(keys), given)
    if not any(checks) and len(keys) <= INLINE_PAGES:
        # The client is done with these slots, whatever becomes of them.
        hold.enter()
        session.end(hold)
        try:
            outcomes = hold.reservation.commit(keys, given, session.owner)
        finally:
            hold.leave()
        return {"outcomes": bytes([OUTCOME_CODES[outcome] for outcome in outcomes])}
    hold.enter()
    session.end(hold)
    return _commit_checked(service, session, pages, hold, keys, given, checks)


async def _commit_checked(
    service: Service,
    session: Session,
    pages: PageClass,
    hold: ReservationHold,
    keys: list[PageKey],
    given: list[bytes] | None,
    checks: list[bool],
) -> Fields:
    try:
        wanted = [index for index, check in enumerate(checks) if check]
        computed = await _digests(service, hold.reservation, wanted, pages.page_bytes)
        wrong: list[int] = []
        if given is None:
            given = computed or None
        else:
            wrong = _unlike(wanted, computed, given)
            if wrong:
                # Whoever scribbles is not to be believed for the pages that were not read either.
                rest = [index for index, check in enumerate(checks) if not check]
                computed = await _digests(service, hold.reservation, rest, pages.page_bytes)
                wrong += _unlike(rest, computed, given)
                pages.commit_mismatches += len(wrong)
                hold.reservation.refuse(wrong)
        outcomes = await service.workers.submit(
            partial(hold.reservation.commit, keys, given, session.owner)
        )
    finally:
        hold.leave()
    for index in wrong:
        outcomes[index] = CommitOutcome.FAILED
    return {"outcomes": bytes([OUTCOME_CODES[outcome] for outcome in outcomes])}


def _unlike(indexes: Sequence[int], computed: Sequence[bytes], given: Sequence[bytes]) -> list[int]:
    """Which of `indexes` have another checksum than their client gave."""
    return [i for i, found in zip(indexes, computed, strict=True) if found != given[i]]


async def _digests(
    service: Service, reservation: StoreReservation, indexes: list[int], page_bytes: int
) -> list[bytes]:
    """Checksums of the payloads at `indexes`, computed by as many workers as are worth it."""
    parts = min(len(indexes), service.workers.count, 1 + len(indexes) * page_bytes // PART_BYTES)
    if not parts:
        return []
    step = -(-len(indexes) // parts)
    jobs = [
        service.workers.submit(partial(digests, reservation, indexes[at : at + step]))
        for at in range(0, len(indexes), step)
    ]
    # All of them, even after a failure: none may read a slot that was given back.
    done = await asyncio.gather(*jobs, return_exceptions=True)
    found: list[bytes] = []
    for part in done:
        if isinstance(part, BaseException):
            raise part
        found += part
    return found


def release(service: Service, session: Session, request: Request) -> Result:
    """Give leases and reservations back: those that are there, then an error for the others."""
    body = request.body
    assert isinstance(body, requests.Release)
    foreign: ProtocolError | None = None
    for number in body.leases:
        try:
            session.end(session.lease(number))
        except ProtocolError as error:
            foreign = foreign or error
    for number in body.reservations:
        try:
            session.end(session.reservation(number))
        except ProtocolError as error:
            foreign = foreign or error
    if foreign is not None:
        raise foreign
    return {}


def prefetch(service: Service, session: Session, request: Request) -> Result:
    """Start bringing pages up that nobody waits for."""
    body = request.body
    assert isinstance(body, requests.Prefetch)
    pages = _class_of(session)
    if len(session.prefetches) >= session.limits.in_flight:
        raise ProtocolError(
            WireCode.LIMIT, f"prefetch: {len(session.prefetches)} are under way; wait for some"
        )
    keys, wait_s = split_keys(body.keys), body.wait_ms * _MS
    if pages.store.lookup_waits:
        return _prefetch_later(service, session, pages, keys, wait_s)
    return _prefetched(service, session, pages, keys, wait_s, pages.store.lookup(keys))


async def _prefetch_later(
    service: Service, session: Session, pages: PageClass, keys: list[PageKey], wait_s: float
) -> Fields:
    there = await service.askers.submit(partial(pages.store.lookup, keys))
    if session.closed:
        return {}
    return _prefetched(service, session, pages, keys, wait_s, there)


def _prefetched(
    service: Service,
    session: Session,
    pages: PageClass,
    keys: list[PageKey],
    wait_s: float,
    there: Sequence[TierName | None],
) -> Fields:
    accepted = next((index for index, tier in enumerate(there) if tier is None), len(keys))
    fetch = pages.fetch(keys[:accepted], wait_s, session.owner)
    session.prefetches.add(fetch)

    def done() -> None:
        # The pages stay in host memory; only the hold on them ends.
        session.prefetches.discard(fetch)
        fetch.cancel()

    fetch.add_done_callback(partial(_call_soon, service, done))
    return {"accepted": accepted}


def put(service: Service, session: Session, request: Request) -> Result:
    """Write one reserved slot from the payload in the request."""
    body = request.body
    assert isinstance(body, requests.Put)
    _check_stream(session, Verb.PUT)
    hold = session.reservation(body.reservation)
    page_bytes = _class_of(session).page_bytes
    if len(body.payload) != page_bytes:
        raise ProtocolError(
            WireCode.FIELD,
            f"put: expected a payload of {page_bytes} bytes, got {len(body.payload)}",
        )
    view = _at(hold, hold.reservation.views, body.index)
    if page_bytes <= INLINE_BYTES:
        copy_bytes(view, body.payload)
        return {}
    hold.enter()
    return _put_later(service, hold, view, body.payload)


async def _put_later(
    service: Service, hold: ReservationHold, view: memoryview, payload: bytes
) -> Fields:
    try:
        await service.workers.submit(partial(copy_bytes, view, payload))
    finally:
        hold.leave()
    return {}


def get(service: Service, session: Session, request: Request) -> Result:
    """Send the payload of one leased page."""
    body = request.body
    assert isinstance(body, requests.Get)
    _check_stream(session, Verb.GET)
    hold = session.lease(body.lease)
    view = _at(hold, hold.lease.views, body.index)
    if len(view) <= INLINE_BYTES:
        return encode_answer(request.request_id, {"payload": view})
    hold.enter()
    return _get_later(service, hold, view, request.request_id)


async def _get_later(service: Service, hold: LeaseHold, view: memoryview, request_id: int) -> bytes:
    try:
        return await service.workers.submit(partial(encode_answer, request_id, {"payload": view}))
    finally:
        hold.leave()


def stats(service: Service, session: Session, request: Request) -> Result:
    """The daemon in figures, as /status gives them."""
    return {"stats": status_fields(service)}


def namespaces(service: Service, session: Session, request: Request) -> Result:
    """What is known, and what each of them has here."""
    return _namespaces(service)


async def _namespaces(service: Service) -> Fields:
    return {"namespaces": await service.waiters.submit(partial(namespace_rows, service))}


def drop(service: Service, session: Session, request: Request) -> Result:
    """Remove pages: of a namespace, or by key in the connection's page class."""
    body = request.body
    assert isinstance(body, requests.Drop)
    if body.namespace:
        return _drop_namespace(service, body.namespace)
    return _drop_keys(service, _class_of(session), split_keys(body.keys))


async def _drop_namespace(service: Service, digest: bytes) -> Fields:
    return {"dropped": await drop_namespace(service, digest)}


async def drop_namespace(service: Service, digest: bytes) -> int:
    """Remove every page of a namespace; returns how many. Forgets it when nobody uses it."""
    known = service.namespaces.find(digest)
    if known is None:
        raise ProtocolError(
            WireCode.FIELD, f"drop: namespace {digest.hex()} is not known; see tierkv ls"
        )
    dropped = 0
    pages = service.classes.get(known.page_bytes)
    if pages is not None:
        dropped = await service.waiters.submit(partial(pages.store.drop_owner, known.owner))
    if not any(session.owner == known.owner for session in service.sessions.values()):
        await service.waiters.submit(partial(service.namespaces.forget, digest))
    return dropped


async def _drop_keys(service: Service, pages: PageClass, keys: list[PageKey]) -> Fields:
    def run() -> int:
        dropped = pages.store.drop(keys, TierName.HOST)
        if len(pages.store.stats().tiers) > 1:
            dropped += pages.store.drop(keys, TierName.NVME)
        return dropped

    return {"dropped": await service.waiters.submit(run)}


def flush(service: Service, session: Session, request: Request) -> Result:
    """Make what is only in host memory durable."""
    body = request.body
    assert isinstance(body, requests.Flush)
    chosen = list(service.classes) if session.page_class is None else [session.page_class]
    return _flush(service, chosen, body.wait_ms * _MS)


async def _flush(service: Service, chosen: list[PageClass], wait_s: float) -> Fields:
    return {"durable": await flush_classes(service, chosen, wait_s)}


async def flush_classes(service: Service, chosen: Sequence[PageClass], wait_s: float) -> bool:
    """Flush these classes side by side, at most `wait_s` long; whether all is durable."""
    jobs = [service.waiters.submit(partial(pages.store.flush, wait_s)) for pages in chosen]
    done = await asyncio.gather(*jobs)
    return all(done)


HANDLERS: dict[Verb, Handler] = {
    Verb.LOOKUP: lookup,
    Verb.LEASE: lease,
    Verb.RESERVE: reserve,
    Verb.COMMIT: commit,
    Verb.RELEASE: release,
    Verb.TOUCH: touch,
    Verb.PREFETCH: prefetch,
    Verb.PUT: put,
    Verb.GET: get,
    Verb.STATS: stats,
    Verb.NAMESPACES: namespaces,
    Verb.DROP: drop,
    Verb.FLUSH: flush,
}

WHILE_CLOSING = frozenset((Verb.COMMIT, Verb.RELEASE, Verb.PUT, Verb.STATS))
"""Verbs that end something, or look: they are served while the daemon stops."""


def _call_soon(service: Service, call: Callable[[], None]) -> None:
    """Run `call` on the loop; from any thread, also one that outlives the loop."""
    if not service.loop.is_closed():
        service.loop.call_soon_threadsafe(call)


def _split(joined: bytes, step: int) -> list[bytes]:
    return [joined[at : at + step] for at in range(0, len(joined), step)]


def _class_of(session: Session) -> PageClass:
    if session.page_class is None:
        raise ProtocolError(
            WireCode.ORDER, "this connection greeted with page_bytes 0: it has no pages"
        )
    return session.page_class


def _check_stream(session: Session, verb: Verb) -> None:
    if session.mode is not Mode.STREAM:
        raise ProtocolError(
            WireCode.ORDER, f"{verb}: this connection shares memory; greet with mode stream"
        )


def _at(hold: LeaseHold | ReservationHold, views: list[memoryview], index: int) -> memoryview:
    if index >= len(views):
        raise ProtocolError(
            WireCode.FIELD, f"index {index}: {hold.number} holds {len(views)} pages"
        )
    return views[index]
