"""`tierkv demo`: how its result is shown. The demo itself is tested in tests/integration."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import tierkv.demo
from tests.unit.cli.conftest import Cli
from tierkv.demo import DemoOptions, DemoResult, DemoRow


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Replaces run_demo; returns where its result is set and its options are found."""
    script: dict[str, Any] = {"identical": True}

    def run(options: DemoOptions, progress: Any = None) -> DemoResult:
        progress("a stage")
        script["options"] = options
        rows = [
            DemoRow("cold", "computed", 2.0, 0, True),
            DemoRow("host", "host memory", 0.05, 2000, script["identical"]),
        ]
        return DemoResult("tiny", "cpu", 2048, rows)

    monkeypatch.setattr(tierkv.demo, "run_demo", run)
    return script


def test_table(cli: Cli, scripted: dict[str, Any]) -> None:
    code, out, err = cli("demo")
    assert (code, err) == (0, "")
    cold, host = (line for line in out.splitlines() if line.strip().startswith(("cold", "host")))
    assert cold.split() == ["cold", "computed", "2000.0", "ms", "0", "yes"]
    assert host.split() == ["host", "host", "memory", "50.0", "ms", "40.0", "x", "2,000", "yes"]
    assert "tiny on cpu: one prompt of 2,048 tokens" in out


def test_json_has_the_shape_of_the_benches(cli: Cli, scripted: dict[str, Any]) -> None:
    code, out, err = cli("demo", "--json")
    assert (code, err, out.count("\n")) == (0, "", 1)
    assert json.loads(out) == {
        "rows": [
            {"case": "cold", "ttft_s": 2.0, "reused_tokens": 0, "identical": True},
            {"case": "host", "ttft_s": 0.05, "reused_tokens": 2000, "identical": True},
        ]
    }


@pytest.mark.parametrize("flags", [(), ("--json",)])
def test_w1_different_output_is_a_failure(
    cli: Cli, scripted: dict[str, Any], flags: tuple[str, ...]
) -> None:
    scripted["identical"] = False
    code, _, err = cli("demo", *flags)
    assert code == 1
    assert err == "tierkv: demo: output differs from the cold run in: host\n"


def test_options(cli: Cli, scripted: dict[str, Any]) -> None:
    cli("demo", "--model", "m", "--dir", "d", "--prefix-tokens", "5", "--max-tokens", "6")
    options = scripted["options"]
    assert (options.model, options.directory) == (Path("m"), Path("d"))
    assert (options.prefix_tokens, options.max_tokens) == (5, 6)
    assert not options.remote
    cli("demo", "--remote")
    assert scripted["options"].remote
    cli("demo", "--pool", "1MiB", "--host", "2MiB", "--nvme", "3MiB")
    options = scripted["options"]
    assert (options.pool_bytes, options.host_bytes, options.nvme_bytes) == (
        1 << 20,
        2 << 20,
        3 << 20,
    )


def test_defaults_are_the_demos_own(cli: Cli, scripted: dict[str, Any]) -> None:
    cli("demo")
    assert scripted["options"] == DemoOptions()
