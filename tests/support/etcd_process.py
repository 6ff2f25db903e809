"""A real etcd on loopback, for tests: started, killed, paused, emptied, started again.

Data and ports stay over restarts. Waiting has a bound everywhere. Needs the program `etcd` on the
path (Debian: etcd-server).
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tierkv.bench.child import free_ports

START_S = 60.0
STOP_S = 30.0
READY = "ready to serve client requests"


class EtcdProcess:
    """One etcd with its data under `folder`. Not thread-safe."""

    def __init__(self, folder: Path) -> None:
        self.port, self._peer_port = free_ports(2)
        self._data = folder / "data"
        self._process: subprocess.Popen[str] | None = None
        self._ready = threading.Event()
        self._log: deque[str] = deque(maxlen=40)
        self._reader: threading.Thread | None = None

    @property
    def address(self) -> str:
        """`host:port` for clients."""
        return f"127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start it on its data and wait until it serves."""
        assert self._process is None, "runs already"
        self._ready = threading.Event()
        client, peer = (f"http://127.0.0.1:{port}" for port in (self.port, self._peer_port))
        self._process = subprocess.Popen(
            [
                "etcd",
                f"--data-dir={self._data}",
                f"--listen-client-urls={client}",
                f"--advertise-client-urls={client}",
                f"--listen-peer-urls={peer}",
                f"--initial-advertise-peer-urls={peer}",
                f"--initial-cluster=default={peer}",
                # Short elections: leases cannot be shorter than one and a half of them.
                "--heartbeat-interval=50",
                "--election-timeout=250",
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={"PATH": os.environ.get("PATH", ""), "GOMAXPROCS": "1"},
        )
        self._reader = threading.Thread(target=self._read, args=(self._process,), daemon=True)
        self._reader.start()
        if not self._ready.wait(START_S) or self._process.poll() is not None:
            lines = "".join(self._log)
            self.kill()
            raise AssertionError(f"etcd did not start:\n{lines}")

    def kill(self) -> None:
        """kill -9; the data stays."""
        process, self._process = self._process, None
        if process is None:
            return
        process.send_signal(signal.SIGKILL)
        process.wait(STOP_S)
        assert self._reader is not None and process.stdout is not None
        self._reader.join(STOP_S)
        process.stdout.close()

    def pause(self) -> None:
        """SIGSTOP: the port still accepts connections, nobody answers."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """SIGCONT."""
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def wipe(self) -> None:
        """Lose everything. Only while it does not run."""
        assert self._process is None, "kill it first"
        shutil.rmtree(self._data, ignore_errors=True)

    def _read(self, process: subprocess.Popen[str]) -> None:
        """Drain its log, or the pipe would fill and stop it; the end of the log wakes too."""
        assert process.stdout is not None
        for line in process.stdout:
            self._log.append(line)
            if READY in line:
                self._ready.set()
        self._ready.set()


@contextmanager
def etcd_process(folder: Path) -> Iterator[EtcdProcess]:
    """A started etcd; skips the test with the reason when there is no program for it."""
    if shutil.which("etcd") is None:
        pytest.skip("no etcd on the path (Debian: apt-get install etcd-server)")
    etcd = EtcdProcess(folder)
    try:
        etcd.start()
        yield etcd
    finally:
        etcd.kill()
