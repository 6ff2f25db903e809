"""`tierkv stat`: closed cache files, a running engine, and what each mistake says."""

from __future__ import annotations

import dataclasses
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.support.fake_engine import FakeEngine
from tests.unit.cli.conftest import Cli
from tests.unit.cli.test_bad_input import content, opened_store, refused
from tierkv.storage.tiers.host import HostTier
from tierkv.storage.tiers.nvme import NvmeTier
from tierkv.storage.types import KEY_BYTES, PageKey

PAGE_BYTES = 5000
PAGES = 7
KEYS = [PageKey(bytes([number]) * KEY_BYTES) for number in range(PAGES)]


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """An arena of 10 slots and an nvme folder of 20, with PAGES pages each; closed."""
    host = HostTier(tmp_path / "arena", PAGE_BYTES, HostTier.capacity_for(PAGE_BYTES, 10))
    nvme = NvmeTier(tmp_path / "nvme", PAGE_BYTES, NvmeTier.capacity_for(PAGE_BYTES, 20))
    for tier in (host, nvme):
        with tier.reserve(PAGES) as held:
            for index in range(PAGES):
                tier.write(held, index, bytes([index]) * PAGE_BYTES)
            tier.commit(held, KEYS)
        tier.close()
    return tmp_path


def test_closed_files_are_counted_and_not_changed(cli: Cli, cache: Path) -> None:
    before = content(cache)
    places = ("--host-arena", cache / "arena", "--nvme-dir", cache / "nvme")
    code, out, err = cli("stat", *places, "--json")
    assert (code, err, out.count("\n")) == (0, "", 1)
    host, nvme = json.loads(out)["tiers"]
    assert (host["name"], host["page_bytes"], host["capacity_pages"]) == ("host", PAGE_BYTES, 10)
    assert (nvme["name"], nvme["page_bytes"]) == ("nvme", PAGE_BYTES)
    for tier in (host, nvme):
        assert tier["committed_pages"] == PAGES
        assert tier["committed_pages"] + tier["free_pages"] == tier["capacity_pages"]
        assert tier["degraded"] is None
    assert content(cache) == before
    code, out, err = cli("stat", *places)
    assert (code, err) == (0, "")
    assert "host" in out and "7 / 10" in out and "nvme" in out


def test_every_page_size_of_a_folder_is_shown(cli: Cli, cache: Path) -> None:
    NvmeTier(cache / "nvme", 9000, 8 << 20).close()
    _, out, _ = cli("stat", "--nvme-dir", cache / "nvme", "--json")
    sizes = {tier["page_bytes"]: tier["committed_pages"] for tier in json.loads(out)["tiers"]}
    assert sizes == {PAGE_BYTES: PAGES, 9000: 0}


@pytest.mark.parametrize("damage", ["missing", "truncated", "damaged"])
def test_lost_index_is_told_and_left_alone(cli: Cli, cache: Path, damage: str) -> None:
    data = cache / "nvme" / f"pages-{PAGE_BYTES}" / "index" / "data.mdb"
    if damage == "missing":
        data.unlink()
    elif damage == "truncated":
        data.write_bytes(data.read_bytes()[: 2 * 4096])
    else:
        data.write_bytes(b"\xff" * data.stat().st_size)
    before = content(cache)
    code, out, _ = cli("stat", "--nvme-dir", cache / "nvme")
    assert code == 0
    assert f"degraded: index {damage}" in out
    assert content(cache) == before


def test_files_that_a_process_has_open(cli: Cli, cache: Path) -> None:
    (cache / "other").mkdir()
    with opened_store(cache / "other"):
        refused(cli("stat", "--host-arena", cache / "other" / "arena"), 2, "--url")
        refused(cli("stat", "--nvme-dir", cache / "other" / "nvme"), 2, "--url")


def test_places_without_a_cache(cli: Cli, cache: Path) -> None:
    (cache / "empty").mkdir()
    refused(cli("stat", "--nvme-dir", cache / "empty"), 2, "manifest.json")
    refused(cli("stat", "--host-arena", cache / "nothing"), 2, "nothing")
    refused(cli("stat", "--host-arena", cache / "empty"), 2, "empty")
    assert list((cache / "empty").iterdir()) == []
    (cache / "short").write_bytes(bytes(100))
    refused(cli("stat", "--host-arena", cache / "short"), 2, "empty or damaged")


def test_files_of_another_version(cli: Cli, cache: Path) -> None:
    with (cache / "arena").open("r+b") as file:
        file.seek(8)
        file.write((99).to_bytes(4, "little"))
    refused(cli("stat", "--host-arena", cache / "arena"), 2, "format version 99")
    (cache / "nvme" / "manifest.json").write_text('{"version": 99}')
    refused(cli("stat", "--nvme-dir", cache / "nvme"), 2, "format version 99")


@pytest.mark.parametrize("arguments", [(), ("--url", "http://x", "--nvme-dir", "y")])
def test_one_source_is_asked_for(cli: Cli, arguments: tuple[str, ...]) -> None:
    refused(cli("stat", *arguments), 2, "either --url")


def test_a_daemon_is_found_by_its_configuration(cli: Cli, tmp_path: Path) -> None:
    file = tmp_path / "tierkv.yaml"
    file.write_text(f"daemon:\n  socket: {tmp_path}/d.sock\n")
    refused(cli("stat", "--config", file), 1, f"connect to {tmp_path}/d.sock", "tierkv serve")
    # What is named for this call wins.
    refused(cli("stat", "--config", file, "--nvme-dir", tmp_path / "no"), 2, str(tmp_path / "no"))
    file.write_text("daemon:\n  sockt: x\n")
    refused(cli("stat", "--config", file), 2, "did you mean daemon.socket?")


# A running engine


@contextmanager
def answering(body: bytes, status: int = 200, key: str | None = None) -> Iterator[str]:
    """The URL of a server that answers /stats."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            known = key is None or self.headers.get("Authorization") == f"Bearer {key}"
            found = self.path == "/stats"
            self.send_response(status if known and found else 401 if found else 404)
            self.end_headers()
            self.wfile.write(body if known and found else b"")

        def log_message(self, format: str, *values: object) -> None:
            """Quiet."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def engine_stats() -> bytes:
    return json.dumps(dataclasses.asdict(FakeEngine().stats())).encode()


def test_running_engine(cli: Cli) -> None:
    with answering(engine_stats()) as url:
        code, out, err = cli("stat", "--url", url)
        assert (code, err) == (0, "")
        assert "tiny on cpu: 0 running, 0 waiting" in out
        assert "5 / 20" in out, "pages of the pool in use"
        assert "degraded: write: disk full" in out
        code, out, err = cli("stat", "--url", url + "/", "--json")
    answer = json.loads(out)
    assert (code, err) == (0, "")
    assert [tier["name"] for tier in answer["tiers"]] == ["host", "nvme"]
    assert answer["engine"]["store"]["mover"]["dropped"] == 4


def test_a1_key_is_sent(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    with answering(engine_stats(), key="secret") as url:
        refused(cli("stat", "--url", url), 2, "--api-key")
        assert cli("stat", "--url", url, "--api-key", "secret")[0] == 0
        monkeypatch.setenv("TIERKV_API_KEY", "secret")
        assert cli("stat", "--url", url)[0] == 0


@pytest.mark.parametrize("body", [b"<html>", b"[]", b'{"model": 1}', b"{}", b"\xff"])
def test_answer_of_something_else(cli: Cli, body: bytes) -> None:
    with answering(body) as url:
        refused(cli("stat", "--url", url), 2, "is this a TierKV engine?")


def test_url_that_leads_nowhere(cli: Cli) -> None:
    with answering(b"") as url:
        refused(cli("stat", "--url", url + "/other"), 2, "status 404")
    refused(cli("stat", "--url", url), 1, "is the engine running?")
    refused(cli("stat", "--url", "file:///etc/passwd"), 2, "http://HOST:PORT")
