"""A full or failing disk costs the tier, never the answer; and stat says so."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.fault_device import FaultDevice
from tests.support.model_files import write_model
from tierkv.engine.serve.engine import Engine
from tierkv.engine.serve.engine_config import EngineConfig
from tierkv.engine.serve.request import RequestOutput
from tierkv.engine.serve.sampler import SamplingParams
from tierkv.storage.device import DirectDevice
from tierkv.storage.policy import WritePolicy
from tierkv.storage.store import StoreConfig, StoreRules, TieredStore
from tierkv.storage.tiers.host import HostTier
from tierkv.storage.tiers.nvme import NvmeTier

DISK_BYTES = 24 << 20
FLUSH_S = 20.0
PARAMS = SamplingParams(max_tokens=6, ignore_eos=True)
RULES = StoreRules(write_policy=WritePolicy.WRITE_THROUGH)
PROMPTS = [[5 + (7 * i + j * j) % 200 for j in range(60)] for i in range(12)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write_model(folder)
    return folder


@pytest.fixture(scope="module")
def expected(model: Path) -> list[tuple[int, ...]]:
    """Answers of an engine without a store."""
    with Engine.open(EngineConfig(model=model, num_pages=200, device="cpu")) as engine:
        return [output.token_ids for output in engine.generate(PROMPTS, PARAMS)]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system of its own, too small for what will be written."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root")
    mounted = tmp_path / "disk"
    mounted.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(mounted)]
    done = subprocess.run(mount, capture_output=True, text=True, timeout=30, check=False)
    if done.returncode != 0:
        pytest.skip(f"cannot mount here: {done.stderr.strip()}")
    yield mounted
    subprocess.run(["umount", str(mounted)], check=True, timeout=30)


def serve_twice(engine: Engine) -> list[RequestOutput]:
    """All prompts, twice, with the GPU pool emptied between."""
    engine.generate(PROMPTS, PARAMS)
    engine.drop_gpu_cache()
    engine.flush(FLUSH_S)
    outputs = engine.generate(PROMPTS, PARAMS)
    engine.check()
    return outputs


@pytest.mark.parametrize("min_free", [1 << 20, 0], ids=["guard", "enospc"])
def test_c2_a_full_disk_serves_on_and_says_so(
    model: Path, small_disk: Path, expected: list[tuple[int, ...]], min_free: int
) -> None:
    store = StoreConfig(
        page_bytes=1,
        host_bytes=1 << 20,
        nvme_root=small_disk / "nvme",
        nvme_bytes=1 << 30,
        nvme_min_free_bytes=min_free,
        rules=RULES,
    )
    hog = small_disk / "hog"
    config = EngineConfig(model=model, num_pages=200, device="cpu", store=store)
    with Engine.open(config) as engine:
        size = os.statvfs(small_disk).f_bavail * os.statvfs(small_disk).f_frsize
        with hog.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, size - (256 << 10))
        outputs = serve_twice(engine)
        assert [output.token_ids for output in outputs] == expected
        assert all(output.error is None for output in outputs)
        stats = engine.stats().store
        assert stats is not None
        assert stats.degraded is not None
        reason = "free-space guard" if min_free else "space"
        assert reason in stats.degraded
        hog.unlink()


@pytest.mark.parametrize("operation", ["write", "fdatasync", "read"])
def test_h2_a_failing_disk_serves_on_and_says_so(
    model: Path, tmp_path: Path, expected: list[tuple[int, ...]], operation: str
) -> None:
    config = EngineConfig(model=model, num_pages=200, device="cpu")
    with Engine.open(config) as sizing:
        page_bytes = sizing.stats().page_bytes
    device = FaultDevice(DirectDevice())
    host = HostTier(None, page_bytes, 1 << 20)
    nvme = NvmeTier(tmp_path / "nvme", page_bytes, 64 << 20, device=device)
    store = TieredStore(host, nvme, RULES)
    with Engine.open(config, store=store) as engine:
        engine.generate(PROMPTS[:6], PARAMS)
        assert engine.flush(FLUSH_S)
        device.fail(operation, errno.EIO, times=10_000)
        outputs = serve_twice(engine)
        assert [output.token_ids for output in outputs] == expected
        assert all(output.error is None for output in outputs)
        if operation != "read":
            stats = engine.stats().store
            assert stats is not None
            assert stats.degraded is not None
    store.check()
    store.close()
