"""Host room and the way down: which pages leave host, and which are copied to nvme first.

Owns the frequency sketch's and the moments' use, the pages that were written back and not used
since, the pages that are owed a copy, and the counters of what was not written. Does not copy
(storage.mover does) and never waits: called by storage.store and storage.promotion with the
store's lock held.

Under write_back, the coldest `clean_pages_min` pages' worth of host is kept free or already on
nvme, by copying ahead of need; such pages still serve hits and can go the moment room is asked.
Invariant: a page dropped under write_back is on nvme, or admission, a full queue or a degraded
nvme refused it, and that was counted. Under write_through a page whose copy was refused for want
of room or budget, or cancelled for want of room or time, is owed one: it is tried again when a
copy ends and when the page is used.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass

from tierkv.storage.base import MappedTier, Tier
from tierkv.storage.clock import Clock
from tierkv.storage.errors import TierError
from tierkv.storage.eviction_log import EvictionReason
from tierkv.storage.last_use import LastUse
from tierkv.storage.mover import Job, JobState, Mover, Refusal
from tierkv.storage.neighbours import Neighbours
from tierkv.storage.policy import Admission, FrequencySketch, WritePolicy
from tierkv.storage.room import Room
from tierkv.storage.types import PageKey, TierName
from tierkv.storage.write_budget import WriteBudget

SCAN_EXTRA_PAGES = 32
"""How many victims beyond the need are looked at for one that can go at once."""

OWED_TRIES = 8
"""Pages owed a copy that are tried when one copy ends."""

DEGRADED_RETRY_S = 1.0
"""One page in this time is offered to a degraded nvme; it decides itself when it tries again."""

log = logging.getLogger(__name__)


class Lower:
    """What lies below host: the tier and the mover that writes to it. Store's lock held."""

    def __init__(self, tier: Tier, mover: Mover, room: Room, clock: Clock) -> None:
        self.tier = tier
        self.mover = mover
        self.room = room
        self._clock = clock
        self._retry_at = 0.0

    def may_write(self) -> bool:
        """True when healthy, and now and then when degraded: only a write can heal a tier."""
        if self.tier.stats().degraded is None:
            return True
        now = self._clock.monotonic()
        if now < self._retry_at:
            return False
        self._retry_at = now + DEGRADED_RETRY_S
        return True

    def holds(self, keys: Sequence[PageKey]) -> list[bool]:
        """Like Tier.lookup, but a tier that cannot answer holds nothing."""
        try:
            return self.tier.lookup(keys)
        except (TierError, OSError) as error:
            log.warning("lookup in lower tier: keys=%d error=%s", len(keys), error)
            return [False] * len(keys)


@dataclass(frozen=True, slots=True)
class DemotionRules:
    """The settings of one Demoter."""

    policy: WritePolicy
    admission: Admission
    selective_hits: int
    clean_pages_min: int
    deadline_s: float
    """A queued copy that did not start within this is dropped and counted as cancelled."""
    budget: WriteBudget | None = None


@dataclass(frozen=True, slots=True)
class Heat:
    """What is known about the use of pages. Guarded by the store's lock."""

    sketch: FrequencySketch
    last_use: LastUse


class Demoter:
    """See the module docstring. `lock` is the store's; methods named _locked need it held.

    `pinned` tells which host pages a fetch or its lease holds: they can never go at once.
    """

    def __init__(
        self,
        host: MappedTier,
        lower: Lower | None,
        room: Room,
        rules: DemotionRules,
        heat: Heat,
        pinned: Container[PageKey],
        lock: threading.RLock,
        clock: Clock,
        neighbours: Neighbours,
        on_durable: Callable[[PageKey], None] | None = None,
    ) -> None:
        self._host = host
        self._lower = lower
        self._room = room
        self._rules = rules
        self._sketch = heat.sketch
        self._last_use = heat.last_use
        self._pinned = pinned
        self._lock = lock
        self._clock = clock
        self._neighbours = neighbours
        self._on_durable = on_durable
        self._clean: OrderedDict[PageKey, None] = OrderedDict()
        self._owed: OrderedDict[PageKey, None] = OrderedDict()
        self._pages_max = host.stats().capacity_pages
        self.admission_rejected = 0
        self.skipped = 0

    def committed_locked(self, keys: Sequence[PageKey], owner: int) -> None:
        """Apply the write policy to pages that just became visible in host."""
        uses = []
        for key in keys:
            uses.append(self._sketch.record(key))
            self._last_use.record(key, owner)
        self._neighbours.used_locked(keys, uses, [owner] * len(keys))
        self.landed_locked(keys)

    def landed_locked(self, keys: Sequence[PageKey]) -> None:
        """Like committed_locked, for pages that came from elsewhere and are not used yet."""
        if self._rules.policy is WritePolicy.WRITE_THROUGH:
            self._queue_absent(keys)
        elif self._rules.policy is WritePolicy.WRITE_BACK:
            self._top_up()

    def used_locked(self, keys: Sequence[PageKey], owners: Sequence[int | None]) -> None:
        """Note that pages were asked for: they get hotter, and may now be worth a copy."""
        hot, uses = [], []
        for key, owner in zip(keys, owners, strict=True):
            self._clean.pop(key, None)
            if owner is not None:
                self._last_use.record(key, owner)
            uses.append(self._sketch.record(key))
            # The commit itself counted once, so "more than" is "at least that many hits".
            if uses[-1] > self._rules.selective_hits:
                hot.append(key)
        self._neighbours.used_locked(keys, uses, owners)
        if self._rules.policy is WritePolicy.WRITE_THROUGH_SELECTIVE and hot:
            self._queue_absent(hot)
        elif self._owed:
            owed = [key for key in keys if key in self._owed]
            for key in owed:
                self._owed.pop(key, None)
            self._queue_absent(owed)

    def handed_out_locked(
        self, keys: Sequence[PageKey], owners: Sequence[int], tiers: Sequence[TierName]
    ) -> None:
        """Like used_locked, for pages that came from `tiers`: their reuse gaps count (P4)."""
        for key, tier in zip(keys, tiers, strict=True):
            self._last_use.reused(key, tier)
        self.used_locked(keys, owners)

    def pinned_locked(self, key: PageKey) -> None:
        """Forget that `key` could go at once: somebody holds it now."""
        self._clean.pop(key, None)

    def make_room_locked(self, count: int, for_owner: int | None = None) -> None:
        """Try to have `count` free host slots, at once and without losing pages worth keeping.

        `for_owner`: who they are for, if known; see Room.evict.
        """
        short = count - self._host.stats().free_pages
        if short <= 0:
            return
        if self._rules.policy is not WritePolicy.WRITE_BACK or self._lower is None:
            self.gone_locked(self._room.evict(short, for_owner))
            return
        if not self._room.guarded:
            short -= self._drop_clean(self._lower, short)
        if short > 0:
            self._drop_victims(self._lower, short, for_owner)

    def let_go_locked(self, keys: Sequence[PageKey]) -> int:
        """Drop host pages that nvme has too and nobody holds; returns how many."""
        if self._lower is None:
            return 0
        free = [key for key in keys if key not in self._pinned]
        there = zip(free, self._host.lookup(free), self._lower.holds(free), strict=True)
        return sum(self._drop(key) for key, above, below in there if above and below)

    def gone_locked(self, keys: Sequence[PageKey]) -> None:
        """Forget what is noted about pages that left host."""
        for key in keys:
            self._clean.pop(key, None)
            self._owed.pop(key, None)

    def queue_locked(self, key: PageKey, deadline: float) -> Job | Refusal:
        """Queue a copy without asking admission: for flush. Needs a lower tier."""
        assert self._lower is not None, "queue_locked without a lower tier"
        return self._submit(self._lower, key, deadline, forced=True)

    def check_locked(self) -> None:
        """Assert that no more pages are noted than host has slots. O(capacity)."""
        assert len(self._clean) <= self._pages_max, len(self._clean)
        assert len(self._owed) <= self._pages_max, len(self._owed)
        self._sketch.check()
        self._last_use.check()
        if self._rules.budget is not None:
            self._rules.budget.check()

    def _queue_absent(self, keys: Sequence[PageKey]) -> None:
        if self._lower is None:
            return
        for key, there in zip(keys, self._lower.holds(keys), strict=True):
            if not there:
                self._queue(self._lower, key)

    def _queue(self, lower: Lower, key: PageKey, counted: bool = True) -> bool:
        """Queue a copy if nvme works and the page is hot enough; False when it is not to be.

        `counted`: a refusal is final for this page, so it counts.
        """
        if not lower.may_write():
            self.skipped += counted
            return self._owe(key)
        if not self._rules.admission.admit(key, lower.tier, lower.mover.demoting_count):
            self.admission_rejected += counted
            return False
        deadline = self._clock.monotonic() + self._rules.deadline_s
        job = self._submit(lower, key, deadline, forced=False)
        return isinstance(job, Job) or (job is not Refusal.GONE and self._owe(key))

    def _submit(self, lower: Lower, key: PageKey, deadline: float, forced: bool) -> Job | Refusal:
        """Queue a copy and take its bytes from the budget, which a copy that fails gives back."""
        budget = self._rules.budget
        # A copy that is on its way has paid, and keeps its job.
        paid = budget is None or lower.mover.is_demoting(key)
        if budget is None or paid:
            return lower.mover.submit_demote(key, deadline, self._demoted)
        if not budget.spend(self._host.page_bytes, self._sketch.estimate(key), forced):
            return Refusal.BUDGET
        job = lower.mover.submit_demote(key, deadline, self._demoted)
        if not isinstance(job, Job):
            budget.give_back(self._host.page_bytes)
        return job

    def _owe(self, key: PageKey) -> bool:
        """Note that a page is to be copied later; always False, as for any page not queued."""
        if self._rules.policy is WritePolicy.WRITE_THROUGH:
            self._owed[key] = None
            while len(self._owed) > self._pages_max:
                self._owed.popitem(last=False)
        return False

    def _demoted(self, job: Job) -> None:
        """Runs in a worker when a copy ended."""
        budget = self._rules.budget
        if job.state is not JobState.DONE:
            if budget is not None:
                budget.give_back(self._host.page_bytes)
            if job.state is JobState.CANCELLED:
                self._not_copied(job.key)
            return
        with self._lock:
            if self._rules.policy is WritePolicy.WRITE_BACK and self._host.lookup([job.key])[0]:
                self._note_clean(job.key)
            self._pay_owed()
        if budget is not None:
            budget.save_if_due()
        if self._on_durable is not None:
            self._on_durable(job.key)

    def _not_copied(self, key: PageKey) -> None:
        """A copy found no room in nvme or no time: nothing failed, so it is tried again later."""
        with self._lock:
            if self._host.lookup([key])[0]:
                self._owe(key)

    def _pay_owed(self) -> None:
        """There is room in the queue again: those that wait longest for a copy get their chance."""
        for _ in range(OWED_TRIES):
            if not self._owed:
                return
            key, _ = self._owed.popitem(last=False)
            self._queue_absent([key])
            if key in self._owed:
                return

    def _note_clean(self, key: PageKey) -> None:
        """Note that a page can go at once. These go first anyway, so they make way among the
        coldest for pages that still need a copy."""
        self._clean[key] = None
        self._host.touch([key])
        while len(self._clean) > self._pages_max:
            self._clean.popitem(last=False)

    def _drop_clean(self, lower: Lower, count: int) -> int:
        """Drop pages written back and not used since, longest ago first; returns how many."""
        dropped = 0
        while dropped < count and self._clean:
            key, _ = self._clean.popitem(last=False)
            # nvme may have evicted its copy meanwhile; the page is then no longer safe to drop.
            if key not in self._pinned and lower.holds([key])[0]:
                dropped += self._drop(key)
        return dropped

    def _drop_victims(self, lower: Lower, count: int, for_owner: int | None) -> None:
        """Let the coldest pages go: at once where nvme has them or will not, else queue them."""
        victims = self._room.victims(count + SCAN_EXTRA_PAGES, for_owner)
        for key, there in zip(victims, lower.holds(victims), strict=True):
            if count == 0:
                return
            if there or not self._queue(lower, key):
                count -= self._drop(key)

    def _drop(self, key: PageKey) -> int:
        self.gone_locked([key])
        dropped = self._host.drop([key])
        self._room.removed([key] * dropped, EvictionReason.ROOM)
        return dropped

    def _top_up(self) -> None:
        """Copy the coldest pages down until enough of host is free, clean or on its way."""
        lower = self._lower
        if lower is None:
            return
        ready = self._host.stats().free_pages + len(self._clean) + lower.mover.demoting_count
        want = self._rules.clean_pages_min - ready
        if want <= 0:
            return
        victims = self._host.victims(min(want, SCAN_EXTRA_PAGES))
        for key, there in zip(victims, lower.holds(victims), strict=True):
            if there:
                self._note_clean(key)
            else:
                self._queue(lower, key, counted=False)
