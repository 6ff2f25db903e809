"""A daemon in a process of its own: folder (socket and arena in it), host bytes, until SIGTERM."""

from __future__ import annotations

import sys
from pathlib import Path

from tierkv.daemon.run import run_daemon
from tierkv.daemon.settings import DaemonConfig

if __name__ == "__main__":
    folder = Path(sys.argv[1])
    config = DaemonConfig(
        socket_path=folder / "socket",
        arena_directory=folder,
        host_bytes=int(sys.argv[2]),
        http_host=None,
    )
    sys.exit(run_daemon(config))
