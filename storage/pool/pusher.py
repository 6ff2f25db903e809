"""Copies from one store to one peer: hold the pages here, let the peer read them, hear that it has.

Owns the queue of copies for one peer and the thread that makes them. Knows neither which pages
want copies nor where else one could go (copies.py does). Called by copies.py.

    copy state   leaves by
    QUEUED       the thread takes it -> RUNNING; empty() -> its caller's
    RUNNING      acknowledged, there already, gone from here, refused: told to `done`, once

Invariants: a page is copied out of a lease that holds it; a lease whose STORE was not answered is
held for the longest transfer more, since the peer may still be reading (quarantine); a copy counts
as made when the peer has said so, not before. Whatever the peer then read, it compares checksums.
"""

from __future__ import annotations

import logging
import threading
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from enum import Enum

from tierkv.storage.bandwidth import TransferMeter
from tierkv.storage.base import PageLease
from tierkv.storage.checksum import CHECKSUM_BYTES
from tierkv.storage.clock import Clock
from tierkv.storage.errors import TierError, TierIOError
from tierkv.storage.pool.config import PoolConfig
from tierkv.storage.pool.exchange import Session
from tierkv.storage.pool.holdings import fingerprint, fingerprints
from tierkv.storage.pool.link import Link
from tierkv.storage.pool.messages import OfferedPage, Refusal, StoreAsk, StoreOutcome
from tierkv.storage.pool.pins import Pins
from tierkv.storage.remote import LocalStore
from tierkv.storage.types import PageKey, TierName

IDLE_S = 60.0
HOLD_S = 5.0
"""How long the pages of a batch may take to come up from nvme to be copied."""
ANSWER_GRACE_S = 1.0
"""The peer may take store_s to read; so much longer its answer may take."""
QUARANTINED_MAX = 4
"""Batches held for a peer that did not answer. With so many it is asked no more for a while."""
PINS_PAUSE_S = 0.05
"""Between two tries to hold pages still, while others hold all that may be."""
STOP_S = 5.0

log = logging.getLogger(__name__)


class Copy:
    """One page to be copied to one peer, or to the next one."""

    __slots__ = ("background", "key", "tried")

    def __init__(self, key: PageKey, background: bool) -> None:
        self.key = key
        self.background = background
        """Nobody waits for it: rebalancing."""
        self.tried: list[str] = []
        """Names of members that could not take it."""


class CopyEnd(Enum):
    """What became of a copy at one peer."""

    MADE = "made"
    THERE = "there"
    """The peer had it already."""
    GONE = "gone"
    """The page is not here any more, or has no checksum to be believed by."""
    REFUSED = "refused"
    """Another member may take it."""


class Pusher:
    """See the module docstring. Thread-safe."""

    def __init__(
        self,
        link: Link,
        store: LocalStore,
        generation: int,
        writes: TransferMeter,
        done: Callable[[Copy, Link, CopyEnd], None],
        config: PoolConfig,
        clock: Clock,
        pins: Pins,
    ) -> None:
        """`generation`: of the store's memory. `done` is called with no lock held. `pins` is that
        of all pushers of the store."""
        self.link = link
        self._store = store
        self._generation = generation
        self._writes = writes
        self._done = done
        self._config = config
        self._clock = clock
        self._changed = threading.Condition()
        self._queue: deque[Copy] = deque()
        self._running = 0
        self._pins = pins
        self._pinned = 0
        """Of `pins`, for the batch that its thread is at."""
        self._quarantine: deque[tuple[float, list[PageLease], int]] = deque()
        self._thread: threading.Thread | None = None
        self._closing = False
        self._restarts = 0

    @property
    def restarts(self) -> int:
        """Batches that failed by an error of this node."""
        return self._restarts

    @property
    def quarantined(self) -> int:
        """Batches whose pages are held for a peer that did not answer."""
        return len(self._quarantine)

    def add(self, copy: Copy) -> bool:
        """Queue a copy; False when the queue is full, the peer is gone or no thread can be had."""
        with self._changed:
            if self._closing or len(self._queue) >= self._config.push_pages:
                return False
            if not self._start():
                return False
            self._queue.append(copy)
            self._changed.notify_all()
            return True

    def empty(self) -> list[Copy]:
        """Take out all that is queued."""
        with self._changed:
            copies = list(self._queue)
            self._queue.clear()
            self._changed.notify_all()
            return copies

    def check(self) -> None:
        """Assert the invariants. O(1)."""
        with self._changed:
            assert len(self._queue) <= self._config.push_pages, len(self._queue)
            assert 0 <= self._running <= self._config.batch_pages, self._running
            assert len(self._quarantine) <= QUARANTINED_MAX, len(self._quarantine)
            assert not self._queue or self._thread is not None, "copies that nobody makes"

    def close(self, timeout_s: float = STOP_S) -> bool:
        """Stop after the batch that is being copied; False past the timeout. Idempotent.

        What is queued is left for empty(); what is in quarantine for free_all().
        """
        with self._changed:
            self._closing = True
            thread = self._thread
            self._changed.notify_all()
        if thread is None or thread is threading.current_thread():
            return True
        thread.join(timeout_s)
        return not thread.is_alive()

    def free_all(self) -> None:
        """End the quarantine: the peer can reach this store's memory no more."""
        with self._changed:
            held, self._quarantine = list(self._quarantine), deque()
        for _, leases, pages in held:
            self._release(leases)
            self._pins.give(pages)

    # --- its thread -----------------------------------------------------------------------

    def _start(self) -> bool:
        if self._thread is not None:
            return True
        thread = threading.Thread(
            target=self._work, name=f"tierkv-push-{self.link.lane}", daemon=True
        )
        try:
            thread.start()
        except RuntimeError as error:
            log.error("link=%s pusher=not started reason=%s", self.link.lane, error)
            return False
        self._thread = thread
        return True

    def _work(self) -> None:
        """Life of the thread."""
        while (batch := self._take()) is not None:
            try:
                if batch:
                    self._push(batch)
            except TierError as error:
                # The store is closing, or cannot read the page.
                log.info("link=%s copies=%d given up error=%s", self.link.lane, len(batch), error)
                for copy in list(batch):
                    self._end(batch, copy, CopyEnd.GONE)
            except Exception:  # noqa: BLE001
                # The one supervisor: a bug met by one batch must not end all copies (lesson H2).
                log.error("link=%s %s", self.link.lane, traceback.format_exc())
                with self._changed:
                    self._restarts += 1
                for copy in list(batch):
                    self._end(batch, copy, CopyEnd.GONE)
            self._pins.give(self._pinned)
            self._pinned = 0
            with self._changed:
                self._running = 0
                self._changed.notify_all()

    def _take(self) -> list[Copy] | None:
        """The next batch, maybe empty; None when closing. Frees what was held long enough."""
        self._free_due()
        with self._changed:
            due_s = self._quarantine[0][0] - self._clock.monotonic() if self._quarantine else IDLE_S
            full = len(self._quarantine) >= QUARANTINED_MAX
            self._changed.wait_for(
                lambda: self._closing or (bool(self._queue) and not full),
                min(max(0.0, due_s), IDLE_S),
            )
            if self._closing:
                return None
            wanted = 0 if full else min(len(self._queue), self._config.batch_pages)
            self._pinned = self._pins.take(wanted)
            if self._pinned < min(wanted, 1):
                # The copies for other peers hold all that may be held; they end by themselves.
                self._changed.wait_for(lambda: self._closing, PINS_PAUSE_S)
            batch = [self._queue.popleft() for _ in range(self._pinned)]
            self._running = len(batch)
            self._changed.notify_all()
            return batch

    def _free_due(self) -> None:
        now = self._clock.monotonic()
        with self._changed:
            due = []
            while self._quarantine and self._quarantine[0][0] <= now:
                due.append(self._quarantine.popleft())
        for _, leases, pages in due:
            self._release(leases)
            self._pins.give(pages)

    def _push(self, batch: list[Copy]) -> None:
        """Make the copies of one batch; those dealt with are taken out of it."""
        link = self.link
        session = link.session() if link.takes_copies else None
        if session is None:
            for copy in list(batch):
                self._end(batch, copy, CopyEnd.REFUSED)
            return
        self._skip_known(batch)
        leases: list[PageLease] = []
        try:
            pages = self._hold(batch, leases)
        except BaseException:
            self._release(leases)
            raise
        for copy in list(batch):
            if copy.key not in pages:
                self._end(batch, copy, CopyEnd.GONE)
        if batch:
            self._store_there(session, batch, [pages[copy.key] for copy in batch], leases)
        else:
            self._release(leases)

    def _skip_known(self, batch: list[Copy]) -> None:
        if not batch:
            return
        prints = fingerprints([copy.key for copy in batch])
        there = self.link.holds(self._store.page_bytes, prints)
        for copy, known in zip(list(batch), there.tolist(), strict=True):
            if known:
                self._end(batch, copy, CopyEnd.THERE)

    def _hold(self, batch: Sequence[Copy], leases: list[PageLease]) -> dict[PageKey, OfferedPage]:
        """Hold the pages of a batch still, those that are here and can be believed."""
        keys = [copy.key for copy in batch]
        here = self._store.lookup_here(keys) if keys else []
        left = [key for key, found in zip(keys, here, strict=True) if found]
        pages: dict[PageKey, OfferedPage] = {}
        until = self._clock.monotonic() + HOLD_S
        while left:
            left_s = max(0.0, until - self._clock.monotonic())
            # The peer compares what it read with the checksum: once is enough. To be copied is no
            # use of a page: its recency stays.
            fetch = self._store.fetch(left, left_s, verify=False, here=True, quiet=True)
            lease = fetch.take(left_s)
            leases.append(lease)
            for key, slot, checksum in zip(lease.keys, lease.slots, lease.checksums, strict=True):
                if len(checksum) == CHECKSUM_BYTES:
                    offset = self._store.payload_offset(slot)
                    pages[key] = OfferedPage(key, offset, checksum)
            # What ended the run is gone from here; each page stands for itself.
            left = left[len(lease.keys) + 1 :]
        return pages

    def _store_there(
        self,
        session: Session,
        batch: list[Copy],
        pages: Sequence[OfferedPage],
        leases: list[PageLease],
    ) -> None:
        link, size = self.link, self._store.page_bytes
        wait_ms = max(1, int(self._config.store_s * 1000))
        ask = StoreAsk(size, self._generation, tuple(pages), wait_ms)
        started = self._writes.begin()
        link.writes.begin()
        moved = 0
        try:
            answer = link.ask(session, ask, self._config.store_s + ANSWER_GRACE_S)
        except TierIOError as error:
            link.breaker.failed()
            link.count("failures")
            link.note_error(f"store: {error}")
            self._hold_on(leases)
            for copy in list(batch):
                self._end(batch, copy, CopyEnd.REFUSED)
            return
        except BaseException:
            # Whether the peer reads is not known.
            self._hold_on(leases)
            raise
        else:
            self._release(leases)
            if isinstance(answer, Refusal):
                link.refused(answer)
                for copy in list(batch):
                    self._end(batch, copy, CopyEnd.REFUSED)
                return
            moved = size * answer.outcomes.count(StoreOutcome.COMMITTED)
            link.breaker.succeeded()
            link.complaint = None
        finally:
            self._writes.end(started, moved)
            link.writes.end(started, moved)
        for copy, outcome in zip(list(batch), answer.outcomes, strict=True):
            self._acknowledged(session, batch, copy, outcome)

    def _acknowledged(
        self, session: Session, batch: list[Copy], copy: Copy, outcome: StoreOutcome
    ) -> None:
        link = self.link
        if outcome not in (StoreOutcome.COMMITTED, StoreOutcome.EXISTS):
            link.count(f"store_{outcome.name.lower()}")
            self._end(batch, copy, CopyEnd.REFUSED)
            return
        index = link.index(self._store.page_bytes)
        if index is not None and link.epoch == session.epoch:
            # Of an earlier life it says nothing.
            index.note(fingerprint(copy.key))
        made = outcome is StoreOutcome.COMMITTED
        if made:
            link.count("pushed")
            link.count("pushed_bytes", self._store.page_bytes)
        self._end(batch, copy, CopyEnd.MADE if made else CopyEnd.THERE)

    def _end(self, batch: list[Copy], copy: Copy, end: CopyEnd) -> None:
        batch.remove(copy)
        self._done(copy, self.link, end)

    def _hold_on(self, leases: list[PageLease]) -> None:
        """Quarantine: no answer came, so the peer may be reading still."""
        due = self._clock.monotonic() + self._config.transfer_s
        with self._changed:
            self._quarantine.append((due, leases, self._pinned))
            self._pinned = 0

    def _release(self, leases: Sequence[PageLease]) -> None:
        """Hold these pages no more. What came up from nvme to be copied goes down again: balance
        reads whatever is cold, and must not take the place of what is hot."""
        try:
            for lease in leases:
                lease.release()
            pairs = [pair for lease in leases for pair in zip(lease.keys, lease.tiers, strict=True)]
            if risen := [key for key, tier in pairs if tier is TierName.NVME]:
                self._store.let_go(risen)
        except TierError as error:
            log.warning("pool copy: release failed error=%s", error)
