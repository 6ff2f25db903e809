"""PoolRemote against the contract of every remote tier, and where its pulls go."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path

from tests.support.pool_nodes import NEVER, Node, free_address, start_node, until
from tests.unit.storage.remote_conformance import Pair, RemoteConformance


class TestPoolRemote(RemoteConformance):
    """Two nodes; what is put on the far one is served out of its arena, not copied."""

    def open_pair(self, folder: Path) -> Pair:
        addresses = [free_address(), free_address()]
        near, far = (
            start_node(
                address,
                [other for other in addresses if other != address],
                pull_pages=self.queue_pages,
                batch_pages=4,
                copy_after=NEVER,
                hot_after=NEVER,
                lease_s=60.0,
                transfer_s=60.0,
            )
            for address in addresses
        )
        until(lambda: near.link(far).live and far.link(near).live, lambda: near.link(far).problem)
        self.near_node: Node = near
        return Pair(
            near.store,
            near.remote,
            far.store,
            far.remote,
            [lambda: near.pool.close(10.0), lambda: far.pool.close(10.0)],
        )

    def stalled(self, pair: Pair) -> AbstractContextManager[None]:
        return self.near_node.gate.stalled()
