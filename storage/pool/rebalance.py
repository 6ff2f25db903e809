"""Finds pages of one store that too few members have, and has copies made.

Owns when to look and at which pace. Knows neither bytes nor peers: copies.py makes the copies. A
pass begins when the live members have not changed for suspect_s, and begins anew when they do, or
later when some of its copies could not be made. Called by remote.py.

Of all live members that hold a page, the first in rank order makes what is missing, so that two
never make the same copy while they agree on who is alive; where they do not, a copy too many is
made, or the same one twice, which the peer refuses. Nothing is ever removed for balance.

Invariants: what nobody waits for keeps to rebalance_bytes_per_s; drain() does not.
"""

from __future__ import annotations

import logging
import threading
import traceback
from collections.abc import Sequence

import numpy as np

from tierkv.storage.clock import Clock
from tierkv.storage.errors import TierError
from tierkv.storage.pool.config import PoolConfig
from tierkv.storage.pool.copies import Copies
from tierkv.storage.pool.holdings import fingerprints
from tierkv.storage.pool.link import Link
from tierkv.storage.pool.placement import rank
from tierkv.storage.remote import LocalStore
from tierkv.storage.types import PageKey

STEP_S = 0.25
"""Copies of so much time are queued at once."""
LOOKED_AT_ONCE = 4096
DRAIN_ROUNDS = 5
"""Times that drain() tries in vain, a heartbeat apart: a member may have lost its connection."""
IDLE_S = 60.0
RETRY_S_MAX = 60.0
"""Copies that could not be made are looked for again after suspect_s, then less often."""
STOP_S = 5.0

log = logging.getLogger(__name__)


class Rebalancer:
    """See the module docstring. Thread-safe."""

    def __init__(
        self, store: LocalStore, copies: Copies, own_name: str, config: PoolConfig, clock: Clock
    ) -> None:
        self._store = store
        self._copies = copies
        self._own_name = own_name
        self._config = config
        self._clock = clock
        self._changed = threading.Condition()
        self._due: float | None = None
        self._retry_s = config.suspect_s
        self._passes = 0
        self._queued = 0
        self._restarts = 0
        self._thread: threading.Thread | None = None
        self._closing = False

    @property
    def passes(self) -> int:
        """Times that all pages were looked at."""
        return self._passes

    @property
    def queued(self) -> int:
        """Copies that were queued for balance, since the start."""
        return self._queued

    @property
    def restarts(self) -> int:
        """Passes that failed by an error of this node."""
        return self._restarts

    def members_changed(self) -> None:
        """Live members came, went or are leaving. Does not wait."""
        if self._config.rebalance_bytes_per_s == 0:
            return
        with self._changed:
            self._retry_s = self._config.suspect_s
            self._due = self._clock.monotonic() + self._config.suspect_s
            self._start()
            self._changed.notify_all()

    def drain(self, timeout_s: float) -> bool:
        """Have every page that is in host copied to some other member, hottest first, and wait.

        False when some are nowhere else at the end. O(host pages).
        """
        deadline = self._clock.monotonic() + timeout_s
        alone, in_vain = self._alone(), 0
        while alone and in_vain < DRAIN_ROUNDS:
            if in_vain:
                with self._changed:
                    self._changed.wait_for(lambda: self._closing, self._config.heartbeat_s)
            window = max(1, self._config.push_pages // 2)
            for start in range(0, len(alone), window):
                batch = [(key, 1) for key in alone[start : start + window]]
                self._copies.place(batch, background=False)
                if not self._copies.wait_quiet(deadline - self._clock.monotonic()):
                    return not self._alone()
            before, alone = len(alone), self._alone()
            in_vain = 0 if len(alone) < before else in_vain + 1
        return not alone

    def close(self, timeout_s: float = STOP_S) -> bool:
        """Stop; False past the timeout. Idempotent."""
        with self._changed:
            self._closing = True
            thread = self._thread
            self._changed.notify_all()
        if thread is None:
            return True
        thread.join(timeout_s)
        return not thread.is_alive()

    def _start(self) -> None:
        if self._thread is not None or self._closing:
            return
        thread = threading.Thread(
            target=self._work, name=f"tierkv-balance-{self._store.page_bytes}", daemon=True
        )
        try:
            thread.start()
        except RuntimeError as error:
            # The next change of members tries again.
            log.error("pool balance: thread not started reason=%s", error)
            return
        self._thread = thread

    # --- its thread -----------------------------------------------------------------------

    def _work(self) -> None:
        while self._wait_due():
            try:
                self._pass()
            except TierError as error:
                # The store is closing.
                log.info("pool balance: given up error=%s", error)
            except Exception:  # noqa: BLE001
                # The one supervisor: a bug met once must not end all balancing (lesson H2).
                log.error("pool balance: %s", traceback.format_exc())
                self._restarts += 1

    def _wait_due(self) -> bool:
        """Wait for the next pass to be due; False when closing."""
        with self._changed:
            while not self._closing:
                left_s = IDLE_S if self._due is None else self._due - self._clock.monotonic()
                if self._due is not None and left_s <= 0:
                    self._due = None
                    return True
                self._changed.wait(min(left_s, IDLE_S))
            return False

    def _pass(self) -> None:
        """Look at every page once, and queue what is missing of each, at the pace."""
        keys = self._store.keys_here()[::-1]
        before, unmade = self._queued, self._copies.unmade_background
        for start in range(0, len(keys), LOOKED_AT_ONCE):
            missing = self._missing(keys[start : start + LOOKED_AT_ONCE])
            step = max(1, int(self._config.rebalance_bytes_per_s * STEP_S / self._store.page_bytes))
            for first in range(0, len(missing), step):
                made = self._copies.place(missing[first : first + step], background=True)
                self._queued += made
                if not self._pause(made):
                    return
        if not self._wait_background(0):
            return
        with self._changed:
            self._passes += 1
            if self._due is None and self._copies.unmade_background > unmade:
                self._due = self._clock.monotonic() + self._retry_s
                self._retry_s = min(2 * self._retry_s, RETRY_S_MAX)
            self._changed.notify_all()
        if queued := self._queued - before:
            log.info("pool balance: page_bytes=%d copies=%d", self._store.page_bytes, queued)

    def _pause(self, copies: int) -> bool:
        """Wait for as long as so many copies may take; False when the pass is to end."""
        pause_s = copies * self._store.page_bytes / self._config.rebalance_bytes_per_s
        with self._changed:
            self._changed.wait_for(self._stopped, pause_s)
        # No more of them than are being made: a slow peer must not fill the queues.
        return self._wait_background(4 * self._config.batch_pages)

    def _wait_background(self, open_max: int) -> bool:
        """Wait until so many copies are under way, however slow a peer is: each ends by itself.
        False when the pass is to end."""
        while not self._stopped():
            if self._copies.wait_background(open_max, STEP_S):
                return not self._stopped()
        return False

    def _stopped(self) -> bool:
        return self._closing or self._due is not None

    def _missing(self, keys: Sequence[PageKey]) -> list[tuple[PageKey, int]]:
        """Pages that too few members have and this node is to copy, with how many shall."""
        members = self._copies.holders()
        if not members:
            return []
        held = self._held_by(keys, list(members.values()))
        least = self._config.replicas if self._config.copy_after == 1 else 0
        missing: list[tuple[PageKey, int]] = []
        counts = held.sum(axis=0)
        names = list(members)
        for number, key in enumerate(keys):
            wanted = min(max(least, self._copies.wanted_of(key)), len(names))
            if counts[number] >= wanted:
                continue
            holders = [name for row, name in enumerate(names) if held[row, number]]
            if rank(key, [*holders, self._own_name])[0] == self._own_name:
                missing.append((key, wanted))
        return missing

    def _alone(self) -> list[PageKey]:
        """Pages in host that no other member is known to have, hottest first."""
        keys = self._store.host.keys_of()[::-1]
        if not keys:
            return []
        held = self._held_by(keys, list(self._copies.holders().values()))
        there: list[bool] = (held.sum(axis=0) > 0).tolist()
        return [key for key, elsewhere in zip(keys, there, strict=True) if not elsewhere]

    def _held_by(
        self, keys: Sequence[PageKey], links: Sequence[Link]
    ) -> np.ndarray[tuple[int, int], np.dtype[np.bool_]]:
        """One row a link: which of the pages its peer is known to have."""
        prints = fingerprints(keys)
        held = np.zeros((len(links), len(keys)), np.bool_)
        for row, link in enumerate(links):
            held[row] = link.holds(self._store.page_bytes, prints)
        return held
