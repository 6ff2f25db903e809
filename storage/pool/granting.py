"""Pages of this node's store, held for a member: each key for itself.

Owns nothing: the leases are the caller's. Does not know members, messages or time limits of leases.
Called by serving.py.
"""

from __future__ import annotations

from collections.abc import Sequence

from tierkv.storage.base import PageLease
from tierkv.storage.checksum import CHECKSUM_BYTES
from tierkv.storage.clock import Clock
from tierkv.storage.pool.messages import LeasedPage
from tierkv.storage.remote import LocalStore
from tierkv.storage.types import PageKey

ROUNDS_MAX = 16
"""Pages that fail on their way up end a round each: so many are passed over."""


def hold_each(
    store: LocalStore,
    keys: Sequence[PageKey],
    wait_s: float,
    clock: Clock,
    parts: list[PageLease],
) -> None:
    """Append leases of every page that is here, each key for itself, to `parts`; waits for nvme.

    A fetch hands out a leading run: what breaks it is passed over, a bounded number of times.
    """
    unique = list(dict.fromkeys(keys))
    left = [key for key, here in zip(unique, store.lookup_here(unique), strict=True) if here]
    deadline = clock.monotonic() + wait_s
    for _ in range(ROUNDS_MAX):
        if not left:
            return
        time_s = max(0.0, deadline - clock.monotonic())
        lease = store.fetch(left, time_s, here=True).take(time_s)
        left = left[len(lease.keys) + 1 :]
        if lease.keys:
            parts.append(lease)
        else:
            lease.release()


def places(store: LocalStore, parts: Sequence[PageLease]) -> dict[PageKey, LeasedPage]:
    """Where each held page lies. Without a checksum nobody could believe it: it is left out."""
    return {
        key: LeasedPage(store.payload_offset(slot), checksum)
        for part in parts
        for key, slot, checksum in zip(part.keys, part.slots, part.checksums, strict=True)
        if len(checksum) == CHECKSUM_BYTES
    }
