"""What a user sets about a Mooncake Store: a frozen value, checked before anything is opened.

Owns no state and opens nothing. Times are seconds, sizes bytes. Read by every part of
storage/mooncake.
"""

from __future__ import annotations

from dataclasses import dataclass

from tierkv.storage.errors import ConfigError

PROTOCOLS = ("tcp", "rdma")
PEER_TO_PEER = "P2PHANDSHAKE"
"""The library's word for: no metadata server, clients ask each other."""
PORT_MAX = 65535


@dataclass(frozen=True, slots=True)
class MooncakeConfig:
    """One node as a client of a Mooncake Store."""

    master: str
    """`host:port` of mooncake_master; IPv6 in brackets."""
    address: str = "127.0.0.1"
    """Of this machine, by which the store's other clients reach it."""
    metadata: str = PEER_TO_PEER
    """URL of the cluster's metadata server, or P2PHANDSHAKE for none."""
    protocol: str = "tcp"
    device: str = ""
    """RDMA device, with protocol rdma."""
    segment_bytes: int = 0
    """Memory that this process gives to the store."""
    local_buffer_bytes: int = 1 << 20
    """The library's own scratch; no page passes through it."""
    register_arena: bool | None = None
    """Whether the host arena is registered with the library. What is registered can be read and
    written by whoever reaches the library's port, which asks nobody for a key. None: only with
    rdma, which cannot do without; over tcp the library moves unregistered memory as well, with
    no copy either."""
    replicas: int = 1
    copy_after: int = 1
    """Uses after which a page is copied to the store; its commit is the first."""
    connect_s: float = 2.0
    """Longest wait for the master when opening, for each of: its port, its answer."""
    call_s: float = 5.0
    """Longest a call of the library should take. A later one counts as a failure, and nothing
    more is asked until it has returned."""
    batch_pages: int = 16
    pull_pages: int = 4096
    """Pulls queued or running."""
    push_pages: int = 8192
    """Copies queued."""
    pull_workers: int = 2
    known_s: float = 30.0
    """How long it is believed that the store has a page."""
    absent_s: float = 0.5
    """How long it is believed that the store does not have a page."""
    avoid_s: float = 10.0
    """How long a page is not asked for whose transfer failed: its node may be dead, of which the
    master knows nothing for so long (its client_ttl)."""
    corrupt_s: float = 600.0
    """How long a page is not asked for whose value was wrong."""
    known_pages: int = 1 << 16
    corrupt_pages: int = 4096
    breaker_failures: int = 3
    breaker_open_s: float = 5.0

    @property
    def master_address(self) -> tuple[str, int]:
        """Host, without brackets, and port. ConfigError when `master` is none."""
        host, _, port = self.master.rpartition(":")
        bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
        if not bare or not port.isdecimal() or not 0 < int(port) <= PORT_MAX:
            raise ConfigError(
                f"mooncake: master {self.master!r} is not host:port; write one like node1:50051"
            )
        return bare, int(port)

    @property
    def registers_arena(self) -> bool:
        """register_arena, decided."""
        return self.protocol != "tcp" if self.register_arena is None else self.register_arena

    def validate(self) -> None:
        """Raise ConfigError for what cannot work, in the words of the user's file. Resolves and
        opens nothing."""
        assert self.master_address
        if self.protocol not in PROTOCOLS:
            raise ConfigError(
                f"mooncake: protocol is {self.protocol!r}, expected one of {', '.join(PROTOCOLS)}"
            )
        if not self.address or not self.metadata:
            raise ConfigError("mooncake: address and metadata must not be empty; set both")
        if self.segment_bytes < 0:
            raise ConfigError(
                f"mooncake: segment is {self.segment_bytes} bytes, expected at least 0"
            )
        for name in (
            "local_buffer_bytes",
            "replicas",
            "copy_after",
            "batch_pages",
            "pull_pages",
            "push_pages",
            "pull_workers",
            "known_pages",
            "corrupt_pages",
            "breaker_failures",
        ):
            if (value := getattr(self, name)) < 1:
                raise ConfigError(f"mooncake: {name} is {value}, expected at least 1; raise it")
        for name in (
            "connect_s",
            "call_s",
            "known_s",
            "absent_s",
            "avoid_s",
            "corrupt_s",
            "breaker_open_s",
        ):
            if not 0 < (seconds := getattr(self, name)) <= 3600:
                key = name.removesuffix("_s")
                raise ConfigError(
                    f"mooncake: {key} is {seconds:g} s, expected above 0 and up to 3600 s"
                )
