"""The in-process remote passes the suite that every remote tier passes."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path

from tests.support.memory_remote import Medium, MemoryRemote
from tests.unit.storage.remote_conformance import (
    HOST_PAGES,
    PAGE_BYTES,
    Pair,
    RemoteConformance,
    between,
)
from tierkv.storage.store import StoreConfig, TieredStore
from tierkv.storage.tiers.host import HostTier
from tierkv.storage.types import PageKey


class TestMemoryRemote(RemoteConformance):
    """What is put on one side is copied to the medium, from where the other side pulls it."""

    lookup_waits = False

    def open_pair(self, folder: Path) -> Pair:
        medium = Medium()
        config = StoreConfig(
            page_bytes=PAGE_BYTES, host_bytes=HostTier.capacity_for(PAGE_BYTES, HOST_PAGES)
        )
        stores = [TieredStore.open(config) for _ in range(2)]
        remotes = [
            MemoryRemote(medium, pages_max=self.queue_pages, lookup_waits=self.lookup_waits)
            for _ in stores
        ]
        for store, remote in zip(stores, remotes, strict=True):
            store.attach_remote(remote)
        return Pair(stores[0], remotes[0], stores[1], remotes[1])

    def stalled(self, pair: Pair) -> AbstractContextManager[None]:
        remote = pair.near_remote
        assert isinstance(remote, MemoryRemote)
        return between(remote.stall, remote.release)

    def damage(self, pair: Pair, key: PageKey) -> None:
        assert isinstance(pair.near_remote, MemoryRemote)
        pair.near_remote.medium.flip(key)

    def forget(self, pair: Pair, key: PageKey) -> None:
        assert isinstance(pair.near_remote, MemoryRemote)
        pair.near_remote.medium.drop(key)


class TestMemoryRemoteThatIsAsked(TestMemoryRemote):
    """The same, where holds() knows only what ask() found out."""

    lookup_waits = True
