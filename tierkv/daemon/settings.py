"""What a user sets about the daemon: a frozen value, checked before anything is opened.

Owns no state and opens nothing. Sizes are bytes, times seconds. tierkv.config fills it from YAML,
environment and flags; tierkv.daemon.run takes it. Limits of the protocol are a part of it, so
that every bound of the daemon is in one place.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path

from tierkv.protocol.messages import Limits
from tierkv.storage.errors import CapacityError, ConfigError
from tierkv.storage.mooncake.config import MooncakeConfig
from tierkv.storage.policy import AdmissionName, WritePolicy
from tierkv.storage.pool.config import PoolConfig
from tierkv.storage.tiers.nvme import MIN_FREE_BYTES

HTTP_PORT = 7421
SOCKET_MODE = 0o600
LOG_LEVELS = ("debug", "info", "warning", "error")


class VerifyCommit(StrEnum):
    """What the daemon does with a page that a client says is complete."""

    ALWAYS = "always"
    """Compute its checksum; compare with the client's when it gave one."""
    SAMPLED = "sampled"
    """The same for one page in `verify_commit_every`; others as `client`."""
    CLIENT = "client"
    """Record the client's checksum as it is; compute one only where the client gave none."""


class VerifyLease(StrEnum):
    """Which host pages are checked before a lease names them (about 15 GB/s)."""

    ALWAYS = "always"
    RECOVERED = "recovered"
    """Once, those that a former daemon left in the arena."""
    NEVER = "never"
    """The client checks, with the checksums the lease carries."""


@dataclass(frozen=True, slots=True)
class QuotaRule:
    """Bounds for the namespaces it matches. The first rule that matches counts.

    Exactly one of `namespace` (a prefix of the digest in hex) and `tenant` (its name; each of its
    namespaces gets the bounds) is given. None: no such bound.
    """

    namespace: str | None = None
    tenant: str | None = None
    host_floor_bytes: int = 0
    host_ceiling_bytes: int | None = None
    nvme_floor_bytes: int = 0
    nvme_ceiling_bytes: int | None = None
    ttl_s: float | None = None
    """Pages not used for this long are removed."""

    def __post_init__(self) -> None:
        if (self.namespace is None) == (self.tenant is None):
            raise ConfigError("quota: give either namespace or tenant, exactly one of them")
        if self.namespace is not None and not _is_hex(self.namespace):
            raise ConfigError(
                f"quota: namespace {self.namespace!r} is no hex prefix; use 1 to 64 digits 0-9a-f"
            )
        for tier, floor, ceiling in (
            ("host", self.host_floor_bytes, self.host_ceiling_bytes),
            ("nvme", self.nvme_floor_bytes, self.nvme_ceiling_bytes),
        ):
            if floor < 0 or (ceiling is not None and ceiling < floor):
                raise ConfigError(
                    f"quota: {tier} floor {floor} and ceiling {ceiling} do not fit; "
                    "expected 0 <= floor <= ceiling"
                )
        if self.ttl_s is not None and self.ttl_s <= 0:
            raise ConfigError(f"quota: ttl_s is {self.ttl_s}, expected above 0")

    def matches(self, namespace: bytes, tenant: str) -> bool:
        """Whether this rule is for a namespace (32-byte digest) of `tenant`."""
        if self.namespace is not None:
            return namespace.hex().startswith(self.namespace)
        return tenant == self.tenant


def _default_socket() -> Path:
    return Path(os.environ.get("XDG_RUNTIME_DIR") or "/tmp") / f"tierkv-{os.getuid()}.sock"


def _default_arena_directory() -> Path:
    return Path("/dev/shm") / f"tierkv-{os.getuid()}"


@dataclass(frozen=True, slots=True)
class DaemonConfig:
    """Everything the daemon needs to know. Defaults are for one user on one machine."""

    socket_path: Path = field(default_factory=_default_socket)
    socket_mode: int = SOCKET_MODE
    socket_group: str | None = None
    """Group of the socket file; set socket_mode to 0o660 with it."""
    allowed_uids: tuple[int, ...] = field(default_factory=lambda: (os.getuid(),))
    arena_directory: Path = field(default_factory=_default_arena_directory)
    cache_root: Path | None = None
    """Folder of the nvme tier; None: host memory only."""
    host_bytes: int = 1 << 30
    """All host arenas together."""
    host_class_bytes: int | None = None
    """Host memory of one page size; None: all of host_bytes for the first one."""
    nvme_bytes: int = 0
    """All page sizes on nvme together; a hard cap."""
    nvme_class_bytes: int | None = None
    nvme_min_free_bytes: int = MIN_FREE_BYTES
    huge_pages: bool = False
    checksums: bool = True
    """Off: pages are neither hashed nor verified. For measurements only."""
    write_policy: WritePolicy = WritePolicy.WRITE_THROUGH
    selective_hits: int = 2
    admission: AdmissionName = AdmissionName.HOTNESS
    verify_commit: VerifyCommit = VerifyCommit.ALWAYS
    verify_commit_every: int = 16
    """With `sampled`: one page in this many."""
    verify_lease: VerifyLease = VerifyLease.RECOVERED
    limits: Limits = field(default_factory=Limits)
    clients_max: int = 1024
    namespaces_max: int = 4096
    classes_max: int = 16
    """Page sizes served at once."""
    workers: int = 4
    """Threads for what may take long (checksums, flushes, drops)."""
    quotas: tuple[QuotaRule, ...] = ()
    write_budget_bytes_per_day: int | None = None
    scrub_bytes_per_s: int = 8 << 20
    """0: no scrubbing."""
    preload_fraction: float = 0.5
    """Share of host that is filled from nvme after a start; 0: none."""
    http_host: str | None = "127.0.0.1"
    """Loopback only. None: no HTTP."""
    http_port: int = HTTP_PORT
    """0: a free one, printed in the log."""
    http_token: str | None = field(default=None, repr=False)
    """Bearer token of admin calls; without one they are refused."""
    pool: PoolConfig | None = None
    """This node's part in a pool of nodes; checked when the daemon opens it, since a pool that
    cannot be opened costs the pool and not the local tiers. None: no pool."""
    pool_key_file: Path | None = None
    """Where the pool's key is; read at every start. None: what `pool` has."""
    mooncake: MooncakeConfig | None = None
    """A Mooncake Store as the remote tier, in place of a pool; checked as that is."""
    mooncake_lookup_s: float = 0.01
    """What a look-up waits for that store at most."""
    stop_s: float = 20.0
    """Bound of a graceful stop."""
    log_level: str = "info"

    def validate(self) -> None:
        """Raise ConfigError or CapacityError for what cannot work. Opens nothing."""
        self._check_sizes()
        self._check_ranges()
        if len(os.fsencode(self.socket_path)) > 107:
            raise ConfigError(
                f"daemon: socket_path {self.socket_path} is longer than the 107 bytes a unix "
                "socket may have; choose a shorter one"
            )
        if self.http_host not in (None, "127.0.0.1", "::1", "localhost"):
            raise ConfigError(
                f"daemon: http_host is {self.http_host!r}, expected 127.0.0.1, ::1 or localhost; "
                "put a proxy in front to serve other machines"
            )
        if self.log_level not in LOG_LEVELS:
            raise ConfigError(
                f"daemon: log_level is {self.log_level!r}, expected one of {', '.join(LOG_LEVELS)}"
            )
        if not self.allowed_uids:
            raise ConfigError("daemon: allowed_uids is empty, nobody could connect; name a uid")

    def _check_sizes(self) -> None:
        for name, share, whole in (
            ("host", self.host_class_bytes, self.host_bytes),
            ("nvme", self.nvme_class_bytes, self.nvme_bytes),
        ):
            if share is not None and not 0 < share <= max(whole, 1):
                raise CapacityError(
                    f"daemon: {name}.class_size is {share} bytes, expected 1 to {name}.size, "
                    f"{whole} bytes"
                )
        if self.host_bytes < 1:
            raise CapacityError(f"daemon: host.size is {self.host_bytes} bytes; raise it")
        if self.cache_root is not None and self.nvme_bytes < 1:
            raise CapacityError(
                f"daemon: nvme.directory is {self.cache_root}, but nvme.size is "
                f"{self.nvme_bytes} bytes; raise nvme.size or leave the directory out"
            )

    def _check_ranges(self) -> None:
        for name in ("selective_hits", "verify_commit_every", "clients_max", "workers"):
            if (value := getattr(self, name)) < 1:
                raise ConfigError(f"daemon: {name} is {value}, expected at least 1")
        for name in ("namespaces_max", "classes_max"):
            if (value := getattr(self, name)) < 1:
                raise ConfigError(f"daemon: {name} is {value}, expected at least 1")
        for name in ("scrub_bytes_per_s", "nvme_min_free_bytes"):
            if (value := getattr(self, name)) < 0:
                raise ConfigError(f"daemon: {name} is {value}, expected at least 0")
        if not 0 <= self.preload_fraction <= 1:
            raise ConfigError(
                f"daemon: preload_fraction is {self.preload_fraction}, expected 0 to 1"
            )
        if self.pool is not None and self.mooncake is not None:
            raise ConfigError("daemon: pool and mooncake are both set; a node has one remote tier")
        if self.mooncake_lookup_s <= 0:
            raise ConfigError(
                f"daemon: mooncake_lookup_s is {self.mooncake_lookup_s}, expected above 0"
            )
        if self.stop_s <= 0:
            raise ConfigError(f"daemon: stop_s is {self.stop_s}, expected above 0")
        if not 0 <= self.http_port <= 65535:
            raise ConfigError(f"daemon: http_port is {self.http_port}, expected 0 to 65535")
        if self.socket_mode & ~0o777:
            raise ConfigError(f"daemon: socket_mode is {self.socket_mode:#o}, expected 0 to 0o777")
        budget = self.write_budget_bytes_per_day
        if budget is not None and budget < 1:
            raise ConfigError(
                f"daemon: write_budget_bytes_per_day is {budget}, expected at least 1 or none"
            )

    def rule_for(self, namespace: bytes, tenant: str) -> QuotaRule | None:
        """The first quota rule that matches; None when none does."""
        return next((rule for rule in self.quotas if rule.matches(namespace, tenant)), None)

    def digest(self) -> str:
        """16 hex digits that change with any setting but the secrets. For /status."""
        values = asdict(self)
        values["http_token"] = self.http_token is not None
        if self.pool is not None:
            values["pool"]["key"] = self.pool.key is not None
        return hashlib.sha256(repr(sorted(values.items())).encode()).hexdigest()[:16]


def _is_hex(text: str) -> bool:
    return 0 < len(text) <= 64 and all(digit in "0123456789abcdef" for digit in text)
