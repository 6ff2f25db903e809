"""tests/support/processes/daemon_worker.py at one daemon: told what to do, signalled, killed."""

from __future__ import annotations

import subprocess
import sys

from tests.support.daemon_process import PAGE_BYTES, ROOT, DaemonProcess
from tierkv.storage.closing import Closing

WAIT_S = 30.0


class Worker(Closing):
    """A worker process. A context manager: leaving it kills the process."""

    def __init__(self, daemon: DaemonProcess, page_bytes: int = PAGE_BYTES) -> None:
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-m", "tests.support.processes.daemon_worker"),
                *(str(daemon.config.socket_path), str(page_bytes)),
            ],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._line() == "ready"

    def tell(self, line: str) -> str:
        """Send it a command; returns its answer."""
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        return self._line()

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        """kill -9."""
        self.process.kill()
        self.process.communicate(timeout=WAIT_S)

    def close(self) -> None:
        self.kill()

    def _line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()
