"""One run of memory cut into slots, that outlives the process when it is a tmpfs file.

Owns the mapping, the arena's header block (docs/formats/arena.md) and the lock on its file.
Knows slots only as offsets: which of them hold what is storage/tiers/host.py's business.
Invariants: the mapping is pre-faulted, so that no later store can meet a full tmpfs (SIGBUS);
every size is checked before anything is allocated or changed; a file of another format version
is left as it was. Huge pages are asked of the system, never counted on.
"""

from __future__ import annotations

import logging
import mmap
import os
import struct
from dataclasses import dataclass
from pathlib import Path

from tierkv.storage.checksum import header_checksum
from tierkv.storage.device import BLOCK_BYTES, address_of, try_lock, unlock
from tierkv.storage.errors import (
    CapacityError,
    ConfigError,
    DirectoryInUseError,
    FormatVersionError,
)
from tierkv.storage.slot_header import HEADER_BYTES, PAYLOAD_BYTES_MAX, slot_bytes_for

ARENA_MAGIC = b"TKVARENA"
ARENA_VERSION = 1
ARENA_HEADER_BYTES = BLOCK_BYTES

# magic, version, zero, page bytes, slot bytes, slot count, boot id
_FIELDS = struct.Struct("<8sIIQQQ36s")
_SEAL = struct.Struct("<Q")
_SEAL_OFFSET = 80

_MADV_POPULATE_WRITE = 23
"""linux/mman.h, kernel 5.14 and later; Python's mmap module has no name for it."""
_POPULATE_STEP_BYTES = 256 << 20
_HUGE_FIELDS = ("AnonHugePages:", "ShmemPmdMapped:", "FilePmdMapped:")

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ArenaGeometry:
    """How an arena is cut: all a process that maps it must know to find payloads.

    The payload of slot n starts at `first_slot + n * slot_bytes + payload_offset`.
    """

    total_bytes: int
    """Header block and all slots: the length to map."""
    first_slot: int
    """Offset of slot 0 in the arena."""
    slot_bytes: int
    payload_offset: int
    """From a slot's start to its payload."""
    page_bytes: int
    slot_count: int


class Arena:
    """A mapped arena. The owner of the file's lock until close()."""

    def __init__(
        self, path: Path | None, page_bytes: int, capacity_bytes: int, huge_pages: bool = False
    ) -> None:
        """Attach to the arena at `path`, or make one; None is anonymous memory.

        `huge_pages` asks for large memory pages where the system has them (tmpfs mounted with
        huge=advise or more, transparent huge pages); huge_bytes() tells what came of it.
        Raises CapacityError (budget below one slot; memory or tmpfs too small),
        FormatVersionError, DirectoryInUseError, ConfigError. O(capacity) the first time.
        """
        self.path = path
        self.geometry = plan_geometry(page_bytes, capacity_bytes)
        self.attached = False
        """True when the slots' contents were there before."""
        self.same_boot = False
        """True when they were written since the machine started: stores cannot be missing."""
        self._huge_pages = huge_pages
        self._fd = -1
        if path is None:
            _check_memory(self.geometry, present_bytes=0)
            # Shared anonymous memory is tmpfs of the kernel's own, which gives no huge pages
            # unless told so system-wide; private memory gives them on request.
            sharing = mmap.MAP_PRIVATE if huge_pages else mmap.MAP_SHARED
            flags = sharing | mmap.MAP_ANONYMOUS
            self._map = mmap.mmap(-1, self.geometry.total_bytes, flags=flags)
            self._populate()
        else:
            try:
                self._open_file(path)
            except BaseException:
                self._close_fd()
                raise
        self.memory = memoryview(self._map)

    def slot_offset(self, slot: int) -> int:
        """Where the slot's header block starts in `memory`."""
        return self.geometry.first_slot + slot * self.geometry.slot_bytes

    def payload_view(self, slot: int) -> memoryview:
        """Writable view of the slot's payload, page_bytes long, 4 KiB aligned."""
        start = self.slot_offset(slot) + HEADER_BYTES
        return self.memory[start : start + self.geometry.page_bytes]

    def fd(self) -> int:
        """The open file, to be handed to processes that map it: borrowed, valid until close().

        ConfigError when the arena is anonymous, so that nobody else can map it.
        """
        if self._fd < 0:
            raise ConfigError(
                "share the host arena: it is anonymous memory of this process; "
                "give the host tier a path on tmpfs"
            )
        return self._fd

    def huge_bytes(self) -> int:
        """Bytes of the mapping that huge pages hold now; 0 where the system does not tell.

        O(mappings of the process): for a status page, not for a data path.
        """
        if not self._huge_pages:
            return 0
        start = address_of(self.memory)
        return _huge_bytes_between(start, start + self.geometry.total_bytes)

    def close(self) -> None:
        """Let the lock and the memory go. Idempotent.

        Memory that a view still refers to is unmapped when the last view dies.
        """
        self.memory.release()
        try:
            self._map.close()
        except BufferError:
            log.debug("arena=%s unmapped=later reason=views", self.path)
        self._close_fd()

    def _close_fd(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            # The mapping holds a duplicate of the descriptor, which would keep the lock too.
            unlock(fd)
            os.close(fd)

    def _open_file(self, path: Path) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            self._fd = os.open(path, flags, 0o600)
            locked = try_lock(self._fd)
        except OSError as error:
            raise ConfigError(
                f"open arena {path}: {error.strerror}; choose a path that can be written"
            ) from error
        if not locked:
            raise DirectoryInUseError(
                f"open arena {path}: another process has it open; stop it or choose another path"
            )
        found = read_header(self._fd, path)
        present_bytes = os.fstat(self._fd).st_blocks * 512
        _check_memory(self.geometry, present_bytes)
        _check_file_system(path, self.geometry, present_bytes)
        self.attached = found is not None and found[0] == self.geometry
        self.same_boot = found is not None and found[1] == boot_id()
        if found is not None and not self.attached:
            log.warning("arena=%s rebuilt=yes was=%s now=%s", path, found[0], self.geometry)
        self._allocate(path)
        self._map = mmap.mmap(self._fd, self.geometry.total_bytes)
        self._populate()
        # Last, so that an arena with a valid header always has all its slots.
        self._map[:ARENA_HEADER_BYTES] = _pack_header(self.geometry)

    def _allocate(self, path: Path) -> None:
        try:
            if not self.attached:
                os.ftruncate(self._fd, 0)
            os.ftruncate(self._fd, self.geometry.total_bytes)
            os.posix_fallocate(self._fd, 0, self.geometry.total_bytes)
        except OSError as error:
            raise CapacityError(
                f"allocate arena {path}: {self.geometry.total_bytes} bytes: {error.strerror}; "
                "lower the host capacity or enlarge the file system"
            ) from error

    def _populate(self) -> None:
        """Fault every page in now: a first touch costs ten times a copy."""
        total = self.geometry.total_bytes
        if self._huge_pages:
            try:
                self._map.madvise(mmap.MADV_HUGEPAGE)
            except OSError as error:
                log.info("arena=%s huge_pages=no reason=%s", self.path, error.strerror)
        try:
            for start in range(0, total, _POPULATE_STEP_BYTES):
                step = min(_POPULATE_STEP_BYTES, total - start)
                self._map.madvise(_MADV_POPULATE_WRITE, start, step)
        except OSError as error:
            log.debug("arena=%s populate=touch reason=%s", self.path, error.strerror)
            for start in range(0, total, BLOCK_BYTES):
                self._map[start] = self._map[start]


def plan_geometry(page_bytes: int, capacity_bytes: int) -> ArenaGeometry:
    """The most slots that fit. CapacityError when not even one does."""
    if page_bytes <= 0:
        raise ConfigError(f"open host tier: page_bytes must be positive, got {page_bytes}")
    if page_bytes > PAYLOAD_BYTES_MAX:
        raise ConfigError(
            f"open host tier: page_bytes must be at most {PAYLOAD_BYTES_MAX}, got {page_bytes}; "
            "choose fewer tokens per page"
        )
    slot_bytes = slot_bytes_for(page_bytes)
    slot_count = (capacity_bytes - ARENA_HEADER_BYTES) // slot_bytes
    if slot_count < 1:
        raise CapacityError(
            f"open host tier: capacity_bytes {capacity_bytes} is below one slot of {slot_bytes} "
            f"bytes; raise the host capacity to at least {ARENA_HEADER_BYTES + slot_bytes}"
        )
    return geometry_for(page_bytes, slot_count)


def geometry_for(page_bytes: int, slot_count: int) -> ArenaGeometry:
    """The layout of an arena with so many slots."""
    slot_bytes = slot_bytes_for(page_bytes)
    return ArenaGeometry(
        total_bytes=ARENA_HEADER_BYTES + slot_count * slot_bytes,
        first_slot=ARENA_HEADER_BYTES,
        slot_bytes=slot_bytes,
        payload_offset=HEADER_BYTES,
        page_bytes=page_bytes,
        slot_count=slot_count,
    )


def boot_id() -> str:
    """An identifier that changes with every start of the machine; "" where there is none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


def _pack_header(geometry: ArenaGeometry) -> bytes:
    fields = _FIELDS.pack(
        ARENA_MAGIC,
        ARENA_VERSION,
        0,
        geometry.page_bytes,
        geometry.slot_bytes,
        geometry.slot_count,
        boot_id().encode("ascii")[:36],
    )
    sealed = fields.ljust(_SEAL_OFFSET, b"\0")
    return (sealed + _SEAL.pack(header_checksum(sealed))).ljust(ARENA_HEADER_BYTES, b"\0")


def read_header(fd: int, path: Path) -> tuple[ArenaGeometry, str] | None:
    """Geometry and boot id of the arena open at `fd`; None for a new, unfinished or torn one.

    Reads only. ConfigError when the file is something else, FormatVersionError when another
    version wrote it; `path` is for messages.
    """
    block = os.pread(fd, ARENA_HEADER_BYTES, 0)
    if not any(block):
        return None
    if block[: len(ARENA_MAGIC)] != ARENA_MAGIC:
        raise ConfigError(
            f"open arena {path}: the file is not a TierKV arena; choose another path or delete it"
        )
    version = int.from_bytes(block[8:12], "little")
    if version != ARENA_VERSION:
        raise FormatVersionError(
            f"open arena {path}: format version {version}, this TierKV reads {ARENA_VERSION}; "
            "use the TierKV that wrote it or delete the file"
        )
    sealed = block[:_SEAL_OFFSET]
    if len(block) < _SEAL_OFFSET + 8 or _SEAL.unpack_from(block, _SEAL_OFFSET)[
        0
    ] != header_checksum(sealed):
        log.warning("arena=%s rebuilt=yes reason=torn_header", path)
        return None
    _, _, _, page_bytes, slot_bytes, slot_count, boot = _FIELDS.unpack_from(block)
    geometry = geometry_for(page_bytes, slot_count)
    if geometry.slot_bytes != slot_bytes:
        log.warning("arena=%s rebuilt=yes reason=slot_bytes", path)
        return None
    # A file cut short after its header was written cannot hold the slots it promises.
    if os.fstat(fd).st_size < geometry.total_bytes:
        log.warning("arena=%s rebuilt=yes reason=truncated", path)
        return None
    return geometry, boot.rstrip(b"\0").decode("ascii", "replace")


def _check_memory(geometry: ArenaGeometry, present_bytes: int) -> None:
    available = _available_memory_bytes()
    needed = geometry.total_bytes - present_bytes
    if available is not None and needed > available:
        raise CapacityError(
            f"open host tier: {needed} bytes needed, {available} bytes of memory available; "
            f"lower the host capacity to at most {available + present_bytes}"
        )


def _check_file_system(path: Path, geometry: ArenaGeometry, present_bytes: int) -> None:
    found = os.statvfs(path)
    free = found.f_bavail * found.f_frsize
    needed = geometry.total_bytes - present_bytes
    if needed > free:
        raise CapacityError(
            f"open arena {path}: {needed} bytes needed, {free} bytes free on its file system; "
            f"lower the host capacity to at most {free + present_bytes} or enlarge it"
        )


def _available_memory_bytes() -> int | None:
    """MemAvailable of the machine; None where it cannot be read."""
    try:
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        return None
    return None


def _huge_bytes_between(start: int, end: int) -> int:
    """Bytes in huge pages of the mappings that begin in [start, end), as /proc tells."""
    found = 0
    inside = False
    try:
        with Path("/proc/self/smaps").open(encoding="ascii", errors="replace") as lines:
            for line in lines:
                name, _, rest = line.partition(" ")
                if not name.endswith(":"):
                    inside = start <= int(name.partition("-")[0], 16) < end
                elif inside and name in _HUGE_FIELDS:
                    found += int(rest.split()[0]) * 1024
    except OSError:
        return 0
    return found
