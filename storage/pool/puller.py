"""Pulls from one peer into one store: lease, read, check, land, release.

Owns up to two worker threads, so that one asks for a lease while the other's pages are on their
way. Knows neither who else has a page (Routes does) nor how pages travel (the transport does).
Called by remote.py.

Invariants: a page is landed only when borrow.py let it pass, and only by PullQueue.land(), which
compares its checksum; a pull keeps its slot until nothing writes to it any more, however late
that is; a lease is given back when its read has ended, and else never: the holder waits for it to
end and a while longer. A worker survives whatever one batch does to it.
"""

from __future__ import annotations

import logging
import threading
import traceback
from collections.abc import Sequence
from typing import Protocol

from tierkv.storage.bandwidth import TransferMeter
from tierkv.storage.clock import Clock
from tierkv.storage.errors import TierError, TierIOError
from tierkv.storage.pool.borrow import Borrow, Verdict
from tierkv.storage.pool.config import PoolConfig
from tierkv.storage.pool.exchange import Session
from tierkv.storage.pool.holdings import fingerprint
from tierkv.storage.pool.link import Link
from tierkv.storage.pool.messages import (
    WAIT_MS_MAX,
    LeaseAsk,
    LeaseGrant,
    Refusal,
    ReleaseAsk,
    Status,
)
from tierkv.storage.pulls import PullQueue
from tierkv.storage.remote import Pull, PullState
from tierkv.storage.transport.base import PageOutcome, PeerRead

WORKERS = 2
IDLE_S = 60.0
READ_GRACE_S = 0.5
"""A read ends at its deadline; so much later its worker goes on without it."""
RELEASE_S = 1.0
ASK_S_MIN = 2e-3
"""With less time than this a peer is not asked: being late would be held against it."""
PATIENCE = 4.0
"""Where another holder can be asked, a read may take so many times what it is expected to."""
STOP_S = 5.0

log = logging.getLogger(__name__)


class Routes(Protocol):
    """Who else can be asked. Implemented by remote.py; called with no lock held."""

    def again(self, pull: Pull, link: Link, why: PullState) -> None:
        """A RUNNING pull got no page from `link`: queue it for another holder, or end it."""
        ...

    def elsewhere(self, pulls: Sequence[Pull], link: Link) -> bool:
        """Whether another holder than `link` could be asked for one of them."""
        ...

    def avoid(self, link: Link) -> None:
        """`link` is not to be asked for a while: queue its pulls elsewhere, or end them."""
        ...


class _Batch:
    """Pulls that one worker has. A pull that was queued elsewhere may be another worker's at
    once: it is in `mine` no more, and not to be touched."""

    __slots__ = ("mine", "read")

    def __init__(self, pulls: Sequence[Pull]) -> None:
        self.mine = list(pulls)
        self.read: PeerRead | None = None


class Puller:
    """See the module docstring. Thread-safe."""

    def __init__(
        self,
        link: Link,
        queue: PullQueue,
        page_bytes: int,
        reads: TransferMeter,
        routes: Routes,
        config: PoolConfig,
        clock: Clock,
    ) -> None:
        self.link = link
        self._queue = queue
        self._page_bytes = page_bytes
        self._reads = reads
        self._routes = routes
        self._config = config
        self._clock = clock
        self._lock = threading.Lock()
        self._workers: list[threading.Thread] = []
        self._hold_ms = max(1, int(config.lease_s * 1000))
        """What is asked for and believed in, to the same fraction of a second."""
        self._closing = False
        self._restarts = 0
        self._late_reads = 0

    @property
    def restarts(self) -> int:
        """Batches that failed by an error of this node."""
        return self._restarts

    @property
    def late_reads(self) -> int:
        """Reads that had not ended when their worker went on; they hold slots until they do."""
        return self._late_reads

    def ensure(self) -> None:
        """See to it that somebody takes what is queued. Never waits for work."""
        with self._lock:
            wanted = min(WORKERS, self._queue.queued_in(self.link.lane))
            while len(self._workers) < wanted and not self._closing:
                worker = threading.Thread(
                    target=self._work,
                    name=f"tierkv-pull-{self.link.lane}-{len(self._workers)}",
                    daemon=True,
                )
                try:
                    worker.start()
                except RuntimeError as error:
                    # The system gives no more threads: pulls that nobody takes end in time.
                    log.error("link=%s worker=not started reason=%s", self.link.lane, error)
                    return
                self._workers.append(worker)

    def check(self) -> None:
        """Assert the invariants. O(1)."""
        with self._lock:
            assert len(self._workers) <= WORKERS, len(self._workers)
            assert self._late_reads >= 0, self._late_reads

    def close(self, timeout_s: float = STOP_S) -> bool:
        """Let the workers go after what they are at; False past the timeout. Idempotent."""
        with self._lock:
            self._closing = True
            workers = list(self._workers)
        self._queue.wake()
        deadline = self._clock.monotonic() + timeout_s
        for worker in workers:
            if worker is not threading.current_thread():
                worker.join(max(0.0, deadline - self._clock.monotonic()))
        return not any(worker.is_alive() for worker in workers)

    # --- a worker -------------------------------------------------------------------------

    def _work(self) -> None:
        """Life of one worker thread."""
        while not (self._closing or self._queue.closing):
            pulls = self._queue.take(
                self.link.lane, self._config.batch_pages, IDLE_S, workers=WORKERS
            )
            if not pulls:
                continue
            batch = _Batch(pulls)
            try:
                self._pull(batch)
            except Exception:  # noqa: BLE001
                # The one supervisor: a bug met by one batch must not end the thread that all
                # later ones need (lesson H2).
                log.error("link=%s %s", self.link.lane, traceback.format_exc())
                with self._lock:
                    self._restarts += 1
                self._abandon(batch)

    def _pull(self, batch: _Batch) -> None:
        """One batch, from the lease to its release."""
        session = self.link.session()
        if session is None:
            self._give_up(batch, batch.mine, PullState.FAILED)
            return
        borrow = Borrow(batch.mine, self._hold_ms / 1000, self._clock)
        grant, verdict = self._transfer(session, batch, borrow)
        if verdict is not None:
            landed = self._settle(batch, verdict)
            self.link.count("pulled", landed)
            self.link.count("pulled_bytes", landed * self._page_bytes)
        if grant is not None and (batch.read is None or batch.read.done):
            self._release(session, grant)

    def _transfer(
        self, session: Session, batch: _Batch, borrow: Borrow
    ) -> tuple[LeaseGrant | None, Verdict | None]:
        """Lease and read; the meters are told before anybody can see that the pages are here."""
        meters = (self._reads, self.link.reads)
        started = [meter.begin() for meter in meters]
        moved = 0
        try:
            grant = self._lease(session, batch, borrow)
            if grant is None or not borrow.held:
                return None, None
            outcomes = self._read(session, grant, borrow, batch)
            if outcomes is None:
                return grant, None
            verdict = borrow.judge(outcomes)
            moved = len(verdict.arrived) * self._page_bytes
            return grant, verdict
        finally:
            for meter, begun in zip(meters, started, strict=True):
                meter.end(begun, moved)

    def _lease(self, session: Session, batch: _Batch, borrow: Borrow) -> LeaseGrant | None:
        """Ask for the pages; those that are not there are dealt with. None: nothing is held."""
        left_s = min(pull.deadline for pull in batch.mine) - borrow.asked
        if self._routes.elsewhere(batch.mine, self.link):
            # So that a peer which does not answer leaves time for one that does.
            left_s /= 2
        # A holder takes no longer than that to bring pages up, however long this node would wait.
        left_s = min(left_s, self._config.transfer_s + self._config.suspect_s)
        if left_s < ASK_S_MIN:
            self._give_up(batch, batch.mine, PullState.FAILED)
            return None
        ask = LeaseAsk(
            self._page_bytes,
            tuple(pull.key for pull in batch.mine),
            hold_ms=self._hold_ms,
            wait_ms=min(int(left_s * 500), WAIT_MS_MAX),
        )
        try:
            answer = self.link.ask(session, ask, left_s)
        except TierIOError as error:
            self._blame(f"lease: {error}")
            self._give_up(batch, batch.mine, PullState.FAILED)
            return None
        if isinstance(answer, Refusal):
            about_epochs = answer.status in (Status.FENCED, Status.STALE, Status.REFUSED)
            why = PullState.FAILED if about_epochs else PullState.MISSED
            self._give_up(batch, batch.mine, why)
            return None
        self._give_up(batch, borrow.granted(answer), PullState.MISSED)
        if not borrow.held:
            self.link.breaker.succeeded()
        return answer

    def _read(
        self, session: Session, grant: LeaseGrant, borrow: Borrow, batch: _Batch
    ) -> list[PageOutcome] | None:
        """Read what is held into the pulls' slots. None: that has not ended, or never began; the
        pulls are dealt with."""
        pulls = borrow.held
        left_s = min(pull.deadline for pull in pulls) - self._clock.monotonic()
        if self._routes.elsewhere(pulls, self.link):
            expected_s = self.link.expected_s(len(pulls) * self._page_bytes)
            left_s = min(left_s, max(left_s / 2, PATIENCE * expected_s))
        timeout_s = min(left_s, borrow.left_s, self._config.transfer_s)
        if timeout_s <= 0:
            self._give_up(batch, pulls, PullState.FAILED)
            return None
        views = [self._queue.view(pull) for pull in pulls]
        try:
            read = session.peer.read(
                grant.generation, borrow.ranges(self._page_bytes), views, timeout_s
            )
        except (TierError, ValueError) as error:
            # What the peer said of its memory cannot be, or the connection was just let go.
            self._blame(f"read: {error}")
            self._give_up(batch, pulls, PullState.FAILED)
            return None
        batch.read = read
        try:
            outcomes = read.take(timeout_s + READ_GRACE_S)
        except TierIOError as error:
            self._blame(f"read: {error}")
            self._leave_late(batch)
            return None
        if read.refused:
            # By this node's own transport: nobody asked the peer anything.
            self.link.note_error(f"read: {read.error}")
            self.link.count("refused_reads")
            self._give_up(batch, pulls, PullState.FAILED)
            return None
        return outcomes

    def _settle(self, batch: _Batch, verdict: Verdict) -> int:
        """Land what may be landed; returns how many pages are committed now."""
        link = self.link
        landed = 0
        sound = not verdict.expired
        for pull, checksum in verdict.arrived:
            state = self._queue.land(pull, checksum, keep_corrupt=True)
            if state is PullState.CORRUPT:
                sound = False
                link.count("corrupt")
                log.warning("link=%s key=%s arrived corrupt", link.lane, pull.key.hex())
                self._again(batch, pull, PullState.CORRUPT)
            landed += state is PullState.LANDED
        sound &= all(why is PullState.MISSED for _, why in verdict.lost)
        if sound:
            link.breaker.succeeded()
        else:
            link.count("expired" if verdict.expired else "failed_reads")
            self._blame("read: the lease ended first" if verdict.expired else "read: failed")
        for pull, why in verdict.lost:
            self._again(batch, pull, why)
        return landed

    def _give_up(self, batch: _Batch, pulls: Sequence[Pull], why: PullState) -> None:
        for pull in list(pulls):
            self._again(batch, pull, why)

    def _again(self, batch: _Batch, pull: Pull, why: PullState) -> None:
        batch.mine.remove(pull)
        index = self.link.index(self._page_bytes)
        if why is not PullState.FAILED and index is not None:
            index.forget(fingerprint(pull.key))
        self._routes.again(pull, self.link, why)

    def _blame(self, reason: str) -> None:
        """The peer failed or was late."""
        self.link.breaker.failed()
        self.link.count("failures")
        self.link.note_error(reason)
        if not self.link.askable:
            self._routes.avoid(self.link)

    def _release(self, session: Session, grant: LeaseGrant) -> None:
        """Nothing of the lease is read any more: let the holder know."""
        try:
            self.link.ask(session, ReleaseAsk((grant.lease,)), RELEASE_S)
        except TierIOError as error:
            # It ends by itself, and the heartbeat finds out what is wrong.
            self.link.count("failed_releases")
            log.debug("link=%s release=%d error=%s", self.link.lane, grant.lease, error)

    def _leave_late(self, batch: _Batch) -> None:
        """A read that has not ended when it should have: its pulls end when it does."""
        pulls, read = batch.mine, batch.read
        assert read is not None, "late without a read"
        batch.mine = []
        with self._lock:
            self._late_reads += 1

        def ended() -> None:
            with self._lock:
                self._late_reads -= 1
            for pull in pulls:
                if pull.state is PullState.RUNNING:
                    self._queue.end(pull, PullState.FAILED)

        read.add_done_callback(ended)

    def _abandon(self, batch: _Batch) -> None:
        """End what a batch that failed by a bug has left, when nothing writes to it any more."""
        if batch.read is not None and not batch.read.done:
            self._leave_late(batch)
            return
        for pull in batch.mine:
            if pull.state is PullState.RUNNING:
                self._queue.end(pull, PullState.FAILED)
