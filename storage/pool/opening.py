"""The transport of a pool as it is configured: TCP, and the faster planes that can be had here.

Owns no state. Optional libraries are imported here only, when they are asked for; one that is
missing or cannot run costs a line in the log and its speed. Called by pool.open_pool().
"""

from __future__ import annotations

import ipaddress
import logging
import socket
import ssl
from collections.abc import Callable
from pathlib import Path

from tierkv.storage.clock import Clock
from tierkv.storage.errors import ConfigError, TierKVError
from tierkv.storage.pool.config import MEMBERS_MAX, PoolConfig
from tierkv.storage.transport.base import TransportLimits
from tierkv.storage.transport.plane import DataPlane
from tierkv.storage.transport.planes import NegotiatedTransport
from tierkv.storage.transport.tcp import TlsContexts

MESSAGE_CONNECTIONS = 12
"""Heartbeat, and for each page size two pullers and a pusher: a message that waits on the other
side must not hold up the heartbeat. Opened when they are needed."""
READ_CONNECTIONS = 2
WAIT_S_MAX = 3600.0
"""Above every time that can be configured, and the sums that are made of them."""
IDLE_S = 120.0
"""Connections of a peer that is gone without a word are not kept for longer."""
HANDSHAKE_S_MIN = 1.0
IO_S_MIN, IO_S_MAX = 1.0, 10.0

PlaneOpener = Callable[[str, TransportLimits, Clock], DataPlane]

log = logging.getLogger(__name__)


def open_transport(config: PoolConfig, clock: Clock) -> tuple[NegotiatedTransport, dict[str, str]]:
    """The transport, not listening yet, and for each plane that was asked for and cannot be had
    the reason. ConfigError for certificates or a key that cannot be used."""
    limits = transport_limits(config)
    planes: list[DataPlane] = []
    declined: dict[str, str] = {}
    openers: dict[str, PlaneOpener] = {"nixl": _open_nixl, "ucx": _open_ucx}
    tls = _tls(config)
    try:
        for name in config.transports:
            if name == "tcp":
                continue
            if tls is not None:
                declined[name] = "its bytes would travel outside TLS, which is configured"
                continue
            try:
                planes.append(openers[name](_numeric(config.listen.host), limits, clock))
            except TierKVError as error:
                declined[name] = str(error)
        for name, reason in declined.items():
            log.warning("pool transport=%s is not used: %s", name, reason)
        transport = NegotiatedTransport(
            config.key,
            planes=planes,
            open_pool=config.open_pool,
            any_interface=config.any_interface,
            limits=limits,
            tls=tls,
            clock=clock,
        )
    except BaseException:
        for plane in planes:
            plane.close()
        raise
    return transport, declined


def transport_limits(config: PoolConfig) -> TransportLimits:
    """What a pool's transport has to allow."""
    members = len(config.members) or MEMBERS_MAX
    return TransportLimits(
        peer_connections=2 * (members + 8) * (MESSAGE_CONNECTIONS + READ_CONNECTIONS),
        message_connections=MESSAGE_CONNECTIONS,
        read_connections=READ_CONNECTIONS,
        handshake_s=max(config.connect_s, HANDSHAKE_S_MIN),
        wait_s=WAIT_S_MAX,
        idle_s=max(IDLE_S, 2 * config.suspect_s),
        io_s=min(max(config.transfer_s, IO_S_MIN), IO_S_MAX),
    )


def _open_nixl(host: str, limits: TransportLimits, clock: Clock) -> DataPlane:
    from tierkv.storage.transport.nixl import NixlPlane

    return NixlPlane(host, limits=limits, clock=clock)


def _open_ucx(host: str, limits: TransportLimits, clock: Clock) -> DataPlane:
    from tierkv.storage.transport.ucx import UcxPlane

    return UcxPlane(host, limits=limits, clock=clock)


def _numeric(host: str) -> str:
    """The address of this machine that `host` means. ConfigError."""
    try:
        return str(ipaddress.ip_address(host))
    except ValueError:
        pass
    try:
        return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        raise ConfigError(
            f"pool: listen {host!r} cannot be resolved: {error.strerror}; "
            "name an address of this machine"
        ) from error


def _tls(config: PoolConfig) -> TlsContexts | None:
    """Contexts in which both sides show a certificate of the authority. ConfigError."""
    certificate, key, authority = config.tls_certificate, config.tls_key, config.tls_authority
    if certificate is None or key is None or authority is None:
        return None
    _check_tls(certificate, key, authority)
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    for context in (server, client):
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_cert_chain(certificate, key, password=_NO_PASSWORD)
        context.load_verify_locations(authority)
    return TlsContexts(server, client)


_NO_PASSWORD = ""
"""An encrypted key is refused: OpenSSL would ask the terminal for its password, and wait."""


def _check_tls(certificate: Path, key: Path, authority: Path) -> None:
    """ConfigError that names the file that cannot be used."""
    wanted = {
        "tls_certificate": (
            certificate,
            "give a PEM file that begins with this node's certificate",
        ),
        "tls_authority": (authority, "give a PEM file with the certificate of the authority"),
    }
    for name, (path, hint) in wanted.items():
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_verify_locations(path)
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(
                f"pool: {name} {path} cannot be used: {_why(error)}; {hint}"
            ) from error
    try:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate, key, password=_NO_PASSWORD)
    except (OSError, ssl.SSLError) as error:
        if getattr(error, "reason", None) == "KEY_VALUES_MISMATCH":
            raise ConfigError(
                f"pool: tls_key {key} is not the key of tls_certificate {certificate}; "
                "give the two that were made together"
            ) from error
        raise ConfigError(
            f"pool: tls_key {key} cannot be used: {_why(error)}; "
            "give a PEM file with a private key that is not encrypted"
        ) from error


def _why(error: OSError) -> str:
    """In a few words; OpenSSL often has none."""
    if not isinstance(error, ssl.SSLError):
        return error.strerror or str(error)
    reason: str | None = getattr(error, "reason", None)
    return "no such PEM in it" if reason is None else reason.lower().replace("_", " ")
