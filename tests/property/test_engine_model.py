"""Random traffic through scheduler, radix tree, page pool, copies and real tiers, step by step.

The naive model is the prompt itself: with HashRunner every answer follows from it, and every slot
of KV that is read is compared with the only bytes it may hold. check() runs after each step.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.hash_model import HashRunner, expected_output, hash_config
from tierkv.engine.serve.core import EngineCore, Tiers
from tierkv.engine.serve.engine_config import EngineConfig
from tierkv.engine.serve.request import FinishReason, Request, RequestState, request_ids
from tierkv.engine.serve.restore import RestoreMode
from tierkv.engine.serve.sampler import SamplingParams
from tierkv.engine.serve.scheduler import SchedulePolicy
from tierkv.storage.clock import SystemClock
from tierkv.storage.policy import WritePolicy
from tierkv.storage.store import StoreConfig, StoreRules, TieredStore
from tierkv.storage.transfer.cpu import CpuTransfer
from tierkv.storage.types import NamespaceId, TierName

VOCAB = 7
MAX_CONTEXT = 96
STEPS = 2_000
DEADLINE_S = 30.0


@dataclass(frozen=True)
class Case:
    policy: WritePolicy
    schedule: SchedulePolicy
    page_tokens: int
    num_pages: int
    evict_policy: str


CASES = [
    Case(WritePolicy.WRITE_THROUGH, SchedulePolicy.FCFS, 4, 40, "lru"),
    Case(WritePolicy.WRITE_BACK, SchedulePolicy.LPM, 4, 30, "lfu"),
    Case(WritePolicy.WRITE_THROUGH_SELECTIVE, SchedulePolicy.LPM, 3, 48, "slru"),
    Case(WritePolicy.WRITE_BACK, SchedulePolicy.FCFS, 1, 110, "fifo"),
    Case(WritePolicy.WRITE_THROUGH, SchedulePolicy.LPM, 8, 16, "priority"),
]


class Traffic:
    """One engine under random requests, and what each of them must answer."""

    def __init__(self, case: Case, directory: Path, seed: int) -> None:
        self.rng = random.Random(seed)
        config = hash_config(VOCAB, MAX_CONTEXT)
        self.runner = HashRunner(config, case.num_pages, case.page_tokens)
        rules = StoreRules(write_policy=case.policy)
        page_bytes = self.runner.pool.page_bytes
        self.store = TieredStore.open(
            StoreConfig(
                page_bytes=page_bytes,
                host_bytes=24 * 8192,
                nvme_root=directory / "nvme",
                nvme_bytes=3 << 20,
                rules=rules,
            )
        )
        self.transfer = CpuTransfer(self.runner.pool.kv)
        self.core = EngineCore(
            EngineConfig(
                model=Path("hash"),
                page_tokens=case.page_tokens,
                max_batch_tokens=24,
                max_running=6,
                schedule=case.schedule,
                evict_policy=case.evict_policy,
            ),
            self.runner,  # type: ignore[arg-type]
            frozenset(),
            MAX_CONTEXT,
            SystemClock(),
            Tiers(self.store, self.transfer, case.policy, 2),
            wake=lambda: None,
        )
        self.families = [self._tokens(self.rng.randint(10, 60)) for _ in range(5)]
        self.live: dict[int, Request] = {}
        self.served = 0
        self.aborted = 0

    def act(self) -> None:
        """One random step of a client, a scheduler round or a memory squeeze."""
        choice = self.rng.random()
        if choice < 0.12 and len(self.live) < 12:
            self.submit()
        elif choice < 0.14 and self.live:
            self.core.abort(self.rng.choice(list(self.live)))
        elif choice < 0.16:
            self.core.cache.evict(self.rng.randint(1, 8))
        elif choice < 0.165:
            self.store.trim(TierName.HOST, self.rng.randint(0, 10))
        else:
            self.core.step()
        self.core.check()

    def submit(self) -> None:
        family = self.rng.choice(self.families)
        shared = family[: self.rng.randint(1, len(family))]
        prompt = shared + self._tokens(self.rng.randint(0, 12))
        request = Request(
            request_id=next(request_ids),
            prompt=prompt,
            params=SamplingParams(max_tokens=20),
            max_tokens=self.rng.randint(1, 20),
            namespace=NamespaceId(bytes([self.rng.randint(0, 1)]) * 32),
            priority=self.rng.randint(0, 1),
            arrival_s=SystemClock().monotonic(),
        )
        self.live[request.request_id] = request
        assert self.core.restore is not None
        # By the plan alone, so small a model would soon load nothing any more.
        self.core.restore.mode = self.rng.choice([RestoreMode.AUTO, RestoreMode.LOAD])
        self.core.submit(request, self.heard)

    def heard(self, request: Request, token: int | None) -> None:
        expected = expected_output(request.prompt, request.max_tokens, VOCAB)
        assert request.output == expected[: len(request.output)]
        if token is not None:
            return
        del self.live[request.request_id]
        assert request.state is RequestState.FINISHED
        if request.finish_reason is FinishReason.ABORT:
            self.aborted += 1
        else:
            assert request.finish_reason is FinishReason.LENGTH, request.error
            self.served += 1

    def finish(self) -> None:
        """Serve what is left; nothing may leak."""
        clock = SystemClock()
        deadline = clock.monotonic() + DEADLINE_S
        while self.live:
            self.core.step()
            assert clock.monotonic() < deadline, f"requests that never end: {self.live}"
        self.core.close(DEADLINE_S)
        self.core.check()
        stats = self.core.cache.stats()
        assert stats.protected_tokens == 0
        assert stats.pages_copying == 0
        self.transfer.close()
        assert self.store.flush(DEADLINE_S)
        self.store.check()
        self.store.close()

    def _tokens(self, count: int) -> list[int]:
        return [self.rng.randrange(VOCAB) for _ in range(count)]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.policy}-{case.page_tokens}")
def test_w1_l2_every_answer_follows_from_its_prompt(case: Case, tmp_path: Path) -> None:
    seed = 4711 + CASES.index(case)
    print(f"seed {seed}")
    traffic = Traffic(case, tmp_path, seed)
    for step in range(STEPS):
        traffic.act()
        if step % 50 == 0:
            # The store's accounts are exact only while nobody commits.
            assert traffic.core.drain(DEADLINE_S)
            traffic.store.check()
    traffic.finish()
    core = traffic.core
    assert traffic.served > 50
    assert traffic.aborted > 0
    assert core.restore is not None
    assert core.restore.stats().restored_pages > 0, "no page ever came back from a tier"
