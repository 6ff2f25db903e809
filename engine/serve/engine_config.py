"""What an engine is opened with and what it reports. Frozen values only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tierkv.engine.cache.prefix_cache import PrefixCacheStats
from tierkv.engine.serve.offload import OffloadStats
from tierkv.engine.serve.restore import RestoreMode, RestoreStats
from tierkv.engine.serve.scheduler import SchedulePolicy
from tierkv.storage.base import PageStore, StoreStats
from tierkv.storage.identity import Fingerprint
from tierkv.storage.policy import WritePolicy
from tierkv.storage.store import StoreConfig

StoreOpener = Callable[[int, Fingerprint], PageStore]
"""Opens a store for pages of so many bytes and this fingerprint. Raises ConfigError."""


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """One engine: a model, the pool it computes in and the store below it."""

    model: Path
    """Folder with config.json, safetensors weights and tokenizer.json."""
    pool_bytes: int = 1 << 30
    """Size of the paged KV pool on the compute device."""
    num_pages: int | None = None
    """Pages of that pool; overrides pool_bytes."""
    page_tokens: int = 16
    max_batch_tokens: int = 512
    """New tokens of one forward pass: the size of a prefill chunk."""
    max_running: int = 64
    max_waiting: int = 1024
    schedule: SchedulePolicy = SchedulePolicy.FCFS
    evict_policy: str = "lru"
    watermark: float = 0.02
    """Share of the pool kept back at admission so that running requests can grow."""
    max_context: int | None = None
    """Longest sequence; the model's own limit when None."""
    device: str = "auto"
    """"auto", "cpu" or "cuda"."""
    threads: int | None = None
    """CPU threads of torch; None leaves its choice."""
    store: StoreConfig | None = None
    """Tiers below the pool; None keeps prefixes in the pool only. page_bytes is filled in."""
    open_store: StoreOpener | None = None
    """Opens a store that is not in this process (a daemon's client), in place of `store`; it is
    closed with the engine."""
    write_policy: WritePolicy | None = None
    """When computed pages are copied below the pool; None: the rule of `store`."""
    tenant: str = ""
    restore: RestoreMode = RestoreMode.AUTO
    calibration_dir: Path | None = None
    """Folder where the restore planner keeps what it learned; None: it learns anew each time."""
    restore_deadline_s: float = 10.0
    """A prefix that has not come by then is computed."""
    request_timeout_s: float = 600.0
    """A request that has not ended by then is aborted."""


@dataclass(frozen=True, slots=True)
class EngineStats:
    """One engine at one moment. Counters run from its start."""

    model: str
    device: str
    page_tokens: int
    page_bytes: int
    waiting: int
    running: int
    finished: int
    failed: int
    """Requests that ended with an error."""
    retractions: int
    prompt_tokens: int
    cached_tokens: int
    """Prompt tokens that were not computed, all tiers together."""
    generated_tokens: int
    steps: int
    step_failures: int
    cache: PrefixCacheStats
    offload: OffloadStats | None
    restore: RestoreStats | None
    store: StoreStats | None
