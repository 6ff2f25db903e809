"""Pools of real daemons over each data path and kind of membership, and over a Mooncake Store."""

from __future__ import annotations

import importlib.util
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.daemon_process import PAGE_BYTES, DaemonProcess, shared_folder, small_config
from tests.support.etcd_process import EtcdProcess, etcd_process
from tests.support.loopback_pool import NO_COPIES, WAIT_S, Nodes, await_true
from tests.support.mooncake_cluster import MooncakeCluster, why_absent
from tests.support.pages import page_content, page_key, put_store
from tierkv.client.client import Client
from tierkv.storage.types import CommitOutcome, TierName


@pytest.fixture
def folder() -> Iterator[Path]:
    with shared_folder() as made:
        yield made


def certificates(folder: Path) -> dict[str, str]:
    """An authority and a certificate of it for every node of a test."""
    names = ("authority.key", "authority.pem", "node.key", "node.csr", "node.pem", "names")
    authority_key, authority, key, request, node, extension = (folder / name for name in names)
    extension.write_text("subjectAltName=IP:127.0.0.2,IP:127.0.0.3\n")
    curve = "ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes"
    for command in (
        f"req -x509 -newkey {curve} -days 2 -subj /CN=ca -keyout {authority_key} -out {authority}",
        f"req -newkey {curve} -subj /CN=node -keyout {key} -out {request}",
        f"x509 -req -in {request} -CA {authority} -CAkey {authority_key} -CAcreateserial -days 2 "
        f"-extfile {extension} -out {node}",
    ):
        try:
            subprocess.run(
                ["openssl", *command.split()], check=True, capture_output=True, timeout=60
            )
        except FileNotFoundError:
            pytest.skip("openssl is not installed: no certificates to test TLS with")
    return {
        "tls_certificate": str(node),
        "tls_key": str(key),
        "tls_authority": str(authority),
    }


def assert_moves(nodes: Nodes, transport: str) -> dict[str, Any]:
    """A page goes from one node to the other, by this path; the member as the reader sees it."""
    keys = nodes.put(0, *range(24))
    assert nodes.take(1, keys) == [TierName.REMOTE] * 24
    (member,) = nodes.daemons[1].status()["pool"]["members"]
    assert member["transport"] == transport, member
    assert member["pages_in"] == 24 and member["bytes_in"] == 24 * PAGE_BYTES
    for daemon in nodes.daemons:
        daemon.check()
    found: dict[str, Any] = member
    return found


def test_members_that_talk_tls(folder: Path) -> None:
    files = certificates(folder)
    with Nodes(folder, hosts=2, transports=["nixl", "tcp"], **files, **NO_COPIES) as nodes:
        assert_moves(nodes, "tcp")
        declined = nodes.daemons[0].status()["pool"]["declined"]
        assert "outside TLS" in declined["nixl"]


@pytest.mark.parametrize(("name", "package"), [("nixl", "nixl_cu12"), ("ucx", "ucxx")])
def test_members_with_a_faster_path(folder: Path, name: str, package: str) -> None:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"the package {package} is not installed")
    with Nodes(folder, hosts=2, transports=[name, "tcp"], **NO_COPIES) as nodes:
        for daemon in nodes.daemons:
            daemon.await_status(
                f"{name} is the path",
                lambda status: status["pool"]["members"][0]["transport"] == name,
            )
        assert_moves(nodes, name)


def test_why_the_faster_path_is_not_taken_is_told(folder: Path) -> None:
    if importlib.util.find_spec("ucxx") is None:
        pytest.skip("the package ucxx is not installed")
    with Nodes(folder, hosts=2, **NO_COPIES) as nodes:
        # Only one of the two has it.
        nodes.daemons[1].stop()
        nodes.await_live(0)
        settings = nodes.settings(1)
        settings["pool"]["transports"] = ["ucx", "tcp"]
        nodes.daemons[1] = DaemonProcess.started(settings)
        nodes.await_live()
        (member,) = nodes.daemons[1].status()["pool"]["members"]
        assert member["transport"] == "tcp" and "ucx" in member["declined"]
        assert_moves(nodes, "tcp")


@pytest.fixture
def etcd(folder: Path) -> Iterator[EtcdProcess]:
    pytest.importorskip("etcd3gw")
    (folder / "etcd").mkdir()
    with etcd_process(folder / "etcd") as process:
        yield process


def test_members_from_etcd(folder: Path, etcd: EtcdProcess) -> None:
    with Nodes(folder, members=(), etcd=etcd.address, **NO_COPIES) as nodes:
        status = nodes.daemons[0].status()["pool"]
        assert status["membership"] == "etcd" and status["problem"] is None
        keys = nodes.put(0, *range(8))
        assert nodes.take(2, keys) == [TierName.REMOTE] * 8
        # One that stops says so: it is no member any more.
        assert nodes.daemons[1].stop() == 0
        nodes.daemons[0].await_status(
            "it has left", lambda found: len(found["pool"]["members"]) == 1
        )


def test_mooncake_as_the_remote_tier(folder: Path) -> None:
    if (absent := why_absent()) is not None:
        pytest.skip(absent)
    keys = [page_key(number) for number in range(16)]
    with MooncakeCluster() as cluster:
        mooncake = {"master": cluster.master}
        for name in ("n0", "n1"):
            (folder / name).mkdir()
        first = small_config(folder / "n0", mooncake=mooncake)
        with DaemonProcess.started(first) as daemon:
            with Client(daemon.config.socket_path, PAGE_BYTES) as client:
                assert set(put_store(client, keys)) == {CommitOutcome.COMMITTED}
                daemon.await_status(
                    "every page is in the store",
                    lambda status: status["classes"][0]["remote"]["pushed"] == len(keys),
                )
                assert daemon.status()["mooncake"]["state"] == "serving"
            daemon.kill()
        second = small_config(folder / "n1", mooncake=mooncake, mooncake_lookup_s=1.0)
        with DaemonProcess.started(second) as daemon:
            with Client(daemon.config.socket_path, PAGE_BYTES) as client:
                await_true("the store is asked", lambda: None not in client.lookup(keys))
                with client.fetch(keys, WAIT_S).take(WAIT_S) as lease:
                    assert lease.keys == keys and set(lease.tiers) == {TierName.REMOTE}
                    for key, view in zip(lease.keys, lease.views, strict=True):
                        assert bytes(view) == page_content(key, PAGE_BYTES)
            daemon.check()
            assert daemon.stop() == 0
