"""What makes pages hot, kept across restarts: use counts and moments of last use.

Owns the file's format (docs/formats/state.md). Knows no pages and takes no lock: the store hands
over a copy and is handed one back. Invariants: a file is written whole or not at all (a new file,
synced, renamed); a damaged, foreign or oversized one is ignored and logged, never an error and
never believed: hotness is advice. Called by storage.store at opening, close and in between.
"""

from __future__ import annotations

import logging
import os
import struct
import tempfile
import zlib
from dataclasses import dataclass, replace
from pathlib import Path

from tierkv.storage.checksum import header_checksum
from tierkv.storage.last_use import OWNERS_MAX, LastUseState
from tierkv.storage.last_use import ROWS as LAST_USE_ROWS
from tierkv.storage.policy import ROWS as SKETCH_ROWS
from tierkv.storage.policy import SketchState

CLOSED_NAME = "hotness.bin"
OPEN_NAME = "hotness-open.bin"
MAGIC = b"TKVHOTNS"
VERSION = 1
WIDTH_MAX = 1 << 28
"""Cells per row that are believed: 67 million pages."""

_OWNER_BYTES = 8

# magic, version, zero, sketch width, sketch sample, last-use width, reading, wall, owners,
# length of what follows
_FIELDS = struct.Struct("<8sIIQQQQQIQ")
_SEAL = struct.Struct("<Q")
_OWNER = struct.Struct("<II")
_HEADER_BYTES = _FIELDS.size + _SEAL.size

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Hotness:
    """Everything the file keeps."""

    sketch: SketchState
    last_use: LastUseState


class HotnessFile:
    """The saved hotness in one folder. The file's name says whether the store closed well:
    CLOSED_NAME is written by close alone and renamed by the next opening.
    """

    def __init__(self, folder: Path) -> None:
        self._closed = folder / CLOSED_NAME
        self._open = folder / OPEN_NAME

    def load(self) -> Hotness | None:
        """What was saved last; None when there is nothing that can be believed. O(size).

        From here on a kill leaves what was saved marked as not closed well.
        """
        try:
            self._closed.replace(self._open)
            closed_well = True
        except FileNotFoundError:
            closed_well = False
        except OSError as error:
            log.warning("hotness: open=%s error=%s", self._closed, error)
            return None
        try:
            with self._open.open("rb") as file:
                header = file.read(_HEADER_BYTES)
                # One byte more than it may be, so that a longer file is seen to be longer.
                found = unpack_hotness(header + file.read(_plan(header).body_bytes + 1))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, zlib.error) as error:
            log.warning("hotness: load=%s ignored=yes error=%s", self._open, error)
            return None
        return replace(found, last_use=replace(found.last_use, closed_well=closed_well))

    def save(self, hotness: Hotness, closing: bool) -> bool:
        """Replace what was saved; False, and logged, when the device refuses. O(size)."""
        target = self._closed if closing else self._open
        try:
            _write_whole(target, pack_hotness(hotness))
            if closing:
                self._open.unlink(missing_ok=True)
        except OSError as error:
            log.warning("hotness: save=%s error=%s", target, error)
            return False
        return True


def _write_whole(path: Path, data: bytes) -> None:
    path.parent.mkdir(mode=0o700, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=path.name, delete=False) as file:
        temporary = Path(file.name)
        try:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
            temporary.replace(path)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise


def pack_hotness(hotness: Hotness) -> bytes:
    """The file's bytes."""
    sketch, last = hotness.sketch, hotness.last_use
    owners = b"".join(_OWNER.pack(owner, used) for owner, used in last.owners.items())
    # Most cells of a store that is not full are zero: the fastest level is enough.
    body = zlib.compress(b"".join([*sketch.rows, *last.rows, owners]), 1)
    fields = _FIELDS.pack(
        MAGIC,
        VERSION,
        0,
        len(sketch.rows[0]),
        sketch.sample,
        len(last.rows[0]) // 4,
        last.reading_s,
        last.wall_s,
        len(last.owners),
        len(body),
    )
    return fields + _SEAL.pack(header_checksum(fields + body)) + body


def unpack_hotness(data: bytes) -> Hotness:
    """Inverse of pack_hotness. ValueError or zlib.error for anything else; bounded memory."""
    plan = _plan(data[:_HEADER_BYTES])
    body = data[_HEADER_BYTES:]
    if len(body) != plan.body_bytes:
        raise ValueError(f"expected {plan.body_bytes} bytes after the header, got {len(body)}")
    (seal,) = _SEAL.unpack_from(data, _FIELDS.size)
    if seal != header_checksum(data[: _FIELDS.size] + body):
        raise ValueError("the checksum does not match")
    unpacker = zlib.decompressobj()
    rows = unpacker.decompress(body, plan.plain_bytes + 1)
    if len(rows) != plan.plain_bytes or not unpacker.eof:
        raise ValueError(f"expected {plan.plain_bytes} bytes of rows, got {len(rows)} or more")
    cells = SKETCH_ROWS * plan.sketch_width
    moments = cells + LAST_USE_ROWS * plan.last_width * 4
    return Hotness(
        SketchState(_cut(rows[:cells], plan.sketch_width), plan.sample),
        LastUseState(
            rows=_cut(rows[cells:moments], plan.last_width * 4),
            reading_s=plan.reading_s,
            wall_s=plan.wall_s,
            owners=dict(_OWNER.iter_unpack(rows[moments:])),
        ),
    )


@dataclass(frozen=True, slots=True)
class _Plan:
    """A header that was believed so far."""

    sketch_width: int
    sample: int
    last_width: int
    reading_s: int
    wall_s: int
    owners: int
    body_bytes: int

    @property
    def plain_bytes(self) -> int:
        sketch = SKETCH_ROWS * self.sketch_width
        return sketch + LAST_USE_ROWS * 4 * self.last_width + self.owners * _OWNER_BYTES


def _plan(header: bytes) -> _Plan:
    if len(header) != _HEADER_BYTES:
        raise ValueError(f"expected a header of {_HEADER_BYTES} bytes, got {len(header)}")
    magic, version, _, *numbers = _FIELDS.unpack_from(header)
    if magic != MAGIC or version != VERSION:
        raise ValueError(f"expected {MAGIC!r} version {VERSION}, got {magic!r} version {version}")
    plan = _Plan(*numbers)
    for width in (plan.sketch_width, plan.last_width):
        if not 0 < width <= WIDTH_MAX or width & (width - 1):
            raise ValueError(f"expected a power of two up to {WIDTH_MAX} cells, got {width}")
    if plan.owners > OWNERS_MAX or max(plan.reading_s, plan.wall_s) >= 1 << 40:
        raise ValueError(f"numbers out of bounds: {plan}")
    if plan.body_bytes > plan.plain_bytes + (1 << 20):
        raise ValueError(f"a body of {plan.body_bytes} bytes for {plan.plain_bytes} of rows")
    return plan


def _cut(data: bytes, length: int) -> list[bytes]:
    return [data[start : start + length] for start in range(0, len(data), length)]
