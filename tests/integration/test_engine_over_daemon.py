"""Engines whose pages live in a daemon of another process."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from tests.support.model_files import write_model
from tierkv.cli.options import CacheOptions, EngineOptions, engine_config_from_options
from tierkv.client import Client, ClientSettings
from tierkv.engine.serve.engine import Engine
from tierkv.engine.serve.engine_config import EngineConfig
from tierkv.engine.serve.gguf import resolve_model
from tierkv.engine.serve.request import RequestOutput
from tierkv.engine.serve.restore import RestoreMode
from tierkv.engine.serve.sampler import SamplingParams
from tierkv.models import bundled_gguf, default_model_cache
from tierkv.scenario import system_prompt
from tierkv.storage.errors import ConfigError
from tierkv.storage.identity import Fingerprint
from tierkv.storage.policy import WritePolicy

ROOT = Path(__file__).parents[2]
WAIT_S = 60.0
HOST_BYTES = 64 << 20
PAGE_TOKENS = 16
PARAMS = SamplingParams(max_tokens=6, ignore_eos=True)
PROMPTS = [[5 + (7 * i + j * j) % 200 for j in range(100)] for i in range(6)]
SETTINGS = ClientSettings(connect_s=WAIT_S, backoff_first_s=0.01, backoff_max_s=0.1, call_s=WAIT_S)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write_model(folder)
    return folder


@pytest.fixture(scope="module")
def expected(model: Path) -> list[tuple[int, ...]]:
    """Answers of an engine without a store."""
    with Engine.open(EngineConfig(model=model, num_pages=200, device="cpu")) as engine:
        return tokens(engine.generate(PROMPTS, PARAMS))


Start = Callable[[], subprocess.Popen[bytes]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts the daemon; what still runs at the end is killed."""
    running: list[subprocess.Popen[bytes]] = []

    def run() -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "tests.support.processes.plain_daemon", str(tmp_path)]
        running.append(subprocess.Popen([*command, str(HOST_BYTES)], cwd=ROOT))
        return running[-1]

    yield run
    for process in running:
        process.kill()
        process.wait(WAIT_S)


def opener(folder: Path, mode: str, page_bytes: int, fingerprint: Fingerprint) -> Client:
    """A client that is connected before the engine goes on."""
    client = Client(folder / "socket", page_bytes, fingerprint, mode=mode, settings=SETTINGS)
    assert client.wait_connected(WAIT_S)
    return client


def config(model: Path, folder: Path, mode: str = "shared") -> EngineConfig:
    return EngineConfig(
        model=model,
        num_pages=200,
        device="cpu",
        page_tokens=PAGE_TOKENS,
        # Of a model this small the plan would compute every page.
        restore=RestoreMode.LOAD,
        open_store=partial(opener, folder, mode),
        write_policy=WritePolicy.WRITE_THROUGH,
    )


def tokens(outputs: list[RequestOutput]) -> list[tuple[int, ...]]:
    assert all(output.error is None for output in outputs)
    return [output.token_ids for output in outputs]


def from_daemon(outputs: list[RequestOutput]) -> int:
    """Prompt tokens that came from the daemon."""
    return sum(output.cached.host for output in outputs)


def store_all(engine: Engine) -> None:
    """Have every page of the pool in the daemon."""
    engine.drop_gpu_cache()
    assert engine.flush(WAIT_S)


@pytest.mark.parametrize("mode", ["shared", "stream"])
def test_w1_the_second_engine_hits_what_the_first_computed(
    model: Path, tmp_path: Path, expected: list[tuple[int, ...]], start: Start, mode: str
) -> None:
    start()
    with Engine.open(config(model, tmp_path, mode)) as first:
        assert tokens(first.generate(PROMPTS, PARAMS)) == expected
        store_all(first)
        with Engine.open(config(model, tmp_path, mode)) as second:
            outputs = second.generate(PROMPTS, PARAMS)
            assert tokens(outputs) == expected
            assert from_daemon(outputs) > 0
            second.check()
        first.check()


def test_h4_an_engine_outlives_its_daemon_and_finds_the_next_one(
    model: Path, tmp_path: Path, expected: list[tuple[int, ...]], start: Start
) -> None:
    daemon = start()
    with Engine.open(config(model, tmp_path)) as engine:
        client = engine.store
        assert isinstance(client, Client)
        tokens(engine.generate(PROMPTS[:3], PARAMS))
        store_all(engine)
        token = client.boot_token
        daemon.kill()
        daemon.wait(WAIT_S)
        outputs = engine.generate(PROMPTS, PARAMS)
        assert tokens(outputs) == expected
        assert from_daemon(outputs) == 0
        start()
        assert client.wait_connected(WAIT_S)
        assert client.boot_token != token
        engine.drop_gpu_cache()
        # Pages that the killed daemon had committed are found again in the arena.
        outputs = engine.generate(PROMPTS[:3], PARAMS)
        assert tokens(outputs) == expected[:3]
        assert from_daemon(outputs) > 0
        engine.check()
        client.check()


def test_r3_a_killed_engine_process_costs_nothing_that_was_committed(
    model: Path, tmp_path: Path, expected: list[tuple[int, ...]], start: Start
) -> None:
    start()
    with Engine.open(config(model, tmp_path)) as first:
        tokens(first.generate(PROMPTS[:2], PARAMS))
        store_all(first)
        held = first.store
        assert isinstance(held, Client)
        held.reserve(4)
    with Engine.open(config(model, tmp_path)) as second:
        outputs = second.generate(PROMPTS[:2], PARAMS)
        assert tokens(outputs) == expected[:2]
        assert from_daemon(outputs) > 0


def test_options_name_the_daemon(model: Path, tmp_path: Path) -> None:
    engine = EngineOptions(model=model)
    address = f"unix:{tmp_path}/socket"
    configured = engine_config_from_options(engine, CacheOptions(store=address))
    assert configured.open_store is not None
    assert configured.store is None
    assert configured.write_policy is WritePolicy.WRITE_THROUGH
    for bad in (CacheOptions(store="tcp:1"), CacheOptions(store=address, host="1GiB")):
        with pytest.raises(ConfigError):
            engine_config_from_options(engine, bad)


def test_w1_smollm2_on_two_engines_and_one_daemon(tmp_path: Path, start: Start) -> None:
    start()
    folder = resolve_model(bundled_gguf(), default_model_cache())
    settings = replace(config(folder, tmp_path), num_pages=60)
    with Engine.open(settings) as first:
        prompt = first.tokenizer.encode(system_prompt(8))[:600]
        cold = first.generate([prompt], PARAMS)[0]
        assert cold.cached.total == 0
        store_all(first)
        with Engine.open(settings) as second:
            output = second.generate([prompt], PARAMS)[0]
            assert output.cached.host == (len(prompt) - 1) // PAGE_TOKENS * PAGE_TOKENS
            assert output.token_ids == cold.token_ids
            second.check()
