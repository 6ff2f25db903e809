"""Measures which way of moving pages is faster on this machine, for each direction.

Owns nothing: the caller keeps the result per machine and model and applies it at the next start.
Run before the engine serves: pages of the pool are read and written back with their own bytes, so
nobody may write them meanwhile. Works for every transfer; where there is one way, it gives that
way's rates, which the restore planner starts from.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from tierkv.storage.clock import Clock
from tierkv.storage.errors import CapacityError, ConfigError, TierIOError
from tierkv.storage.transfer.device_ops import Wait
from tierkv.storage.transfer.streams import StreamTransfer

ROUNDS = 5
ROUND_S_MAX = 10.0
POLL_S = 20e-6


@dataclass(frozen=True, slots=True)
class Calibration:
    """Rates by method, in bytes per second of payload, and the methods chosen by them."""

    out_method: str
    in_method: str
    out_bytes_per_s: dict[str, float]
    in_bytes_per_s: dict[str, float]

    def to_dict(self) -> dict[str, Any]:
        """For a JSON file."""
        return {
            "out_method": self.out_method,
            "in_method": self.in_method,
            "out_bytes_per_s": self.out_bytes_per_s,
            "in_bytes_per_s": self.in_bytes_per_s,
        }

    @classmethod
    def from_dict(cls, found: object) -> Calibration:
        """Inverse of to_dict(). ConfigError when it is anything else."""
        if not isinstance(found, dict) or not all(
            isinstance(found.get(f"{way}_method"), str) and _rates(found.get(f"{way}_bytes_per_s"))
            for way in ("out", "in")
        ):
            raise ConfigError(
                "read transfer calibration: expected methods and rates, got something else; "
                "delete the file and it is measured again"
            )
        return cls(
            found["out_method"],
            found["in_method"],
            {name: float(rate) for name, rate in found["out_bytes_per_s"].items()},
            {name: float(rate) for name, rate in found["in_bytes_per_s"].items()},
        )


def calibrate(transfer: StreamTransfer, clock: Clock, rounds: int = ROUNDS) -> Calibration:
    """Measure every method both ways, best of `rounds` each, and switch to the faster ones.

    No copy may be under way. Moves as many pages as the bounce buffer holds. A method that the
    device has no memory for is left out. TierIOError when the device does not end a copy in time,
    CapacityError when it has memory for none.
    """
    ops = transfer.ops
    assert all(lane.idle for lane in transfer.lanes), "calibrate before serving"
    views = [view for half in transfer.bounce_out for view in half.views]
    if not views:
        views = [memoryview(bytearray(ops.page_bytes)) for _ in range(4)]
    pages = list(range(min(len(views), ops.pages)))
    views = views[: len(pages)]
    planes = range(ops.layers * ops.planes_per_layer)
    out_rates: dict[str, float] = {}
    in_rates: dict[str, float] = {}

    def rate(stream: object, move: Callable[[], None]) -> float:
        best = min(_timed(transfer, stream, move, clock) for _ in range(rounds))
        return len(pages) * ops.page_bytes / max(best, 1e-9)

    lacking: CapacityError | None = None
    for method in ops.methods:
        ops.choose(method, method)
        # Out first, so that what goes back in is what the pages hold.
        out, into = transfer.out_stream, transfer.in_stream
        try:
            out_rate = rate(out, partial(ops.move_out, out, pages, views, planes))
            in_rate = rate(into, partial(ops.move_in, into, views, pages, planes))
        except CapacityError as error:
            lacking = error
            continue
        out_rates[method], in_rates[method] = out_rate, in_rate
    if lacking is not None and not out_rates:
        raise lacking
    result = Calibration(
        max(out_rates, key=out_rates.__getitem__),
        max(in_rates, key=in_rates.__getitem__),
        out_rates,
        in_rates,
    )
    ops.choose(result.out_method, result.in_method)
    return result


def apply(transfer: StreamTransfer, calibration: Calibration) -> bool:
    """Use a stored calibration. False when it names a method this machine does not have now
    (cupy was removed, say): measure again."""
    ops = transfer.ops
    if not {calibration.out_method, calibration.in_method} <= set(ops.methods):
        return False
    ops.choose(calibration.out_method, calibration.in_method)
    return True


def _timed(
    transfer: StreamTransfer, stream: object, move: Callable[[], None], clock: Clock
) -> float:
    ops = transfer.ops
    ops.stream_wait(stream, ops.record(ops.compute_stream()), Wait.LAST_READER)
    start = clock.monotonic()
    move()
    event = ops.record(stream)
    while not ops.event_done(event, Wait.GATHERED):
        if clock.monotonic() - start > ROUND_S_MAX:
            raise TierIOError(
                f"calibrate copies: one of {ops.page_bytes} bytes a page did not end within "
                f"{ROUND_S_MAX:.0f} s; check the device (nvidia-smi)"
            )
        time.sleep(POLL_S)
    return clock.monotonic() - start


def _rates(found: object) -> bool:
    return isinstance(found, dict) and all(
        isinstance(name, str) and isinstance(rate, int | float) and rate >= 0
        for name, rate in found.items()
    )
