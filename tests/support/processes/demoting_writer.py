"""Child of the crash tests: commits pages without end and says what became of each.

    python -m tests.support.processes.demoting_writer ARENA NVME HOST_PAGES NVME_PAGES FIRST

Commits page FIRST, FIRST + 1, ... under write_through and writes one line per fact, at once:
"open", "host N" once page N is committed in host, "nvme N" once it is durable. Ends only by a
signal, or with status 3 when a page was refused or never became durable.
"""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

from tests.support.pages import page_content, page_key
from tierkv.storage.policy import AdmissionName, WritePolicy
from tierkv.storage.store import StoreConfig, StoreRules, TieredStore
from tierkv.storage.tiers.host import HostTier
from tierkv.storage.tiers.nvme import NvmeTier
from tierkv.storage.types import CommitOutcome, PageKey

PAGE_BYTES = 4096
BATCH_PAGES = 4
BACKLOG_PAGES = 32
"""Not durable yet, at most: keeps a child from filling the tiers before it is killed."""

WAIT_S = 60.0


def store_config(arena: Path, nvme: Path, host_pages: int, nvme_pages: int) -> StoreConfig:
    """The store that child and parent share, one after the other."""
    return StoreConfig(
        page_bytes=PAGE_BYTES,
        host_bytes=HostTier.capacity_for(PAGE_BYTES, host_pages),
        host_arena_path=arena,
        nvme_root=nvme,
        nvme_bytes=NvmeTier.capacity_for(PAGE_BYTES, nvme_pages),
        nvme_min_free_bytes=0,
        rules=StoreRules(write_policy=WritePolicy.WRITE_THROUGH, admission=AdmissionName.ALL),
    )


def say(line: str) -> None:
    """One write call a line: lines of two threads never mix, and none is buffered."""
    os.write(sys.stdout.fileno(), line.encode() + b"\n")


def main(arguments: list[str]) -> int:
    """Write pages until killed."""
    arena, nvme = Path(arguments[0]), Path(arguments[1])
    host_pages, nvme_pages, number = (int(argument) for argument in arguments[2:5])
    numbers: dict[PageKey, int] = {}
    backlog = threading.Semaphore(BACKLOG_PAGES)

    def durable(key: PageKey) -> None:
        say(f"nvme {numbers[key]}")
        backlog.release()

    store = TieredStore.open(
        store_config(arena, nvme, host_pages, nvme_pages),
        on_durable=durable,
    )
    say("open")
    while True:
        if not all(backlog.acquire(timeout=WAIT_S) for _ in range(BATCH_PAGES)):
            return 3
        batch = range(number, number + BATCH_PAGES)
        keys = [page_key(each) for each in batch]
        numbers.update(zip(keys, batch, strict=True))
        with store.reserve(BATCH_PAGES) as held:
            if len(held.views) < BATCH_PAGES:
                return 3
            for key, view in zip(keys, held.views, strict=True):
                view[:] = page_content(key, PAGE_BYTES)
            if held.commit(keys) != [CommitOutcome.COMMITTED] * BATCH_PAGES:
                return 3
        for each in batch:
            say(f"host {each}")
        number += BATCH_PAGES


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
