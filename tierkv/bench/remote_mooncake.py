"""Mooncake Store over TCP beside the pool: the mooncake part of `tierkv bench remote`.

Owns a master, a store node and this process's client of the library used directly: put() stores
a batch on the node, get() brings the latest back into local memory. Values are bare pages.

    python -m tierkv.bench.remote_mooncake MASTER SEGMENT_BYTES        is the store node
"""

from __future__ import annotations

import importlib
import itertools
import socket
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

from tierkv.bench.child import Child, say_ready
from tierkv.bench.filled import filled, pages_of
from tierkv.storage.closing import Closing
from tierkv.storage.device import address_of
from tierkv.storage.errors import ConfigError
from tierkv.storage.mooncake.config import MooncakeConfig
from tierkv.storage.mooncake.library import StoreLibrary, new_store, replicate_config, set_up

HOST = "127.0.0.1"
START_S = 20.0
POLL_S = 0.05


class MooncakePair(Closing):
    """put() and get() move one batch of pages each. ConfigError where Mooncake is not installed."""

    def __init__(self, page_bytes: int, batch: int) -> None:
        self._sources = pages_of(filled(page_bytes * batch), page_bytes)
        self._targets = pages_of(filled(page_bytes * batch), page_bytes)
        self._keys: list[str] = []
        self._numbers = itertools.count()
        self._stack = ExitStack()
        try:
            self._library = self._open(8 * page_bytes * batch)
        except BaseException:
            self._stack.close()
            raise

    def close(self) -> None:
        """Leave the store and end its processes."""
        self._stack.close()

    def put(self) -> None:
        """Store the pages under new keys; the former ones are removed."""
        for key in self._keys:
            self._library.remove(key, True)
        self._keys = [f"bench/{next(self._numbers)}" for _ in self._sources]
        codes = self._library.batch_put_from_multi_buffers(
            self._keys, *_pieces(self._sources), replicate_config(1)
        )
        if any(codes):
            raise RuntimeError(f"bench mooncake: put failed with {codes}")

    def get(self) -> None:
        """Bring the pages that put() stored back."""
        codes = self._library.batch_get_into_multi_buffers(self._keys, *_pieces(self._targets))
        if min(codes) < len(self._targets[0]):
            raise RuntimeError(f"bench mooncake: get failed with {codes}")

    def _open(self, segment_bytes: int) -> StoreLibrary:
        port = _free_port()
        config = MooncakeConfig(f"{HOST}:{port}")
        library = new_store(config)
        self._stack.enter_context(_Master(port))
        child = Child("tierkv.bench.remote_mooncake", config.master, str(segment_bytes))
        self._stack.enter_context(child)
        if code := set_up(library, config, 0):
            raise ConfigError(f"mooncake: the client could not be set up, code {code}")
        self._stack.callback(library.close)
        return library


class _Master:
    """mooncake_master at a port, until the with block ends."""

    def __init__(self, port: int) -> None:
        package = importlib.import_module("mooncake")
        self._port = port
        self._process = subprocess.Popen(
            [
                Path(package.__path__[0]) / "mooncake_master",
                f"--rpc_port={port}",
                f"--rpc_address={HOST}",
                f"--metrics_port={_free_port()}",
                f"--metrics_host={HOST}",
                "--enable_metric_reporting=false",
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def __enter__(self) -> None:
        deadline = time.monotonic() + START_S
        with socket.socket() as probe:
            while probe.connect_ex((HOST, self._port)):
                if time.monotonic() > deadline or self._process.poll() is not None:
                    raise ConfigError("mooncake: mooncake_master did not start")
                time.sleep(POLL_S)

    def __exit__(self, *exception: object) -> None:
        self._process.kill()
        self._process.wait()


def _pieces(pages: list[memoryview]) -> tuple[list[list[int]], list[list[int]]]:
    """Addresses and sizes as the library takes them: one piece a page."""
    addresses = [[address_of(page)] for page in pages]
    return addresses, [[len(page)] for page in pages]


def _free_port() -> int:
    with socket.create_server((HOST, 0)) as probe:
        return int(probe.getsockname()[1])


def _serve(master: str, segment_bytes: int) -> int:
    config = MooncakeConfig(master)
    library = new_store(config)
    if code := set_up(library, config, segment_bytes):
        sys.stderr.write(f"bench mooncake: the store node could not be set up, code {code}\n")
        return 1
    say_ready()
    sys.stdin.read()
    return 0


if __name__ == "__main__":
    sys.exit(_serve(sys.argv[1], int(sys.argv[2])))
