"""Reads over NixlPlane beside NIXL used directly: the nixl part of `tierkv bench remote`.

Owns one child process that offers the same memory to both. The direct loop is NIXL at its best on
this machine: bare bindings, no Python class between, one transfer for the batch, asked about
without a pause, with the progress thread that sleeps (the default one spins and takes a core from
whoever copies: half the speed on two cores).

    python -m tierkv.bench.remote_nixl PAGE_BYTES BATCH        is the child
"""

from __future__ import annotations

import sys
from typing import Any

from tierkv.bench.child import HOST, Child, say_ready
from tierkv.bench.filled import filled
from tierkv.storage.closing import Closing
from tierkv.storage.device import address_of
from tierkv.storage.transport.base import PageOutcome, PageRange
from tierkv.storage.transport.nixl import NixlPlane
from tierkv.storage.transport.nixl_agent import BACKEND, PROGRESS_DELAY_US, bindings
from tierkv.storage.transport.ucx_environment import prepare_ucx

WAIT_S = 30.0
GENERATION = 1


class NixlPair(Closing):
    """Two processes; direct() and plane() each move one batch of pages into this one."""

    def __init__(self, page_bytes: int, batch: int) -> None:
        """ConfigError when NIXL is not installed."""
        self._memory = filled(page_bytes * batch)
        self._direct = _Direct("reader", self._memory)
        self._plane = NixlPlane(HOST)
        self._plane.register(self._memory, GENERATION)
        self._child = Child("tierkv.bench.remote_nixl", str(page_bytes), str(batch))
        address, metadata, offer = self._child.words
        starts = range(0, page_bytes * batch, page_bytes)
        self._copies = [(start, int(address) + start, page_bytes) for start in starts]
        self._ranges = [PageRange(start, page_bytes) for start in starts]
        self._views = [self._memory[start : start + page_bytes] for start in starts]
        self._remote = self._direct.load(bytes.fromhex(metadata))
        self._peer = self._plane.connect(bytes.fromhex(offer), "bench", WAIT_S)

    def close(self) -> None:
        """Close the plane and end the child."""
        self._plane.close()
        self._child.close()

    def direct(self) -> None:
        """Read a batch by NIXL."""
        self._direct.read(self._remote, self._copies)

    def plane(self) -> None:
        """Read a batch through the plane."""
        read = self._peer.read(GENERATION, self._ranges, self._views, WAIT_S)
        outcomes = read.take(WAIT_S)
        assert set(outcomes) == {PageOutcome.OK}, read.error


class _Direct:
    """NIXL as an application would use it, and no more."""

    def __init__(self, name: str, memory: memoryview) -> None:
        prepare_ucx(HOST)
        self._nixl: Any = bindings()
        config = self._nixl.nixlAgentConfig()
        config.useProgThread = True
        config.pthrDelay = PROGRESS_DELAY_US
        self._agent = self._nixl.nixlAgent(name, config)
        parameters, _ = self._agent.getPluginParams(BACKEND)
        self._agent.createBackend(BACKEND, parameters)
        self.address = address_of(memory)
        rows = [(self.address, len(memory), 0, "")]
        self._agent.registerMem(self._nixl.nixlRegDList(self._nixl.DRAM_SEG, rows), [])

    def metadata(self) -> bytes:
        return bytes(self._agent.getLocalMD())

    def load(self, metadata: bytes) -> str:
        return str(self._agent.loadRemoteMD(metadata), "ascii")

    def read(self, remote: str, copies: list[tuple[int, int, int]]) -> None:
        nixl, agent = self._nixl, self._agent
        here = [(self.address + start, size, 0) for start, _, size in copies]
        there = [(address, size, 0) for _, address, size in copies]
        handle = agent.createXferReq(
            nixl.NIXL_READ,
            nixl.nixlXferDList(nixl.DRAM_SEG, here),
            nixl.nixlXferDList(nixl.DRAM_SEG, there),
            remote,
            b"",
            [],
        )
        status = agent.postXferReq(handle, b"")
        while status == nixl.NIXL_IN_PROG:
            status = agent.getXferStatus(handle)
        assert status == nixl.NIXL_SUCCESS, status
        agent.releaseXferReq(handle)


def _serve(page_bytes: int, batch: int) -> int:
    memory = filled(page_bytes * batch)
    direct = _Direct("server", memory)
    plane = NixlPlane(HOST)
    plane.register(memory, GENERATION)
    say_ready(direct.address, direct.metadata().hex(), plane.offer().hex())
    sys.stdin.read()
    plane.close()
    return 0


if __name__ == "__main__":
    sys.exit(_serve(int(sys.argv[1]), int(sys.argv[2])))
