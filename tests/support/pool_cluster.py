"""Daemons that form a pool, each on a host of its own, with a relay in front of each that can lie.

    host n:  daemon at 10.77.0.n+1:7422  <--  relay at :7423  <--  the other hosts' member lists

Clients reach a daemon by its socket file, from outside. Everything under one folder that the
caller removes; everything that waits has a bound.
"""

from __future__ import annotations

import random
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tests.support.daemon_process import (
    PAGE_BYTES,
    ROOT,
    START_S,
    DaemonProcess,
    small_config,
)
from tests.support.pages import page_content, page_key, put_store
from tests.support.worker_process import Worker
from tierkv.client.client import Client
from tierkv.demo.netns import Network
from tierkv.storage.closing import Closing
from tierkv.storage.types import CommitOutcome, PageKey

PORT = 7422
RELAY_PORT = 7423
GRACE_S = 5.0
"""A request may be seen to end so long after its deadline: two cores, many processes."""


class Relay:
    """tests/support/processes/fault_proxy.py on one host."""

    def __init__(self, network: Network, host: int, seed: int) -> None:
        address = network.address(host)
        self._process = subprocess.Popen(
            network.command(
                host,
                [
                    *(sys.executable, "-m", "tests.support.processes.fault_proxy"),
                    *(address, str(RELAY_PORT), address, str(PORT), str(seed)),
                ],
            ),
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._line().startswith("ready")

    def set_mode(self, mode: str) -> None:
        """Behave so from now on; see the relay."""
        assert self._process.stdin is not None
        self._process.stdin.write(mode + "\n")
        self._process.stdin.flush()
        assert self._line() == mode

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()

    def _line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()


class Cluster(Closing):
    """A pool of daemons on the hosts of `network`."""

    def __init__(
        self,
        network: Network,
        folder: Path,
        seed: int,
        page_bytes: int = PAGE_BYTES,
        pool: dict[str, Any] | None = None,
        changes: Callable[[int], dict[str, Any]] = lambda host: {},
        modules: dict[int, str] | None = None,
    ) -> None:
        """`pool` goes over the settings of every pool, `changes(host)` over each daemon's;
        `modules` are what runs on a host in place of the ordinary daemon."""
        self.network = network
        self.page_bytes = page_bytes
        self._folder = folder
        self._pool = pool or {}
        self._changes = changes
        self._modules = modules or {}
        self._clients: dict[int, Client] = {}
        self.relays = [Relay(network, host, seed + host) for host in range(network.hosts)]
        self.daemons: list[DaemonProcess] = []
        try:
            for host in range(network.hosts):
                self.daemons.append(self._start(host))
            for daemon in self.daemons:
                daemon.await_ready()
        except BaseException:
            self.close()
            raise

    def settings(self, host: int) -> dict[str, Any]:
        """What the daemon of a host is told."""
        folder = self._folder / f"n{host}"
        folder.mkdir(exist_ok=True)
        others = [each for each in range(self.network.hosts) if each != host]
        pool = {
            "listen": f"{self.network.address(host)}:{PORT}",
            "members": [f"{self.network.address(each)}:{RELAY_PORT}" for each in others],
            "key": "00" * 32,
            "replicas": 1,
            "host_share": 0.5,
            "nvme_share": 0.5,
            "heartbeat_s": 0.1,
            "suspect_s": 1.0,
            "connect_s": 1.0,
            "lease_s": 2.0,
            "transfer_s": 2.0,
            "store_s": 2.0,
            "breaker_open_s": 0.5,
            **self._pool,
        }
        return {**small_config(folder, self.page_bytes), "pool": pool, **self._changes(host)}

    def client(self, host: int) -> Client:
        """A client of a host's daemon, made when first asked for."""
        if host not in self._clients:
            path = self.daemons[host].config.socket_path
            self._clients[host] = Client(path, self.page_bytes)
        return self._clients[host]

    def kill(self, host: int) -> None:
        """kill -9 the daemon of a host."""
        self.daemons[host].kill()

    def restart(self, host: int) -> None:
        """Start the daemon of a host again, with what it left behind."""
        self.daemons[host] = self._start(host)
        self.daemons[host].await_ready()

    def start_worker(self, host: int) -> Worker:
        """A worker of a host's daemon; the caller kills it."""
        return Worker(self.daemons[host], self.page_bytes)

    def await_live(self, hosts: Sequence[int] | None = None) -> None:
        """Wait until each of these hosts (None: all) sees all the others of them live."""
        wanted = range(self.network.hosts) if hosts is None else hosts
        for host in wanted:
            self.daemons[host].await_status(
                f"host {host} sees {len(wanted) - 1} live members",
                lambda status: (
                    sum(member["live"] for member in status["pool"]["members"]) >= len(wanted) - 1
                ),
            )

    def await_copied(self, host: int) -> None:
        """Wait until no copy to a peer is queued or under way on a host."""
        self.daemons[host].await_status(
            f"host {host} has no copies to make",
            lambda status: all(
                not each["remote"]["pushes_queued"] for each in status["classes"] if each["remote"]
            ),
        )

    def await_known(self, host: int, keys: Sequence[PageKey]) -> None:
        """Wait until a host knows where each of `keys` is: its index follows by heartbeats."""
        deadline = time.monotonic() + START_S
        client = self.client(host)
        while None in client.lookup(keys):
            missing = client.lookup(keys).count(None)
            assert time.monotonic() < deadline, f"host {host} never learnt of {missing} pages"

    def check(self) -> None:
        """Every invariant of every daemon that runs."""
        for daemon in self.daemons:
            if daemon.process.poll() is None:
                daemon.check()

    def close(self) -> None:
        for client in self._clients.values():
            client.close()
        for daemon in self.daemons:
            daemon.__exit__(None, None, None)
        for relay in self.relays:
            relay.close()

    def _start(self, host: int) -> DaemonProcess:
        module = self._modules.get(host, "tests.support.daemon_process")
        return DaemonProcess(self.settings(host), module, self.network.command(host, []))


class Load:
    """Clients of every host that store and fetch without pause; any wrong byte is an error.

    Pages and their content follow from numbers, so whoever fetches one knows what it must hold.
    """

    def __init__(self, cluster: Cluster, seed: int, threads_per_host: int = 1) -> None:
        self._cluster = cluster
        self._stopping = threading.Event()
        self._wrong = threading.Event()
        self._lock = threading.Lock()
        self._numbers: list[int] = []
        self._next = 0
        self.counts: Counter[str] = Counter()
        self.errors: list[str] = []
        self._threads = [
            threading.Thread(target=self._run, args=(host, random.Random(f"{seed}/{host}/{n}")))
            for host in range(cluster.network.hosts)
            for n in range(threads_per_host)
        ]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join(START_S)
            assert not thread.is_alive(), "a request hangs"

    def go_on(self, seconds: float) -> None:
        """Let the load run on for so long, or until something is wrong."""
        self._wrong.wait(seconds)

    def _run(self, host: int, rng: random.Random) -> None:
        path = self._cluster.daemons[host].config.socket_path
        try:
            with Client(path, self._cluster.page_bytes) as client:
                while not self._stopping.is_set():
                    if rng.random() < 0.3:
                        self._put(client, rng)
                    else:
                        self._get(client, host, rng)
        except Exception as error:  # noqa: BLE001
            # Whatever it is, the test that started this thread must hear of it.
            self._note(f"host {host}: {type(error).__name__}: {error}")

    def _put(self, client: Client, rng: random.Random) -> None:
        with self._lock:
            numbers = list(range(self._next, self._next + rng.randint(1, 6)))
            self._next = numbers[-1] + 1
        outcomes = put_store(client, [page_key(number) for number in numbers])
        stored = [n for n, was in zip(numbers, outcomes, strict=False) if was in _THERE]
        with self._lock:
            self._numbers += stored
            self.counts["stored"] += len(stored)

    def _get(self, client: Client, host: int, rng: random.Random) -> None:
        with self._lock:
            known = self._numbers
            numbers = [rng.choice(known) for _ in range(rng.randint(1, 8))] if known else []
        if not numbers:
            self._stopping.wait(0.01)
            return
        keys = [page_key(number) for number in dict.fromkeys(numbers)]
        deadline_s = rng.choice((0.2, 1.0, 3.0))
        started = time.monotonic()
        with client.fetch(keys, deadline_s).take(deadline_s) as lease:
            spent_s = time.monotonic() - started
            wrong = [
                key
                for key, view in zip(lease.keys, lease.views, strict=True)
                if bytes(view) != page_content(key, client.page_bytes)
            ]
            counted = Counter(tier.value for tier in lease.tiers)
            intact = lease.intact
        with self._lock:
            self.counts.update(counted)
            self.counts["missed"] += len(keys) - len(lease.keys)
            if wrong and intact:
                self._note(f"host {host}: wrong bytes under {wrong[0].hex()}")
            if spent_s > deadline_s + GRACE_S:
                self._note(f"host {host}: {spent_s:.1f} s for a deadline of {deadline_s}")

    def _note(self, error: str) -> None:
        self.errors.append(error)
        self._wrong.set()


_THERE = (CommitOutcome.COMMITTED, CommitOutcome.EXISTS)
