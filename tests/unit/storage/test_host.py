"""The host tier: the contract, attaching to an arena, bad input."""

from __future__ import annotations

import multiprocessing
import os
import signal
import struct
from pathlib import Path

import pytest

from tests.unit.storage.tier_conformance import (
    PAGE_BYTES,
    PAGES,
    MappedTierConformance,
    get,
    page_bytes_of,
    page_key,
    put,
)
from tierkv.storage.arena import ARENA_HEADER_BYTES, boot_id
from tierkv.storage.base import Tier
from tierkv.storage.checksum import header_checksum, payload_checksum
from tierkv.storage.errors import (
    CapacityError,
    ConfigError,
    DirectoryInUseError,
    FormatVersionError,
)
from tierkv.storage.slot_header import HEADER_BYTES, SlotHeader, parse_header, slot_bytes_for
from tierkv.storage.tiers.host import HostTier
from tierkv.storage.types import ReadOutcome

CAPACITY = HostTier.capacity_for(PAGE_BYTES, PAGES)
SLOT = slot_bytes_for(PAGE_BYTES)


class TestHostAnonymous(MappedTierConformance):
    def open_tier(self, folder: Path) -> Tier:
        return HostTier(None, PAGE_BYTES, CAPACITY)


class TestHostFile(MappedTierConformance):
    def open_tier(self, folder: Path) -> Tier:
        return HostTier(folder / "arena", PAGE_BYTES, CAPACITY)


def open_host(path: Path, capacity: int = CAPACITY, checksums: bool = True) -> HostTier:
    return HostTier(path, PAGE_BYTES, capacity, checksums=checksums)


def test_r1_r2_r3_an_arena_is_attached_with_its_pages_and_their_order(tmp_path: Path) -> None:
    first = open_host(tmp_path / "arena")
    put(first, [1, 2, 3])
    first.touch([page_key(1)])
    pending = first.reserve(2)
    first.write(pending, 0, page_bytes_of(9))
    first.close()
    second = open_host(tmp_path / "arena")
    second.check()
    stats = second.stats()
    assert (stats.recovered_pages, stats.committed_pages) == (3, 3)
    assert stats.free_pages == PAGES - 3
    assert second.victims(3) == [page_key(2), page_key(3), page_key(1)]
    assert [get(second, n) for n in (1, 2, 3)] == [page_bytes_of(n) for n in (1, 2, 3)]
    second.close()


def test_r2_owners_are_recovered_by_attaching(tmp_path: Path) -> None:
    first = open_host(tmp_path / "arena")
    put(first, [1, 2, 3], [4, 2**32 - 1, 4])
    first.close()
    second = open_host(tmp_path / "arena")
    second.check()
    assert second.owners() == {4: 2, 2**32 - 1: 1}
    assert second.keys_of(4) == [page_key(1), page_key(3)]
    second.close()


def test_removed_pages_stay_removed_after_attaching(tmp_path: Path) -> None:
    first = open_host(tmp_path / "arena")
    put(first, [1, 2, 3])
    assert first.evict(1) == [page_key(1)]
    lease = first.lease([page_key(2)])
    first.drop([page_key(2)])
    assert lease.open
    first.close()
    second = open_host(tmp_path / "arena")
    assert second.lookup([page_key(n) for n in (1, 2, 3)]) == [False, False, True]
    second.check()
    second.close()


def _commit_then_die(path: Path) -> None:
    tier = open_host(path)
    put(tier, [1, 2])
    reservation = tier.reserve(1)
    tier.payload(reservation, 0)[:100] = b"x" * 100
    os.kill(os.getpid(), signal.SIGKILL)


def test_r1_pages_survive_kill_9(tmp_path: Path) -> None:
    child = multiprocessing.get_context("fork").Process(
        target=_commit_then_die, args=(tmp_path / "arena",)
    )
    child.start()
    child.join(30)
    assert child.exitcode == -9
    tier = open_host(tmp_path / "arena")
    tier.check()
    assert tier.stats().recovered_pages == 2
    assert get(tier, 1) == page_bytes_of(1)
    tier.close()


def test_w7_damage_while_nobody_looked_is_found_at_the_first_read(tmp_path: Path) -> None:
    path = tmp_path / "arena"
    first = open_host(path)
    put(first, [1, 2, 3])
    first.close()
    data = bytearray(path.read_bytes())
    data[ARENA_HEADER_BYTES + HEADER_BYTES + 17] ^= 4  # payload of the first slot
    data[ARENA_HEADER_BYTES + SLOT + 20] ^= 1  # key in the header of the second
    path.write_bytes(data)
    second = open_host(path)
    second.check()
    assert second.stats().recovered_pages == 2
    assert [get(second, n) for n in (1, 2, 3)] == [None, None, page_bytes_of(3)]
    assert second.stats().corrupt == 1
    second.check()
    second.close()


def test_w7_a_header_damaged_under_a_live_tier_is_never_served(tmp_path: Path) -> None:
    path = tmp_path / "arena"
    tier = open_host(path)
    put(tier, [1])
    with path.open("r+b") as file:
        file.seek(ARENA_HEADER_BYTES + 60)
        file.write(b"\xff")
    assert get(tier, 1) is None
    assert tier.stats().corrupt == 1
    tier.check()
    tier.close()


def test_an_absurd_last_use_does_not_break_recency(tmp_path: Path) -> None:
    path = tmp_path / "arena"
    tier = open_host(path)
    put(tier, [1, 2])
    tier.close()
    with path.open("r+b") as file:
        file.seek(ARENA_HEADER_BYTES + 88)
        file.write(b"\xff" * 8)
    tier = open_host(path)
    tier.check()
    assert tier.victims(2) == [page_key(1), page_key(2)]
    tier.touch([page_key(1)])
    assert tier.victims(2) == [page_key(2), page_key(1)]
    tier.close()


def test_of_two_slots_under_one_key_the_younger_wins(tmp_path: Path) -> None:
    path = tmp_path / "arena"
    tier = open_host(path)
    put(tier, [1, 2])
    tier.close()
    rival = SlotHeader(page_key(1), PAGE_BYTES, payload_checksum(page_bytes_of(2)), 99)
    with path.open("r+b") as file:
        file.seek(ARENA_HEADER_BYTES + SLOT)
        file.write(rival.pack())
    tier = open_host(path)
    tier.check()
    assert tier.stats().recovered_pages == 1
    assert get(tier, 1) == page_bytes_of(2)
    tier.close()


def test_c3_a_capacity_below_one_slot_names_the_number(tmp_path: Path) -> None:
    needed = HostTier.capacity_for(PAGE_BYTES, 1)
    with pytest.raises(CapacityError, match=f"host capacity to at least {needed}"):
        open_host(tmp_path / "arena", needed - 1)
    assert not (tmp_path / "arena").exists()
    open_host(tmp_path / "arena", needed).close()


@pytest.mark.parametrize("anonymous", [True, False])
def test_c3_more_than_the_machine_has_is_refused_before_allocating(
    tmp_path: Path, anonymous: bool
) -> None:
    path = None if anonymous else tmp_path / "arena"
    with pytest.raises(CapacityError, match="lower the host capacity to at most"):
        HostTier(path, PAGE_BYTES, 1 << 50)
    if path is not None:
        assert path.stat().st_size == 0


def test_r3_another_process_cannot_open_the_arena(tmp_path: Path) -> None:
    tier = open_host(tmp_path / "arena")
    put(tier, [1])
    with pytest.raises(DirectoryInUseError, match="another process has it open"):
        open_host(tmp_path / "arena")
    assert get(tier, 1) == page_bytes_of(1)
    tier.close()
    open_host(tmp_path / "arena").close()


def _patch_arena_header(path: Path, offset: int, packed: bytes) -> None:
    data = bytearray(path.read_bytes())
    data[offset : offset + len(packed)] = packed
    data[80:88] = struct.pack("<Q", header_checksum(bytes(data[:80])))
    path.write_bytes(data)


def test_another_format_version_is_refused_and_left_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "arena"
    tier = open_host(path)
    put(tier, [1])
    tier.close()
    _patch_arena_header(path, 8, struct.pack("<I", 2))
    before = path.read_bytes()
    with pytest.raises(FormatVersionError, match="format version 2, this TierKV reads 1"):
        open_host(path)
    assert path.read_bytes() == before


def test_a_file_that_is_no_arena_is_refused_and_left_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "arena"
    path.write_bytes(b"somebody's thesis")
    with pytest.raises(ConfigError, match="not a TierKV arena"):
        open_host(path)
    assert path.read_bytes() == b"somebody's thesis"


def test_another_geometry_starts_empty(tmp_path: Path) -> None:
    tier = open_host(tmp_path / "arena")
    put(tier, [1])
    tier.close()
    tier = open_host(tmp_path / "arena", HostTier.capacity_for(PAGE_BYTES, PAGES + 1))
    tier.check()
    stats = tier.stats()
    assert (stats.recovered_pages, stats.capacity_pages, stats.free_pages) == (0, 9, 9)
    assert get(tier, 1) is None
    tier.close()


@pytest.mark.parametrize("damage", ["torn", "truncated"])
def test_a_damaged_arena_header_starts_empty(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "arena"
    tier = open_host(path)
    put(tier, [1])
    tier.close()
    data = bytearray(path.read_bytes())
    if damage == "torn":
        data[30] ^= 1
    path.write_bytes(data[: len(data) // 2] if damage == "truncated" else data)
    tier = open_host(path)
    tier.check()
    assert tier.stats().recovered_pages == 0
    put(tier, [1])
    tier.close()


def test_after_a_reboot_only_pages_with_a_digest_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "arena"
    tier = open_host(path, checksums=False)
    with tier.reserve(2) as reservation:
        tier.write(reservation, 0, page_bytes_of(1))
        tier.write(reservation, 1, page_bytes_of(2), payload_checksum(page_bytes_of(2)))
        tier.commit(reservation, [page_key(1), page_key(2)])
    tier.close()
    tier = open_host(path, checksums=False)
    assert tier.stats().recovered_pages == (2 if boot_id() else 1)
    tier.close()
    _patch_arena_header(path, 40, b"another-boot")
    tier = open_host(path, checksums=False)
    tier.check()
    assert tier.lookup([page_key(1), page_key(2)]) == [False, True]
    tier.close()


def test_without_checksums_pages_lease_an_empty_digest(tmp_path: Path) -> None:
    tier = HostTier(None, PAGE_BYTES, CAPACITY, checksums=False)
    put(tier, [1])
    with tier.lease([page_key(1)]) as lease:
        assert lease.checksums == [b""]
        assert tier.verify(lease, 0) is ReadOutcome.OK
    assert get(tier, 1) == page_bytes_of(1)
    tier.check()
    tier.close()


def test_an_arena_path_in_a_missing_folder_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file or directory; choose a path"):
        open_host(tmp_path / "missing" / "arena")


def test_views_stay_valid_after_close(tmp_path: Path) -> None:
    tier = open_host(tmp_path / "arena")
    put(tier, [1])
    lease = tier.lease([page_key(1)])
    view = tier.view(lease, 0)
    tier.close()
    assert bytes(view) == page_bytes_of(1)


def test_the_arena_is_private_and_its_slots_follow_the_format(tmp_path: Path) -> None:
    path = tmp_path / "arena"
    tier = open_host(path)
    put(tier, [1])
    tier.close()
    assert path.stat().st_mode & 0o777 == 0o600
    data = path.read_bytes()
    header = parse_header(data, ARENA_HEADER_BYTES)
    assert header is not None
    assert (header.key, header.payload_bytes) == (page_key(1), PAGE_BYTES)
    start = ARENA_HEADER_BYTES + HEADER_BYTES
    assert data[start : start + PAGE_BYTES] == page_bytes_of(1)
    assert not any(data[start + PAGE_BYTES : ARENA_HEADER_BYTES + SLOT]), "the tail is zero"
