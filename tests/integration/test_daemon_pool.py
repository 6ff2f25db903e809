"""Real daemons that form a pool on loopback: pages found from node to node, and every bad input."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
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
)
from tests.support.loopback_pool import KEY, NO_COPIES, WAIT_S, Nodes, await_true
from tests.support.mooncake_cluster import why_absent
from tests.support.pages import page_content, page_key, put_store
from tierkv.bench.child import free_ports
from tierkv.cli.main import main
from tierkv.client.client import Client
from tierkv.storage.types import CommitOutcome, TierName

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="127.0.0.2 is loopback on Linux")


@pytest.fixture
def folder() -> Iterator[Path]:
    with shared_folder() as made:
        yield made


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
        # Copies are made after the put; the first makes the other node's class.
        await_true("a copy", lambda: bool(nodes.daemons[1].status()["classes"]))
        (found,) = nodes.daemons[1].status()["classes"]
        bound = int(found["tiers"]["host"]["capacity_pages"] * 0.1)
        assert 0 < found["pool_pages"]["host"] <= bound
        (row,) = nodes.client(1).namespaces()
        assert row["tenant"] == "pool"


# Bad input, by the real command


@contextmanager
def served(
    folder: Path, pool: dict[str, Any], how: dict[str, Any] | None = None, **sections: Any
) -> Iterator[Served]:
    """`tierkv serve` with this pool section; `how` the machine differs, see altered_command."""
    folder.mkdir(exist_ok=True)
    values = {
        "daemon": {"socket": str(folder / "d.sock"), "stop": "5s"},
        "host": {"directory": str(folder / "arenas"), "size": "4MiB"},
        "http": {"bind": "none"},
        "pool": pool,
        **sections,
    }
    if not pool:
        del values["pool"]
    file = folder / "tierkv.yaml"
    file.write_text(yaml.safe_dump(values))
    environment = {name: v for name, v in os.environ.items() if not name.startswith("TIERKV_")}
    module = ["tierkv.cli.main"]
    if how is not None:
        module = ["tests.support.processes.altered_command", json.dumps(how)]
    process = subprocess.Popen(
        [sys.executable, "-m", *module, "serve", "--config", str(file)],
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

    def whole_status(self, capfd: pytest.CaptureFixture[str]) -> dict[str, Any]:
        """All that the daemon tells."""
        capfd.readouterr()
        assert main(["top", "--socket", str(self.path), "--json"]) == 0
        found: dict[str, Any] = json.loads(capfd.readouterr().out)
        return found

    def await_serving(self) -> None:
        """Wait until pages can be stored and read here."""
        with Client(self.path, PAGE_BYTES) as client:
            assert client.wait_connected(START_S), "the daemon does not serve"
            key = page_key(1)
            # A member may have copied it here already.
            (outcome,) = put_store(client, [key])
            assert outcome in (CommitOutcome.COMMITTED, CommitOutcome.EXISTS)
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
    "suspect": ({"suspect": "100ms"}, "suspect is 0.1 s, expected at least two heartbeats"),
    "lease": ({"lease": "1h"}, "lease is 3600 s, expected above 0 and up to 600 s"),
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
        assert_off(folder, pool, "Address already in use", capfd)


def test_bad_certificates_cost_the_pool_and_one_line(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    pool = {"listen": OWN, "members": [OTHER], "key_file": key_in(folder)}
    files = {
        name: str(folder / f"{name}.pem")
        for name in ("tls_certificate", "tls_key", "tls_authority")
    }
    assert_off(folder, {**pool, **files}, "tls_certificate.pem", capfd)
    for file in files.values():
        Path(file).write_text("no certificate\n")
        Path(file).chmod(0o600)
    assert_off(folder, {**pool, **files}, "begins with this node's certificate", capfd)


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ({"lacking": ["mooncake"]}, "pip install 'tierkv[mooncake]'"),
        ({}, "mooncake: master 127.0.0.1:"),
    ],
)
def test_an_absent_mooncake_costs_one_line(
    how: dict[str, Any], text: str, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    if not how and (absent := why_absent()) is not None:
        pytest.skip(absent)
    mooncake = {"master": f"127.0.0.1:{free_ports(1)[0]}"}
    with served(folder, {}, how, mooncake=mooncake) as daemon:
        daemon.await_serving()
        found = daemon.whole_status(capfd)["mooncake"]
        assert found["state"] == "off" and text in found["why"]
    (line,) = daemon.lines()
    assert text in line


# What only the members find out


def pair(folder: Path, host: int, ports: list[int], **changes: Any) -> dict[str, Any]:
    """Half of a pool of two."""
    return {
        "listen": f"127.0.0.{host + 2}:{ports[host]}",
        "members": [f"127.0.0.{3 - host}:{ports[1 - host]}"],
        "key_file": key_in(folder),
        "heartbeat": "100ms",
        **changes,
    }


@pytest.fixture
def ports() -> list[int]:
    return [free_ports(1, OWN)[0], free_ports(1, OTHER)[0]]


def await_member(
    daemon: Served, capfd: pytest.CaptureFixture[str], wanted: Callable[[dict[str, Any]], bool]
) -> dict[str, Any]:
    """Wait until the only member looks so."""
    found: dict[str, Any] = {}

    def there() -> bool:
        nonlocal found
        _, pool = daemon.status(capfd)
        (found,) = pool["members"]
        return wanted(found)

    await_true("the member is as wanted", there)
    return found


def told_by_link(daemon: Served, text: str) -> list[str]:
    """Lines about the member from this node's side; those about its calls here are others."""
    return [line for line in daemon.lines() if text in line and "link=" in line]


def has(text: str) -> Callable[[dict[str, Any]], bool]:
    return lambda member: text in (member["problem"] or "")


def test_a_wrong_key_is_told_once_by_each(
    folder: Path, ports: list[int], capfd: pytest.CaptureFixture[str]
) -> None:
    one, two = folder / "1", folder / "2"
    theirs = pair(two, 1, ports)
    key_in(two, "22" * 32)
    with served(one, pair(one, 0, ports)) as first, served(two, theirs) as second:
        for daemon in (first, second):
            daemon.await_serving()
            await_member(daemon, capfd, has("key"))
        # Some tries later it is still one line.
        again = [await_member(daemon, capfd, has("key")) for daemon in (first, second)]
        assert not any(member["live"] for member in again)
    for daemon in (first, second):
        # One about the member's calls here, one about those from here.
        assert len([line for line in daemon.lines() if "key" in line]) == 2, daemon.lines()
        assert len(told_by_link(daemon, "key")) == 1, daemon.lines()


def test_unequal_formats_are_told_once_by_each(
    folder: Path, ports: list[int], capfd: pytest.CaptureFixture[str]
) -> None:
    one, two = folder / "1", folder / "2"
    with (
        served(one, pair(one, 0, ports)) as first,
        served(two, pair(two, 1, ports), {"version": 9}) as second,
    ):
        for daemon in (first, second):
            daemon.await_serving()
            member = await_member(daemon, capfd, has("version"))
            assert not member["live"]
            assert "1" in member["problem"] and "9" in member["problem"]
    for daemon in (first, second):
        assert len(told_by_link(daemon, "version")) == 1, daemon.lines()


def test_two_nodes_of_one_name_are_told_once_by_each(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    addresses = [f"127.0.0.{host}:{free_ports(1, f'127.0.0.{host}')[0]}" for host in (2, 3, 4)]
    text = f"two nodes are called same, {addresses[1]} and {addresses[2]}"
    key = key_in(folder)

    def one(number: int, name: str) -> dict[str, Any]:
        # Copied from the second node: the third one is in nobody's list.
        members = [each for each in addresses[:2] if each != addresses[min(number, 1)]]
        pool = {"listen": addresses[number], "members": members, "name": name, "key_file": key}
        return {**pool, "heartbeat": "100ms"}

    with ExitStack() as stack:

        def start(number: int, name: str) -> Served:
            return stack.enter_context(served(folder / str(number), one(number, name)))

        both = [start(0, "first"), start(1, "same")]
        for daemon in both:
            daemon.await_serving()
            await_member(daemon, capfd, lambda member: member["live"])
        third = start(2, "same")
        third.await_serving()
        await_member(third, capfd, has(text))
        for daemon in both:
            await_true("told", lambda daemon=daemon: text in (told_of(daemon, capfd) or ""))
            await_member(daemon, capfd, lambda member: member["live"])
        # Some tries later nothing has changed.
        fences = [daemon.status(capfd)[1]["fences"] for daemon in (*both, third)]
        assert max(fences) <= 2, fences
        await_member(third, capfd, has(text))
    for daemon in (*both, third):
        assert len([line for line in daemon.lines() if text in line]) == 1, daemon.lines()
        assert len([line for line in daemon.lines() if "same" in line]) == 1, daemon.lines()


def test_a_member_that_others_do_not_list_is_told_once_by_each(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    addresses = [f"127.0.0.{host}:{free_ports(1, f'127.0.0.{host}')[0]}" for host in (2, 3)]
    nobody = f"127.0.0.4:{free_ports(1, '127.0.0.4')[0]}"
    text = f"guest at {addresses[1]} is not in the members of home"

    def one(number: int, name: str, member: str) -> dict[str, Any]:
        pool = {"listen": addresses[number], "members": [member], "name": name}
        return {**pool, "key_file": key_in(folder / str(number)), "heartbeat": "100ms"}

    with (
        served(folder / "0", one(0, "home", nobody)) as home,
        served(folder / "1", one(1, "guest", addresses[0])) as guest,
    ):
        for daemon in (home, guest):
            daemon.await_serving()
        await_member(guest, capfd, lambda member: member["live"])
        numbers = iter(range(100, 10_000))
        with Client(guest.path, PAGE_BYTES) as client:
            assert client.wait_connected(START_S)

            def refused() -> bool:
                put_store(client, [page_key(next(numbers)) for _ in range(3)])
                _, pool = guest.status(capfd)
                return text in (pool["members"][0]["problem"] or "")

            await_true("the guest hears why", refused)
            await_true("more is refused", refused)
        await_true("told", lambda: text in (told_of(home, capfd) or ""))
        assert (await_member(guest, capfd, has(text)))["live"]
    for daemon in (home, guest):
        assert len([line for line in daemon.lines() if "guest" in line]) == 1, daemon.lines()
        assert len([line for line in daemon.lines() if text in line]) == 1, daemon.lines()


def told_of(daemon: Served, capfd: pytest.CaptureFixture[str]) -> str | None:
    """What is wrong with who belongs to the pool."""
    problem: str | None = daemon.status(capfd)[1]["problem"]
    return problem


def test_a_member_without_an_address_is_told_once(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    listen = f"{OWN}:{free_ports(1, OWN)[0]}"
    pool = {"listen": listen, "members": ["no-such-host.invalid"], "key_file": key_in(folder)}
    with served(folder, pool) as daemon:
        daemon.await_serving()
        await_member(daemon, capfd, has("no-such-host.invalid"))
    (line,) = daemon.lines()
    assert "no-such-host.invalid" in line


def test_a_member_that_is_away_is_told_once(
    folder: Path, ports: list[int], capfd: pytest.CaptureFixture[str]
) -> None:
    with served(folder, pair(folder, 0, ports)) as daemon:
        daemon.await_serving()
        await_member(daemon, capfd, has("Connection refused"))
    assert len(daemon.lines()) == 1, daemon.lines()


def test_no_page_size_in_common_is_told_once(
    folder: Path, ports: list[int], capfd: pytest.CaptureFixture[str]
) -> None:
    one, two = folder / "1", folder / "2"
    with served(one, pair(one, 0, ports)) as first, served(two, pair(two, 1, ports)) as second:
        for daemon, size in ((first, PAGE_BYTES), (second, 2 * PAGE_BYTES)):
            with Client(daemon.path, size) as client:
                assert client.wait_connected(START_S)
        for daemon in (first, second):
            await_member(daemon, capfd, lambda member: member["live"])
        with Client(first.path, PAGE_BYTES) as client:
            assert client.wait_connected(START_S)
            assert set(put_store(client, [page_key(n) for n in range(8)])) == {
                CommitOutcome.COMMITTED
            }
            await_true("served on", lambda: client.lookup([page_key(1)]) == [TierName.HOST])
        member = await_member(second, capfd, lambda member: bool(member["page_sizes"]))
        assert member["page_sizes"] == [PAGE_BYTES]
    told = [line for line in second.lines() if f"{PAGE_BYTES} bytes" in line]
    assert len(told) == 1, second.lines()


@pytest.mark.parametrize("name", ["nixl", "ucx"])
def test_a_transport_that_is_not_installed_costs_its_speed(
    name: str, folder: Path, ports: list[int], capfd: pytest.CaptureFixture[str]
) -> None:
    one, two = folder / "1", folder / "2"
    how = {"lacking": ["nixl", "ucxx", "ucp", "libucx"]}
    with (
        served(one, pair(one, 0, ports, transports=[name, "tcp"]), how) as first,
        served(two, pair(two, 1, ports)) as second,
    ):
        for daemon in (first, second):
            daemon.await_serving()
        member = await_member(first, capfd, lambda member: member["live"])
        assert member["transport"] == "tcp"
        _, pool = first.status(capfd)
        assert f"tierkv[{name}" in pool["declined"][name]
    told = [line for line in first.lines() if f"transport={name}" in line]
    assert len(told) == 1, first.lines()


def test_an_open_pool_says_so(
    folder: Path, ports: list[int], capfd: pytest.CaptureFixture[str]
) -> None:
    one, two = folder / "1", folder / "2"
    changes = {"open_pool": "true", "key_file": "none"}
    with (
        served(one, pair(one, 0, ports, **changes)) as first,
        served(two, pair(two, 1, ports, **changes)) as second,
    ):
        first.await_serving()
        second.await_serving()
        await_member(first, capfd, lambda member: member["live"])
    for daemon in (first, second):
        told = [line for line in daemon.lines() if "open" in line]
        # The transport says it, for whoever makes one.
        assert len(told) == 1 and "anyone who can connect" in told[0], daemon.lines()


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
