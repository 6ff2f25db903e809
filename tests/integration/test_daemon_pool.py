"""Real daemons that form a pool on loopback: pages found from node to node, and every bad input."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.daemon_process import (
    PAGE_BYTES,
    ROOT,
    START_S,
    STOP_S,
    DaemonProcess,
    shared_folder,
    small_config,
)
from tests.support.pages import page_content, page_key, put_store
from tierkv.cli.main import main
from tierkv.client.client import Client
from tierkv.storage.types import CommitOutcome, PageKey, TierName

WAIT_S = 20.0
KEY = "11" * 32
HOSTS = 3
NO_COPIES = {"copy_after": 1000, "hot_after": 1000, "rebalance_bytes_per_s": 0}
"""Pages stay where they were committed."""

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="127.0.0.2 is loopback on Linux")


@pytest.fixture
def folder() -> Iterator[Path]:
    with shared_folder() as made:
        yield made


def free_port(host: str) -> int:
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


class Nodes:
    """Daemons of one pool, one on each of 127.0.0.2, .3, ... A context manager."""

    def __init__(self, folder: Path, hosts: int = HOSTS, **pool: Any) -> None:
        self._folder = folder
        self._pool = pool
        self._clients: dict[int, Client] = {}
        self.addresses = [f"127.0.0.{host + 2}" for host in range(hosts)]
        self.ports = [free_port(address) for address in self.addresses]
        self.http_ports = [free_port("127.0.0.1") for _ in range(hosts)]
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


def test_a_page_of_one_node_is_fetched_on_another(folder: Path) -> None:
    with Nodes(folder, hosts=2, **NO_COPIES) as nodes:
        keys = nodes.put(0, *range(40))
        assert nodes.take(1, keys) == [TierName.REMOTE] * 40
        # They are here now.
        assert TierName.REMOTE not in nodes.take(1, keys)
        (found,) = nodes.daemons[1].status()["classes"]
        assert found["restored_pages"]["remote"] == 40
        for daemon in nodes.daemons:
            daemon.check()


def test_a_killed_node_is_survived_by_its_copies(folder: Path) -> None:
    with Nodes(folder) as nodes:
        keys = nodes.put(0, *range(60))
        nodes.daemons[0].kill()
        nodes.await_live(1)
        for host in (1, 2):
            nodes.take(host, keys)
            nodes.daemons[host].check()


def test_a_node_that_comes_back_has_a_later_epoch(folder: Path) -> None:
    with Nodes(folder, hosts=2) as nodes:
        before = nodes.daemons[0].status()["pool"]["epoch"]
        keys = nodes.put(0, *range(20))
        nodes.daemons[0].kill()
        nodes.await_live(0)
        nodes.daemons[0] = DaemonProcess.started(nodes.settings(0))
        nodes.await_live()
        assert nodes.daemons[0].status()["pool"]["epoch"] > before
        nodes.take(1, keys)


def test_drain_leaves_nothing_hot_behind(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with Nodes(folder, **NO_COPIES) as nodes:
        keys = nodes.put(0, *range(30))
        for host in (1, 2):
            assert not nodes.daemons[host].status()["classes"], "copies were made already"
        file = config_file(folder, nodes, 0)
        capfd.readouterr()
        assert main(["drain", "--timeout", "20s", "--config", str(file), "--json"]) == 0
        answer = json.loads(capfd.readouterr().out)
        assert answer["drained"] and answer["durable"] and answer["pool"]["complete"]
        assert answer["pool"]["moved_pages"] == 30
        members = nodes.daemons[1].status()["pool"]["members"]
        assert any(member["leaving"] for member in members)
        nodes.daemons[0].kill()
        nodes.await_live(1)
        nodes.take(1, keys)
        nodes.take(2, keys)


def config_file(folder: Path, nodes: Nodes, host: int) -> Path:
    """Enough of a daemon's configuration for a command that looks for it."""
    config = nodes.daemons[host].config
    file = folder / f"n{host}.yaml"
    values = {
        "daemon": {"socket": str(config.socket_path)},
        "http": {"port": str(config.http_port), "token": "t"},
    }
    file.write_text(yaml.safe_dump(values))
    return file


def test_pages_of_others_are_the_pools_and_bounded(folder: Path) -> None:
    with Nodes(folder, hosts=2, host_share=0.1, nvme_share=0.0) as nodes:
        nodes.put(0, *range(100))
        (found,) = nodes.daemons[1].status()["classes"]
        bound = int(found["tiers"]["host"]["capacity_pages"] * 0.1)
        assert 0 < found["pool_pages"]["host"] <= bound
        (row,) = nodes.client(1).namespaces()
        assert row["tenant"] == "pool"


# Bad input, by the real command


@contextmanager
def served(folder: Path, pool: dict[str, Any], **sections: Any) -> Iterator[Served]:
    """`tierkv serve` with this pool section, serving its local tiers."""
    folder.mkdir(exist_ok=True)
    values = {
        "daemon": {"socket": str(folder / "d.sock"), "stop": "5s"},
        "host": {"directory": str(folder / "arenas"), "size": "4MiB"},
        "http": {"bind": "none"},
        "pool": pool,
        **sections,
    }
    file = folder / "tierkv.yaml"
    file.write_text(yaml.safe_dump(values))
    environment = {name: v for name, v in os.environ.items() if not name.startswith("TIERKV_")}
    process = subprocess.Popen(
        [sys.executable, "-m", "tierkv.cli.main", "serve", "--config", str(file)],
        cwd=ROOT,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    made = Served(process, folder / "d.sock", file)
    try:
        yield made
        made.stop()
    finally:
        process.kill()
        process.wait(STOP_S)


class Served:
    """One daemon of the real command."""

    def __init__(self, process: subprocess.Popen[str], path: Path, file: Path) -> None:
        self.process = process
        self.path = path
        self.file = file
        self.log = ""

    def status(self, capfd: pytest.CaptureFixture[str]) -> tuple[int, dict[str, Any]]:
        """Exit code and answer of `tierkv pool status --json`."""
        capfd.readouterr()
        code = main(["pool", "status", "--socket", str(self.path), "--json"])
        found: dict[str, Any] = json.loads(capfd.readouterr().out)
        return code, found

    def await_serving(self) -> None:
        """Wait until pages can be stored and read here."""
        with Client(self.path, PAGE_BYTES) as client:
            assert client.wait_connected(START_S), "the daemon does not serve"
            key = page_key(1)
            assert put_store(client, [key]) == [CommitOutcome.COMMITTED]
            with client.fetch([key], WAIT_S).take(WAIT_S) as lease:
                assert bytes(lease.views[0]) == page_content(key, PAGE_BYTES)

    def stop(self) -> None:
        """SIGTERM; what it wrote is in `log`."""
        self.process.send_signal(signal.SIGTERM)
        _, errors = self.process.communicate(timeout=STOP_S)
        self.log += errors
        assert self.process.returncode == 0, errors

    def lines(self, level: str = "WARNING|ERROR") -> list[str]:
        """What it logged."""
        return [line for line in self.log.splitlines() if re.match(f"tierkv: ({level}) ", line)]


def key_in(folder: Path, data: str = KEY, mode: int = 0o600) -> str:
    folder.mkdir(exist_ok=True)
    path = folder / "pool.key"
    path.write_text(data + "\n")
    path.chmod(mode)
    return str(path)


def tls_files(folder: Path, **wrong: str) -> dict[str, str]:
    names = {name: str(folder / f"{name}.pem") for name in ("tls_certificate", "tls_key")}
    return {**names, "tls_authority": str(folder / "ca.pem"), **wrong}


OWN = "127.0.0.2"
OTHER = "127.0.0.3"

BAD: dict[str, tuple[dict[str, Any], str]] = {
    "twice": ({"members": [OTHER, OTHER]}, "is listed twice"),
    "itself": ({"members": [OTHER, OWN]}, "is this node itself"),
    "nobody": ({"members": "none"}, "give either members or etcd"),
    "all interfaces": ({"listen": "0.0.0.0"}, "is all interfaces"),
    "not our address": ({"listen": "192.0.2.1"}, "192.0.2.1"),
    "no such name": ({"listen": "no-such-host.invalid"}, "no-such-host.invalid"),
    "no key": ({"key_file": "none"}, "no key; name a key_file"),
    "missing key": ({"key_file": "/no/such/key"}, "read key_file /no/such/key: No such file"),
    "both": ({"open_pool": "true"}, "both a key and open_pool"),
    "half of tls": ({"tls_key": "/no/such/key"}, "all three of them"),
    "replicas": ({"replicas": "3"}, "hot_replicas 2"),
    "suspect": ({"suspect": "100ms"}, "at least two heartbeats"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_costs_the_pool_and_one_line(
    case: str, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    changes, text = BAD[case]
    pool = {"listen": OWN, "members": [OTHER], "key_file": key_in(folder), **changes}
    assert_off(folder, pool, text, capfd)


def assert_off(
    folder: Path, pool: dict[str, Any], text: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with served(folder, pool) as daemon:
        daemon.await_serving()
        code, found = daemon.status(capfd)
        assert (code, found["state"]) == (1, "off")
        assert text in found["why"] and "\n" not in found["why"]
    (line,) = daemon.lines()
    assert text in line


@pytest.mark.parametrize(
    ("data", "mode", "text"),
    [(KEY, 0o644, "has mode 0644"), (KEY, 0o640, "has mode 0640"), ("short", 0o600, "has 5 bytes")],
)
def test_bad_keys_cost_the_pool_and_one_line(
    data: str, mode: int, text: str, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    pool = {"listen": OWN, "members": [OTHER], "key_file": key_in(folder, data, mode)}
    assert_off(folder, pool, text, capfd)


def test_a_taken_port_costs_the_pool_and_one_line(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as taken:
        taken.bind((OWN, 0))
        taken.listen()
        listen = f"{OWN}:{taken.getsockname()[1]}"
        pool = {"listen": listen, "members": [OTHER], "key_file": key_in(folder)}
        assert_off(folder, pool, listen, capfd)


def test_a_section_that_cannot_be_read_is_refused(folder: Path) -> None:
    for pool, text in (
        ({"listen": OWN, "member": OTHER}, "did you mean pool.members?"),
        ({"listen": OWN, "replicas": "many"}, "expected a number"),
    ):
        file = folder / "bad.yaml"
        file.write_text(yaml.safe_dump({"pool": pool}))
        done = subprocess.run(
            [sys.executable, "-m", "tierkv.cli.main", "serve", "--config", str(file)],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=START_S,
            check=False,
        )
        assert done.returncode == 2 and done.stderr.count("\n") == 1 and text in done.stderr
