"""A second process of a benchmark: started as a module, says "ready ...", ends with its input.

Knows nothing of what it does. Used by benchmarks of what crosses a process boundary.
"""

from __future__ import annotations

import select
import socket
import subprocess
import sys
from contextlib import ExitStack

from tierkv.storage.closing import Closing

HOST = "127.0.0.1"
START_S = 60.0
STOP_S = 20.0


class Child(Closing):
    """`python -m MODULE ARGS`, from its line "ready WORDS" on until the with block ends.

    The child ends when its standard input does, so it never outlives this process.
    """

    def __init__(self, module: str, *args: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, *args],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.words: list[str] = []
        """What it said after "ready"."""
        try:
            line = self._read_line()
            if not line.startswith("ready"):
                raise RuntimeError(f"bench: {module} did not start; see its messages above")
            self.words = line.split()[1:]
        except BaseException:
            self.close()
            raise

    def ask(self, line: str) -> str:
        """Write a line to it and return the line it answers with."""
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        return self._read_line()

    def close(self) -> None:
        """End its input, wait for it, kill it when it does not end."""
        try:
            # Closes its standard input, which is the sign to end.
            self._process.communicate(timeout=STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()

    def _read_line(self) -> str:
        assert self._process.stdout is not None
        readable, _, _ = select.select([self._process.stdout], [], [], START_S)
        return self._process.stdout.readline().strip() if readable else ""


def say_ready(*words: object) -> None:
    """By the child: it can be used now."""
    sys.stdout.write(" ".join(["ready", *map(str, words)]) + "\n")
    sys.stdout.flush()


def free_ports(count: int, host: str = HOST) -> list[int]:
    """Ports of `host` that are free just now, all different: bound together before any is let
    go."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind((host, 0))
        return [int(each.getsockname()[1]) for each in sockets]
