"""Remembers between starts what the planner learned of one machine and one model.

Owns one small JSON file per pair. It is a hint: missing, broken or from another version, it is
learned again, and the first requests correct it when the machine has changed. Called when an
engine opens and closes.
"""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import tempfile
from pathlib import Path

import platformdirs
import torch

from tierkv.engine.serve.planner import LoadRate, PrefillCost, dump_calibration, load_calibration
from tierkv.engine.serve.restore import Restore
from tierkv.storage.types import NamespaceId, TierName

log = logging.getLogger(__name__)

FILE_BYTES_MAX = 1 << 16
SAMPLES_MIN = 8
"""Passes after which a fit is worth keeping."""


def default_folder() -> Path:
    """Below the user's cache folder. Not created here."""
    return Path(platformdirs.user_cache_dir("tierkv")) / "calibration"


def calibration_file(model: NamespaceId, device: torch.device, folder: Path) -> Path:
    """Where the calibration of this model on this machine lies.

    The machine is its processor or GPU, its threads and the torch build.
    """
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else _processor()
    parts = (name, device.type, str(torch.get_num_threads()), torch.__version__, model.hex())
    digest = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]
    return folder / f"{digest}.json"


def recall(path: Path, restore: Restore) -> bool:
    """Start `restore` from what the file says; False when it says nothing."""
    try:
        with path.open("rb") as file:
            text = file.read(FILE_BYTES_MAX).decode()
    except (OSError, UnicodeDecodeError):
        return False
    known = load_calibration(text)
    if known is None:
        log.warning("calibration ignored file=%s: not one of this version", path)
        return False
    cost, rates = known
    restore.cost = PrefillCost(cost)
    for tier in TierName:
        if rates.get(tier.value, 0.0) > 0:
            restore.rates[tier] = LoadRate(rates[tier.value])
    return True


def remember(path: Path, restore: Restore) -> None:
    """Write what was learned, whole or not at all. A folder that cannot be written costs the
    next start its head start, so it is only logged."""
    if restore.cost.samples < SAMPLES_MIN:
        return
    rates = {
        tier.value: rate.bytes_per_s
        for tier, rate in restore.rates.items()
        if rate.bytes_per_s is not None
    }
    text = dump_calibration(restore.cost.current, rates)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".calibration-")
        with os.fdopen(handle, "w") as file:
            file.write(text)
        Path(temporary).replace(path)
    except OSError as error:
        log.warning("calibration not kept file=%s error=%s", path, error)


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
