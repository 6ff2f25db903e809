"""What UCX is told before it is loaded: only what the user has not said."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tierkv.storage.errors import ConfigError
from tierkv.storage.transport import ucx_environment
from tierkv.storage.transport.ucx_environment import (
    MACHINE_BYTES,
    copies_directly,
    interface_of,
    machine,
    prepare_ucx,
    rdma_devices,
)

NAMES = ("UCX_NET_DEVICES", "UCX_TLS", "UCX_MODULES", "NIXL_LOG_LEVEL")


@pytest.fixture
def clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """No variable set, no RDMA device; returns where devices would be listed."""
    for name in NAMES:
        # Set first, so that what the test leaves is taken back.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setattr(ucx_environment, "INFINIBAND", tmp_path / "infiniband")
    return tmp_path / "infiniband"


def test_without_rdma(clean: Path) -> None:
    assert prepare_ucx("127.0.0.1") == {
        "NIXL_LOG_LEVEL": "FATAL",
        "UCX_MODULES": "cma",
        "UCX_NET_DEVICES": "lo",
        "UCX_TLS": "tcp,sm",
    }
    assert os.environ["UCX_TLS"] == "tcp,sm"
    assert prepare_ucx("127.0.0.1") == {}, "once"


def test_with_rdma(clean: Path) -> None:
    for device, port in (("mlx5_1", "1"), ("mlx5_0", "1"), ("mlx5_0", "2")):
        (clean / device / "ports" / port).mkdir(parents=True)
    assert rdma_devices() == ["mlx5_0:1", "mlx5_0:2", "mlx5_1:1"]
    assert prepare_ucx("127.0.0.1") == {
        "NIXL_LOG_LEVEL": "FATAL",
        "UCX_NET_DEVICES": "lo,mlx5_0:1,mlx5_0:2,mlx5_1:1",
    }


def test_what_the_user_set_stays(clean: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "all")
    monkeypatch.setenv("UCX_NET_DEVICES", "eth7")
    assert prepare_ucx("127.0.0.1").keys() == {"NIXL_LOG_LEVEL", "UCX_MODULES"}
    assert os.environ["UCX_TLS"] == "all" and os.environ["UCX_NET_DEVICES"] == "eth7"


@pytest.mark.parametrize(
    ("transports", "direct"),
    [
        (None, True),
        ("all", True),
        ("tcp,sm", True),
        ("rc,cma", True),
        ("tcp", False),
        ("rc,tcp", False),
        ("^tcp", True),
        ("^tcp,cma", False),
    ],
)
def test_whether_ucx_reads_memory_itself(
    monkeypatch: pytest.MonkeyPatch, transports: str | None, direct: bool
) -> None:
    monkeypatch.delenv("UCX_TLS", raising=False)
    if transports is not None:
        monkeypatch.setenv("UCX_TLS", transports)
    assert copies_directly() is direct


@pytest.mark.parametrize("host", ["192.0.2.200", "2001:db8::1", "a-name", ""])
def test_ucx_is_not_let_listen_everywhere(clean: Path, host: str) -> None:
    assert interface_of(host) is None
    with pytest.raises(ConfigError, match="listen on all of them; set UCX_NET_DEVICES"):
        prepare_ucx(host)


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_it_listens_everywhere_where_the_pool_does(clean: Path, host: str) -> None:
    assert "UCX_NET_DEVICES" not in prepare_ucx(host)


def test_the_user_may_say_where_it_listens(clean: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_NET_DEVICES", "eth7")
    assert "UCX_NET_DEVICES" not in prepare_ucx("192.0.2.200")


def test_loopback_is_an_interface() -> None:
    assert {interface_of(host) for host in ("127.0.0.1", "127.0.3.4", "::1")} == {"lo"}


def test_the_interface_of_an_ipv6_address(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    table = tmp_path / "if_inet6"
    table.write_text("20010db8000000000000000000000007 02 40 00 80     eth5\n")
    monkeypatch.setattr(ucx_environment, "ADDRESSES_6", table)
    assert interface_of("2001:db8::7") == "eth5"
    assert interface_of("2001:db8::8") is None


def test_a_machine_is_itself(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    here = machine()
    assert here == machine() and len(here) == MACHINE_BYTES and any(here)
    (tmp_path / "boot").write_text("another boot\n")
    monkeypatch.setattr(ucx_environment, "BOOT_ID", tmp_path / "boot")
    assert machine() not in (here, bytes(MACHINE_BYTES))
    monkeypatch.setattr(ucx_environment, "BOOT_ID", tmp_path / "none")
    assert machine() == bytes(MACHINE_BYTES), "unknown is equal to nobody"
