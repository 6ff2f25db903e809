"""Builds the emulated runtime and driver, then becomes Python with the arguments it was given."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
SITE = Path(sys.prefix) / f"lib/python{sys.version_info[0]}.{sys.version_info[1]}/site-packages"
BUILD_TIMEOUT_S = 120


def main() -> None:
    folder = Path(tempfile.mkdtemp(prefix="tierkv-cuda-"))
    libraries = [build_runtime(folder), build_driver(folder)]
    os.environ["LD_PRELOAD"] = " ".join(map(str, libraries))
    os.environ["TIERKV_EMULATED_CUDA"] = str(libraries[0])
    os.execv(sys.executable, [sys.executable, *sys.argv[1:]])


def build_runtime(folder: Path) -> Path:
    """libcudart.so.13: what runtime.cpp does, and a refusal for the rest of what torch asks."""
    part, library = folder / "runtime.o", folder / "libcudart.so.13"
    headers = SITE / "nvidia/cu13/include"
    run("g++", "-std=c++17", "-O1", "-fPIC", f"-I{headers}", "-c", HERE / "runtime.cpp", "-o", part)
    done = set(symbols("--defined-only", part))
    asked = {
        name.partition("@")[0]
        for path in sorted((SITE / "torch/lib").glob("lib*.so"))
        for name in symbols("-D", "--undefined-only", path)
        if "@libcudart" in name
    }
    refusals = folder / "refusals.c"
    refusals.write_text("".join(f"int {n}(void) {{ return 801; }}\n" for n in sorted(asked - done)))
    run("gcc", "-w", "-fPIC", "-c", refusals, "-o", folder / "refusals.o")
    versions = folder / "versions"
    versions.write_text("libcudart.so.13 { global: *; };\n")
    options = [f"-Wl,-soname,{library.name}", f"-Wl,--version-script={versions}", "-lpthread"]
    run("g++", "-shared", "-o", library, part, folder / "refusals.o", *options)
    return library


def build_driver(folder: Path) -> Path:
    library = folder / "libcuda.so.1"
    source = HERE / "driver.cpp"
    run("g++", "-shared", "-fPIC", f"-Wl,-soname,{library.name}", source, "-o", library)
    return library


def symbols(*arguments: str | Path) -> list[str]:
    """Names that nm lists, with their versions."""
    return [line.split()[-1] for line in run("nm", *arguments).splitlines() if line.strip()]


def run(*command: str | Path) -> str:
    done = subprocess.run(
        [str(part) for part in command],
        check=True,
        timeout=BUILD_TIMEOUT_S,
        stdout=subprocess.PIPE,
        text=True,
    )
    return done.stdout


if __name__ == "__main__":
    main()
