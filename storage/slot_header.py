"""The slot image, the same in the arena and on disk: docs/formats/slot.md.

Owns the byte layout of a slot's header block. Knows nothing of where slots lie. A slot is one
4 KiB header block and the payload rounded up to 4 KiB, so that a page moves between memory and
disk as one aligned transfer. Called by the host and nvme tiers.

Invariants: `state` and `last_use` are outside the header checksum, because the arena changes
them in place; everything that says which bytes the payload is lies inside it.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from tierkv.storage.checksum import CHECKSUM_BYTES, header_checksum
from tierkv.storage.device import BLOCK_BYTES, round_up
from tierkv.storage.types import KEY_BYTES, Buffer, PageKey

HEADER_BYTES = BLOCK_BYTES
SLOT_MAGIC = b"TKVSLOT\x00"
SLOT_VERSION = 1

STATE_FREE = 0
STATE_WRITTEN = 0x57524954
"""On disk: payload being written, key not known yet. Never recovered."""
STATE_COMMITTED = 0x434F4D4D

FLAG_CHECKSUM = 1
"""The payload checksum field holds a digest; without it the payload cannot be verified."""

STATE_OFFSET = 12
LAST_USE_OFFSET = 88
NO_KEY = PageKey(bytes(KEY_BYTES))

PAYLOAD_BYTES_MAX = 2**32 - 1
OWNER_MAX = 2**32 - 1

# magic, version, flags, state, key, payload bytes, owner, payload checksum, generation
_FIELDS = struct.Struct(f"<8sHHI{KEY_BYTES}sII{CHECKSUM_BYTES}sQ")
# header checksum, last use
_TRAILER = struct.Struct("<QQ")
_STATE = struct.Struct("<I")
_TICK = struct.Struct("<Q")
_USED_BYTES = _FIELDS.size + _TRAILER.size


@dataclass(frozen=True, slots=True)
class SlotHeader:
    """What a slot says of its payload."""

    key: PageKey
    payload_bytes: int
    checksum: bytes
    """16-byte digest of the payload, or b"" when none was taken."""
    generation: int
    """Tick at which the page was committed: no two commits into one tier share it."""
    state: int = STATE_COMMITTED
    last_use: int = 0
    owner: int = 0
    """On whose behalf the page is kept; 0: nobody in particular."""

    def pack(self) -> bytes:
        """The header's used bytes; the rest of the block is zero."""
        flags = FLAG_CHECKSUM if self.checksum else 0
        stored = self.checksum or bytes(CHECKSUM_BYTES)
        fields = (self.key, self.payload_bytes, self.owner, stored, self.generation)
        sealed = header_checksum(_FIELDS.pack(SLOT_MAGIC, SLOT_VERSION, flags, 0, *fields))
        head = _FIELDS.pack(SLOT_MAGIC, SLOT_VERSION, flags, self.state, *fields)
        return head + _TRAILER.pack(sealed, self.last_use)

    def pack_into(self, block: memoryview, offset: int) -> None:
        """Write the header at `offset`, its state word last.

        Until the last store the state reads FREE, so death at any moment leaves a free slot.
        """
        set_state(block, offset, STATE_FREE)
        packed = self.pack()
        block[offset + STATE_OFFSET + 4 : offset + _USED_BYTES] = packed[STATE_OFFSET + 4 :]
        block[offset : offset + STATE_OFFSET] = packed[:STATE_OFFSET]
        set_state(block, offset, self.state)


def parse_header(block: Buffer, offset: int = 0) -> SlotHeader | None:
    """Read a header, or None when it is not an intact one of this version. Never raises."""
    if len(block) - offset < _USED_BYTES:
        return None
    magic, version, flags, state, *fields = _FIELDS.unpack_from(block, offset)
    if magic != SLOT_MAGIC or version != SLOT_VERSION:
        return None
    sealed, last_use = _TRAILER.unpack_from(block, offset + _FIELDS.size)
    if header_checksum(_FIELDS.pack(magic, version, flags, 0, *fields)) != sealed:
        return None
    key, payload_bytes, owner, checksum, generation = fields
    return SlotHeader(
        key=PageKey(key),
        payload_bytes=payload_bytes,
        checksum=checksum if flags & FLAG_CHECKSUM else b"",
        generation=generation,
        state=state,
        last_use=last_use,
        owner=owner,
    )


def set_state(block: memoryview, offset: int, state: int) -> None:
    """Store the state word of the header at `offset`: one aligned 4-byte store."""
    _STATE.pack_into(block, offset + STATE_OFFSET, state)


def set_last_use(block: memoryview, offset: int, tick: int) -> None:
    """Store the last-use tick of the header at `offset`."""
    _TICK.pack_into(block, offset + LAST_USE_OFFSET, tick)


def slot_bytes_for(page_bytes: int) -> int:
    """Bytes one slot occupies: header block and payload rounded up to 4 KiB."""
    return HEADER_BYTES + round_up(page_bytes)
