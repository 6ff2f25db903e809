"""run_daemon: how the process of a daemon ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from tests.support.daemon_process import ROOT, STOP_S, shared_folder

PROGRAM = """
import atexit, os, signal, sys
from pathlib import Path
from tierkv.daemon.run import run_daemon
from tierkv.daemon.settings import DaemonConfig
from tierkv.storage.mooncake.config import MooncakeConfig

folder, mooncake = Path(sys.argv[1]), sys.argv[2] == "mooncake"
# As Mooncake's library does it when its master is away.
atexit.register(os.abort)
config = DaemonConfig(
    socket_path=folder / "d.sock",
    arena_directory=folder / "arenas",
    host_bytes=1 << 20,
    http_host=None,
    mooncake=MooncakeConfig(master="127.0.0.1:1") if mooncake else None,
)
sys.exit(run_daemon(config, on_ready=lambda _: os.kill(os.getpid(), signal.SIGTERM)))
"""


@pytest.mark.parametrize(("kind", "code"), [("mooncake", 0), ("none", -signal.SIGABRT)])
def test_a_library_that_aborts_at_the_end_is_not_waited_for(kind: str, code: int) -> None:
    with shared_folder() as folder:
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, str(folder), kind],
            cwd=ROOT,
            env={**os.environ, "TIERKV_LOG_LEVEL": "info"},
            capture_output=True,
            text=True,
            timeout=STOP_S + 60,
        )
        assert not (folder / "d.sock").exists(), "it did not stop in order"
    assert done.returncode == code, done.stderr
