"""Opens the copies between a device's KV pool and a store, ready to serve.

Owns nothing once it has returned. On a GPU the store's host memory is registered, so that pages
move without a hop, and the way they move is the one that was measured on this machine; on the CPU
there is nothing to register and one way. Knows the store by its contract only. Called by
opening.py, which closes the transfer before the store: registered memory must stay mapped.
"""

from __future__ import annotations

import json
import logging
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

from tierkv.storage.base import PageStore
from tierkv.storage.clock import Clock
from tierkv.storage.device import address_of
from tierkv.storage.errors import ConfigError, TierIOError
from tierkv.storage.transfer.calibration import Calibration, apply, calibrate
from tierkv.storage.transfer.layout import KvTensors
from tierkv.storage.transfer.opening import open_transfer
from tierkv.storage.transfer.streams import StreamTransfer

log = logging.getLogger(__name__)

FILE_BYTES_MAX = 1 << 16


@dataclass(frozen=True, slots=True)
class HostMemory:
    """A store's arena, as its reservations show it."""

    memory: memoryview
    first_bytes: int
    """Up to the first payload."""
    unit_bytes: int
    """From one payload to the next; the whole length when it is not known."""


def open_copies(
    kv: KvTensors, store: PageStore, on_gpu: bool, calibration: Path | None, clock: Clock
) -> StreamTransfer:
    """A transfer for these tensors; its caller closes it before the store.

    `calibration`: file of what was measured, read and written here; None measures each time.
    Raises ConfigError and CapacityError as open_transfer() does, with nothing left open.
    """
    transfer = open_transfer(kv)
    if on_gpu:
        try:
            register_store(transfer, store)
            choose_method(transfer, calibration, clock)
        except BaseException:
            transfer.close()
            raise
    return transfer


def register_store(transfer: StreamTransfer, store: PageStore) -> int:
    """Let the device reach the store's host memory; return how many bytes of it.

    0 when the store hands out memory that is not one arena: its pages take one copy more.
    """
    found = host_memory(store)
    if found is None:
        log.info("host memory registered=no reason=the store has no arena in this process")
        return 0
    with found.memory:
        return transfer.register(
            found.memory, unit_bytes=found.unit_bytes, first_bytes=found.first_bytes
        )


def host_memory(store: PageStore) -> HostMemory | None:
    """The mapping in which the store's reserved pages lie; None when each is memory of its own.

    Two slots are reserved for a moment: their views lead to the mapping, and the distance between
    them says how it is cut. The result's memory is for the caller to release.
    """
    with store.reserve(2) as reservation:
        views, slots = list(reservation.views), list(reservation.slots)
        if not views:
            return None
        memory = memoryview(views[0].obj).cast("B")
        offsets = [address_of(view) - address_of(memory) for view in views]
    if memory.nbytes <= store.page_bytes:
        memory.release()
        return None
    if len(slots) < 2:
        return HostMemory(memory, 0, memory.nbytes)
    unit = (offsets[1] - offsets[0]) // (slots[1] - slots[0])
    return HostMemory(memory, offsets[0] - slots[0] * unit, unit)


def choose_method(transfer: StreamTransfer, path: Path | None, clock: Clock) -> Calibration | None:
    """Use the stored choice of how pages move, or measure and store one. None: not measured."""
    known = read_calibration(path) if path is not None else None
    if known is not None and apply(transfer, known):
        return known
    try:
        measured = calibrate(transfer, clock)
    except TierIOError as error:
        # The device answers too slowly to be measured; what serves may still be fast enough.
        log.warning("copies not calibrated: %s", error)
        return None
    log.info("copies calibrated out=%s in=%s", measured.out_method, measured.in_method)
    if path is not None:
        write_calibration(path, measured)
    return measured


def read_calibration(path: Path) -> Calibration | None:
    """None when there is none or it is of no use: it is a hint."""
    try:
        with path.open("rb") as file:
            return Calibration.from_dict(json.loads(file.read(FILE_BYTES_MAX)))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, ConfigError) as error:
        log.warning("copies: calibration ignored file=%s: %s", path, error)
        return None


def write_calibration(path: Path, calibration: Calibration) -> None:
    """Whole or not at all; a folder that cannot be written costs the next start a measurement."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".copies-")
        with os.fdopen(handle, "w") as file:
            json.dump(calibration.to_dict(), file)
        Path(temporary).replace(path)
    except OSError as error:
        log.warning("copies: calibration not kept file=%s error=%s", path, error)
