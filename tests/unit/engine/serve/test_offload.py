"""Computed pages wait for their turn to leave; the queue is bounded and never in the way."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from tests.support.memory_tier import MemoryHostTier
from tierkv.engine.cache.page_pool import PagePool
from tierkv.engine.cache.prefix_cache import PrefixCache
from tierkv.engine.cache.radix import RadixTree
from tierkv.engine.serve.offload import Offload
from tierkv.storage.policy import WritePolicy
from tierkv.storage.store import TieredStore
from tierkv.storage.transfer.cpu import CpuTransfer
from tierkv.storage.types import PageKey, TierName, pack_tokens

PAGE = 2
NAMESPACE = b"n" * 32
DEADLINE_S = 20.0
IN_FLIGHT = 8


class Rig:
    """A cache of 32 pages over a store in memory."""

    def __init__(self) -> None:
        self.kv = torch.arange(2 * 2 * 32 * PAGE * 4, dtype=torch.float32).view(
            2, 2, 32, PAGE, 1, 4
        )
        self.transfer = CpuTransfer(self.kv)
        self.store = TieredStore(MemoryHostTier(self.transfer.page_bytes, 64))
        self.cache = PrefixCache(RadixTree(PAGE), PagePool(32, PAGE), None)
        self.offload = Offload(
            self.cache,
            self.store,
            self.transfer,
            WritePolicy.WRITE_THROUGH,
            selective_hits=2,
            in_flight_pages_max=IN_FLIGHT,
            wake=lambda: None,
        )

    def publish(self, run: int, pages: int) -> list[PageKey]:
        """Put a run of computed pages into the tree and report it."""
        own = self.cache.allocate(pages)
        assert own is not None
        keys = [PageKey(bytes([run, page]) * 16) for page in range(pages)]
        tokens = pack_tokens([run * 100 + token for token in range(pages * PAGE)])
        result = self.cache.insert(tokens, own, NAMESPACE, keys)
        hold = self.cache.lock(result.match)
        self.offload.published(hold, keys, 0)
        self.offload.published(hold, keys, 0)
        self.cache.unlock(hold)
        self.check()
        return keys

    def check(self) -> None:
        self.offload.check()
        self.cache.check(np.empty(0, np.int32))

    def stored(self, keys: list[PageKey]) -> int:
        return self.store.lookup(keys).count(TierName.HOST)


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig()
    yield made
    assert made.offload.drain(DEADLINE_S)
    made.check()
    assert made.cache.stats().protected_tokens == 0
    made.transfer.close()
    made.store.check()
    made.store.close()


def test_p2_computed_pages_leave_no_faster_than_decoding_bears(rig: Rig) -> None:
    keys = rig.publish(1, 6)
    assert rig.offload.stats().pending == 6, "none has left, and none is queued twice"
    assert not rig.offload.copying
    assert rig.offload.start_pending(0) == 0
    assert rig.offload.start_pending(2) == 2
    rig.check()
    assert rig.offload.stats().pending == 4
    assert rig.offload.drain(DEADLINE_S)
    assert rig.stored(keys) == 6
    assert rig.offload.stats().copied == 6


def test_p2_copies_in_flight_are_bounded_whatever_waits(rig: Rig) -> None:
    rig.publish(1, 6)
    rig.publish(2, 2)
    rig.publish(3, 5)
    assert rig.offload.start_pending(None) <= IN_FLIGHT
    assert rig.offload.stats().in_flight <= IN_FLIGHT


def test_c4_a_full_queue_lets_the_oldest_go_and_counts_them(rig: Rig) -> None:
    first = rig.publish(1, 6)
    second = rig.publish(2, 5)
    stats = rig.offload.stats()
    assert (stats.pending, stats.put_off) == (5, 6)
    assert rig.offload.drain(DEADLINE_S)
    assert (rig.stored(first), rig.stored(second)) == (0, 5)


def test_what_waits_gives_way_to_who_needs_room(rig: Rig) -> None:
    rig.publish(1, 6)
    assert rig.cache.available_pages == 26
    assert rig.offload.put_off_pending()
    rig.check()
    assert rig.cache.available_pages == 32
    assert rig.offload.stats().put_off == 6
    assert not rig.offload.put_off_pending()
