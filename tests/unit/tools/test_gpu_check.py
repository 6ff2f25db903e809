"""The GPU check's own code, run on tiny shapes without a GPU."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

TOOL = Path(__file__).resolve().parents[3] / "tools" / "gpu_check.py"


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu_check", TOOL)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look their module up by name.
    import sys

    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_every_part_runs_and_nothing_fails(tool: ModuleType, tmp_path: Path) -> None:
    output = tmp_path / "figures.json"
    assert tool.main(["--cpu", "--output", str(output)]) == 0
    found = json.loads(output.read_text())
    assert found["failures"] == []
    assert set(found["parts"]) == {"tests", "bandwidth", "decode", "ttft"}
    assert found["parts"]["bandwidth"]["best_out_share"] > 0
    assert all(each["identical"] == 1 for each in found["parts"]["ttft"].values())
    assert found["parts"]["decode"]["demoted_gbs"] > 0


def test_one_part_can_be_chosen(tool: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert tool.main(["--cpu", "--only", "bandwidth"]) == 0
    shown = capsys.readouterr()
    assert set(json.loads(shown.out)["parts"]) == {"bandwidth"}
    assert "best_in_share" in shown.err


def test_without_a_device_it_says_what_is_missing(
    tool: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tool, "cuda_problem", lambda: "no NVIDIA driver was found; install it")
    assert tool.main([]) == 2
    assert capsys.readouterr().err == "gpu_check: no NVIDIA driver was found; install it\n"


def test_the_head_is_as_long_as_both_ends_take_equally(tool: ModuleType) -> None:
    assert tool.choose_head(recompute_s=1.0, load_s=1.0, context=1024) == 512
    assert tool.choose_head(recompute_s=9.0, load_s=1.0, context=1600) == 160
    assert tool.choose_head(recompute_s=1.0, load_s=0.0, context=1024) == 0
