"""What a user sets about the pool: a frozen value, checked before anything is opened.

Owns no state and opens nothing. Times are seconds, sizes bytes, rates bytes per second. Filled by
tierkv.config through tierkv.daemon.settings; read by every part of storage/pool.
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, field
from pathlib import Path

from tierkv.storage.errors import ConfigError

KEY_BYTES_MIN = 16
PORT = 7422
TRANSPORTS = ("nixl", "ucx", "tcp")
MEMBERS_MAX = 256
BATCH_PAGES_MAX = 1024
"""As many as one LEASE or STORE carries: docs/formats/pool.md."""
NAME_BYTES_MAX = 255
"""As long as a HELLO says it."""


@dataclass(frozen=True, slots=True)
class Address:
    """Where a member listens. As text `host:port`, IPv6 in brackets."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @classmethod
    def parse(cls, text: str, default_port: int = PORT) -> Address:
        """Read `host`, `host:port` or `[ipv6]:port`. ConfigError naming the text."""
        if text.startswith("["):
            host, closed, rest = text[1:].partition("]")
            sound = bool(closed) and ":" in host
        elif text.count(":") > 1:
            # A bare IPv6 address.
            host, rest, sound = text, "", True
        else:
            host, colon, port = text.partition(":")
            rest, sound = colon + port, True
        port = rest.removeprefix(":")
        # isdecimal() alone takes digits of other scripts; 5000 of them are no number for int().
        digits = rest[:1] == ":" and port.isascii() and port.isdecimal() and len(port) <= 5
        sound &= not rest or (digits and int(port) <= 65535)
        if not sound or not host or not host.isprintable() or " " in host:
            raise ConfigError(f"pool: address {text!r} is not host:port; write one like node2:7422")
        return cls(host, int(port) if port else default_port)


@dataclass(frozen=True, slots=True)
class PoolConfig:
    """One node's part in a pool."""

    listen: Address
    """The address of this machine that peers connect to; never all interfaces unless
    `any_interface`."""
    members: tuple[Address, ...] = ()
    """The other members. Empty: etcd says."""
    name: str | None = None
    """This member's name for the others; None: `advertise` as text."""
    advertise: Address | None = None
    """How the others reach this node; None: `listen`."""
    any_interface: bool = False
    key: bytes | None = field(default=None, repr=False)
    """The shared secret, 16 bytes or more; None only with `open_pool`."""
    open_pool: bool = False
    """Anybody who reaches the port may read and store pages. For closed networks only."""
    tls_certificate: Path | None = None
    tls_key: Path | None = None
    tls_authority: Path | None = None
    """PEM files. Members verify each other with the authority."""
    etcd: str | None = None
    """`host:port` of an etcd v3 whose keys say who the members are."""
    etcd_prefix: str = "/tierkv/pool"
    transports: tuple[str, ...] = ("tcp",)
    """In order of preference; tcp is always possible and always last."""
    replicas: int = 1
    """Copies of a page on other members, beside the one here: 1 survives the loss of a node."""
    hot_replicas: int = 2
    """The same, of a page used `hot_after` times."""
    copy_after: int = 1
    """Uses after which a page gets its replicas; its commit is the first."""
    hot_after: int = 4
    host_share: float = 0.25
    """Part of each host arena that pages of others may take."""
    nvme_share: float = 0.25
    heartbeat_s: float = 0.25
    suspect_s: float = 2.0
    """A member silent for so long is not live: not asked, and gets no copies."""
    connect_s: float = 2.0
    lease_s: float = 10.0
    transfer_s: float = 10.0
    """Longest transfer; also how long a lease that was not given back is quarantined."""
    store_s: float = 10.0
    """Longest wait for a peer's acknowledgement of one batch of copies."""
    batch_pages: int = 16
    """Pages that share one lease or one store message."""
    pull_pages: int = 4096
    """Pulls queued or running, all peers together."""
    push_pages: int = 8192
    """Copies queued for one peer."""
    rebalance_bytes_per_s: int = 64 << 20
    """Pace of copies that nobody waits for; 0: none."""
    breaker_failures: int = 3
    breaker_open_s: float = 5.0

    @property
    def own_address(self) -> Address:
        """Where others reach this node."""
        return self.advertise or self.listen

    @property
    def own_name(self) -> str:
        """How others call this node."""
        return self.name or str(self.own_address)

    def validate(self) -> None:
        """Raise ConfigError for what cannot work, in the words of the user's file. Resolves and
        opens nothing."""
        self._check_members()
        self._check_security()
        for name in ("replicas", "hot_replicas", "copy_after", "hot_after", "batch_pages"):
            if (value := getattr(self, name)) < 1:
                raise ConfigError(f"pool: {name} is {value}, expected at least 1")
        if self.batch_pages > BATCH_PAGES_MAX:
            raise ConfigError(
                f"pool: batch_pages is {self.batch_pages}, expected up to {BATCH_PAGES_MAX}"
            )
        if self.breaker_failures < 1 or not 0 < self.breaker_open_s <= 600:
            raise ConfigError(
                f"pool: breaker_failures is {self.breaker_failures}, expected at least 1, and "
                f"breaker_open {self.breaker_open_s:g} s, expected above 0 and up to 600 s"
            )
        if self.hot_replicas < self.replicas or self.hot_after < self.copy_after:
            raise ConfigError(
                f"pool: hot_replicas {self.hot_replicas} and hot_after {self.hot_after} must be at "
                f"least replicas {self.replicas} and copy_after {self.copy_after}"
            )
        for name in ("host_share", "nvme_share"):
            if not 0 <= (share := getattr(self, name)) <= 1:
                raise ConfigError(f"pool: {name} is {share * 100:g}%, expected 0% to 100%")
        for name in ("heartbeat_s", "suspect_s", "connect_s", "lease_s", "transfer_s", "store_s"):
            if not 0 < (value := getattr(self, name)) <= 600:
                raise ConfigError(
                    f"pool: {_key(name)} is {value:g} s, expected above 0 and up to 600 s"
                )
        if self.suspect_s < 2 * self.heartbeat_s:
            raise ConfigError(
                f"pool: suspect is {self.suspect_s:g} s, expected at least two heartbeats, and "
                f"heartbeat is {self.heartbeat_s:g} s"
            )
        if self.rebalance_bytes_per_s < 0 or min(self.pull_pages, self.push_pages) < 1:
            raise ConfigError(
                f"pool: rebalance is {self.rebalance_bytes_per_s} B/s, expected at least 0; "
                f"pull_pages is {self.pull_pages} and push_pages {self.push_pages}, "
                "expected at least 1"
            )

    def _check_members(self) -> None:
        name = self.own_name
        if len(name.encode("utf-8", "replace")) > NAME_BYTES_MAX or not name.isprintable():
            raise ConfigError(
                f"pool: name {name[:40]!r} cannot be said; take up to {NAME_BYTES_MAX} bytes "
                "of printable text"
            )
        if bool(self.members) == (self.etcd is not None):
            raise ConfigError("pool: give either members or etcd, exactly one of them")
        if len(self.members) > MEMBERS_MAX:
            raise ConfigError(f"pool: {len(self.members)} members, expected up to {MEMBERS_MAX}")
        seen: set[Address] = set()
        for member in self.members:
            if member in seen:
                raise ConfigError(f"pool: member {member} is listed twice; list each once")
            if member in (self.listen, self.own_address):
                raise ConfigError(
                    f"pool: member {member} is this node itself; list only the others"
                )
            seen.add(member)

    def _check_security(self) -> None:
        if self.key is None and not self.open_pool:
            raise ConfigError(
                "pool: no key; name a key_file with the shared secret, or set open_pool to let "
                "anybody in"
            )
        if self.key is not None and self.open_pool:
            raise ConfigError("pool: both a key and open_pool are set; choose one")
        if self.key is not None and len(self.key) < KEY_BYTES_MIN:
            raise ConfigError(
                f"pool: the key has {len(self.key)} bytes, expected at least {KEY_BYTES_MIN}"
            )
        given = [self.tls_certificate, self.tls_key, self.tls_authority]
        if any(given) and not all(given):
            raise ConfigError(
                "pool: tls needs tls_certificate, tls_key and tls_authority, all three of them"
            )
        unknown = [name for name in self.transports if name not in TRANSPORTS]
        if unknown or len(set(self.transports)) < len(self.transports):
            raise ConfigError(
                f"pool: transports {', '.join(self.transports)}: expected each once out of "
                f"{', '.join(TRANSPORTS)}"
            )
        if not self.any_interface and _is_wildcard(self.listen.host):
            raise ConfigError(
                f"pool: listen {self.listen} is all interfaces; name one address, or set "
                "any_interface"
            )


def _key(name: str) -> str:
    """What a user calls a field: a value has its unit there, and its name has none."""
    return name.removesuffix("_s")


def _is_wildcard(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False
