"""What the planner learned survives a restart, and a broken file costs nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.model_files import write_model
from tierkv.engine.serve.calibration import calibration_file
from tierkv.engine.serve.engine import Engine
from tierkv.engine.serve.engine_config import EngineConfig
from tierkv.engine.serve.sampler import SamplingParams
from tierkv.storage.store import StoreConfig
from tierkv.storage.types import NamespaceId

CPU = torch.device("cpu")


def config(folder: Path) -> EngineConfig:
    return EngineConfig(
        model=folder / "model",
        num_pages=60,
        device="cpu",
        store=StoreConfig(page_bytes=1, host_bytes=1 << 20),
        calibration_dir=folder / "calibration",
    )


def test_the_next_engine_begins_with_what_the_last_one_learned(tmp_path: Path) -> None:
    write_model(tmp_path / "model")
    with Engine.open(config(tmp_path)) as engine:
        engine.generate([[7, 8, 9] * 10], SamplingParams(max_tokens=12, ignore_eos=True))
        assert engine.core.restore is not None
        learned = engine.core.restore.cost.current
    (kept,) = (tmp_path / "calibration").iterdir()
    again = Engine.open(config(tmp_path))
    assert again.core.restore is not None
    assert again.core.restore.cost.current == learned
    again.close()
    kept.write_text("{broken")
    fresh = Engine.open(config(tmp_path))
    assert fresh.core.restore is not None
    assert fresh.core.restore.cost.current != learned
    fresh.close()


def test_other_models_devices_and_threads_have_files_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = calibration_file(NamespaceId(b"a" * 32), CPU, tmp_path)
    assert one == calibration_file(NamespaceId(b"a" * 32), CPU, tmp_path)
    assert one != calibration_file(NamespaceId(b"b" * 32), CPU, tmp_path)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 99)
    assert one != calibration_file(NamespaceId(b"a" * 32), CPU, tmp_path)
