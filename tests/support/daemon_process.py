"""A real daemon in a process of its own, for tests: started, killed, stopped, started again.

    python -m tests.support.daemon_process CONFIG_JSON     is the child

Paths are under one folder that the caller removes. Waiting has a bound everywhere.
"""

from __future__ import annotations

import json
import logging
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

from tierkv.daemon.layout import Layout
from tierkv.daemon.page_class import StoreOpener
from tierkv.daemon.run import run_daemon
from tierkv.daemon.server import Daemon
from tierkv.daemon.service import Service
from tierkv.daemon.settings import DaemonConfig, QuotaRule, VerifyCommit, VerifyLease
from tierkv.daemon.status import status_fields
from tierkv.protocol.messages import Limits
from tierkv.storage.errors import ConfigError
from tierkv.storage.mooncake.config import MooncakeConfig
from tierkv.storage.policy import AdmissionName, WritePolicy
from tierkv.storage.pool.config import Address, PoolConfig
from tierkv.storage.store import TieredStore
from tierkv.storage.tiers.host import HostTier
from tierkv.storage.tiers.nvme import NvmeTier

ROOT = Path(__file__).resolve().parents[2]
START_S = 60.0
STOP_S = 60.0
PAGE_BYTES = 4096
HOST_PAGES = 256
NVME_PAGES = 1024


def pool_from(values: Mapping[str, Any]) -> PoolConfig:
    """A PoolConfig from what json can say: addresses as text, the key in hex."""
    kinds: dict[str, Any] = {
        "listen": Address.parse,
        "advertise": Address.parse,
        "members": lambda texts: tuple(Address.parse(text) for text in texts),
        "key": bytes.fromhex,
        "transports": tuple,
        "tls_certificate": Path,
        "tls_key": Path,
        "tls_authority": Path,
    }
    known = {field.name for field in fields(PoolConfig)}
    assert values.keys() <= known, values.keys() - known
    return PoolConfig(
        **{name: kinds.get(name, lambda same: same)(value) for name, value in values.items()}
    )


_KINDS: dict[str, Any] = {
    "socket_path": Path,
    "arena_directory": Path,
    "cache_root": Path,
    "allowed_uids": tuple,
    "write_policy": WritePolicy,
    "admission": AdmissionName,
    "verify_commit": VerifyCommit,
    "verify_lease": VerifyLease,
    "limits": lambda values: Limits(**values),
    "pool": pool_from,
    "pool_key_file": Path,
    "mooncake": lambda values: MooncakeConfig(**values),
    "quotas": lambda rows: tuple(QuotaRule(**row) for row in rows),
}


def config_from(values: Mapping[str, Any]) -> DaemonConfig:
    """A DaemonConfig from what json can say."""
    known = {field.name for field in fields(DaemonConfig)}
    assert values.keys() <= known, values.keys() - known
    made = {
        name: _KINDS.get(name, lambda same: same)(value) if value is not None else None
        for name, value in values.items()
    }
    return DaemonConfig(**made)


def small_config(folder: Path, page_bytes: int = PAGE_BYTES, **changes: Any) -> dict[str, Any]:
    """Settings of a daemon for tests, with all its files under `folder`."""
    return {
        "socket_path": str(folder / "daemon.sock"),
        "arena_directory": str(folder / "arenas"),
        "cache_root": str(folder / "cache"),
        "host_bytes": HostTier.capacity_for(page_bytes, HOST_PAGES),
        "nvme_bytes": NvmeTier.capacity_for(page_bytes, NVME_PAGES),
        "nvme_min_free_bytes": 0,
        "write_policy": WritePolicy.WRITE_THROUGH.value,
        "admission": AdmissionName.ALL.value,
        "scrub_bytes_per_s": 0,
        "preload_fraction": 0.0,
        "http_host": None,
        "stop_s": 10.0,
        **changes,
    }


@contextmanager
def shared_folder() -> Iterator[Path]:
    """A short path on tmpfs, as in service; an ordinary folder where there is none."""
    shm = Path("/dev/shm")
    place = shm if os.access(shm, os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="tkv-", dir=place) as folder:
        yield Path(folder)


class DaemonProcess:
    """One daemon process. A context manager: leaving it kills what is left."""

    def __init__(
        self,
        values: Mapping[str, Any],
        module: str = "tests.support.daemon_process",
        prefix: Sequence[str] = (),
    ) -> None:
        """Start it; await_ready() waits until it listens. `prefix`: what runs the command."""
        self.values = dict(values)
        self.config = config_from(values)
        self.layout = Layout.of(self.config)
        self.process = subprocess.Popen(
            [*prefix, sys.executable, "-m", module, json.dumps(self.values)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.notes = ""

    @classmethod
    def started(
        cls,
        values: Mapping[str, Any],
        module: str = "tests.support.daemon_process",
        prefix: Sequence[str] = (),
    ) -> DaemonProcess:
        """A daemon that listens."""
        daemon = cls(values, module, prefix)
        daemon.await_ready()
        return daemon

    def __enter__(self) -> DaemonProcess:
        return self

    def __exit__(self, *exception: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self._collect()

    def await_ready(self) -> None:
        """Wait for its word that it listens."""
        assert self.read_line() == "ready", f"the daemon did not start: {self._collect()}"

    def read_line(self) -> str:
        """The next line it prints."""
        assert self.process.stdout is not None
        readable, _, _ = select.select([self.process.stdout], [], [], START_S)
        assert readable, "the daemon says nothing"
        return self.process.stdout.readline().strip()

    def tell(self, line: str) -> str:
        """Send it a line (a child of a test's own understands some); returns its answer."""
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        return self.read_line()

    def check(self) -> None:
        """Every invariant of the daemon holds now."""
        assert self.tell("check") == "ok"

    def status(self) -> dict[str, Any]:
        """What /status would show."""
        found: dict[str, Any] = json.loads(self.tell("status"))
        return found

    def await_status(self, what: str, wanted: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """Ask until the status is as wanted, within a bound."""
        deadline = time.monotonic() + START_S
        while True:
            found = self.status()
            if wanted(found):
                return found
            assert time.monotonic() < deadline, f"never came true: {what}: {found}"

    def kill(self) -> None:
        """kill -9."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(STOP_S)

    def stop(self) -> int:
        """SIGTERM; returns the exit code."""
        self.process.send_signal(signal.SIGTERM)
        self._collect()
        return self.process.returncode

    def wait_failed(self) -> tuple[int, str]:
        """Exit code and last words of a daemon that ends by itself."""
        self._collect()
        return self.process.returncode, self.notes

    def _collect(self) -> str:
        if self.process.stdout is None or self.process.stdout.closed:
            return self.notes
        _, errors = self.process.communicate(timeout=STOP_S)
        self.notes += errors
        return self.notes


Command = Callable[[list[str]], None]


def serve(
    values: Mapping[str, Any],
    open_store: StoreOpener = TieredStore.open,
    commands: Mapping[str, Command] | None = None,
) -> int:
    """The child's half: run the daemon, say "ready" once it listens, end as the command would.

    It obeys `commands`, and "check" (every invariant) and "status", line by line from stdin.
    """
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr)

    def ready(daemon: Daemon) -> None:
        threading.Thread(target=_obey, args=(daemon, commands or {}), daemon=True).start()
        print("ready", flush=True)

    try:
        return run_daemon(config_from(values), open_store, ready)
    except ConfigError as error:
        print(f"tierkv: error: {error}", file=sys.stderr)
        return 2


def _obey(daemon: Daemon, commands: Mapping[str, Command]) -> None:
    service = daemon.service
    for line in sys.stdin:
        verb, *words = line.split()
        answer = "ok"
        if verb == "check":
            answer = _on_loop(service, lambda: service.check() or "ok")
        elif verb == "status":
            answer = _on_loop(service, lambda: json.dumps(status_fields(service)))
        else:
            commands[verb](words)
        print(answer, flush=True)


def _on_loop(service: Service, call: Callable[[], str]) -> str:
    result: Future[str] = Future()

    def run() -> None:
        try:
            result.set_result(call())
        except AssertionError as error:
            result.set_result(f"broken: {error!r}")

    service.loop.call_soon_threadsafe(run)
    return result.result(START_S)


if __name__ == "__main__":
    sys.exit(serve(json.loads(sys.argv[1])))
