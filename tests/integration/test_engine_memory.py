"""Memory that runs out costs the request or the start, in one line, and never the engine."""

from __future__ import annotations

import logging
import threading
from pathlib import Path

import pytest
import torch

from tests.support.model_files import write_model
from tierkv.engine.serve import opening
from tierkv.engine.serve.core import EngineCore
from tierkv.engine.serve.engine import STEP_FAILURES_MAX, Engine
from tierkv.engine.serve.engine_config import EngineConfig
from tierkv.engine.serve.request import FinishReason
from tierkv.engine.serve.runner import ModelRunner
from tierkv.engine.serve.sampler import SamplingParams
from tierkv.storage.errors import CapacityError, EngineStoppedError

DEADLINE_S = 20.0
PARAMS = SamplingParams(max_tokens=3, ignore_eos=True)
PROMPT = list(range(5, 45))
SAID = (
    "CUDA out of memory. Tried to allocate 2.00 MiB. GPU 0 has a total capacity of 4.00 GiB of "
    "which 1.89 MiB is free. Of the allocated memory 591.02 MiB is allocated by PyTorch."
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write_model(folder)
    return folder


@pytest.fixture
def config(model: Path) -> EngineConfig:
    return EngineConfig(model=model, num_pages=50, device="cpu")


class Breaking:
    """Stands for the model's passes: as many fail as it is told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.error: Exception | None = None
        run = ModelRunner.run

        def break_or_run(*args: object, **more: object) -> torch.Tensor:
            if self.error is not None:
                raise self.error
            return run(*args, **more)  # type: ignore[arg-type]

        monkeypatch.setattr(ModelRunner, "run", break_or_run)


def test_passes_without_gpu_memory_cost_their_requests_and_not_the_engine(
    config: EngineConfig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with Engine.open(config) as engine:
        breaking = Breaking(monkeypatch)
        expected = engine.generate([PROMPT], PARAMS)[0].token_ids
        breaking.error = torch.OutOfMemoryError(SAID)
        with caplog.at_level(logging.ERROR):
            for turn in range(STEP_FAILURES_MAX + 1):
                [output] = engine.generate([PROMPT], PARAMS, cache_salt=f"turn {turn}")
                assert output.error is not None
                assert "1.89 MiB is free); lower the KV pool, max_batch_tokens" in output.error
        assert len(caplog.records) == STEP_FAILURES_MAX + 1
        assert all(record.exc_info is None for record in caplog.records)
        breaking.error = None
        assert engine.generate([PROMPT], PARAMS, cache_salt="after")[0].token_ids == expected
        engine.check()


def test_a_model_that_breaks_again_and_again_stops_the_engine(
    config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Engine.open(config) as engine:
        Breaking(monkeypatch).error = RuntimeError("an illegal memory access was encountered")
        failed = []
        # One after the other, the engine idle between: steps in a row all the same.
        with pytest.raises(EngineStoppedError, match=r"stopped after 3 failed steps"):
            for turn in range(STEP_FAILURES_MAX + 1):
                failed += engine.generate([PROMPT], PARAMS, cache_salt=f"turn {turn}")
        assert len(failed) == STEP_FAILURES_MAX
        assert all("an illegal memory access" in str(output.error) for output in failed)


def test_an_engine_that_cannot_even_end_its_requests_tells_those_who_wait(
    config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("pages are not in state 1")

    with Engine.open(config) as engine:
        Breaking(monkeypatch).error = RuntimeError("an illegal memory access was encountered")
        monkeypatch.setattr(EngineCore, "fail_running", refuse)
        [output] = engine.generate([PROMPT], PARAMS)
        assert output.finish_reason is FinishReason.ABORT
        with pytest.raises(EngineStoppedError, match="its state is damaged: pages are not in"):
            engine.generate([PROMPT], PARAMS)


def test_an_engine_that_cannot_even_close_tells_those_who_wait(
    config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("pages are not in state 1")

    hooked = threading.Event()
    monkeypatch.setattr(threading, "excepthook", lambda _: hooked.set())
    with Engine.open(config) as engine:
        Breaking(monkeypatch).error = RuntimeError("an illegal memory access was encountered")
        monkeypatch.setattr(EngineCore, "fail_running", refuse)
        monkeypatch.setattr(EngineCore, "close", refuse)
        with pytest.raises(EngineStoppedError, match="its state is damaged: pages are not in"):
            engine.generate([PROMPT], PARAMS)
        assert hooked.wait(DEADLINE_S), "what broke is not swallowed"


@pytest.mark.parametrize(
    ("part", "what", "advice"),
    [
        ("DecoderModel", "the model's weights on cpu", "take a smaller model"),
        ("KVPool", "a KV pool of", "lower the pool"),
        ("ModelRunner", "a forward pass on cpu", "lower the pool"),
    ],
)
@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError(SAID),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"),
        MemoryError(),
    ],
    ids=["gpu", "cpu", "python"],
)
def test_a_start_without_memory_says_for_what_and_what_to_change(
    config: EngineConfig,
    monkeypatch: pytest.MonkeyPatch,
    part: str,
    what: str,
    advice: str,
    error: Exception,
) -> None:
    def refuse(*_: object) -> None:
        raise error

    monkeypatch.setattr(opening, part, refuse)
    with pytest.raises(CapacityError) as caught:
        Engine.open(config)
    line = str(caught.value)
    assert f"open engine: no memory for {what}" in line
    assert advice in line
    assert "\n" not in line
    assert "allocated by PyTorch" not in line


def test_another_error_of_the_model_is_not_called_a_lack_of_memory(
    config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("shapes do not fit")

    monkeypatch.setattr(opening, "DecoderModel", refuse)
    with pytest.raises(RuntimeError, match="shapes do not fit"):
        Engine.open(config)
