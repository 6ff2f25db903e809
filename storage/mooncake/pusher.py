"""Copies pages from the host arena into a Mooncake Store.

Owns the queue of pages wanted and the counts of what became of them. What the store has already is
not sent again; what it has no room for is counted and let go. Called by the remote with the
store's lock held (offer), and by its worker thread.

Invariants: offered == queued + running + pushed + duplicates + dropped + failed; a page is leased
in host while the library may read it, however long its call takes.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tierkv.storage.bandwidth import TransferMeter
from tierkv.storage.base import PageLease
from tierkv.storage.checksum import payload_checksum
from tierkv.storage.clock import Clock
from tierkv.storage.device import address_of
from tierkv.storage.mooncake.client import Answer, MooncakeClient, Piece
from tierkv.storage.mooncake.config import MooncakeConfig
from tierkv.storage.mooncake.gate import Gate
from tierkv.storage.mooncake.knowledge import Knowledge
from tierkv.storage.mooncake.values import (
    HEADER_BYTES,
    HeaderScratch,
    ValueHeader,
    key_text,
)
from tierkv.storage.remote import LocalStore
from tierkv.storage.types import PageKey

IDLE_WAIT_S = 5.0
LEASE_WAIT_S = 5.0
"""Longest wait for pages that have to come from nvme first."""


@dataclass(frozen=True, slots=True)
class PushCounts:
    """In pages; `queued` now, the others from the start."""

    queued: int
    pushed: int
    duplicates: int
    dropped: int
    failed: int


class Pusher:
    """See the module docstring."""

    def __init__(
        self,
        config: MooncakeConfig,
        clock: Clock,
        client: MooncakeClient,
        gate: Gate,
        known: Knowledge,
        store: LocalStore,
        meter: TransferMeter,
    ) -> None:
        self._config = config
        self._clock = clock
        self._client = client
        self._gate = gate
        self._known = known
        self._store = store
        self._meter = meter
        self.headers = HeaderScratch(config.batch_pages)
        self._changed = threading.Condition()
        self._wanted: dict[PageKey, int] = {}
        """Owner by key, oldest first."""
        self._running: set[PageKey] = set()
        self._offered = self._pushed = self._duplicates = self._dropped = self._failed = 0
        self._unmade = 0
        """Copies that were wanted and not made since flush() last said so."""
        self._stopping = False

    def offer(self, keys: Iterable[PageKey], owner: int) -> None:
        """Queue copies; those for which there is no room, or nobody to send them to, are
        dropped and counted. Never waits."""
        serving = self._gate.open
        with self._changed:
            for key in keys:
                if key in self._wanted or key in self._running:
                    continue
                self._offered += 1
                if serving and not self._stopping and len(self._wanted) < self._config.push_pages:
                    self._wanted[key] = owner
                else:
                    self._dropped += 1
                    self._unmade += 1
            self._changed.notify_all()

    def counts(self) -> PushCounts:
        """Consistent with each other. O(1)."""
        with self._changed:
            queued = len(self._wanted) + len(self._running)
            return PushCounts(queued, self._pushed, self._duplicates, self._dropped, self._failed)

    def wait_quiet(self, timeout_s: float) -> bool:
        """Wait until no copy is queued or running; False past the timeout."""
        with self._changed:
            return self._changed.wait_for(
                lambda: not self._wanted and not self._running, max(0.0, timeout_s)
            )

    def flush(self, timeout_s: float) -> bool:
        """Wait for every copy wanted so far; False past the timeout, or when one could not be
        made since the last flush."""
        quiet = self.wait_quiet(timeout_s)
        with self._changed:
            unmade, self._unmade = self._unmade, 0
        return quiet and not unmade

    def stop(self) -> None:
        """Drop what is queued and let work() end. Never waits."""
        with self._changed:
            self._stopping = True
            self._dropped += len(self._wanted)
            self._unmade += len(self._wanted)
            self._wanted.clear()
            self._changed.notify_all()

    def check(self) -> None:
        """Assert conservation. O(queued)."""
        with self._changed:
            under_way = len(self._wanted) + len(self._running)
            ended = self._pushed + self._duplicates + self._dropped + self._failed
            assert self._offered == under_way + ended, (self._offered, under_way, ended)
            assert len(self._wanted) <= self._config.push_pages, len(self._wanted)
            assert not self._running & self._wanted.keys(), "a copy is queued and running"

    def work(self) -> bool:
        """One batch of one owner's pages, waited for; False when the worker should end."""
        keys, owner = self._take()
        try:
            if keys:
                self._copy(keys, owner)
        finally:
            self._end([key for key in keys if key in self._running], failed=True)
        with self._changed:
            return not self._stopping

    def _take(self) -> tuple[list[PageKey], int]:
        with self._changed:
            self._changed.wait_for(lambda: self._wanted or self._stopping, IDLE_WAIT_S)
            owner = next(iter(self._wanted.values()), 0)
            keys: list[PageKey] = []
            for key, whose in self._wanted.items():
                if whose != owner or len(keys) == len(self.headers):
                    break
                keys.append(key)
            for key in keys:
                del self._wanted[key]
            self._running.update(keys)
            return keys, owner

    def _copy(self, keys: Sequence[PageKey], owner: int) -> None:
        """End every copy, or leave to the caller what failed."""
        missing = self._not_there([key for key in keys if not self._known.is_corrupt(key)])
        missing += [key for key in keys if self._known.is_corrupt(key) and self._removed(key)]
        while missing:
            # A fetch hands out a leading run; what is gone from here ends it.
            fetch = self._store.fetch(missing, LEASE_WAIT_S, owner=owner, here=True)
            with fetch.take(LEASE_WAIT_S) as lease:
                taken = len(lease.keys)
                if taken:
                    self._put(lease)
            missing = missing[max(1, taken) :]

    def _not_there(self, keys: Sequence[PageKey]) -> list[PageKey]:
        """Those of `keys` that the store does not have; ends the copies of what it has."""
        if not keys or not self._gate.open:
            return []
        texts = self._texts(keys)
        found, in_time = self._gate.run(
            f"look-up of {len(keys)} pages",
            self._clock.monotonic() + self._config.call_s,
            lambda: self._client.exist(texts),
        )
        self._judge("look-up", in_time, answered=any(there is not None for there in found))
        there = [key for key, held in zip(keys, found, strict=True) if held]
        self._known.found(there)
        self._end(there, duplicate=True)
        return [key for key, held in zip(keys, found, strict=True) if held is False]

    def _removed(self, key: PageKey) -> bool:
        """Make way for a good copy of a page whose value is wrong; False when that failed.

        Without asking first: to ask renews the value's lease.
        """
        if not self._gate.open:
            return False
        (text,) = self._texts([key])
        answer, in_time = self._gate.run(
            "remove",
            self._clock.monotonic() + self._config.call_s,
            lambda: self._client.remove(text),
        )
        done = answer is not Answer.FAILED
        self._judge("remove", in_time, answered=done)
        return done

    def _put(self, lease: PageLease) -> None:
        """Send the leased pages, whose memory is the library's until its call returns."""
        page_bytes = self._store.page_bytes
        values = []
        # Without checksums in host the page as it is there now is what a reader shall find.
        sums = lease.checksums or [b""] * len(lease.keys)
        for index, (key, view) in enumerate(zip(lease.keys, lease.views, strict=True)):
            header = ValueHeader(key, page_bytes, sums[index] or payload_checksum(view))
            self.headers.block(index)[:] = header.pack()
            values.append(
                (
                    Piece(self.headers.address(index), HEADER_BYTES),
                    Piece(address_of(view), page_bytes),
                )
            )
        texts = self._texts(lease.keys)
        started = self._meter.begin()
        answers: list[Answer] = []
        try:
            answers, in_time = self._gate.run(
                f"put of {len(values)} pages",
                self._clock.monotonic() + self._config.call_s,
                lambda: self._client.put(texts, values),
            )
        finally:
            self._meter.end(started, answers.count(Answer.DONE) * page_bytes)
        self._judge("put", in_time, answered=any(one is not Answer.FAILED for one in answers))
        self._gate.note_room(answers.count(Answer.DONE), answers.count(Answer.NO_ROOM))
        done = [key for key, one in zip(lease.keys, answers, strict=True) if one is Answer.DONE]
        self._known.stored(done)
        self._end(done)

    def _judge(self, what: str, in_time: bool, *, answered: bool) -> None:
        self._gate.judge(what, in_time, answered, self._client.last_code)

    def _end(
        self, keys: Sequence[PageKey], *, duplicate: bool = False, failed: bool = False
    ) -> None:
        with self._changed:
            self._running.difference_update(keys)
            if failed:
                self._failed += len(keys)
                self._unmade += len(keys)
            elif duplicate:
                self._duplicates += len(keys)
            else:
                self._pushed += len(keys)
            self._changed.notify_all()

    def _texts(self, keys: Sequence[PageKey]) -> list[str]:
        return [key_text(key, self._store.page_bytes) for key in keys]
