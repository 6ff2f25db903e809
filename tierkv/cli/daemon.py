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
from tierkv.storage.errors import ConfigError

DAEMON_PACKAGES = frozenset(("aiohttp", "prometheus_client", "sdnotify", "uvloop"))
"""What the extra `daemon` installs."""


@with_key_flags
def serve(config: ConfigOption = None, assignments: SetOption = None, **flags: Any) -> int:
    """Keep pages in host memory and on disk for the workers of this node."""
    settings = load_configuration(config, assignments, flags).settings()
    daemon = daemon_config(settings)

    try:
        from tierkv.daemon.run import run_daemon
    except ModuleNotFoundError as error:
        if error.name not in DAEMON_PACKAGES:
            raise
        raise ConfigError(
            f"serve: package {error.name} is not installed; run: pip install 'tierkv[daemon]'"
        ) from None

    return run_daemon(daemon)
