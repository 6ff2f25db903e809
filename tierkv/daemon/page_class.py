"""One page size that the daemon serves: a store and what clients must know to map its arena.

Owns one TieredStore. Knows neither sockets nor sessions. Called by tierkv.daemon.classes, which
opens and closes it, and by the verbs.

Invariant: a page becomes visible only after the checks that `verify_commit` asks for.
"""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from tierkv.daemon.holders import Holders
from tierkv.daemon.settings import DaemonConfig, VerifyCommit, VerifyLease
from tierkv.protocol.messages import Arena
from tierkv.storage.arena import plan_geometry, read_header
from tierkv.storage.base import Fetch, StoreReservation
from tierkv.storage.checksum import payload_checksum
from tierkv.storage.device import try_lock
from tierkv.storage.promotion import Verify
from tierkv.storage.store import StoreConfig, StoreRules, TieredStore
from tierkv.storage.types import PageKey

log = logging.getLogger(__name__)

StoreOpener = Callable[[StoreConfig], TieredStore]
"""How a store is opened: TieredStore.open, or a test's with a device of its own."""


class PageClass:
    """See the module docstring. Thread-safe as far as its store is; counters belong to the loop."""

    def __init__(
        self,
        store: TieredStore,
        config: DaemonConfig,
        holders_path: Path,
        host_bytes: int,
        nvme_bytes: int,
    ) -> None:
        self.store = store
        self.page_bytes = store.page_bytes
        self.host_bytes = host_bytes
        self.nvme_bytes = nvme_bytes
        geometry = store.arena_geometry()
        self.arena = Arena(
            total_bytes=geometry.total_bytes,
            first_slot=geometry.first_slot,
            slot_bytes=geometry.slot_bytes,
            payload_offset=geometry.payload_offset,
            page_bytes=geometry.page_bytes,
            slot_count=geometry.slot_count,
        )
        self.holders = Holders(holders_path, geometry.slot_count)
        self._policy = config.verify_commit
        self._checksums = config.checksums
        self._every = config.verify_commit_every
        self._turn = itertools.count()
        self._verify_lease = config.verify_lease
        recovered = store.stats().tiers[0].recovered_pages
        self._lease_reads = config.checksums and (
            config.verify_lease is VerifyLease.ALWAYS
            or (config.verify_lease is VerifyLease.RECOVERED and recovered > 0)
        )
        self.commit_mismatches = 0
        """Pages whose bytes did not have the checksum that their client gave."""

    def still_held(self) -> list[tuple[int, int, StoreReservation]]:
        """Slots that a worker of a former daemon may still write: reserved, with who it is.

        Once, before any client is served: (pid, start time, a reservation of one slot). The
        caller releases each when that process has ended. O(free slots) if there are any.
        """
        wanted = self.holders.living()
        kept: list[tuple[int, int, StoreReservation]] = []
        others: list[StoreReservation] = []
        try:
            for _ in range(self.store.stats().tiers[0].free_pages):
                if not wanted:
                    break
                one = self.store.reserve(1)
                who = wanted.pop(one.slots[0], None) if one.slots else None
                if who is None:
                    others.append(one)
                else:
                    kept.append((*who, one))
        finally:
            for other in others:
                other.release()
        return kept

    @property
    def lease_touches_pages(self) -> bool:
        """Whether taking a lease may have to read payloads, which takes a worker."""
        return self._lease_reads

    def fetch(self, keys: Sequence[PageKey], wait_s: float, owner: int = 0) -> Fetch:
        """Start bringing pages into host memory, to be verified as configured when taken.

        `owner`: whose pages those from other nodes become.
        """
        verify = False if self._verify_lease is VerifyLease.NEVER else None
        return self.store.fetch(keys, wait_s, verify=verify, owner=owner)

    def checks_for(self, count: int, checksums: Sequence[bytes] | None) -> list[bool]:
        """Which of `count` pages of a commit the daemon itself must read. On the loop."""
        if not self._checksums:
            return [False] * count
        if checksums is None or self._policy is VerifyCommit.ALWAYS:
            return [True] * count
        if self._policy is VerifyCommit.CLIENT:
            return [False] * count
        return [next(self._turn) % self._every == 0 for _ in range(count)]

    def close(self) -> None:
        """Close the store; what clients have mapped stays mapped."""
        self.store.close()


def store_config(
    config: DaemonConfig,
    page_bytes: int,
    arena_path: Path,
    nvme_root: Path | None,
    host_bytes: int,
    nvme_bytes: int,
) -> StoreConfig:
    """What one page class asks of its store."""
    verify = Verify.ALWAYS if config.verify_lease is VerifyLease.ALWAYS else Verify.RECOVERED
    return StoreConfig(
        page_bytes=page_bytes,
        host_bytes=host_bytes,
        host_arena_path=arena_path,
        huge_pages=config.huge_pages,
        nvme_root=nvme_root,
        nvme_bytes=nvme_bytes,
        nvme_min_free_bytes=config.nvme_min_free_bytes,
        checksums=config.checksums,
        rules=StoreRules(
            write_policy=config.write_policy,
            selective_hits=config.selective_hits,
            admission=config.admission,
            verify=verify,
            nvme_write_bytes_per_day=config.write_budget_bytes_per_day,
            preload_fraction=config.preload_fraction,
            remote_lookup_s=config.mooncake_lookup_s,
            close_s=max(0.1, min(5.0, config.stop_s / 4)),
        ),
    )


def retire_arena(path: Path, page_bytes: int, host_bytes: int) -> bool:
    """Unlink an arena that has another geometry than asked for; True when that was done.

    Workers of a former daemon may still have it mapped: cutting the file under them would kill
    them, a file that is merely unlinked stays theirs (lesson R3). Raises what reading it raises.
    """
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return False
    try:
        if not try_lock(fd):
            return False
        found = read_header(fd, path)
        if found is None and os.fstat(fd).st_size == 0:
            return False
        if found is not None and found[0] == plan_geometry(page_bytes, host_bytes):
            return False
        path.unlink()
        log.warning("arena=%s retired=yes reason=geometry", path)
        return True
    finally:
        os.close(fd)


def digests(reservation: StoreReservation, indexes: Sequence[int]) -> list[bytes]:
    """Checksums of the payloads at `indexes`, as they are now. O(bytes), outside every lock."""
    return [payload_checksum(reservation.views[index]) for index in indexes]
