"""Files damaged while the daemon was down: nothing wrong is served, the rest is, fsck mends it.

Host memory is gone each time, so that every page has to come from the damaged files.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.daemon_process import (
    PAGE_BYTES,
    DaemonProcess,
    shared_folder,
    small_config,
)
from tests.support.fault_device import flip_bit
from tests.support.pages import page_key, put_store, take_content
from tierkv.client.client import Client
from tierkv.storage.fsck import check_store
from tierkv.storage.fsck_report import FindingKind
from tierkv.storage.slot_header import HEADER_BYTES, slot_bytes_for
from tierkv.storage.types import PageKey

WAIT_S = 30.0
FAULTY = "tests.support.processes.faulty_daemon"
PAGES = 16
KEYS = [page_key(n) for n in range(PAGES)]
SLOT_BYTES = slot_bytes_for(PAGE_BYTES)

Damage = Callable[[Path, Path], range]
"""Damages a class folder; gets a copy of it from before the last pages. Returns how many pages
that may cost."""


@pytest.fixture
def folder() -> Iterator[Path]:
    with shared_folder() as made:
        yield made


def slot_file(root: Path) -> Path:
    files = [path for path in sorted(root.rglob("*")) if path.is_file() and path.suffix != ".mdb"]
    return max(files, key=lambda path: path.stat().st_size)


def index_files(root: Path) -> list[Path]:
    return list(root.rglob("*.mdb"))


def flipped_bit(root: Path, before: Path) -> range:
    flip_bit(slot_file(root), 3 * SLOT_BYTES + HEADER_BYTES + 1000)
    return range(1, 2)


def torn_slot(root: Path, before: Path) -> range:
    """The second half of a payload is of another time."""
    with slot_file(root).open("r+b") as file:
        file.seek(5 * SLOT_BYTES + HEADER_BYTES + PAGE_BYTES // 2)
        file.write(b"\x5a" * (PAGE_BYTES // 2))
    return range(1, 2)


def torn_header(root: Path, before: Path) -> range:
    with slot_file(root).open("r+b") as file:
        file.seek(2 * SLOT_BYTES)
        file.write(b"\xff" * 512)
    return range(1, 2)


def truncated_file(root: Path, before: Path) -> range:
    path = slot_file(root)
    with path.open("r+b") as file:
        file.truncate(10 * SLOT_BYTES + 4096)
    return range(1, PAGES + 1)


def lost_index(root: Path, before: Path) -> range:
    for path in index_files(root):
        path.unlink()
    return range(1)


def index_older_than_data(root: Path, before: Path) -> range:
    """The index as it was when only the first half was there; the slot files are newer."""
    for path in index_files(root):
        shutil.copyfile(before / path.relative_to(root), path)
    return range(PAGES // 2 + 1)


DAMAGES: list[Damage] = [
    flipped_bit,
    torn_slot,
    torn_header,
    truncated_file,
    lost_index,
    index_older_than_data,
]


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda each: each.__name__)
def test_w7_damaged_files_cost_pages_never_an_answer(folder: Path, damage: Damage) -> None:
    values = small_config(folder)
    before = folder / "before"
    store_half(values, KEYS[: PAGES // 2])
    root = next((folder / "cache").glob("class-*"))
    shutil.copytree(root, before)
    store_half(values, KEYS[PAGES // 2 :])
    cost = damage(root, before)
    for arena in (folder / "arenas").glob("*.arena"):
        arena.unlink()
    with DaemonProcess.started(values) as daemon, open_client(daemon) as client:
        right = read_each(client)
        assert PAGES - right in cost
        # What was found bad is not asked of the disk again, and other pages can be stored.
        assert read_each(client) == right
        put_store(client, [page_key(n) for n in range(100, 104)])
        daemon.check()
        daemon.kill()
    check_store(root, repair=True)
    assert check_store(root).clean
    with DaemonProcess.started(values) as daemon, open_client(daemon) as client:
        assert read_each(client) >= right
        daemon.check()


@pytest.mark.parametrize("mode", ["drop", "keep", "torn4096", "torn512"])
def test_r1_w7_power_loss_under_load_keeps_what_was_flushed(folder: Path, mode: str) -> None:
    values = small_config(folder)
    seed = 11
    after = folder / "after"
    with DaemonProcess.started(values, FAULTY) as daemon, open_client(daemon) as client:
        put_store(client, KEYS)
        assert client.flush(WAIT_S)
        # More pages are on their way down, one write of which hangs, when the power goes.
        assert daemon.tell("stall write") == "ok"
        put_store(client, [page_key(n) for n in range(100, 108)])
        assert not client.flush(0.2)
        assert daemon.tell(f"powerloss {folder / 'cache'} {after} {mode} {seed}") == "ok"
        assert daemon.tell("release") == "ok"
        daemon.kill()
    shutil.rmtree(folder / "cache")
    after.rename(folder / "cache")
    for arena in (folder / "arenas").glob("*.arena"):
        arena.unlink()
    root = next((folder / "cache").glob("class-*"))
    # No page is wrong or missing; the order of use is not synced and may be lost.
    assert {finding.kind for finding in check_store(root).findings} <= {FindingKind.RECENCY}, seed
    assert check_store(root, repair=True).clean, seed
    with DaemonProcess.started(values) as daemon, open_client(daemon) as client:
        assert read_each(client) == PAGES, seed
        take_content(client, [page_key(n) for n in range(100, 108)])
        daemon.check()


def open_client(daemon: DaemonProcess) -> Client:
    return Client(daemon.config.socket_path, PAGE_BYTES)


def store_half(values: dict[str, object], keys: list[PageKey]) -> None:
    """Store pages durably, then kill the daemon."""
    with DaemonProcess.started(values) as daemon, open_client(daemon) as client:
        put_store(client, keys)
        assert client.flush(WAIT_S)
        daemon.kill()


def read_each(client: Client) -> int:
    """Fetch every page by itself; each that comes has its own content. Returns how many came."""
    return sum(take_content(client, [key]) for key in KEYS)
