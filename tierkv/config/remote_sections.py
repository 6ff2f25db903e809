"""Keys of what lies beyond the node: the pool of TierKV nodes, or a Mooncake Store.

Owns the keys of the sections `pool` and `mooncake`; most are a field of storage.pool.config's
PoolConfig or of storage.mooncake.config's MooncakeConfig, which say what fits together. Times and
sizes have their units here, as in every section. docs/guides/pool.md shows a file. Called by
tierkv/config/schema.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tierkv.config.key import Key
from tierkv.config.kinds import (
    DURATION,
    FLAG,
    PATH,
    RATE,
    RATIO,
    SIZE,
    TEXT,
    address,
    addresses,
    choice,
    choices,
    optional,
    whole_number,
)
from tierkv.storage.mooncake.config import PEER_TO_PEER, PROTOCOLS
from tierkv.storage.pool.config import PORT, TRANSPORTS, Address

ETCD_PORT = 2379
MASTER_PORT = 50051

_COUNT = whole_number(1, 1 << 20)


@dataclass(frozen=True, slots=True)
class PoolSection:
    """This node's part in a pool of TierKV nodes. Without `listen` there is none."""

    listen: Annotated[
        Address | None,
        Key(optional(address(PORT)), "none", "Own address for members. None: no pool."),
    ]
    members: Annotated[
        tuple[Address, ...] | None,
        Key(optional(addresses(PORT)), "none", "The other members; or give etcd."),
    ]
    name: Annotated[
        str | None, Key(optional(TEXT), "none", "This member's name. None: its address.")
    ]
    advertise: Annotated[
        Address | None,
        Key(optional(address(PORT)), "none", "Where others reach this node. None: listen."),
    ]
    any_interface: Annotated[bool, Key(FLAG, "false", "Let listen be all interfaces.")]
    key_file: Annotated[
        Path | None,
        Key(optional(PATH), "none", "The members' shared secret, 16 bytes or more, mode 0600."),
    ]
    open_pool: Annotated[bool, Key(FLAG, "false", "No key: anybody who reaches the port is in.")]
    tls_certificate: Annotated[
        Path | None, Key(optional(PATH), "none", "PEM. With it members talk TLS.")
    ]
    tls_key: Annotated[Path | None, Key(optional(PATH), "none", "PEM of that certificate's key.")]
    tls_authority: Annotated[
        Path | None, Key(optional(PATH), "none", "PEM. Who signed the members' certificates.")
    ]
    etcd: Annotated[
        Address | None,
        Key(optional(address(ETCD_PORT)), "none", "An etcd v3 that says who the members are."),
    ]
    etcd_prefix: Annotated[str, Key(TEXT, "/tierkv/pool", "Of the members' keys in etcd.")]
    transports: Annotated[
        tuple[str, ...],
        Key(choices(TRANSPORTS), "tcp", "Data paths, best first; tcp is always possible."),
    ]
    replicas: Annotated[int, Key(_COUNT, "1", "Other members that get each page.")]
    hot_replicas: Annotated[int, Key(_COUNT, "2", "Other members that get each hot page.")]
    copy_after: Annotated[int, Key(_COUNT, "1", "Uses of a page before its copies are made.")]
    hot_after: Annotated[int, Key(_COUNT, "4", "Uses that make a page hot.")]
    host_share: Annotated[float, Key(RATIO, "25%", "Of host, for pages of other members.")]
    nvme_share: Annotated[float, Key(RATIO, "25%", "Of nvme, for pages of other members.")]
    heartbeat: Annotated[float, Key(DURATION, "250ms", "Between two messages to a member.")]
    suspect: Annotated[float, Key(DURATION, "2s", "A member silent for so long is not asked.")]
    connect: Annotated[float, Key(DURATION, "2s", "Longest wait for a connection.")]
    lease: Annotated[float, Key(DURATION, "10s", "How long a member may read what it leased.")]
    transfer: Annotated[float, Key(DURATION, "10s", "Longest transfer of one batch.")]
    store: Annotated[float, Key(DURATION, "10s", "Longest wait until a batch of copies is kept.")]
    batch_pages: Annotated[int, Key(_COUNT, "16", "Pages of one batch.")]
    pull_pages: Annotated[int, Key(_COUNT, "4096", "Pages on their way here, at most.")]
    push_pages: Annotated[int, Key(_COUNT, "8192", "Copies queued for one member, at most.")]
    rebalance: Annotated[int, Key(RATE, "64MiB/s", "Pace of copies nobody waits for; 0: none.")]
    breaker_failures: Annotated[int, Key(_COUNT, "3", "Failures until a member is put aside.")]
    breaker_open: Annotated[float, Key(DURATION, "5s", "For how long it is put aside.")]


@dataclass(frozen=True, slots=True)
class MooncakeSection:
    """An existing Mooncake Store as the remote tier. Without `master` there is none."""

    master: Annotated[
        Address | None,
        Key(optional(address(MASTER_PORT)), "none", "The store's master. None: no Mooncake."),
    ]
    metadata: Annotated[
        str, Key(TEXT, PEER_TO_PEER, "Metadata server's URL, or P2PHANDSHAKE for none.")
    ]
    address: Annotated[
        str, Key(TEXT, "127.0.0.1", "This node's address for the store's other clients.")
    ]
    protocol: Annotated[str, Key(choice(PROTOCOLS), "tcp", "How pages travel.")]
    device: Annotated[str | None, Key(optional(TEXT), "none", "RDMA device, with rdma.")]
    segment: Annotated[int, Key(SIZE, "0", "Memory that this node gives to the store.")]
    register_arena: Annotated[
        bool | None,
        Key(optional(FLAG), "none", "Let the library register host memory. None: with rdma."),
    ]
    replicas: Annotated[int, Key(_COUNT, "1", "Copies that the store keeps of a page.")]
    copy_after: Annotated[int, Key(_COUNT, "1", "Uses of a page before it is copied there.")]
    lookup_wait: Annotated[
        float, Key(DURATION, "10ms", "Longest wait of a look-up for the store's answer.")
    ]
    connect: Annotated[float, Key(DURATION, "2s", "Longest wait for the master at the start.")]
    call: Annotated[float, Key(DURATION, "5s", "A call that takes longer has failed.")]
    known: Annotated[float, Key(DURATION, "30s", "How long a page is believed to be there.")]
    absent: Annotated[float, Key(DURATION, "500ms", "How long it is believed not to be.")]
    batch_pages: Annotated[int, Key(_COUNT, "16", "Pages of one call.")]
    pull_pages: Annotated[int, Key(_COUNT, "4096", "Pages on their way here, at most.")]
    push_pages: Annotated[int, Key(_COUNT, "8192", "Copies queued, at most.")]
    breaker_failures: Annotated[int, Key(_COUNT, "3", "Failures until the store is put aside.")]
    breaker_open: Annotated[float, Key(DURATION, "5s", "For how long it is put aside.")]
