"""Holds: limits, deadlines, quarantine, and the conservation of slots under random use."""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.pages import page_key
from tierkv.daemon.page_class import PageClass, store_config
from tierkv.daemon.peers import Peer, Quarantine
from tierkv.daemon.session import HoldTimer, Session
from tierkv.daemon.settings import DaemonConfig
from tierkv.protocol.errors import ProtocolError
from tierkv.protocol.messages import Limits, Mode, WireCode
from tierkv.storage.store import TieredStore
from tierkv.storage.tiers.host import HostTier

PAGE_BYTES = 4096
PAGES = 64
SEED = 20261129
WAIT_S = 30.0


@pytest.fixture
def pages(tmp_path: Path) -> Iterator[PageClass]:
    size = HostTier.capacity_for(PAGE_BYTES, PAGES)
    config = DaemonConfig(host_bytes=size)
    wanted = store_config(config, PAGE_BYTES, tmp_path / "arena", None, size, 0)
    made = PageClass(TieredStore.open(wanted), config, tmp_path / "holders", size, 0)
    yield made
    made.close()


class Bench:
    """What a session needs, on the running loop."""

    def __init__(self, pages: PageClass, limits: Limits | None = None) -> None:
        loop = asyncio.get_running_loop()
        self.pages = pages
        self.timer = HoldTimer(loop)
        self.quarantine = Quarantine(loop)
        self.limits = limits or Limits()

    def session(self, peer: Peer, mode: Mode = Mode.SHARED) -> Session:
        return Session(peer, mode, None, self.pages, self.limits, self.timer, self.quarantine)

    def reserve(self, session: Session, count: int, hold_s: float = 60.0) -> int:
        session.check_reservation_room(count)
        return session.add_reservation(self.pages.store.reserve(count), hold_s).number

    @property
    def reserved(self) -> int:
        return self.pages.store.stats().tiers[0].reserved_pages


def me() -> Peer:
    return Peer(os.getpid(), os.getuid(), os.pidfd_open(os.getpid()))


async def one_turn() -> None:
    """Let the loop do what is due."""
    turned = asyncio.get_running_loop().create_future()
    asyncio.get_running_loop().call_soon(turned.set_result, None)
    await turned


async def until(what: object, *, seconds: float = WAIT_S) -> None:
    """Let the loop run until `what()` is true, within a bound."""
    async with asyncio.timeout(seconds):
        while not what():  # type: ignore[operator]
            await one_turn()


async def test_l2_released_reservation_is_free_at_once(pages: PageClass) -> None:
    bench = Bench(pages)
    session = bench.session(me())
    number = bench.reserve(session, 8)
    assert bench.reserved == 8 and pages.holders.living()
    session.end(session.reservation(number))
    assert bench.reserved == 0 and not pages.holders.living()
    with pytest.raises(ProtocolError) as caught:
        session.reservation(number)
    assert caught.value.code == WireCode.NOT_RESERVED
    session.check()


async def test_expired_reservation_waits_for_the_end_of_its_process(pages: PageClass) -> None:
    bench = Bench(pages)
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    peer = Peer(child.pid, os.getuid(), os.pidfd_open(child.pid))
    session = bench.session(peer)
    bench.reserve(session, 8, hold_s=0.0)
    await until(lambda: bench.timer.expired == 1)
    assert bench.quarantine.pages == 8 and bench.reserved == 8 and session.reserved_pages == 8
    session.close()
    bench.quarantine.leave(peer)
    bench.quarantine.check()
    session.check()
    child.kill()
    await until(lambda: bench.quarantine.pages == 0)
    assert bench.reserved == 0 and session.reserved_pages == 0 and not peer.known
    bench.quarantine.check()
    child.communicate()


async def test_stream_client_has_no_mapping_to_wait_for(pages: PageClass) -> None:
    bench = Bench(pages)
    session = bench.session(me(), Mode.STREAM)
    bench.reserve(session, 8)
    session.close()
    assert bench.reserved == 0 and bench.quarantine.pages == 0


async def test_hold_in_use_ends_when_its_work_does(pages: PageClass) -> None:
    bench = Bench(pages)
    session = bench.session(me(), Mode.STREAM)
    hold = session.reservation(bench.reserve(session, 4))
    hold.enter()
    hold.enter()
    session.close()
    assert bench.reserved == 4 and not session.reservations
    hold.leave()
    assert bench.reserved == 4
    hold.leave()
    assert bench.reserved == 0 and session.reserved_pages == 0
    session.check()


async def test_limits_are_kept_at_and_past_them(pages: PageClass) -> None:
    limits = Limits(reservations=2, reserved_pages=10, leases=1, leased_pages=4)
    bench = Bench(pages, limits)
    session = bench.session(me())
    bench.reserve(session, 10)
    for count in (1, 11):
        with pytest.raises(ProtocolError) as caught:
            session.check_reservation_room(count)
        assert caught.value.code == WireCode.LIMIT
    session.await_lease(4)
    with pytest.raises(ProtocolError):
        session.await_lease(1)
    session.lease_arrived(4)
    with pytest.raises(ProtocolError):
        session.await_lease(5)
    session.close()
    session.check()


async def test_l2_random_use_conserves_slots(pages: PageClass) -> None:
    print(f"seed={SEED}")
    rng = random.Random(SEED)
    bench = Bench(pages, replace(Limits(), reservations=8, leases=8, reserved_pages=24))
    sessions = [bench.session(me(), Mode.STREAM) for _ in range(3)]
    number = 0
    for _ in range(600):
        session = rng.choice(sessions)
        action = rng.randrange(6)
        try:
            if action == 0:
                bench.reserve(session, rng.randint(1, 6), rng.choice([0.0, 60.0]))
            elif action == 1 and session.reservations:
                hold = session.reservation(rng.choice(list(session.reservations)))
                hold.enter()
                session.end(hold)
                keys = [page_key(number + each) for each in range(rng.randint(0, hold.pages))]
                number += len(keys)
                hold.reservation.commit(keys)
                hold.leave()
            elif action == 2 and session.reservations:
                session.end(session.reservation(rng.choice(list(session.reservations))))
            elif action == 3 and number:
                session.await_lease(1)
                lease = pages.fetch([page_key(rng.randrange(number))], 0.0).take(0.0)
                session.lease_arrived(1)
                if lease.keys:
                    session.add_lease(lease, rng.choice([0.0, 60.0]))
            elif action == 4 and session.leases:
                session.end(session.lease(rng.choice(list(session.leases))))
            elif action == 5 and rng.random() < 0.05:
                session.close()
                sessions[sessions.index(session)] = bench.session(me(), Mode.STREAM)
        except ProtocolError as error:
            assert error.code == WireCode.LIMIT
        await one_turn()
        for each in sessions:
            each.check()
        assert bench.reserved == sum(each.reserved_pages for each in sessions)
    for each in sessions:
        each.close()
    assert bench.reserved == 0 and pages.store.stats().tiers[0].leased_pages == 0
    pages.store.check()
