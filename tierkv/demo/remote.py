"""The demo's second half: a prefix that outlives the node it was computed on.

Three daemons, each on a host of its own (tierkv.demo.netns), form a pool. Host 1 keeps no pages for
others, so that what it restores comes over the network.

    case            the worker asks   its prefix comes from
    remote          host 1            the daemon of host 0, whose worker was killed
    remote_replica  host 1, emptied   the copy on host 2; the daemon of host 0 was killed

Owns the daemons and their files. Called by tierkv.demo.run. Needs root.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from tierkv.client.async_client import AsyncClient
from tierkv.client.settings import ClientSettings
from tierkv.demo.netns import Network
from tierkv.storage.clock import SystemClock
from tierkv.storage.closing import Closing
from tierkv.storage.errors import TierError, TierKVError

HOSTS = 3
START_S = 60.0
SETTLE_S = 60.0
PAUSE_S = 0.1
STOP_S = 30.0
DROP_S = 30.0

log = logging.getLogger(__name__)

Status = dict[str, Any]


class Nodes(Closing):
    """The daemons of a pool. A context manager: leaving it ends them and removes everything."""

    def __init__(self, host_bytes: int) -> None:
        """Make the hosts and start a daemon on each.

        Raises ConfigError, one line, when this process may not make network namespaces.
        """
        self._network = Network(HOSTS)
        self._daemons: dict[int, subprocess.Popen[bytes]] = {}
        shared = Path("/dev/shm")
        base = shared if os.access(shared, os.W_OK) else None
        self._folder = Path(tempfile.mkdtemp(prefix="tkv-demo-", dir=base))
        self._clock = SystemClock()
        try:
            key = self._folder / "pool.key"
            key.touch(mode=0o600)
            key.write_text(secrets.token_hex(32) + "\n")
            for host in range(HOSTS):
                self._daemons[host] = self._start(host, host_bytes, key)
            for host in range(HOSTS):
                self._await(host, "it to meet the others", _sees_all, START_S)
        except BaseException:
            self.close()
            raise

    def socket(self, host: int) -> Path:
        """Where workers reach the daemon of a host."""
        return self._folder / f"host{host}.sock"

    def await_copies(self, host: int) -> None:
        """Wait until every copy that a host wanted elsewhere was acknowledged."""
        self._await(host, "its copies to be acknowledged", _copied, SETTLE_S)

    def await_known(self, host: int, pages: int) -> None:
        """Wait until a host that serves that page size knows of so many pages elsewhere."""

        def knows(status: Status) -> bool:
            found = [each["remote"]["known_pages"] for each in status["classes"] if each["remote"]]
            return bool(sum(found) >= pages)

        self._await(host, f"it to know {pages} pages of others", knows, SETTLE_S)

    def pages(self, host: int) -> int:
        """Pages in the host memory of one host."""
        status = asyncio.run(_status(self.socket(host)))
        return sum(each["tiers"]["host"]["committed_pages"] for each in status["classes"])

    def empty(self, host: int) -> None:
        """Remove every page of every namespace of a host."""
        asyncio.run(_empty(self.socket(host)))

    def kill(self, host: int) -> None:
        """kill -9 the daemon of a host."""
        daemon = self._daemons.pop(host)
        daemon.send_signal(signal.SIGKILL)
        daemon.wait(STOP_S)

    def close(self) -> None:
        """End the daemons, remove their files and the hosts. Idempotent."""
        for host in list(self._daemons):
            self.kill(host)
        shutil.rmtree(self._folder, ignore_errors=True)
        self._network.close()

    def _start(self, host: int, host_bytes: int, key: Path) -> subprocess.Popen[bytes]:
        address = self._network.address
        keeps = "0%" if host == 1 else "100%"
        settings = {
            "daemon": {"socket": str(self.socket(host)), "stop": "5s"},
            "host": {"directory": str(self._folder / f"host{host}"), "size": str(host_bytes)},
            "http": {"bind": "none"},
            "log": {"level": "error"},
            "pool": {
                "listen": address(host),
                "members": [address(other) for other in range(HOSTS) if other != host],
                "key_file": str(key),
                "replicas": "1",
                "host_share": keeps,
            },
        }
        file = self._folder / f"host{host}.yaml"
        file.write_text(yaml.safe_dump(settings))
        command = [sys.executable, "-m", "tierkv.cli.main", "serve", "--config", str(file)]
        # Variables of the user are about their own daemon.
        environment = {
            name: value for name, value in os.environ.items() if not name.startswith("TIERKV_")
        }
        return subprocess.Popen(
            self._network.command(host, command),
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )

    def _await(
        self, host: int, what: str, wanted: Callable[[Status], bool], timeout_s: float
    ) -> None:
        deadline = self._clock.monotonic() + timeout_s
        while True:
            if self._daemons[host].poll() is not None:
                raise TierKVError(f"demo: the daemon of host {host} has ended; see its log above")
            try:
                if wanted(asyncio.run(_status(self.socket(host)))):
                    return
            except TierError as error:
                log.debug("host=%d not there yet: %s", host, error)
            if self._clock.monotonic() > deadline:
                raise TierKVError(f"demo: waited {timeout_s:.0f} s for host {host}: {what}")
            asyncio.run(asyncio.sleep(PAUSE_S))


def _sees_all(status: Status) -> bool:
    members = (status["pool"] or {}).get("members", ())
    return sum(bool(each["live"]) for each in members) == HOSTS - 1


def _copied(status: Status) -> bool:
    remotes = [each["remote"] for each in status["classes"] if each["remote"]]
    return all(not each["pushes_queued"] and each["pushed"] for each in remotes)


async def _status(socket: Path) -> Status:
    async with AsyncClient(socket) as client:
        return await client.stats()


async def _empty(socket: Path) -> None:
    async with AsyncClient(socket, settings=ClientSettings(call_s=DROP_S)) as client:
        for row in await client.namespaces():
            if row["namespace"]:
                await client.drop(namespace=row["namespace"])
