"""What a pool costs that is configured but dead: the last part of `tierkv bench remote`.

Owns two engines on one model: one over a store with a pool, one over a store without. Of the
pool's two members one refuses connections, the other accepts and never answers.
"""

from __future__ import annotations

import itertools
import secrets
import socket
import statistics
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from tierkv.bench.child import HOST
from tierkv.engine.serve.engine import Engine
from tierkv.engine.serve.engine_config import EngineConfig
from tierkv.engine.serve.gguf import resolve_model
from tierkv.engine.serve.sampler import SamplingParams
from tierkv.models import bundled_gguf, default_model_cache
from tierkv.scenario import system_prompt
from tierkv.storage.clock import SystemClock
from tierkv.storage.identity import Fingerprint
from tierkv.storage.pool.config import Address, PoolConfig
from tierkv.storage.pool.pool import open_pool
from tierkv.storage.store import StoreConfig, TieredStore

PROMPT_TOKENS = 128
WAIT_S = 10.0


@dataclass(frozen=True, slots=True)
class DeadPool:
    """Median seconds to the first token, and the median of the turns' ratios."""

    dead_s: float
    off_s: float
    ratio: float


def dead_pool_ttft(rounds: int, model: Path | None = None) -> DeadPool:
    """Ask both engines for the first token of a prompt nobody has, turn by turn."""
    folder = resolve_model(model or bundled_gguf(), default_model_cache())
    taken: dict[str, list[float]] = {"off": [], "dead": []}
    salts = map(str, itertools.count())
    with ExitStack() as stack:
        engines = {
            "off": stack.enter_context(_engine(folder, pool=False)),
            "dead": stack.enter_context(_engine(folder, pool=True)),
        }
        tokenizer = engines["off"].tokenizer
        prompt = tokenizer.encode(system_prompt(12))[:PROMPT_TOKENS]
        for turn in range(rounds + 1):
            # Whoever goes second finds a warmer machine: they take turns.
            order = list(taken) if turn % 2 else list(reversed(taken))
            for name in order:
                seconds = _ttft(engines[name], prompt, next(salts))
                if turn:
                    taken[name].append(seconds)
    ratios = [dead / off for dead, off in zip(taken["dead"], taken["off"], strict=True)]
    return DeadPool(
        statistics.median(taken["dead"]),
        statistics.median(taken["off"]),
        statistics.median(ratios),
    )


def _ttft(engine: Engine, prompt: list[int], salt: str) -> float:
    output = engine.generate([prompt], SamplingParams(max_tokens=1), cache_salt=salt)[0]
    assert output.ttft_s is not None
    return output.ttft_s


@contextmanager
def _engine(model: Path, pool: bool) -> Iterator[Engine]:
    with ExitStack() as stack:

        def open_store(page_bytes: int, fingerprint: Fingerprint) -> TieredStore:
            store = TieredStore.open(StoreConfig(page_bytes=page_bytes, host_bytes=256 << 20))
            if pool:
                members = stack.enter_context(_dead_members())
                config = PoolConfig(
                    listen=Address(HOST, 0),
                    name="bench",
                    members=members,
                    key=secrets.token_bytes(32),
                )
                dead = open_pool(config, None, SystemClock())
                stack.callback(dead.close, WAIT_S)
                dead.start()
                store.attach_remote(dead.attach(page_bytes))
            return store

        yield stack.enter_context(Engine.open(EngineConfig(model=model, open_store=open_store)))


@contextmanager
def _dead_members() -> Iterator[tuple[Address, ...]]:
    """One whose port nobody listens on, one that accepts and never says a word."""
    with socket.create_server((HOST, 0)) as silent, socket.create_server((HOST, 0)) as gone:
        ports = [each.getsockname()[1] for each in (silent, gone)]
        gone.close()
        yield tuple(Address(HOST, port) for port in ports)
