"""Looking at closed cache files: sizes and owners, without changing them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.storage.tier_conformance import PAGE_BYTES, page_key, put
from tierkv.storage.errors import ConfigError, DirectoryInUseError
from tierkv.storage.inspection import arena_owners, inspect_arena, inspect_nvme, nvme_owners
from tierkv.storage.tiers.host import HostTier
from tierkv.storage.tiers.nvme import NvmeTier


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    host = HostTier(tmp_path / "arena", PAGE_BYTES, HostTier.capacity_for(PAGE_BYTES, 6))
    nvme = NvmeTier(
        tmp_path / "nvme", PAGE_BYTES, NvmeTier.capacity_for(PAGE_BYTES, 6), min_free_bytes=0
    )
    for tier in (host, nvme):
        put(tier, [1, 2, 3, 4], [7, 7, 0, 8])
        tier.drop([page_key(4)])
        tier.close()
    return tmp_path


def test_owners_and_pages_are_counted_and_nothing_is_changed(cache: Path) -> None:
    before = {path: path.read_bytes() for path in cache.rglob("*") if path.is_file()}
    assert arena_owners(cache / "arena") == {7: 2, 0: 1}
    assert nvme_owners(cache / "nvme") == {PAGE_BYTES: {7: 2, 0: 1}}
    assert inspect_arena(cache / "arena").committed_pages == 3
    assert [stats.committed_pages for stats in inspect_nvme(cache / "nvme")] == [3]
    assert {path: path.read_bytes() for path in cache.rglob("*") if path.is_file()} == before


def test_a_class_without_an_index_has_no_owners(cache: Path) -> None:
    (cache / "nvme" / f"pages-{PAGE_BYTES}" / "index" / "data.mdb").unlink()
    assert nvme_owners(cache / "nvme") == {PAGE_BYTES: {}}


def test_open_or_absent_files_are_refused(cache: Path) -> None:
    host = HostTier(cache / "arena", PAGE_BYTES, HostTier.capacity_for(PAGE_BYTES, 6))
    with pytest.raises(DirectoryInUseError):
        arena_owners(cache / "arena")
    host.close()
    with pytest.raises(ConfigError):
        nvme_owners(cache / "nowhere")
