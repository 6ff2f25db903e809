"""The tcp transport against the conformance suite, with a key, open, and with TLS."""

from __future__ import annotations

import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.storage.transport.transport_conformance import (
    LIMIT_S,
    LIMITS,
    TransportConformance,
    echo,
)
from tierkv.storage.errors import ConfigError, TierIOError
from tierkv.storage.transport.base import Transport, TransportLimits
from tierkv.storage.transport.tcp import TcpTransport, TlsContexts

KEY = bytes(range(32))


@pytest.fixture(scope="module")
def contexts(tmp_path_factory: pytest.TempPathFactory) -> TlsContexts:
    return make_contexts(tmp_path_factory.mktemp("tls"))


class TestTcp(TransportConformance):
    def open_transport(self, limits: TransportLimits = LIMITS) -> Transport:
        return TcpTransport(KEY, limits=limits)


class TestTcpTls(TransportConformance):
    """Certificates are made once, by openssl."""

    contexts: TlsContexts

    @pytest.fixture(autouse=True)
    def certificates(self, contexts: TlsContexts) -> None:
        self.contexts = contexts

    def open_transport(self, limits: TransportLimits = LIMITS) -> Transport:
        return TcpTransport(KEY, limits=limits, tls=self.contexts)

    def test_a_peer_without_tls_is_refused(self, server: Transport) -> None:
        address = server.listen(*self.address(), echo)
        with TcpTransport(KEY, limits=LIMITS) as plain:
            with pytest.raises(TierIOError, match="connect peer"):
                plain.connect(*address, LIMIT_S)

    def test_a_server_of_another_authority_is_refused(
        self, server: Transport, tmp_path: Path
    ) -> None:
        address = server.listen(*self.address(), echo)
        with TcpTransport(KEY, limits=LIMITS, tls=make_contexts(tmp_path)) as stranger:
            with pytest.raises(TierIOError, match="TLS handshake failed"):
                stranger.connect(*address, LIMIT_S)


def make_contexts(folder: Path) -> TlsContexts:
    """A certificate for 127.0.0.1 that is its own authority, and contexts that ask for it."""
    certificate, key = folder / "node.pem", folder / "node.key"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt"]
    command += ["ec_paramgen_curve:prime256v1", "-nodes", "-days", "2", "-subj", "/CN=node"]
    command += ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key)]
    command += ["-out", str(certificate)]
    try:
        subprocess.run(command, check=True, capture_output=True, timeout=60)
    except FileNotFoundError:
        pytest.skip("openssl is not installed: no certificates to test TLS with")
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(certificate, key)
    client = ssl.create_default_context(cafile=str(certificate))
    return TlsContexts(server, client)


@pytest.fixture
def transport() -> Iterator[TcpTransport]:
    with TcpTransport(KEY, limits=LIMITS) as transport:
        yield transport


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "::ffff:0.0.0.0"])
def test_all_interfaces_only_when_asked_for(transport: TcpTransport, host: str) -> None:
    with pytest.raises(ConfigError, match="all interfaces"):
        transport.listen(host, 0, echo)
    # Not used up by the refusal.
    assert transport.listen("127.0.0.1", 0, echo)[0] == "127.0.0.1"


def test_all_interfaces_when_asked_for() -> None:
    with TcpTransport(KEY, any_interface=True) as transport:
        host, port = transport.listen("0.0.0.0", 0, echo)
        assert host == "0.0.0.0" and port > 0


@pytest.mark.parametrize(
    ("host", "port", "said"),
    [
        ("", 0, "expected a host"),
        ("127.0.0.1", 65536, "expected a host"),
        ("no-such-host.invalid", 0, "resolved"),
        ("192.0.2.1", 0, "choose a free port"),
    ],
)
def test_addresses_that_cannot_be(transport: TcpTransport, host: str, port: int, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as failure:
        transport.listen(host, port, echo)
    assert "\n" not in str(failure.value)


def test_a_port_that_is_taken(transport: TcpTransport) -> None:
    host, port = transport.listen("127.0.0.1", 0, echo)
    with TcpTransport(KEY) as other, pytest.raises(ConfigError, match="choose a free port"):
        other.listen(host, port, echo)


def test_a_name_that_resolves_to_nothing(transport: TcpTransport) -> None:
    with pytest.raises(TierIOError, match=r"connect peer no-such-host\.invalid:1: the name"):
        transport.connect("no-such-host.invalid", 1, LIMIT_S)


def test_a_boot_token_of_another_length() -> None:
    with pytest.raises(ConfigError, match="boot token"):
        TcpTransport(KEY, boot_token=b"short")


def test_limits_are_positive() -> None:
    with pytest.raises(ConfigError, match="io_s must be positive"):
        TransportLimits(io_s=0)
    with pytest.raises(ConfigError, match="page_bytes must be at most"):
        TransportLimits(page_bytes=1 << 32)
