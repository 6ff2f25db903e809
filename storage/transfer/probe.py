"""Finds out what of CUDA works here, in one line that says what to install or change.

Owns nothing and changes nothing. Called before a device is chosen (cuda_problem) and when a
transfer is opened (missing_kernels).
"""

from __future__ import annotations

import importlib
import re
import warnings

import torch

from tierkv.storage.errors import first_line


def cuda_problem() -> str | None:
    """None when torch can use a CUDA device; else what is wrong and what to do, in one line."""
    if torch.version.cuda is None:
        return (
            f"torch {torch.__version__} is a build without CUDA; install a CUDA build of torch "
            "(for instance the cu130 one) to use a GPU"
        )
    with warnings.catch_warnings():
        # torch warns of what is said here in a line.
        warnings.simplefilter("ignore")
        if torch.cuda.is_available():
            return None
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except (RuntimeError, AssertionError) as error:
        return _advice(first_line(error))
    return _advice("no CUDA device is visible")


def _advice(said: str) -> str:
    built = f"torch was built for CUDA {torch.version.cuda}"
    text = said.lower()
    if "too old" in text or "insufficient" in text:
        found = re.search(r"found version (\d+)", text)
        version = int(found[1]) if found else 0
        can = f" (it knows CUDA {version // 1000}.{version % 1000 // 10})" if found else ""
        return (
            f"the NVIDIA driver is too old{can}; {built}: install a newer driver, or a torch built "
            "for an older CUDA"
        )
    if "no nvidia driver" in text:
        return f"no NVIDIA driver was found; {built}: install the driver, or use device cpu"
    return (
        f"no usable CUDA device ({said}); {built}: check nvidia-smi and CUDA_VISIBLE_DEVICES, "
        "or use device cpu"
    )


def missing_kernels() -> str | None:
    """None when cupy can compile and launch kernels here; else why not, in one line."""
    extra = "cuda13" if (torch.version.cuda or "13").startswith("13") else "cuda12"
    try:
        cupy = importlib.import_module("cupy")
    except ImportError as error:
        return f"cupy cannot be imported ({first_line(error)}); pip install 'tierkv[{extra}]'"
    try:
        usable = bool(cupy.cuda.is_available())
    except (RuntimeError, OSError) as error:
        return f"cupy finds no CUDA device ({first_line(error)}); pip install 'tierkv[{extra}]'"
    if not usable:
        return "cupy finds no CUDA device; install the build that fits the driver"
    return None
