"""Prefixes restored from a remote tier: the tokens of the cold run, whatever the remote does (W1).

A tiny model over a real arena and slot files, with MemoryRemote below them. Every trouble at every
page, in both modes of restoring; and what a remote that does not answer may cost, told by what was
planned and counted, not by the clock.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.engine_checks import assert_given_back
from tests.support.memory_remote import Fault, Medium, MemoryRemote
from tests.support.model_files import qwen3_config, write_model
from tests.unit.storage.remote_conformance import wait_until
from tierkv.engine.serve.api_answer import tierkv_body
from tierkv.engine.serve.api_metrics import ApiMetrics
from tierkv.engine.serve.calibration import recall, remember
from tierkv.engine.serve.engine import Engine
from tierkv.engine.serve.engine_config import EngineConfig
from tierkv.engine.serve.planner import LoadRate
from tierkv.engine.serve.request import Request, RequestOutput
from tierkv.engine.serve.restore import RestoreMode
from tierkv.engine.serve.sampler import SamplingParams
from tierkv.storage.policy import WritePolicy
from tierkv.storage.store import StoreRules, TieredStore
from tierkv.storage.tiers.host import HostTier
from tierkv.storage.tiers.nvme import NvmeTier
from tierkv.storage.types import TierName

PAGE = 4
PAGES = 20
PROMPT = [5 + (7 * i + i * i) % 200 for i in range(PAGES * PAGE + 3)]
PARAMS = SamplingParams(max_tokens=8, ignore_eos=True)
WAIT_S = 20.0
DEADLINE_S = 0.25
SEED = 20261130


class Rig:
    """One engine, its tiers and its remote, and the answer of a cold run."""

    def __init__(self, model: Path, directory: Path) -> None:
        config = EngineConfig(
            model=model,
            num_pages=120,
            page_tokens=PAGE,
            device="cpu",
            max_batch_tokens=32,
            restore_deadline_s=WAIT_S,
        )
        with Engine.open(config) as sizing:
            page_bytes = sizing.stats().page_bytes
            self.cold = sizing.generate([PROMPT], PARAMS)[0].token_ids
        # Nothing is copied to nvme unless a test flushes.
        rules = StoreRules(write_policy=WritePolicy.WRITE_THROUGH_SELECTIVE, selective_hits=10**6)
        self.store = TieredStore(
            HostTier(None, page_bytes, 8 << 20),
            NvmeTier(directory / "nvme", page_bytes, 32 << 20),
            rules,
        )
        self.remote = MemoryRemote(Medium(), pages_max=256)
        self.store.attach_remote(self.remote)
        self.engine = Engine.open(config, store=self.store)
        assert self.engine.core.restore is not None
        self.restore = self.engine.core.restore
        self.keys = self.request(0).page_keys[:PAGES]

    def request(self, number: int) -> Request:
        request = Request(
            request_id=number,
            prompt=list(PROMPT),
            params=PARAMS,
            max_tokens=1,
            namespace=self.engine._parts.namespace_for(""),
            priority=0,
            arrival_s=0.0,
        )
        request.extend_keys(PAGE)
        return request

    def ask(self) -> RequestOutput:
        return self.engine.generate([PROMPT], PARAMS)[0]

    def put_elsewhere(self) -> None:
        """Every page of the prefix in the remote tier and nowhere else."""
        self.trouble_is_over()
        if any(self.remote.medium.get(key) is None for key in self.keys):
            self.ask()
            self.engine.drop_gpu_cache()
            assert self.remote.wait_quiet(WAIT_S)
        self.leave_here(0)

    def leave_here(self, pages: int) -> None:
        """Only the first pages in host, the others elsewhere."""
        self.engine.drop_gpu_cache()
        assert self.store.wait_quiet(WAIT_S)
        self.store.trim(TierName.NVME, 0)
        self.store.trim(TierName.HOST, 0)
        if pages:
            with self.store.fetch(self.keys[:pages], WAIT_S).take(WAIT_S) as lease:
                assert len(lease.keys) == pages
        where = [TierName.HOST] * pages + [TierName.REMOTE] * (PAGES - pages)
        assert self.store.lookup(self.keys) == where

    def trouble_is_over(self) -> None:
        self.remote.faults = {}
        self.remote.every = None
        self.remote.reachable = True
        self.remote.release()

    def check(self) -> None:
        assert_given_back(self.engine, self.store)

    def close(self) -> None:
        self.engine.close()
        self.store.check()
        self.store.close()


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    directory = tmp_path_factory.mktemp("remote")
    write_model(directory / "model", qwen3_config(), seed=3)
    made = Rig(directory / "model", directory)
    made.engine.start()
    yield made
    made.close()


@pytest.fixture
def rig(started: Rig) -> Iterator[Rig]:
    started.put_elsewhere()
    yield started
    started.trouble_is_over()
    started.restore.mode = RestoreMode.AUTO
    started.restore._deadline_s = WAIT_S
    started.check()


@pytest.mark.parametrize("mode", list(RestoreMode))
def test_w1_a_prefix_from_elsewhere_gives_the_cold_tokens(rig: Rig, mode: RestoreMode) -> None:
    rig.restore.rates.clear()
    rig.restore.mode = mode
    for _ in range(2):
        # The second time the tier's rate is known, and the plan another.
        rig.put_elsewhere()
        output = rig.ask()
        assert output.error is None
        assert output.token_ids == rig.cold
        if mode is RestoreMode.LOAD:
            assert output.cached.remote == PAGES * PAGE
            assert rig.restore.rates[TierName.REMOTE].bytes_per_s is not None
        elif mode is RestoreMode.RECOMPUTE:
            assert output.cached.total == 0


def test_w1_a_prefix_out_of_every_tier_gives_the_cold_tokens(rig: Rig) -> None:
    rig.restore.mode = RestoreMode.LOAD
    # nvme holds six, of which host holds four, of which the pool holds two.
    rig.leave_here(6)
    assert rig.store.flush(WAIT_S)
    rig.store.trim(TierName.HOST, 0)
    rig.engine.generate([PROMPT[: 4 * PAGE + 1]], SamplingParams(max_tokens=1))
    rig.engine.drop_gpu_cache()
    rig.engine.generate([PROMPT[: 2 * PAGE + 1]], SamplingParams(max_tokens=1))
    output = rig.ask()
    assert output.token_ids == rig.cold
    cached = output.cached
    assert (cached.gpu, cached.host) == (2 * PAGE, 2 * PAGE)
    assert (cached.nvme, cached.remote) == (2 * PAGE, (PAGES - 6) * PAGE)


@pytest.mark.parametrize("page", range(PAGES))
@pytest.mark.parametrize("fault", [Fault.FAIL, Fault.FLIP, Fault.MISS])
@pytest.mark.parametrize("mode", [RestoreMode.LOAD, RestoreMode.AUTO])
def test_w7_a_page_that_goes_wrong_is_computed(
    rig: Rig, mode: RestoreMode, fault: Fault, page: int
) -> None:
    rig.restore.mode = mode
    rig.remote.faults = {rig.keys[page]: fault}
    output = rig.ask()
    assert output.error is None
    assert output.token_ids == rig.cold
    if mode is RestoreMode.LOAD:
        assert output.cached.remote == (PAGES - 1) * PAGE


@pytest.mark.parametrize("page", [0, 7, PAGES - 1])
@pytest.mark.parametrize("fault", [Fault.STALL, Fault.LATE])
def test_h1_a_page_that_does_not_come_costs_the_deadline_and_is_computed(
    rig: Rig, fault: Fault, page: int
) -> None:
    rig.restore.mode, rig.restore._deadline_s = RestoreMode.LOAD, DEADLINE_S
    rig.remote.faults = {rig.keys[page]: fault}
    late = rig.restore.stats().late
    output = rig.ask()
    assert output.error is None
    assert output.token_ids == rig.cold
    assert output.cached.total <= (PAGES - 1) * PAGE
    if fault is Fault.STALL:
        assert rig.restore.stats().late == late + 1
    assert not rig.store.stats().breaker_open, "nvme was blamed"


@pytest.mark.parametrize("known", [False, True], ids=["rate unknown", "rate known"])
def test_p1_a_stalled_remote_costs_what_the_plan_bears_not_the_deadline(
    rig: Rig, known: bool
) -> None:
    """The request is answered though nothing ever comes and its deadline is far: what is late is
    computed. Nothing was late in the sense of the deadline, nothing was taken from the remote."""
    rig.restore.rates.clear()
    if known:
        rig.restore.rates[TierName.REMOTE] = LoadRate(1e9)
    before = rig.restore.stats()
    late = rig.store.stats().late_fetches
    rig.remote.stall()
    output = rig.ask()
    assert rig.remote.queue.running > 0, "the remote was not even asked"
    assert output.error is None
    assert output.token_ids == rig.cold
    assert output.cached.total == 0
    assert output.plan is not None
    assert output.plan.expected_s <= output.plan.compute_all_s
    after = rig.restore.stats()
    assert (after.loads, after.late) == (before.loads + 1, before.late)
    assert after.recomputed_pages == before.recomputed_pages + PAGES
    assert after.restored_pages == before.restored_pages
    assert rig.store.stats().late_fetches == late


def test_p1_a_remote_slower_than_computing_is_left_alone(rig: Rig) -> None:
    rig.restore.rates = {TierName.REMOTE: LoadRate(1.0)}
    rig.restore._rejected_in_a_row = 0
    outright = rig.restore.stats().outright
    submits = len(rig.remote.submits)
    output = rig.ask()
    assert output.token_ids == rig.cold
    # Once when it was queued, once when it was admitted.
    assert rig.restore.stats().outright == outright + 2
    assert len(rig.remote.submits) == submits
    rig.restore.rates.clear()


def test_a_remote_that_cannot_be_reached_is_not_planned_with(rig: Rig) -> None:
    before = rig.restore.stats()
    submits = len(rig.remote.submits)
    rig.remote.reachable = False
    output = rig.ask()
    assert output.token_ids == rig.cold
    assert (output.plan, output.cached.total) == (None, 0)
    after = rig.restore.stats()
    assert (after.loads, after.outright) == (before.loads, before.outright)
    assert len(rig.remote.submits) == submits


def test_p4_pages_are_prefetched_while_the_request_waits_in_the_queue(
    tmp_path: Path, rig: Rig
) -> None:
    write_model(tmp_path / "model", qwen3_config(), seed=3)
    waiting = Rig(tmp_path / "model", tmp_path)
    try:
        for key in rig.keys:
            page = rig.remote.medium.get(key)
            assert page is not None
            waiting.remote.medium.put(key, *page)
        assert waiting.keys == rig.keys, "the same model names its pages alike"
        ended: list[int] = []
        request = waiting.request(1)
        waiting.engine.core.submit(
            request, lambda each, token: ended.append(each.request_id) if token is None else None
        )
        # The engine thread does not run: whatever comes now, comes to a queued request.
        wait_until(
            lambda: waiting.store.lookup(waiting.keys) == [TierName.HOST] * PAGES,
            "nothing was prefetched",
        )
        assert waiting.engine.stats().waiting == 1
        waiting.restore.mode = RestoreMode.LOAD
        while not ended:
            waiting.engine.core.step()
        assert request.output[0] == rig.cold[0]
        assert request.cached.remote == PAGES * PAGE
    finally:
        waiting.close()


def test_what_was_computed_is_kept_here_though_others_have_it(rig: Rig) -> None:
    rig.restore.mode = RestoreMode.RECOMPUTE
    rig.ask()
    rig.engine.drop_gpu_cache()
    assert rig.engine.flush(WAIT_S)
    rig.remote.reachable = False
    assert all(rig.store.lookup_here(rig.keys))


def test_w1_many_requests_under_random_trouble(rig: Rig) -> None:
    rng = random.Random(SEED)
    prompts = [[*PROMPT[: PAGE * size], 3 + size, 9] for size in (PAGES, 15, 8, 3)]
    rig.restore.mode = RestoreMode.RECOMPUTE
    cold = [output.token_ids for output in rig.engine.generate(prompts, PARAMS)]
    for turn in range(8):
        rig.put_elsewhere()
        rig.restore.mode = rng.choice([RestoreMode.AUTO, RestoreMode.LOAD])
        kinds = [Fault.FAIL, Fault.FLIP, Fault.MISS]
        rig.remote.faults = {
            key: rng.choice(kinds) for key in rng.sample(rig.keys, rng.randrange(6))
        }
        outputs = rig.engine.generate(prompts, PARAMS)
        got = [output.token_ids for output in outputs]
        assert got == cold, f"seed={SEED} turn={turn} faults={rig.remote.faults}"
        rig.trouble_is_over()
        rig.check()


def test_the_remote_shows_wherever_tiers_are_named(rig: Rig, tmp_path: Path) -> None:
    rig.restore.mode = RestoreMode.LOAD
    output = rig.ask()
    assert tierkv_body([output])["cached_tokens"]["remote"] == PAGES * PAGE
    metrics = ApiMetrics(rig.engine.stats)
    metrics.finished(output)
    text = metrics.render()[0].decode()
    assert f'tierkv_request_cached_tokens_total{{tier="remote"}} {PAGES * PAGE}.0' in text
    for line in (
        'tierkv_store_restored_pages_total{tier="remote"}',
        'tierkv_mover_read_bytes_per_second{tier="remote"}',
        'tierkv_mover_read_latency_seconds{tier="remote"}',
        "tierkv_remote_landed_pages_total",
        "tierkv_remote_known_pages",
    ):
        (value,) = (each.split()[-1] for each in text.splitlines() if each.startswith(line))
        assert float(value) > 0, line
    # What was learned of it is known at the next start.
    learned = rig.restore.rates[TierName.REMOTE].bytes_per_s
    remember(tmp_path / "calibration.json", rig.restore)
    rig.restore.rates = {}
    assert recall(tmp_path / "calibration.json", rig.restore)
    assert rig.restore.rates[TierName.REMOTE].bytes_per_s == pytest.approx(learned)
