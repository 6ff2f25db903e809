"""Files of an instance, its locks, and the sweep of others that are gone."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tierkv.daemon.layout import InstanceLock, Layout, nvme_classes, sweep
from tierkv.daemon.settings import DaemonConfig
from tierkv.storage.errors import ConfigError, DirectoryInUseError


@pytest.fixture
def config(tmp_path: Path) -> DaemonConfig:
    return DaemonConfig(
        socket_path=tmp_path / "socket",
        arena_directory=tmp_path / "arenas",
        cache_root=tmp_path / "cache",
        nvme_bytes=1 << 20,
    )


def test_instance_follows_from_the_cache_root(config: DaemonConfig, tmp_path: Path) -> None:
    layout = Layout.of(config)
    other = replace(config, socket_path=tmp_path / "elsewhere")
    assert Layout.of(other).instance == layout.instance
    assert Layout.of(replace(config, cache_root=tmp_path / "b")).instance != layout.instance
    bare = replace(config, cache_root=None)
    assert Layout.of(bare).instance != layout.instance
    assert Layout.of(bare).nvme_root(4096) is None
    (tmp_path / "link").symlink_to(tmp_path / "cache")
    assert Layout.of(replace(config, cache_root=tmp_path / "link")).instance == layout.instance


def test_one_daemon_for_each_directory_and_socket(config: DaemonConfig, tmp_path: Path) -> None:
    lock = InstanceLock(Layout.of(config))
    with pytest.raises(DirectoryInUseError, match="cache directory"):
        InstanceLock(Layout.of(replace(config, socket_path=tmp_path / "other")))
    with pytest.raises(DirectoryInUseError, match="socket"):
        InstanceLock(Layout.of(replace(config, cache_root=tmp_path / "other")))
    lock.release()
    lock.release()
    InstanceLock(Layout.of(config)).release()


def test_a1_arena_folder_that_others_can_enter_is_refused(config: DaemonConfig) -> None:
    config.arena_directory.mkdir(mode=0o755)
    with pytest.raises(ConfigError, match="chmod 700"):
        InstanceLock(Layout.of(config))


def test_known_classes(config: DaemonConfig) -> None:
    layout = Layout.of(config)
    InstanceLock(layout).release()
    layout.arena_path(4096).touch()
    (layout.arena_directory / f"{layout.instance}.x.arena").touch()
    (layout.arena_directory / "other.512.arena").touch()
    root = layout.nvme_root(8192)
    assert root is not None and layout.cache_root is not None
    root.mkdir()
    (layout.cache_root / "class-x").mkdir()
    assert layout.known_classes() == [4096, 8192]
    assert nvme_classes(layout.cache_root) == {8192: root}


def test_r3_sweep_takes_only_what_nobody_can_want(config: DaemonConfig, tmp_path: Path) -> None:
    ours = InstanceLock(Layout.of(config))
    gone, kept, running = (
        Layout.of(
            replace(config, cache_root=tmp_path / name, socket_path=tmp_path / f"{name}.sock")
        )
        for name in ("gone", "kept", "running")
    )
    locks = [InstanceLock(layout) for layout in (gone, kept, running)]
    for layout in (gone, kept, running):
        layout.arena_path(4096).touch()
        layout.holders_path(4096).touch()
    for lock in locks[:2]:
        lock.release()
    for layout in (gone, running):
        assert layout.cache_root is not None
        (layout.cache_root / "LOCK").unlink()
        layout.cache_root.rmdir()
    assert sweep(Layout.of(config)) == 2
    assert not gone.arena_path(4096).exists() and not gone.owner_path.exists()
    assert kept.arena_path(4096).exists() and running.arena_path(4096).exists()
    locks[2].release()
    ours.release()


def test_unreadable_owner_is_left_for_a_person(config: DaemonConfig) -> None:
    lock = InstanceLock(Layout.of(config))
    folder = config.arena_directory
    for text in ("not json", "[]", json.dumps({"cache_root": 3})):
        (folder / "0123.owner").write_text(text)
        (folder / "0123.4096.arena").touch()
        assert sweep(Layout.of(config)) == 0
        assert (folder / "0123.4096.arena").exists()
    lock.release()
