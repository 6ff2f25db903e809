"""Mooncake Store over TCP beside the pool: the mooncake part of `tierkv bench remote`.

Owns a master, a store node and this process's client of the library used directly: put() stores
a batch on the node, get() brings the latest back into local memory. Values are bare pages.

    python -m tierkv.bench.remote_mooncake MASTER SEGMENT_BYTES        is the store node
"""

from __future__ import annotations

import itertools
import sys
from contextlib import ExitStack

from tierkv.bench.child import HOST, Child, free_ports, say_ready
from tierkv.bench.filled import filled, pages_of
from tierkv.bench.mooncake_master import start_master
from tierkv.storage.closing import Closing
from tierkv.storage.device import address_of
from tierkv.storage.errors import ConfigError
from tierkv.storage.mooncake.config import MooncakeConfig
from tierkv.storage.mooncake.library import StoreLibrary, new_store, replicate_config, set_up


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
        (port,) = free_ports(1)
        config = MooncakeConfig(f"{HOST}:{port}")
        library = new_store(config)
        master = start_master(port)
        self._stack.callback(master.wait)
        self._stack.callback(master.kill)
        child = Child("tierkv.bench.remote_mooncake", config.master, str(segment_bytes))
        self._stack.enter_context(child)
        if code := set_up(library, config, 0):
            raise ConfigError(f"mooncake: the client could not be set up, code {code}")
        self._stack.callback(library.close)
        return library


def _pieces(pages: list[memoryview]) -> tuple[list[list[int]], list[list[int]]]:
    """Addresses and sizes as the library takes them: one piece a page."""
    addresses = [[address_of(page)] for page in pages]
    return addresses, [[len(page)] for page in pages]


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
