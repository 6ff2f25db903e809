"""The daemon and its remote tier: what is wrong with it costs one line, never the local tiers."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.daemon_process import PAGE_BYTES, config_from, shared_folder, small_config
from tests.support.memory_remote import Medium, MemoryRemote
from tests.support.pages import page_content, page_key
from tierkv.client.async_client import AsyncClient
from tierkv.daemon.remote_tier import OFF, SERVING, RemoteTier, pool_settings, read_key
from tierkv.daemon.server import Daemon
from tierkv.daemon.settings import DaemonConfig
from tierkv.daemon.status import namespace_rows, status_fields
from tierkv.storage.checksum import payload_checksum
from tierkv.storage.clock import SystemClock
from tierkv.storage.errors import CapacityError, ConfigError, TierIOError
from tierkv.storage.identity import Fingerprint
from tierkv.storage.pool.config import Address, PoolConfig
from tierkv.storage.remote import POOL_OWNER
from tierkv.storage.types import TierName

WAIT_S = 10.0
KEY = b"0123456789abcdef"
POOL = PoolConfig(listen=Address("127.0.0.1", 0), members=(Address("127.0.0.2", 1),), key=KEY)


@pytest.fixture
def folder() -> Iterator[Path]:
    with shared_folder() as made:
        yield made


class FakeSource:
    """A pool of one process: what is elsewhere is a Medium."""

    def __init__(self, lookup_waits: bool = False) -> None:
        self.medium = Medium()
        self.attached: list[int] = []
        self.calls: list[str] = []
        self.bind_error: Exception | None = None
        self._lookup_waits = lookup_waits

    def attach(self, page_bytes: int) -> MemoryRemote:
        self.attached.append(page_bytes)
        remote = MemoryRemote(self.medium, lookup_waits=self._lookup_waits, copies=False)
        remote.bind_error = self.bind_error
        return remote

    def status(self) -> dict[str, Any]:
        return {"members": [], "epoch": 7}

    def drain(self, timeout_s: float) -> bool:
        self.calls.append("drain")
        return True

    def check(self) -> None:
        self.calls.append("check")

    def close(self, timeout_s: float) -> bool:
        self.calls.append("close")
        return True

    def put(self, *numbers: int) -> None:
        """Pages that are elsewhere."""
        for number in numbers:
            content = page_content(page_key(number), PAGE_BYTES)
            self.medium.put(page_key(number), content, payload_checksum(content))


def settings(folder: Path, **changes: Any) -> DaemonConfig:
    return replace(config_from(small_config(folder, **changes)), pool=POOL)


@asynccontextmanager
async def daemon_of(
    config: DaemonConfig, source: FakeSource, hear: Callable[[Any], None] = lambda _: None
) -> AsyncIterator[Daemon]:
    def opener(_: Any, path: Path, clock: Any, open_class: Any) -> FakeSource:
        hear(open_class)
        return source

    daemon = Daemon(config, open_remote=opener)
    await daemon.start()
    try:
        yield daemon
    finally:
        await daemon.stop()


async def test_pages_of_others_are_fetched_for_the_session(folder: Path) -> None:
    source = FakeSource()
    source.put(1, 2)
    async with daemon_of(settings(folder), source) as daemon:
        async with AsyncClient(daemon.config.socket_path, PAGE_BYTES) as client:
            keys = [page_key(1), page_key(2), page_key(3)]
            assert await client.lookup(keys) == [TierName.REMOTE, TierName.REMOTE, None]
            with await client.fetch(keys[:2], WAIT_S) as lease:
                for key, view in zip(lease.keys, lease.views, strict=True):
                    assert bytes(view) == page_content(key, PAGE_BYTES)
                assert list(lease.tiers) == [TierName.REMOTE] * 2
            assert await client.lookup(keys) == [TierName.HOST, TierName.HOST, None]
        daemon.service.check()
        assert source.attached == [PAGE_BYTES] and "check" in source.calls


async def test_what_was_fetched_belongs_to_the_sessions_namespace(folder: Path) -> None:
    source = FakeSource()
    source.put(1, 2, 3)
    model = Fingerprint(
        weights_digest=bytes(32),
        architecture=(("layers", 2),),
        kv_dtype="float32",
        kv_quantisation="none",
        page_tokens=16,
        tenant="acme",
    )
    keys = [page_key(number) for number in (1, 2, 3)]
    async with daemon_of(settings(folder), source) as daemon:
        async with AsyncClient(daemon.config.socket_path, PAGE_BYTES, model) as client:
            with await client.fetch(keys, WAIT_S) as lease:
                assert len(lease.keys) == 3
        (row,) = namespace_rows(daemon.service)
        assert (row["tenant"], row["pages"]["host"]) == ("acme", 3)


async def test_a_start_that_fails_leaves_the_pool(folder: Path) -> None:
    source = FakeSource()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        config = replace(settings(folder), http_host="127.0.0.1", http_port=port)
        with pytest.raises(ConfigError, match="choose another port"):
            async with daemon_of(config, source):
                pass
    assert source.calls == ["close"]
    # Everything is free for the next one.
    async with daemon_of(settings(folder), FakeSource()):
        pass


async def test_a_lookup_that_asks_waits_in_a_thread(folder: Path) -> None:
    source = FakeSource(lookup_waits=True)
    source.put(1, 2)
    async with daemon_of(settings(folder), source) as daemon:
        async with AsyncClient(daemon.config.socket_path, PAGE_BYTES) as client:
            assert await client.lookup([page_key(1), page_key(9)]) == [TierName.REMOTE, None]
            assert await client.prefetch([page_key(1), page_key(2), page_key(9)]) == 2


async def test_stop_leaves_the_pool_before_the_stores_close(folder: Path) -> None:
    source = FakeSource()
    async with daemon_of(settings(folder), source) as daemon:
        await daemon.service.classes.open(PAGE_BYTES)
        store = daemon.service.classes.get(PAGE_BYTES).store  # type: ignore[union-attr]
        close = store.close

        def noted() -> None:
            source.calls.append("store")
            close()

        store.close = noted  # type: ignore[method-assign]
    assert [call for call in source.calls if call != "check"] == ["close", "store"]
    assert "drain" not in source.calls, "a stop is no drain"


async def test_known_classes_are_attached_at_the_start(folder: Path) -> None:
    config = settings(folder)
    async with daemon_of(config, FakeSource()) as daemon:
        await daemon.service.classes.open(PAGE_BYTES)
    again = FakeSource()
    async with daemon_of(config, again):
        assert again.attached == [PAGE_BYTES]


async def test_a_member_may_open_a_page_size_within_the_budget(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    heard: list[Callable[[int, float], bool]] = []
    source = FakeSource()
    async with daemon_of(settings(folder), source, heard.append) as daemon:
        (open_class,) = heard

        async def ask(page_bytes: int) -> bool:
            return await asyncio.to_thread(open_class, page_bytes, WAIT_S)

        assert await ask(PAGE_BYTES) and await ask(PAGE_BYTES)
        assert len(daemon.service.classes) == 1 and source.attached == [PAGE_BYTES]
        with caplog.at_level(logging.WARNING):
            assert not await ask(2 * PAGE_BYTES)
            assert not await ask(2 * PAGE_BYTES)
            assert not await ask(1 << 40)
        told = [record.getMessage() for record in caplog.records]
        assert [f"{2 * PAGE_BYTES} bytes, not served here" in line for line in told] == [
            True,
            False,
        ]
        daemon.service.closing = True
        assert not await ask(PAGE_BYTES)


@pytest.mark.parametrize(
    ("shares", "text"),
    [
        ({}, r"bytes of host\.size serve page size \d+; set host\.class_size to share"),
        ({"host_class_bytes": 1 << 20}, r"host\.class_size is .* left .*; raise host\.size to"),
    ],
)
async def test_a_size_without_room_names_the_users_keys(
    shares: dict[str, int], text: str, folder: Path
) -> None:
    config = replace(settings(folder), host_bytes=3 << 19, **shares)
    async with daemon_of(config, FakeSource()) as daemon:
        await daemon.service.classes.open(PAGE_BYTES)
        with pytest.raises(CapacityError, match=text):
            await daemon.service.classes.open(2 * PAGE_BYTES)


async def test_a_pool_that_cannot_be_opened_costs_one_line(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def opener(*_: Any) -> Any:
        raise ConfigError("pool: the port is taken; choose another")

    daemon = Daemon(settings(folder), open_remote=opener)
    with caplog.at_level(logging.WARNING):
        await daemon.start()
        try:
            async with AsyncClient(daemon.config.socket_path, PAGE_BYTES) as client:
                assert await client.lookup([page_key(1)]) == [None]
            pool = status_fields(daemon.service)["pool"]
        finally:
            await daemon.stop()
    assert pool == {"state": OFF, "why": "pool: the port is taken; choose another"}
    assert [record.getMessage() for record in caplog.records] == [
        "remote tier is off: pool: the port is taken; choose another"
    ]


async def test_a_store_that_cannot_be_attached_serves_alone(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = FakeSource()
    source.bind_error = TierIOError("register memory: no room; raise it")
    whole = config_from(small_config(folder))
    config = settings(
        folder,
        host_class_bytes=whole.host_bytes // 4,
        nvme_class_bytes=whole.nvme_bytes // 4,
    )
    with caplog.at_level(logging.WARNING):
        async with daemon_of(config, source) as daemon:
            for size in (PAGE_BYTES, 2 * PAGE_BYTES):
                async with AsyncClient(daemon.config.socket_path, size) as client:
                    assert await client.lookup([page_key(1)]) == [None]
            pool = status_fields(daemon.service)["pool"]
    assert pool["state"] == SERVING and pool["epoch"] == 7
    assert pool["page_faults"] == {
        str(size): "register memory: no room; raise it" for size in (PAGE_BYTES, 2 * PAGE_BYTES)
    }
    assert len(caplog.records) == 1, "the same reason is told once"


async def test_pages_kept_for_others_are_shown_as_the_pools(folder: Path) -> None:
    async with daemon_of(settings(folder), FakeSource()) as daemon:
        pages = await daemon.service.classes.open(PAGE_BYTES)
        with pages.store.reserve(2, POOL_OWNER) as held:
            held.commit([page_key(1), page_key(2)], owner=POOL_OWNER)
        (found,) = status_fields(daemon.service)["classes"]
        assert found["pool_pages"]["host"] == 2
        (row,) = namespace_rows(daemon.service)
        assert (row["owner"], row["tenant"], row["pages"]["host"]) == (POOL_OWNER, "pool", 2)


async def test_numbers_of_namespaces_go_on_below_the_pools(folder: Path) -> None:
    config = settings(folder)
    async with daemon_of(config, FakeSource()) as daemon:
        pages = await daemon.service.classes.open(PAGE_BYTES)
        with pages.store.reserve(1, POOL_OWNER) as held:
            held.commit([page_key(1)], owner=POOL_OWNER)
        with pages.store.reserve(1, 5) as held:
            held.commit([page_key(2)], owner=5)
    async with daemon_of(config, FakeSource()) as daemon:
        await daemon.service.classes.open(PAGE_BYTES)
        registry = daemon.service.namespaces
        registry.skip_past([POOL_OWNER])
        registry.check()
        assert registry._next == 6


def test_without_a_remote_tier_nothing_is_told(tmp_path: Path) -> None:
    tier = RemoteTier(DaemonConfig(), tmp_path / "epoch", SystemClock(), lambda *_: False)
    tier.start()
    assert tier.status() is None and tier.kind is None and not tier.serving
    assert tier.drain(0.0) is None and tier.close(0.0)
    tier.check()


# The key


def key_file(tmp_path: Path, data: bytes, mode: int = 0o600) -> Path:
    path = tmp_path / "pool.key"
    path.write_bytes(data)
    path.chmod(mode)
    return path


def test_the_key_is_the_file_without_its_newline(tmp_path: Path) -> None:
    for data in (KEY, KEY + b"\n", KEY + b"\r\n", KEY + b"\n\n"):
        assert read_key(key_file(tmp_path, data)) == KEY
    assert read_key(key_file(tmp_path, b"\n " + KEY, 0o400)) == b"\n " + KEY
    found = pool_settings(replace(POOL, key=None), key_file(tmp_path, KEY))
    assert found.key == KEY and KEY.decode() not in repr(found)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o644, 0o610])
def test_a_key_that_others_can_read_is_refused(tmp_path: Path, mode: int) -> None:
    with pytest.raises(ConfigError, match=f"has mode {mode:04o}.*chmod 600"):
        read_key(key_file(tmp_path, KEY, mode))


def test_bad_keys_are_refused_in_one_line(tmp_path: Path) -> None:
    bare = replace(POOL, key=None)
    (tmp_path / "folder").mkdir()
    for path, text in (
        (tmp_path / "missing", "No such file"),
        (tmp_path / "folder", "is no file"),
    ):
        with pytest.raises(ConfigError, match=text) as caught:
            pool_settings(bare, path)
        assert "\n" not in str(caught.value)
    for data, text in (
        (b"short\n", "has 5 bytes, expected at least 16 bytes; make one with openssl rand"),
        (b"0123456789abcde\n", "has 15 bytes"),
        (b"", "is empty"),
        (b" " * 40 + b"\n", "is empty"),
    ):
        path = key_file(tmp_path, data)
        with pytest.raises(ConfigError, match=text) as caught:
            pool_settings(bare, path)
        assert "\n" not in str(caught.value)
    with pytest.raises(ConfigError, match="longer than 4096"):
        pool_settings(bare, key_file(tmp_path, bytes(5000)))
    with pytest.raises(ConfigError, match="no key"):
        pool_settings(bare, None)


def test_certificates_are_looked_at_before_the_pool_opens(tmp_path: Path) -> None:
    names = ("tls_certificate", "tls_key", "tls_authority")
    files = {name: tmp_path / f"{name}.pem" for name in names}
    with_tls = replace(POOL, **files)
    for name, path in files.items():
        with pytest.raises(ConfigError, match=f"read {name} {path}: No such file.*name a PEM"):
            pool_settings(with_tls, None)
        path.write_text("PEM")
        path.chmod(0o640)
    assert pool_settings(with_tls, None) == with_tls
    files["tls_certificate"].chmod(0o644)
    assert pool_settings(with_tls, None) == with_tls
    files["tls_key"].chmod(0o644)
    with pytest.raises(ConfigError, match=r"tls_key .* has mode 0644: .*chmod 600"):
        pool_settings(with_tls, None)


def test_the_digest_tells_no_key() -> None:
    def config(key: bytes | None) -> DaemonConfig:
        return replace(DaemonConfig(), pool=replace(POOL, key=key))

    assert config(KEY).digest() == config(KEY * 2).digest()
    assert len({config(KEY).digest(), config(None).digest(), DaemonConfig().digest()}) == 3
