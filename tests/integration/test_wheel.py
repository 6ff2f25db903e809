"""What is built is what users get: every package of the three folders, importable from anywhere."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BUILD_S = 180


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from a copy of the tracked files."""
    source = tmp_path_factory.mktemp("source")
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True, timeout=30
    )
    subprocess.run(
        ["tar", "--create", "--null", "--files-from=-", f"--file={source}/tree.tar"],
        cwd=ROOT,
        input=listed.stdout,
        check=True,
        timeout=60,
    )
    subprocess.run(["tar", "--extract", "--file=tree.tar"], cwd=source, check=True, timeout=60)
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps"]
    command += ["--no-build-isolation", f"--wheel-dir={out}", str(source)]
    built = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_S, check=False)
    assert built.returncode == 0, built.stderr
    return next(out.glob("*.whl"))


def modules(folder: str, package: str) -> set[str]:
    """Files that the wheel must hold for one top-level folder."""
    listed = subprocess.run(
        ["git", "ls-files", "--", folder], cwd=ROOT, capture_output=True, text=True, check=True
    )
    names = [name for name in listed.stdout.split() if name.endswith(".py")]
    return {package + name.removeprefix(folder) for name in names}


def test_every_module_is_in_the_wheel_under_tierkv(wheel: Path) -> None:
    held = {name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".py")}
    wanted = modules("engine", "tierkv/engine") | modules("storage", "tierkv/storage")
    wanted |= modules("tierkv", "tierkv")
    assert held == wanted
    assert "tierkv/py.typed" in zipfile.ZipFile(wheel).namelist()


def test_the_wheel_imports_from_another_folder(wheel: Path, tmp_path: Path) -> None:
    target = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(target)
    code = (
        f"import sys; sys.path.insert(0, {str(target)!r})\n"
        "import tierkv, tierkv.storage.store, tierkv.engine.cache.radix, tierkv.cli.main\n"
        f"assert tierkv.storage.store.__file__.startswith({str(target)!r})\n"
        "assert 'torch' not in sys.modules, 'torch was imported'\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_import_tierkv_is_light() -> None:
    heavy = ("torch", "numpy", "lmdb", "typer", "aiohttp", "tierkv.engine", "tierkv.storage")
    code = f"import tierkv, sys; print([m for m in {heavy!r} if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "[]"
