"""Shared options become the configurations that engine and store are opened with."""

from __future__ import annotations

from pathlib import Path

import pytest

from tierkv.cli import options as shared
from tierkv.cli.options import CacheOptions, EngineOptions
from tierkv.engine.serve.scheduler import SchedulePolicy
from tierkv.storage.errors import ConfigError
from tierkv.storage.policy import AdmissionName, WritePolicy


def test_no_cache_option_means_no_store() -> None:
    assert shared.store_config_from_options(CacheOptions()) is None
    assert not CacheOptions().outlives_process


def test_every_cache_option_reaches_the_store() -> None:
    store = shared.store_config_from_options(
        CacheOptions(
            host="2GiB",
            host_arena=Path("/a"),
            nvme_dir=Path("/n"),
            nvme="3GB",
            write_policy="write_through",
            admission="admit_all",
        )
    )
    assert store is not None
    assert (store.host_bytes, store.host_arena_path) == (2 << 30, Path("/a"))
    assert (store.nvme_bytes, store.nvme_root) == (3 * 10**9, Path("/n"))
    assert store.rules.write_policy is WritePolicy.WRITE_THROUGH
    assert store.rules.admission is AdmissionName.ALL


@pytest.mark.parametrize("options", [{"host_arena": Path("/a")}, {"nvme_dir": Path("/n")}])
def test_a_lower_tier_brings_host_memory_along(options: dict[str, Path]) -> None:
    cache = CacheOptions(**options)  # type: ignore[arg-type]
    store = shared.store_config_from_options(cache)
    assert store is not None and store.host_bytes == 1 << 30
    assert store.nvme_bytes == (8 << 30 if cache.nvme_dir else 0)
    assert cache.outlives_process


@pytest.mark.parametrize(
    ("cache", "message"),
    [
        (CacheOptions(host="0", nvme_dir=Path("/n")), "--host: expected a size above 0"),
        (CacheOptions(nvme="1GiB"), "--nvme: needs --nvme-dir"),
        (CacheOptions(host="1G"), "--host: expected a size such as"),
        (CacheOptions(host=""), "--host: expected a size such as"),
        (CacheOptions(nvme_dir=Path("/n"), nvme="lots"), "--nvme: expected a size such as"),
    ],
)
def test_what_cannot_work_names_the_option(cache: CacheOptions, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        shared.store_config_from_options(cache)


def test_engine_options_reach_the_engine(tmp_path: Path) -> None:
    options = EngineOptions(
        model=tmp_path,
        device="cpu",
        threads=2,
        max_context=100,
        max_batch_tokens=64,
        max_running=3,
        schedule="lpm",
        evict_policy="lfu",
    )
    config = shared.engine_config_from_options(options, CacheOptions(page_tokens=8, pool="5MiB"))
    assert (config.model, config.device, config.threads) == (tmp_path, "cpu", 2)
    assert (config.max_context, config.max_batch_tokens, config.max_running) == (100, 64, 3)
    assert (config.schedule, config.evict_policy) == (SchedulePolicy.LPM, "lfu")
    assert (config.page_tokens, config.pool_bytes, config.store) == (8, 5 << 20, None)


def test_names_of_choices_are_those_of_the_storage_floor() -> None:
    assert [*shared.WritePolicyChoice] == [*map(str, WritePolicy)]
    assert [*shared.AdmissionChoice] == [*map(str, AdmissionName)]
    assert [*shared.ScheduleChoice] == [*map(str, SchedulePolicy)]
