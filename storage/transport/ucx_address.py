"""Where a UCX worker is reached, in a form that a peer cannot use to harm this process.

UCX aborts the process when it is given a malformed worker address. So addresses of peers are
never handed to it: what travels are the few fields in which two workers of one UCX version differ
(identity, IP address, port), and the address is built here, from one that this node's own UCX
made. That holds for tcp. Other transports (RDMA) have more in their addresses; there the address
travels whole, and a member of the pool is trusted with it. Also says which network device has an
address of this machine. Called by ucx.py and ucx_server.py.

    tcp          identity 8 | port 2 | host length 1 | host 4 or 16, or on loopback 8: a digest
    other        the address as UCX made it
"""

from __future__ import annotations

import hashlib
import ipaddress
import socket
import struct
from typing import Protocol

from tierkv.storage.errors import ConfigError, TierIOError
from tierkv.storage.transport.ucx_environment import interface_of

ADDRESS_BYTES_MAX = 16 << 10
_IDENTITY = slice(1, 9)
_PORT = slice(-4, -2)
_FIELDS = struct.Struct("<8s2sB")
_DIGEST_BYTES = 8


class Addresses(Protocol):
    """How worker addresses travel."""

    def pack(self, address: bytes) -> bytes:
        """What a peer is told of an own worker."""

    def build(self, packed: bytes) -> bytes:
        """The address of a peer's worker, from its pack(). TierIOError when it cannot be meant."""


class TcpAddresses:
    """Fields out of and into addresses of one device of this machine."""

    def __init__(self, samples: list[bytes], host: bytes | None) -> None:
        """`samples`: addresses of several own workers. `host`: the device's IP address, packed;
        None on loopback. ConfigError when the addresses are not of the form known here."""
        self._template = samples[0]
        self._host: slice | None = None
        varying = _span(len(self._template), _IDENTITY) | _span(len(self._template), _PORT)
        problem = len(self._template) < 24 or any(
            len(sample) != len(self._template) or _differences(sample, samples[0]) - varying
            for sample in samples
        )
        if host is not None and not problem:
            at = self._template.find(host)
            problem = at < 0 or self._template.find(host, at + 1) >= 0
            self._host = slice(at, at + len(host))
        if problem:
            raise ConfigError(
                "start the ucx plane: this UCX version has worker addresses of a form that is not "
                "known here, so that those of peers cannot be checked; install another version"
            )

    def pack(self, address: bytes) -> bytes:
        assert len(address) == len(self._template), "an address of another device"
        host = self._digest() if self._host is None else address[self._host]
        return _FIELDS.pack(address[_IDENTITY], address[_PORT], len(host)) + host

    def build(self, packed: bytes) -> bytes:
        expected = _DIGEST_BYTES if self._host is None else self._host.stop - self._host.start
        if len(packed) != _FIELDS.size + expected or packed[_FIELDS.size - 1] != expected:
            raise TierIOError(
                f"ucx address: expected {_FIELDS.size + expected} bytes, got {len(packed)}; "
                "the peer listens on another kind of network device"
            )
        identity, port, _ = _FIELDS.unpack_from(packed)
        host = packed[_FIELDS.size :]
        address = bytearray(self._template)
        address[_IDENTITY] = identity
        address[_PORT] = port
        if self._host is not None:
            address[self._host] = host
        elif host != self._digest():
            raise TierIOError("ucx address: the peer listens on the loopback of another machine")
        return bytes(address)

    def _digest(self) -> bytes:
        """Equal on workers of one machine's loopback device: it has a machine id inside."""
        fixed = bytearray(self._template)
        fixed[_IDENTITY] = bytes(8)
        fixed[_PORT] = bytes(2)
        return hashlib.sha256(fixed).digest()[:_DIGEST_BYTES]


class WholeAddresses:
    """Addresses as UCX made them, from members that are trusted with them."""

    def pack(self, address: bytes) -> bytes:
        return address

    def build(self, packed: bytes) -> bytes:
        if not 1 <= len(packed) <= ADDRESS_BYTES_MAX:
            raise TierIOError(f"ucx address: {len(packed)} bytes cannot be one")
        return packed


def device_of(host: str) -> tuple[str, bytes]:
    """The network device whose first address is `host` (a name or an IP address), and that
    address, packed. ConfigError when there is none: UCX listens on a device's first address."""
    what = f"start the ucx plane on {host!r}"
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigError(f"{what}: {error.strerror}; choose an address of this machine") from error
    address = ipaddress.ip_address(str(found[0][4][0]).split("%")[0])
    if address.is_unspecified:
        raise ConfigError(f"{what}: that is all interfaces; name one address of this machine")
    device = interface_of(str(address))
    if device is None:
        raise ConfigError(f"{what}: no network device has that as its first address")
    return device, address.packed


def _span(length: int, part: slice) -> set[int]:
    return set(range(*part.indices(length)))


def _differences(one: bytes, other: bytes) -> set[int]:
    return {at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b}
