"""Lists as single byte strings: keys, slots, checksums, tiers, outcomes. No checks of content.

The codec has checked lengths already (fields.packed). Called by daemon and clients. O(n) each.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence

from tierkv.protocol.errors import ProtocolError
from tierkv.protocol.messages import (
    CHECKSUM_BYTES,
    OUTCOME_CODES,
    SLOT_ID_BYTES,
    TIER_CODES,
    WireCode,
)
from tierkv.storage.types import KEY_BYTES, CommitOutcome, PageKey, TierName

NO_CHECKSUM = bytes(CHECKSUM_BYTES)

_TIERS = {code: tier for tier, code in TIER_CODES.items()}
_OUTCOMES = {code: outcome for outcome, code in OUTCOME_CODES.items()}


def split_keys(packed: bytes) -> list[PageKey]:
    """Keys from their concatenation."""
    return [PageKey(packed[i : i + KEY_BYTES]) for i in range(0, len(packed), KEY_BYTES)]


def pack_slots(slots: Sequence[int]) -> bytes:
    """Slots as little-endian u32."""
    return struct.pack(f"<{len(slots)}I", *slots)


def unpack_slots(packed: bytes) -> tuple[int, ...]:
    """Inverse of pack_slots."""
    return struct.unpack(f"<{len(packed) // SLOT_ID_BYTES}I", packed)


def pack_checksums(checksums: Iterable[bytes]) -> bytes:
    """Checksums one after the other; b"" (none was taken) becomes NO_CHECKSUM."""
    return b"".join([checksum or NO_CHECKSUM for checksum in checksums])


def split_checksums(packed: bytes) -> list[bytes]:
    """Inverse of pack_checksums."""
    pieces = [packed[i : i + CHECKSUM_BYTES] for i in range(0, len(packed), CHECKSUM_BYTES)]
    return [b"" if piece == NO_CHECKSUM else piece for piece in pieces]


def pack_tiers(tiers: Iterable[TierName | None]) -> bytes:
    """One code a tier. KeyError for a tier that no daemon has."""
    return bytes([TIER_CODES[tier] for tier in tiers])


def unpack_tiers(packed: bytes) -> list[TierName | None]:
    """Inverse of pack_tiers. Raises ProtocolError for an unknown code."""
    try:
        return [_TIERS[code] for code in packed]
    except KeyError as error:
        raise ProtocolError(WireCode.FIELD, f"unknown tier code {error}") from None


def pack_outcomes(outcomes: Iterable[CommitOutcome]) -> bytes:
    """One code an outcome."""
    return bytes([OUTCOME_CODES[outcome] for outcome in outcomes])


def unpack_outcomes(packed: bytes) -> list[CommitOutcome]:
    """Inverse of pack_outcomes. Raises ProtocolError for an unknown code."""
    try:
        return [_OUTCOMES[code] for code in packed]
    except KeyError as error:
        raise ProtocolError(WireCode.FIELD, f"unknown outcome code {error}") from None
