"""A TCP relay in front of one node that misbehaves when told to. A process of its own.

    python -m tests.support.processes.fault_proxy HOST PORT TARGET_HOST TARGET_PORT SEED

Says "ready PORT". Each line of its standard input is a mode, answered by that word once it is in
force; it ends with its input.

    pass      bytes go through
    flip      in each piece from the target, one bit is flipped now and then
    silent    connections stay open and new ones are accepted, but nothing is passed on
    cut       connections are closed, and new ones at once
"""

from __future__ import annotations

import asyncio
import random
import sys

PIECE_BYTES = 64 << 10
FLIP_SHARE = 0.3
"""Of pieces, in which a bit is flipped."""
MODES = ("pass", "flip", "silent", "cut")


class Proxy:
    """See the module docstring."""

    def __init__(self, target: tuple[str, int], seed: int) -> None:
        self._target = target
        self._random = random.Random(seed)
        self._mode = "pass"
        self._speaking = asyncio.Event()
        self._speaking.set()
        self._writers: set[asyncio.StreamWriter] = set()

    def set_mode(self, mode: str) -> None:
        """Behave so from now on."""
        assert mode in MODES, mode
        self._mode = mode
        if mode == "silent":
            self._speaking.clear()
        else:
            self._speaking.set()
        if mode == "cut":
            for writer in self._writers:
                writer.transport.abort()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Relay one connection, both ways, until either side ends it."""
        self._writers.add(writer)
        out: asyncio.StreamWriter | None = None
        try:
            if self._mode == "cut":
                return
            await self._speaking.wait()
            back, out = await asyncio.open_connection(*self._target)
            self._writers.add(out)
            ways = (self._relay(reader, out, False), self._relay(back, writer, True))
            tasks = [asyncio.ensure_future(way) for way in ways]
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        except OSError:
            # The target is down: whoever connected here sees its connection end.
            pass
        finally:
            for each in (writer, out):
                if each is not None:
                    self._writers.discard(each)
                    each.transport.abort()

    async def _relay(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, from_target: bool
    ) -> None:
        while piece := await reader.read(PIECE_BYTES):
            await self._speaking.wait()
            if from_target and self._mode == "flip" and self._random.random() < FLIP_SHARE:
                damaged = bytearray(piece)
                damaged[self._random.randrange(len(damaged))] ^= 1 << self._random.randrange(8)
                piece = bytes(damaged)
            writer.write(piece)
            await writer.drain()


async def run(host: str, port: int, target: tuple[str, int], seed: int) -> None:
    """Serve until standard input ends."""
    proxy = Proxy(target, seed)
    server = await asyncio.start_server(proxy.serve, host, port)
    print("ready", server.sockets[0].getsockname()[1], flush=True)
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        proxy.set_mode(line.strip())
        print(line.strip(), flush=True)


if __name__ == "__main__":
    asyncio.run(
        run(sys.argv[1], int(sys.argv[2]), (sys.argv[3], int(sys.argv[4])), int(sys.argv[5]))
    )
