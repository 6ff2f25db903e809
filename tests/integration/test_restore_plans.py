"""Any plan, any speed of the disk, any page that goes wrong: the tokens of the cold run (W1).

A tiny model over a real arena and real slot files. The device below them is slowed to rates from
far below to far above the rate of computing, and fails one page at a time, each page in turn.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.support.engine_checks import assert_given_back
from tests.support.fault_device import FaultDevice, Stall
from tests.support.model_files import qwen3_config, write_model
from tierkv.engine.serve.engine import Engine
from tierkv.engine.serve.engine_config import EngineConfig
from tierkv.engine.serve.request import Request, RequestOutput
from tierkv.engine.serve.restore import RestoreMode
from tierkv.engine.serve.sampler import SamplingParams
from tierkv.storage.device import BlockFile, Device, device_error
from tierkv.storage.policy import WritePolicy
from tierkv.storage.store import StoreRules, TieredStore
from tierkv.storage.throttle import ThrottledDevice
from tierkv.storage.tiers.host import HostTier
from tierkv.storage.tiers.nvme import NvmeTier
from tierkv.storage.types import Buffer, PageKey, TierName

PAGE = 4
PAGES = 20
PROMPT = [5 + (7 * i + i * i) % 200 for i in range(PAGES * PAGE + 3)]
PARAMS = SamplingParams(max_tokens=8, ignore_eos=True)
HEADER_BYTES = 4096
WAIT_S = 20.0
DEADLINE_S = 0.25
UNTHROTTLED = 1e15
LOAD_TIMES_S = (1.5, 0.3, 0.05, 0.01, 0.0)
"""Seconds that the whole prefix takes to load; computing it takes some tens of milliseconds."""

Meddle = Callable[[Path, Sequence[Buffer]], None]


@dataclass
class PageFaults:
    """Device that meddles with reads of one page, told by the key in its slot's header."""

    inner: Device
    key: PageKey | None = None
    meddle: Meddle | None = None
    met: list[PageKey] = field(default_factory=list)

    def open(self, path: Path, *, create: bool = False) -> BlockFile:
        return _File(self, self.inner.open(path, create=create), path)

    def free_bytes(self, path: Path) -> int:
        return self.inner.free_bytes(path)

    def sync_directory(self, path: Path) -> None:
        self.inner.sync_directory(path)

    def was_read(self, path: Path, buffers: Sequence[Buffer]) -> None:
        key, meddle = self.key, self.meddle
        if key is None or meddle is None:
            return
        if bytes(memoryview(buffers[0])[:HEADER_BYTES]).find(key) >= 0:
            self.met.append(key)
            meddle(path, buffers)


class _File:
    """One file of PageFaults."""

    def __init__(self, device: PageFaults, inner: BlockFile, path: Path) -> None:
        self._device = device
        self._inner = inner
        self._path = path
        self.direct = inner.direct
        self.pwritev = inner.pwritev
        self.fdatasync = inner.fdatasync
        self.allocate = inner.allocate
        self.truncate = inner.truncate
        self.size = inner.size
        self.close = inner.close

    def preadv(self, buffers: Sequence[Buffer], offset: int) -> None:
        self._inner.preadv(buffers, offset)
        self._device.was_read(self._path, buffers)


class Rig:
    """One engine, its tiers, and the answer of a cold run."""

    def __init__(self, model: Path, directory: Path) -> None:
        config = EngineConfig(
            model=model,
            num_pages=60,
            page_tokens=PAGE,
            device="cpu",
            max_batch_tokens=32,
            restore_deadline_s=WAIT_S,
        )
        with Engine.open(config) as sizing:
            page_bytes = sizing.stats().page_bytes
            self.cold = sizing.generate([PROMPT], PARAMS)[0].token_ids
        self.prefix_bytes = PAGES * page_bytes
        self.throttle = ThrottledDevice(FaultDevice(), UNTHROTTLED)
        self.faults = PageFaults(self.throttle)
        rules = StoreRules(write_policy=WritePolicy.WRITE_THROUGH, breaker_failures=10_000)
        self.store = TieredStore(
            HostTier(None, page_bytes, 8 << 20),
            NvmeTier(directory / "nvme", page_bytes, 32 << 20, device=self.faults),
            rules,
        )
        self.engine = Engine.open(config, store=self.store)
        self.engine.start()
        assert self.engine.core.restore is not None
        self.restore = self.engine.core.restore
        request = Request(
            request_id=0,
            prompt=PROMPT,
            params=PARAMS,
            max_tokens=1,
            namespace=self.engine._parts.namespace_for(""),
            priority=0,
            arrival_s=0.0,
        )
        request.extend_keys(PAGE)
        self.keys = request.page_keys[:PAGES]

    def ask(self) -> RequestOutput:
        return self.engine.generate([PROMPT], PARAMS)[0]

    def put_on_disk(self) -> None:
        """Every page of the prefix on nvme and nowhere else."""
        if any(tier is None for tier in self.store.lookup(self.keys)):
            self.ask()
        self.engine.drop_gpu_cache()
        assert self.engine.flush(WAIT_S)
        self.store.trim(TierName.HOST, 0)
        assert set(self.store.lookup(self.keys)) == {TierName.NVME}

    def check(self) -> None:
        assert_given_back(self.engine, self.store)

    def close(self) -> None:
        self.engine.close()
        self.store.check()
        self.store.close()


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    directory = tmp_path_factory.mktemp("plans")
    write_model(directory / "model", qwen3_config(), seed=3)
    made = Rig(directory / "model", directory)
    yield made
    made.close()


@pytest.fixture(autouse=True)
def as_before(rig: Rig) -> Iterator[None]:
    yield
    rig.faults.key = rig.faults.meddle = None
    rig.throttle.set_rate(UNTHROTTLED)
    rig.restore.mode = RestoreMode.AUTO
    rig.restore._deadline_s = WAIT_S


@pytest.mark.parametrize("load_s", LOAD_TIMES_S)
@pytest.mark.parametrize("mode", list(RestoreMode))
def test_w1_every_plan_gives_the_cold_tokens(rig: Rig, mode: RestoreMode, load_s: float) -> None:
    rig.restore.rates.clear()
    for _ in range(2):
        # The second time the tier's rate is known, and the plan another.
        rig.put_on_disk()
        rig.throttle.set_rate(rig.prefix_bytes / load_s if load_s else UNTHROTTLED)
        rig.restore.mode = mode
        output = rig.ask()
        assert output.error is None
        assert output.token_ids == rig.cold
        if mode is RestoreMode.LOAD:
            assert output.cached.nvme == PAGES * PAGE
        elif mode is RestoreMode.RECOMPUTE:
            assert output.cached.total == 0
        rig.throttle.set_rate(UNTHROTTLED)
        rig.check()


def refuse(path: Path, buffers: Sequence[Buffer]) -> None:
    raise device_error("read", path, OSError(errno.EIO, os.strerror(errno.EIO)))


def flip(path: Path, buffers: Sequence[Buffer]) -> None:
    """One bit of the payload, on its way."""
    memoryview(buffers[-1]).cast("B")[17] ^= 0x20


@pytest.mark.parametrize("page", range(PAGES))
@pytest.mark.parametrize("meddle", [refuse, flip])
@pytest.mark.parametrize("mode", [RestoreMode.LOAD, RestoreMode.AUTO])
def test_w7_a_page_that_cannot_be_read_is_computed(
    rig: Rig, mode: RestoreMode, meddle: Meddle, page: int
) -> None:
    rig.put_on_disk()
    rig.faults.met.clear()
    rig.faults.key, rig.faults.meddle = rig.keys[page], meddle
    rig.restore.mode = mode
    output = rig.ask()
    assert output.error is None
    assert output.token_ids == rig.cold
    if mode is RestoreMode.LOAD:
        assert rig.faults.met, "the page was not read"
        assert output.cached.total == (PAGES - 1) * PAGE
    rig.faults.key = None
    rig.check()


@pytest.mark.parametrize("page", range(PAGES))
def test_h1_a_page_that_stalls_costs_the_deadline_and_is_computed(rig: Rig, page: int) -> None:
    rig.put_on_disk()
    stall = Stall()
    rig.restore.mode, rig.restore._deadline_s = RestoreMode.LOAD, DEADLINE_S
    rig.faults.key, rig.faults.meddle = rig.keys[page], lambda *_: stall.hold()
    late = rig.restore.stats().late
    try:
        output = rig.ask()
    finally:
        rig.faults.key = None
        stall.release()
    assert stall.reached.is_set()
    assert output.error is None
    assert output.token_ids == rig.cold
    assert output.cached.total <= (PAGES - 1) * PAGE
    assert rig.restore.stats().late == late + 1
    rig.check()
