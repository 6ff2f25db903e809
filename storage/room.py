"""Room in one tier under quotas: who may come in, and who goes for it.

Owns nothing but counters: asks the tier, the quota book and the eviction log. Does not know why
room is needed. Host: called by storage.demotion and storage.promotion with the store's lock held.
nvme: called by mover workers and by the store, without it, because eviction there is I/O.

Invariants: nobody's pages exceed a ceiling; pages a floor protects go only for their own owners;
every removal is in the log and every refusal is counted.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Collection, Sequence

from tierkv.storage.base import Tier
from tierkv.storage.eviction_log import EvictionLog, EvictionReason
from tierkv.storage.quota import Margins, QuotaBook
from tierkv.storage.types import PageKey

SCAN_EXTRA_PAGES = 64
"""Victims looked at beyond the need, for those that a floor protects."""


class Room:
    """See the module docstring. Thread-safe as far as its tier is."""

    def __init__(self, tier: Tier, book: QuotaBook, log: EvictionLog) -> None:
        self._tier = tier
        self._book = book
        self._log = log
        # Two evictions at once would each count the same pages as the ones an owner can spare.
        self._evicting = threading.Lock()
        self.refused = 0
        """Pages kept out because their owner had reached a ceiling and had nothing to evict."""

    @property
    def guarded(self) -> bool:
        """True when some floor keeps pages of this tier from others."""
        return bool(self._book.floors(self._tier.name))

    def evict(self, count: int, for_owner: int | None = None) -> list[PageKey]:
        """Let up to `count` of the coldest unleased pages go for new ones of `for_owner`.

        Pages a floor protects stay, unless `for_owner` is who it protects. Raises what
        Tier.evict raises. O(count) without floors.
        """
        if count <= 0:
            return []
        if not self._book.floors(self._tier.name):
            return self._logged(self._tier.evict(count), EvictionReason.ROOM)
        with self._evicting:
            return self._evict_guarded(count, for_owner, None, EvictionReason.ROOM)

    def victims(self, count: int, for_owner: int | None = None) -> list[PageKey]:
        """Name pages that evict() would let go, coldest first. No side effects."""
        scopes = self._book.floors(self._tier.name)
        if not scopes:
            return self._tier.victims(count)
        usage = self._tier.owners()
        margins = Margins(scopes, self._tier.name, usage, for_owner)
        owners = [owner for owner in usage if margins.can_lose(owner)]
        found = self._tier.victims(count + SCAN_EXTRA_PAGES, owners)
        pairs = zip(found, self._tier.owner_of(found), strict=True)
        return [key for key, owner in pairs if margins.take(owner or 0)][:count]

    def admit(self, owner: int, count: int) -> int:
        """Say how many of `count` new pages of `owner` may come in; settle() them afterwards.

        At a ceiling the owner's own coldest pages go first (a group's: its owners' coldest);
        what still does not fit is refused and counted. O(1) without a ceiling. Raises what
        Tier.evict raises; nothing is held then.
        """
        name = self._tier.name
        if not self._book.limits(name, owner):
            return self._book.hold(name, owner, {}, count)
        if self._book.excess(name, owner, self._tier.owners(), count):
            self._evict_own(owner, count)
        held = self._book.hold(name, owner, self._tier.owners(), count)
        self.refused += count - held
        return held

    def settle(self, owner: int, count: int) -> None:
        """Count admitted pages as committed, or as not coming."""
        self._book.settle(self._tier.name, owner, count)

    def shrink(self, owner: int) -> int:
        """Evict what exceeds a ceiling that counts `owner`'s pages; returns how many went.

        Leased pages stay, so more may be left until they are released.
        """
        return self._evict_own(owner, 0)

    def removed(self, keys: Sequence[PageKey], reason: EvictionReason) -> None:
        """Log pages that somebody else removed."""
        self._log.record(keys, self._tier.name, reason)

    def _evict_own(self, owner: int, count: int) -> int:
        """Make room for `count` pages below every ceiling that counts `owner`'s pages."""
        name, gone = self._tier.name, 0
        with self._evicting:
            for scope in self._book.scopes_of(owner):
                over = self._book.excess(name, owner, self._tier.owners(), count)
                if need := next((pages for other, pages in over if other is scope), 0):
                    reason = EvictionReason.QUOTA
                    gone += len(self._evict_guarded(need, owner, scope.owners, reason))
        return gone

    def _evict_guarded(
        self,
        count: int,
        for_owner: int | None,
        among: Collection[int] | None,
        reason: EvictionReason,
    ) -> list[PageKey]:
        """Evict the coldest of `among` (None: of all), nobody below a floor. Holds `_evicting`."""
        gone: list[PageKey] = []
        scopes = self._book.floors(self._tier.name)
        # Each round either finds enough, or brings an owner to its floor, or finds nothing.
        while len(gone) < count:
            usage = self._tier.owners()
            margins = Margins(scopes, self._tier.name, usage, for_owner)
            owners = [o for o in usage if margins.can_lose(o) and (among is None or o in among)]
            wanted = count - len(gone)
            found = self._tier.victims(wanted + SCAN_EXTRA_PAGES, owners) if owners else []
            picked = self._picked(found, wanted, margins)
            taken = self._evict_picked(picked, margins)
            if not taken:
                break
            gone += self._logged(taken, reason)
        return gone

    def _picked(self, victims: Sequence[PageKey], wanted: int, margins: Margins) -> Counter[int]:
        """How many pages of which owner, choosing from the coldest on."""
        picked: Counter[int] = Counter()
        for owner in self._tier.owner_of(victims):
            # None: it went meanwhile; then nobody's count is the worse for it.
            if owner is not None and picked.total() < wanted and margins.take(owner):
                picked[owner] += 1
        return picked

    def _evict_picked(self, picked: Counter[int], margins: Margins) -> list[PageKey]:
        """Evict by owner: a tier evicts what is coldest then, which bounds each one's loss."""
        free = {owner: count for owner, count in picked.items() if owner not in margins.guarded}
        gone = self._tier.evict(sum(free.values()), list(free)) if free else []
        for owner, count in picked.items():
            if owner in margins.guarded:
                gone += self._tier.evict(count, [owner])
        return gone

    def _logged(self, keys: list[PageKey], reason: EvictionReason) -> list[PageKey]:
        self._log.record(keys, self._tier.name, reason)
        return keys
