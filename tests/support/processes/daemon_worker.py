"""A worker of the fault tests: holds what it is told to hold, until it is killed.

    python -m tests.support.processes.daemon_worker SOCKET PAGE_BYTES

Reads commands, answers each with one line:
"put FIRST COUNT"      commit pages, answer how many are COMMITTED
"get FIRST COUNT"      fetch and compare pages, answer how many there were; "wrong N" otherwise
"lease FIRST COUNT"    hold a lease, answer its pages
"reserve COUNT"        hold a reservation, answer its pages
"disconnect"           close the connection, keep the mapping
"scribble"             write into every reserved slot
"""

from __future__ import annotations

import socket
import sys
from pathlib import Path

from tests.support.pages import page_content, page_key, put_store
from tierkv.client.client import Client
from tierkv.client.settings import ClientSettings
from tierkv.storage.types import CommitOutcome

WAIT_S = 30.0


def main(arguments: list[str]) -> int:
    """Obey until the input ends."""
    client = Client(
        Path(arguments[0]), int(arguments[1]), settings=ClientSettings(hold_s=600.0, call_s=WAIT_S)
    )
    held = []
    print("ready", flush=True)
    for line in sys.stdin:
        verb, *numbers = line.split()
        values = [int(number) for number in numbers]
        answer = "ok"
        if verb == "reserve":
            reservation = client.reserve(values[0])
            held.append(reservation)
            answer = str(len(reservation.views))
        elif verb == "scribble":
            for reservation in held:
                for view in reservation.views:
                    view[:] = b"\xff" * len(view)
        elif verb == "disconnect":
            # Only the socket goes: a client that closes properly gives everything back first.
            link = client._keeper.link
            assert link is not None, "not connected"
            link._out.shutdown(socket.SHUT_RDWR)
        else:
            keys = [page_key(number) for number in range(values[0], values[0] + values[1])]
            if verb == "put":
                answer = str(put_store(client, keys).count(CommitOutcome.COMMITTED))
            else:
                lease = client.fetch(keys, WAIT_S).take(WAIT_S)
                answer = str(len(lease.keys))
                for key, view in zip(lease.keys, lease.views, strict=True):
                    if view != page_content(key, client.page_bytes):
                        answer = f"wrong {key.hex()}"
                if verb == "lease":
                    held.append(lease)  # type: ignore[arg-type]
                else:
                    lease.release()
        print(answer, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
