"""AsyncClient: the daemon's verbs inside an event loop, many in flight over one connection.

Owns the connection and its renewal. What the daemon cannot answer is a miss for lookup, reserve,
fetch, touch and prefetch, as with Client; flush, stats, namespaces and drop are an operator's and
raise. All of it runs on one loop's thread. Called by the command line, routers and benchmarks.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from tierkv.client.async_link import AsyncLink
from tierkv.client.errors import DaemonAwayError
from tierkv.client.handshake import Greeting, check_path, greet
from tierkv.client.held import ClientLease, mapped_lease, no_pages
from tierkv.client.settings import ClientSettings
from tierkv.protocol import answers
from tierkv.protocol.answers import parse_answer
from tierkv.protocol.errors import ProtocolError
from tierkv.protocol.messages import PROTOCOL_VERSION, Mode, Verb
from tierkv.protocol.packing import (
    split_checksums,
    unpack_outcomes,
    unpack_slots,
    unpack_tiers,
)
from tierkv.protocol.requests import Hello
from tierkv.storage.clock import Clock, SystemClock
from tierkv.storage.errors import ConfigError, TierError
from tierkv.storage.identity import Fingerprint, to_json
from tierkv.storage.types import CommitOutcome, NamespaceId, PageKey, TierName

log = logging.getLogger(__name__)

_MS = 1000.0
MARGIN_S = 1.0
"""Beyond what the daemon was asked to wait: its answer is on the way."""

Answer = TypeVar("Answer")


class AsyncReservation:
    """Slots to fill in place. An async context manager: leaving it gives back what is left."""

    def __init__(
        self, client: AsyncClient, link: AsyncLink | None, number: int, views: list[memoryview]
    ) -> None:
        self.views = views
        """Writable, page_bytes each; may be fewer than asked for."""
        self._client = client
        self._link = link
        self._number = number

    async def commit(
        self, keys: Sequence[PageKey], checksums: Sequence[bytes] = ()
    ) -> list[CommitOutcome]:
        """Publish the first len(keys) views. FAILED for all when the daemon cannot be reached."""
        assert len(keys) <= len(self.views), (len(keys), len(self.views))
        link, self._link = self._link, None
        views, self.views = self.views, []
        failed = [CommitOutcome.FAILED] * len(keys)
        if link is None or link.lost is not None:
            return failed
        return await self._client.publish(link, self._number, views, keys, checksums) or failed

    def release(self) -> None:
        """Give uncommitted slots back. Idempotent."""
        link, self._link = self._link, None
        self.views = []
        if link is not None:
            link.post(Verb.RELEASE, {"leases": [], "reservations": [self._number]})

    async def __aenter__(self) -> AsyncReservation:
        return self

    async def __aexit__(self, *exception: object) -> None:
        self.release()


class AsyncClient:
    """See the module. `async with AsyncClient(...)` connects on entry and closes on exit.

    `page_bytes` 0 makes an operator's client. Entry raises ConfigError when the daemon is there
    and will not serve this client as it is.
    """

    def __init__(
        self,
        path: Path | str,
        page_bytes: int = 0,
        fingerprint: Fingerprint | None = None,
        *,
        tenant: str = "",
        mode: str = "shared",
        settings: ClientSettings | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.page_bytes = page_bytes
        self._settings = settings or ClientSettings()
        self._clock = clock or SystemClock()
        self._stream = Mode(mode) is Mode.STREAM
        hello = Hello(
            version=PROTOCOL_VERSION,
            client=f"pid {os.getpid()}",
            page_bytes=page_bytes,
            fingerprint="" if fingerprint is None else to_json(fingerprint),
            mode=Mode(mode).value,
            tenant=tenant,
        )
        self._greeting = Greeting(check_path(Path(path)), hello, self._settings.connect_s)
        self._link: AsyncLink | None = None
        self._why_away = "not connected yet"
        self._lost = asyncio.Event()
        self._met = asyncio.Event()
        self._keeper: asyncio.Task[None] | None = None

    async def __aenter__(self) -> AsyncClient:
        await self.open()
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    @property
    def connected(self) -> bool:
        """True while there is a connection."""
        return self._link is not None

    async def wait_connected(self, timeout_s: float) -> bool:
        """Wait until there is a connection; False past the timeout."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._met.wait()
        except TimeoutError:
            return False
        return True

    async def open(self) -> None:
        """Connect if the daemon is there, and keep trying if it is not. Raises ConfigError."""
        try:
            await self._attempt()
        except OSError as error:
            self._why_away = str(error)
        self._keeper = asyncio.create_task(self._keep())

    async def close(self) -> None:
        """End the connection; what was held is free then. Idempotent."""
        keeper, self._keeper = self._keeper, None
        if keeper is not None:
            keeper.cancel()
            await asyncio.wait([keeper])
        if self._link is not None:
            self._link.fail("closed")

    async def lookup(self, keys: Sequence[PageKey]) -> list[TierName | None]:
        """The fastest tier that holds each key, or None. At most limits.keys keys."""
        answer = await self._ask(Verb.LOOKUP, {"keys": b"".join(keys)}, answers.LookupAnswer)
        if answer is None or len(answer.tiers) != len(keys):
            return [None] * len(keys)
        return unpack_tiers(answer.tiers)

    async def reserve(self, count: int) -> AsyncReservation:
        """Up to `count` slots to fill; none when the daemon cannot be reached."""
        link = self._link
        if link is None or count < 1:
            return AsyncReservation(self, None, 0, [])
        fields = {"count": count, "hold_ms": self._hold_ms(link)}

        def give_back(late: dict[str, Any]) -> None:
            fields = {"leases": [], "reservations": [late.get("reservation", 0)]}
            link.post(Verb.RELEASE, fields)

        answer = await self._ask(Verb.RESERVE, fields, answers.ReserveAnswer, on_late=give_back)
        if answer is None or not answer.slots:
            return AsyncReservation(self, None, 0, [])
        mapping = link.session.mapping
        try:
            views = [
                memoryview(bytearray(self.page_bytes))
                if mapping is None
                else mapping.writable(slot)
                for slot in unpack_slots(answer.slots)
            ]
        except IndexError as error:
            link.fail(f"reserve: {error}")
            return AsyncReservation(self, None, 0, [])
        return AsyncReservation(self, link, answer.reservation, views)

    async def fetch(self, keys: Sequence[PageKey], deadline_s: float) -> ClientLease:
        """A lease of the leading run that is in host memory within `deadline_s`; may be empty.

        The caller releases it, on the loop's thread.
        """
        link = self._link
        if link is None or not keys:
            return no_pages()
        fields = {
            "keys": b"".join(keys),
            "wait_ms": min(link.limits.wait_ms, int(deadline_s * _MS)),
            "hold_ms": self._hold_ms(link),
        }
        until = self._clock.monotonic() + self._hold_ms(link) / _MS

        def give_back(late: dict[str, Any]) -> None:
            link.post(Verb.RELEASE, {"leases": [late.get("lease", 0)], "reservations": []})

        answer = await self._ask(
            Verb.LEASE, fields, answers.LeaseAnswer, deadline_s + MARGIN_S, give_back
        )
        if answer is None or not answer.slots or len(answer.tiers) > len(keys):
            return no_pages()
        mapping = link.session.mapping
        try:
            if mapping is None:
                return await self._pull(link, keys, answer)
            return mapped_lease(link, mapping, keys, answer, until, self._clock)
        except (IndexError, ProtocolError) as error:
            link.fail(f"lease: {error}")
            return no_pages()

    def touch(self, keys: Sequence[PageKey]) -> None:
        """Tell every tier that these pages were used."""
        if self._link is not None:
            self._link.post(Verb.TOUCH, {"keys": b"".join(keys)})

    async def prefetch(self, keys: Sequence[PageKey], wait_s: float = 10.0) -> int:
        """Have pages brought into host memory; returns how many are."""
        fields = {"keys": b"".join(keys), "wait_ms": int(wait_s * _MS)}
        answer = await self._ask(Verb.PREFETCH, fields, answers.PrefetchAnswer)
        return 0 if answer is None else answer.accepted

    async def flush(self, deadline_s: float) -> bool:
        """Wait until everything is durable; False past the deadline. Raises TierError."""
        fields = {"wait_ms": int(deadline_s * _MS)}
        timeout_s = deadline_s + MARGIN_S
        return (await self._demand(Verb.FLUSH, fields, answers.FlushAnswer, timeout_s)).durable

    async def stats(self) -> dict[str, Any]:
        """The daemon in figures, as it gives them. Raises TierError."""
        return (await self._demand(Verb.STATS, {}, answers.StatsAnswer)).stats

    async def namespaces(self) -> list[dict[str, Any]]:
        """What the daemon knows, and what each namespace has in each tier. Raises TierError."""
        return (await self._demand(Verb.NAMESPACES, {}, answers.NamespacesAnswer)).namespaces

    async def drop(
        self, *, namespace: NamespaceId | None = None, keys: Sequence[PageKey] = ()
    ) -> int:
        """Remove the pages of a namespace, or these; returns how many. Raises TierError."""
        fields = {"namespace": namespace or b"", "keys": b"".join(keys)}
        return (await self._demand(Verb.DROP, fields, answers.DropAnswer)).dropped

    async def publish(
        self,
        link: AsyncLink,
        number: int,
        views: Sequence[memoryview],
        keys: Sequence[PageKey],
        checksums: Sequence[bytes],
    ) -> list[CommitOutcome] | None:
        """Commit a reservation; None when it did not go well. By AsyncReservation only."""
        if self._stream:
            for index in range(len(keys)):
                fields = {"reservation": number, "index": index, "payload": views[index]}
                if await self._ask(Verb.PUT, fields, answers.EmptyAnswer) is None:
                    link.post(Verb.RELEASE, {"leases": [], "reservations": [number]})
                    return None
        fields = {
            "reservation": number,
            "keys": b"".join(keys),
            "checksums": b"".join(checksums),
        }
        timeout_s = self._settings.commit_s
        answer = await self._ask(Verb.COMMIT, fields, answers.CommitAnswer, timeout_s)
        if answer is None or len(answer.outcomes) != len(keys):
            return None
        return unpack_outcomes(answer.outcomes)

    async def _pull(
        self, link: AsyncLink, keys: Sequence[PageKey], answer: answers.LeaseAnswer
    ) -> ClientLease:
        """The payloads of a lease, over the socket; the lease is given back."""
        views: list[memoryview] = []
        for index in range(len(answer.tiers)):
            fields = {"lease": answer.lease, "index": index}
            got = await self._ask(Verb.GET, fields, answers.GetAnswer)
            if got is None or len(got.payload) != self.page_bytes:
                break
            views.append(memoryview(got.payload))
        link.post(Verb.RELEASE, {"leases": [answer.lease], "reservations": []})
        run = len(views)
        tiers = [tier for tier in unpack_tiers(answer.tiers) if tier is not None][:run]
        sums = split_checksums(answer.checksums)[:run]
        return ClientLease(keys[:run], views, tiers, [0] * run, sums)

    async def _ask(
        self,
        verb: Verb,
        fields: Mapping[str, object],
        kind: type[Answer],
        timeout_s: float | None = None,
        on_late: Any = None,
    ) -> Answer | None:
        """As _demand; None for what it raises."""
        try:
            return await self._demand(verb, fields, kind, timeout_s, on_late)
        except TierError as error:
            log.debug("miss verb=%s error=%s", verb, error)
            return None

    async def _demand(
        self,
        verb: Verb,
        fields: Mapping[str, object],
        kind: type[Answer],
        timeout_s: float | None = None,
        on_late: Any = None,
    ) -> Answer:
        link = self._link
        if link is None:
            raise DaemonAwayError(f"{verb}: no daemon ({self._why_away}); is it running?")
        timeout_s = self._settings.call_s if timeout_s is None else timeout_s
        values = await link.ask(verb, fields, timeout_s, on_late)
        try:
            return parse_answer(kind, values, link.limits)
        except ProtocolError as error:
            link.fail(str(error))
            raise DaemonAwayError(f"{verb}: {error}") from error

    def _hold_ms(self, link: AsyncLink) -> int:
        return min(link.limits.hold_ms, int(self._settings.hold_s * _MS))

    async def _keep(self) -> None:
        """Connect again whenever the connection is lost."""
        wait_s = self._settings.backoff_first_s
        while True:
            if self._link is not None:
                await self._lost.wait()
                wait_s = self._settings.backoff_first_s
                continue
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, self._settings.backoff_max_s)
            try:
                await self._attempt()
            except (ConfigError, OSError) as error:
                self._why_away = str(error)

    async def _attempt(self) -> None:
        loop = asyncio.get_running_loop()
        run = partial(greet, self._greeting, self._clock, populate=self._settings.populate)
        session = await loop.run_in_executor(None, run)
        session.sock.setblocking(False)
        self._lost.clear()
        link = AsyncLink(session, self._on_lost)
        try:
            await loop.create_unix_connection(lambda: link, sock=session.sock)
        except BaseException:
            session.sock.close()
            raise
        if link.lost is None:
            self._link = link
            self._met.set()

    def _on_lost(self) -> None:
        if self._link is not None:
            self._why_away = self._link.lost or ""
        self._link = None
        self._met.clear()
        self._lost.set()
