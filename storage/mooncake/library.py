"""The one place that loads the Mooncake package, and what it is told before.

Owns the environment that the library reads once, when it is loaded, and the reasons why it cannot
be. No state. Called by storage.mooncake.client and by the trial (trial.py) in a process of its
own. Importing this module loads nothing.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
import os
from collections.abc import Sequence
from typing import Protocol, cast

from tierkv.storage.errors import ConfigError
from tierkv.storage.mooncake.config import MooncakeConfig

MODULE = "mooncake.store"
INSTALL = "pip install 'tierkv[mooncake]'"


class StoreLibrary(Protocol):
    """What is used of the library's MooncakeDistributedStore. Codes are its own: see client.py.

    Addresses are of this process; pieces of a value lie one after the other in it.
    """

    def setup(
        self,
        local_hostname: str,
        metadata_server: str,
        global_segment_size: int,
        local_buffer_size: int,
        protocol: str,
        rdma_devices: str,
        master_server_addr: str,
    ) -> int: ...

    def register_buffer(self, buffer_ptr: int, size: int) -> int: ...

    def unregister_buffer(self, buffer_ptr: int) -> int: ...

    def batch_put_from_multi_buffers(
        self,
        keys: Sequence[str],
        all_buffer_ptrs: Sequence[Sequence[int]],
        all_sizes: Sequence[Sequence[int]],
        config: object,
    ) -> list[int]: ...

    def batch_get_into_multi_buffers(
        self,
        keys: Sequence[str],
        all_buffer_ptrs: Sequence[Sequence[int]],
        all_sizes: Sequence[Sequence[int]],
    ) -> list[int]: ...

    def batch_is_exist(self, keys: Sequence[str]) -> list[int]: ...

    def get_size(self, key: str) -> int: ...

    def remove(self, key: str, force: bool = False) -> int: ...

    def close(self) -> int: ...


def prepare_environment(config: MooncakeConfig) -> None:
    """Set what bounds the library's own waits, where the user has not set it otherwise.

    Without it an absent master is tried for 90 s, a silent one is waited for 30 s at a time, and
    so is a node that sends nothing. A call waits several times for the node: its pages queue up.
    """
    silence = str(max(1, math.ceil(config.call_s / 4)))
    connect = str(max(1, math.ceil(config.connect_s)))
    for name, value in (
        ("MC_STORE_CLIENT_SETUP_RETRIES", "1"),
        ("MC_RPC_TIMEOUT_MS", str(max(1, int(config.call_s * 1000)))),
        ("MC_TCP_PROGRESS_TIMEOUT_SEC", silence),
        ("MC_TCP_STATUS_TIMEOUT_SEC", silence),
        ("MC_HANDSHAKE_CONNECT_TIMEOUT", connect),
        ("MC_LOG_LEVEL", "ERROR"),
    ):
        os.environ.setdefault(name, value)


def assert_installed() -> None:
    """Raise ConfigError when the package is not there. Loads nothing of it but its own folder."""
    package = MODULE.partition(".")[0]
    if importlib.util.find_spec(package) is None:
        raise ConfigError(f"mooncake: the package {package} is not installed; {INSTALL}")


def new_store(config: MooncakeConfig) -> StoreLibrary:
    """A store object that was not set up. Raises ConfigError when the library cannot be loaded."""
    assert_installed()
    prepare_environment(config)
    try:
        module = importlib.import_module(MODULE)
        made = module.MooncakeDistributedStore()
    except (ImportError, AttributeError) as error:
        text = " ".join(str(error).split())
        raise ConfigError(
            f"mooncake: the library cannot be loaded: {text}; {INSTALL}, and what it names "
            "(libibverbs.so.1 is in Debian's libibverbs1)"
        ) from error
    return cast(StoreLibrary, made)


def replicate_config(replicas: int) -> object:
    """How often a value is kept, in the library's form. After new_store()."""
    module = importlib.import_module(MODULE)
    made = module.ReplicateConfig()
    made.replica_num = replicas
    return cast(object, made)


def set_up(library: StoreLibrary, config: MooncakeConfig, segment_bytes: int) -> int:
    """Connect a store object; returns the library's code, 0 when it is connected.

    Holds the interpreter lock while it waits for the master, as the library is made: see trial.py.
    """
    return library.setup(
        config.address,
        config.metadata,
        segment_bytes,
        config.local_buffer_bytes,
        config.protocol,
        config.device,
        config.master,
    )
