"""A daemon process as its operator sees it: HTTP, namespaces, quotas, preload, systemd, stop."""

from __future__ import annotations

import json
import os
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from tests.support.daemon_process import (
    PAGE_BYTES,
    DaemonProcess,
    shared_folder,
    small_config,
)
from tests.support.model_files import write_model
from tests.support.pages import page_key, put_store, take_content
from tierkv.cli.main import main
from tierkv.client.client import Client
from tierkv.storage.identity import Fingerprint, namespace, page_keys
from tierkv.storage.tiers.host import HostTier
from tierkv.storage.tiers.nvme import NvmeTier
from tierkv.storage.types import CommitOutcome, TierName, pack_tokens

# The package's attribute of the same name may be the command.
explain_module = import_module("tierkv.cli.explain")

WAIT_S = 30.0
TOKEN = "let me in"


@pytest.fixture
def folder() -> Iterator[Path]:
    with shared_folder() as made:
        yield made


def fingerprint(number: int, tenant: str = "") -> Fingerprint:
    return Fingerprint(
        weights_digest=number.to_bytes(32, "big"),
        architecture=(("layers", 2),),
        kv_dtype="float32",
        kv_quantisation="none",
        page_tokens=16,
        tenant=tenant,
    )


def client_of(daemon: DaemonProcess, *arguments: Any, **options: Any) -> Client:
    return Client(daemon.config.socket_path, PAGE_BYTES, *arguments, **options)


class Http:
    """The daemon's HTTP, on a port found in advance."""

    def __init__(self) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]

    def settings(self, token: str | None = TOKEN) -> dict[str, Any]:
        return {"http_host": "127.0.0.1", "http_port": self.port, "http_token": token}

    def get(self, path: str) -> tuple[int, str]:
        return self._call(urllib.request.Request(self._url(path)))

    def post(
        self, name: str, body: object = None, token: str | None = TOKEN
    ) -> tuple[int, dict[str, Any]]:
        data = body if isinstance(body, bytes) else json.dumps(body or {}).encode()
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        request = urllib.request.Request(self._url(f"/admin/{name}"), data, headers)
        code, text = self._call(request)
        found: dict[str, Any] = json.loads(text)
        return code, found

    def _url(self, path: str) -> str:
        return f"http://127.0.0.1:{self.port}{path}"

    def _call(self, request: urllib.request.Request) -> tuple[int, str]:
        try:
            with urllib.request.urlopen(request, timeout=WAIT_S) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()


def test_http_tells_how_it_is(folder: Path) -> None:
    http = Http()
    with DaemonProcess.started(small_config(folder, **http.settings())) as daemon:
        with client_of(daemon) as client:
            put_store(client, [page_key(n) for n in range(8)])
            assert http.get("/healthz") == (200, "ok\n")
            assert http.get("/readyz") == (200, "ready\n")
            code, text = http.get("/status")
            status = json.loads(text)
            assert code == 200 and status["pid"] == daemon.process.pid
            (found,) = status["classes"]
            assert found["tiers"]["host"]["committed_pages"] == 8
            assert status["requests"]["answered"]["commit"] == {"ok": 1}
            code, text = http.get("/metrics")
            labels = f'page_bytes="{PAGE_BYTES}",state="committed",tier="host"'
            assert code == 200 and f"tierkv_tier_pages{{{labels}}} 8.0" in text
            assert 'tierkv_requests_total{code="ok",verb="commit"} 1.0' in text
            assert http.post("drain", {"wait_s": WAIT_S}) == (200, {"durable": True})
            assert http.get("/readyz")[0] == 503 and http.get("/healthz")[0] == 200
            assert client.lookup([page_key(1)]) == [None]


def test_a1_admin_needs_the_token(folder: Path) -> None:
    http = Http()
    with DaemonProcess.started(small_config(folder, **http.settings())):
        for token in (None, "", "wrong", TOKEN + "x"):
            assert http.post("flush", token=token)[0] == 401
        assert http.post("flush") == (200, {"durable": True})
        for name, body in (
            ("drop", {}),
            ("drop", {"namespace": "zz"}),
            ("flush", {"wait_s": -1}),
            ("flush", {"wait_s": "soon"}),
            ("flush", b"not json"),
            ("flush", b"[]"),
        ):
            code, answer = http.post(name, body)
            assert code == 400 and answer["error"]["message"], (name, body)
        assert http.post("scrub", {"page_bytes": 12})[0] == 404
        assert http.post("drop", {"namespace": "00" * 32})[0] == 400
    with DaemonProcess.started(small_config(folder, **http.settings(token=None))):
        code, answer = http.post("flush")
        assert code == 403 and answer["error"]["code"] == "admin_off"


def test_evictions_are_told_by_key(folder: Path) -> None:
    http = Http()
    gone, there = page_key(1), page_key(2)
    values = small_config(
        folder,
        **http.settings(),
        host_class_bytes=HostTier.capacity_for(PAGE_BYTES, 64),
        nvme_class_bytes=NvmeTier.capacity_for(PAGE_BYTES, 64),
    )
    with DaemonProcess.started(values) as daemon:
        asked = f"/evictions?key={gone.hex()}"
        assert http.get(asked) == (200, '{"evictions": []}'), "no class is open yet"
        small = Client(daemon.config.socket_path, PAGE_BYTES // 2)
        with client_of(daemon) as client, small:
            before = time.time()
            put_store(client, [gone, there])
            assert client.flush(WAIT_S)
            assert client.drop(keys=[gone]) == 2
            put_store(small, [gone])
            # Removals of one key in two page sizes are told together.
            assert small.drop(keys=[gone]) >= 1
        code, text = http.get(asked)
        rows = json.loads(text)["evictions"]
        assert code == 200 and all(row["reason"] == "dropped" for row in rows)
        assert {row["tier"] for row in rows} == {"host", "nvme"}
        assert sum(row["tier"] == "host" for row in rows) == 2
        moments = [row["wall_s"] for row in rows]
        assert moments == sorted(moments, reverse=True)
        assert before - 1 <= moments[-1] and moments[0] <= time.time() + 1
        assert http.get(f"/evictions?key={there.hex()}") == (200, '{"evictions": []}')
        for query in ("", "?key=", "?key=zz", "?key=" + "00" * 31, "?key=" + "0g" * 32, "?k=1"):
            code, text = http.get("/evictions" + query)
            error = json.loads(text)["error"]
            assert code == 400 and error["code"] == "bad_field", query
            assert error["message"] == "key: expected 64 hex digits"
        daemon.check()


def test_explain_says_when_a_page_was_dropped(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The command, over the daemon's socket and its HTTP, with nothing in between replaced."""
    for name in [name for name in os.environ if name.startswith("TIERKV_")]:
        monkeypatch.delenv(name)
    model, http, tokens = folder / "model", Http(), list(range(48))
    monkeypatch.setenv("TIERKV_DAEMON_SOCKET", str(folder / "daemon.sock"))
    monkeypatch.setenv("TIERKV_HTTP_PORT", str(http.port))
    write_model(model)
    base = ["explain", "--model", str(model), "--device", "cpu", "--tenant", "acme", "--json"]
    found = _explained(capfd, [*base, "--tokens", "1"], 1)
    assert found is None, "no daemon yet"
    theirs = explain_module._fingerprint(model, "cpu", 16, "acme", "")
    keys = page_keys(namespace(theirs), pack_tokens(tokens), 16)
    with DaemonProcess.started(small_config(folder, **http.settings())) as daemon:
        with client_of(daemon, theirs) as client:
            put_store(client, keys)
            assert client.flush(WAIT_S)
            client.drop(keys=[keys[1]])
        words = [*base, "--tokens", ",".join(map(str, tokens))]
        found = _explained(capfd, words, 0)
        assert found is not None
        assert (found["held"], found["hit_pages"], found["stranded_pages"]) == (True, 1, 1)
        assert found["evictions_unknown"] is None
        left = {(row["tier"], row["reason"]) for row in found["evictions"]}
        assert left == {("host", "dropped"), ("nvme", "dropped")}
        # A page that never was there left nothing behind.
        found = _explained(capfd, [*base, "--tokens", ",".join(["7"] * 48)], 0)
        assert found is not None and found["evictions"] == []


def _explained(
    capfd: pytest.CaptureFixture[str], words: list[str], wanted: int
) -> dict[str, Any] | None:
    capfd.readouterr()
    assert main(words) == wanted
    out = capfd.readouterr().out
    return json.loads(out) if out else None


def test_w4_namespaces_are_listed_dropped_and_outlive_a_restart(folder: Path) -> None:
    values = small_config(folder)
    with DaemonProcess.started(values) as daemon:
        with (
            client_of(daemon, fingerprint(1, "acme")) as first,
            client_of(daemon, fingerprint(2)) as second,
        ):
            put_store(first, [page_key(n) for n in range(8)])
            put_store(second, [page_key(n) for n in range(100, 104)])
            assert first.flush(WAIT_S)
        assert daemon.stop() == 0
    with DaemonProcess.started(values) as daemon, client_of(daemon, fingerprint(1)) as client:
        rows = {row["tenant"]: row for row in client.namespaces() if row["pages"]}
        assert rows["acme"]["pages"] == {"host": 8, "nvme": 8}
        assert rows[""]["pages"] == {"host": 4, "nvme": 4}
        assert json.loads(rows["acme"]["fingerprint"])["tenant"] == "acme"
        assert client.drop(namespace=rows["acme"]["namespace"]) >= 8
        assert client.lookup([page_key(1), page_key(100)]) == [None, TierName.HOST]
        assert client.drop(keys=[page_key(100)]) >= 1
        assert client.lookup([page_key(100)]) == [None]
        assert all(row["tenant"] != "acme" for row in client.namespaces())
        daemon.check()


def test_tenant_has_its_ceiling(folder: Path) -> None:
    slot = PAGE_BYTES + 4096
    rule = {"tenant": "acme", "host_ceiling_bytes": 10 * slot}
    with DaemonProcess.started(small_config(folder, quotas=[rule])) as daemon:
        with (
            client_of(daemon, fingerprint(1, "acme")) as first,
            client_of(daemon, fingerprint(2, "acme")) as second,
            client_of(daemon, fingerprint(3, "other")) as free,
        ):
            put_store(first, [page_key(n) for n in range(8)])
            put_store(second, [page_key(n) for n in range(100, 108)])
            put_store(free, [page_key(n) for n in range(200, 220)])
            usage = {}
            for row in free.namespaces():
                pages = row["pages"].get("host", 0)
                usage[row["tenant"]] = usage.get(row["tenant"], 0) + pages
            assert usage["acme"] <= 10 and usage["other"] == 20
        daemon.check()


def test_stream_mode_carries_payloads(folder: Path) -> None:
    page_bytes = 256 << 10
    values = small_config(folder, page_bytes=page_bytes)
    with DaemonProcess.started(values) as daemon:
        keys = [page_key(n) for n in range(8)]
        with Client(daemon.config.socket_path, page_bytes, mode="stream") as client:
            assert put_store(client, keys) == [CommitOutcome.COMMITTED] * 8
            assert take_content(client, keys) == 8
        with Client(daemon.config.socket_path, page_bytes) as client:
            assert take_content(client, keys) == 8
        daemon.await_status("all is free", lambda s: not s["sessions"]["reserved_pages"])
        daemon.check()


def test_r1_hot_pages_are_preloaded_after_a_reboot(folder: Path) -> None:
    values = small_config(folder, preload_fraction=0.5)
    keys = [page_key(n) for n in range(32)]
    with DaemonProcess.started(values) as daemon:
        with client_of(daemon) as client:
            put_store(client, keys)
            assert client.flush(WAIT_S)
        assert daemon.stop() == 0
    for arena in (folder / "arenas").glob("*.arena"):
        arena.unlink()
    with DaemonProcess.started(values) as daemon:
        status = daemon.await_status(
            "preloaded",
            lambda s: any(each["finished"] for each in s["background"]["preload"].values()),
        )
        progress = status["background"]["preload"][str(PAGE_BYTES)]
        assert progress["done_pages"] == progress["total_pages"] == 32
        with client_of(daemon) as client:
            assert client.lookup(keys) == [TierName.HOST] * 32
        daemon.check()


def test_prefetch_brings_pages_up(folder: Path) -> None:
    values = small_config(folder)
    keys = [page_key(n) for n in range(16)]
    with DaemonProcess.started(values) as daemon:
        with client_of(daemon) as client:
            put_store(client, keys)
        assert daemon.stop() == 0
    for arena in (folder / "arenas").glob("*.arena"):
        arena.unlink()
    with DaemonProcess.started(values) as daemon, client_of(daemon) as client:
        assert client.lookup(keys) == [TierName.NVME] * 16
        assert client.prefetch([*keys, page_key(999)], WAIT_S) == 16
        daemon.await_status(
            "arrived", lambda s: s["classes"][0]["tiers"]["host"]["committed_pages"] == 16
        )
        assert client.lookup(keys) == [TierName.HOST] * 16
        daemon.check()


def test_service_manager_is_told(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(folder / "notify"))
        manager.settimeout(WAIT_S)
        monkeypatch.setenv("NOTIFY_SOCKET", str(folder / "notify"))
        monkeypatch.setenv("WATCHDOG_USEC", "200000")
        with DaemonProcess.started(small_config(folder)) as daemon:
            assert manager.recv(4096).startswith(b"READY=1")
            assert manager.recv(4096) == b"WATCHDOG=1"
            assert daemon.stop() == 0
            said = manager.recv(4096)
            while said == b"WATCHDOG=1":
                said = manager.recv(4096)
            assert said.startswith(b"STOPPING=1")


def test_arena_of_another_size_is_replaced_not_cut(folder: Path) -> None:
    """A worker of the former daemon keeps its memory (lesson R3)."""
    values = small_config(folder)
    with DaemonProcess.started(values) as daemon:
        with client_of(daemon) as client:
            put_store(client, [page_key(n) for n in range(8)])
            assert client.flush(WAIT_S)
            lease = client.fetch([page_key(1)], WAIT_S).take(WAIT_S)
            view = lease.views[0]
            before = bytes(view)
            daemon.kill()
            smaller = {**values, "host_bytes": values["host_bytes"] // 2}
            with DaemonProcess.started(smaller) as again:
                assert client.wait_connected(WAIT_S)
                # Would be a SIGBUS, or another page, if the file had been cut.
                assert bytes(view) == before
                assert take_content(client, [page_key(n) for n in range(8)]) == 8
                again.check()
            lease.release()


def test_socket_is_for_its_owner_only(folder: Path) -> None:
    with DaemonProcess.started(small_config(folder)) as daemon:
        assert daemon.config.socket_path.stat().st_mode & 0o777 == 0o600
        with client_of(daemon):
            (arena,) = list((folder / "arenas").glob("*.arena"))
            assert arena.stat().st_mode & 0o777 == 0o600
            assert arena.stat().st_uid == os.getuid()
