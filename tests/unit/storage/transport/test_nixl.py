"""The nixl plane in one process: the conformance suite, offers that lie, peers out of reach."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.unit.storage.transport.transport_conformance import LIMITS, TransportConformance
from tierkv.storage.errors import ConfigError, TierClosedError, TierIOError
from tierkv.storage.transport import nixl_agent
from tierkv.storage.transport.base import (
    PageOutcome,
    PageRange,
    PeerRead,
    Transport,
    TransportLimits,
)
from tierkv.storage.transport.nixl import NixlPeer, NixlPlane
from tierkv.storage.transport.nixl_offer import pack_offer, unpack_offer
from tierkv.storage.transport.plane import OFFER_BYTES_MAX
from tierkv.storage.transport.planes import NegotiatedTransport

KEY = bytes(range(32))
OK, FAILED = PageOutcome.OK, PageOutcome.FAILED
LIMIT_S = 30.0
SEED = 20261129
SIZE = 2 << 20
MEMORY = bytearray(random.Random(SEED).randbytes(SIZE))


def nixl(limits: TransportLimits = LIMITS) -> NixlPlane:
    """A plane, or the reason why this machine cannot have one."""
    try:
        return NixlPlane("127.0.0.1", limits=limits)
    except ConfigError as error:
        pytest.skip(str(error))


class TestNixl(TransportConformance):
    path = "nixl"

    def open_transport(self, limits: TransportLimits = LIMITS) -> Transport:
        return NegotiatedTransport(KEY, planes=[nixl(limits)], limits=limits)


@pytest.fixture
def planes() -> Iterator[tuple[NixlPlane, NixlPlane]]:
    """A plane that offers SIZE bytes as memory 1, and one that reads."""
    server, client = nixl(), nixl()
    try:
        server.register(memoryview(MEMORY), 1)
        yield server, client
        server.check()
        client.check()
    finally:
        client.close()
        server.close()


def read(peer: NixlPeer, *ranges: PageRange, generation: int = 1) -> PeerRead:
    views = [memoryview(bytearray(length)) for _, length in ranges]
    return peer.read(generation, ranges, views, LIMIT_S)


def changed(offer: bytes, **fields: object) -> bytes:
    return pack_offer(unpack_offer(offer)._replace(**fields))  # type: ignore[arg-type]


def test_two_connections_to_one_peer(planes: tuple[NixlPlane, NixlPlane]) -> None:
    server, client = planes
    first = client.connect(server.offer(), "first", LIMIT_S)
    second = client.connect(server.offer(), "second", LIMIT_S)
    assert read(first, PageRange(0, 100)).take(LIMIT_S) == [OK]
    first.close()
    first.close()
    assert read(first, PageRange(0, 100)).take(LIMIT_S) == [FAILED]
    # The peer is forgotten with its last connection.
    assert read(second, PageRange(0, 100)).take(LIMIT_S) == [OK]
    second.close()
    third = client.connect(server.offer(), "third", LIMIT_S)
    assert read(third, PageRange(0, 100)).take(LIMIT_S) == [OK]


def test_w7_bytes_and_bounds(planes: tuple[NixlPlane, NixlPlane]) -> None:
    server, client = planes
    peer = client.connect(server.offer(), "peer", LIMIT_S)
    buffer = bytearray(300)
    view = memoryview(buffer)[100:200]
    assert peer.read(1, [PageRange(SIZE - 100, 100)], [view], LIMIT_S).take(LIMIT_S) == [OK]
    assert buffer[100:200] == MEMORY[-100:] and not any(buffer[:100]) and not any(buffer[200:])
    refused = read(peer, PageRange(0, 100), PageRange(SIZE - 99, 100))
    assert refused.refused and refused.take(0.0) == [FAILED] * 2
    assert refused.error is not None and "outside" in refused.error
    assert peer.broken is None and not peer.knows(2)
    assert read(peer, PageRange(0, 1), generation=2).take(0.0) == [PageOutcome.GONE]
    peer.check()


def test_c4_reads_above_the_bound_are_refused_and_counted(
    planes: tuple[NixlPlane, NixlPlane],
) -> None:
    server, client = planes
    peer = client.connect(server.offer(), "peer", LIMIT_S)
    assert read(peer, PageRange(0, 1)).take(LIMIT_S) == [OK]
    gate, entered = threading.Event(), threading.Event()

    def block() -> None:
        entered.set()
        gate.wait(LIMIT_S)

    # The thread that ends reads is held, so that later ones stay under way.
    first = read(peer, PageRange(0, 1 << 20))
    first.add_done_callback(block)
    assert entered.wait(LIMIT_S)
    taken = [read(peer, PageRange(0, 10)) for _ in range(LIMITS.queued_reads)]
    refused = read(peer, PageRange(0, 10), PageRange(0, 10))
    assert refused.refused and refused.error is not None and "no more are taken" in refused.error
    stats = peer.stats()
    assert (stats.rejected_reads, stats.pages_failed) == (1, 2)
    peer.check()
    gate.set()
    assert [one.take(LIMIT_S) for one in taken] == [[OK]] * LIMITS.queued_reads


def test_refreshed_offers(planes: tuple[NixlPlane, NixlPlane]) -> None:
    server, client = planes
    peer = client.connect(server.offer(), "peer", LIMIT_S)
    other = bytearray(b"x" * 1000)
    server.register(memoryview(other), 2)
    assert not peer.knows(2)
    peer.refresh(server.offer())
    assert read(peer, PageRange(0, 1000), generation=2).take(LIMIT_S) == [OK]
    server.unregister(2)
    server.unregister(2)
    assert read(peer, PageRange(0, 9), generation=2).take(LIMIT_S) == [PageOutcome.GONE]
    # A bytearray refuses this while anybody has a view of it.
    other.clear()
    peer.refresh(server.offer())
    assert not peer.knows(2) and read(peer, PageRange(0, 9)).take(LIMIT_S) == [OK]
    with pytest.raises(TierIOError, match="another process"):
        peer.refresh(client.offer())


def test_more_memories_than_the_limit(planes: tuple[NixlPlane, NixlPlane]) -> None:
    server, _ = planes
    for generation in range(2, LIMITS.memories + 2):
        server.register(memoryview(MEMORY), generation)
    with pytest.raises(TierIOError, match="no more"):
        server.register(memoryview(MEMORY), 99)
    server.unregister(2)
    server.register(memoryview(MEMORY), 99)
    server.check()


def test_peers_that_cannot_be_read_are_declined(planes: tuple[NixlPlane, NixlPlane]) -> None:
    server, client = planes
    offer = server.offer()
    memories = [memory._replace(cookie=bytes(16)) for memory in unpack_offer(offer).memories]
    for bad, said in (
        (changed(offer, machine=bytes(range(16))), "has no RDMA device"),
        (changed(offer, machine=bytes(range(16)), rdma=True), "has no RDMA device"),
        (changed(offer, pid=(1 << 22) + 1), "No such process"),
        (changed(offer, memories=memories), "is not the one that offers memory"),
        (changed(offer, agent="f" * 32), "its metadata is of agent"),
        (client.offer(), "this plane itself"),
        (changed(offer, metadata=b""), "load peer by nixl"),
    ):
        with pytest.raises(TierIOError, match=said) as failure:
            client.connect(bad, "peer", LIMIT_S)
        assert "\n" not in str(failure.value)
    # None of that has spoilt the peer.
    assert read(client.connect(offer, "peer", LIMIT_S), PageRange(0, 9)).take(LIMIT_S) == [OK]


def test_a1_offers_that_are_none(planes: tuple[NixlPlane, NixlPlane]) -> None:
    print(f"seed={SEED}")
    rng = random.Random(SEED)
    server, client = planes
    good = server.offer()
    assert pack_offer(unpack_offer(good)) == good
    head = len(good) - len(unpack_offer(good).metadata)
    for cut in range(0, len(good), 7):
        with pytest.raises(TierIOError):
            client.connect(good[:cut], "peer", LIMIT_S)
    for _ in range(300):
        bad = bytearray(good)
        bad[rng.randrange(head)] ^= 1 << rng.randrange(8)
        try:
            unpack_offer(bytes(bad))
        except TierIOError as error:
            assert "\n" not in str(error)
    twice = unpack_offer(good).memories * 2
    with pytest.raises(TierIOError, match="one generation names two"):
        unpack_offer(changed(good, memories=twice))
    with pytest.raises(TierIOError, match="at most"):
        changed(good, metadata=bytes(OFFER_BYTES_MAX))


def test_closed_planes(planes: tuple[NixlPlane, NixlPlane]) -> None:
    server, client = planes
    peer = client.connect(server.offer(), "peer", LIMIT_S)
    assert read(peer, PageRange(0, 9)).take(LIMIT_S) == [OK]
    server.close()
    server.close()
    late = read(peer, PageRange(0, 9))
    assert late.take(LIMIT_S) == [FAILED] and peer.broken is not None
    for action in (server.offer, lambda: server.register(memoryview(MEMORY), 5)):
        with pytest.raises(TierClosedError):
            action()
    client.close()
    assert read(peer, PageRange(0, 9)).take(LIMIT_S) == [FAILED]


@pytest.mark.parametrize("which", ["peer", "plane"])
def test_p4_callbacks_may_close_peer_and_plane(
    planes: tuple[NixlPlane, NixlPlane], which: str
) -> None:
    server, client = planes
    peer = client.connect(server.offer(), "peer", LIMIT_S)
    ended = threading.Event()
    one = read(peer, PageRange(0, 1 << 20))
    one.add_done_callback(peer.close if which == "peer" else client.close)
    one.add_done_callback(ended.set)
    assert ended.wait(LIMIT_S)
    client.check()
    assert read(peer, PageRange(0, 9)).take(LIMIT_S) == [FAILED]


def test_peers_on_this_machine_need_shared_memory(
    planes: tuple[NixlPlane, NixlPlane], monkeypatch: pytest.MonkeyPatch
) -> None:
    server, client = planes
    monkeypatch.setenv("UCX_TLS", "tcp")
    with pytest.raises(TierIOError, match="add sm to it"):
        client.connect(server.offer(), "peer", LIMIT_S)


def test_nixl_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl_agent, "PACKAGES", ("nixl_of_another_planet",))
    with pytest.raises(ConfigError, match=r"not installed; install the extra tierkv\[nixl-cu12\]"):
        NixlPlane("127.0.0.1")


def test_nixl_that_cannot_be_loaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "nixl_damaged.py").write_text("raise ImportError('libfoo.so:\\nno such file')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(nixl_agent, "PACKAGES", ("nixl_damaged",))
    with pytest.raises(ConfigError, match=r"nixl_damaged: libfoo\.so: no such file; install"):
        NixlPlane("127.0.0.1")


def test_nixl_is_told_to_sleep_between_events(monkeypatch: pytest.MonkeyPatch) -> None:
    nixl().close()
    genuine = nixl_agent.bindings()
    seen: list[Any] = []

    def keep(name: str, config: Any) -> Any:
        seen.append(config)
        return genuine.nixlAgent(name, config)

    bindings = ModuleType("bindings")
    bindings.__dict__.update(vars(genuine), nixlAgent=keep)
    monkeypatch.setattr(nixl_agent, "bindings", lambda: bindings)
    NixlPlane("127.0.0.1").close()
    # With no delay its thread spins on a core for as long as the process lives.
    assert seen[0].useProgThread and seen[0].pthrDelay >= 1000
    assert not seen[0].useListenThread, "nobody may connect but by an offer"
