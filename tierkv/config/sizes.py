"""Sizes as users write them: "20GiB".

Parsing and printing only. Knows nothing of who uses a value, reads no file and no environment.
Called by tierkv/cli and tierkv/config/kinds.py.
"""

from __future__ import annotations

import re
from decimal import Decimal

from tierkv.storage.errors import ConfigError

SIZE_BYTES_MAX = 2**63 - 1

_FACTORS = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}
_SIZE = re.compile(r"([0-9]{1,20}(?:\.[0-9]{1,9})?) ?([A-Za-z]{0,3})")


def parse_size(text: str, name: str = "size") -> int:
    """Read a byte count: "20GiB" (powers of 1024), "2GB" (powers of 1000) or plain "4096".

    Case does not matter; a fraction of a byte is rounded down. `name` is the option that the
    error names. Raises ConfigError when the text is no size or above SIZE_BYTES_MAX.
    """
    match = _SIZE.fullmatch(text.strip())
    factor = _FACTORS.get(match[2].lower()) if match else None
    if match is None or factor is None:
        raise ConfigError(
            f"{name}: expected a size such as 20GiB, 512MiB, 2GB or plain bytes, got {text!r}"
        )
    size = int(Decimal(match[1]) * factor)
    if size > SIZE_BYTES_MAX:
        raise ConfigError(f"{name}: expected at most {SIZE_BYTES_MAX} bytes, got {text!r}")
    return size


def format_size(size_bytes: int) -> str:
    """Write a byte count for people, in powers of 1024: 1536 -> "1.5 KiB"."""
    value = float(size_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{size_bytes} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"
