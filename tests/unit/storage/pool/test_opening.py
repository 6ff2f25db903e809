"""The transport that a configuration asks for, and what is said when it cannot be had."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.pool_nodes import KEY, free_address
from tierkv.storage.clock import SystemClock
from tierkv.storage.errors import ConfigError
from tierkv.storage.pool import opening
from tierkv.storage.pool.config import MEMBERS_MAX, Address, PoolConfig
from tierkv.storage.pool.opening import MESSAGE_CONNECTIONS, open_transport, transport_limits
from tierkv.storage.pool.pool import open_pool


def config(**changes: object) -> PoolConfig:
    settings: dict[str, object] = {"members": (free_address(),), "key": KEY, **changes}
    return PoolConfig(listen=free_address(), **settings)  # type: ignore[arg-type]


def test_a_plane_that_is_not_installed_is_one_line_and_tcp_serves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def missing(*arguments: object) -> None:
        raise ConfigError("nixl is not installed; pip install tierkv[nixl-cu12]")

    monkeypatch.setattr(opening, "_open_nixl", missing)
    pool = open_pool(config(transports=("nixl", "tcp")), None, SystemClock())
    try:
        pool.start()
        assert pool.status()["declined"] == {
            "nixl": "nixl is not installed; pip install tierkv[nixl-cu12]"
        }
        pool.check()
    finally:
        assert pool.close(10.0)


def test_there_is_room_for_every_member_and_for_the_heartbeat() -> None:
    listed = transport_limits(config(members=tuple(free_address() for _ in range(5))))
    assert listed.peer_connections >= 5 * (MESSAGE_CONNECTIONS + listed.read_connections)
    assert listed.message_connections == MESSAGE_CONNECTIONS
    asked = transport_limits(config(members=(), etcd="127.0.0.1:2379"))
    assert asked.peer_connections >= MEMBERS_MAX * MESSAGE_CONNECTIONS
    short = transport_limits(config(transfer_s=0.2))
    assert short.io_s == 1.0, "a stuck copy is not waited for much longer than a transfer lasts"


@pytest.fixture(scope="module")
def pems(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two certificates with their keys, and the first key encrypted."""
    folder = tmp_path_factory.mktemp("pems")
    for name in ("one", "two"):
        openssl(
            *("req", "-x509", "-newkey", "ed25519", "-nodes", "-subj", "/CN=node"),
            *("-keyout", folder / f"{name}.key", "-out", folder / f"{name}.pem"),
        )
    openssl(
        *("pkcs8", "-topk8", "-in", folder / "one.key"),
        *("-out", folder / "locked.key", "-passout", "pass:secret"),
    )
    (folder / "text").write_text("no PEM at all\n")
    return folder


def openssl(*arguments: str | Path) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("no openssl to make certificates with")
    subprocess.run(["openssl", *arguments], check=True, capture_output=True, timeout=60)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"certificate": "text"}, "tls_certificate .*/text cannot be used"),
        ({"certificate": "one.key"}, "tls_certificate .*/one.key cannot be used"),
        ({"key": "text"}, "tls_key .*/text cannot be used"),
        ({"key": "one.pem"}, "tls_key .*/one.pem cannot be used"),
        ({"key": "locked.key"}, "tls_key .*/locked.key cannot be used: .*not encrypted"),
        ({"key": "two.key"}, "tls_key .*/two.key is not the key of tls_certificate .*/one.pem"),
        ({"authority": "text"}, "tls_authority .*/text cannot be used"),
        ({"authority": "gone"}, "tls_authority .*/gone cannot be used: No such file"),
    ],
)
def test_the_certificate_file_that_cannot_be_used_is_named(
    pems: Path, changes: dict[str, str], told: str
) -> None:
    files = {"certificate": "one.pem", "key": "one.key", "authority": "one.pem"}
    transport, _ = open_transport(
        config(**{f"tls_{name}": pems / file for name, file in files.items()}), SystemClock()
    )
    transport.close()
    tls = {f"tls_{name}": pems / file for name, file in {**files, **changes}.items()}
    with pytest.raises(ConfigError, match=told) as error:
        open_transport(config(**tls), SystemClock())
    assert "\n" not in str(error.value)


def test_a_listen_name_that_is_no_address_costs_the_plane_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[str] = []

    def note(host: str, *arguments: object) -> None:
        asked.append(host)
        raise ConfigError("not here")

    monkeypatch.setattr(opening, "_open_ucx", note)
    for name in ("localhost", "no-such-host.invalid"):
        settings = PoolConfig(
            listen=Address(name, 7422),
            members=(free_address(),),
            key=KEY,
            transports=("ucx", "tcp"),
        )
        transport, declined = open_transport(settings, SystemClock())
        transport.close()
        assert set(declined) == {"ucx"}
    assert asked in (["127.0.0.1"], ["::1"])
