"""The bytes of a NIXL offer, as docs/formats/transport.md shows them. No I/O, no NIXL.

Owns the layout and its bounds. An offer comes from a member of the pool, over its authenticated
channel, and is checked all the same: sizes before anything is kept, numbers before they are
addresses. What NIXL itself put in, its metadata, is opaque here. Called by nixl.py.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

from tierkv.storage.errors import TierIOError
from tierkv.storage.transport.plane import OFFER_BYTES_MAX
from tierkv.storage.transport.ucx_environment import MACHINE_BYTES

MAGIC = b"TKVNIXL\x01"
AGENT_BYTES = 32
"""An agent's name: ASCII, random, another for each plane."""
COOKIE_BYTES = 16
COOKIE_CLOSED = b"\xff" * COOKIE_BYTES
"""In the place of every cookie of a plane that was closed."""
MEMORIES_MAX = 4096
ADDRESS_END = 1 << 63

_HEAD = struct.Struct(f"<8s{MACHINE_BYTES}sIB3s{AGENT_BYTES}sII")
_MEMORY = struct.Struct(f"<QQQQ{COOKIE_BYTES}s")
_ZEROS = bytes(3)


class OfferedMemory(NamedTuple):
    """One registered memory, by its addresses in the offering process."""

    generation: int
    address: int
    length: int
    cookie_address: int
    """Where COOKIE_BYTES say whether it is still registered."""
    cookie: bytes
    """What is there as long as it is."""


class NixlOffer(NamedTuple):
    """What a peer needs to read from a plane."""

    machine: bytes
    """ucx_environment.machine() there."""
    pid: int
    rdma: bool
    """Whether it has an RDMA device."""
    agent: str
    memories: Sequence[OfferedMemory]
    metadata: bytes
    """NIXL's own."""


def pack_offer(offer: NixlOffer) -> bytes:
    """TierIOError when it is longer than OFFER_BYTES_MAX. O(offer)."""
    head = _HEAD.pack(
        MAGIC,
        offer.machine,
        offer.pid,
        offer.rdma,
        _ZEROS,
        offer.agent.encode("ascii"),
        len(offer.memories),
        len(offer.metadata),
    )
    data = head + b"".join(_MEMORY.pack(*memory) for memory in offer.memories) + offer.metadata
    if len(data) > OFFER_BYTES_MAX:
        raise TierIOError(
            f"offer memory by nixl: {len(data)} bytes, at most {OFFER_BYTES_MAX}; "
            "register fewer memories"
        )
    return data


def unpack_offer(data: bytes) -> NixlOffer:
    """TierIOError, one line, when these bytes are none. O(offer)."""
    try:
        magic, machine, pid, rdma, zeros, agent, count, length = _HEAD.unpack_from(data)
        name = agent.decode("ascii")
    except (struct.error, UnicodeDecodeError) as error:
        raise TierIOError(f"read nixl offer: {error}") from None
    end = _HEAD.size + count * _MEMORY.size
    if magic != MAGIC or zeros != _ZEROS or rdma not in (0, 1):
        raise TierIOError("read nixl offer: it is of another version; run the same on both nodes")
    if count > MEMORIES_MAX or len(data) != end + length or not name.isalnum():
        raise TierIOError(
            f"read nixl offer: {count} memories and {length} bytes do not make {len(data)} bytes"
        )
    memories = [OfferedMemory(*row) for row in _MEMORY.iter_unpack(data[_HEAD.size : end])]
    for memory in memories:
        if not _possible(memory):
            raise TierIOError(f"read nixl offer: memory {memory.generation} cannot be where it is")
    if len({memory.generation for memory in memories}) != count:
        raise TierIOError("read nixl offer: one generation names two memories")
    return NixlOffer(machine, pid, bool(rdma), name, memories, data[end:])


def _possible(memory: OfferedMemory) -> bool:
    return (
        memory.generation > 0
        and memory.length > 0
        and 0 < memory.address < ADDRESS_END - memory.length
        and 0 < memory.cookie_address < ADDRESS_END - COOKIE_BYTES
    )
