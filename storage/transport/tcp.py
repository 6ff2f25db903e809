"""The tcp transport: needs nothing but a network. docs/formats/transport.md shows its bytes.

Owns a node's end: the registered memories, the listener, the peers it connected. Parts:
tcp_server.py answers, tcp_peer.py asks, handshake.py proves who is there, stream.py waits,
resolver.py finds addresses.
Invariants: nothing listens on all interfaces unless asked to; an open pool is asked for, and
logged; a peer is never this node itself. Used by the pool.
"""

from __future__ import annotations

import ipaddress
import socket
import ssl
import threading
from dataclasses import dataclass

from tierkv.storage.clock import Clock, SystemClock
from tierkv.storage.errors import ConfigError, TierClosedError, TierIOError
from tierkv.storage.transport.base import (
    BOOT_TOKEN_BYTES,
    Handler,
    PeerIdentity,
    Transport,
    TransportLimits,
    TransportStats,
    new_boot_token,
)
from tierkv.storage.transport.handshake import Credentials, greet_server
from tierkv.storage.transport.resolver import Resolver
from tierkv.storage.transport.stream import TIMEOUT_S_MIN, Stream, open_stream
from tierkv.storage.transport.tcp_peer import TcpPeer
from tierkv.storage.transport.tcp_server import BACKLOG, Exports, Server

RESOLVE_S = 5.0


@dataclass(frozen=True, slots=True)
class TlsContexts:
    """TLS both ways, made by whoever knows the certificates."""

    server: ssl.SSLContext
    client: ssl.SSLContext
    hostname: str | None = None
    """Name the peers' certificates carry; None: the host that is connected to."""


class TcpTransport(Transport):
    """One node's end over TCP."""

    name = "tcp"

    def __init__(
        self,
        key: bytes | None,
        *,
        open_pool: bool = False,
        any_interface: bool = False,
        limits: TransportLimits | None = None,
        boot_token: bytes | None = None,
        tls: TlsContexts | None = None,
        clock: Clock | None = None,
    ) -> None:
        """`key`: the pool's shared secret, 16 bytes or more; None only with `open_pool`, which
        lets anyone read. `any_interface` allows to listen on all of them. ConfigError."""
        self._credentials = Credentials(key, open_pool=open_pool)
        self._any_interface = any_interface
        self._limits = limits or TransportLimits()
        self._clock = clock or SystemClock()
        self._tls = tls
        self.boot_token = new_boot_token() if boot_token is None else boot_token
        if len(self.boot_token) != BOOT_TOKEN_BYTES:
            raise ConfigError(
                f"start transport: expected a boot token of {BOOT_TOKEN_BYTES} bytes, "
                f"got {len(self.boot_token)}"
            )
        self._names = Resolver()
        self._exports = Exports(self._limits)
        self._server = Server(
            self._credentials,
            self.boot_token,
            self._exports,
            self._limits,
            self._clock,
            None if tls is None else tls.server,
        )
        self._lock = threading.Lock()
        self._listening = False
        self._closed = False
        self._peers: list[TcpPeer] = []

    def register(self, memory: memoryview) -> int:
        return self._exports.register(memory)

    def unregister(self, generation: int) -> None:
        self._exports.unregister(generation)

    def listen(self, host: str, port: int, handler: Handler) -> tuple[str, int]:
        what = f"listen on {host!r} port {port}"
        try:
            family, address = self._names.resolve(host, port, RESOLVE_S)[0]
        except TierIOError as error:
            raise ConfigError(f"{what}: {error}; choose an address of this machine") from error
        if _is_wildcard(address[0]) and not self._any_interface:
            raise ConfigError(
                f"{what}: that is all interfaces; name one address, or ask for all explicitly"
            )
        with self._lock:
            if self._closed:
                raise TierClosedError(f"{what}: the transport was closed")
            if self._listening:
                raise ConfigError(f"{what}: this transport listens already")
            listener: socket.socket | None = None
            try:
                listener = socket.socket(family, socket.SOCK_STREAM)
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                listener.bind(address)
                listener.listen(BACKLOG)
            except OSError as error:
                if listener is not None:
                    listener.close()
                raise ConfigError(
                    f"{what}: {error.strerror}; choose a free port and an address of this machine"
                ) from error
            bound = listener.getsockname()
            try:
                self._server.start(listener, handler)
            except RuntimeError as error:
                listener.close()
                raise ConfigError(f"{what}: no thread for it: {error}") from error
            self._listening = True
        return str(bound[0]), int(bound[1])

    def connect(self, host: str, port: int, timeout_s: float) -> TcpPeer:
        if not 0 < timeout_s <= self._limits.wait_s:
            raise ValueError(
                f"connect peer: expected a timeout up to {self._limits.wait_s:g} s, got {timeout_s}"
            )
        name = f"{host}:{port}"

        def opener(deadline: float) -> tuple[Stream, PeerIdentity]:
            return self._open(host, port, deadline)

        stream, identity = opener(self._clock.monotonic() + timeout_s)
        with self._lock:
            if not self._closed:
                peer = TcpPeer(name, identity, stream, opener, self._limits, self._clock)
                self._peers = [known for known in self._peers if not known.closed]
                self._peers.append(peer)
                return peer
        stream.close()
        raise TierClosedError(f"connect peer {name}: the transport was closed")

    def stats(self) -> TransportStats:
        return self._server.stats()

    def check(self) -> None:
        self._exports.check()
        self._server.check()
        with self._lock:
            peers = list(self._peers)
        for peer in peers:
            peer.check()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            peers, self._peers = self._peers, []
        for peer in peers:
            peer.close()
        try:
            self._exports.close()
        finally:
            self._server.close()

    def _open(self, host: str, port: int, deadline: float) -> tuple[Stream, PeerIdentity]:
        """A greeted connection. TierIOError that names the peer."""
        now = self._clock.monotonic()
        deadline = min(deadline, now + self._limits.handshake_s)
        stream: Stream | None = None
        try:
            sock = self._dial(host, port, deadline)
            stream = open_stream(
                sock,
                self._clock,
                None if self._tls is None else self._tls.client,
                server_side=False,
                hostname=None if self._tls is None else self._tls.hostname or host,
                deadline=deadline,
            )
            identity = greet_server(stream, self._credentials, self.boot_token, deadline)
            if identity.boot_token == self.boot_token:
                raise TierIOError("that is this node itself; remove it from the list of peers")
        except TierIOError as error:
            if stream is not None:
                stream.close()
            raise TierIOError(f"connect peer {host}:{port}: {error}") from error
        return stream, identity

    def _dial(self, host: str, port: int, deadline: float) -> socket.socket:
        """Connect to the first address of the host that answers."""
        reason = "no address"
        left_s = deadline - self._clock.monotonic()
        for family, address in self._names.resolve(host, port, left_s):
            sock: socket.socket | None = None
            try:
                sock = socket.socket(family, socket.SOCK_STREAM)
                sock.settimeout(max(TIMEOUT_S_MIN, deadline - self._clock.monotonic()))
                sock.connect(address)
            except OSError as error:
                if sock is not None:
                    sock.close()
                reason = error.strerror or str(error)
                continue
            return sock
        raise TierIOError(f"{reason}; check that it runs and that the address is right")


def _is_wildcard(host: str) -> bool:
    address = ipaddress.ip_address(host.partition("%")[0])
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_unspecified
