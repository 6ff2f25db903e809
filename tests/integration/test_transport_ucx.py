"""The ucx plane between two processes: right bytes, and a peer that dies or stops at any moment."""

from __future__ import annotations

import contextlib
import mmap
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

import pytest

from tierkv.storage.clock import SystemClock
from tierkv.storage.errors import ConfigError, TierIOError
from tierkv.storage.transport.base import PageOutcome, PageRange, PeerRead, TransportLimits
from tierkv.storage.transport.ucx import UcxPlane, load_library
from tierkv.storage.transport.ucx_peer import UcxPeer

try:
    load_library()
except ConfigError as reason:
    pytest.skip(str(reason), allow_module_level=True)

HOST = "127.0.0.1"
LIMIT_S = 60.0
SHORT_S = 0.5
SEED = 20261129
PAGE_BYTES = 1 << 20
PAGES = 32
GENERATION = 3
UNTOUCHED = 0xA5
KILLS = 6
LIMITS = TransportLimits(handshake_s=10.0)


def payload(page: int) -> bytes:
    """What every process knows to be in `page`."""
    return random.Random(page).randbytes(PAGE_BYTES)


def serve(pipe: Connection) -> None:
    """The other process: a memory and a plane, until the pipe closes or a signal comes."""
    memory = mmap.mmap(-1, PAGES * PAGE_BYTES)
    for page in range(PAGES):
        memory[page * PAGE_BYTES : (page + 1) * PAGE_BYTES] = payload(page)
    plane = UcxPlane(HOST, limits=LIMITS, clock=SystemClock())
    plane.register(memoryview(memory), GENERATION)
    pipe.send_bytes(plane.offer())
    with contextlib.suppress(EOFError):
        pipe.recv_bytes()
    plane.close()


@contextlib.contextmanager
def server_process() -> Iterator[tuple[BaseProcess, bytes]]:
    """A process that serves, and its offer."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=serve, args=(theirs,))
    process.start()
    theirs.close()
    try:
        assert ours.poll(LIMIT_S), "the server did not start"
        yield process, ours.recv_bytes()
    finally:
        ours.close()
        if process.pid is not None and process.is_alive():
            os.kill(process.pid, signal.SIGCONT)
        process.join(LIMIT_S)
        # A crash while UCX is taken down at the end would show here.
        assert process.exitcode in (0, -signal.SIGKILL), process.exitcode
        process.close()


@pytest.fixture
def plane() -> Iterator[UcxPlane]:
    made = UcxPlane(HOST, limits=LIMITS, clock=SystemClock())
    yield made
    made.check()
    made.close()


def begin(
    peer: UcxPeer, pages: list[int], timeout_s: float = LIMIT_S
) -> tuple[PeerRead, list[bytearray]]:
    buffers = [bytearray([UNTOUCHED]) * PAGE_BYTES for _ in pages]
    ranges = [PageRange(page * PAGE_BYTES, PAGE_BYTES) for page in pages]
    read = peer.read(GENERATION, ranges, [memoryview(buffer) for buffer in buffers], timeout_s)
    return read, buffers


def no_page_is_wrong(
    read: PeerRead, pages: list[int], buffers: list[bytearray]
) -> set[PageOutcome]:
    outcomes = read.take(LIMIT_S)
    for page, buffer, outcome in zip(pages, buffers, outcomes, strict=True):
        assert outcome is not PageOutcome.OK or buffer == payload(page), f"page {page} is wrong"
    return set(outcomes)


def test_pages_of_another_process_arrive_bit_for_bit(plane: UcxPlane) -> None:
    print(f"seed {SEED}")
    rng = random.Random(SEED)
    with server_process() as (_, offer):
        peer = plane.connect(offer, "other", LIMIT_S)
        for _ in range(20):
            pages = [rng.randrange(PAGES) for _ in range(rng.randrange(1, 17))]
            read, buffers = begin(peer, pages)
            assert no_page_is_wrong(read, pages, buffers) == {PageOutcome.OK}
            peer.check()
        assert peer.stats().pages_failed == 0


@pytest.mark.parametrize("kill", range(KILLS))
def test_h4_a_server_killed_in_the_middle_of_reads(plane: UcxPlane, kill: int) -> None:
    print(f"seed {SEED + kill}")
    rng = random.Random(SEED + kill)
    with server_process() as (process, offer):
        peer = plane.connect(offer, "other", LIMIT_S)
        warm, buffers = begin(peer, [0])
        assert no_page_is_wrong(warm, [0], buffers) == {PageOutcome.OK}
        assert process.pid is not None
        under_way = []
        for _ in range(12):
            pages = [rng.randrange(PAGES) for _ in range(16)]
            under_way.append((pages, *begin(peer, pages)))
        after = rng.randrange(6)
        under_way[after][1].take(LIMIT_S)
        os.kill(process.pid, signal.SIGKILL)
        seen = set()
        for pages, read, buffers in under_way:
            seen |= no_page_is_wrong(read, pages, buffers)
            peer.check()
        read, buffers = begin(peer, [1])
        assert no_page_is_wrong(read, [1], buffers) == {PageOutcome.FAILED}
        assert PageOutcome.OK in seen and peer.broken is not None
        with pytest.raises(TierIOError, match="connect peer"):
            plane.connect(offer, "dead", LIMIT_S)
    # The node itself serves and connects on.
    with server_process() as (_, offer):
        read, buffers = begin(plane.connect(offer, "next", LIMIT_S), [5])
        assert no_page_is_wrong(read, [5], buffers) == {PageOutcome.OK}


def test_h1_a_server_that_stops_does_not_write_after_the_deadline(plane: UcxPlane) -> None:
    with server_process() as (process, offer):
        peer = plane.connect(offer, "other", LIMIT_S)
        assert process.pid is not None
        warm, buffers = begin(peer, [0])
        assert no_page_is_wrong(warm, [0], buffers) == {PageOutcome.OK}
        pages = list(range(PAGES))
        first, first_buffers = begin(peer, pages)
        cut, cut_buffers = begin(peer, pages * 8, SHORT_S)
        first.take(LIMIT_S)
        os.kill(process.pid, signal.SIGSTOP)
        seen = no_page_is_wrong(cut, pages * 8, cut_buffers)
        assert seen <= {PageOutcome.OK, PageOutcome.FAILED}
        no_page_is_wrong(first, pages, first_buffers)
        for buffer in cut_buffers:
            buffer[:] = bytes([UNTOUCHED]) * PAGE_BYTES
        os.kill(process.pid, signal.SIGCONT)
        # By the time that it has answered another read, it has said all it had to say before.
        again, buffers = begin(peer, pages)
        no_page_is_wrong(again, pages, buffers)
        if peer.broken is not None:
            peer = plane.connect(offer, "again", LIMIT_S)
            again, buffers = begin(peer, pages)
        assert no_page_is_wrong(again, pages, buffers) == {PageOutcome.OK}
        assert all(set(buffer) == {UNTOUCHED} for buffer in cut_buffers)


def test_a_reader_killed_in_the_middle_leaves_the_server_clean() -> None:
    serving = UcxPlane(HOST, limits=LIMITS, clock=SystemClock())
    memory = mmap.mmap(-1, PAGES * PAGE_BYTES)
    serving.register(memoryview(memory), GENERATION)
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    reader = context.Process(target=read_for_ever, args=(theirs, serving.offer()))
    reader.start()
    assert ours.poll(LIMIT_S) and ours.recv() == "reading"
    assert reader.pid is not None
    os.kill(reader.pid, signal.SIGKILL)
    reader.join(LIMIT_S)
    waiting = threading.Event()
    for _ in range(int(LIMIT_S * 100)):
        if serving.served().lanes == 0:
            break
        waiting.wait(0.01)
    serving.check()
    assert serving.served().lanes == 0
    serving.unregister(GENERATION)
    serving.check()
    serving.close()


def read_for_ever(pipe: Connection, offer: bytes) -> None:
    """A reader that never ends by itself."""
    plane = UcxPlane(HOST, limits=LIMITS, clock=SystemClock())
    peer = plane.connect(offer, "server", LIMIT_S)
    reads = 0
    while True:
        begin(peer, list(range(PAGES)))[0].take(LIMIT_S)
        reads += 1
        if reads == 2:
            pipe.send("reading")


def test_nixl_and_ucx_share_a_process() -> None:
    pytest.importorskip("nixl_cu12", reason="NIXL is not installed: nothing to share with")
    script = (
        "from tierkv.storage.clock import SystemClock\n"
        "from tierkv.storage.transport.base import PageRange, TransportLimits\n"
        "from tierkv.storage.transport.nixl import NixlPlane\n"
        "from tierkv.storage.transport.ucx import UcxPlane\n"
        "limits, clock = TransportLimits(), SystemClock()\n"
        "for plane in (NixlPlane, UcxPlane):\n"
        "    ends = [plane('127.0.0.1', limits=limits, clock=clock) for _ in range(2)]\n"
        "    ends[0].register(memoryview(bytearray(b'x' * 100000)), 1)\n"
        "    peer = ends[1].connect(ends[0].offer(), 'other', 30.0)\n"
        "    into = bytearray(100000)\n"
        "    read = peer.read(1, [PageRange(0, 100000)], [memoryview(into)], 30.0)\n"
        "    print(plane.name, read.take(30.0)[0].value, set(into) == {120})\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[:2] == ["nixl ok True", "ucx ok True"]
