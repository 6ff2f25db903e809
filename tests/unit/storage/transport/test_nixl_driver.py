"""When a read over NIXL ends and what it says: with a NIXL that stalls, fails and lies."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Iterator, Sequence

import pytest

from tests.support.clock import ManualClock
from tests.unit.storage.transport.fake_agent import FakeAgent
from tierkv.storage.clock import Clock, SystemClock
from tierkv.storage.device import address_of
from tierkv.storage.transport.base import PageOutcome, PeerRead
from tierkv.storage.transport.nixl_agent import Copy
from tierkv.storage.transport.nixl_driver import DRAIN_S, RUNNING_MAX, Driver, Piece, Remote, State
from tierkv.storage.transport.nixl_offer import COOKIE_BYTES, COOKIE_CLOSED, OfferedMemory

OK, GONE, FAILED = PageOutcome.OK, PageOutcome.GONE, PageOutcome.FAILED
LIMIT_S = 30.0
PAGE = 1000


class Rig:
    """A driver, and a peer that is memory of this process."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.agent = FakeAgent()
        self.driver = Driver(self.agent, clock)
        self.source = bytearray(secrets.token_bytes(PAGE * 64))
        self.cookie = bytearray(secrets.token_bytes(COOKIE_BYTES))
        self.remote = Remote("peer", {}, users=1)
        self.told: list[tuple[int, list[PageOutcome]]] = []
        self.pieces: list[Piece] = []

    def offered(self) -> OfferedMemory:
        return OfferedMemory(
            1,
            address_of(memoryview(self.source)),
            len(self.source),
            address_of(memoryview(self.cookie)),
            bytes(self.cookie),
        )

    def piece(
        self, pages: int = 1, timeout_s: float = LIMIT_S, foreign: bool = False, length: int = PAGE
    ) -> tuple[PeerRead, list[bytearray], Piece]:
        read = PeerRead(pages)
        buffers = [bytearray(length) for _ in range(pages)]
        views = [memoryview(buffer) for buffer in buffers]
        memory = self.offered()
        copies = [
            Copy(address_of(view), memory.address + i * PAGE, length)
            for i, view in enumerate(views)
        ]
        piece = Piece(
            read,
            0,
            copies,
            views,
            [(copy.local, copy.length) for copy in copies] if foreign else [],
            memory,
            self.remote,
            self.clock.monotonic() + timeout_s,
            self.hear,
        )
        self.pieces.append(piece)
        return read, buffers, piece

    def hear(self, piece: Piece, outcomes: Sequence[PageOutcome]) -> None:
        self.told.append((id(piece), list(outcomes)))

    def begin(
        self, pages: int = 1, timeout_s: float = LIMIT_S, foreign: bool = False, length: int = PAGE
    ) -> tuple[PeerRead, list[bytearray]]:
        read, buffers, piece = self.piece(pages, timeout_s, foreign, length)
        self.driver.submit([piece])
        self.driver.check()
        return read, buffers

    def close(self) -> None:
        self.driver.close()
        self.agent.close()
        self.driver.abandon()
        assert all(piece.state is State.ENDED for piece in self.pieces)
        assert len(self.told) == len(self.pieces), "each piece is told of once"


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig(SystemClock())
    yield rig
    rig.close()


@pytest.fixture
def manual() -> Iterator[Rig]:
    """Time stands still unless the test moves it."""
    rig = Rig(ManualClock())
    yield rig
    rig.close()


def advance(rig: Rig, seconds: float) -> None:
    assert isinstance(rig.clock, ManualClock)
    rig.clock.advance(seconds)


def test_a_read_has_its_cookie_before_and_after(rig: Rig) -> None:
    read, buffers = rig.begin(pages=3)
    assert read.take(LIMIT_S) == [OK] * 3
    assert b"".join(buffers) == rig.source[: 3 * PAGE]
    assert rig.agent.started == [COOKIE_BYTES, PAGE, COOKIE_BYTES]
    rig.driver.check()


def test_memory_that_is_gone_is_not_asked_for(rig: Rig) -> None:
    read, _, piece = rig.piece()
    rig.cookie[:] = bytes(COOKIE_BYTES)
    rig.driver.submit([piece])
    assert read.take(LIMIT_S) == [GONE] and read.error is None
    assert rig.agent.started == [COOKIE_BYTES]
    assert rig.remote.broken is None


def test_w6_memory_that_goes_while_it_is_read_is_no_page(rig: Rig) -> None:
    rig.agent.before_copy[PAGE] = lambda: rig.cookie.__setitem__(0, rig.cookie[0] ^ 1)
    read, _ = rig.begin()
    assert read.take(LIMIT_S) == [GONE]
    assert rig.agent.started == [COOKIE_BYTES, PAGE, COOKIE_BYTES]


def test_h4_a_peer_that_was_closed_is_no_miss(rig: Rig) -> None:
    read, _, piece = rig.piece()
    rig.cookie[:] = COOKIE_CLOSED
    rig.driver.submit([piece])
    assert read.take(LIMIT_S) == [FAILED]
    assert read.error is not None and "closed over there" in read.error
    assert rig.remote.broken is not None


def test_w6_a_late_transfer_keeps_its_destinations_until_it_ends(manual: Rig) -> None:
    manual.agent.held = {PAGE}
    read, buffers = manual.begin(timeout_s=5.0)
    assert manual.agent.wait_started(PAGE, LIMIT_S)
    advance(manual, 6.0)
    with manual.driver.changed:
        # The loss of the peer is seen at the deadline, the read is not over.
        assert _wait(manual, lambda: manual.remote.broken is not None)
    assert not read.done and not manual.agent.forgotten
    manual.agent.let(PAGE)
    # The pages came after all: right bytes, checked by the cookie.
    assert read.take(LIMIT_S) == [OK] and buffers[0] == manual.source[:PAGE]
    with manual.driver.changed:
        assert _wait(manual, lambda: manual.agent.forgotten == ["peer"])


def test_h1_a_late_cookie_ends_the_read_at_its_deadline(manual: Rig) -> None:
    manual.agent.held = {COOKIE_BYTES}
    read, buffers = manual.begin(timeout_s=5.0)
    assert manual.agent.wait_started(COOKIE_BYTES, LIMIT_S)
    advance(manual, 6.0)
    assert read.take(LIMIT_S) == [FAILED]
    assert read.error is not None and "deadline passed" in read.error
    assert not any(buffers[0])
    manual.driver.check()
    assert not manual.agent.forgotten, "its cookie is still under way"
    manual.agent.let(COOKIE_BYTES)
    with manual.driver.changed:
        assert _wait(manual, lambda: manual.agent.forgotten == ["peer"])


def test_h1_queued_reads_end_at_their_deadline(rig: Rig) -> None:
    rig.agent.held = {PAGE}
    stuck = [rig.begin()[0] for _ in range(RUNNING_MAX)]
    assert rig.agent.wait_started(PAGE, LIMIT_S)
    late, _ = rig.begin(timeout_s=0.2)
    assert late.take(LIMIT_S) == [FAILED]
    assert late.error is not None and "before its turn" in late.error
    assert not any(read.done for read in stuck)
    rig.agent.let(PAGE)
    assert [read.take(LIMIT_S) for read in stuck] == [[OK]] * RUNNING_MAX


def test_h1_a_callback_that_blocks_makes_no_read_late(rig: Rig) -> None:
    entered, leave = threading.Event(), threading.Event()

    def block() -> None:
        entered.set()
        leave.wait(LIMIT_S)

    rig.agent.held = {PAGE}
    first, _ = rig.begin()
    first.add_done_callback(block)
    rig.agent.let(PAGE)
    assert entered.wait(LIMIT_S)
    late, _ = rig.begin(timeout_s=0.2)
    assert late.take(LIMIT_S) == [FAILED]
    assert late.error is not None and "before its turn" in late.error
    assert not leave.is_set()
    leave.set()
    assert rig.begin()[0].take(LIMIT_S) == [OK]


def test_a_failed_transfer_is_drained_before_it_is_reported(manual: Rig) -> None:
    manual.agent.failing = {PAGE}
    read, _ = manual.begin(timeout_s=100.0)
    with manual.driver.changed:
        assert _wait(manual, lambda: manual.agent.progressed > 0)
    assert not read.done and manual.remote.broken == "of the test"
    advance(manual, DRAIN_S)
    assert read.take(LIMIT_S) == [FAILED]
    with manual.driver.changed:
        assert _wait(manual, lambda: manual.agent.forgotten == ["peer"])
    again, _ = manual.begin()
    assert again.take(LIMIT_S) == [FAILED] and again.error is not None
    assert "of the test" in again.error


def test_h2_a_bug_costs_one_read(rig: Rig) -> None:
    rig.agent.failing, rig.agent.raises = {COOKIE_BYTES}, LookupError
    read, _ = rig.begin()
    assert read.take(LIMIT_S) == [FAILED]
    assert read.error is not None and "LookupError" in read.error
    assert rig.driver.restarts == 1
    rig.agent.failing = set()
    rig.remote = Remote("another", {}, users=1)
    assert rig.begin()[0].take(LIMIT_S) == [OK]


def test_l2_destinations_that_nixl_does_not_know_are_registered_for_the_read(rig: Rig) -> None:
    known = list(rig.agent.registered)
    read, buffers = rig.begin(pages=2, foreign=True)
    assert read.take(LIMIT_S) == [OK] * 2 and buffers[1] == rig.source[PAGE : 2 * PAGE]
    rig.agent.failing = {PAGE}
    assert rig.begin(foreign=True)[0].take(LIMIT_S) == [FAILED]
    assert rig.agent.registered == known


def test_dropped_pieces_end_and_running_ones_are_waited_for(rig: Rig) -> None:
    rig.agent.held = {PAGE}
    running = [rig.begin()[0] for _ in range(RUNNING_MAX)]
    assert rig.agent.wait_started(PAGE, LIMIT_S)
    queued, _ = rig.begin()
    with rig.driver.changed:
        assert _wait(rig, lambda: len(rig.driver._running) == RUNNING_MAX)
    rig.agent.let(PAGE)
    rig.driver.drop(rig.hear)
    assert queued.done
    assert all(read.done for read in running)


def test_closing_gives_back_what_never_ended(manual: Rig) -> None:
    manual.agent.held = {PAGE}
    read, _ = manual.begin()
    assert manual.agent.wait_started(PAGE, LIMIT_S)
    manual.driver._closing = True
    with manual.driver.changed:
        manual.driver.changed.notify_all()
    # The driver waits STOP_S of its clock for the transfer; the agent is closed after that.
    while manual.driver._thread is not None and manual.driver._thread.is_alive():
        advance(manual, 1.0)
        manual.driver._thread.join(0.05)
    assert not read.done
    manual.agent.close()
    manual.driver.abandon()
    assert read.take(0.0) == [FAILED]
    assert manual.begin()[0].take(0.0) == [FAILED], "closed"


def _wait(rig: Rig, true: object) -> bool:
    """Under the driver's lock: until it is so. The fake changes without telling, so it is asked
    for again and again."""
    assert callable(true)
    for _ in range(int(LIMIT_S * 100)):
        if true():
            return True
        rig.driver.changed.wait(0.01)
    return False
