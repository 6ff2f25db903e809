"""A mooncake_master of one's own, for benchmarks and tests. No state."""

from __future__ import annotations

import importlib
import socket
import subprocess
import time
from pathlib import Path

from tierkv.bench.child import HOST, free_ports
from tierkv.storage.errors import ConfigError

START_S = 30.0
POLL_S = 0.05


def start_master(port: int, *flags: str) -> subprocess.Popen[bytes]:
    """The package's master at a port of this machine, once it listens; the caller kills it.

    ConfigError when it ends or does not listen in START_S. ImportError without the package.
    """
    package = importlib.import_module("mooncake")
    (metrics_port,) = free_ports(1)
    process = subprocess.Popen(
        [
            Path(package.__path__[0]) / "mooncake_master",
            f"--rpc_port={port}",
            f"--rpc_address={HOST}",
            f"--metrics_port={metrics_port}",
            f"--metrics_host={HOST}",
            "--enable_metric_reporting=false",
            *flags,
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + START_S
    while not _listens(port):
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()
            process.wait()
            raise ConfigError("mooncake: mooncake_master did not start")
        time.sleep(POLL_S)
    return process


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex((HOST, port)) == 0
