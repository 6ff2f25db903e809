"""What every Transport must do, sentence by sentence of storage/transport/base.py.

Subclass TransportConformance in a test module and give it open_transport() and, when the
implementation has another idea of an address, address(). Ranges are odd on purpose.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator

import pytest

from tests.unit.storage.transport.layout import Layout
from tierkv.storage.errors import ConfigError, OverloadedError, TierClosedError, TierIOError
from tierkv.storage.transport.base import (
    PageOutcome,
    PageRange,
    Peer,
    PeerIdentity,
    PeerRead,
    Transport,
    TransportLimits,
)

LIMITS = TransportLimits(
    read_pages=64,
    page_bytes=1 << 20,
    memories=4,
    message_bytes=4096,
    queued_reads=8,
    peer_connections=32,
    handshake_s=10.0,
    io_s=10.0,
)
GEOMETRY = Layout(
    total_bytes=4096 + 16 * 12288,
    first_slot=4096,
    slot_bytes=12288,
    payload_offset=4096,
    page_bytes=5000,
    slot_count=16,
)
LIMIT_S = 30.0
"""Deadline of everything that is expected to go well."""
SEED = 20261129
RANGE_LISTS = 1000
UNTOUCHED = 0xA5


def content(seed: int = 1) -> bytearray:
    """What an arena of GEOMETRY holds."""
    return bytearray(random.Random(seed).randbytes(GEOMETRY.total_bytes))


def destinations(ranges: list[PageRange]) -> list[bytearray]:
    """A buffer a range, filled with UNTOUCHED."""
    return [bytearray([UNTOUCHED]) * length for _, length in ranges]


def begin(peer: Peer, ranges: list[PageRange], generation: int = 1) -> PeerRead:
    """A read into buffers nobody looks at."""
    views = [memoryview(buffer) for buffer in destinations(ranges)]
    return peer.read(generation, ranges, views, LIMIT_S)


def fetch(
    peer: Peer, ranges: list[PageRange], generation: int = 1
) -> tuple[list[PageOutcome], list[bytearray]]:
    """Read and wait."""
    buffers = destinations(ranges)
    views = [memoryview(buffer) for buffer in buffers]
    outcomes = peer.read(generation, ranges, views, LIMIT_S).take(LIMIT_S)
    peer.check()
    return outcomes, buffers


def echo(peer: PeerIdentity, payload: bytes) -> bytes:
    """The handler of most tests: who asked, and what."""
    return peer.boot_token + payload


class Gate:
    """A handler that holds its callers until it is opened."""

    def __init__(self) -> None:
        self.entered = threading.Semaphore(0)
        self.open = threading.Event()

    def __call__(self, peer: PeerIdentity, payload: bytes) -> bytes:
        self.entered.release()
        assert self.open.wait(LIMIT_S), "the test never opened the gate"
        return payload


class TransportConformance:
    """The suite. One transport serves, another asks."""

    path = "tcp"
    """The data path that is expected between them."""

    def open_transport(self, limits: TransportLimits = LIMITS) -> Transport:
        raise AssertionError("a subclass opens its transport here")

    def address(self) -> tuple[str, int]:
        """Where a server may listen."""
        return "127.0.0.1", 0

    @pytest.fixture
    def server(self) -> Iterator[Transport]:
        with self.open_transport() as transport:
            yield transport
            transport.check()

    @pytest.fixture
    def client(self) -> Iterator[Transport]:
        with self.open_transport() as transport:
            yield transport
            transport.check()

    @pytest.fixture
    def arena(self) -> bytearray:
        return content()

    @pytest.fixture
    def peer(self, server: Transport, client: Transport, arena: bytearray) -> Iterator[Peer]:
        server.register(memoryview(arena))
        host, port = server.listen(*self.address(), echo)
        with client.connect(host, port, LIMIT_S) as peer:
            yield peer
            peer.check()

    def serve(self, server: Transport, client: Transport, handler: Callable[..., bytes]) -> Peer:
        host, port = server.listen(*self.address(), handler)
        return client.connect(host, port, LIMIT_S)

    # Who is there

    def test_identity_names_the_process(self, server: Transport, peer: Peer) -> None:
        assert peer.identity == PeerIdentity(server.boot_token)

    def test_a_node_without_memory(self, server: Transport, client: Transport) -> None:
        with self.serve(server, client, echo) as peer:
            assert peer.identity == PeerIdentity(server.boot_token)
            assert fetch(peer, [PageRange(0, 1)])[0] == [PageOutcome.GONE]

    def test_the_path_is_named(self, peer: Peer) -> None:
        assert peer.transport == self.path
        assert dict(peer.declined) == {}

    def test_two_transports_have_two_tokens(self, server: Transport, client: Transport) -> None:
        assert server.boot_token != client.boot_token

    def test_connect_to_nobody_is_an_error(self, server: Transport, client: Transport) -> None:
        address = server.listen(*self.address(), echo)
        server.close()
        with pytest.raises(TierIOError, match="connect peer"):
            client.connect(*address, 5.0)

    def test_a_node_is_not_its_own_peer(self, server: Transport) -> None:
        address = server.listen(*self.address(), echo)
        with pytest.raises(TierIOError, match="this node itself"):
            server.connect(*address, LIMIT_S)

    # Reads

    def test_payloads_of_all_slots(self, peer: Peer, arena: bytearray) -> None:
        ranges = [GEOMETRY.payload(slot) for slot in (15, 0, 7, 7, 1)]
        outcomes, buffers = fetch(peer, ranges)
        assert outcomes == [PageOutcome.OK] * 5
        for (offset, length), buffer in zip(ranges, buffers, strict=True):
            assert buffer == arena[offset : offset + length]

    def test_reads_see_what_is_there_now(self, peer: Peer, arena: bytearray) -> None:
        page = GEOMETRY.payload(3)
        fetch(peer, [page])
        arena[page.offset : page.offset + page.length] = bytes(page.length)
        assert fetch(peer, [page])[1] == [bytearray(page.length)]

    def test_random_range_lists(self, peer: Peer, arena: bytearray) -> None:
        print(f"seed={SEED}")
        rng = random.Random(SEED)
        for _ in range(RANGE_LISTS):
            ranges = []
            for _ in range(rng.randint(1, 12)):
                length = rng.choice((1, 7, 4096, rng.randint(1, 20000)))
                ranges.append(PageRange(rng.randint(0, len(arena) - length), length))
            outcomes, buffers = fetch(peer, ranges)
            assert outcomes == [PageOutcome.OK] * len(ranges)
            for (offset, length), buffer in zip(ranges, buffers, strict=True):
                assert buffer == arena[offset : offset + length]

    def test_reads_from_many_threads(self, peer: Peer, arena: bytearray) -> None:
        wrong: list[str] = []

        def reader(number: int) -> None:
            rng = random.Random(SEED + number)
            for _ in range(30):
                ranges = [GEOMETRY.payload(rng.randrange(16)) for _ in range(4)]
                outcomes, buffers = fetch(peer, ranges)
                good = [arena[offset : offset + length] for offset, length in ranges]
                if outcomes != [PageOutcome.OK] * 4 or buffers != good:
                    wrong.append(f"thread {number}: {outcomes}")

        threads = [threading.Thread(target=reader, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LIMIT_S)
        assert not wrong
        stats = peer.stats()
        assert stats.pages_ok == 4 * 30 * 4 and stats.open_reads == 0
        assert stats.bytes_read == stats.pages_ok * GEOMETRY.page_bytes

    def test_bytes_beside_a_view_are_left_alone(self, peer: Peer, arena: bytearray) -> None:
        buffer = bytearray([UNTOUCHED]) * 300
        view = memoryview(buffer)[100:200]
        assert peer.read(1, [PageRange(5, 100)], [view], LIMIT_S).take(LIMIT_S) == [PageOutcome.OK]
        assert buffer[100:200] == arena[5:105]
        assert set(buffer[:100]) | set(buffer[200:]) == {UNTOUCHED}

    @pytest.mark.parametrize(
        "bad",
        [
            PageRange(GEOMETRY.total_bytes, 1),
            PageRange(GEOMETRY.total_bytes - 99, 100),
            PageRange((1 << 63) - 200, 100),
        ],
    )
    def test_outside_the_arena_is_refused(self, peer: Peer, bad: PageRange) -> None:
        good = PageRange(0, 100)
        read = begin(peer, [good, bad])
        assert PageOutcome.OK not in read.take(LIMIT_S)[1:]
        assert read.error is not None and "outside" in read.error
        assert fetch(peer, [good])[0] == [PageOutcome.OK]

    def test_arguments_that_cannot_be_meant(self, peer: Peer) -> None:
        view = memoryview(bytearray(10))
        ten = PageRange(0, 10)
        for ranges, views, timeout_s in (
            ([], [], 1.0),
            ([ten], [], 1.0),
            ([ten] * (LIMITS.read_pages + 1), [view] * (LIMITS.read_pages + 1), 1.0),
            ([PageRange(0, 9)], [view], 1.0),
            ([PageRange(-1, 10)], [view], 1.0),
            ([PageRange(0, 0)], [view[:0]], 1.0),
            ([ten], [view.toreadonly()], 1.0),
            ([ten], [memoryview(bytearray(20))[::2]], 1.0),
            ([ten], [view], 0.0),
            ([ten], [view], LIMITS.wait_s + 1),
        ):
            with pytest.raises(ValueError, match="read from peer"):
                peer.read(1, ranges, views, timeout_s)
        long = memoryview(bytearray(LIMITS.page_bytes + 1))
        with pytest.raises(ValueError, match="read from peer"):
            peer.read(1, [PageRange(0, LIMITS.page_bytes + 1)], [long], 1.0)
        for generation in (0, -1, 1 << 64):
            with pytest.raises(ValueError, match="a generation from 1"):
                peer.read(generation, [ten], [view], 1.0)
        assert peer.stats().pages_failed == 0

    # A miss is not a failure

    def test_another_generation_is_gone(
        self, server: Transport, peer: Peer, arena: bytearray
    ) -> None:
        page = GEOMETRY.payload(2)
        server.unregister(1)
        server.unregister(1)
        outcomes, buffers = fetch(peer, [page, page])
        assert outcomes == [PageOutcome.GONE] * 2
        assert buffers == destinations([page, page])
        assert server.register(memoryview(content(2))) == 2
        assert fetch(peer, [page])[0] == [PageOutcome.GONE]
        outcomes, buffers = fetch(peer, [page], generation=2)
        assert outcomes == [PageOutcome.OK]
        assert buffers[0] == content(2)[page.offset : page.offset + page.length]
        stats = peer.stats()
        assert (stats.pages_ok, stats.pages_gone, stats.pages_failed) == (1, 3, 0)

    def test_several_memories_of_different_sizes(
        self, server: Transport, peer: Peer, arena: bytearray
    ) -> None:
        memories = {1: bytes(arena), 2: bytes(content(2)[:777]), 3: bytes(content(3)[:50000])}
        for generation in (2, 3):
            assert server.register(memoryview(memories[generation])) == generation
        for generation, memory in memories.items():
            end = PageRange(len(memory) - 100, 100)
            outcomes, buffers = fetch(peer, [PageRange(0, 700), end], generation)
            assert outcomes == [PageOutcome.OK] * 2
            assert buffers == [memory[:700], memory[-100:]]
            # Each has its own end, whatever lies beyond it in another.
            read = begin(peer, [PageRange(len(memory) - 99, 100)], generation)
            assert read.take(LIMIT_S) == [PageOutcome.FAILED]
            assert read.error is not None and "outside" in read.error
        server.unregister(2)
        server.check()
        assert fetch(peer, [PageRange(0, 700)], 2)[0] == [PageOutcome.GONE]
        for generation in (1, 3):
            outcomes, buffers = fetch(peer, [PageRange(0, 700)], generation)
            assert outcomes == [PageOutcome.OK] and buffers == [memories[generation][:700]]

    def test_generations_nobody_gave_are_gone(self, server: Transport, peer: Peer) -> None:
        server.unregister(99)
        for generation in (2, 99, (1 << 64) - 1):
            assert fetch(peer, [PageRange(0, 9)], generation)[0] == [PageOutcome.GONE]
        assert fetch(peer, [PageRange(0, 9)])[0] == [PageOutcome.OK]

    def test_unregistered_memory_can_be_resized(
        self, server: Transport, peer: Peer, arena: bytearray
    ) -> None:
        assert fetch(peer, [GEOMETRY.payload(0)])[0] == [PageOutcome.OK]
        server.unregister(1)
        # A bytearray refuses this while anybody has a view of it.
        arena.clear()
        assert fetch(peer, [GEOMETRY.payload(0)])[0] == [PageOutcome.GONE]

    def test_closing_lets_go_of_all_memories(self, server: Transport, arena: bytearray) -> None:
        other = content(2)
        server.register(memoryview(arena))
        server.register(memoryview(other))
        server.close()
        arena.clear()
        other.clear()

    def test_registering_what_cannot_be_read(self, server: Transport, arena: bytearray) -> None:
        for memory in (memoryview(arena)[:0], memoryview(arena)[::2]):
            with pytest.raises(ConfigError, match="register memory"):
                server.register(memory)
        for _ in range(LIMITS.memories):
            server.register(memoryview(arena))
        with pytest.raises(ConfigError, match="no more are taken"):
            server.register(memoryview(arena))
        server.unregister(1)
        assert server.register(memoryview(arena)) == LIMITS.memories + 1

    # Completion

    def test_p4_completion_wakes_whoever_waits(self, peer: Peer) -> None:
        told = threading.Event()
        read = begin(peer, [PageRange(0, 100)])
        read.add_done_callback(told.set)
        assert told.wait(LIMIT_S) and read.done
        again = threading.Event()
        read.add_done_callback(again.set)
        assert again.is_set(), "told at once when done already"
        assert read.take(0.0) == read.take(0.0) == [PageOutcome.OK]

    def test_h2_a_callback_that_raises_ends_no_thread(self, peer: Peer) -> None:
        def careless() -> None:
            raise LookupError("of the test")

        for _ in range(4):
            read = begin(peer, [PageRange(0, 100)])
            read.add_done_callback(careless)
            assert read.take(LIMIT_S) == [PageOutcome.OK]
        assert peer.stats().worker_restarts == 0

    # Messages

    def test_messages_go_round(self, client: Transport, peer: Peer) -> None:
        for payload in (b"", b"x", bytes(range(256)) * 15):
            assert peer.message(payload, LIMIT_S) == client.boot_token + payload
        assert peer.stats().messages == 3

    def test_messages_above_the_limit(self, peer: Peer) -> None:
        with pytest.raises(ValueError, match="message to peer"):
            peer.message(bytes(LIMITS.message_bytes + 1), LIMIT_S)
        # The answer would be 16 bytes longer.
        with pytest.raises(TierIOError, match="at most 4096"):
            peer.message(bytes(LIMITS.message_bytes), LIMIT_S)
        assert peer.message(b"next", LIMIT_S).endswith(b"next")

    def test_a_handler_that_refuses(self, server: Transport, client: Transport) -> None:
        def refuse(peer: PeerIdentity, payload: bytes) -> bytes:
            raise OverloadedError("lease pages: too many are held; try later")

        with self.serve(server, client, refuse) as peer:
            for _ in range(5):
                with pytest.raises(TierIOError, match="too many are held; try later"):
                    peer.message(b"?", LIMIT_S)
            assert peer.stats().messages_failed == 5

    def test_h2_a_handler_with_a_bug(self, server: Transport, client: Transport) -> None:
        def careless(peer: PeerIdentity, payload: bytes) -> bytes:
            return {b"good": b"fine"}[payload]

        with self.serve(server, client, careless) as peer:
            for _ in range(3):
                with pytest.raises(TierIOError, match="message to peer"):
                    peer.message(b"bad", LIMIT_S)
                assert peer.message(b"good", LIMIT_S) == b"fine"
            assert server.stats().thread_restarts == 3

    def test_h1_a_handler_that_does_not_answer(self, server: Transport, client: Transport) -> None:
        gate = Gate()
        with self.serve(server, client, gate) as peer:
            with pytest.raises(TierIOError, match="deadline"):
                peer.message(b"?", 0.2)
            gate.open.set()
            assert peer.message(b"again", LIMIT_S) == b"again"

    def test_h1_a_message_waits_for_others_only_so_long(
        self, server: Transport, client: Transport
    ) -> None:
        gate = Gate()
        with self.serve(server, client, gate) as peer:
            others = [
                threading.Thread(target=peer.message, args=(b"1", LIMIT_S))
                for _ in range(LIMITS.message_connections)
            ]
            for other in others:
                other.start()
                assert gate.entered.acquire(timeout=LIMIT_S)
            with pytest.raises(TierIOError, match="did not end in time"):
                peer.message(b"2", 0.2)
            peer.check()
            gate.open.set()
            for other in others:
                other.join(LIMIT_S)
            assert peer.message(b"3", LIMIT_S) == b"3"

    # The end

    def test_h4_a_peer_that_left_fails_and_is_no_miss(self, server: Transport, peer: Peer) -> None:
        assert fetch(peer, [PageRange(0, 100)])[0] == [PageOutcome.OK]
        server.close()
        read = begin(peer, [PageRange(0, 100)] * 3)
        assert read.take(LIMIT_S) == [PageOutcome.FAILED] * 3
        assert read.error is not None and "read from peer" in read.error
        with pytest.raises(TierIOError, match="message to peer"):
            peer.message(b"?", 5.0)
        assert peer.stats().pages_failed == 3

    def test_h4_a_peer_that_restarted_is_noticed(
        self, server: Transport, client: Transport, arena: bytearray
    ) -> None:
        server.register(memoryview(arena))
        address = server.listen(*self.address(), echo)
        peer = client.connect(*address, LIMIT_S)
        assert fetch(peer, [PageRange(0, 100)])[0] == [PageOutcome.OK]
        server.close()
        with self.open_transport() as other:
            # The same generation number, another process: only the boot token tells.
            assert other.register(memoryview(content(2))) == 1
            other.listen(*address, echo)
            # A faster path says only that it was lost; then tcp is asked.
            for _ in range(2):
                read = begin(peer, [PageRange(0, 100)])
                assert read.take(LIMIT_S) == [PageOutcome.FAILED]
            assert read.error is not None and "restarted" in read.error
            with pytest.raises(TierIOError, match="restarted"):
                peer.message(b"?", LIMIT_S)
            with client.connect(*address, LIMIT_S) as fresh:
                assert fresh.identity.boot_token == other.boot_token
                assert fetch(fresh, [PageRange(0, 9)])[1] == [content(2)[:9]]

    def test_closed_peers_fail_and_nothing_hangs(self, peer: Peer) -> None:
        peer.close()
        peer.close()
        assert begin(peer, [PageRange(0, 1)]).take(LIMIT_S) == [PageOutcome.FAILED]
        with pytest.raises(TierClosedError):
            peer.message(b"?", LIMIT_S)

    def test_closed_transports_connect_no_more(self, server: Transport, client: Transport) -> None:
        address = server.listen(*self.address(), echo)
        with pytest.raises(ConfigError, match="listens already"):
            server.listen(*self.address(), echo)
        client.close()
        client.close()
        with pytest.raises(TierClosedError):
            client.connect(*address, LIMIT_S)
        with pytest.raises(TierClosedError):
            client.listen(*self.address(), echo)
