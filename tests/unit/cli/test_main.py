"""Exit codes, one-line errors, and what importing the command line loads."""

from __future__ import annotations

import json
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from tests.unit.cli.conftest import Cli
from tierkv import __version__
from tierkv.bench.report import BenchReport
from tierkv.cli import main as main_module
from tierkv.cli.console import progress, spinner
from tierkv.storage import errors


def test_importing_the_command_line_is_light() -> None:
    code = (
        "import sys, tierkv.cli.main;"
        "heavy = {'torch', 'aiohttp', 'lmdb', 'gguf', 'tokenizers', 'tierkv.engine.serve.engine'};"
        "sys.exit(' '.join(heavy & set(sys.modules)) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


def test_version(cli: Cli) -> None:
    assert cli("version") == (0, f"tierkv {__version__}\n", "")
    assert cli("version", "--json") == (0, json.dumps({"version": __version__}) + "\n", "")


@pytest.mark.parametrize("arguments", [(), ("--help",), ("engine",), ("engine", "serve", "--help")])
def test_help_is_no_error(cli: Cli, arguments: tuple[str, ...]) -> None:
    code, out, err = cli(*arguments)
    assert (code, err) == (0, "")
    assert "Usage:" in out


@pytest.mark.parametrize(
    "arguments",
    [
        ("nothing",),
        ("generate",),
        ("generate", "--prompt", "a", "--max-tokens", "0"),
        ("generate", "--prompt", "a", "--max-tokens", "many"),
        ("generate", "--prompt", "a", "--device", "tpu"),
        ("generate", "--prompt", "a", "--write-policy", "sometimes"),
        ("engine", "serve", "--port", "65536"),
        ("bench", "nothing"),
        ("bench",),
        ("stat", "--no-such-option"),
    ],
)
def test_wrong_usage_is_one_line_and_exit_2(cli: Cli, arguments: tuple[str, ...]) -> None:
    code, out, err = cli(*arguments)
    assert (code, out) == (2, "")
    assert err.startswith("tierkv: error: ") and err.count("\n") == 1


def _failing_bench(error: BaseException) -> SimpleNamespace:
    def run(quick: bool) -> BenchReport:
        raise error

    return SimpleNamespace(run=run)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.ConfigError("wrong"), 2),
        (errors.CapacityError("wrong"), 2),
        (errors.DirectoryInUseError("wrong"), 2),
        (errors.FormatVersionError("wrong"), 2),
        (errors.ModelError("wrong\nin two lines"), 2),
        (errors.RequestError("wrong"), 1),
        (errors.TierIOError("wrong"), 1),
        (OSError(28, "No space left on device", "wrong"), 1),
        (ModuleNotFoundError("No module named 'torch'", name="torch"), 2),
    ],
)
def test_expected_errors_are_one_line_with_a_stable_code(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int
) -> None:
    monkeypatch.setitem(sys.modules, "tierkv.bench.radix", _failing_bench(error))
    got, out, err = cli("bench", "radix")
    assert (got, out) == (code, "")
    assert err.startswith("tierkv: error: ") and err.count("\n") == 1
    assert "wrong" in err or "pip install 'tierkv[engine]'" in err


def test_interrupt_is_quiet(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tierkv.bench.radix", _failing_bench(KeyboardInterrupt()))
    assert cli("bench", "radix") == (130, "", "")


def test_a_bug_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tierkv.bench.radix", _failing_bench(AssertionError("bug")))
    with pytest.raises(AssertionError, match="bug"):
        main_module.main(["bench", "radix"])


def test_a_missing_module_of_our_own_is_a_bug(monkeypatch: pytest.MonkeyPatch) -> None:
    error = ModuleNotFoundError("gone", name="tierkv.gone")
    monkeypatch.setitem(sys.modules, "tierkv.bench.radix", _failing_bench(error))
    with pytest.raises(ModuleNotFoundError):
        main_module.main(["bench", "radix"])


def test_reader_that_goes_away_is_no_traceback() -> None:
    done = subprocess.run(
        f"{sys.executable} -m tierkv.cli.main engine serve --help | head -n 1",
        shell=True,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert "Traceback" not in done.stderr and "Exception" not in done.stderr


def test_bench_prints_its_report(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}

    def run(quick: bool, model: Any = None, directory: Any = None) -> BenchReport:
        seen.update(quick=quick, model=model, directory=directory)
        return BenchReport(
            "radix", config={"tokens": 4096}, results={"match_us": 12.5}, ratios={"slow": 99.0}
        )

    monkeypatch.setitem(sys.modules, "tierkv.bench.radix", SimpleNamespace(run=run))
    code, out, err = cli("bench", "radix", "--json", "--quick", "--dir", "/d", "--model", "/m")
    report = json.loads(out)
    assert (code, err, out.count("\n")) == (0, "", 1)
    assert (report["bench"], report["results"], report["limits"]) == (
        "radix",
        {"match_us": 12.5},
        {},
    )
    assert (seen["quick"], str(seen["model"]), str(seen["directory"])) == (True, "/m", "/d")
    code, out, err = cli("bench", "radix")
    assert (code, err) == (0, "")
    assert "match_us" in out and "12.5" in out and "99" in out


def test_bench_refuses_an_option_it_has_no_use_for(cli: Cli) -> None:
    code, out, err = cli("bench", "radix", "--model", "m")
    assert (code, out) == (2, "")
    assert "takes no --model" in err


def test_progress_is_silent_without_a_terminal(capfd: pytest.CaptureFixture[str]) -> None:
    with progress("converting") as report, spinner("demo") as tell:
        report(1, 2)
        tell("stage")
    captured = capfd.readouterr()
    assert (captured.out, captured.err) == ("", "")
