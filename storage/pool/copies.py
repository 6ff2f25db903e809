"""Which pages of one store are to be copied to whom, and what became of it.

Owns what was offered and not placed yet, what is wanted of each page as far as remembered, and a
pusher a peer. Does not move bytes (pusher.py does) and does not look for what is missing
(rebalance.py does). Called by remote.py; offer() with the store's lock held.

A page that was used copy_after times is to be on `replicas` members beside this one, one used
hot_after times on `hot_replicas`; those that have it already count, wherever they rank. A member
that cannot take it leaves it to the next in rank order, a few times.

Invariants: accepted copies == open + ended; nothing waits in offer(); the store is never called
with the lock held. Without a live member an offer costs O(members).
"""

from __future__ import annotations

import logging
import threading
import traceback
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Protocol

from tierkv.storage.clock import Clock
from tierkv.storage.pool.config import PoolConfig
from tierkv.storage.pool.holdings import fingerprints
from tierkv.storage.pool.link import Link, LinkState
from tierkv.storage.pool.placement import rank
from tierkv.storage.pool.pusher import Copy, CopyEnd, Pusher
from tierkv.storage.remote import POOL_OWNER, LocalStore
from tierkv.storage.types import PageKey

TRIES_MAX = 3
"""Members that a copy is tried at."""
REMEMBERED_MAX = 65536
"""Pages whose wanted copies are remembered, so that each use of them is not placed again."""
PLACED_AT_ONCE = 256
IDLE_S = 60.0

log = logging.getLogger(__name__)


class Members(Protocol):
    """What of the pool is asked here. Never waits."""

    own_name: str

    def links(self) -> Sequence[Link]:
        """One a member, live or not."""
        ...


class Copies:
    """See the module docstring. Thread-safe."""

    def __init__(
        self,
        store: LocalStore,
        members: Members,
        make_pusher: Callable[[Link, Callable[[Copy, Link, CopyEnd], None]], Pusher],
        config: PoolConfig,
        clock: Clock,
    ) -> None:
        self._store = store
        self._members = members
        self._make_pusher = make_pusher
        self._config = config
        self._clock = clock
        self._changed = threading.Condition()
        self._offers: deque[tuple[PageKey, int]] = deque()
        self._wanted: dict[PageKey, int] = {}
        self._pushers: dict[Link, Pusher] = {}
        self._placing = 0
        self._accepted = 0
        self._open: Counter[bool] = Counter()
        """Copies that have not ended, by whether they are in the background."""
        self._ended: Counter[CopyEnd] = Counter()
        self._dropped = 0
        self._unmade = 0
        """Wanted and not to be had, those in the background aside: flush() says so once."""
        self._unmade_told = 0
        self._unmade_background = 0
        self._restarts = 0
        self._thread: threading.Thread | None = None
        self._closing = False

    # --- with the store's lock held -------------------------------------------------------

    def offer(self, keys: Sequence[PageKey], uses: Sequence[int], owner: int) -> None:
        """See Remote.offer()."""
        if owner == POOL_OWNER:
            return
        if not any(link.live for link in self._members.links()):
            # Rebalancing finds what is missing once somebody is there.
            self._count_unmade(len(keys), False)
            return
        rules = self._config
        with self._changed:
            for key, count in zip(keys, uses, strict=True):
                wanted = 0
                if count >= rules.copy_after:
                    wanted = rules.hot_replicas if count >= rules.hot_after else rules.replicas
                if wanted <= self._wanted.get(key, 0):
                    continue
                if len(self._offers) >= rules.push_pages or self._closing:
                    self._dropped += 1
                    self._unmade += 1
                    continue
                self._remember(key, wanted)
                self._offers.append((key, wanted))
            if self._offers:
                self._start()
                self._changed.notify_all()

    # --- making them ----------------------------------------------------------------------

    def holders(self) -> dict[str, Link]:
        """The members whose copies count: live, and there to stay. By name."""
        return {
            link.name: link
            for link in self._members.links()
            if link.live and not link.leaving and link.name is not None
        }

    def wanted_of(self, key: PageKey) -> int:
        """How many other members shall have this page, as far as remembered; 0: not known."""
        return self._wanted.get(key, 0)

    def place(self, wanted: Sequence[tuple[PageKey, int]], *, background: bool) -> int:
        """Queue what is missing of so many copies of each page; returns how many were queued.

        O(pages * members). Waits for nothing.
        """
        members = self.holders()
        names = list(members)
        if not names:
            self._count_unmade(len(wanted), background)
            return 0
        prints = fingerprints([key for key, _ in wanted])
        size = self._store.page_bytes
        held = {name: link.holds(size, prints) for name, link in members.items()}
        queued = 0
        for number, (key, count) in enumerate(wanted):
            order = rank(key, names)
            there = {name for name in order if held[name][number]}
            free = [n for n in order if n not in there and members[n].takes_copies]
            lacking = max(0, min(count, len(names)) - len(there))
            for name in free[:lacking]:
                queued += self._queue(Copy(key, background), members[name])
            if len(free) < lacking:
                # They are live and may not be asked now: its next use, or balance, tries again.
                self._count_unmade(lacking - len(free), background, key)
        return queued

    def abandon(self, link: Link) -> None:
        """`link` takes no copies now: what is queued for it goes elsewhere."""
        with self._changed:
            pusher = self._pushers.get(link)
        for copy in pusher.empty() if pusher is not None else ():
            self._done(copy, link, CopyEnd.REFUSED)

    def forget(self, link: Link) -> None:
        """`link` is no member any more. Waits for its pusher, bounded."""
        with self._changed:
            pusher = self._pushers.pop(link, None)
        if pusher is not None:
            pusher.close()
            for copy in pusher.empty():
                self._done(copy, link, CopyEnd.REFUSED)
            # Its connections are closed; whatever it may still read, it cannot keep.
            pusher.free_all()

    # --- waiting --------------------------------------------------------------------------

    def flush(self, timeout_s: float) -> bool:
        """Wait until every copy that was wanted so far has been made. False past the timeout, or
        when one could not be since the last call."""
        with self._changed:
            ended = self._changed.wait_for(
                lambda: self._closing or not (self._offers or self._placing or self._open[False]),
                max(0.0, timeout_s),
            )
            complete = self._unmade == self._unmade_told
            self._unmade_told = self._unmade
            return ended and complete and not self._closing

    def wait_quiet(self, timeout_s: float) -> bool:
        """Wait until no copy is queued or running, in the background or not."""
        with self._changed:
            return self._changed.wait_for(lambda: self._quiet(), max(0.0, timeout_s))

    def wait_background(self, open_max: int, timeout_s: float) -> bool:
        """Wait until at most so many copies are under way in the background."""
        with self._changed:
            return self._changed.wait_for(
                lambda: self._closing or self._open[True] <= open_max, max(0.0, timeout_s)
            )

    # --- as a whole -----------------------------------------------------------------------

    @property
    def queued(self) -> int:
        """Copies that have not ended, and pages not placed yet."""
        with self._changed:
            return len(self._offers) + self._open.total()

    @property
    def quarantined(self) -> int:
        """Batches whose pages are held for peers that did not answer."""
        with self._changed:
            return sum(pusher.quarantined for pusher in self._pushers.values())

    @property
    def unmade_background(self) -> int:
        """Copies for balance that were wanted and not to be had then."""
        return self._unmade_background

    @property
    def dropped(self) -> int:
        """Copies and offers that found a full queue."""
        return self._dropped

    @property
    def restarts(self) -> int:
        """Batches that failed by an error of this node."""
        with self._changed:
            return self._restarts + sum(pusher.restarts for pusher in self._pushers.values())

    def ended(self, end: CopyEnd) -> int:
        """How many copies ended so, for good."""
        return self._ended[end]

    def check(self) -> None:
        """Assert the invariants. O(members)."""
        with self._changed:
            ended = self._ended.total()
            assert self._accepted == self._open.total() + ended, (self._accepted, self._open, ended)
            assert min(self._open.values(), default=0) >= 0, self._open
            assert len(self._wanted) <= REMEMBERED_MAX, len(self._wanted)
            assert len(self._offers) <= self._config.push_pages, len(self._offers)
            pushers = list(self._pushers.values())
        for pusher in pushers:
            pusher.check()

    def close(self, timeout_s: float) -> bool:
        """Make no more copies; False when one is still under way. Idempotent."""
        with self._changed:
            self._closing = True
            self._offers.clear()
            pushers = list(self._pushers.items())
            thread = self._thread
            self._changed.notify_all()
        deadline = self._clock.monotonic() + timeout_s
        stopped = True
        for link, pusher in pushers:
            stopped &= pusher.close(max(0.0, deadline - self._clock.monotonic()))
            for copy in pusher.empty():
                self._done(copy, link, CopyEnd.REFUSED)
        if thread is not None:
            thread.join(max(0.0, deadline - self._clock.monotonic()))
            stopped &= not thread.is_alive()
        return stopped

    def free_all(self) -> None:
        """Release what is held for peers that did not answer: they can read here no more."""
        with self._changed:
            pushers = list(self._pushers.values())
        for pusher in pushers:
            pusher.free_all()

    # --- inside ---------------------------------------------------------------------------

    def _start(self) -> None:
        if self._thread is None and not self._closing:
            thread = threading.Thread(
                target=self._work, name=f"tierkv-copies-{self._store.page_bytes}", daemon=True
            )
            try:
                thread.start()
            except RuntimeError as error:
                # The offers stay; the next one tries again.
                log.error("pool copies: thread not started reason=%s", error)
                return
            self._thread = thread

    def _work(self) -> None:
        """Life of the thread that places what was offered."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closing or bool(self._offers), IDLE_S)
                if self._closing:
                    return
                count = min(len(self._offers), PLACED_AT_ONCE)
                batch = [self._offers.popleft() for _ in range(count)]
                self._placing = count
            try:
                if batch:
                    self.place(batch, background=False)
            except Exception:  # noqa: BLE001
                # The one supervisor: a bug met by one batch must not end all placing (lesson H2).
                log.error("pool copies: %s", traceback.format_exc())
                self._restarts += 1
                self._count_unmade(len(batch), False)
            with self._changed:
                self._placing = 0
                self._changed.notify_all()

    def _queue(self, copy: Copy, link: Link) -> bool:
        """Hand a new copy to the pusher of `link`; False when it was dropped."""
        with self._changed:
            self._accepted += 1
            self._open[copy.background] += 1
        if self._pusher(link, copy):
            return True
        with self._changed:
            self._accepted -= 1
            self._open[copy.background] -= 1
            self._dropped += 1
            self._forget_wanted(copy)
            self._changed.notify_all()
        return False

    def _pusher(self, link: Link, copy: Copy) -> bool:
        with self._changed:
            if self._closing or link.state is LinkState.CLOSED:
                return False
            pusher = self._pushers.get(link)
            if pusher is None:
                pusher = self._pushers[link] = self._make_pusher(link, self._done)
        return pusher.add(copy)

    def _done(self, copy: Copy, link: Link, end: CopyEnd) -> None:
        """A copy has ended at one peer: for good, or it is the next one's."""
        if end is CopyEnd.REFUSED:
            copy.tried.append(link.name or link.lane)
            if self._try_next(copy):
                return
        with self._changed:
            self._open[copy.background] -= 1
            self._ended[end] += 1
            if end in (CopyEnd.REFUSED, CopyEnd.GONE):
                self._forget_wanted(copy)
            self._changed.notify_all()

    def _try_next(self, copy: Copy) -> bool:
        """Queue a refused copy for the next member in rank order; False when there is none."""
        if len(copy.tried) >= TRIES_MAX or self._closing:
            return False
        links = {
            name: link
            for name, link in self.holders().items()
            if link.takes_copies and name not in copy.tried
        }
        prints = fingerprints([copy.key])
        for name in rank(copy.key, list(links)):
            if not links[name].holds(self._store.page_bytes, prints)[0]:
                return self._pusher(links[name], copy)
        return False

    def _remember(self, key: PageKey, wanted: int) -> None:
        while len(self._wanted) >= REMEMBERED_MAX and key not in self._wanted:
            del self._wanted[next(iter(self._wanted))]
        self._wanted[key] = wanted

    def _forget_wanted(self, copy: Copy) -> None:
        """A copy could not be made: the page's next use asks for it again. Under the lock."""
        self._wanted.pop(copy.key, None)
        if copy.background:
            self._unmade_background += 1
        else:
            self._unmade += 1

    def _count_unmade(self, count: int, background: bool, key: PageKey | None = None) -> None:
        with self._changed:
            if key is not None:
                self._wanted.pop(key, None)
            if background:
                self._unmade_background += count
            else:
                self._unmade += count

    def _quiet(self) -> bool:
        return not (self._offers or self._placing or self._open.total())
