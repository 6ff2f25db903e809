"""Whether a Mooncake master can be used, found out where nothing can be held up or crash.

Owns a short-lived child process. The library's setup() waits with the interpreter lock held: a
master that accepts and never answers would stop every thread of this process for as long. The
child loads the library and sets it up first; it is killed at the deadline. Called by
storage.mooncake.client, and run as `python -m tierkv.storage.mooncake.trial`.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from dataclasses import asdict, replace

from tierkv.storage.errors import ConfigError
from tierkv.storage.mooncake.config import MooncakeConfig
from tierkv.storage.mooncake.library import new_store, set_up

START_S = 30.0
"""Longest that starting an interpreter and loading the library may take, on a busy machine."""


def assert_usable(config: MooncakeConfig) -> None:
    """Raise ConfigError, one line, when the library, the master or our address is of no use.

    Waits at most twice connect_s, and START_S while the child starts.
    """
    _assert_reachable(config)
    _assert_own_address(config)
    # The child gives up by itself sooner than it is killed, and can say more.
    patience = replace(config, call_s=config.connect_s)
    command = [sys.executable, "-P", "-m", __name__, json.dumps(asdict(patience))]
    try:
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
    except OSError as error:
        raise ConfigError(
            f"mooncake: no process could be started to try the library: {error.strerror}; make "
            f"room for one, or see why {sys.executable!r} cannot be run"
        ) from error
    try:
        said, _ = child.communicate(timeout=START_S + 2 * config.connect_s)
    except subprocess.TimeoutExpired:
        raise _no_answer(config) from None
    finally:
        child.kill()
        child.wait()
    _judge(config, child.returncode, said)


def _judge(config: MooncakeConfig, status: int, said: bytes) -> None:
    lines = said.decode("utf-8", "replace").splitlines()
    if status < 0 or not lines:
        raise ConfigError(
            f"mooncake: the library ended the process that tried it (status {status}); it does "
            "not fit this machine, leave mooncake.master out"
        )
    outcome = lines[-1]
    if outcome.startswith("error "):
        raise ConfigError(outcome.removeprefix("error "))
    if outcome != "code 0":
        raise _no_answer(config, outcome)


def _no_answer(config: MooncakeConfig, outcome: str = "it is silent") -> ConfigError:
    return ConfigError(
        f"mooncake: {config.master} is reached but does not answer as a mooncake_master "
        f"({outcome}, protocol {config.protocol}); check mooncake.master, and its version"
    )


def _assert_reachable(config: MooncakeConfig) -> None:
    try:
        with socket.create_connection(config.master_address, timeout=config.connect_s):
            pass
    except OSError as error:
        reason = error.strerror or str(error)
        raise ConfigError(
            f"mooncake: master {config.master} is not reached: {reason}; start mooncake_master "
            "there or correct mooncake.master"
        ) from error


def _assert_own_address(config: MooncakeConfig) -> None:
    """The library takes any address; the cluster's other clients would look for us there."""
    try:
        found = socket.getaddrinfo(config.address, 0, type=socket.SOCK_STREAM)
        family, kind, proto, _, where = found[0]
        with socket.socket(family, kind, proto) as probe:
            probe.bind(where)
    except OSError as error:
        reason = error.strerror or str(error)
        raise ConfigError(
            f"mooncake: address {config.address} is not one of this machine: {reason}; set "
            "mooncake.address to the one by which the store's other clients reach it"
        ) from error


def _main(text: str) -> None:
    """The child: one last line, `code N` or `error TEXT`, and out without the library's exit."""
    config = MooncakeConfig(**json.loads(text))
    try:
        outcome = f"code {set_up(new_store(config), config, segment_bytes=0)}"
    except ConfigError as error:
        outcome = f"error {error}"
    print(outcome, flush=True)  # noqa: T201
    os._exit(0)


if __name__ == "__main__":
    _main(sys.argv[1])
