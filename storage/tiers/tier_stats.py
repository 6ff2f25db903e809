"""What both tiers do alike at their edges: judge arguments and report their table as TierStats.

Owns no state; the tier's lock is held where a table is read. Arguments come from callers inside
TierKV, but a wrong length would corrupt a neighbour, so they raise ValueError and never assert.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from tierkv.storage.base import Tier, TierStats
from tierkv.storage.checksum import CHECKSUM_BYTES
from tierkv.storage.slot_header import OWNER_MAX
from tierkv.storage.tiers.slot_table import SlotTable
from tierkv.storage.types import KEY_BYTES, Buffer, PageKey


def check_length(buffer: Buffer, page_bytes: int, operation: str) -> memoryview:
    """The buffer as flat bytes. ValueError when it is not one page or not contiguous."""
    flat = memoryview(buffer)
    if flat.nbytes != page_bytes:
        raise ValueError(f"{operation}: expected {page_bytes} bytes, got {flat.nbytes}")
    if not flat.c_contiguous:
        raise ValueError(f"{operation}: the buffer is not contiguous")
    return flat if flat.format == "B" and flat.ndim == 1 else flat.cast("B")


def known_checksum(checksum: bytes | None) -> bytes:
    """The digest handed over, or b"" when there is none (a tier without checksums leases b"")."""
    if checksum and len(checksum) != CHECKSUM_BYTES:
        raise ValueError(f"checksum: expected {CHECKSUM_BYTES} bytes, got {len(checksum)}")
    return checksum or b""


def check_keys(keys: Sequence[PageKey], slot_count: int) -> None:
    """ValueError when there are more keys than slots or one is not KEY_BYTES long."""
    if len(keys) > slot_count:
        raise ValueError(f"commit: {len(keys)} keys for {slot_count} reserved slots")
    for key in keys:
        if len(key) != KEY_BYTES:
            raise ValueError(f"commit: expected a key of {KEY_BYTES} bytes, got {len(key)}")


def check_owners(owners: Sequence[int] | int, key_count: int) -> list[int]:
    """One owner per key. ValueError when there are not as many or one is no u32."""
    listed = [owners] * key_count if isinstance(owners, int) else list(owners)
    if len(listed) != key_count:
        raise ValueError(f"commit: {len(listed)} owners for {key_count} keys")
    for owner in listed:
        if not 0 <= owner <= OWNER_MAX:
            raise ValueError(f"commit: expected an owner from 0 to {OWNER_MAX}, got {owner}")
    return listed


def snapshot(tier: Tier, table: SlotTable, slot_bytes: int, degraded: str | None) -> TierStats:
    """TierStats of one moment. O(1)."""
    return TierStats(
        name=tier.name,
        page_bytes=tier.page_bytes,
        slot_bytes=slot_bytes,
        capacity_pages=table.capacity,
        free_pages=table.free,
        reserved_pages=table.reserved,
        committed_pages=table.committed,
        leased_pages=table.leased,
        quarantined_pages=table.quarantined,
        degraded=degraded,
        **asdict(table.counters),
    )
