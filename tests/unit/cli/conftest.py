"""The command line in this process: run a command, get its exit code and both outputs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.model_files import write_model
from tierkv.cli.main import main

Cli = Callable[..., tuple[int, str, str]]


@pytest.fixture
def cli(capfd: pytest.CaptureFixture[str]) -> Cli:
    """cli("stat", "--json") -> (exit code, standard output, standard error)."""

    def run(*arguments: str | Path) -> tuple[int, str, str]:
        capfd.readouterr()
        code = main([str(argument) for argument in arguments])
        captured = capfd.readouterr()
        return code, captured.out, captured.err

    return run


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random model's folder. Read only: tests that damage it copy it."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    write_model(folder)
    return folder
