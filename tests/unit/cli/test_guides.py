"""The guides: every command in them exists with its options; keys and metrics are real."""

from __future__ import annotations

import configparser
import re
import shlex
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import typer
import typer.main

from tests.support.daemon_process import shared_folder
from tests.unit.test_config_loading import FakeMachine
from tierkv.cli.daemon_settings import daemon_config
from tierkv.cli.main import app
from tierkv.config import schema
from tierkv.config.loading import load
from tierkv.config.sources import variable_of
from tierkv.daemon import metrics, pool_metrics
from tierkv.storage.transport import ucx_environment

ROOT = Path(__file__).resolve().parents[3]
GUIDES = [ROOT / f"docs/guides/{name}.md" for name in ("sidecar", "operations", "pool")]
PACKAGING = ROOT / "packaging"
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
OTHERS = {"install", "systemctl", "systemd-sysusers", "curl", "openssl"}


def blocks(guide: Path, kind: str) -> list[str]:
    return [text for found, text in BLOCK.findall(guide.read_text()) if found == kind]


COMMANDS = [
    line.removeprefix("$ ")
    for guide in GUIDES
    for block in blocks(guide, "console")
    for line in block.splitlines()
    if line.startswith("$ ")
]


def parse(arguments: list[str]) -> None:
    """Parse one command line as the program would, and run nothing."""
    command = typer.main.get_command(app)
    name, context = "tierkv", None
    while True:
        context = command.make_context(name, arguments, parent=context)
        if not hasattr(command, "resolve_command"):
            return
        rest = [*getattr(context, "_protected_args", []), *context.args]
        name, command, arguments = command.resolve_command(context, rest)
        assert command is not None


def test_there_are_commands() -> None:
    assert len(COMMANDS) > 20
    used = {shlex.split(command)[1] for command in COMMANDS if command.startswith("tierkv")}
    assert used >= {"serve", "config", "top", "ls", "drop", "drain", "fsck", "explain", "stat"}


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_of_the_guides_exist(command: str) -> None:
    program, *arguments = shlex.split(command)
    if program != "tierkv":
        assert program in OTHERS
        for argument in arguments:
            assert not argument.startswith("packaging/") or (ROOT / argument).is_file()
        return
    parse(arguments)


def test_the_parser_of_this_test_sees_mistakes() -> None:
    for wrong in (["nothing"], ["top", "--no-such-option"], ["serve", "--host-sise", "1"]):
        with pytest.raises(typer.BadParameter.__mro__[2]):  # type: ignore[arg-type]
            parse(wrong)


@pytest.mark.parametrize("text", [text for guide in GUIDES for text in blocks(guide, "yaml")])
def test_yaml_of_the_guides_is_a_configuration(tmp_path: Path, text: str) -> None:
    file = tmp_path / "tierkv.yaml"
    # Names of users and groups are the reader's.
    file.write_text(text.replace("vllm", "root"))
    assert load(file, {}, {}, FakeMachine()).mistakes == ()


@pytest.mark.parametrize("guide", GUIDES, ids=lambda guide: guide.stem)
def test_keys_variables_and_metrics_of_the_guides_exist(guide: Path) -> None:
    text = guide.read_text()
    sections = "|".join(schema.SECTIONS)
    for key in re.findall(rf"`((?:{sections})\.[a-z_]+)`", text):
        assert schema.find(key) is not None, key
    known = {variable_of(name) for name, _ in schema.all_keys()} | {"TIERKV_CONFIG"}
    for variable in re.findall(r"TIERKV_[A-Z_]*[A-Z]", text):
        assert any(name.startswith(variable) for name in known), variable
    source = "".join(Path(module.__file__).read_text() for module in (metrics, pool_metrics))
    source = source.replace("{kind}", "pool")
    prefixes = ("", "tierkv_", "tierkv_tier_", "tierkv_pool_", "tierkv_pool_member_")
    for name in re.findall(r"`(tierkv_[a-z_]+)`", text):
        base = name.removesuffix("_total")
        known_names = [base.removeprefix(prefix) for prefix in prefixes if base.startswith(prefix)]
        assert any(f'"{each}"' in source for each in known_names), name


@pytest.mark.parametrize("text", [text for guide in GUIDES for text in blocks(guide, "python")])
def test_python_of_the_guides_runs(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    # Without a daemon a store misses everything: what is called is called as it is made.
    with shared_folder() as folder:
        exec(text.replace("/run/tierkv", str(folder)), {})
    assert capsys.readouterr().err == ""


def test_links_lead_somewhere() -> None:
    for guide in GUIDES:
        for target in re.findall(r"\]\(([^)#:]+)\)", guide.read_text()):
            assert (guide.parent / target).is_file(), target


# packaging


def test_the_example_is_a_configuration() -> None:
    result = load(PACKAGING / "tierkv.yaml", {}, {}, FakeMachine())
    assert result.mistakes == ()
    assert result.settings().daemon.socket == Path("/run/tierkv/tierkv.sock")


def test_the_examples_pool_is_one(tmp_path: Path) -> None:
    text = (PACKAGING / "tierkv.yaml").read_text()
    assert load(PACKAGING / "tierkv.yaml", {}, {}, FakeMachine()).settings().pool.listen is None
    section = re.search(r"^#pool:\n(?:#  .*\n)+", text, re.MULTILINE)
    assert section is not None
    file = tmp_path / "tierkv.yaml"
    file.write_text(text.replace(section[0], re.sub("^#", "", section[0], flags=re.MULTILINE)))
    result = load(file, {}, {}, FakeMachine())
    assert result.mistakes == ()
    config = daemon_config(result.settings())
    assert config.pool is not None and config.pool_key_file is not None
    replace(config.pool, key=bytes(16)).validate()


def test_variables_of_ucx_are_those_that_are_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("UCX_NET_DEVICES", "UCX_TLS", "UCX_MODULES", "NIXL_LOG_LEVEL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(ucx_environment, "rdma_devices", list)
    chosen = ucx_environment.prepare_ucx("127.0.0.2")
    text = (ROOT / "docs/guides/pool.md").read_text()
    table = dict(re.findall(r"^\| `((?:UCX|NIXL)_[A-Z_]+)` \| (.*) \|$", text, re.MULTILINE))
    assert table.keys() == chosen.keys()
    for name in ("UCX_TLS", "UCX_MODULES", "NIXL_LOG_LEVEL"):
        assert f"`{chosen[name]}`" in table[name]
    for name in chosen:
        monkeypatch.delenv(name)


def test_packages_without_cuda_are_those_of_make_peers() -> None:
    makefile = (ROOT / "Makefile").read_text()
    text = (ROOT / "docs/guides/pool.md").read_text()
    commands = re.findall(r"pip install --no-deps ([^`]+)`", text)
    assert len(commands) == 2
    for package in shlex.split(" ".join(commands)):
        assert re.search(rf"(?<![\w-]){re.escape(package)}(?![\w-])", makefile), package


def test_the_unit_starts_what_there_is() -> None:
    unit = configparser.RawConfigParser(strict=False)
    unit.optionxform = str  # type: ignore[assignment, method-assign]
    unit.read(PACKAGING / "tierkv.service")
    service = unit["Service"]
    assert (service["Type"], service["LimitMEMLOCK"]) == ("notify", "infinity")
    assert service["RuntimeDirectory"] == "tierkv" and int(service["WatchdogSec"]) > 0
    command = shlex.split(service["ExecStart"])
    assert command[:3] == ["/usr/bin/env", "tierkv", "serve"]
    parse(command[2:])
    settings = load(PACKAGING / "tierkv.yaml", {}, {}, FakeMachine()).settings()
    assert int(service["TimeoutStopSec"]) > settings.daemon.stop, "killed before it has flushed"
    assert settings.nvme.directory == Path("/var/cache") / service["CacheDirectory"]
    assert settings.daemon.socket.parent == Path("/run") / service["RuntimeDirectory"]
    # UCX opens netlink sockets; an address to listen on has to be there at the start.
    assert "AF_NETLINK" in service["RestrictAddressFamilies"].split()
    assert "network-online.target" in unit["Unit"]["After"].split()


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd here")
def test_systemd_accepts_the_unit() -> None:
    done = subprocess.run(
        ["systemd-analyze", "verify", str(PACKAGING / "tierkv.service")],
        capture_output=True,
        text=True,
        timeout=60,
    )
    about_it = [line for line in done.stderr.splitlines() if "tierkv.service" in line]
    assert (done.returncode, about_it) == (0, [])
