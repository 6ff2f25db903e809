"""A Mooncake Store on loopback: a master and a store node, each a process that tests may kill.

Needs the extra [mooncake] and what it links to; why_absent() says what is missing. Ports are free
ones found beforehand, so nothing that runs on the machine is in the way.
"""

from __future__ import annotations

import importlib
import importlib.util
import signal
import subprocess
import sys
import threading
from typing import Any

from tierkv.bench.child import HOST, free_ports
from tierkv.bench.mooncake_master import start_master
from tierkv.storage.closing import Closing
from tierkv.storage.mooncake.config import MooncakeConfig
from tierkv.storage.mooncake.library import prepare_environment

READY_S = 30.0
CALL_S = 4.0
"""What bounds the library's own waits in the tests' process."""
NODE_TTL_S = 10
"""The master forgets a dead node's pages after so long."""

_NODE = """
import sys
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
code = store.setup(sys.argv[1], "P2PHANDSHAKE", int(sys.argv[3]), 1 << 20, "tcp", "", sys.argv[2])
print("ready" if code == 0 else f"code {code}", flush=True)
sys.stdin.read()
"""


def why_absent() -> str | None:
    """Why no cluster can be started here; None when one can.

    Loads the library, told before what TierKV tells it: it reads its environment once.
    """
    prepare_environment(MooncakeConfig(f"{HOST}:1", call_s=CALL_S))
    if importlib.util.find_spec("mooncake") is None:
        return "the package mooncake-transfer-engine-non-cuda is not installed"
    try:
        importlib.import_module("mooncake.store")
    except ImportError as error:
        return f"the Mooncake library cannot be loaded: {error}"
    return None


class StoreNode:
    """A process that gives `segment_bytes` of memory to the cluster."""

    def __init__(self, master: str, segment_bytes: int) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", _NODE, HOST, master, str(segment_bytes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        guard = threading.Timer(READY_S, self.process.kill)
        guard.start()
        assert self.process.stdout is not None
        said = self.process.stdout.readline().strip()
        guard.cancel()
        if said != "ready":
            self.kill()
            raise AssertionError(f"store node: expected ready, got {said!r}")

    def stop(self) -> None:
        """It stands still, in the middle of whatever it sends, until go_on()."""
        self.process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """kill -9. Idempotent."""
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                stream.close()


class MooncakeCluster(Closing):
    """A master and one store node. A context manager."""

    def __init__(self, segment_bytes: int = 64 << 20) -> None:
        self.segment_bytes = segment_bytes
        (self.port,) = free_ports(1)
        self.master_process = self._start_master()
        try:
            self.node = StoreNode(self.master, segment_bytes)
        except BaseException:
            self.kill_master()
            raise

    @property
    def master(self) -> str:
        """host:port."""
        return f"{HOST}:{self.port}"

    def kill_master(self) -> None:
        """kill -9. Idempotent."""
        self.master_process.kill()
        self.master_process.wait()

    def restart_node(self) -> None:
        """A new, empty store node."""
        self.node.kill()
        self.node = StoreNode(self.master, self.segment_bytes)

    def restart_master(self) -> None:
        """A new, empty master at the old address."""
        self.kill_master()
        self.master_process = self._start_master()

    def stop_master(self) -> None:
        """The master accepts and never answers, until continue_master()."""
        self.master_process.send_signal(signal.SIGSTOP)

    def continue_master(self) -> None:
        self.master_process.send_signal(signal.SIGCONT)

    def close(self) -> None:
        """kill -9 of both."""
        self.node.kill()
        self.kill_master()

    def _start_master(self) -> subprocess.Popen[bytes]:
        return start_master(self.port, f"--client_ttl={NODE_TTL_S}")


def raw_client(master: str) -> Any:
    """The library's own client, for what TierKV would never do."""
    store = importlib.import_module("mooncake.store").MooncakeDistributedStore()
    code = store.setup(HOST, "P2PHANDSHAKE", 0, 1 << 20, "tcp", "", master)
    assert code == 0, f"raw client: code {code}"
    return store
