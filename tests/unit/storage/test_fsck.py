"""The offline check: every damage made for real, found, repaired, and then gone.

Each damage is tried three times: looked at (nothing may change), repaired, looked at again.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import lmdb
import numpy as np
import pytest

from tests.unit.storage.tier_conformance import PAGE_BYTES, get, page_bytes_of, page_key, put
from tierkv.storage import fsck_report
from tierkv.storage.checksum import payload_checksum
from tierkv.storage.errors import ConfigError, DirectoryInUseError, FormatVersionError
from tierkv.storage.fsck import FsckReport, check_store
from tierkv.storage.fsck_report import FindingKind, FsckProgress, FsckWork
from tierkv.storage.slot_header import SlotHeader, slot_bytes_for
from tierkv.storage.tiers.host import HostTier
from tierkv.storage.tiers.nvme import NvmeTier
from tierkv.storage.tiers.nvme_index import ENTRY, NvmeIndex, pack_entry
from tierkv.storage.types import PageKey

SLOT = slot_bytes_for(PAGE_BYTES)
PER_SEGMENT = 3
PAGES = 8
ALL = list(range(PAGES))


def open_nvme(root: Path) -> NvmeTier:
    return NvmeTier(
        root,
        PAGE_BYTES,
        NvmeTier.capacity_for(PAGE_BYTES, PAGES),
        min_free_bytes=0,
        segment_bytes=PER_SEGMENT * SLOT,
        grow_bytes=SLOT,
    )


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """A closed folder: pages 0 to 7 of owners 1 and 2 in slots 0 to 7, and an arena of the same."""
    nvme = open_nvme(tmp_path / "nvme")
    host = HostTier(tmp_path / "arena", PAGE_BYTES, HostTier.capacity_for(PAGE_BYTES, PAGES))
    for tier in (nvme, host):
        put(tier, ALL, [1 + n % 2 for n in ALL])
        tier.close()
    return tmp_path


def look(cache: Path, repair: bool = False, verify_payloads: bool = True) -> FsckReport:
    return check_store(cache / "nvme", cache / "arena", repair, verify_payloads)


def content(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def kinds(report: FsckReport) -> list[FindingKind]:
    return [finding.kind for finding in report.problems]


def repaired(cache: Path, *expected: FindingKind) -> None:
    """Look, repair, look again: found three times as it must be."""
    before = content(cache)
    seen = look(cache)
    assert kinds(seen) == list(expected)
    assert not seen.clean
    assert not any(finding.repaired for finding in seen.findings)
    assert content(cache) == before, "a look without repair changed something"
    mended = look(cache, repair=True)
    assert kinds(mended) == list(expected)
    assert mended.clean
    again = look(cache)
    assert again.problems == ()
    assert again.clean


def there(cache: Path) -> list[int]:
    """Pages the nvme tier serves now; each must be right."""
    tier = open_nvme(cache / "nvme")
    tier.check()
    found = [number for number in ALL if tier.lookup([page_key(number)]) == [True]]
    for number in found:
        assert get(tier, number) == page_bytes_of(number)
    assert tier.stats().corrupt == 0
    tier.close()
    return found


def class_folder(cache: Path) -> Path:
    return cache / "nvme" / f"pages-{PAGE_BYTES}"


def change_index(cache: Path, change: Callable[[dict[bytes, bytes]], None]) -> None:
    """Rewrite index entries through LMDB, as no TierKV would."""
    with lmdb.open(str(class_folder(cache) / "index"), lock=False) as env:
        with env.begin() as txn:
            entries = dict(txn.cursor())
        before = set(entries)
        change(entries)
        with env.begin(write=True) as txn:
            for key in before - set(entries):
                txn.delete(key)
            for key, value in entries.items():
                txn.put(key, value)


def with_fields(value: bytes, **fields: int) -> bytes:
    row = np.frombuffer(value, ENTRY).copy()
    for name, number in fields.items():
        row[name] = number
    return row.tobytes()


def flip(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))


def segment(cache: Path, number: int) -> Path:
    return class_folder(cache) / f"segment-{number:05d}.slots"


# --- nothing wrong


def test_an_intact_store_is_clean_and_left_as_it_was(cache: Path) -> None:
    before = content(cache)
    steps: list[FsckProgress] = []
    report = check_store(cache / "nvme", cache / "arena", progress=steps.append)
    assert (report.findings, report.clean) == ((), True)
    assert (report.slots, report.pages) == (2 * PAGES, 2 * PAGES)
    assert report.read_bytes >= 2 * PAGES * PAGE_BYTES
    assert content(cache) == before
    ended = [(step.done, step.total) for step in steps]
    assert ended == [(PAGES, PAGES), (PAGES, PAGES)]
    assert steps[-1].read_bytes == report.read_bytes
    assert look(cache, repair=True).clean
    assert there(cache) == ALL


def test_evicted_pages_are_a_note_not_a_fault(cache: Path) -> None:
    tier = open_nvme(cache / "nvme")
    tier.evict(3)
    tier.close()
    report = look(cache)
    assert [finding.kind for finding in report.findings] == [FindingKind.UNUSED_PAGES]
    assert "3 slots" in report.findings[0].line
    assert report.clean
    assert look(cache, repair=True).clean
    assert there(cache) == ALL[3:]


def test_pages_without_checksums_are_a_note(tmp_path: Path) -> None:
    host = HostTier(tmp_path / "arena", PAGE_BYTES, 1 << 20, checksums=False)
    put(host, [1, 2])
    host.close()
    report = check_store(None, tmp_path / "arena")
    assert [finding.kind for finding in report.findings] == [FindingKind.UNVERIFIABLE]
    assert report.clean


def test_an_empty_store_is_clean(tmp_path: Path) -> None:
    open_nvme(tmp_path / "nvme").close()
    assert check_store(tmp_path / "nvme").findings == ()


# --- index entries


def test_w7_a_flipped_payload_bit_loses_that_page_only(cache: Path) -> None:
    flip(segment(cache, 1), SLOT + 4096 + 100)
    assert look(cache, verify_payloads=False).clean
    repaired(cache, FindingKind.PAYLOAD)
    assert there(cache) == [n for n in ALL if n != 4]


@pytest.mark.parametrize("offset", [16, 48, 52, 60, 75, 83])
def test_w7_a_flipped_header_bit_loses_that_page_only(cache: Path, offset: int) -> None:
    flip(segment(cache, 0), 2 * SLOT + offset)
    repaired(cache, FindingKind.HEADER)
    assert there(cache) == [n for n in ALL if n != 2]


def test_entries_out_of_range_or_of_another_size_are_removed(cache: Path) -> None:
    def change(entries: dict[bytes, bytes]) -> None:
        entries[page_key(1)] = with_fields(entries[page_key(1)], slot=4_000_000_000)
        entries[page_key(3)] = with_fields(entries[page_key(3)], payload_bytes=PAGE_BYTES + 1)

    change_index(cache, change)
    # The page of key 1 is found in its slot and the entry pointed there.
    repaired(cache, FindingKind.ENTRY_PLACE, FindingKind.ENTRY_SIZE)
    assert there(cache) == ALL


def test_an_entry_whose_page_is_nowhere_is_removed(cache: Path) -> None:
    def change(entries: dict[bytes, bytes]) -> None:
        entries[page_key(1)] = with_fields(entries[page_key(1)], slot=99, generation=77)

    change_index(cache, change)
    repaired(cache, FindingKind.ENTRY_PLACE)
    assert there(cache) == [n for n in ALL if n != 1]


def test_two_keys_on_one_slot_leave_the_one_its_header_names(cache: Path) -> None:
    def change(entries: dict[bytes, bytes]) -> None:
        entries[page_key(50)] = entries[page_key(2)]

    change_index(cache, change)
    assert set(kinds(look(cache))) <= {FindingKind.SLOT_SHARED, FindingKind.HEADER}
    assert look(cache, repair=True).clean
    assert look(cache).problems == ()
    assert there(cache) == ALL


def test_swapped_entries_are_pointed_at_their_pages(cache: Path) -> None:
    def change(entries: dict[bytes, bytes]) -> None:
        one, two = entries[page_key(1)], entries[page_key(2)]
        entries[page_key(1)] = with_fields(one, slot=2)
        entries[page_key(2)] = with_fields(two, slot=1)

    change_index(cache, change)
    repaired(cache, FindingKind.HEADER, FindingKind.HEADER)
    assert there(cache) == ALL


def test_w7_swapped_values_are_removed(cache: Path) -> None:
    def change(entries: dict[bytes, bytes]) -> None:
        one, two = page_key(1), page_key(2)
        entries[one], entries[two] = entries[two], entries[one]

    change_index(cache, change)
    repaired(cache, FindingKind.HEADER, FindingKind.HEADER)
    assert there(cache) == [n for n in ALL if n not in (1, 2)]


def test_a_misplaced_entry_is_not_pointed_at_a_damaged_page(cache: Path) -> None:
    def change(entries: dict[bytes, bytes]) -> None:
        entries[page_key(1)] = with_fields(entries[page_key(1)], slot=99)

    change_index(cache, change)
    flip(segment(cache, 0), SLOT + 4096)
    repaired(cache, FindingKind.ENTRY_PLACE)
    assert there(cache) == [n for n in ALL if n != 1]


def test_the_owner_of_the_sealed_header_wins(cache: Path) -> None:
    def change(entries: dict[bytes, bytes]) -> None:
        entries[page_key(1)] = with_fields(entries[page_key(1)], owner=9)

    change_index(cache, change)
    repaired(cache, FindingKind.OWNER)
    tier = open_nvme(cache / "nvme")
    assert tier.owners() == {1: 4, 2: 4}
    tier.close()


# --- the index as a whole


@pytest.mark.parametrize("loss", ["missing", "folder", "truncated", "garbage", "odd_entry"])
def test_r1_a_lost_index_is_rebuilt_from_headers(cache: Path, loss: str) -> None:
    data = class_folder(cache) / "index" / "data.mdb"
    if loss == "missing":
        data.unlink()
    elif loss == "folder":
        shutil.rmtree(data.parent)
    elif loss == "truncated":
        data.write_bytes(data.read_bytes()[: 2 * 4096])
    elif loss == "garbage":
        data.write_bytes(b"\xff" * data.stat().st_size)
    else:
        change_index(cache, lambda entries: entries.update({b"short": b"x"}))
    repaired(cache, FindingKind.INDEX)
    assert there(cache) == ALL
    tier = open_nvme(cache / "nvme")
    assert tier.owners() == {1: 4, 2: 4}
    tier.close()


def test_r2_a_wrong_count_of_entries_is_found(cache: Path) -> None:
    data = class_folder(cache) / "index" / "data.mdb"
    block = bytearray(data.read_bytes())
    # Both meta pages: page header 16, magic and version 8, address and map size 16, the free
    # list's record 48, then the main record, whose count of entries lies at 32.
    for meta in range(2):
        place = meta * 4096 + 16 + 8 + 16 + 48 + 32
        if int.from_bytes(block[place : place + 8], "little") == PAGES:
            block[place : place + 8] = (PAGES + 5).to_bytes(8, "little")
    data.write_bytes(block)
    repaired(cache, FindingKind.ACCOUNTING)
    assert there(cache) == ALL


def test_w7_a_rebuilt_index_forgets_pages_that_do_not_verify(cache: Path) -> None:
    (class_folder(cache) / "index" / "data.mdb").unlink()
    flip(segment(cache, 0), 4096)
    mended = look(cache, repair=True)
    assert kinds(mended) == [FindingKind.INDEX, FindingKind.PAYLOAD]
    assert look(cache).clean
    assert there(cache) == ALL[1:]


def test_an_index_older_than_the_files_is_brought_in_line(cache: Path) -> None:
    """The index of an earlier day: its pages' slots hold others now."""
    index = class_folder(cache) / "index"
    shutil.copytree(index, cache / "old")
    tier = open_nvme(cache / "nvme")
    tier.evict(2)
    put(tier, [20, 21])
    tier.close()
    shutil.rmtree(index)
    (cache / "old").replace(index)
    repaired(cache, FindingKind.HEADER, FindingKind.HEADER)
    assert there(cache) == ALL[2:]


# --- files


def test_w7_a_truncated_last_segment_is_cut_to_whole_slots(cache: Path) -> None:
    with segment(cache, 2).open("r+b") as file:
        file.truncate(SLOT + 5000)
    repaired(cache, FindingKind.SEGMENT, FindingKind.ENTRY_PLACE)
    assert there(cache) == ALL[:-1]


def test_w7_a_truncated_middle_segment_costs_only_its_pages(cache: Path) -> None:
    with segment(cache, 1).open("r+b") as file:
        file.truncate(SLOT)
    before = content(cache)
    seen = look(cache)
    assert set(kinds(seen)) == {FindingKind.SEGMENT, FindingKind.ENTRY_PLACE}
    assert content(cache) == before
    assert look(cache, repair=True).clean
    assert look(cache).problems == ()
    assert there(cache) == [0, 1, 2, 3, 6, 7]


def test_a_missing_segment_costs_only_its_pages(cache: Path) -> None:
    segment(cache, 0).unlink()
    before = content(cache)
    seen = look(cache)
    assert seen.pages == PAGES + PAGES - PER_SEGMENT
    assert content(cache) == before
    assert look(cache, repair=True).clean
    assert look(cache).problems == ()
    assert there(cache) == ALL[3:]


def test_a_segment_with_something_behind_it_is_cut(cache: Path) -> None:
    with segment(cache, 0).open("ab") as file:
        file.write(b"x" * 4096)
    repaired(cache, FindingKind.SEGMENT)
    assert there(cache) == ALL


def test_damaged_recency_costs_order_only(cache: Path) -> None:
    flip(class_folder(cache) / "recency.bin", 0)
    repaired(cache, FindingKind.RECENCY)
    assert there(cache) == ALL


@pytest.mark.parametrize("where", ["root", "class"])
@pytest.mark.parametrize("damage", ["missing", "damaged"])
def test_manifests_are_rebuilt_from_what_is_there(cache: Path, where: str, damage: str) -> None:
    folder = cache / "nvme" if where == "root" else class_folder(cache)
    path = folder / "manifest.json"
    before = json.loads(path.read_bytes())
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes(b'{"format": "tierkv')
    repaired(cache, FindingKind.MANIFEST)
    after = json.loads(path.read_bytes())
    assert {**before, "opened_wall_s": 0} == {**after, "opened_wall_s": 0} or where == "root"
    assert there(cache) == ALL


def test_a_manifest_that_cannot_be_told_is_left_and_said(tmp_path: Path) -> None:
    tier = NvmeTier(tmp_path, PAGE_BYTES, NvmeTier.capacity_for(PAGE_BYTES, 4), min_free_bytes=0)
    put(tier, [1])
    tier.close()
    path = tmp_path / f"pages-{PAGE_BYTES}" / "manifest.json"
    path.write_bytes(b"[]")
    report = check_store(tmp_path, repair=True)
    assert kinds(report) == [FindingKind.MANIFEST]
    assert not report.clean
    assert path.read_bytes() == b"[]"


def test_what_interrupted_writes_left_is_removed(cache: Path) -> None:
    (cache / "nvme" / "manifest.jsonabc.tmp").write_bytes(b"{")
    (class_folder(cache) / "index.new").mkdir()
    repaired(cache, FindingKind.LEFTOVER_FILE, FindingKind.LEFTOVER_FILE)
    assert there(cache) == ALL


# --- the arena


def arena_there(cache: Path) -> list[int]:
    host = HostTier(cache / "arena", PAGE_BYTES, HostTier.capacity_for(PAGE_BYTES, PAGES))
    host.check()
    found = [number for number in ALL if get(host, number) == page_bytes_of(number)]
    assert host.stats().corrupt == 0
    host.close()
    return found


@pytest.mark.parametrize(
    ("offset", "kind"),
    [
        (0, FindingKind.HEADER),
        (12, FindingKind.HEADER),
        (20, FindingKind.HEADER),
        (52, FindingKind.HEADER),
        (80, FindingKind.HEADER),
        (4096, FindingKind.PAYLOAD),
        (4096 + PAGE_BYTES - 1, FindingKind.PAYLOAD),
    ],
)
def test_w7_a_flipped_bit_in_an_arena_slot_frees_it(
    cache: Path, offset: int, kind: FindingKind
) -> None:
    flip(cache / "arena", 4096 + 3 * SLOT + offset)
    repaired(cache, kind)
    assert arena_there(cache) == [n for n in ALL if n != 3]


def test_of_two_arena_slots_with_one_key_the_younger_stays(cache: Path) -> None:
    rival = SlotHeader(page_key(1), PAGE_BYTES, payload_checksum(page_bytes_of(5)), 99)
    block = bytearray((cache / "arena").read_bytes())
    rival.pack_into(memoryview(block), 4096 + 5 * SLOT)
    (cache / "arena").write_bytes(block)
    report = look(cache)
    assert kinds(report) == [FindingKind.KEY_TWICE]
    assert report.problems[0].place.endswith("slot 1")
    repaired(cache, FindingKind.KEY_TWICE)


@pytest.mark.parametrize("damage", ["header", "truncated"])
def test_a_ruined_arena_is_emptied(cache: Path, damage: str) -> None:
    if damage == "header":
        flip(cache / "arena", 20)
    else:
        with (cache / "arena").open("r+b") as file:
            file.truncate(4096 + SLOT)
    repaired(cache, FindingKind.ARENA)
    assert arena_there(cache) == []


# --- bad places, limits


def test_files_in_use_are_refused(cache: Path) -> None:
    tier = open_nvme(cache / "nvme")
    for repair in (False, True):
        with pytest.raises(DirectoryInUseError):
            check_store(cache / "nvme", repair=repair)
    tier.close()
    host = HostTier(cache / "arena", PAGE_BYTES, HostTier.capacity_for(PAGE_BYTES, PAGES))
    with pytest.raises(DirectoryInUseError):
        check_store(None, cache / "arena")
    host.close()
    assert look(cache).clean


def test_places_without_a_cache_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nothing of TierKV"):
        check_store(tmp_path)
    with pytest.raises(ConfigError, match="nothing of TierKV"):
        check_store(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="check the path"):
        check_store(None, tmp_path / "nowhere")
    (tmp_path / "text").write_bytes(b"something else" * 400)
    with pytest.raises(ConfigError, match="not a TierKV arena"):
        check_store(None, tmp_path / "text", repair=True)
    assert list(tmp_path.iterdir()) == [tmp_path / "text"]


@pytest.mark.parametrize("where", ["root", "class", "arena"])
def test_another_format_version_is_refused_and_left_as_it_was(cache: Path, where: str) -> None:
    if where == "arena":
        with (cache / "arena").open("r+b") as file:
            file.seek(8)
            file.write((99).to_bytes(4, "little"))
    else:
        folder = cache / "nvme" if where == "root" else class_folder(cache)
        (folder / "manifest.json").write_text('{"version": 99}')
    before = (cache / "arena").read_bytes()
    with pytest.raises(FormatVersionError, match="99"):
        look(cache, repair=True)
    assert (cache / "arena").read_bytes() == before


def test_a_folder_without_its_lock_file_is_checked_all_the_same(cache: Path) -> None:
    (cache / "nvme" / "LOCK").unlink()
    assert look(cache).clean


def test_findings_past_the_limit_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fsck_report, "FINDINGS_MAX", 2)
    work = FsckWork(repair=False, verify_payloads=True)
    for number in range(5):
        work.find(FindingKind.PAYLOAD, f"slot {number}", "x")
    report = work.report()
    assert (len(report.findings), report.unlisted, report.clean) == (2, 3, False)


def test_an_entry_for_a_page_without_checksum_is_a_note(cache: Path) -> None:
    header = SlotHeader(PageKey(page_key(60)), PAGE_BYTES, b"", 500)
    with segment(cache, 0).open("r+b") as file:
        file.write(header.pack())
    index = NvmeIndex(class_folder(cache) / "index", 1 << 20)
    index.apply([page_key(0)], [(page_key(60), pack_entry(header, 0))])
    index.close()
    report = look(cache)
    assert [finding.kind for finding in report.findings] == [FindingKind.UNVERIFIABLE]
