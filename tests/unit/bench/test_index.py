"""The made-up index opens as a real one, with every page it promises."""

from __future__ import annotations

from pathlib import Path

from tierkv.bench.index import OWNERS, PAGE_BYTES, build_index, measure_open
from tierkv.storage.tiers.nvme import NvmeTier

PAGES = 12_345


def test_r1_a_built_index_opens_with_all_pages_owners_and_order(tmp_path: Path) -> None:
    root = tmp_path / "nvme"
    build_index(root, PAGES)
    cost = measure_open(root)
    assert cost.seconds > 0
    assert 40 + 32 < cost.disk_bytes_per_page < 400
    tier = NvmeTier(root, PAGE_BYTES, NvmeTier.capacity_for(PAGE_BYTES, PAGES))
    tier.check()
    assert (tier.stats().recovered_pages, tier.stats().corrupt) == (PAGES, 0)
    assert len(tier.owners()) == OWNERS
    # Slots were used in the order of their keys' commits.
    assert tier.victims(PAGES) == tier.keys_of()
    tier.close()
    blocks = sum(path.stat().st_blocks * 512 for path in root.rglob("*.slots"))
    assert blocks < PAGES * PAGE_BYTES / 10, "the slot files are no holes"
