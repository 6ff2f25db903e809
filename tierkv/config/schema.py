"""Every key of the daemon's configuration: section, kind, default and meaning.

Owns the names that users write, in a file as `section:` and `key:`, in the environment as
TIERKV_<SECTION>_<KEY>, on the command line as --<section>-<key>. Values are typed and resolved
(bytes, seconds); reading them is tierkv/config/sources.py. Knows nothing of the daemon: the command
line turns Settings into its DaemonConfig. docs/guides/sidecar.md shows a file.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, get_type_hints

from tierkv.config.key import Key
from tierkv.config.kinds import (
    DURATION,
    FLAG,
    HEX_PREFIX,
    MODE,
    PATH,
    RATIO,
    SHARE_OR_SIZE,
    SIZE,
    TEXT,
    UIDS,
    choice,
    optional,
    whole_number,
)
from tierkv.config.remote_sections import MooncakeSection, PoolSection
from tierkv.storage.policy import AdmissionName, WritePolicy

LOG_LEVELS = ("debug", "info", "warning", "error")
LOOPBACK = ("127.0.0.1", "::1", "localhost")
VERIFY_COMMIT = ("always", "sampled", "client")
VERIFY_LEASE = ("always", "recovered", "never")
QUOTA_RULES_MAX = 1024

_POSITIVE = whole_number(1, 1 << 20)


def _default_socket() -> str:
    return f"{os.environ.get('XDG_RUNTIME_DIR') or '/tmp'}/tierkv-{os.getuid()}.sock"


def _default_arenas() -> str:
    return f"/dev/shm/tierkv-{os.getuid()}"


@dataclass(frozen=True, slots=True)
class DaemonSection:
    """The process and its socket."""

    socket: Annotated[Path, Key(PATH, _default_socket, "Unix socket for workers.")]
    socket_mode: Annotated[int, Key(MODE, "0600", "File mode of the socket.")]
    socket_group: Annotated[
        str | None, Key(optional(TEXT), "none", "Group of the socket; use with socket_mode 0660.")
    ]
    users: Annotated[
        tuple[int, ...], Key(UIDS, "self", "Users that may connect: names, ids or self.")
    ]
    workers: Annotated[
        int, Key(whole_number(1, 256), "4", "Threads for checksums, flushes and drops.")
    ]
    stop: Annotated[float, Key(DURATION, "20s", "Bound of a graceful stop, flush included.")]


@dataclass(frozen=True, slots=True)
class HostSection:
    """Pages in host memory."""

    directory: Annotated[Path, Key(PATH, _default_arenas, "Folder on tmpfs for the arenas.")]
    size: Annotated[
        int, Key(SHARE_OR_SIZE, "1GiB", "All arenas together; % of the tmpfs.", share_of="space")
    ]
    class_size: Annotated[
        int | None,
        Key(
            optional(SHARE_OR_SIZE),
            "none",
            "Arena of one page size; % of host.size. None: all for the first one.",
            share_of="host.size",
        ),
    ]
    huge_pages: Annotated[bool, Key(FLAG, "false", "Ask for huge pages.")]


@dataclass(frozen=True, slots=True)
class NvmeSection:
    """Pages on a local disk."""

    directory: Annotated[
        Path | None, Key(optional(PATH), "none", "Folder for pages. None: no disk tier.")
    ]
    size: Annotated[int, Key(SHARE_OR_SIZE, "0", "Hard cap; % of the disk.", share_of="space")]
    class_size: Annotated[
        int | None,
        Key(
            optional(SHARE_OR_SIZE),
            "none",
            "Cap of one page size; % of nvme.size. None: all for the first one.",
            share_of="nvme.size",
        ),
    ]
    min_free: Annotated[
        int,
        Key(SHARE_OR_SIZE, "1GiB", "Stop growing when the disk has less left.", share_of="space"),
    ]


@dataclass(frozen=True, slots=True)
class MovementSection:
    """What moves between the tiers, and what is checked on the way."""

    write_policy: Annotated[
        WritePolicy,
        Key(choice(WritePolicy), WritePolicy.WRITE_THROUGH.value, "When host pages go to disk."),
    ]
    selective_hits: Annotated[
        int, Key(_POSITIVE, "2", "Hits before write_through_selective writes a page.")
    ]
    admission: Annotated[
        AdmissionName,
        Key(choice(AdmissionName), AdmissionName.HOTNESS.value, "Which pages may go to disk."),
    ]
    checksums: Annotated[bool, Key(FLAG, "true", "Keep a checksum of every page.")]
    verify_commit: Annotated[
        str, Key(choice(VERIFY_COMMIT), "always", "Whose checksums are recorded at commit.")
    ]
    verify_commit_every: Annotated[
        int, Key(_POSITIVE, "16", "With sampled: check one page in this many.")
    ]
    verify_lease: Annotated[
        str, Key(choice(VERIFY_LEASE), "recovered", "Which pages are checked before a lease.")
    ]
    write_budget: Annotated[
        int | None, Key(optional(SIZE), "none", "Bytes written to disk per day at most.")
    ]
    scrub: Annotated[int, Key(SIZE, "8MiB", "Cold bytes reread per second; 0: none.")]
    preload: Annotated[float, Key(RATIO, "50%", "Share of host filled from disk after a start.")]


@dataclass(frozen=True, slots=True)
class LimitsSection:
    """Bounds, checked before anything is allocated. All but the first three are per client."""

    clients: Annotated[int, Key(whole_number(1, 65536), "1024", "Connections.")]
    namespaces: Annotated[int, Key(_POSITIVE, "4096", "Namespaces known.")]
    classes: Annotated[int, Key(whole_number(1, 256), "16", "Page sizes served at once.")]
    frame: Annotated[int, Key(SIZE, "1MiB", "Longest frame without a payload.")]
    keys: Annotated[int, Key(whole_number(1, 1 << 16), "4096", "Keys of one request.")]
    leases: Annotated[int, Key(_POSITIVE, "1024", "Leases held.")]
    leased_pages: Annotated[int, Key(whole_number(1, 1 << 24), "65536", "Pages leased.")]
    reservations: Annotated[int, Key(_POSITIVE, "256", "Reservations held.")]
    reserved_pages: Annotated[int, Key(whole_number(1, 1 << 24), "4096", "Pages reserved.")]
    in_flight: Annotated[
        int, Key(whole_number(1, 65536), "256", "Requests that wait for an answer.")
    ]
    ids: Annotated[int, Key(whole_number(1, 4096), "64", "Ids in one list of a release.")]
    hold: Annotated[float, Key(DURATION, "10m", "Longest hold of a lease or reservation.")]
    wait: Annotated[float, Key(DURATION, "1m", "Longest wait a request may ask for.")]


@dataclass(frozen=True, slots=True)
class HttpSection:
    """Health, metrics and admin calls."""

    bind: Annotated[
        str | None, Key(optional(choice(LOOPBACK)), "127.0.0.1", "Loopback address. None: no HTTP.")
    ]
    port: Annotated[int, Key(whole_number(0, 65535), "7421", "0: a free one.")]
    token: Annotated[
        str | None,
        Key(
            optional(TEXT),
            "none",
            "Bearer token of admin calls; without one they are refused.",
            secret=True,
        ),
    ]


@dataclass(frozen=True, slots=True)
class LogSection:
    """The log, on standard error."""

    level: Annotated[str, Key(choice(LOG_LEVELS), "info", "Least severe message written.")]


@dataclass(frozen=True, slots=True)
class QuotaSection:
    """One rule of the list `quotas`. The first rule that matches a namespace counts."""

    tenant: Annotated[str | None, Key(optional(TEXT), "none", "Each namespace of this tenant.")]
    namespace: Annotated[str | None, Key(optional(HEX_PREFIX), "none", "Namespaces that begin so.")]
    host_floor: Annotated[
        int, Key(SHARE_OR_SIZE, "0", "Never evicted below.", share_of="host.size")
    ]
    host_ceiling: Annotated[
        int | None, Key(optional(SHARE_OR_SIZE), "none", "Never above.", share_of="host.size")
    ]
    nvme_floor: Annotated[
        int, Key(SHARE_OR_SIZE, "0", "Never evicted below.", share_of="nvme.size")
    ]
    nvme_ceiling: Annotated[
        int | None, Key(optional(SHARE_OR_SIZE), "none", "Never above.", share_of="nvme.size")
    ]
    ttl: Annotated[
        float | None, Key(optional(DURATION), "none", "Pages unused for this long are removed.")
    ]


@dataclass(frozen=True, slots=True)
class Settings:
    """Everything in force, resolved for this machine. Sizes in bytes, times in seconds."""

    daemon: DaemonSection
    host: HostSection
    nvme: NvmeSection
    movement: MovementSection
    pool: PoolSection
    mooncake: MooncakeSection
    limits: LimitsSection
    http: HttpSection
    log: LogSection
    quotas: tuple[QuotaSection, ...] = ()


SECTIONS: dict[str, type[Any]] = {
    "daemon": DaemonSection,
    "host": HostSection,
    "nvme": NvmeSection,
    "movement": MovementSection,
    "pool": PoolSection,
    "mooncake": MooncakeSection,
    "limits": LimitsSection,
    "http": HttpSection,
    "log": LogSection,
}
QUOTAS = "quotas"


def section_keys(section: type[Any]) -> dict[str, Key]:
    """The keys of one section, in the order in which they are shown."""
    return {
        name: hint.__metadata__[0]
        for name, hint in get_type_hints(section, include_extras=True).items()
    }


def all_keys() -> Iterator[tuple[str, Key]]:
    """Every key outside of quotas with its dotted name."""
    for name, section in SECTIONS.items():
        for key_name, key in section_keys(section).items():
            yield f"{name}.{key_name}", key


def find(name: str) -> Key | None:
    """The key of a dotted name; quotas.N.KEY for N from 0. None when there is no such key."""
    head, _, rest = name.partition(".")
    if head == QUOTAS:
        index, _, rest = rest.partition(".")
        if not (index.isascii() and index.isdigit() and int(index) < QUOTA_RULES_MAX):
            return None
        return section_keys(QuotaSection).get(rest)
    section = SECTIONS.get(head)
    return None if section is None else section_keys(section).get(rest)
