"""Two nodes of a pool in two processes: the pool part of `tierkv bench remote`.

Owns this process's node and the child, which is the other one. Pages travel over the pool's own
path: the other node reads them out of this node's arena and acknowledges (put), this node leases
and reads them (get); both verify the checksum of every page.

    python -m tierkv.bench.remote_pool PAGE_BYTES BATCH PORT OTHER_PORT KEY        is the child
"""

from __future__ import annotations

import secrets
import sys
import time

from tierkv.bench.child import HOST, Child, free_ports, say_ready
from tierkv.bench.filled import filled, numbered_keys, pages_of
from tierkv.storage.checksum import copy_bytes, payload_checksum
from tierkv.storage.clock import SystemClock
from tierkv.storage.closing import Closing
from tierkv.storage.pool.config import Address, PoolConfig
from tierkv.storage.pool.pool import Pool, open_pool
from tierkv.storage.pool.remote import PoolRemote
from tierkv.storage.store import StoreConfig, TieredStore
from tierkv.storage.tiers.host import HostTier
from tierkv.storage.types import CommitOutcome, PageKey, TierName

WAIT_S = 30.0
POLL_S = 0.01


class PoolPair(Closing):
    """put() stores a new batch of pages on the other node; get() brings the latest back."""

    def __init__(self, page_bytes: int, batch: int) -> None:
        ports = free_ports(2)
        key = secrets.token_bytes(32)
        self._batch = batch
        self._child = Child(
            "tierkv.bench.remote_pool",
            *map(str, (page_bytes, batch, ports[1], ports[0], key.hex())),
        )
        self._pool, self._store, self._remote = _open_node(
            page_bytes, batch, ports[0], ports[1], key
        )
        self._pages = pages_of(filled(page_bytes * batch), page_bytes)
        self._checksums = [payload_checksum(page) for page in self._pages]
        self._keys: list[PageKey] = []
        self._next = 1 << 32
        self._await_member()

    def close(self) -> None:
        """Leave the pool and end the other node."""
        self._store.close()
        self._pool.close(WAIT_S)
        self._child.close()

    def put(self) -> None:
        """Commit new pages here and wait until the other node has acknowledged each."""
        self._store.drop(self._keys, TierName.HOST)
        self._next += self._batch
        self._keys = numbered_keys(self._next, self._batch)
        with self._store.reserve(self._batch) as held:
            for view, page in zip(held.views, self._pages, strict=True):
                copy_bytes(view, page)
            outcomes = held.commit(self._keys, self._checksums)
        assert set(outcomes) == {CommitOutcome.COMMITTED}, outcomes
        assert self._remote.flush(WAIT_S), "the other node did not take the pages"

    def get(self) -> None:
        """Drop the local copies and bring the pages back from the other node."""
        self._store.drop(self._keys, TierName.HOST)
        assert set(self._store.lookup(self._keys)) == {TierName.REMOTE}
        with self._store.fetch(self._keys, WAIT_S).take(WAIT_S) as lease:
            assert len(lease.keys) == self._batch, len(lease.keys)

    def _await_member(self) -> None:
        deadline = time.monotonic() + WAIT_S
        while not any(member["live"] for member in self._pool.status()["members"]):
            if time.monotonic() > deadline:
                raise RuntimeError("bench remote: the other node did not join")
            time.sleep(POLL_S)


def _open_node(
    page_bytes: int, batch: int, port: int, other: int, key: bytes
) -> tuple[Pool, TieredStore, PoolRemote]:
    config = PoolConfig(
        listen=Address(HOST, port),
        members=(Address(HOST, other),),
        key=key,
        replicas=2,
        host_share=1.0,
        batch_pages=batch,
    )
    pool = open_pool(config, None, SystemClock())
    pool.start()
    capacity = HostTier.capacity_for(page_bytes, 4 * batch)
    store = TieredStore.open(StoreConfig(page_bytes=page_bytes, host_bytes=capacity))
    remote = pool.attach(page_bytes)
    store.attach_remote(remote)
    return pool, store, remote


def _serve(page_bytes: int, batch: int, port: int, other: int, key: bytes) -> int:
    pool, store, _ = _open_node(page_bytes, batch, port, other, key)
    say_ready()
    sys.stdin.read()
    store.close()
    pool.close(WAIT_S)
    return 0


if __name__ == "__main__":
    _numbers = [int(word) for word in sys.argv[1:5]]
    sys.exit(_serve(_numbers[0], _numbers[1], _numbers[2], _numbers[3], bytes.fromhex(sys.argv[5])))
