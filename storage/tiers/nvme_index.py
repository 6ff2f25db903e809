"""The nvme tier's index: which slot holds which key, durable, in LMDB (docs/adr/0003).

Owns the LMDB environment and its size. Knows nothing of files of pages but what rebuild_index
reads from their headers. Invariants: apply() is one transaction and durable when it returns;
the environment never grows past `limit_bytes`. Not thread-safe: the tier's publishing lock
guards it, and the LOCK file of the root keeps other processes out (so LMDB's own locks are off).
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterable, Sequence
from itertools import islice
from pathlib import Path
from typing import cast

import lmdb
import numpy as np
import numpy.typing as npt

from tierkv.storage.checksum import payload_checksum
from tierkv.storage.device import aligned_buffer
from tierkv.storage.errors import TierError, TierFullError, TierIOError
from tierkv.storage.slot_header import FLAG_CHECKSUM, STATE_COMMITTED, SlotHeader, parse_header
from tierkv.storage.tiers.segments import SegmentFiles
from tierkv.storage.types import KEY_BYTES, PageKey

ENTRY = np.dtype(
    [
        ("generation", "<u8"),
        ("payload_bytes", "<u4"),
        ("owner", "<u4"),
        ("slot", "<u4"),
        ("flags", "<u4"),
        ("checksum", "V16"),
    ]
)
"""One index value, 40 bytes: docs/formats/nvme.md."""

_START_BYTES = 256 << 10
_LOAD_PIECE = 1 << 10
_READ_AHEAD_BYTES = 4 << 20

log = logging.getLogger(__name__)


class NvmeIndex:
    """The open index. TierIOError or TierFullError for whatever LMDB cannot do."""

    def __init__(self, folder: Path, limit_bytes: int, readonly: bool = False) -> None:
        """Open or make the index. TierIOError when the file is damaged or cannot be opened.

        With `readonly` it must be there, nothing is changed and `limit_bytes` means nothing.
        """
        self._limit_bytes = limit_bytes
        data = folder / "data.mdb"
        try:
            present = _read_ahead(data)
            self._env = lmdb.open(
                str(folder),
                map_size=max(min(max(_START_BYTES, 2 * present), limit_bytes), present),
                mode=0o600,
                lock=False,
                readahead=False,
                readonly=readonly,
                create=not readonly,
            )
        except (lmdb.Error, OSError) as error:
            raise TierIOError(f"open index {folder}: {error}; it will be rebuilt") from error
        # LMDB maps the file: touching a page past its end would kill the process (SIGBUS).
        promised = (self._env.info()["last_pgno"] + 1) * self._env.stat()["psize"]
        if present and data.stat().st_size < promised:
            self._env.close()
            raise TierIOError(
                f"open index {folder}: expected {promised} bytes, found {present}; it is truncated"
            )

    @property
    def entry_count(self) -> int:
        """How many entries LMDB accounts for. O(1)."""
        try:
            return int(self._env.stat()["entries"])
        except lmdb.Error as error:
            raise TierIOError(f"read index: {error}; it will be rebuilt") from error

    def load(self) -> tuple[list[PageKey], npt.NDArray[np.void]]:
        """Every well-formed entry: keys and ENTRY rows. O(pages), about 1 us a page."""
        try:
            with self._env.begin() as txn:
                names = txn.cursor().iternext(keys=True, values=False)
                keys = cast("list[PageKey]", list(names))
                rows = np.empty(len(keys), ENTRY)
                target = rows.view(np.uint8).data
                values = txn.cursor().iternext(keys=False, values=True)
                # In pieces, into place: a million value objects at once would double the memory.
                filled = 0
                while piece := b"".join(islice(values, _LOAD_PIECE)):
                    target[filled : filled + len(piece)] = piece
                    filled += len(piece)
        except (lmdb.Error, ValueError) as error:
            # ValueError: entries longer than promised do not fit their place.
            raise TierIOError(f"read index: {error}; it will be rebuilt") from error
        if filled != len(target) or set(map(len, keys)) - {KEY_BYTES}:
            raise TierIOError("read index: an entry has a wrong length; it will be rebuilt")
        return keys, rows

    def apply(self, deletes: Iterable[PageKey], puts: Sequence[tuple[PageKey, bytes]]) -> None:
        """Delete, then put, in one durable transaction. After an error neither is certain."""
        removed = list(deletes)
        while True:
            try:
                with self._env.begin(write=True) as txn:
                    for key in removed:
                        txn.delete(key)
                    for key, value in puts:
                        txn.put(key, value)
                return
            except lmdb.MapFullError:
                self._grow()
            except lmdb.Error as error:
                raise TierIOError(f"commit index: {error}; check the device under it") from error

    def holds(self, keys: Sequence[PageKey]) -> list[bool]:
        """Which keys are in the index: after a failed apply(), whether it happened after all."""
        try:
            with self._env.begin() as txn:
                return [txn.get(key) is not None for key in keys]
        except lmdb.Error as error:
            raise TierIOError(f"read index: {error}; check the device under it") from error

    def _grow(self) -> None:
        """Double the map, up to the limit. Each call at least adds a page, so apply() ends."""
        size: int = self._env.info()["map_size"]
        if size >= self._limit_bytes:
            raise TierFullError(
                f"commit index: {size} bytes are its share of the cap; raise the nvme capacity"
            )
        try:
            self._env.set_mapsize(min(2 * size, self._limit_bytes))
        except lmdb.Error as error:
            raise TierIOError(f"grow index: {error}; free address space") from error

    def close(self) -> None:
        """Close the environment. Idempotent."""
        self._env.close()


def _read_ahead(path: Path) -> int:
    """Bring the file into the page cache in order and return its size; 0 when there is none.

    LMDB would fault it in page by page: 4 KiB reads in the tree's order, 20 times slower cold.
    """
    if not path.exists():
        return 0
    with path.open("rb", buffering=0) as file:
        while file.read(_READ_AHEAD_BYTES):
            pass
        return file.tell()


def pack_entry(header: SlotHeader, slot: int) -> bytes:
    """The index value of a page."""
    row = np.zeros(1, ENTRY)
    row["generation"] = header.generation
    row["payload_bytes"] = header.payload_bytes
    row["owner"] = header.owner
    row["slot"] = slot
    row["flags"] = FLAG_CHECKSUM if header.checksum else 0
    if header.checksum:
        row["checksum"] = np.void(header.checksum)
    return row.tobytes()


def rebuild_index(folder: Path, limit_bytes: int, segments: SegmentFiles) -> NvmeIndex:
    """Replace a lost or damaged index by one made from the slot headers alone.

    Headers are verified here, payloads at their first read: a page whose write was cut short is
    found corrupt then. Pages evicted lately, or written and never committed, may come back; their
    checksums say that they are whole. Of several slots under one key the youngest whose payload
    verifies wins. O(slots), one 4 KiB read each, and every page that is there twice.
    """
    claims: dict[PageKey, list[tuple[int, SlotHeader]]] = {}
    for slot in range(segments.slot_count):
        try:
            header = parse_header(segments.read_header(slot))
        except TierError as error:
            log.warning("rebuild_index slot=%d unreadable reason=%s", slot, error)
            continue
        if header is None or header.state != STATE_COMMITTED:
            continue
        if header.payload_bytes != segments.page_bytes or not header.checksum:
            # Without a digest nothing could tell a whole payload from a torn one.
            continue
        claims.setdefault(header.key, []).append((slot, header))
    best = {key: _youngest_whole(claim, segments) for key, claim in claims.items()}
    puts = [(key, pack_entry(found[1], found[0])) for key, found in best.items() if found]
    # Built beside the old one: dying half way must not leave an index that is valid but empty.
    fresh = folder.with_name(folder.name + ".new")
    if fresh.exists():
        shutil.rmtree(fresh)
    fresh.mkdir(mode=0o700)
    index = NvmeIndex(fresh, limit_bytes)
    try:
        index.apply([], puts)
    finally:
        index.close()
    if folder.exists():
        shutil.rmtree(folder)
    fresh.replace(folder)
    log.warning("rebuild_index folder=%s pages=%d", folder, len(puts))
    return NvmeIndex(folder, limit_bytes)


def _youngest_whole(
    claim: list[tuple[int, SlotHeader]], segments: SegmentFiles
) -> tuple[int, SlotHeader] | None:
    """Which of the slots under one key to believe; a single one is believed unread."""
    if len(claim) == 1:
        return claim[0]
    payload = aligned_buffer(segments.page_bytes)
    for slot, header in sorted(claim, key=lambda held: held[1].generation, reverse=True):
        try:
            segments.read(slot, payload)
        except TierError as error:
            log.warning("rebuild_index slot=%d unreadable reason=%s", slot, error)
            continue
        if payload_checksum(payload) == header.checksum:
            return slot, header
    return None
