"""Who may hold how much of each tier: floors and ceilings of owners and of groups of them.

Owns the quotas and the pages on their way that they have to count. Knows tiers by name and size
only; storage.room acts on what is said here. Thread-safe.

    ceiling   pages of its owners, committed and on their way, never exceed it
    floor     while its owners hold no more than it, their pages are not evicted for others

Invariants: no ceiling is below its floor; floors of one tier together fit into it; a group's
owners are at least two scopes' business at most (their own and one group's).
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from tierkv.storage.errors import CapacityError, ConfigError
from tierkv.storage.types import TierName

SCOPES_MAX = 65536
"""Quotas of owners and groups together."""


@dataclass(frozen=True, slots=True)
class Quota:
    """Bytes per tier, headers and rounding included; a tier left out has no floor or ceiling."""

    floor_bytes: Mapping[TierName, int] = field(default_factory=dict)
    ceiling_bytes: Mapping[TierName, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TierSize:
    """What a byte limit means in pages of one tier."""

    slot_bytes: int
    capacity_pages: int


@dataclass(frozen=True, slots=True)
class Scope:
    """One quota in pages, and whose pages it counts."""

    name: str
    owners: frozenset[int]
    floors: Mapping[TierName, int]
    ceilings: Mapping[TierName, int]


class QuotaBook:
    """See the module docstring. `tiers`: the sizes that limits are measured in."""

    def __init__(self, tiers: Mapping[TierName, TierSize]) -> None:
        self._tiers = dict(tiers)
        self._lock = threading.Lock()
        self._owner_scopes: dict[int, Scope] = {}
        self._groups: dict[str, Scope] = {}
        self._group_of: dict[int, str] = {}
        self._held: Counter[tuple[TierName, int]] = Counter()

    def set_owner(self, owner: int, quota: Quota | None) -> None:
        """Set or, with None, clear one owner's quota.

        ConfigError for a negative limit, a ceiling below its floor or too many quotas;
        CapacityError when the floors of a tier do not fit into it.
        """
        with self._lock:
            scope = self._scope(f"owner {owner}", frozenset([owner]), quota)
            self._check_fit(scope, self._owner_scopes.get(owner))
            if scope is None:
                self._owner_scopes.pop(owner, None)
            else:
                self._owner_scopes[owner] = scope

    def set_group(self, name: str, owners: Iterable[int], quota: Quota | None) -> None:
        """Set or clear the quota of several owners together, for instance of a tenant.

        Errors as for set_owner; ConfigError too when an owner is in another group.
        """
        members = frozenset(owners)
        with self._lock:
            for owner in members:
                if self._group_of.get(owner, name) != name:
                    raise ConfigError(
                        f"set quota of group {name}: owner {owner} is in group "
                        f"{self._group_of[owner]}; an owner is in one group at most"
                    )
            scope = self._scope(f"group {name}", members, quota)
            old = self._groups.get(name)
            self._check_fit(scope, old)
            for owner in old.owners if old is not None else ():
                del self._group_of[owner]
            self._groups.pop(name, None)
            if scope is not None:
                self._groups[name] = scope
                self._group_of.update(dict.fromkeys(members, name))

    def scopes_of(self, owner: int) -> list[Scope]:
        """The quotas that count this owner's pages."""
        with self._lock:
            return self._scopes_of(owner)

    def floors(self, tier: TierName) -> list[Scope]:
        """The quotas with a floor in `tier`."""
        with self._lock:
            return [scope for scope in self._scopes() if scope.floors.get(tier, 0)]

    def limits(self, tier: TierName, owner: int) -> bool:
        """True when a ceiling counts this owner's pages in `tier`."""
        return any(tier in scope.ceilings for scope in self.scopes_of(owner))

    def hold(self, tier: TierName, owner: int, usage: Mapping[int, int], count: int) -> int:
        """Count up to `count` pages of `owner` as on their way to `tier`; returns how many fit.

        `usage`: committed pages by owner, read after every settled page was committed. What is
        held is given back with settle(), once it is committed or will not be.
        """
        with self._lock:
            for scope in self._scopes_of(owner):
                if (ceiling := scope.ceilings.get(tier)) is not None:
                    count = min(count, ceiling - self._used(scope, tier, usage))
            if count <= 0:
                return 0
            self._held[tier, owner] += count
            return count

    def settle(self, tier: TierName, owner: int, count: int) -> None:
        """Count `count` pages as no longer on their way."""
        with self._lock:
            if not count:
                return
            self._held[tier, owner] -= count
            assert self._held[tier, owner] >= 0, "settled more than was held"
            if not self._held[tier, owner]:
                del self._held[tier, owner]

    def excess(
        self, tier: TierName, owner: int, usage: Mapping[int, int], count: int
    ) -> list[tuple[Scope, int]]:
        """The quotas that `count` more pages of `owner` would exceed, and by how many pages."""
        with self._lock:
            found = []
            for scope in self._scopes_of(owner):
                if (ceiling := scope.ceilings.get(tier)) is not None:
                    over = self._used(scope, tier, usage) + count - ceiling
                    if over > 0:
                        found.append((scope, over))
            return found

    @property
    def held_pages(self) -> int:
        """Pages on their way, of all owners and tiers."""
        with self._lock:
            return self._held.total()

    def check(self) -> None:
        """Assert the invariants. O(quotas)."""
        with self._lock:
            assert all(count > 0 for count in self._held.values()), "a count of held pages below 1"
            for scope in self._scopes():
                for tier, ceiling in scope.ceilings.items():
                    assert 0 <= scope.floors.get(tier, 0) <= ceiling, scope
            for tier in self._tiers:
                self._assert_floors_fit(tier)
            for owner, name in self._group_of.items():
                assert owner in self._groups[name].owners, f"owner {owner} is not in {name}"

    def _assert_floors_fit(self, tier: TierName) -> None:
        floors = sum(scope.floors.get(tier, 0) for scope in self._owner_scopes.values())
        assert floors <= self._tiers[tier].capacity_pages, f"floors of {tier} do not fit"

    def _scopes(self) -> list[Scope]:
        return [*self._owner_scopes.values(), *self._groups.values()]

    def _scopes_of(self, owner: int) -> list[Scope]:
        found = [self._owner_scopes.get(owner), self._groups.get(self._group_of.get(owner, ""))]
        return [scope for scope in found if scope is not None]

    def _used(self, scope: Scope, tier: TierName, usage: Mapping[int, int]) -> int:
        return sum(usage.get(owner, 0) + self._held[tier, owner] for owner in scope.owners)

    def _scope(self, name: str, owners: frozenset[int], quota: Quota | None) -> Scope | None:
        """The quota in pages: ceilings rounded down, floors rounded up."""
        if quota is None:
            return None
        if len(self._owner_scopes) + len(self._groups) >= SCOPES_MAX:
            raise ConfigError(f"set quota of {name}: {SCOPES_MAX} are set already; clear one")
        floors: dict[TierName, int] = {}
        ceilings: dict[TierName, int] = {}
        for tier, nbytes in [*quota.floor_bytes.items(), *quota.ceiling_bytes.items()]:
            if tier not in self._tiers or nbytes < 0:
                raise ConfigError(
                    f"set quota of {name}: {tier} {nbytes} bytes, expected at least 0 bytes of "
                    f"one of {', '.join(self._tiers)}; correct it"
                )
        for tier, nbytes in quota.floor_bytes.items():
            floors[tier] = -(-nbytes // self._tiers[tier].slot_bytes)
        for tier, nbytes in quota.ceiling_bytes.items():
            ceilings[tier] = nbytes // self._tiers[tier].slot_bytes
            if ceilings[tier] < floors.get(tier, 0):
                raise ConfigError(
                    f"set quota of {name}: in {tier} the ceiling is {ceilings[tier]} pages, the "
                    f"floor {floors[tier]}; raise the ceiling to the floor at least"
                )
        return Scope(name, owners, floors, ceilings)

    def _check_fit(self, new: Scope | None, old: Scope | None) -> None:
        """CapacityError when the floors with `new` in place of `old` do not fit into a tier.

        A group's floor protects pages its owners' floors may protect too, so each kind is
        summed by itself.
        """
        if new is None:
            return
        same_kind = self._groups if new.name.startswith("group ") else self._owner_scopes
        for tier, size in self._tiers.items():
            others = sum(s.floors.get(tier, 0) for s in same_kind.values() if s is not old)
            floors = others + new.floors.get(tier, 0)
            if floors > size.capacity_pages:
                raise CapacityError(
                    f"set quota of {new.name}: floors of {floors} pages in {tier}, which holds "
                    f"{size.capacity_pages}; lower a floor or enlarge the tier"
                )


class Margins:
    """How many pages each owner can lose before a floor is reached. For one choice of victims.

    `for_owner`: whose new pages need the room; floors that count them do not keep them out.
    """

    def __init__(
        self,
        scopes: Collection[Scope],
        tier: TierName,
        usage: Mapping[int, int],
        for_owner: int | None,
    ) -> None:
        self._of: dict[int, list[list[int]]] = {}
        self.guarded: set[int] = set()
        """Owners that some floor limits."""
        for scope in scopes:
            if for_owner in scope.owners:
                continue
            held = sum(usage.get(owner, 0) for owner in scope.owners)
            # One counter for the whole scope, shared by its owners.
            left = [max(0, held - scope.floors[tier])]
            for owner in scope.owners:
                self._of.setdefault(owner, []).append(left)
                self.guarded.add(owner)

    def take(self, owner: int) -> bool:
        """Count one page of `owner` as lost, if it can be."""
        counters = self._of.get(owner, [])
        if any(counter[0] == 0 for counter in counters):
            return False
        for counter in counters:
            counter[0] -= 1
        return True

    def can_lose(self, owner: int) -> bool:
        """True when a page of `owner` may go."""
        return all(counter[0] > 0 for counter in self._of.get(owner, []))
