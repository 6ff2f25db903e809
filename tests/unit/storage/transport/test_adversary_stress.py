"""Readers without patience, peers without manners: what was promised of a read holds all the same.

Each reader fills its destinations with a guard pattern and reads with deadlines that are mostly too
short. Once a read is done its memory is the reader's again: whatever is written to it after that,
by anybody, is found. A page that is called OK has every byte it should have.
"""

from __future__ import annotations

import random
import threading
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest

from tests.support.loopback_pool import await_true
from tests.unit.storage.transport.scripted import KEY
from tests.unit.storage.transport.test_nixl import nixl
from tests.unit.storage.transport.test_tcp import make_contexts
from tierkv.storage.errors import TierError
from tierkv.storage.transport.base import PageOutcome, PageRange, PeerRead, TransportLimits
from tierkv.storage.transport.planes import NegotiatedTransport
from tierkv.storage.transport.stream import PlainStream, Stream, TlsStream
from tierkv.storage.transport.tcp import TlsContexts

OK = PageOutcome.OK
LIMIT_S = 30.0
SIZE = 24 << 20
GUARD = 0xA5
READERS = 6
LINKS = 2
LIMITS = TransportLimits(queued_reads=16, handshake_s=1.0, io_s=2.0, peer_connections=64)


class Manners:
    """How the serving side's streams send: as they should, late, cut short, or not at all."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._lock = threading.Lock()
        self._go = threading.Event()
        self.rude = True

    def end(self) -> None:
        self.rude = False
        self._go.set()

    def before_pages(self, stream: Stream) -> None:
        with self._lock:
            dice = self._random.random()
            pause_s = self._random.uniform(0.001, 0.1)
        if not self.rude or dice < 0.8:
            return
        if dice < 0.9:
            self._go.wait(pause_s)
        elif dice < 0.97:
            stream.interrupt()
        else:
            self._go.wait(1.0)


class Node:
    """The peer: it restarts, and a fixed share of its answers come as Manners say."""

    def __init__(self, seed: int, planes: bool, tls: TlsContexts | None) -> None:
        self._random = random.Random(seed)
        self._planes = planes
        self._tls = tls
        self.memory = bytearray(random.Random(seed + 1).randbytes(SIZE))
        self.manners = Manners(seed + 2)
        self.address = ("127.0.0.1", 0)
        self.transport = self._open()

    def _open(self) -> NegotiatedTransport:
        planes = [nixl(LIMITS)] if self._planes else []
        transport = NegotiatedTransport(KEY, planes=planes, limits=LIMITS, tls=self._tls)
        transport.register(memoryview(self.memory))
        self.address = transport.listen(*self.address, lambda _, message: message)
        return transport

    def restart(self) -> None:
        with suppress(TierError):
            self.transport.close()
        self.transport = self._open()


class Link:
    """A peer that several readers share: two connections for all their reads."""

    def __init__(self, client: NegotiatedTransport, node: Node) -> None:
        self._client = client
        self._node = node
        self._lock = threading.Lock()
        self.peer = client.connect(*node.address, LIMIT_S)

    def renew(self) -> None:
        """Connect again unless it answers."""
        with self._lock:
            try:
                self.peer.message(b"there?", 0.2)
            except TierError:
                self.peer.close()
                with suppress(TierError):
                    self.peer = self._client.connect(*self._node.address, 1.0)


class Reader:
    """One thread with its memory. Destinations of a read are left alone until it is done."""

    def __init__(self, seed: int, node: Node, link: Link) -> None:
        self._random = random.Random(seed)
        self._node = node
        self._link = link
        self.reads = self.pages = self.callbacks = 0
        self._told = 0
        self._lock = threading.Lock()
        self._kept: list[tuple[PeerRead, list[PageRange], list[bytearray]]] = []
        self._ended: list[tuple[bytes, bytearray]] = []
        """Memory of reads that are done, and what it held then."""

    def run(self, until: float) -> None:
        while time.monotonic() < until:
            self._read()
            self._look_after()
        self._settle()

    def _read(self) -> None:
        dice = self._random
        most = dice.choice((1 << 10, 1 << 16, 1 << 20, 4 << 20))
        lengths = [dice.randint(1, most) for _ in range(dice.randint(1, 4))]
        ranges = [PageRange(dice.randint(0, SIZE - length), length) for length in lengths]
        buffers = [bytearray([GUARD]) * length for length in lengths]
        deadline_s = min(1.0, 0.0005 * 2 ** dice.uniform(0, 11))
        views = [memoryview(buffer) for buffer in buffers]
        peer = self._link.peer
        read = peer.read(1, ranges, views, deadline_s)
        self.reads += 1
        if dice.random() < 0.3:
            self.callbacks += 1
            read.add_done_callback(self._tell)
            if dice.random() < 0.02:
                read.add_done_callback(peer.close)
        what = dice.random()
        if what < 0.2:
            pass
        elif what < 0.4:
            with suppress(TierError):
                read.take(deadline_s / 2)
        else:
            with suppress(TierError):
                read.take(deadline_s + 0.5)
        self._kept.append((read, ranges, buffers))
        if read.done and read.error is not None and dice.random() < 0.5:
            self._link.renew()

    def _tell(self) -> None:
        with self._lock:
            self._told += 1

    def _look_after(self) -> None:
        """Compare what is done; look at what was done before once more."""
        for kept in list(self._kept):
            if kept[0].done:
                self._kept.remove(kept)
                self._compare(*kept)
        for then, now in self._ended:
            assert then == now, "written to after its read was done"
        del self._ended[:-8]

    def _compare(self, read: PeerRead, ranges: list[PageRange], buffers: list[bytearray]) -> None:
        for outcome, (start, length), buffer in zip(read.take(0.0), ranges, buffers, strict=True):
            if outcome is OK:
                self.pages += 1
                assert buffer == self._node.memory[start : start + length], "OK and other bytes"
        buffer = self._random.choice(buffers)
        # Overwritten, so that the right bytes would be found too if they came once more.
        buffer[:] = bytes([GUARD]) * len(buffer)
        self._ended.append((bytes(buffer), buffer))

    def _settle(self) -> None:
        ends = threading.Semaphore(0)
        for read, _, _ in self._kept:
            read.add_done_callback(ends.release)
        for _ in self._kept:
            assert ends.acquire(timeout=LIMIT_S), "a read that never ended"
        self._look_after()
        assert self._told == self.callbacks, "each callback is called once"


def descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def ours() -> set[str]:
    """Threads of the transport."""
    return {t.name for t in threading.enumerate() if t.name.startswith("tierkv-")}


def rampage(
    monkeypatch: pytest.MonkeyPatch,
    seconds: float,
    seed: int,
    *,
    planes: bool = False,
    tls: TlsContexts | None = None,
) -> None:
    print(f"seed {seed}")
    node = Node(seed, planes, tls)
    kind = PlainStream if tls is None else TlsStream
    send = kind.send

    def rude(stream: Any, buffers: list[bytes], *limits: float, **named: float) -> None:
        if len(buffers) > 1:
            node.manners.before_pages(stream)
        send(stream, buffers, *limits, **named)

    monkeypatch.setattr(kind, "send", rude)
    failures: list[BaseException] = []
    with ExitStack() as stack:
        own = [nixl(LIMITS)] if planes else []
        client = NegotiatedTransport(KEY, planes=own, limits=LIMITS, tls=tls)
        stack.enter_context(client)
        links = [Link(client, node) for _ in range(LINKS)]
        readers = [Reader(seed + n, node, links[n % LINKS]) for n in range(READERS)]
        until = time.monotonic() + seconds

        def run(reader: Reader) -> None:
            try:
                reader.run(until)
            except BaseException as error:
                failures.append(error)
                raise

        threads = [threading.Thread(target=run, args=(reader,)) for reader in readers]
        for thread in threads:
            thread.start()
        restart_at = time.monotonic() + seconds / 3
        while time.monotonic() < until:
            # The invariants hold at every moment, not only when all is quiet.
            client.check()
            node.transport.check()
            if time.monotonic() > restart_at:
                node.restart()
                restart_at += seconds / 3
        node.manners.end()
        for thread in threads:
            thread.join(LIMIT_S)
            assert not thread.is_alive()
        assert not failures, failures
        client.check()
        for link in links:
            # A read ends for its caller before its pages have stopped moving.
            await_true("reads end", lambda link=link: link.peer.stats().open_reads == 0)
    node.transport.close()
    node.transport.check()
    pages = sum(reader.pages for reader in readers)
    print(f"reads {sum(r.reads for r in readers)} pages {pages}")
    assert pages and all(reader.reads for reader in readers)


def nothing_left(threads: set[str], open_before: int | None = None) -> None:
    for thread in threading.enumerate():
        if thread.name.startswith("tierkv-") and thread.name not in threads:
            thread.join(LIMIT_S)
    assert ours() <= threads
    assert open_before is None or descriptors() <= open_before


@pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
def test_stress_without_planes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tls: bool) -> None:
    contexts = make_contexts(tmp_path) if tls else None
    threads, before = ours(), descriptors()
    rampage(monkeypatch, 1.5, random.randrange(1 << 30), tls=contexts)
    nothing_left(threads, before)


def test_stress_with_nixl(monkeypatch: pytest.MonkeyPatch) -> None:
    # What UCX opens for a process stays.
    threads = ours()
    rampage(monkeypatch, 1.5, random.randrange(1 << 30), planes=True)
    nothing_left(threads)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["plain", "tls", "nixl"])
def test_stress_for_long(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: str) -> None:
    contexts = make_contexts(tmp_path) if kind == "tls" else None
    for _ in range(10):
        threads = ours()
        with monkeypatch.context() as patched:
            seed = random.randrange(1 << 30)
            rampage(patched, 10.0, seed, planes=kind == "nixl", tls=contexts)
        nothing_left(threads)
