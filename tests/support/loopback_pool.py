"""Daemons that form a pool on 127.0.0.2, .3, ...: no root needed, nothing between them.

Clients reach each by its socket file. Everything lies under one folder that the caller removes, and
everything that waits has a bound. tests/support/pool_cluster.py is the same in network namespaces.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.support.daemon_process import PAGE_BYTES, DaemonProcess, small_config
from tests.support.pages import page_content, page_key, put_store
from tierkv.bench.child import free_ports
from tierkv.client.client import Client
from tierkv.storage.types import CommitOutcome, PageKey, TierName

WAIT_S = 20.0
KEY = "11" * 32
HOSTS = 3
NO_COPIES = {"copy_after": 1000, "hot_after": 1000, "rebalance_bytes_per_s": 0}
"""Pages stay where they were committed."""


class Nodes:
    """Daemons of one pool, one on each of 127.0.0.2, .3, ... A context manager."""

    def __init__(self, folder: Path, hosts: int = HOSTS, **pool: Any) -> None:
        self._folder = folder
        self._pool = pool
        self._clients: dict[int, Client] = {}
        self.addresses = [f"127.0.0.{host + 2}" for host in range(hosts)]
        self.ports = [free_ports(1, address)[0] for address in self.addresses]
        self.http_ports = free_ports(hosts)
        self.daemons: list[DaemonProcess] = []

    def __enter__(self) -> Nodes:
        for host in range(len(self.addresses)):
            self.daemons.append(DaemonProcess(self.settings(host)))
        for daemon in self.daemons:
            daemon.await_ready()
        self.await_live()
        return self

    def __exit__(self, *exception: object) -> None:
        for client in self._clients.values():
            client.close()
        for daemon in self.daemons:
            daemon.__exit__(*exception)

    def settings(self, host: int) -> dict[str, Any]:
        place = self._folder / f"n{host}"
        place.mkdir(exist_ok=True)
        listen = [f"{a}:{p}" for a, p in zip(self.addresses, self.ports, strict=True)]
        pool = {
            "listen": listen[host],
            "members": [each for each in listen if each != listen[host]],
            "key": KEY,
            "host_share": 0.5,
            "nvme_share": 0.5,
            "heartbeat_s": 0.1,
            "suspect_s": 1.0,
            **self._pool,
        }
        http = {"http_host": "127.0.0.1", "http_port": self.http_ports[host], "http_token": "t"}
        return small_config(place, pool=pool, **http)

    def client(self, host: int) -> Client:
        if host not in self._clients:
            self._clients[host] = Client(self.daemons[host].config.socket_path, PAGE_BYTES)
        return self._clients[host]

    def await_live(self, others: int | None = None) -> None:
        wanted = len(self.addresses) - 1 if others is None else others
        for daemon in self.daemons:
            if daemon.process.poll() is None:
                daemon.await_status(
                    f"{wanted} live members",
                    lambda status: (
                        sum(bool(m["live"]) for m in status["pool"]["members"]) == wanted
                    ),
                )

    def put(self, host: int, *numbers: int) -> list[PageKey]:
        """Commit pages on a host and wait until the copies it wants are acknowledged."""
        keys = [page_key(number) for number in numbers]
        assert set(put_store(self.client(host), keys)) == {CommitOutcome.COMMITTED}
        self.await_copied(host)
        return keys

    def await_copied(self, host: int) -> None:
        self.daemons[host].await_status(
            "no copies to make",
            lambda status: (
                not any(
                    each["remote"]["pushes_queued"] for each in status["classes"] if each["remote"]
                )
            ),
        )

    def take(self, host: int, keys: list[PageKey]) -> list[TierName]:
        """Fetch pages on a host, each as itself; their tiers. Every byte is compared."""
        client = self.client(host)
        await_true("every page is known", lambda: None not in client.lookup(keys))
        tiers: list[TierName] = []
        for key in keys:
            with client.fetch([key], WAIT_S).take(WAIT_S) as lease:
                assert lease.keys == [key], f"{key.hex()} was not found"
                assert bytes(lease.views[0]) == page_content(key, PAGE_BYTES)
                tiers += lease.tiers
        return tiers


def await_true(what: str, wanted: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not wanted():
        assert time.monotonic() < deadline, f"never came true: {what}"
