"""The tcp transport between two processes: right bytes, and a peer killed with -9 at any moment."""

from __future__ import annotations

import mmap
import multiprocessing
import os
import random
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

import pytest

from tests.unit.storage.transport.layout import Layout
from tierkv.storage.errors import TierIOError
from tierkv.storage.transport.base import (
    PageOutcome,
    PageRange,
    PeerIdentity,
    TransportLimits,
)
from tierkv.storage.transport.stream import PlainStream
from tierkv.storage.transport.tcp import TcpTransport
from tierkv.storage.transport.tcp_peer import TcpPeer
from tierkv.storage.types import Buffer

KEY = bytes(range(32))
LIMIT_S = 60.0
SEED = 20261129
PAGE_BYTES = 1 << 20
PAGES = 32
GEOMETRY = Layout(
    total_bytes=4096 + PAGES * (4096 + PAGE_BYTES),
    first_slot=4096,
    slot_bytes=4096 + PAGE_BYTES,
    payload_offset=4096,
    page_bytes=PAGE_BYTES,
    slot_count=PAGES,
)
RANGE_LISTS = 100
KILLS = 5


def payload(slot: int) -> bytes:
    """What every process knows to be in `slot`."""
    return random.Random(slot).randbytes(PAGE_BYTES)


class StuckStream(PlainStream):
    """Sends so many bytes to a reader, tells the test, and then no more."""

    left = 0
    tell: Connection

    def send(self, buffers: Sequence[Buffer], step_s: float, deadline: float | None = None) -> None:
        whole = b"".join(buffers)
        # Greetings and answers pass; what is as long as a page is cut.
        if len(whole) < PAGE_BYTES:
            super().send([whole], step_s, deadline)
            return
        super().send([whole[: self.left]], step_s, deadline)
        self.tell.send("stuck")
        threading.Event().wait(LIMIT_S)


def serve(pipe: Connection, stuck_after: int | None) -> None:
    """The other process: an arena, a transport, until the pipe closes or a signal comes."""
    memory = mmap.mmap(-1, GEOMETRY.total_bytes)
    for slot in range(PAGES):
        start = GEOMETRY.payload(slot).offset
        memory[start : start + PAGE_BYTES] = payload(slot)
    if stuck_after is not None:
        from tierkv.storage.transport import stream

        StuckStream.left, StuckStream.tell = stuck_after, pipe
        stream.PlainStream = StuckStream  # type: ignore[misc]
    with TcpTransport(KEY) as transport:
        transport.register(memoryview(memory))
        pipe.send(transport.listen("127.0.0.1", 0, answer))
        try:
            pipe.recv()
        except EOFError:
            return


def answer(peer: PeerIdentity, message: bytes) -> bytes:
    return str(os.getpid()).encode() + b" " + message


@contextmanager
def serving(stuck_after: int | None = None) -> Iterator[tuple[BaseProcess, TcpPeer, Connection]]:
    """A serving process and a peer connected to it."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=serve, args=(theirs, stuck_after), daemon=True)
    process.start()
    theirs.close()
    try:
        assert ours.poll(LIMIT_S), "the serving process did not start"
        with TcpTransport(KEY, limits=TransportLimits(read_connections=2)) as transport:
            yield process, transport.connect(*ours.recv(), LIMIT_S), ours
            transport.check()
    finally:
        ours.close()
        process.join(LIMIT_S)
        assert not process.is_alive()


def check_pages(slots: list[int], outcomes: list[PageOutcome], buffers: list[bytearray]) -> int:
    """Every page that is said to be there is; how many are."""
    good = 0
    for slot, outcome, buffer in zip(slots, outcomes, buffers, strict=True):
        assert outcome is not PageOutcome.GONE
        if outcome is PageOutcome.OK:
            assert buffer == payload(slot), f"page {slot} is not what was written"
            good += 1
    return good


def test_bytes_and_messages_between_processes() -> None:
    print(f"seed={SEED}")
    rng = random.Random(SEED)
    with serving() as (process, peer, _):
        assert process.pid is not None
        assert peer.message(b"hello", LIMIT_S) == f"{process.pid} hello".encode()
        for _ in range(RANGE_LISTS):
            slots = [rng.randrange(PAGES) for _ in range(rng.randint(1, 4))]
            cuts = [sorted(rng.sample(range(PAGE_BYTES + 1), 2)) for _ in slots]
            ranges = [
                PageRange(GEOMETRY.payload(slot).offset + start, end - start)
                for slot, (start, end) in zip(slots, cuts, strict=True)
            ]
            buffers = [bytearray(length) for _, length in ranges]
            read = peer.read(1, ranges, [memoryview(buffer) for buffer in buffers], LIMIT_S)
            assert read.take(LIMIT_S) == [PageOutcome.OK] * len(slots), read.error
            for slot, (start, end), buffer in zip(slots, cuts, buffers, strict=True):
                assert buffer == payload(slot)[start:end]
        peer.check()


@pytest.mark.parametrize("sent", [0, 16, 17, PAGE_BYTES, 3 * (PAGE_BYTES + 16) + 1000])
def test_w6_a_peer_killed_in_the_middle_of_a_page(sent: int) -> None:
    slots = [3, 1, 4, 0]
    with serving(stuck_after=sent) as (process, peer, pipe):
        buffers = [bytearray(PAGE_BYTES) for _ in slots]
        views = [memoryview(buffer) for buffer in buffers]
        read = peer.read(1, [GEOMETRY.payload(slot) for slot in slots], views, LIMIT_S)
        assert pipe.poll(LIMIT_S) and pipe.recv() == "stuck"
        assert not read.done
        process.kill()
        outcomes = read.take(LIMIT_S)
        whole = sent // (PAGE_BYTES + 16)
        assert outcomes == [PageOutcome.OK] * whole + [PageOutcome.FAILED] * (4 - whole)
        assert check_pages(slots, outcomes, buffers) == whole
        with pytest.raises(TierIOError, match="message to peer"):
            peer.message(b"?", 5.0)
        peer.check()


def test_w6_a_peer_killed_at_any_moment() -> None:
    slots = list(range(PAGES))
    ranges = [GEOMETRY.payload(slot) for slot in slots]
    for kill in range(KILLS):
        with serving() as (process, peer, _):
            buffers = [bytearray(PAGE_BYTES) for _ in slots]
            views = [memoryview(buffer) for buffer in buffers]
            reads = [
                peer.read(1, ranges[i : i + 4], views[i : i + 4], LIMIT_S) for i in range(0, 32, 4)
            ]
            # After so many reads have ended, the next ones are somewhere on their way.
            for read in reads[:kill]:
                assert read.take(LIMIT_S) == [PageOutcome.OK] * 4, read.error
            process.kill()
            outcomes = [outcome for read in reads for outcome in read.take(LIMIT_S)]
            assert check_pages(slots, outcomes, buffers) >= 4 * kill
            peer.check()


def test_h1_a_stopped_peer_is_late_not_waited_for() -> None:
    with serving() as (process, peer, _):
        assert process.pid is not None
        os.kill(process.pid, signal.SIGSTOP)
        try:
            read = peer.read(1, [GEOMETRY.payload(0)], [memoryview(bytearray(PAGE_BYTES))], 0.3)
            assert read.take(LIMIT_S) == [PageOutcome.FAILED]
            assert read.error is not None and "deadline passed" in read.error
            with pytest.raises(TierIOError, match="deadline passed"):
                peer.message(b"?", 0.3)
        finally:
            os.kill(process.pid, signal.SIGCONT)
        assert peer.message(b"awake", LIMIT_S).endswith(b"awake")
