"""`tierkv config` and `tierkv serve`: what is printed, and what the daemon is given."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.unit.cli.conftest import Cli
from tests.unit.cli.test_bad_input import refused
from tierkv.daemon.settings import DaemonConfig


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TIERKV_CONFIG", "TIERKV_HTTP_TOKEN"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[DaemonConfig]:
    """What `serve` started, instead of a daemon."""
    seen: list[DaemonConfig] = []

    def run_daemon(config: DaemonConfig) -> int:
        seen.append(config)
        return 0

    monkeypatch.setitem(sys.modules, "tierkv.daemon.run", SimpleNamespace(run_daemon=run_daemon))
    return seen


def written(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "tierkv.yaml"
    file.write_text(text)
    return file


def test_show_tells_value_and_source(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = written(tmp_path, "host:\n  size: 64MiB\nhttp:\n  port: 1\n")
    monkeypatch.setenv("TIERKV_HTTP_PORT", "2")
    monkeypatch.setenv("TIERKV_HTTP_TOKEN", "hunter2")
    arguments = ("config", "show", "--config", file, "--log-level", "debug")
    code, out, err = cli(*arguments, "--set", "limits.keys=7", "--json")
    values = json.loads(out)["values"]
    assert (code, err, json.loads(out)["mistakes"]) == (0, "", [])
    assert values["host.size"] == {"value": "64MiB", "source": f"{file}:2"}
    assert values["http.port"] == {"value": "2", "source": "environment TIERKV_HTTP_PORT"}
    assert values["log.level"] == {"value": "debug", "source": "--log-level"}
    assert values["limits.keys"] == {"value": "7", "source": "--limits-keys"}
    assert values["nvme.size"] == {"value": "0", "source": "default"}
    assert values["http.token"]["value"] == "(hidden)" and "hunter2" not in out
    code, out, err = cli(*arguments)
    assert (code, err) == (0, "")
    assert f"{file}:2" in out and "hunter2" not in out


def test_show_with_a_mistake_still_shows_and_fails(cli: Cli, tmp_path: Path) -> None:
    file = written(tmp_path, "host:\n  sise: 1\nlog:\n  level: debug\n")
    code, out, err = cli("config", "show", "--config", file)
    assert code == 2 and "debug" in out
    assert err.count("\n") == 1 and f"{file}:2: host.sise: unknown key" in err


def test_the_file_may_be_named_in_the_environment(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TIERKV_CONFIG", str(written(tmp_path, "log: {level: error}")))
    _, out, _ = cli("config", "show", "--json")
    assert json.loads(out)["values"]["log.level"]["value"] == "error"


def test_check_is_0_or_2_with_every_mistake(cli: Cli, tmp_path: Path) -> None:
    file = written(tmp_path, "host:\n  size: 64MiB\n")
    assert cli("config", "check", file) == (0, f"{file}: ok\n", "")
    written(tmp_path, "host:\n  size: lots\nhttp:\n  prot: 1\n  port: 1\n  port: 2\n")
    code, out, err = cli("config", "check", file)
    assert (code, out) == (2, "")
    lines = err.splitlines()
    for line, number in zip(lines, (2, 4, 6), strict=True):
        assert line.startswith(f"tierkv: error: {file}:{number}: ")
    code, out, err = cli("config", "check", file, "--json")
    assert (code, err, len(json.loads(out)["mistakes"])) == (2, "", 3)
    refused(cli("config", "check", tmp_path / "none"), 2, "none", "No such file")


def test_check_ignores_the_environment(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TIERKV_HTTP_PROT", "1")
    file = written(tmp_path, "")
    assert cli("config", "check", file)[0] == 0
    refused(cli("serve", "--config", file), 2, "TIERKV_HTTP_PROT", "did you mean TIERKV_HTTP_PORT?")


def test_serve_gives_the_daemon_what_is_in_force(
    cli: Cli, tmp_path: Path, started: list[DaemonConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = written(tmp_path, "host:\n  size: 64MiB\nquotas:\n  - {tenant: a, ttl: 1d}\n")
    monkeypatch.setenv("TIERKV_DAEMON_WORKERS", "7")
    assert cli("serve", "--config", file, "--daemon-socket", "/tmp/s") == (0, "", "")
    (config,) = started
    assert (config.host_bytes, config.workers) == (64 << 20, 7)
    assert (config.socket_path, config.quotas[0].ttl_s) == (Path("/tmp/s"), 86400)


def test_serve_starts_nothing_on_a_mistake(
    cli: Cli, tmp_path: Path, started: list[DaemonConfig]
) -> None:
    file = written(tmp_path, "host:\n  sise: 1\n")
    refused(cli("serve", "--config", file), 2, f"{file}:2", "did you mean host.size?")
    refused(cli("serve", "--host-size", "900TiB"), 2, "--host-size", "lower it")
    refused(cli("serve", "--set", "nothing"), 2, "KEY=VALUE")
    refused(cli("serve", "--set", "host.sise=1"), 2, "did you mean host.size?")
    refused(cli("serve", "--host-sise", "1"), 2, "--host-sise")
    refused(cli("serve", "--http-bind", "0.0.0.0"), 2, "127.0.0.1")
    assert started == []


def test_serve_names_the_extra_it_needs(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "tierkv.daemon.run", raising=False)
    for name in [name for name in sys.modules if name.startswith("tierkv.daemon")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "aiohttp", None)
    result = cli("serve", "--host-size", "64MiB", "--daemon-socket", "/nowhere/s")
    refused(result, 2, "aiohttp", "pip install 'tierkv[daemon]'")
