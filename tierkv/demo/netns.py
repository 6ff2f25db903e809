"""Hosts in network namespaces: several nodes with addresses of their own on one machine.

Owns the namespaces of one network and removes them at its end, whatever happened; those that an
earlier process left when it was killed are removed first. Knows nothing of what runs in them. Used
by `tierkv demo --remote` and by tests. Needs root and the `ip` and `bridge` commands (Debian:
iproute2).

    each host:  namespace, address 10.77.0.N, one veth  ---  bridge namespace

A process inside a namespace shares files, sockets in files and memory with all others.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from tierkv.storage.closing import Closing
from tierkv.storage.errors import ConfigError

COMMAND_S = 20.0
PREFIX = "tkv"
NAMESPACES = Path("/run/netns")
HOSTS_MAX = 250
BRIDGE = "bridge0"
_OURS = re.compile(PREFIX + r"(\d+)(b|h\d+|probe)")

log = logging.getLogger(__name__)


class Network(Closing):
    """`hosts` namespaces on one bridge, until the with block ends. Hosts count from 0."""

    def __init__(self, hosts: int) -> None:
        """Raises ConfigError, one line, when this process may not make them."""
        assert 1 <= hosts <= HOSTS_MAX, hosts
        if (problem := unavailable()) is not None:
            raise ConfigError(f"network namespaces: {problem}")
        self.hosts = hosts
        self._tag = f"{PREFIX}{os.getpid()}"
        self._bridge = f"{self._tag}b"
        _remove_orphans()
        try:
            self._make()
        except BaseException:
            self.close()
            raise

    def address(self, host: int) -> str:
        """The IPv4 address of a host, reachable from the others."""
        return f"10.77.0.{host + 1}"

    def command(self, host: int, command: Sequence[str]) -> list[str]:
        """`command` as it is run on a host."""
        return ["ip", "netns", "exec", self._name(host), *command]

    def set_link(self, host: int, up: bool) -> None:
        """Pull the host's cable out, or put it back."""
        _ip("-n", self._bridge, "link", "set", self._port(host), "up" if up else "down")

    def set_apart(self, hosts: Sequence[int], apart: bool) -> None:
        """Let these hosts not reach each other, while the others reach them, and end it again."""
        for host in hosts:
            state = "on" if apart else "off"
            port = self._port(host)
            _run(["bridge", "-n", self._bridge, "link", "set", "dev", port, "isolated", state])

    def close(self) -> None:
        """Remove the namespaces and what is in them. Processes there lose their network."""
        for name in [*(self._name(host) for host in range(self.hosts)), self._bridge]:
            if (NAMESPACES / name).exists():
                _ip("netns", "del", name)

    def _make(self) -> None:
        bridge = self._bridge
        _ip("netns", "add", bridge)
        _ip("-n", bridge, "link", "add", "name", BRIDGE, "type", "bridge")
        _ip("-n", bridge, "link", "set", BRIDGE, "up")
        for host in range(self.hosts):
            name, port = self._name(host), self._port(host)
            _ip("netns", "add", name)
            _ip(
                *("-n", name, "link", "add", "eth0", "type", "veth"),
                *("peer", "name", port, "netns", bridge),
            )
            _ip("-n", name, "addr", "add", f"{self.address(host)}/24", "dev", "eth0")
            _ip("-n", name, "link", "set", "eth0", "up")
            _ip("-n", name, "link", "set", "lo", "up")
            _ip("-n", bridge, "link", "set", port, "master", BRIDGE, "up")

    def _name(self, host: int) -> str:
        return f"{self._tag}h{host}"

    def _port(self, host: int) -> str:
        return f"port{host}"


def unavailable() -> str | None:
    """Why no namespaces can be made here; None when they can. One line."""
    if os.geteuid() != 0:
        return "making them needs root; run as root or leave out --remote"
    missing = [name for name in ("ip", "bridge") if shutil.which(name) is None]
    if missing:
        return f"the command {missing[0]} is missing; install iproute2"
    probe = f"{PREFIX}{os.getpid()}probe"
    try:
        _ip("netns", "add", probe)
        _ip("netns", "del", probe)
    except ConfigError as error:
        return f"this system refuses them: {error}"
    return None


def _remove_orphans() -> None:
    """Remove namespaces of processes that are no more."""
    if not NAMESPACES.is_dir():
        return
    for entry in NAMESPACES.iterdir():
        found = _OURS.fullmatch(entry.name)
        if found is not None and not Path("/proc", found[1]).exists():
            log.warning("network namespace=%s removed=yes reason=orphan", entry.name)
            _ip("netns", "del", entry.name)


def _ip(*arguments: str) -> None:
    _run(["ip", *arguments])


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_S, check=False)
    if done.returncode:
        reason = (done.stderr or done.stdout).strip().replace("\n", "; ")
        raise ConfigError(f"{' '.join(command)}: {reason or done.returncode}")
