"""The nixl plane between real processes: right bytes, and either side killed at any moment."""

from __future__ import annotations

import ctypes
import mmap
import multiprocessing
import os
import random
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

import pytest

from tests.unit.storage.transport.layout import Layout
from tierkv.storage.device import address_of
from tierkv.storage.errors import ConfigError, TierIOError
from tierkv.storage.transport.base import PageOutcome, PageRange, PeerIdentity
from tierkv.storage.transport.negotiated_peer import NegotiatedPeer
from tierkv.storage.transport.nixl import NixlPlane
from tierkv.storage.transport.planes import NegotiatedTransport

KEY = bytes(range(32))
HOST = "127.0.0.1"
LIMIT_S = 60.0
SEED = 20261129
PAGE_BYTES = 1 << 20
PAGES = 32
LAYOUT = Layout(
    total_bytes=4096 + PAGES * (4096 + PAGE_BYTES),
    first_slot=4096,
    slot_bytes=4096 + PAGE_BYTES,
    payload_offset=4096,
    page_bytes=PAGE_BYTES,
    slot_count=PAGES,
)
RANGE_LISTS = 60
PROT_NONE = 0
"""linux/mman.h"""
UNTOUCHED = 0xA5
KILLS = 4

OK, GONE, FAILED = PageOutcome.OK, PageOutcome.GONE, PageOutcome.FAILED


@pytest.fixture(autouse=True, scope="module")
def installed() -> None:
    try:
        NixlPlane(HOST).close()
    except ConfigError as error:
        pytest.skip(str(error))


def payload(slot: int) -> bytes:
    """What every process knows to be in `slot`."""
    return random.Random(slot).randbytes(PAGE_BYTES)


def filled() -> mmap.mmap:
    memory = mmap.mmap(-1, LAYOUT.total_bytes)
    for slot in range(PAGES):
        start = LAYOUT.payload(slot).offset
        memory[start : start + PAGE_BYTES] = payload(slot)
    return memory


def serve(pipe: Connection) -> None:
    """The other process: memory, a transport, until the pipe closes or a signal comes."""
    memory = filled()
    with NegotiatedTransport(KEY, planes=[NixlPlane(HOST)]) as transport:
        transport.register(memoryview(memory))
        pipe.send(transport.listen(HOST, 0, answer))
        while True:
            try:
                wish = pipe.recv()
            except EOFError:
                return
            if wish == "another":
                pipe.send(transport.register(memoryview(filled())))
            elif wish == "unregister":
                transport.unregister(1)
                pipe.send("done")
            elif wish == "take away":
                # As no owner may: while it is registered.
                ctypes.CDLL(None).mprotect(
                    ctypes.c_void_p(address_of(memoryview(memory))),
                    ctypes.c_size_t(len(memory)),
                    ctypes.c_int(PROT_NONE),
                )
                pipe.send("done")


def answer(peer: PeerIdentity, message: bytes) -> bytes:
    return str(os.getpid()).encode() + b" " + message


def read_for_ever(address: tuple[str, int], pipe: Connection) -> None:
    """A third process, that reads until it is killed."""
    with NegotiatedTransport(KEY, planes=[NixlPlane(HOST)]) as transport:
        peer = transport.connect(*address, LIMIT_S)
        ranges = [LAYOUT.payload(slot) for slot in range(PAGES)]
        views = [memoryview(bytearray(PAGE_BYTES)) for _ in ranges]
        pipe.send(peer.transport)
        while True:
            peer.read(1, ranges, views, LIMIT_S).take(LIMIT_S)


def start(target: object, *arguments: object) -> tuple[BaseProcess, Connection]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(
        target=target,  # type: ignore[arg-type]
        args=(*arguments, theirs),
        daemon=True,
    )
    process.start()
    theirs.close()
    return process, ours


@contextmanager
def serving() -> Iterator[tuple[BaseProcess, Connection, tuple[str, int]]]:
    """A serving process and its address."""
    process, pipe = start(serve)
    try:
        assert pipe.poll(LIMIT_S), "the serving process did not start"
        yield process, pipe, pipe.recv()
    finally:
        pipe.close()
        process.join(LIMIT_S)
        # Nothing crashes, not even at the end, when UCX is unloaded.
        assert process.exitcode in (0, -signal.SIGKILL)


@contextmanager
def connected(address: tuple[str, int]) -> Iterator[tuple[NegotiatedTransport, NegotiatedPeer]]:
    with NegotiatedTransport(KEY, planes=[NixlPlane(HOST)]) as transport:
        peer = transport.connect(*address, LIMIT_S)
        assert peer.transport == "nixl", peer.declined
        yield transport, peer
        transport.check()


def fetch(
    peer: NegotiatedPeer, slots: list[int], generation: int = 1
) -> tuple[list[PageOutcome], list[bytearray]]:
    buffers = [bytearray(PAGE_BYTES) for _ in slots]
    views = [memoryview(buffer) for buffer in buffers]
    read = peer.read(generation, [LAYOUT.payload(slot) for slot in slots], views, LIMIT_S)
    return read.take(LIMIT_S), buffers


def check_pages(slots: list[int], outcomes: list[PageOutcome], buffers: list[bytearray]) -> int:
    """Every page that is said to be there is; how many are."""
    for slot, outcome, buffer in zip(slots, outcomes, buffers, strict=True):
        assert outcome is not OK or buffer == payload(slot), f"page {slot} is another"
    return outcomes.count(OK)


def test_bytes_between_processes_into_registered_memory_and_other() -> None:
    print(f"seed={SEED}")
    rng = random.Random(SEED)
    with serving() as (process, _, address), connected(address) as (transport, peer):
        assert process.pid is not None
        assert peer.message(b"hello", LIMIT_S) == f"{process.pid} hello".encode()
        memory = mmap.mmap(-1, 4 * PAGE_BYTES)
        transport.register(memoryview(memory))
        own = [memoryview(memory)[i * PAGE_BYTES : (i + 1) * PAGE_BYTES] for i in range(4)]
        for turn in range(RANGE_LISTS):
            slots = [rng.randrange(PAGES) for _ in range(rng.randint(1, 4))]
            cuts = [sorted(rng.sample(range(PAGE_BYTES + 1), 2)) for _ in slots]
            ranges = [
                PageRange(LAYOUT.payload(slot).offset + start, end - start)
                for slot, (start, end) in zip(slots, cuts, strict=True)
            ]
            buffers = own if turn % 2 else [memoryview(bytearray(PAGE_BYTES)) for _ in slots]
            views = [buffers[i][: item.length] for i, item in enumerate(ranges)]
            read = peer.read(1, ranges, views, LIMIT_S)
            assert read.take(LIMIT_S) == [OK] * len(slots), read.error
            for slot, (start, end), view in zip(slots, cuts, views, strict=True):
                assert view == payload(slot)[start:end]
        assert peer.stats().pages_failed == 0 and peer.transport == "nixl"


def test_large_reads_are_several_transfers() -> None:
    slots = [slot for _ in range(2) for slot in range(PAGES)]
    with serving() as (_, _, address), connected(address) as (_, peer):
        outcomes, buffers = fetch(peer, slots)
        assert check_pages(slots, outcomes, buffers) == len(slots)


def test_memory_registered_later_is_found() -> None:
    with serving() as (_, pipe, address), connected(address) as (_, peer):
        pipe.send("another")
        generation = pipe.recv()
        outcomes, buffers = fetch(peer, [3], generation)
        # Over tcp if the offer is older than the memory.
        assert check_pages([3], outcomes, buffers) == 1
        for _ in range(2000):
            path = peer._path
            assert path is not None
            if path.knows(generation):
                break
            fetch(peer, [3], generation)
        assert path.knows(generation)
        outcomes, buffers = fetch(peer, [5], generation)
        assert check_pages([5], outcomes, buffers) == 1
        pipe.send("unregister")
        assert pipe.recv() == "done"
        assert fetch(peer, [1, 2])[0] == [GONE, GONE]
        assert fetch(peer, [5], generation)[0] == [OK]


def test_w6_a_peer_killed_at_any_moment() -> None:
    slots = list(range(PAGES))
    ranges = [LAYOUT.payload(slot) for slot in slots]
    for kill in range(KILLS):
        with serving() as (process, _, address), connected(address) as (_, peer):
            buffers = [bytearray(PAGE_BYTES) for _ in slots]
            views = [memoryview(buffer) for buffer in buffers]
            reads = [
                peer.read(1, ranges[i : i + 4], views[i : i + 4], LIMIT_S) for i in range(0, 32, 4)
            ]
            # After so many reads have ended, the next ones are somewhere on their way.
            for read in reads[:kill]:
                assert read.take(LIMIT_S) == [OK] * 4, read.error
            process.kill()
            outcomes = [outcome for read in reads for outcome in read.take(LIMIT_S)]
            assert GONE not in outcomes
            assert check_pages(slots, outcomes, buffers) >= 4 * kill
            # They are the caller's again: nothing writes to them any more.
            for buffer in buffers:
                buffer[:] = bytes([UNTOUCHED]) * PAGE_BYTES
            process.join(LIMIT_S)
            assert fetch(peer, [0])[0] == [FAILED]
            with pytest.raises(TierIOError, match="message to peer"):
                peer.message(b"?", 5.0)
            assert all(set(buffer) == {UNTOUCHED} for buffer in buffers)


def test_w6_a_reader_killed_at_any_moment_takes_nobody_along() -> None:
    with serving() as (process, _, address), connected(address) as (_, peer):
        for _ in range(KILLS):
            reader, pipe = start(read_for_ever, address)
            assert pipe.poll(LIMIT_S) and pipe.recv() == "nixl"
            assert fetch(peer, [0])[0] == [OK]
            reader.kill()
            reader.join(LIMIT_S)
            outcomes, buffers = fetch(peer, list(range(PAGES)))
            assert check_pages(list(range(PAGES)), outcomes, buffers) == PAGES
        assert process.is_alive() and peer.transport == "nixl"


def test_h4_a_peer_that_restarted_is_another() -> None:
    with serving() as (process, _, address), connected(address) as (transport, peer):
        process.kill()
        process.join(LIMIT_S)
        with serving() as (_, _, other):
            assert fetch(peer, [0])[0] == [FAILED]
            fresh = transport.connect(*other, LIMIT_S)
            assert fresh.transport == "nixl"
            outcomes, buffers = fetch(fresh, [7])
            assert check_pages([7], outcomes, buffers) == 1


def test_h1_a_stopped_peer_is_read_all_the_same() -> None:
    with serving() as (process, _, address), connected(address) as (_, peer):
        assert process.pid is not None
        assert fetch(peer, [0])[0] == [OK]
        os.kill(process.pid, signal.SIGSTOP)
        try:
            # One-sided, cookies too: the other process has no part in it.
            for slot in range(4):
                outcomes, buffers = fetch(peer, [slot])
                assert check_pages([slot], outcomes, buffers) == 1
            with pytest.raises(TierIOError, match="deadline passed"):
                peer.message(b"?", 0.3)
        finally:
            os.kill(process.pid, signal.SIGCONT)
        assert peer.message(b"awake", LIMIT_S).endswith(b"awake")


def test_h1_connecting_to_a_stopped_peer_has_a_deadline() -> None:
    with serving() as (process, _, address):
        assert process.pid is not None
        with NegotiatedTransport(KEY, planes=[NixlPlane(HOST)]) as transport:
            os.kill(process.pid, signal.SIGSTOP)
            try:
                with pytest.raises(TierIOError, match="connect peer"):
                    transport.connect(*address, 0.5)
            finally:
                os.kill(process.pid, signal.SIGCONT)
            assert transport.connect(*address, LIMIT_S).transport == "nixl"


def test_memory_that_cannot_be_read_costs_reads_not_processes() -> None:
    with serving() as (process, pipe, address), connected(address) as (_, peer):
        pipe.send("take away")
        assert pipe.recv() == "done"
        outcomes, _ = fetch(peer, [0, 1, 2])
        assert outcomes == [FAILED] * 3
        assert process.is_alive()
        assert peer.message(b"still", LIMIT_S).endswith(b"still")


def test_closing_in_the_middle_gives_every_destination_back() -> None:
    slots = list(range(PAGES))
    with serving() as (_, _, address), connected(address) as (_, peer):
        buffers = [bytearray(PAGE_BYTES) for _ in slots]
        views = [memoryview(buffer) for buffer in buffers]
        reads = [
            peer.read(1, [LAYOUT.payload(slot)], [view], LIMIT_S)
            for slot, view in zip(slots, views, strict=True)
        ]
        reads[0].take(LIMIT_S)
        peer.close()
        outcomes = [read.take(LIMIT_S)[0] for read in reads]
        check_pages(slots, outcomes, buffers)
        assert GONE not in outcomes
