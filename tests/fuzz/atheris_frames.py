"""Coverage-guided fuzzing of the frame parser: `make fuzz`, or this file with libFuzzer's options.

Not part of the test run: it needs the package atheris and goes on until it is told to stop
(-max_total_time=SECONDS). Inputs that crash are written to the current directory.
"""

from __future__ import annotations

import sys

from tierkv.protocol.errors import ProtocolError
from tierkv.protocol.frames import FrameReader, request_bounds
from tierkv.protocol.messages import Limits
from tierkv.protocol.requests import parse_request

LIMITS = Limits(frame_bytes=1 << 16)


def one_input(data: bytes) -> None:
    """Any bytes are frames, or refused with a ProtocolError; nothing else may come out."""
    reader = FrameReader(request_bounds(LIMITS))
    try:
        middle = len(data) // 2
        for part in (data[:middle], data[middle:]):
            for frame in reader.feed(part):
                try:
                    parse_request(frame, LIMITS)
                except ProtocolError as error:
                    assert error.request_id == frame.request_id
    except ProtocolError:
        assert reader.pending_bytes == 0


def main() -> int:
    """Fuzz until stopped; 2 when atheris is not installed."""
    try:
        import atheris
    except ModuleNotFoundError:
        print("fuzz: atheris is not installed; pip install atheris", file=sys.stderr)
        return 2
    atheris.instrument_all()
    atheris.Setup(sys.argv, one_input)
    atheris.Fuzz()
    return 0


if __name__ == "__main__":
    sys.exit(main())
