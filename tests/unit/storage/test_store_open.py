"""TieredStore.open on the real tiers: restart, recovery, refusals, many threads."""

from __future__ import annotations

import random
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.pages import page_content, page_keys, put_store, take_content
from tierkv.storage.base import PageLease
from tierkv.storage.errors import (
    CapacityError,
    ConfigError,
    DirectoryInUseError,
)
from tierkv.storage.mover import MoverLimits
from tierkv.storage.policy import WritePolicy
from tierkv.storage.store import StoreConfig, StoreRules, TieredStore
from tierkv.storage.tiers.host import HostTier
from tierkv.storage.tiers.nvme import NvmeTier
from tierkv.storage.types import TierName

PAGE_BYTES = 4096
WAIT_S = 20.0
HOST, NVME = TierName.HOST, TierName.NVME

THROUGH = StoreRules(write_policy=WritePolicy.WRITE_THROUGH)
BACK = StoreRules(write_policy=WritePolicy.WRITE_BACK)


def config(tmp_path: Path, **changes: object) -> StoreConfig:
    base = StoreConfig(
        page_bytes=PAGE_BYTES,
        host_bytes=HostTier.capacity_for(PAGE_BYTES, 8),
        host_arena_path=tmp_path / "arena",
        nvme_root=tmp_path / "nvme",
        nvme_bytes=NvmeTier.capacity_for(PAGE_BYTES, 64),
        nvme_min_free_bytes=0,
        rules=THROUGH,
    )
    return replace(base, **changes)  # type: ignore[arg-type]


def held(lease: PageLease) -> list[bytes]:
    return [bytes(view) for view in lease.views]


def test_real_tiers_restore_pages_bit_for_bit(tmp_path: Path) -> None:
    store = TieredStore.open(config(tmp_path))
    keys = page_keys(*range(12))
    for start in range(0, 12, 4):
        put_store(store, keys[start : start + 4])
        assert store.flush(WAIT_S)
        store.check()
    assert store.lookup(keys) == [NVME] * 4 + [HOST] * 8
    with store.fetch(keys[:8], WAIT_S).take(WAIT_S) as lease:
        assert held(lease) == [page_content(key, PAGE_BYTES) for key in keys[:8]]
        assert lease.tiers == [NVME] * 4 + [HOST] * 4
    store.check()
    store.close()


def test_r1_r3_a_new_process_finds_the_arena_and_a_rebooted_node_the_disk(tmp_path: Path) -> None:
    store = TieredStore.open(config(tmp_path))
    keys = page_keys(*range(4))
    put_store(store, keys)
    assert store.flush(WAIT_S)
    store.close()
    store = TieredStore.open(config(tmp_path))
    assert store.lookup(keys) == [HOST] * 4
    assert take_content(store, keys) == 4
    store.close()
    (tmp_path / "arena").unlink()
    store = TieredStore.open(config(tmp_path))
    assert store.lookup(keys) == [NVME] * 4
    assert take_content(store, keys) == 4
    store.check()
    store.close()


def test_r2_accounting_is_recovered_before_the_first_write(tmp_path: Path) -> None:
    store = TieredStore.open(config(tmp_path))
    put_store(store, page_keys(*range(8)))
    assert store.flush(WAIT_S)
    store.close()
    store = TieredStore.open(config(tmp_path))
    host, nvme = store.stats().tiers
    assert (host.recovered_pages, host.free_pages) == (8, 0)
    assert (nvme.recovered_pages, nvme.committed_pages) == (8, 8)
    put_store(store, page_keys(9))
    store.check()
    assert store.lookup(page_keys(9)) == [HOST]
    store.close()


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"host_bytes": 100}, "host gets 100 bytes.*raise what host gets"),
        ({"nvme_bytes": 0}, "nvme gets 0 bytes"),
    ],
)
def test_a_budget_below_one_page_names_its_setting_and_creates_nothing(
    tmp_path: Path, changes: dict[str, object], named: str
) -> None:
    with pytest.raises(CapacityError, match=named):
        TieredStore.open(config(tmp_path, **changes))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "changes",
    [
        {"selective_hits": 0},
        {"breaker_failures": 0},
        {"close_s": 0.0},
        {"demote_deadline_s": -1.0},
        {"host_clean_fraction": 1.5},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_rules_that_cannot_work_are_refused(changes: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=next(iter(changes))):
        replace(StoreRules(), **changes)  # type: ignore[arg-type]


def test_a_second_store_on_the_same_folder_is_refused_and_the_first_goes_on(
    tmp_path: Path,
) -> None:
    store = TieredStore.open(config(tmp_path))
    put_store(store, page_keys(0))
    with pytest.raises(DirectoryInUseError):
        TieredStore.open(config(tmp_path, host_arena_path=None))
    assert take_content(store, page_keys(0)) == 1
    store.close()
    TieredStore.open(config(tmp_path)).close()


def test_h3_l2_many_threads_leave_nothing_behind(tmp_path: Path) -> None:
    rules = replace(BACK, mover=MoverLimits(demote_queue_pages=3, demote_batch_pages=2))
    store = TieredStore.open(config(tmp_path, rules=rules, host_arena_path=None))
    wrong: list[BaseException] = []

    def engine(seed: int) -> None:
        rng = random.Random(seed)
        try:
            for _ in range(150):
                start = rng.randrange(30)
                keys = page_keys(*range(start, start + rng.randint(1, 4)))
                choice = rng.random()
                if choice < 0.4:
                    put_store(store, keys)
                elif choice < 0.5:
                    store.fetch(keys, WAIT_S).cancel()
                elif choice < 0.6:
                    store.fetch(keys, 0.0).take(0.0).release()
                else:
                    take_content(store, keys)
        except BaseException as error:
            wrong.append(error)
            raise

    threads = [threading.Thread(target=engine, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert not any(thread.is_alive() for thread in threads), "an engine hangs"
    assert wrong == []
    assert store.wait_quiet(WAIT_S)
    store.check()
    stats = store.stats()
    assert [(tier.leased_pages, tier.reserved_pages) for tier in stats.tiers] == [(0, 0)] * 2
    assert (stats.mover.failed, stats.mover.worker_restarts) == (0, 0)
    assert all(tier.corrupt == 0 for tier in stats.tiers)
    store.close()
