"""A daemon on a machine whose wall clock is an hour ahead."""

from __future__ import annotations

import json
import sys
import time

_wall, _wall_ns = time.time, time.time_ns
AHEAD_S = 3600
# Before anything is imported that could keep the functions it found.
time.time = lambda: _wall() + AHEAD_S
time.time_ns = lambda: _wall_ns() + AHEAD_S * 10**9

from tests.support.daemon_process import serve  # noqa: E402

if __name__ == "__main__":
    sys.exit(serve(json.loads(sys.argv[1])))
