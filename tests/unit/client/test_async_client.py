"""AsyncClient against a fake daemon."""

from __future__ import annotations

import asyncio
import threading

import pytest

from tests.support.fake_daemon import FakeDaemon
from tests.unit.client.conftest import PAGE_BYTES, QUICK
from tierkv.client import AsyncClient, ClientSettings, DaemonAwayError
from tierkv.protocol.messages import Verb
from tierkv.storage.types import CommitOutcome, PageKey, TierName

KEYS = [PageKey(bytes([number]) * 32) for number in range(1, 17)]
WAIT_S = 10.0


def client_of(daemon: FakeDaemon, **options: object) -> AsyncClient:
    options = {"settings": QUICK, **options}
    return AsyncClient(daemon.path, PAGE_BYTES, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("mode", ["shared", "stream"])
async def test_pages_come_back_as_they_went(daemon: FakeDaemon, mode: str) -> None:
    async with client_of(daemon, mode=mode) as client:
        async with await client.reserve(3) as reservation:
            for number, view in enumerate(reservation.views):
                view[:] = bytes([number]) * PAGE_BYTES
            assert await reservation.commit(KEYS[:3]) == [CommitOutcome.COMMITTED] * 3
        assert await client.lookup(KEYS[:4]) == [TierName.HOST] * 3 + [None]
        with await client.fetch(KEYS[:4], WAIT_S) as lease:
            assert lease.keys == KEYS[:3]
            assert [view[0] for view in lease.views] == [0, 1, 2]
        assert await client.drop(keys=KEYS[:1]) == 1
        assert await client.flush(1.0)
    assert daemon.wait_for(lambda: daemon.held() == (0, 0))


async def test_many_in_flight(daemon: FakeDaemon) -> None:
    async with client_of(daemon) as client:
        found = await asyncio.gather(*[client.lookup(KEYS[:1]) for _ in range(2000)])
        assert found == [[None]] * 2000


async def test_h4_away_is_a_miss_and_then_it_is_back(daemon: FakeDaemon) -> None:
    async with client_of(daemon) as client:
        held = await client.fetch(KEYS[:1], WAIT_S)
        reserved = await client.reserve(1)
        await asyncio.to_thread(daemon.stop)
        assert await client.lookup(KEYS[:2]) == [None, None]
        assert (await client.fetch(KEYS[:1], WAIT_S)).keys == []
        assert await reserved.commit(KEYS[:1]) == [CommitOutcome.FAILED]
        held.release()
        with pytest.raises(DaemonAwayError):
            await client.namespaces()
        daemon.start()
        assert await client.wait_connected(WAIT_S)
        assert len((await client.reserve(1)).views) == 1


async def test_l2_a_lease_that_comes_too_late_is_given_back(daemon: FakeDaemon) -> None:
    go_on = threading.Event()

    def slow(request: object) -> None:
        if getattr(request, "verb", None) is Verb.RESERVE:
            assert go_on.wait(WAIT_S)

    daemon.fault = slow
    async with client_of(daemon, settings=ClientSettings(call_s=0.02)) as client:
        assert (await client.reserve(1)).views == []
        go_on.set()
        await asyncio.to_thread(daemon.wait_for, lambda: daemon.count(Verb.RELEASE) == 1)
        assert daemon.held() == (0, 0)
