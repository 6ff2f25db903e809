"""NIXL as this project uses it: one agent, its UCX backend, reads.

Owns the only import of NIXL, lazy, and turns whatever NIXL raises into TierIOError. Knows no
peers, pages or deadlines. It calls NIXL's bindings and not the Python class above them, because
that one starts NIXL's progress thread with a delay of zero, and then the thread spins on a whole
core for as long as the process lives. With a delay it sleeps until UCX has an event.
Thread-safe: NIXL is asked for its strict locking. Every call but close() returns without waiting
for a peer. Called by nixl.py and nixl_driver.py.
"""

from __future__ import annotations

import importlib
import logging
import threading
from collections.abc import Sequence
from types import ModuleType
from typing import Any, NamedTuple

from tierkv.storage.errors import ConfigError, TierIOError
from tierkv.storage.transport.ucx_environment import prepare_ucx

PACKAGES = ("nixl_cu13", "nixl_cu12")
"""Where the wheels keep it; the same without a GPU."""
BACKEND = "UCX"
PROGRESS_DELAY_US = 1_000_000
"""Longest sleep of NIXL's progress thread. Events of UCX wake it before."""

log = logging.getLogger(__name__)


class Copy(NamedTuple):
    """Bytes to fetch: addresses in this process and in the peer's."""

    local: int
    remote: int
    length: int


class Agent:
    """One NIXL agent with its UCX backend. Released by close()."""

    def __init__(self, name: str, host: str) -> None:
        """`host`: numeric address of this node in the pool. ConfigError, one line, when NIXL is
        not installed or cannot run here."""
        self.name = name
        prepare_ucx(host)
        self._nixl = bindings()
        self._errors: tuple[type[Exception], ...] = (*_error_classes(self._nixl), RuntimeError)
        self._lock = threading.Lock()
        config = self._nixl.nixlAgentConfig()
        config.useProgThread = True
        config.pthrDelay = PROGRESS_DELAY_US
        config.useListenThread = False
        config.captureTelemetry = False
        config.syncMode = self._nixl.NIXL_THREAD_SYNC_STRICT
        try:
            agent = self._nixl.nixlAgent(name, config)
            parameters, _ = agent.getPluginParams(BACKEND)
            agent.createBackend(BACKEND, parameters)
        except self._errors as error:
            raise ConfigError(
                f"start nixl: its UCX backend cannot run here: {_reason(error)}; check UCX_TLS, "
                "UCX_NET_DEVICES and UCX_MODULES, or leave nixl out of the transports"
            ) from error
        self._agent: Any = agent

    def register(self, address: int, length: int) -> object:
        """Make local memory known to NIXL; what deregister() wants."""
        return self.register_all([(address, length)])

    def register_all(self, runs: Sequence[tuple[int, int]]) -> object:
        """As register(), for several (address, length)."""
        rows = [(address, length, 0, "") for address, length in runs]
        descriptors = self._nixl.nixlRegDList(self._nixl.DRAM_SEG, rows)
        self._ask("register memory", "registerMem", descriptors, [])
        return descriptors

    def deregister(self, registration: object) -> None:
        """Undo register()."""
        self._ask("deregister memory", "deregisterMem", registration, [])

    def metadata(self) -> bytes:
        """What a peer's load() wants: connection and registered memory."""
        return bytes(self._ask("describe memory", "getLocalMD"))

    def load(self, metadata: bytes) -> str:
        """Learn a peer, or what a known peer has registered since; returns its agent's name."""
        name = self._ask("load peer", "loadRemoteMD", metadata)
        return name.decode("ascii", "replace") if isinstance(name, bytes) else str(name)

    def forget(self, name: str) -> None:
        """Forget a peer. Transfers of it that have not ended can be asked about no more, and may
        still write: to be called when there are none."""
        self._ask("forget peer", "invalidateRemoteMD", name)

    def start(self, peer: str, copies: Sequence[Copy]) -> tuple[int, bool]:
        """Begin to fetch all of `copies`; a handle for release(), and whether it is done already.

        Where memory is read through the system (cma) the copying is done in here, without the
        GIL; RDMA goes on by itself. TierIOError: nothing was begun, or some of it failed.
        """
        nixl = self._nixl
        local = nixl.nixlXferDList(nixl.DRAM_SEG, [(c.local, c.length, 0) for c in copies])
        remote = nixl.nixlXferDList(nixl.DRAM_SEG, [(c.remote, c.length, 0) for c in copies])
        handle = self._ask(
            "prepare transfer", "createXferReq", nixl.NIXL_READ, local, remote, peer, b"", []
        )
        try:
            return handle, self._done(self._ask("start transfer", "postXferReq", handle, b""))
        except TierIOError:
            self.release(handle)
            raise

    def done(self, handle: int) -> bool:
        """Whether a transfer has ended well. TierIOError when it has failed."""
        return self._done(self._ask("await transfer", "getXferStatus", handle))

    def release(self, handle: int) -> None:
        """Free a handle of start(). Does not stop the transfer: NIXL cannot."""
        try:
            self._ask("release transfer", "releaseXferReq", handle)
        except TierIOError as error:
            # NIXL keeps it, and frees it with the agent.
            log.debug("nixl=%s %s", self.name, error)

    def progress(self) -> None:
        """Let UCX handle what has happened. Brief."""
        self._ask("progress", "getNotifs", {}, [])

    def close(self) -> None:
        """End NIXL's thread and free what it holds. By one thread, when no other is in here.

        Nothing of this process writes to the destinations of its transfers afterwards.
        """
        with self._lock:
            self._agent = None

    def _ask(self, what: str, name: str, *arguments: object) -> Any:
        agent = self._agent
        if agent is None:
            raise TierIOError(f"{what} by nixl: the agent was closed")
        try:
            return getattr(agent, name)(*arguments)
        except self._errors as error:
            raise TierIOError(f"{what} by nixl: {_reason(error)}") from error

    def _done(self, status: object) -> bool:
        if status == self._nixl.NIXL_SUCCESS:
            return True
        if status == self._nixl.NIXL_IN_PROG:
            return False
        raise TierIOError(f"await transfer by nixl: {status}")


def bindings() -> ModuleType:
    """NIXL's bindings. ConfigError naming the extra when no wheel is installed."""
    problems = []
    for package in PACKAGES:
        try:
            importlib.import_module(package)
            return importlib.import_module(f"{package}._bindings")
        except ModuleNotFoundError as error:
            if error.name not in (package, f"{package}._bindings"):
                problems.append(f"{package}: {error}")
        except (ImportError, OSError) as error:
            problems.append(f"{package}: {error}")
    found = "; ".join(" ".join(problem.split()) for problem in problems) or "it is not installed"
    raise ConfigError(
        f"start nixl: {found}; install the extra tierkv[nixl-cu12] or tierkv[nixl-cu13], or leave "
        "nixl out of the transports"
    )


def _error_classes(nixl: ModuleType) -> list[type[Exception]]:
    """NIXL's errors have no base class of their own."""
    return [
        value
        for name, value in vars(nixl).items()
        if name.endswith("Error") and isinstance(value, type) and issubclass(value, Exception)
    ]


def _reason(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
