"""What a user sets about a store: sizes, places and rules, checked before anything is created.

Owns no state and opens nothing. Called by storage.store, and by whoever turns a configuration
file or command line into a StoreConfig.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from tierkv.storage.errors import CapacityError, ConfigError
from tierkv.storage.mover import MoverLimits
from tierkv.storage.policy import AdmissionName, WritePolicy
from tierkv.storage.promotion import Verify
from tierkv.storage.tiers.host import HostTier
from tierkv.storage.tiers.nvme import MIN_FREE_BYTES, NvmeTier


@dataclass(frozen=True, slots=True)
class StoreRules:
    """How a store behaves, whatever its tiers are. Times in seconds, sizes in pages."""

    write_policy: WritePolicy = WritePolicy.WRITE_THROUGH
    """Never cold is the third promise: a reboot finds only what was copied before it."""
    selective_hits: int = 2
    """Hits after which write_through_selective copies a page."""
    admission: AdmissionName = AdmissionName.HOTNESS
    verify: Verify = Verify.ALWAYS
    """Checking costs about 1/15 s per GB. Never wrong is the first promise: it is the default."""
    host_clean_fraction: float = 0.25
    """Share of host that write_back keeps free or already on nvme, so that reserve() finds room."""
    mover: MoverLimits = field(default_factory=MoverLimits)
    nvme_write_bytes_per_day: int | None = None
    """No 24 hours see more written, flush() aside. None: no limit."""
    preload_fraction: float = 0.5
    """Share of host that preload() fills unless told otherwise."""
    save_hotness_s: float = 300.0
    """Use counts are saved this often while pages are written, and at close."""
    demote_deadline_s: float = 30.0
    breaker_failures: int = 3
    breaker_open_s: float = 5.0
    remote_lookup_s: float = 0.01
    """What lookup() waits at most for a remote tier that has to be asked who holds a page."""
    close_s: float = 5.0
    """Bound of close(): what is stuck in I/O past it is left behind, with its tiers open."""

    def __post_init__(self) -> None:
        for name in ("selective_hits", "breaker_failures"):
            if (value := getattr(self, name)) < 1:
                raise ConfigError(f"store rules: {name} is {value}, expected at least 1; raise it")
        if self.nvme_write_bytes_per_day is not None and self.nvme_write_bytes_per_day < 1:
            raise ConfigError(
                f"store rules: nvme_write_bytes_per_day is {self.nvme_write_bytes_per_day}, "
                "expected at least 1; leave it out for no limit"
            )
        for name in (
            "demote_deadline_s",
            "breaker_open_s",
            "remote_lookup_s",
            "close_s",
            "save_hotness_s",
        ):
            if (value := getattr(self, name)) <= 0:
                raise ConfigError(f"store rules: {name} is {value}, expected above 0; raise it")
        for name in ("host_clean_fraction", "preload_fraction"):
            if not 0 <= (value := getattr(self, name)) <= 1:
                raise ConfigError(
                    f"store rules: {name} is {value}, expected 0 to 1; set a share of host"
                )


@dataclass(frozen=True, slots=True)
class StoreConfig:
    """Everything TieredStore.open needs. Sizes in bytes."""

    page_bytes: int
    host_bytes: int
    host_arena_path: Path | None = None
    """A file on tmpfs outlives the process; None: memory of this process only."""
    huge_pages: bool = False
    """Ask for them for the arena, and make do without."""
    nvme_root: Path | None = None
    """None: host only."""
    nvme_bytes: int = 0
    nvme_min_free_bytes: int = MIN_FREE_BYTES
    """nvme stops growing when its file system has less than this left."""
    checksums: bool = True
    state_dir: Path | None = None
    """Where hotness and the write budget are kept across restarts; None: in the nvme root."""
    rules: StoreRules = field(default_factory=StoreRules)

    @property
    def state_folder(self) -> Path | None:
        """The folder meant by state_dir; None when there is nowhere to keep anything."""
        if self.state_dir is None and self.nvme_root is not None:
            return self.nvme_root / "state"
        return self.state_dir

    def validate(self) -> None:
        """Raise CapacityError or ConfigError for what cannot work, before anything is created."""
        if self.page_bytes < 1:
            raise ConfigError(
                f"open store: page_bytes is {self.page_bytes}, expected at least 1; "
                "set it to the size of one page's keys and values"
            )
        sizes = [("host", self.host_bytes, HostTier.capacity_for(self.page_bytes, 1))]
        if self.nvme_root is not None:
            needed = NvmeTier.capacity_for(self.page_bytes, 1)
            sizes.append(("nvme", self.nvme_bytes, needed))
        for name, size, needed in sizes:
            if size < needed:
                raise CapacityError(
                    f"open store: {name} gets {size} bytes, one page of {self.page_bytes} bytes "
                    f"needs at least {needed}; raise what {name} gets"
                )
