"""Passes that begin before their prefix has arrived: layer i waits for layer i, and no longer.

A tiny real model over copies that are held up or fail at a chosen layer. What is generated must be
what a cold engine generates, for the restored request and for the one beside it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.support import tiny_models
from tests.support.memory_tier import MemoryHostTier
from tierkv.engine.serve import restore
from tierkv.engine.serve.core import EngineCore, Tiers
from tierkv.engine.serve.engine_config import EngineConfig
from tierkv.engine.serve.kv_pool import KVPool
from tierkv.engine.serve.model import DecoderModel
from tierkv.engine.serve.request import Request, request_ids
from tierkv.engine.serve.restore import RestoreMode
from tierkv.engine.serve.runner import ModelRunner
from tierkv.engine.serve.sampler import SamplingParams
from tierkv.storage.clock import SystemClock
from tierkv.storage.fetch import TieredLease
from tierkv.storage.policy import WritePolicy
from tierkv.storage.store import TieredStore
from tierkv.storage.transfer.cpu import HostOps
from tierkv.storage.transfer.streams import StreamTransfer
from tierkv.storage.types import NamespaceId

CONFIG = replace(tiny_models.LLAMA, num_layers=4)
PAGE = 4
DEADLINE_S = 20.0
STEPS_MAX = 500
PROMPT = [(11 * i + 3) % CONFIG.vocab_size for i in range(50)]
BESIDE = [(5 * i + 1) % CONFIG.vocab_size for i in range(7)]
SEEDED = SamplingParams(temperature=1.0, seed=5, max_tokens=30, ignore_eos=True)


class LayerOps(HostOps):
    """Moves one layer a step; a step may fail, or wait for `gate`."""

    fails_at: int | None = None
    waits_at: int | None = None

    def __init__(self, kv: torch.Tensor) -> None:
        super().__init__(kv)
        self.gate = threading.Event()
        self.arrived: list[int] = []

    def step_layers(self, page_count: int, *, reachable: bool) -> int:
        return 1

    def move_in(
        self, stream: object, views: Sequence[memoryview], pages: Sequence[int], planes: range
    ) -> None:
        layer = planes.start // self.planes_per_layer
        if layer == self.waits_at and not self.gate.wait(DEADLINE_S):
            raise AssertionError("nothing went on while the layer was held up")
        if layer == self.fails_at:
            raise RuntimeError(f"the device refused layer {layer}")
        super().move_in(stream, views, pages, planes)
        self.arrived.append(layer)


class WatchedPool(KVPool):
    """Says when a pass has come to a layer, so that attention of those before it has run."""

    def __init__(self) -> None:
        device = torch.device("cpu")
        super().__init__(CONFIG, 80, PAGE, torch.float32, device)
        self.watched = 1
        self.reached = threading.Event()

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if index == self.watched:
            self.reached.set()
        return super().layer(index)


class Rig:
    """One engine core over a tiny model, driven as the engine thread would."""

    def __init__(self, chunk: int = 512) -> None:
        model = DecoderModel(CONFIG, tiny_models.random_weights(CONFIG))
        self.pool = WatchedPool()
        self.ops = LayerOps(self.pool.kv)
        self.transfer = StreamTransfer(self.ops)
        self.store = TieredStore(MemoryHostTier(self.pool.page_bytes, 64))
        self.woken = threading.Event()
        self.core = EngineCore(
            EngineConfig(
                model=Path("tiny"),
                page_tokens=PAGE,
                restore=RestoreMode.LOAD,
                max_batch_tokens=chunk,
            ),
            ModelRunner(model, self.pool),
            frozenset(),
            CONFIG.max_context,
            SystemClock(),
            Tiers(self.store, self.transfer, WritePolicy.WRITE_BACK, 2),
            wake=self.woken.set,
        )

    def submit(self, prompt: list[int], params: SamplingParams) -> Request:
        request = Request(
            request_id=next(request_ids),
            prompt=prompt,
            params=params,
            max_tokens=params.max_tokens,
            namespace=NamespaceId(b"n" * 32),
            priority=0,
            arrival_s=SystemClock().monotonic(),
        )
        self.core.submit(request, lambda *_: None)
        return request

    def ask(self, count: int = 8) -> Request:
        """The prompt whose prefix is restored."""
        return self.submit(PROMPT, SamplingParams(max_tokens=count, ignore_eos=True))

    def finish(self) -> None:
        scheduler = self.core.scheduler
        for _ in range(STEPS_MAX):
            self.woken.clear()
            busy = self.core.step()
            self.core.check()
            if not scheduler.waiting and not scheduler.running:
                return
            if not busy:
                self.woken.wait(self.core.idle_wait_s())
        raise AssertionError(f"not finished within {STEPS_MAX} steps")

    def layered(self) -> int:
        assert self.core.restore is not None
        return self.core.restore.stats().layered

    def close(self) -> None:
        self.ops.gate.set()
        self.core.close(DEADLINE_S)
        self.core.check()
        self.transfer.close()
        self.transfer.check()
        stats = self.core.cache.stats()
        assert (stats.pages_copying, stats.protected_tokens) == (0, 0)
        self.store.check()
        self.store.close()


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig()
    yield made
    made.close()


def demoted(rig: Rig) -> list[int]:
    """Answer cold, then leave the prompt's pages in the store only."""
    cold = rig.ask()
    rig.finish()
    assert cold.cached.total == 0
    rig.core.drop_gpu_cache(DEADLINE_S)
    rig.pool.kv.fill_(float("nan"))
    rig.pool.reached.clear()
    return cold.output


def test_attention_begins_before_the_last_layer_has_arrived(rig: Rig) -> None:
    cold = demoted(rig)
    # The last layer moves only after attention of all before it has run.
    rig.pool.watched = CONFIG.num_layers - 1
    passed = watch_gate(rig)
    rig.ops.gate = rig.pool.reached
    rig.ops.waits_at = CONFIG.num_layers - 1
    again = rig.ask()
    rig.finish()
    assert again.output == cold
    assert again.cached.host == 48
    assert rig.layered() == 1
    assert passed == list(range(CONFIG.num_layers))


def watch_gate(rig: Rig) -> list[int]:
    """Layers whose attention was let go, each of which must have arrived before."""
    assert rig.core.restore is not None
    make, passed = rig.core.restore.layer_gate, list[int]()

    def watched(request: Request) -> Callable[[int], None]:
        gate = make(request)

        def wait(layer: int) -> None:
            gate(layer)
            assert layer in rig.ops.arrived, f"layer {layer} is read before it is there"
            passed.append(layer)

        return wait

    rig.core.restore.layer_gate = watched  # type: ignore[method-assign]
    return passed


def test_a_long_rest_is_computed_in_chunks_behind_the_restored_prefix() -> None:
    rig = Rig(chunk=8)
    cold = demoted(rig)
    again = rig.submit([*PROMPT[:20], *BESIDE, *BESIDE], SamplingParams(max_tokens=3))
    rig.finish()
    assert again.cached.host == 20
    assert rig.layered() == 1
    other = rig.ask()
    rig.finish()
    assert other.output == cold
    rig.close()


@pytest.mark.parametrize("layer", range(CONFIG.num_layers))
def test_w6_a_copy_that_fails_at_a_layer_gives_the_cold_tokens(
    rig: Rig, layer: int, caplog: pytest.LogCaptureFixture
) -> None:
    cold = demoted(rig)
    alone = rig.submit(BESIDE, SEEDED)
    rig.finish()
    beside = rig.submit(BESIDE, SEEDED)
    rig.core.step()
    rig.ops.fails_at = layer
    if layer > 0:
        # In the middle of the pass, after its first attention.
        rig.ops.waits_at = layer
        rig.ops.gate = rig.pool.reached
        rig.ops.gate.clear()
    again = rig.ask()
    rig.finish()
    assert again.output == cold
    assert again.cached.total == 0
    assert beside.output == alone.output, "a pass that ran twice drew twice"
    if layer > 0:
        assert f"restore failed request={again.request_id}" in caplog.text
    assert rig.core.step_failures == 0


def test_h1_a_layer_that_does_not_come_costs_a_bounded_wait(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(restore, "LAYERED_WAIT_S", 0.05)
    cold = demoted(rig)
    beside = rig.submit(BESIDE, SEEDED)
    rig.core.step()
    rig.ops.waits_at = 2
    again = rig.ask()
    for _ in range(STEPS_MAX):
        rig.core.step()
        rig.core.check()
        if beside.finish_reason is not None:
            break
    assert beside.finish_reason is not None, "others go on while the layer is away"
    assert again.output == []
    assert rig.core.cache.pool.copying_count == 12, "nobody may write them yet"
    rig.ops.gate.set()
    rig.finish()
    assert again.output == cold
    assert rig.layered() == 0


def test_h1_a_copy_that_never_ends_costs_the_deadline(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(restore, "LAYERED_WAIT_S", 0.02)
    monkeypatch.setattr(restore, "STUCK_GRACE_S", 0.0)
    cold = demoted(rig)
    assert rig.core.restore is not None
    rig.core.restore._deadline_s = 0.1
    rig.ops.waits_at = 2
    again = rig.ask()
    rig.finish()
    assert again.output == cold
    assert again.retractions == 1
    assert rig.core.restore.stats().orphaned_pages == 12
    assert rig.core.cache.pool.copying_count == 12, "a copy may still write them"


def test_l1_a_lease_that_ends_during_a_layered_pass_is_a_miss(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    cold = demoted(rig)
    beside = rig.submit(BESIDE, SEEDED)
    rig.core.step()
    monkeypatch.setattr(TieredLease, "intact", property(lambda _: False))
    again = rig.submit(PROMPT, SamplingParams(max_tokens=8, ignore_eos=True))
    rig.finish()
    assert again.output == cold
    assert again.cached.total == 0
    assert len(beside.output) == 30


def test_w2_an_abort_during_the_copies_leaks_nothing(rig: Rig) -> None:
    cold = demoted(rig)
    rig.ops.waits_at = 1
    again = rig.ask()
    rig.core.scheduler.admit()
    rig.core.abort(again.request_id)
    rig.core.check()
    rig.ops.gate.set()
    rig.ops.waits_at = None
    other = rig.ask()
    rig.finish()
    assert other.output == cold
