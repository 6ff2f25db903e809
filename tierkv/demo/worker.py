"""One engine worker of the demo: a process of its own, so that it can be killed with -9.

Speaks one JSON object a line on stdin and stdout. Everything that outlives it lies in the arena
file and the nvme directory that it is given, or in the daemon whose socket it is given.
"""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

from tierkv.client.client import Client
from tierkv.engine.serve.engine import Engine
from tierkv.engine.serve.engine_config import EngineConfig
from tierkv.engine.serve.restore import RestoreMode
from tierkv.engine.serve.sampler import SamplingParams
from tierkv.storage.base import PageStore
from tierkv.storage.errors import TierKVError
from tierkv.storage.identity import Fingerprint
from tierkv.storage.policy import WritePolicy
from tierkv.storage.store import StoreConfig, StoreRules, TieredStore
from tierkv.storage.types import TierName

FLUSH_S = 60.0


def main() -> int:
    """Serve commands until stdin closes; return the exit status."""
    options = json.loads(sys.stdin.readline())
    try:
        return serve(options)
    except TierKVError as error:
        reply({"error": str(error), "code": error.code})
        return 2


def serve(options: dict[str, Any]) -> int:
    """Open the engine that `options` describe and answer."""
    in_process = options.get("socket") is None
    config = EngineConfig(
        model=Path(options["model"]),
        pool_bytes=options["pool_bytes"],
        store=_own_store(options) if in_process else None,
        open_store=None if in_process else partial(_daemons_store, Path(options["socket"])),
        # The table says what a restore takes: computing part of it beside would blur the figure.
        restore=RestoreMode.LOAD,
    )
    with Engine.open(config) as engine:
        below = engine.store
        assert below is not None
        reply({"ready": True, "device": engine.stats().device})
        for line in sys.stdin:
            reply(answer(engine, below, json.loads(line)))
    return 0


def _own_store(options: dict[str, Any]) -> StoreConfig:
    return StoreConfig(
        page_bytes=1,  # the engine knows its model's
        host_bytes=options["host_bytes"],
        host_arena_path=Path(options["arena"]),
        nvme_root=Path(options["nvme"]),
        nvme_bytes=options["nvme_bytes"],
        rules=StoreRules(write_policy=WritePolicy.WRITE_THROUGH),
    )


def _daemons_store(socket: Path, page_bytes: int, fingerprint: Fingerprint) -> PageStore:
    return Client(socket, page_bytes, fingerprint, name="tierkv demo")


def answer(engine: Engine, store: PageStore, command: dict[str, Any]) -> dict[str, Any]:
    """Do one command."""
    if command["do"] == "generate":
        params = SamplingParams(max_tokens=command["max_tokens"], ignore_eos=True)
        output = engine.generate([command["prompt"]], params, cache_salt=command["salt"])[0]
        return {
            "ttft_s": output.ttft_s,
            "token_ids": output.token_ids,
            "text": output.text,
            "cached": {
                "gpu": output.cached.gpu,
                "host": output.cached.host,
                "nvme": output.cached.nvme,
                "remote": output.cached.remote,
            },
            "error": output.error,
        }
    if command["do"] == "flush":
        return {"durable": engine.flush(FLUSH_S)}
    if command["do"] == "drop":
        pages = engine.drop_gpu_cache()
        if command["tier"] == TierName.HOST:
            engine.flush(FLUSH_S)
            assert isinstance(store, TieredStore), "a daemon's pages are dropped by the daemon"
            pages = store.trim(TierName.HOST, 0)
        return {"pages": pages}
    raise AssertionError(f"unknown command {command}")


def reply(message: dict[str, Any]) -> None:
    """Write one JSON line."""
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
