"""Options that several commands share, and the configurations they become.

Owns option names, defaults and the rules between them (`--nvme` needs `--nvme-dir`). Imports
nothing heavy at module level: the two functions that build configurations do. Called by the
commands generate, engine serve and demo.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tierkv.config import parse_size
from tierkv.storage.errors import ConfigError

if TYPE_CHECKING:
    from tierkv.engine.serve.engine import Engine
    from tierkv.engine.serve.engine_config import EngineConfig, StoreOpener
    from tierkv.storage.store import StoreConfig

HOST_DEFAULT = "1GiB"
"""Host budget when a lower tier is asked for without saying how much."""
NVME_DEFAULT = "8GiB"
FLUSH_S = 30.0
"""Longest wait at the end of a process for pages to become durable."""


class WritePolicyChoice(StrEnum):
    """Names of storage.policy.WritePolicy, repeated so that help loads no storage code."""

    WRITE_BACK = "write_back"
    WRITE_THROUGH = "write_through"
    WRITE_THROUGH_SELECTIVE = "write_through_selective"


class RestoreChoice(StrEnum):
    """Names of engine.serve.restore.RestoreMode."""

    AUTO = "auto"
    LOAD = "load"
    RECOMPUTE = "recompute"


class AdmissionChoice(StrEnum):
    """Names of storage.policy.AdmissionName."""

    ALL = "admit_all"
    HOTNESS = "hotness"


class ScheduleChoice(StrEnum):
    """Names of engine.serve.scheduler.SchedulePolicy."""

    FCFS = "fcfs"
    LPM = "lpm"


class DeviceChoice(StrEnum):
    """Where the model computes."""

    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"


JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
ModelOption = Annotated[
    Path | None,
    typer.Option(
        "--model",
        help="Hugging Face model folder or .gguf file. Default: the bundled SmolLM2.",
        show_default=False,
    ),
]
PageTokensOption = Annotated[int, typer.Option("--page-tokens", help="Tokens per page, 1 to 64.")]
PoolOption = Annotated[
    str, typer.Option("--pool", metavar="SIZE", help="KV pool of the compute device.")
]
HostOption = Annotated[
    str | None,
    typer.Option(
        "--host",
        metavar="SIZE",
        help=f"Host memory for pages; 0 for none. {HOST_DEFAULT} with --host-arena or --nvme-dir.",
        show_default=False,
    ),
]
StoreOption = Annotated[
    str | None,
    typer.Option(
        "--store",
        metavar="ADDRESS",
        help="Keep pages in a daemon: unix:/path/to/socket. Replaces --host and --nvme-dir.",
        show_default=False,
    ),
]
HostArenaOption = Annotated[
    Path | None,
    typer.Option("--host-arena", help="File on tmpfs that keeps host pages across restarts."),
]
NvmeDirOption = Annotated[
    Path | None, typer.Option("--nvme-dir", help="Folder for pages on a local disk.")
]
NvmeOption = Annotated[
    str | None,
    typer.Option(
        "--nvme",
        metavar="SIZE",
        help=f"Disk space for pages; {NVME_DEFAULT} by default.",
        show_default=False,
    ),
]
WritePolicyOption = Annotated[
    WritePolicyChoice,
    typer.Option("--write-policy", help="When pages go to the tier below."),
]
AdmissionOption = Annotated[
    AdmissionChoice, typer.Option("--admission", help="Which pages may go to disk.")
]
RestoreOption = Annotated[
    RestoreChoice,
    typer.Option(
        "--restore", help="Missing prefix: load and compute as measured, or only one of the two."
    ),
]
DeviceOption = Annotated[DeviceChoice, typer.Option("--device", help="Where the model computes.")]
ThreadsOption = Annotated[
    int | None, typer.Option("--threads", min=1, help="CPU threads of the model.")
]
MaxContextOption = Annotated[
    int | None,
    typer.Option("--max-context", min=1, help="Longest sequence in tokens. Default: the model's."),
]


@dataclass(frozen=True, slots=True)
class CacheOptions:
    """The cache options as the user wrote them."""

    page_tokens: int = 16
    pool: str = "1GiB"
    host: str | None = None
    host_arena: Path | None = None
    nvme_dir: Path | None = None
    nvme: str | None = None
    write_policy: str = "write_through"
    """By default pages go down as soon as they are computed: a kill or a reboot finds them."""
    admission: str = "hotness"
    store: str | None = None

    @property
    def host_bytes(self) -> int:
        """Host budget; 0 when there is no store. Raises ConfigError for a bad size."""
        default = HOST_DEFAULT if self.keeps_files else "0"
        size = parse_size(default if self.host is None else self.host, "--host")
        if self.keeps_files and size == 0:
            raise ConfigError(
                "--host: expected a size above 0 with --host-arena or --nvme-dir, got 0; "
                "pages reach the disk through host memory"
            )
        return size

    @property
    def outlives_process(self) -> bool:
        """True when pages are found again by the next process."""
        return self.store is not None or self.keeps_files

    @property
    def keeps_files(self) -> bool:
        """True when this process opens files or folders for pages."""
        return self.host_arena is not None or self.nvme_dir is not None

    @property
    def nvme_bytes(self) -> int:
        """Disk budget; 0 without a folder. Raises ConfigError for a bad size."""
        if self.nvme_dir is None:
            if self.nvme is not None:
                raise ConfigError("--nvme: needs --nvme-dir; name the folder for the pages")
            return 0
        return parse_size(NVME_DEFAULT if self.nvme is None else self.nvme, "--nvme")


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """What an engine is opened with, beside its cache."""

    model: Path | None = None
    device: str = "auto"
    threads: int | None = None
    max_context: int | None = None
    max_batch_tokens: int = 512
    max_running: int = 64
    schedule: str = "fcfs"
    evict_policy: str = "lru"
    restore: str = "auto"


def store_config_from_options(cache: CacheOptions) -> StoreConfig | None:
    """The store that the options describe; None when they ask for none.

    page_bytes is a placeholder: the engine knows the size of its pages and fills it in. Raises
    ConfigError for a bad size or a combination that cannot work.
    """
    from tierkv.storage.policy import AdmissionName, WritePolicy
    from tierkv.storage.store import StoreConfig, StoreRules

    host_bytes, nvme_bytes = cache.host_bytes, cache.nvme_bytes
    if host_bytes == 0:
        return None
    return StoreConfig(
        page_bytes=1,
        host_bytes=host_bytes,
        host_arena_path=cache.host_arena,
        nvme_root=cache.nvme_dir,
        nvme_bytes=nvme_bytes,
        rules=StoreRules(
            write_policy=WritePolicy(cache.write_policy),
            admission=AdmissionName(cache.admission),
        ),
    )


def store_opener_from_options(cache: CacheOptions) -> StoreOpener | None:
    """How to reach the daemon that the options name; None when they name none.

    Raises ConfigError for an address that is none, or together with options of a store in this
    process.
    """
    if cache.store is None:
        return None
    for name in ("host", "host_arena", "nvme_dir", "nvme"):
        if getattr(cache, name) is not None:
            raise ConfigError(
                f"--store: the daemon holds the pages; leave --{name.replace('_', '-')} out, or "
                "set it in the daemon's configuration"
            )

    from tierkv.client import Client, socket_path
    from tierkv.storage.base import PageStore
    from tierkv.storage.identity import Fingerprint

    path = socket_path(cache.store)

    def open_store(page_bytes: int, fingerprint: Fingerprint) -> PageStore:
        return Client(path, page_bytes, fingerprint, name="tierkv engine")

    return open_store


def keep_prefixes(engine: Engine) -> None:
    """Send what the pool holds to the tiers below and wait, within a bound, until it is durable.

    For the end of a process whose pages outlive it. Warns on standard error when time was short.
    """
    from tierkv.cli.console import write_note

    engine.drop_gpu_cache()
    if not engine.flush(FLUSH_S):
        store = engine.stats().store
        reason = store.degraded if store is not None else None
        reason = reason or f"not durable within {FLUSH_S:.0f} s"
        write_note(f"tierkv: warning: not every page was kept: {reason}")


def engine_config_from_options(options: EngineOptions, cache: CacheOptions) -> EngineConfig:
    """The engine that the options describe. A .gguf model is converted here, on first use.

    Raises ConfigError and its kinds. Sizes are read before anything is converted.
    """
    pool_bytes = parse_size(cache.pool, "--pool")
    opener = store_opener_from_options(cache)
    store = store_config_from_options(cache)

    from tierkv.engine.serve.calibration import default_folder
    from tierkv.engine.serve.engine_config import EngineConfig
    from tierkv.engine.serve.restore import RestoreMode
    from tierkv.engine.serve.scheduler import SchedulePolicy
    from tierkv.storage.policy import WritePolicy

    return EngineConfig(
        model=resolve(options.model),
        pool_bytes=pool_bytes,
        page_tokens=cache.page_tokens,
        max_batch_tokens=options.max_batch_tokens,
        max_running=options.max_running,
        schedule=SchedulePolicy(options.schedule),
        evict_policy=options.evict_policy,
        restore=RestoreMode(options.restore),
        max_context=options.max_context,
        device=options.device,
        threads=options.threads,
        store=store,
        open_store=opener,
        write_policy=WritePolicy(cache.write_policy),
        calibration_dir=default_folder(),
    )


def resolve(model: Path | None) -> Path:
    """The Hugging Face folder of a model option. Converts a .gguf on first use, with a bar."""
    from tierkv.cli.console import progress
    from tierkv.engine.serve.gguf import resolve_model
    from tierkv.models import bundled_gguf, default_model_cache

    path = bundled_gguf() if model is None else model
    with progress(f"converting {path.name}") as report:
        return resolve_model(path, default_model_cache(), report)
