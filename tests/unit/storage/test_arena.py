"""The arena: geometry, the header block, locks."""

from __future__ import annotations

import mmap
import struct
from pathlib import Path

import numpy as np
import pytest

from tierkv.storage import arena as arena_module
from tierkv.storage.arena import (
    ARENA_HEADER_BYTES,
    ARENA_MAGIC,
    Arena,
    ArenaGeometry,
    boot_id,
    plan_geometry,
)
from tierkv.storage.checksum import header_checksum
from tierkv.storage.errors import CapacityError, ConfigError


def test_geometry_is_the_most_slots_that_fit() -> None:
    assert plan_geometry(5000, 4096 + 3 * 12288 + 12287) == ArenaGeometry(
        total_bytes=4096 + 3 * 12288,
        first_slot=4096,
        slot_bytes=12288,
        payload_offset=4096,
        page_bytes=5000,
        slot_count=3,
    )
    assert plan_geometry(5000, 4096 + 12288).total_bytes == 4096 + 12288
    with pytest.raises(CapacityError, match="at least 16384"):
        plan_geometry(5000, 16383)
    with pytest.raises(ConfigError, match="must be positive, got 0"):
        plan_geometry(0, 1 << 20)
    with pytest.raises(ConfigError, match="at most 4294967295"):
        plan_geometry(2**32, 2**40)


def test_the_header_block_follows_the_format_document(tmp_path: Path) -> None:
    arena = Arena(tmp_path / "arena", 5000, 4096 + 2 * 12288)
    arena.close()
    block = (tmp_path / "arena").read_bytes()[:ARENA_HEADER_BYTES]
    assert block[:8] == ARENA_MAGIC == b"TKVARENA"
    assert struct.unpack_from("<IIQQQ", block, 8) == (1, 0, 5000, 12288, 2)
    assert block[40:76].rstrip(b"\0").decode() == boot_id()
    assert struct.unpack_from("<Q", block, 80)[0] == header_checksum(block[:80])
    assert not any(block[88:])


def test_payloads_are_aligned_apart_and_written_through(tmp_path: Path) -> None:
    arena = Arena(tmp_path / "arena", 5000, 4096 + 2 * 12288)
    first, second = arena.payload_view(0), arena.payload_view(1)
    assert [len(first), len(second)] == [5000, 5000]
    for view in (first, second):
        assert np.frombuffer(view, np.uint8).ctypes.data % 4096 == 0
    first[:] = b"\x01" * 5000
    assert not any(second)
    data = (tmp_path / "arena").read_bytes()
    assert data[8192 : 8192 + 5000] == b"\x01" * 5000
    assert arena.slot_offset(1) == 4096 + 12288
    arena.close()


def test_r3_an_arena_is_attached_only_with_its_own_geometry(tmp_path: Path) -> None:
    path = tmp_path / "arena"
    first = Arena(path, 5000, 4096 + 2 * 12288)
    assert not first.attached
    first.payload_view(0)[:3] = b"abc"
    first.close()
    again = Arena(path, 5000, 4096 + 2 * 12288)
    assert again.attached
    assert again.same_boot
    assert bytes(again.payload_view(0)[:3]) == b"abc"
    again.close()
    other = Arena(path, 5001, 4096 + 2 * 12288)
    assert not other.attached
    assert not any(other.payload_view(0))
    other.close()


def test_a_geometry_that_does_not_fit_leaves_the_old_arena_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "arena"
    first = Arena(path, 5000, 4096 + 2 * 12288)
    first.payload_view(0)[:3] = b"abc"
    first.close()
    before = path.read_bytes()
    monkeypatch.setattr(arena_module, "_available_memory_bytes", lambda: 30000)
    with pytest.raises(CapacityError, match="lower the host capacity to at most"):
        Arena(path, 5000, 1 << 20)
    assert path.read_bytes() == before


def test_the_file_is_lent_and_an_anonymous_arena_has_none(tmp_path: Path) -> None:
    arena = Arena(tmp_path / "arena", 5000, 4096 + 2 * 12288)
    geometry = arena.geometry
    arena.payload_view(1)[:3] = b"abc"
    # What another process does with the descriptor and the geometry.
    with mmap.mmap(arena.fd(), geometry.total_bytes, prot=mmap.PROT_READ) as other:
        start = geometry.first_slot + geometry.slot_bytes + geometry.payload_offset
        assert other[start : start + 3] == b"abc"
    arena.close()
    anonymous = Arena(None, 5000, 1 << 20)
    with pytest.raises(ConfigError, match="anonymous"):
        anonymous.fd()
    anonymous.close()


@pytest.mark.parametrize("file", [True, False])
def test_c3_huge_pages_are_asked_for_and_not_needed(tmp_path: Path, file: bool) -> None:
    path = tmp_path / "arena" if file else None
    plain = Arena(path, 5000, 4 << 20)
    assert plain.huge_bytes() == 0
    plain.close()
    huge = Arena(path, 5000, 8 << 20, huge_pages=True)
    huge.payload_view(1)[:3] = b"abc"
    assert 0 <= huge.huge_bytes() <= huge.geometry.total_bytes
    assert bytes(huge.payload_view(1)[:3]) == b"abc"
    huge.close()


def test_without_populate_pages_are_touched_and_keep_their_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "arena"
    first = Arena(path, 5000, 4096 + 2 * 12288)
    first.payload_view(1)[:] = b"\x07" * 5000
    first.close()
    # An advice number that no kernel knows stands for one older than 5.14.
    monkeypatch.setattr(arena_module, "_MADV_POPULATE_WRITE", 9999)
    again = Arena(path, 5000, 4096 + 2 * 12288)
    assert bytes(again.payload_view(1)) == b"\x07" * 5000
    again.close()


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "target").write_bytes(b"keep")
    (tmp_path / "arena").symlink_to(tmp_path / "target")
    with pytest.raises(ConfigError, match="choose a path"):
        Arena(tmp_path / "arena", 5000, 1 << 20)
    assert (tmp_path / "target").read_bytes() == b"keep"


def test_close_is_idempotent_and_waits_for_no_view(tmp_path: Path) -> None:
    arena = Arena(tmp_path / "arena", 5000, 1 << 20)
    view = arena.payload_view(0)
    arena.close()
    arena.close()
    view[:1] = b"x"
    Arena(tmp_path / "arena", 5000, 1 << 20).close()
