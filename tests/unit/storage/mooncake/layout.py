"""Stores with a Mooncake remote over the fake library."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from tests.unit.storage.mooncake.fake_library import Cluster, FakeLibrary
from tierkv.storage.clock import SystemClock
from tierkv.storage.mooncake.client import MooncakeClient
from tierkv.storage.mooncake.config import MooncakeConfig
from tierkv.storage.mooncake.remote import MooncakeRemote
from tierkv.storage.mooncake.service import Mooncake
from tierkv.storage.store import TieredStore
from tierkv.storage.store_config import StoreConfig
from tierkv.storage.tiers.host import HostTier

WAIT_S = 30.0


@dataclass
class Node:
    """One store and its end of the cluster."""

    store: TieredStore
    remote: MooncakeRemote
    service: Mooncake
    library: FakeLibrary

    def close(self) -> None:
        self.library.gate.set()
        self.store.close()
        assert self.service.close(WAIT_S)


def open_node(
    cluster: Cluster, page_bytes: int, host_pages: int, config: MooncakeConfig | None = None
) -> Node:
    """A host-only store whose remote tier is `cluster`."""
    config = config or MooncakeConfig("127.0.0.1:1")
    library = FakeLibrary(cluster)
    service = Mooncake(config, MooncakeClient(library, None), SystemClock())
    room = HostTier.capacity_for(page_bytes, host_pages)
    store = TieredStore.open(StoreConfig(page_bytes=page_bytes, host_bytes=room))
    remote = service.attach(page_bytes)
    store.attach_remote(remote)
    return Node(store, remote, service, library)


@contextmanager
def node_of(
    cluster: Cluster, page_bytes: int, host_pages: int = 32, config: MooncakeConfig | None = None
) -> Iterator[Node]:
    """open_node, checked and closed."""
    node = open_node(cluster, page_bytes, host_pages, config)
    try:
        yield node
        node.store.check()
        node.service.check()
    finally:
        node.close()
