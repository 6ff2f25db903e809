"""top, ls, drop, drain, fsck, explain and stat against a daemon in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import pytest

from tests.unit.cli.conftest import Cli
from tests.unit.cli.test_bad_input import content, refused
from tierkv.cli.explain import _compare, _fingerprint
from tierkv.cli.operator import endpoint
from tierkv.cli.top import Reading, _rate, tiers_of
from tierkv.client.client import Client
from tierkv.storage.errors import ConfigError
from tierkv.storage.identity import Fingerprint, namespace, page_keys
from tierkv.storage.types import CommitOutcome, pack_tokens

# The package's attribute of the same name may be the command.
drain_module = import_module("tierkv.cli.drain")
explain_module = import_module("tierkv.cli.explain")
drop_module = import_module("tierkv.cli.drop")

PAGE_BYTES = 12288
STEP = 16
TOKENS = list(range(5 * STEP + 3))
START_S = 60


@dataclass
class Running:
    """A daemon's process and places."""

    process: subprocess.Popen[str]
    folder: Path
    url: str

    @property
    def socket(self) -> Path:
        return self.folder / "s"

    def stop(self) -> None:
        self.process.terminate()
        assert self.process.wait(START_S) == 0


@pytest.fixture
def daemon(monkeypatch: pytest.MonkeyPatch) -> Iterator[Running]:
    """`tierkv serve` with an nvme tier; the commands find it through the environment."""
    for name in [name for name in os.environ if name.startswith("TIERKV_")]:
        monkeypatch.delenv(name)
    # Short: a socket's path has 107 bytes at most.
    with tempfile.TemporaryDirectory(prefix="tierkv-") as place:
        folder = Path(place)
        monkeypatch.setenv("TIERKV_DAEMON_SOCKET", str(folder / "s"))
        monkeypatch.setenv("TIERKV_HOST_DIRECTORY", str(folder / "arenas"))
        monkeypatch.setenv("TIERKV_HTTP_TOKEN", "secret")
        command = [sys.executable, "-m", "tierkv.cli.main", "serve", "--host-size", "16MiB"]
        command += ["--nvme-directory", str(folder / "cache"), "--nvme-size", "16MiB"]
        command += ["--nvme-min-free", "0", "--http-port", "0"]
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        try:
            url = _wait_listening(process)
            monkeypatch.setenv("TIERKV_HTTP_PORT", url.rpartition(":")[2])
            yield Running(process, folder, url)
        finally:
            process.kill()
            process.wait(START_S)


def _wait_listening(process: subprocess.Popen[str]) -> str:
    """The URL of the daemon's HTTP, once its log says that it listens."""
    assert process.stderr is not None
    late = threading.Timer(START_S, process.kill)
    late.start()
    url, lines = "", []
    try:
        for line in process.stderr:
            lines.append(line)
            if "http=http" in line:
                url = line.strip().rpartition("http=")[2]
            if "listening" in line:
                return url
    finally:
        late.cancel()
    raise AssertionError(f"the daemon did not start: {lines}")


def store(running: Running, fingerprint: Fingerprint, pages: int) -> None:
    """Commit the first `pages` pages of TOKENS."""
    keys = page_keys(namespace(fingerprint), pack_tokens(TOKENS), STEP)[:pages]
    with Client(running.socket, PAGE_BYTES, fingerprint=fingerprint) as client:
        with client.reserve(pages) as held:
            for index, view in enumerate(held.views):
                view[:] = bytes([index]) * PAGE_BYTES
            assert held.commit(keys) == [CommitOutcome.COMMITTED] * pages


@pytest.fixture
def fingerprint(tiny: Path) -> Fingerprint:
    """Of the tiny model for tenant acme, as an engine on the CPU has it."""
    return _fingerprint(tiny, "cpu", STEP, "acme", "")


def test_looking_at_a_daemon(cli: Cli, daemon: Running, fingerprint: Fingerprint) -> None:
    store(daemon, fingerprint, 3)
    code, out, err = cli("ls", "--json")
    assert (code, err) == (0, "")
    (row,) = json.loads(out)["namespaces"]
    assert row["namespace"] == namespace(fingerprint).hex()
    assert (row["tenant"], row["pages"]["host"], row["page_bytes"]) == ("acme", 3, PAGE_BYTES)
    assert row["fingerprint"]["page_tokens"] == STEP
    code, out, err = cli("ls")
    assert (code, err) == (0, "")
    assert row["namespace"][:12] in out and "acme" in out and "llama" in out
    code, out, err = cli("top", "--once")
    assert (code, err) == (0, "") and "serving" in out and "3 / " in out and "commit" in out
    code, out, err = cli("top", "--json")
    status = json.loads(out)
    assert tiers_of(status)[PAGE_BYTES, "host"]["committed_pages"] == 3
    code, out, err = cli("stat", "--socket", daemon.socket, "--json")
    assert (code, err) == (0, "")
    assert [tier["name"] for tier in json.loads(out)["tiers"]] == ["host", "nvme"]
    code, out, err = cli("stat", "--socket", daemon.socket)
    assert (code, err) == (0, "") and "3 / " in out


def test_drop_asks_first(
    cli: Cli, daemon: Running, fingerprint: Fingerprint, monkeypatch: pytest.MonkeyPatch
) -> None:
    store(daemon, fingerprint, 3)
    digest = namespace(fingerprint).hex()
    refused(cli("drop"), 2, "either a namespace or --tenant")
    refused(cli("drop", digest, "--tenant", "acme"), 2, "exactly one")
    refused(cli("drop", "--tenant", "nobody"), 2, "nobody", "tierkv ls")
    refused(cli("drop", "xyz", "--yes"), 2, "hex digits")
    refused(cli("drop", "0" * 64 if digest[0] != "0" else "f" * 64, "--yes"), 2, "no namespace")
    monkeypatch.setattr(sys, "stdin", (daemon.folder / "empty").open("w+"))
    refused(cli("drop", digest[:8]), 2, "--yes")
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(drop_module.typer, "confirm", lambda *_, **__: False)
    code, out, err = cli("drop", "--tenant", "acme")
    assert (code, out) == (1, "") and "nothing was dropped" in err and "3 in host" in err
    code, out, err = cli("drop", digest[:8], "--yes", "--json")
    assert (code, err) == (0, "")
    assert json.loads(out) == {"dropped": [{"namespace": digest, "pages": 3}]}
    assert json.loads(cli("ls", "--json")[1])["namespaces"] == []


def test_drain_flushes_and_ends_new_work(
    cli: Cli, daemon: Running, fingerprint: Fingerprint, monkeypatch: pytest.MonkeyPatch
) -> None:
    store(daemon, fingerprint, 3)
    code, out, err = cli("drain", "--flush-only", "--wait", "20s")
    assert (code, err) == (0, "") and "every page is durable" in out
    (row,) = json.loads(cli("ls", "--json")[1])["namespaces"]
    assert row["pages"]["nvme"] == 3, "flushed"
    refused(cli("drain", "--wait", "20"), 2, "--wait", "30s")
    monkeypatch.setenv("TIERKV_HTTP_TOKEN", "guess")
    refused(cli("drain"), 2, "refused", "TIERKV_HTTP_TOKEN")
    monkeypatch.setenv("TIERKV_HTTP_TOKEN", "secret")
    code, out, err = cli("drain", "--json")
    assert (code, err, json.loads(out)) == (0, "", {"drained": True, "durable": True})
    assert json.loads(cli("top", "--json")[1])["closing"] is True
    refused(cli("ls"), 1, "refused")


def test_drain_ends_no_other_daemons_work(
    cli: Cli, daemon: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(drain_module, "http_json", lambda *_: {"boot_token": "00"})
        refused(cli("drain", "--socket", daemon.socket), 2, "is not the one at", "--config")
    assert json.loads(cli("top", "--json")[1])["closing"] is False
    refused(cli("drain", "--socket", daemon.folder / "none"), 1, "is tierkv serve running")
    assert cli("drain", "--socket", daemon.socket)[0] == 0


def test_fsck_of_a_daemons_folder(cli: Cli, daemon: Running, fingerprint: Fingerprint) -> None:
    store(daemon, fingerprint, 5)
    assert cli("drain", "--flush-only")[0] == 0
    refused(cli("fsck", daemon.folder / "cache"), 2, "a process has it open")
    daemon.stop()
    (arena,) = (daemon.folder / "arenas").glob("*.arena")
    before = content(daemon.folder / "cache")
    code, out, err = cli("fsck", daemon.folder / "cache", "--arena", arena, "--json")
    report = json.loads(out)
    assert (code, err, report["clean"]) == (0, "", True)
    assert [place["pages"] for place in report["places"]] == [5, 5]
    (segment,) = (daemon.folder / "cache").rglob("segment-*.slots")
    with segment.open("r+b") as file:
        file.seek(4096 + 100)
        file.write(b"\xff" * 8)
    code, out, err = cli("fsck", daemon.folder / "cache")
    assert (code, err) == (1, "") and "PROBLEMS" in out and "payload" in out
    assert content(daemon.folder / "cache").keys() == before.keys(), "nothing changes unasked"
    code, out, err = cli("fsck", daemon.folder / "cache", "--repair", "--json")
    assert (code, err, json.loads(out)["clean"]) == (0, "", True)
    code, out, err = cli("fsck", daemon.folder / "cache", "--json")
    assert (code, json.loads(out)["places"][0]["pages"]) == (0, 4)


def test_fsck_cannot_check_what_is_no_cache(cli: Cli, tmp_path: Path) -> None:
    refused(cli("fsck", tmp_path), 2, "nothing of TierKV")
    refused(cli("fsck", tmp_path / "none"), 2, "not a folder")
    refused(cli("fsck"), 2, "DIR")


def explained(cli: Cli, tiny: Path, *arguments: str) -> dict[str, object]:
    base = ("explain", "--model", tiny, "--device", "cpu", "--json", "--tokens")
    code, out, err = cli(*base, ",".join(map(str, TOKENS)), *arguments)
    assert (code, err) == (0, "")
    found: dict[str, object] = json.loads(out)
    return found


def test_w3_explain_names_the_field_that_differs(
    cli: Cli, daemon: Running, fingerprint: Fingerprint, tiny: Path
) -> None:
    assert explained(cli, tiny)["held"] is False, "an empty daemon has nothing to compare"
    store(daemon, fingerprint, 3)
    found = explained(cli, tiny, "--tenant", "other")
    assert found["held"] is False and found["hit_pages"] == 0
    (difference,) = found["differences"]  # type: ignore[misc]
    assert difference["fields"] == ["tenant: other / acme"]
    found = explained(cli, tiny, "--tenant", "acme", "--page-tokens", "8")
    assert found["differences"][0]["fields"] == ["page_tokens: 8 / 16"]  # type: ignore[index]
    code, out, _ = cli("explain", "--model", tiny, "--device", "cpu", "--tokens", "1 2")
    assert code == 0 and "no such namespace" in out and "tenant: none / acme" in out


def test_explain_says_where_the_chain_ends(
    cli: Cli, daemon: Running, fingerprint: Fingerprint, tiny: Path
) -> None:
    store(daemon, fingerprint, 3)
    found = explained(cli, tiny, "--tenant", "acme", "--against", "0,1,2,9")
    assert (found["held"], found["hit_pages"], found["hit_tokens"]) == (True, 3, 48)
    assert (found["pages"], found["hit_tiers"], found["stranded_pages"]) == (5, {"host": 3}, 0)
    against = found["against"]
    assert isinstance(against, dict)
    assert (against["first_different_token"], against["ours"], against["other"]) == (3, 3, 9)
    arguments = ("explain", "--model", tiny, "--device", "cpu", "--tenant", "acme", "--tokens")
    code, out, err = cli(*arguments, " ".join(map(str, TOKENS)))
    assert (code, err) == (0, "")
    assert "first missing page: number 3, tokens 48 to 63" in out
    code, out, err = cli(*arguments, ",".join(map(str, TOKENS[:50])))
    assert code == 0 and "hit: all 3 pages (3 in host); 2 tokens after them" in out
    salted = explained(cli, tiny, "--tenant", "acme", "--cache-salt", "x")
    assert (salted["held"], salted["hit_pages"]) == (True, 0), "another chain, the same namespace"
    code, out, err = cli("explain", "--model", tiny, "--device", "cpu", "--prompt", "a", "--json")
    assert code == 0 and json.loads(out)["pages"] == 0


def test_explain_reads_a_chat_as_the_engine_does(
    cli: Cli, daemon: Running, fingerprint: Fingerprint, tiny: Path
) -> None:
    store(daemon, fingerprint, 1)
    base = ("explain", "--model", tiny, "--device", "cpu", "--tenant", "acme", "--json")
    plain, chat = (
        json.loads(cli(*base, "--prompt", "hello", "--against", "hello there", *more)[1])
        for more in ((), ("--chat",))
    )
    assert chat["tokens"] > plain["tokens"]
    assert chat["against"]["first_different_token"] is not None
    found = json.loads(cli(*base, "--chat", "--prompt", "x" * 99)[1])
    assert (found["held"], found["hit_pages"]) == (True, 0)
    out = cli(*base[:-1], "--prompt", "x" * 99)[1]
    assert "miss: the daemon knows the namespace, but not this prompt's first page" in out


def test_explain_tells_when_a_page_left(
    cli: Cli,
    daemon: Running,
    fingerprint: Fingerprint,
    tiny: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store(daemon, fingerprint, 3)
    missing = page_keys(namespace(fingerprint), pack_tokens(TOKENS), STEP)[3]
    asked: list[str] = []

    def answer(where: object, path: str) -> object:
        asked.append(path)
        return {"evictions": [{"tier": "host", "wall_s": 0.0, "reason": "room"}]}

    monkeypatch.setattr(explain_module, "http_json", answer)
    arguments = ("explain", "--model", tiny, "--device", "cpu", "--tenant", "acme", "--tokens")
    out = cli(*arguments, ",".join(map(str, TOKENS)))[1]
    assert asked == [f"/evictions?key={missing.hex()}"]
    assert "left host at 19" in out and "room" in out
    monkeypatch.setattr(explain_module, "http_json", lambda *_: {"evictions": []})
    assert "never committed, or evicted longer ago" in cli(*arguments, "0 " * 99)[1]
    monkeypatch.setattr(explain_module, "http_json", lambda *_: None)
    assert "whether it was evicted is not known" in cli(*arguments, "0 " * 99)[1]


def test_explain_refuses_bad_input(cli: Cli, tiny: Path, tmp_path: Path) -> None:
    base = ("explain", "--model", tiny, "--socket", tmp_path / "none")
    refused(cli(*base), 2, "--prompt or --tokens")
    refused(cli(*base, "--tokens", "1", "--prompt", "a"), 2, "exactly one")
    refused(cli(*base, "--tokens", "1,x"), 2, "token ids", "'x'")
    refused(cli(*base, "--tokens", "1", "--page-tokens", "99"), 2, "1 to 64")
    refused(cli(*base, "--tokens", "9999999999"), 2, "token ids")
    refused(cli(*base, "--tokens", "9" * 30), 2, "token ids")
    refused(cli(*base, "--tokens", "1"), 1, "is tierkv serve running")


@pytest.mark.parametrize("command", ["ls", "top", "drain --flush-only", "drop --tenant a --yes"])
def test_a_daemon_that_is_away(cli: Cli, tmp_path: Path, command: str) -> None:
    refused(cli(*command.split(), "--socket", tmp_path / "none"), 1, "is tierkv serve running")


def test_drain_needs_http(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIERKV_HTTP_BIND", "none")
    monkeypatch.setenv("TIERKV_DAEMON_SOCKET", str(tmp_path / "none"))
    refused(cli("drain"), 2, "http.bind")


def test_the_daemon_is_found_through_its_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "tierkv.yaml"
    file.write_text("daemon: {socket: /a}\nhttp: {bind: '::1', port: 5}\nhost: {size: 900TiB}\n")
    found = endpoint(file, None)
    assert (found.socket, found.url) == (Path("/a"), "http://[::1]:5")
    assert endpoint(file, Path("/b")).socket == Path("/b")
    monkeypatch.setenv("TIERKV_DAEMON_SOCKET", "/c")
    assert endpoint(file, None).socket == Path("/c")
    file.write_text("daemon: {sockte: /a}\n")
    with pytest.raises(ConfigError, match=r"did you mean daemon\.socket"):
        endpoint(file, None)


def test_rates_need_two_readings_of_one_process() -> None:
    before, now = Reading(10.0, {}), Reading(12.0, {})
    assert _rate({"hits": 100}, {"hits": 300}, "hits", before, now) == "100"
    assert _rate({"hits": 100}, {"hits": 7}, "hits", before, now) == "(7)", "it was restarted"
    assert _rate(None, {"hits": 7}, "hits", None, now) == "(7)"


def test_top_refuses_nonsense(cli: Cli) -> None:
    refused(cli("top", "--interval", "5"), 2, "--interval", "30s")
    refused(cli("top", "--interval", "1ms"), 2, "at least 0.1 s")
    with pytest.raises(ConfigError, match="status"):
        tiers_of({"classes": [1]})


@pytest.mark.parametrize(
    ("ours", "other", "first", "shared"),
    [([1, 2], [1, 2], None, 1), ([1, 2], [1, 3], 1, 0), ([1, 2, 3, 4], [1, 2], 2, 1)],
)
def test_first_different_token(
    ours: list[int], other: list[int], first: int | None, shared: int
) -> None:
    found = _compare(ours, other, 2)
    assert (found["first_different_token"], found["shared_pages"]) == (first, shared)
