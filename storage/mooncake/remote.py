"""A Mooncake Store as the remote tier of one store.

Owns what is known of the cluster's pages of one size, the pulls under way, the copies wanted and
the threads that do it: pull workers (puller.py), one that copies (pusher.py) and one that asks
(asker.py). The client and its gate are shared by all page sizes (service.py). Bytes go straight
between the host arena and the library; no thread but these ever calls it.

    what is known of a key     learned from                       ends
    held                       asked, pulled or put               known_s; a miss
    absent                     asked, missed                      absent_s; put
    avoided                    its transfer failed                avoid_s; put
    corrupt                    its value was wrong                corrupt_s; replaced by a good one

Invariants: only what is held, and neither avoided nor corrupt, is said to be there; a slot that a
late call may still write stays reserved until that call has returned (its pull is RUNNING so
long); close() is True only when no thread is left that could touch the arena.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from tierkv.storage.bandwidth import TransferMeter
from tierkv.storage.base import RemoteStats
from tierkv.storage.clock import Clock
from tierkv.storage.device import address_of
from tierkv.storage.errors import TierIOError
from tierkv.storage.mooncake.asker import Asker
from tierkv.storage.mooncake.client import MooncakeClient, Piece
from tierkv.storage.mooncake.config import MooncakeConfig
from tierkv.storage.mooncake.gate import Gate
from tierkv.storage.mooncake.knowledge import Knowledge
from tierkv.storage.mooncake.puller import LANE, Puller
from tierkv.storage.mooncake.pusher import Pusher
from tierkv.storage.mooncake.threads import Threads
from tierkv.storage.mooncake.values import HEADER_BYTES, HeaderScratch
from tierkv.storage.pulls import PullQueue
from tierkv.storage.remote import LocalStore, Pull, PullState, Remote
from tierkv.storage.types import PageKey


class _Parts(NamedTuple):
    """What there is once a store is bound."""

    queue: PullQueue
    pullers: list[Puller]
    pusher: Pusher
    asker: Asker


class MooncakeRemote(Remote):
    """See the module docstring and Remote. Made by service.Mooncake.attach()."""

    lookup_waits = True

    def __init__(
        self,
        config: MooncakeConfig,
        clock: Clock,
        client: MooncakeClient,
        gate: Gate,
        page_bytes: int,
        on_closed: Callable[[MooncakeRemote], None],
    ) -> None:
        self._config = config
        self._clock = clock
        self._client = client
        self._gate = gate
        self._page_bytes = page_bytes
        self._on_closed = on_closed
        self._known = Knowledge(config, clock)
        self._threads = Threads(clock)
        self._refused = 0
        self._closing = False
        self._registered: list[Piece] = []
        self._bound: _Parts | None = None

    @property
    def bound(self) -> bool:
        """True once a store uses it."""
        return self._bound is not None

    def bind(self, store: LocalStore, reads: TransferMeter, writes: TransferMeter) -> None:
        assert self._bound is None, "a remote is bound once"
        assert store.page_bytes == self._page_bytes, (store.page_bytes, self._page_bytes)
        shared = (self._config, self._clock, self._client, self._gate, self._known)
        queue = PullQueue(store.host, self._clock, self._config.pull_pages)
        pullers = [
            Puller(*shared, queue, reads, store.page_bytes)
            for _ in range(self._config.pull_workers)
        ]
        pusher = Pusher(*shared, store, writes)
        asker = Asker(*shared, store.page_bytes)
        if self._config.registers_arena:
            self._register(store, [pusher.headers, *(one.headers for one in pullers)])
        self._bound = _Parts(queue, pullers, pusher, asker)
        for number, puller in enumerate(pullers):
            self._threads.start(f"tierkv-mooncake-pull-{number}", puller.work)
        self._threads.start("tierkv-mooncake-push", pusher.work)
        self._threads.start("tierkv-mooncake-ask", asker.work)

    def holds(self, keys: Sequence[PageKey]) -> list[bool]:
        if self._closing or not self._gate.open:
            return [False] * len(keys)
        return [self._known.held(key) for key in keys]

    def ask(self, keys: Sequence[PageKey], timeout_s: float) -> None:
        if self._gate.open:
            self._parts.asker.ask([key for key in keys if not self._known.answers(key)], timeout_s)

    def submit(self, pulls: Sequence[Pull]) -> int:
        if not self._gate.open:
            self._refused += len(pulls)
            return 0
        return self._parts.queue.submit([(LANE, pull) for pull in pulls])

    def cancel(self, pull: Pull) -> bool:
        return self._parts.queue.cancel(pull)

    def offer(self, keys: Sequence[PageKey], uses: Sequence[int], owner: int) -> None:
        wanted = [
            key
            for key, count in zip(keys, uses, strict=True)
            if count >= self._config.copy_after and not self._known.needs_no_copy(key)
        ]
        self._parts.pusher.offer(wanted, owner)

    def gained(self, keys: Sequence[PageKey]) -> None:
        """Nobody asks us for pages: the store keeps copies of its own."""

    def lost(self, keys: Sequence[PageKey]) -> None:
        """See gained()."""

    def flush(self, timeout_s: float) -> bool:
        return self._parts.pusher.flush(timeout_s)

    def wait_quiet(self, timeout_s: float) -> bool:
        parts = self._parts
        deadline = self._clock.monotonic() + timeout_s
        if not parts.pusher.wait_quiet(timeout_s):
            return False
        return parts.queue.wait_quiet(deadline - self._clock.monotonic())

    @property
    def quiet(self) -> bool:
        return self._parts.queue.quiet

    def stats(self) -> RemoteStats:
        queue, copies = self._parts.queue, self._parts.pusher.counts()
        return RemoteStats(
            queued=queue.queued,
            running=queue.running,
            landed=queue.ended(PullState.LANDED),
            missed=queue.ended(PullState.MISSED),
            corrupt=queue.ended(PullState.CORRUPT),
            failed=queue.ended(PullState.FAILED),
            cancelled=queue.ended(PullState.CANCELLED),
            refused=queue.refused + self._refused,
            pushes_queued=copies.queued,
            pushed=copies.pushed,
            push_duplicates=copies.duplicates,
            push_dropped=copies.dropped,
            push_failed=copies.failed,
            worker_restarts=self._threads.restarts,
            known_pages=self._known.pages,
            degraded=self._gate.degraded,
        )

    def check(self) -> None:
        parts = self._parts
        parts.queue.check()
        parts.pusher.check()
        parts.asker.check()
        self._known.check()
        self._gate.check()
        self._client.check()

    def close(self, timeout_s: float) -> bool:
        self._closing = True
        parts = self._bound
        if parts is not None:
            deadline = self._clock.monotonic() + timeout_s
            parts.pusher.stop()
            parts.asker.stop()
            for puller in parts.pullers:
                puller.stop()
            # Tells its workers that it closes; what they have in hand ends with its call.
            done = parts.queue.close(timeout_s)
            if not (self._threads.join(deadline - self._clock.monotonic()) and done):
                return False
            pieces, self._registered = self._registered, []
            for piece in pieces:
                self._client.unregister(piece)
        self._on_closed(self)
        return True

    @property
    def _parts(self) -> _Parts:
        assert self._bound is not None, "a remote is bound before it is used"
        return self._bound

    def _register(self, store: LocalStore, scratches: Sequence[HeaderScratch]) -> None:
        """Register the arena and what lies beside it; nothing stays registered on an error."""
        memory = store.arena_memory()
        pieces = [Piece(address_of(memory), len(memory))]
        pieces += [Piece(one.address(0), len(one) * HEADER_BYTES) for one in scratches]
        try:
            for piece in pieces:
                self._client.register(piece)
                self._registered.append(piece)
        except TierIOError:
            for piece in self._registered:
                self._client.unregister(piece)
            self._registered = []
            raise
