"""Which members should hold copies of a page: rendezvous hashing, highest weight first.

Owns the choice of the hash. Knows neither who is alive nor who holds what: callers pass the names
of the members that count. Placement only decides where copies are made (docs/adr/0010-the-pool.md).
Invariants: the order depends on the key and the set of names alone - not on the list's order, the
process or the machine; a member that joins or leaves changes nobody else's order. Golden values
in the tests hold it: another order would move every copy of a pool. Called by storage.pool.pusher
and storage.pool.pool.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import xxhash

from tierkv.storage.types import PageKey


def rank(key: PageKey, members: Sequence[str]) -> list[str]:
    """All of `members`, best place for `key` first. Names must differ. O(n log n)."""
    weights = [(xxhash.xxh3_64_intdigest(key, _seed(name)), name) for name in members]
    # Equal weights are possible with 64 bits; then the name decides, the same everywhere.
    weights.sort(reverse=True)
    return [name for _, name in weights]


def targets(key: PageKey, members: Sequence[str], replicas: int) -> list[str]:
    """The first `replicas` of rank(): where copies of `key` belong; fewer when there are fewer."""
    assert replicas >= 1, f"{replicas} replicas"
    return rank(key, members)[:replicas]


@lru_cache(maxsize=1024)
def _seed(name: str) -> int:
    return xxhash.xxh3_64_intdigest(name.encode())
