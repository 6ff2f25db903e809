"""A Mooncake Store passes the suite of every remote tier, over the fake library."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.unit.storage.mooncake.fake_library import Cluster
from tests.unit.storage.mooncake.layout import Node, open_node
from tests.unit.storage.remote_conformance import (
    HOST_PAGES,
    PAGE_BYTES,
    WAIT_S,
    Pair,
    RemoteConformance,
)
from tierkv.storage.mooncake.config import MooncakeConfig
from tierkv.storage.mooncake.values import HEADER_BYTES, key_text
from tierkv.storage.types import PageKey


class MooncakePair(Pair):
    """And what the suite need not know."""

    cluster: Cluster
    node: Node


class TestMooncake(RemoteConformance):
    """The suite, with two stores on one cluster."""

    queue_pages = 24
    running_pages = 8

    def open_pair(self, folder: Path) -> Pair:
        config = MooncakeConfig("127.0.0.1:1", pull_pages=24, batch_pages=4, pull_workers=2)
        cluster = Cluster()
        near, far = (open_node(cluster, PAGE_BYTES, HOST_PAGES, config) for _ in range(2))
        pair = MooncakePair(near.store, near.remote, far.store, far.remote)
        pair.closers = [lambda: near.service.close(WAIT_S), lambda: far.service.close(WAIT_S)]
        pair.cluster, pair.node = cluster, near
        return pair

    @contextmanager
    def stalled(self, pair: Pair) -> Iterator[None]:
        assert isinstance(pair, MooncakePair)
        pair.node.library.gate.clear()
        try:
            yield
        finally:
            pair.node.library.gate.set()

    def damage(self, pair: Pair, key: PageKey) -> None:
        assert isinstance(pair, MooncakePair)
        pair.cluster.flip(key_text(key, PAGE_BYTES), HEADER_BYTES + PAGE_BYTES // 2)

    def forget(self, pair: Pair, key: PageKey) -> None:
        assert isinstance(pair, MooncakePair)
        with pair.cluster.lock:
            del pair.cluster.values[key_text(key, PAGE_BYTES)]
