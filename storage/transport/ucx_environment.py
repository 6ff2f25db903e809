"""What UCX has to be told before it is loaded, and what this machine can do for it.

Owns the environment variables that TierKV sets for UCX, and only where the user has not set them:
they are read by UCX itself and so hold for the process. Knows no library that uses UCX.
docs/guides names them. Called by the planes before their first import.

    UCX_NET_DEVICES   the interface that has the pool's address, and RDMA devices: UCX would listen
                      on all interfaces otherwise
    UCX_TLS           tcp,sm where there is no RDMA device. Connections are made over tcp, memory of
                      other processes of this machine is read directly (cma)
    UCX_MODULES       cma where there is no RDMA device. Others load the system's libnl beside
                      UCX's own copy, which crashes when the process ends
    NIXL_LOG_LEVEL    FATAL; NIXL writes to stderr by itself, TierKV logs what it returns
"""

from __future__ import annotations

import fcntl
import hashlib
import ipaddress
import logging
import os
import socket
import struct
from pathlib import Path

from tierkv.storage.errors import ConfigError

NET_DEVICES = "UCX_NET_DEVICES"
ADDRESSES_6 = Path("/proc/net/if_inet6")
INFINIBAND = Path("/sys/class/infiniband")
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
PROCESS_SPACE = Path("/proc/self/ns/pid")
MACHINE_BYTES = 16
_SIOCGIFADDR = 0x8915
"""Address of an interface, linux/sockios.h."""
_INTERFACE_NAME_BYTES = 15
_IFREQ = struct.Struct("16s24x")

log = logging.getLogger(__name__)


def prepare_ucx(host: str) -> dict[str, str]:
    """Set what is not set yet; returns what this call set. `host`: numeric address that the pool
    listens on.

    To be called before the first import of anything that loads UCX. ConfigError when UCX would
    listen on all interfaces although the pool does not.
    """
    rdma = rdma_devices()
    wanted = {"NIXL_LOG_LEVEL": "FATAL"}
    interface = interface_of(host)
    if interface is not None:
        wanted[NET_DEVICES] = ",".join([interface, *rdma])
    elif NET_DEVICES not in os.environ and not _is_everywhere(host):
        raise ConfigError(
            f"prepare UCX: no network interface has {host or 'an empty host'} as its first "
            f"address, so it would listen on all of them; set {NET_DEVICES} to say which"
        )
    if not rdma:
        wanted["UCX_TLS"] = "tcp,sm"
        wanted["UCX_MODULES"] = "cma"
    chosen = {name: value for name, value in wanted.items() if name not in os.environ}
    os.environ.update(chosen)
    if chosen:
        log.info("ucx environment=%s", " ".join(f"{k}={v}" for k, v in sorted(chosen.items())))
    return chosen


def copies_directly() -> bool:
    """Whether UCX may read memory of this machine's processes by itself, by its variables: else
    it would ask their process to send it, over tcp."""
    wanted = os.environ.get("UCX_TLS", "all")
    names = set(wanted.lstrip("^").split(","))
    direct = {"sm", "shm", "cma"} if wanted.startswith("^") else {"all", "sm", "shm", "cma"}
    return bool(names & direct) is not wanted.startswith("^")


def rdma_devices() -> list[str]:
    """Ports of RDMA devices as UCX names them, like mlx5_0:1; empty where there is none."""
    if not INFINIBAND.is_dir():
        return []
    return sorted(
        f"{device.name}:{port.name}"
        for device in INFINIBAND.iterdir()
        for port in (device / "ports").glob("*")
    )


def machine() -> bytes:
    """MACHINE_BYTES that are equal for two processes exactly when one can name the other by its
    process id: same boot of the same machine, same process namespace. All zeros: unknown."""
    try:
        text = BOOT_ID.read_text(encoding="ascii") + str(PROCESS_SPACE.readlink())
    except OSError as error:
        log.warning("ucx machine=unknown reason=%s", error)
        return bytes(MACHINE_BYTES)
    return hashlib.sha256(text.encode()).digest()[:MACHINE_BYTES]


def interface_of(host: str) -> str | None:
    """Name of the interface whose first IPv4 address, or one of whose IPv6 addresses, this is;
    None when there is none, or for a name: nothing is looked up here."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return None
    if address.is_loopback:
        return "lo"
    if address.version == 6:
        return _interface_of_6(address.packed)
    wanted = address.packed
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = _IFREQ.pack(name.encode()[:_INTERFACE_NAME_BYTES])
            try:
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
            except OSError:
                # It has no IPv4 address.
                continue
            if answer[20:24] == wanted:
                return name
    return None


def _interface_of_6(packed: bytes) -> str | None:
    if not ADDRESSES_6.exists():
        return None
    rows = (line.split() for line in ADDRESSES_6.read_text(encoding="ascii").splitlines())
    return next((words[-1] for words in rows if bytes.fromhex(words[0]) == packed), None)


def _is_everywhere(host: str) -> bool:
    """Whether the pool itself listens on all interfaces, which somebody asked for."""
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False
