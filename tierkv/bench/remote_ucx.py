"""Reads over the ucx plane beside ucxx used directly: the ucx part of `tierkv bench remote`.

Owns one child process that serves both from the same kind of memory, with the same UCX settings.
Direct use is the quickest simple loop known: post all receives, send one request, wait on UCX's
own event; no checks, no deadlines.

    python -m tierkv.bench.remote_ucx PAGE_BYTES BATCH        is the child
"""

from __future__ import annotations

import sys
import threading
from typing import Any

from tierkv.bench.child import HOST, Child, say_ready
from tierkv.bench.filled import filled
from tierkv.storage.clock import SystemClock
from tierkv.storage.closing import Closing
from tierkv.storage.transport.base import PageOutcome, PageRange, TransportLimits
from tierkv.storage.transport.ucx import UcxPlane, import_quietly, tcp_options

WAIT_S = 30.0
GENERATION = 1
_TAG_REQUEST = 1
_TAG_PAGES = 100
_EVENT_MS = 100


class UcxPair(Closing):
    """Two processes; direct() and plane() each move one batch of pages into this one."""

    def __init__(self, page_bytes: int, batch: int) -> None:
        self._page_bytes = page_bytes
        self._child = Child("tierkv.bench.remote_ucx", str(page_bytes), str(batch))
        address, offer = map(bytes.fromhex, self._child.words)
        memory = filled(page_bytes * batch)
        self._views = [memory[at : at + page_bytes] for at in range(0, len(memory), page_bytes)]
        self._ranges = [PageRange(n * page_bytes, page_bytes) for n in range(batch)]
        self._direct = _Direct()
        self._direct.connect(address)
        self._child.ask(self._direct.address().hex())
        self._plane = UcxPlane(HOST, limits=TransportLimits(), clock=SystemClock())
        self._peer = self._plane.connect(offer, "bench", WAIT_S)

    def close(self) -> None:
        """Close both ways and end the child."""
        self._plane.close()
        self._direct.close()
        self._child.close()

    def direct(self) -> None:
        """Read a batch by ucxx's own calls."""
        self._direct.fetch(self._views)

    def plane(self) -> None:
        """Read a batch through the plane."""
        outcomes = self._peer.read(GENERATION, self._ranges, self._views, WAIT_S).take(WAIT_S)
        assert set(outcomes) == {PageOutcome.OK}, outcomes


class _Direct:
    """One worker of ucxx, without the plane."""

    def __init__(self) -> None:
        self._api: Any = import_quietly("ucxx._lib.libucxx")
        self._array: Any = import_quietly("ucxx._lib.arr").Array
        features = (self._api.Feature.TAG, self._api.Feature.WAKEUP)
        self._context = self._api.UCXContext(tcp_options(HOST), feature_flags=features)
        self._worker = self._api.UCXWorker(self._context)
        self._worker.init_blocking_progress_mode()
        self._endpoint: Any = None

    def address(self) -> bytes:
        return bytes(self._worker.address.tobytes())

    def connect(self, address: bytes) -> None:
        target = self._api.UCXAddress.create_from_buffer(bytearray(address))
        create = self._api.UCXEndpoint.create_from_worker_address
        # With error handling, as the plane: without it a dead peer is never noticed.
        self._endpoint = create(self._worker, target, True)

    def fetch(self, views: list[memoryview]) -> None:
        requests = [
            self._endpoint.tag_recv(self._array(view), self._api.UCXXTag(_TAG_PAGES + at))
            for at, view in enumerate(views)
        ]
        request = self._array(bytearray(8))
        requests.append(self._endpoint.tag_send(request, self._api.UCXXTag(_TAG_REQUEST)))
        self._wait(requests)

    def serve(self, views: list[memoryview]) -> None:
        """Answer fetch() for ever."""
        while True:
            request = self._array(bytearray(8))
            self._wait([self._endpoint.tag_recv(request, self._api.UCXXTag(_TAG_REQUEST))])
            self._wait(
                [
                    self._endpoint.tag_send(self._array(view), self._api.UCXXTag(_TAG_PAGES + at))
                    for at, view in enumerate(views)
                ]
            )

    def _wait(self, requests: list[Any]) -> None:
        while not all(request.completed for request in requests):
            self._worker.progress_worker_event(_EVENT_MS)
        for request in requests:
            request.check_error()

    def close(self) -> None:
        self._endpoint.close_blocking()


def _serve(page_bytes: int, batch: int) -> int:
    memory = filled(page_bytes * batch)
    views = [memory[at : at + page_bytes] for at in range(0, len(memory), page_bytes)]
    direct = _Direct()
    with_plane = UcxPlane(HOST, limits=TransportLimits(), clock=SystemClock())
    with_plane.register(memory, GENERATION)
    say_ready(direct.address().hex(), with_plane.offer().hex())
    direct.connect(bytes.fromhex(sys.stdin.readline()))
    threading.Thread(target=_serve_direct, args=(direct, views), daemon=True).start()
    sys.stdout.write("connected\n")
    sys.stdout.flush()
    sys.stdin.read()
    with_plane.close()
    return 0


def _serve_direct(direct: _Direct, views: list[memoryview]) -> None:
    # The other process ends first, and with it the connection.
    try:
        direct.serve(views)
    except RuntimeError as error:
        sys.stderr.write(f"bench remote: ucxx ended: {error}\n")


if __name__ == "__main__":
    sys.exit(_serve(int(sys.argv[1]), int(sys.argv[2])))
