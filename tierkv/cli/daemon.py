"""`tierkv serve`: the daemon of one node, in this process, until a signal."""

from __future__ import annotations

from typing import Any

from tierkv.cli.daemon_settings import (
    ConfigOption,
    SetOption,
    daemon_config,
    load_configuration,
    with_key_flags,
)


@with_key_flags
def serve(config: ConfigOption = None, assignments: SetOption = None, **flags: Any) -> int:
    """Keep pages in host memory and on disk for the workers of this node."""
    settings = load_configuration(config, assignments, flags).settings()
    daemon = daemon_config(settings)

    from tierkv.daemon.run import run_daemon

    return run_daemon(daemon)
