"""This node's epoch: which life of the member it is, made durable before anybody hears of it.

Owns one small control file (JSON: format, version, epoch). Knows neither peers nor messages.
Invariants: a value that was returned is on disk already, and no later life returns it again,
whenever the process dies; the value never falls. One process uses a file at a time: its folder is
the daemon's, which is locked. Called by storage.pool.pool.

A file that is missing or damaged may have been lost with any number in it. Counting then starts
from the wall clock in milliseconds: lives are counted in ones, so a number lost is almost surely
below; where it is not (a clock that is far behind), peers say so and raise_above() answers.
"""

from __future__ import annotations

import json
import logging
import threading
from pathlib import Path

from tierkv.storage.clock import Clock, SystemClock
from tierkv.storage.errors import ConfigError, FormatVersionError
from tierkv.storage.tiers.nvme_layout import write_json

EPOCH_MAX = 2**63 - 1
_FORMAT = "tierkv-pool-epoch"
_VERSION = 1
_FILE_BYTES_MAX = 512

log = logging.getLogger(__name__)


class Epoch:
    """Thread-safe. Takes the next epoch when it is made."""

    def __init__(self, path: Path | None, clock: Clock | None = None) -> None:
        """Read the last epoch at `path`, take the one after it and make it durable.

        None: nothing is kept; the wall clock makes the number grow from life to life. ConfigError
        when the file cannot be read or written, FormatVersionError when another version wrote it.
        """
        self._path = path
        self._lock = threading.Lock()
        start = max(1, int((clock or SystemClock()).wall() * 1000))
        last = _read(path) if path is not None else None
        self._value = self._take(start if last is None else last + 1)

    @property
    def value(self) -> int:
        """This life's number, 1 to EPOCH_MAX."""
        with self._lock:
            return self._value

    def raise_above(self, other: int) -> int:
        """Begin a new life above `other`, a number seen under this node's name; returns it.

        Keeps the present value when that is above already. Durable on return: two syncs.
        ConfigError when the file cannot be written or no number is left; the value stays then.
        """
        with self._lock:
            if other >= self._value:
                self._value = self._take(other + 1)
            return self._value

    def check(self) -> None:
        """Assert that what is on disk is this life's number. One read."""
        with self._lock:
            assert 1 <= self._value <= EPOCH_MAX, self._value
            if self._path is not None:
                assert _read(self._path) == self._value, f"{self._path}: not {self._value}"

    def _take(self, value: int) -> int:
        if value > EPOCH_MAX:
            raise ConfigError(
                f"pool epoch {self._path or '(not kept)'}: {value} is above the largest epoch "
                f"{EPOCH_MAX}; give this member another name"
            )
        if self._path is not None:
            write_json(self._path, {"format": _FORMAT, "version": _VERSION, "epoch": value})
        return value


def _read(path: Path) -> int | None:
    """The last epoch; None when there is none that can be believed."""
    try:
        with path.open("rb") as file:
            data = file.read(_FILE_BYTES_MAX)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigError(
            f"read pool epoch {path}: {error.strerror}; make the file readable"
        ) from error
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        # Brackets all the way down recurse: a damaged file must not end the daemon.
        found = None
    if isinstance(found, dict) and found.get("format") == _FORMAT:
        if (version := found.get("version")) != _VERSION:
            raise FormatVersionError(
                f"read pool epoch {path}: format version {version!r}, this TierKV reads "
                f"{_VERSION}; use the TierKV that wrote it"
            )
        value = found.get("epoch")
        if type(value) is int and 1 <= value <= EPOCH_MAX:
            return value
    log.warning(
        "pool epoch file=%s damaged: expected an epoch of 1 to %d; going on from the wall clock",
        path,
        EPOCH_MAX,
    )
    return None
