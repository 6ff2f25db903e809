"""The client against a fake daemon: what it stores it gets back, and what goes wrong is a miss."""

from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import Sequence

import pytest

from tests.support.fake_daemon import FakeDaemon, HangUpError
from tests.unit.client.conftest import PAGE_BYTES, QUICK, Connect
from tierkv.client import ChecksumPolicy, Client, ClientSettings, DaemonAwayError, RefusedError
from tierkv.protocol.frames import encode_answer, encode_error
from tierkv.protocol.messages import Verb, WireCode
from tierkv.protocol.requests import Commit, Request
from tierkv.storage.errors import ConfigError
from tierkv.storage.types import CommitOutcome, PageKey, TierName

KEYS = [PageKey(bytes([number]) * 32) for number in range(1, 17)]
WAIT_S = 10.0
MODES = pytest.mark.parametrize("mode", ["shared", "stream"])


def page(number: int) -> bytes:
    return bytes([number]) * PAGE_BYTES


def store(client: Client, keys: Sequence[PageKey]) -> list[CommitOutcome]:
    with client.reserve(len(keys)) as reservation:
        for key, view in zip(keys, reservation.views, strict=True):
            view[:] = page(key[0])
        return reservation.commit(keys)


def taken(client: Client, keys: Sequence[PageKey]) -> list[bytes]:
    with client.fetch(keys, WAIT_S).take(WAIT_S) as lease:
        return [bytes(view) for view in lease.views]


@MODES
def test_pages_come_back_as_they_went(daemon: FakeDaemon, connect: Connect, mode: str) -> None:
    client = connect(mode=mode)
    assert client.lookup(KEYS[:3]) == [None, None, None]
    assert store(client, KEYS[:3]) == [CommitOutcome.COMMITTED] * 3
    assert client.lookup(KEYS[:4]) == [TierName.HOST] * 3 + [None]
    with client.fetch(KEYS[:4], WAIT_S).take(WAIT_S) as lease:
        assert lease.keys == KEYS[:3]
        assert [bytes(view) for view in lease.views] == [page(1), page(2), page(3)]
        assert lease.tiers == [TierName.HOST] * 3
        assert all(view.readonly for view in lease.views)
    assert store(client, KEYS[2:4]) == [CommitOutcome.EXISTS, CommitOutcome.COMMITTED]
    assert daemon.wait_for(lambda: daemon.held() == (0, 0))
    assert client.held() == (0, 0)


def test_l2_a_lease_is_held_until_it_is_released(daemon: FakeDaemon, connect: Connect) -> None:
    client = connect()
    store(client, KEYS[:2])
    lease = client.fetch(KEYS[:2], WAIT_S).take(WAIT_S)
    assert client.held() == daemon.held() == (1, 0)
    lease.release()
    lease.release()
    assert daemon.wait_for(lambda: daemon.held() == (0, 0))
    assert daemon.count(Verb.RELEASE) == 1


def test_l2_an_uncommitted_reservation_is_given_back(daemon: FakeDaemon, connect: Connect) -> None:
    client = connect()
    free = len(daemon.free)
    with client.reserve(5) as reservation:
        assert len(reservation.views) == len(reservation.slots) == 5
    assert reservation.views == []
    assert daemon.wait_for(lambda: len(daemon.free) == free)


@MODES
def test_l2_a_cancelled_fetch_gives_its_late_lease_back(
    daemon: FakeDaemon, connect: Connect, mode: str
) -> None:
    client = connect(mode=mode)
    store(client, KEYS[:2])
    entered, go_on = threading.Event(), threading.Event()

    def slow(request: Request) -> None:
        if request.verb is Verb.LEASE:
            entered.set()
            assert go_on.wait(WAIT_S)

    daemon.fault = slow
    fetch = client.fetch(KEYS[:2], WAIT_S)
    assert entered.wait(WAIT_S)
    fetch.cancel()
    assert fetch.done
    go_on.set()
    assert daemon.wait_for(lambda: daemon.count(Verb.RELEASE) == 1)
    assert daemon.wait_for(lambda: daemon.held() == (0, 0))


@MODES
def test_p4_completion_wakes_whoever_asked(daemon: FakeDaemon, connect: Connect, mode: str) -> None:
    client = connect(mode=mode)
    store(client, KEYS[:2])
    told = threading.Event()
    fetch = client.fetch(KEYS[:2], WAIT_S)
    fetch.add_done_callback(told.set)
    assert told.wait(WAIT_S)
    assert fetch.done
    with fetch.take(0.0) as lease:
        assert len(lease.keys) == 2


@MODES
def test_h1_a_fetch_ends_at_its_deadline(daemon: FakeDaemon, connect: Connect, mode: str) -> None:
    client = connect(mode=mode)
    store(client, KEYS[:1])
    daemon.fault = lambda request: b"" if request.verb is Verb.LEASE else None
    told = threading.Event()
    fetch = client.fetch(KEYS[:1], 0.05)
    fetch.add_done_callback(told.set)
    assert told.wait(WAIT_S)
    assert fetch.done
    with fetch.take(WAIT_S) as lease:
        assert lease.keys == []


def test_h1_a_silent_daemon_is_a_miss_and_then_is_not_asked(
    daemon: FakeDaemon, connect: Connect
) -> None:
    client = connect(settings=ClientSettings(call_s=0.02, breaker_failures=2, breaker_open_s=60.0))
    daemon.fault = lambda request: b""
    for _ in range(2):
        assert client.lookup(KEYS[:2]) == [None, None]
    asked = daemon.count(Verb.LOOKUP)
    assert client.lookup(KEYS[:2]) == [None, None]
    assert client.reserve(2).views == []
    assert client.fetch(KEYS[:2], WAIT_S).done
    assert daemon.count(Verb.LOOKUP) == asked == 2
    assert client.stats().breaker_open


def test_h4_a_daemon_that_owes_answers_for_long_is_met_anew(
    daemon: FakeDaemon, connect: Connect
) -> None:
    settings = ClientSettings(call_s=0.02, silence_s=0.05, backoff_first_s=0.01)
    client = connect(settings=settings)
    daemon.fault = lambda request: b"" if request.verb is Verb.LOOKUP else None
    client.lookup(KEYS[:1])
    assert daemon.wait_for(lambda: daemon.count(Verb.HELLO) == 2)
    daemon.fault = lambda request: None


@MODES
def test_h4_everything_held_ends_with_the_connection(
    daemon: FakeDaemon, connect: Connect, mode: str
) -> None:
    client = connect(mode=mode)
    store(client, KEYS[:2])
    fetched = client.fetch(KEYS[:1], WAIT_S).take(WAIT_S)
    reserved = client.reserve(2)
    under_way = client.fetch(KEYS[:1], WAIT_S)
    token = client.boot_token
    daemon.stop()
    under_way.take(WAIT_S).release()
    # The memory stays: a thread in the middle of a copy must not fault.
    reserved.views[0][:] = page(9)
    if mode == "shared":
        assert not fetched.intact
    assert bytes(fetched.views[0][:4]) == page(1)[:4]
    assert reserved.commit(KEYS[4:6]) == [CommitOutcome.FAILED] * 2
    fetched.release()
    assert client.lookup(KEYS[:1]) == [None]
    daemon.start()
    assert client.wait_connected(WAIT_S)
    assert client.boot_token != token
    assert client.connections == 2
    assert taken(client, KEYS[:2]) == [page(1), page(2)]


def test_h4_a_client_may_start_before_its_daemon(daemon: FakeDaemon, connect: Connect) -> None:
    daemon.stop()
    client = connect()
    assert not client.connected
    assert client.lookup(KEYS[:2]) == [None, None]
    assert client.reserve(2).views == []
    client.touch(KEYS)
    assert client.prefetch(KEYS) == 0
    assert not client.flush(0.1)
    with client.fetch(KEYS, WAIT_S).take(WAIT_S) as lease:
        assert lease.keys == []
    assert client.submit_lookup(KEYS[:1]).result(WAIT_S) == [None]
    degraded = client.stats().degraded
    assert degraded is not None
    with pytest.raises(DaemonAwayError):
        client.namespaces()
    daemon.start()
    assert client.wait_connected(WAIT_S)
    assert store(client, KEYS[:1]) == [CommitOutcome.COMMITTED]


def test_h2_a_connection_lost_at_any_verb_is_a_miss(daemon: FakeDaemon, connect: Connect) -> None:
    client = connect()
    store(client, KEYS[:2])
    for verb in (Verb.LOOKUP, Verb.RESERVE, Verb.LEASE, Verb.COMMIT, Verb.FLUSH, Verb.STATS):
        assert client.wait_connected(WAIT_S)

        def hang_up(request: Request, verb: Verb = verb) -> None:
            if request.verb is verb:
                raise HangUpError

        daemon.fault = hang_up
        client.lookup(KEYS[:1])
        with client.reserve(1) as reservation:
            reservation.commit(KEYS[5 : 5 + len(reservation.views)])
        client.fetch(KEYS[:1], WAIT_S).take(WAIT_S).release()
        client.flush(1.0)
        client.stats()
        client.check()
        daemon.fault = lambda request: None
    assert client.wait_connected(WAIT_S)
    assert taken(client, KEYS[:2]) == [page(1), page(2)]


def test_refusals_are_misses_for_engines_and_errors_for_operators(
    daemon: FakeDaemon, connect: Connect
) -> None:
    client = connect()
    daemon.fault = lambda request: encode_error(request.request_id, WireCode.LIMIT, "too many")
    assert client.lookup(KEYS[:1]) == [None]
    assert client.reserve(1).views == []
    assert client.fetch(KEYS[:1], WAIT_S).take(WAIT_S).keys == []
    with pytest.raises(RefusedError, match="too many") as caught:
        client.drop(keys=KEYS[:1])
    assert caught.value.code == WireCode.LIMIT
    assert client.connected


NOWHERE = {"lease": 1, "slots": b"\xff" * 4, "tiers": b"\x01", "checksums": b""}


@pytest.mark.parametrize(
    ("verb", "fields"),
    [
        (Verb.LOOKUP, {"tiers": b"\x01", "more": 1}),
        (Verb.LOOKUP, {"tiers": b"\x09"}),
        (Verb.RESERVE, {"reservation": 1, "slots": b"\xff\xff\xff\xff"}),
        (
            Verb.LEASE,
            {"lease": 1, "slots": b"\xff\xff\xff\xff", "tiers": b"\x01", "checksums": b""},
        ),
        (Verb.LEASE, {"lease": 1, "slots": bytes(8), "tiers": b"\x01\x01", "checksums": b""}),
    ],
)
def test_a1_a_daemon_that_lies_costs_the_connection_and_serves_nothing(
    daemon: FakeDaemon, connect: Connect, verb: Verb, fields: dict[str, object]
) -> None:
    client = connect()
    daemon.fault = lambda request: (
        encode_answer(request.request_id, fields) if request.verb is verb else None
    )
    assert client.lookup(KEYS[:1]) == [None]
    assert client.reserve(1).views == [] or verb is not Verb.RESERVE
    assert client.fetch(KEYS[:1], WAIT_S).take(WAIT_S).keys == []
    assert daemon.wait_for(lambda: daemon.count(Verb.HELLO) >= 2)


def test_an_answer_to_nobodys_question_costs_the_connection(
    daemon: FakeDaemon, connect: Connect
) -> None:
    client = connect()
    daemon.fault = lambda request: (
        encode_answer(999, {"tiers": b"\x01"}) if request.verb is Verb.LOOKUP else None
    )
    assert client.lookup(KEYS[:1]) == [None]
    assert daemon.wait_for(lambda: daemon.count(Verb.HELLO) >= 2)


@pytest.mark.parametrize(
    ("code", "message"), [(WireCode.VERSION, "speaks version 2"), (WireCode.PEER, "uid 7 may not")]
)
def test_a_daemon_that_will_not_serve_this_client_is_a_mistake(
    daemon: FakeDaemon, connect: Connect, code: WireCode, message: str
) -> None:
    daemon.fault = lambda request: encode_error(0, code, message)
    with pytest.raises(ConfigError, match=message):
        connect()


def test_another_page_size_is_a_mistake(daemon: FakeDaemon, connect: Connect) -> None:
    with pytest.raises(ConfigError, match=f"{PAGE_BYTES} bytes.*8192"):
        connect(page_bytes=8192)


def test_a_daemon_of_another_version_is_a_mistake(daemon: FakeDaemon, connect: Connect) -> None:
    daemon.hello = {"version": 2}
    with pytest.raises(ConfigError, match="version 2"):
        connect()


def test_checksums_of_the_client_go_along(daemon: FakeDaemon, connect: Connect) -> None:
    store(connect(), KEYS[:1])
    policy = ClientSettings(checksum_policy=ChecksumPolicy.CLIENT)
    store(connect(settings=policy), KEYS[1:2])
    sent = [request.body for request in daemon.requests if isinstance(request.body, Commit)]
    assert [len(body.checksums) for body in sent] == [0, 16]


@MODES
def test_w7_a_page_that_changed_ends_the_run_when_the_client_verifies(
    daemon: FakeDaemon, connect: Connect, mode: str
) -> None:
    client = connect(mode=mode)
    store(client, KEYS[:3])
    daemon.write(daemon.pages[KEYS[1]], page(99))
    with client.fetch(KEYS[:3], WAIT_S, verify=True).take(WAIT_S) as lease:
        assert lease.keys == KEYS[:1]
        assert len(lease.views) == len(lease.tiers) == 1
    assert daemon.wait_for(lambda: daemon.held() == (0, 0))


def test_many_threads_share_one_connection(daemon: FakeDaemon, connect: Connect) -> None:
    client = connect()
    store(client, KEYS[:8])
    wrong: list[object] = []

    def work(number: int) -> None:
        for turn in range(40):
            first = (number + turn) % 8
            if client.lookup([KEYS[first], KEYS[12]]) != [TierName.HOST, None]:
                wrong.append((number, turn, "lookup"))
            fetch = client.fetch(KEYS[first : first + 1], WAIT_S)
            if turn % 3 == 0:
                told = threading.Event()
                fetch.add_done_callback(told.set)
                if not told.wait(WAIT_S):
                    wrong.append((number, turn, "callback"))
            with fetch.take(WAIT_S) as lease:
                if [bytes(view) for view in lease.views] != [page(first + 1)]:
                    wrong.append((number, turn, "page"))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert wrong == []
    assert daemon.wait_for(lambda: daemon.held() == (0, 0))
    assert client.connections == 1


def test_many_requests_in_flight(daemon: FakeDaemon, connect: Connect) -> None:
    client = connect()
    store(client, KEYS[:1])
    futures = [client.submit_lookup([KEYS[number % 2]]) for number in range(1000)]
    found = [future.result(WAIT_S) for future in futures]
    assert found == [[TierName.HOST], [None]] * 500


def test_operators_verbs(daemon: FakeDaemon, connect: Connect) -> None:
    client = connect()
    store(client, KEYS[:2])
    assert client.namespaces()[0]["pages"] == {"host": 1}
    assert client.prefetch(KEYS[:2]) == 2
    assert client.drop(keys=KEYS[:5]) == 2
    assert client.lookup(KEYS[:2]) == [None, None]
    assert client.flush(1.0)
    operator = connect(page_bytes=0)
    assert operator.connected
    assert operator.flush(1.0)


def test_lookups_longer_than_one_request_are_split(daemon: FakeDaemon, connect: Connect) -> None:
    client = connect()
    store(client, KEYS[:2])
    many = [*KEYS[:2], *[PageKey(number.to_bytes(32, "big")) for number in range(1, 9000)]]
    found = client.lookup(many)
    assert len(found) == len(many)
    assert found[:3] == [TierName.HOST, TierName.HOST, None]
    assert daemon.count(Verb.LOOKUP) == 3


def test_r3_a_client_does_not_keep_the_arenas_lock(daemon: FakeDaemon, connect: Connect) -> None:
    fcntl.flock(daemon.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    path = f"/proc/self/fd/{daemon.fd}"
    client = connect()
    successor = os.open(path, os.O_RDWR)
    # The daemon's own descriptor goes; the client's mapping stays.
    old, daemon.fd = daemon.fd, os.memfd_create("next", os.MFD_CLOEXEC)
    os.close(old)
    fcntl.flock(successor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(successor)
    assert client.connected


@pytest.mark.parametrize("name", ["call_s", "hold_s", "breaker_failures"])
def test_settings_are_above_zero(name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        ClientSettings(**{name: 0})


def test_closing_twice_and_using_afterwards(daemon: FakeDaemon) -> None:
    client = Client(daemon.path, PAGE_BYTES, settings=QUICK)
    client.close()
    client.close()
    assert client.lookup(KEYS[:1]) == [None]
    assert not client.connected
