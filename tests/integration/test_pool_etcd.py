"""Membership from a real etcd: killed with -9, paused, emptied, restarted; members that die."""

from __future__ import annotations

import base64
import json
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.support.etcd_process import EtcdProcess, etcd_process
from tierkv.storage.clock import SystemClock
from tierkv.storage.errors import ConfigError
from tierkv.storage.pool.config import Address, PoolConfig
from tierkv.storage.pool.etcd import Announcement, EtcdMembership
from tierkv.storage.pool.members import open_membership

PREFIX = "/tierkv/pool"
LEASE_S = 2.0
WAIT_S = 30.0


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[EtcdProcess]:
    with etcd_process(tmp_path) as process:
        yield process


class Member:
    """One node's membership, with all that it was ever told."""

    def __init__(self, etcd: EtcdProcess, number: int, prefix: str = PREFIX) -> None:
        self.address = Address("127.0.0.1", 7000 + number)
        config = PoolConfig(
            self.address,
            name=f"node{number}",
            open_pool=True,
            etcd=etcd.address,
            etcd_prefix=prefix,
        )
        config.validate()
        self.name = config.own_name
        self.membership = EtcdMembership(
            config, SystemClock(), lease_s=LEASE_S, poll_s=0.05, timeout_s=0.5
        )
        self.lists: list[tuple[int, ...]] = []
        self.later: list[int] = []
        self.fail_next: Exception | None = None
        self.epoch = 0

    def changed(self) -> None:
        failure, self.fail_next = self.fail_next, None
        if failure is not None:
            raise failure
        self.lists.append(self.ports())

    def ports(self) -> tuple[int, ...]:
        """The others, by their numbers."""
        return tuple(address.port - 7000 for address in self.membership.members())

    def start(self) -> Member:
        self.membership.start(self.changed, self.raise_epoch)
        return self

    def join(self, epoch: int) -> Member:
        self.epoch = epoch
        self.membership.join(self.address, self.name, epoch)
        return self

    def raise_epoch(self, other: int) -> None:
        """What the pool does when it hears of a later epoch under its name."""
        self.later.append(other)
        self.join(max(self.epoch, other) + 1)

    def await_others(self, *numbers: int) -> None:
        until(lambda: self.ports() == numbers, lambda: f"{self.name} sees {self.ports()}")

    def await_well(self) -> None:
        until(lambda: self.membership.problem() is None, self.membership.problem)

    def await_problem(self, words: str) -> None:
        until(lambda: words in (self.membership.problem() or ""), self.membership.problem)


@pytest.fixture
def member(etcd: EtcdProcess) -> Iterator[Callable[..., Member]]:
    """Makes members that are closed at the end."""
    with ExitStack() as stack:

        def make(number: int, **changes: Any) -> Member:
            made = Member(etcd, number, **changes)
            stack.callback(made.membership.close)
            return made

        yield make


def until(wanted: Callable[[], bool], told: Callable[[], object]) -> None:
    """Ask until `wanted`, or fail at the deadline with what was `told` last."""
    deadline = time.monotonic() + WAIT_S
    pause = threading.Event()
    while not wanted():
        assert time.monotonic() < deadline, told()
        pause.wait(0.01)


def raw(etcd: EtcdProcess) -> Any:
    """A client of the test's own: an operator, or somebody who writes nonsense."""
    import etcd3gw

    client = etcd3gw.Etcd3Client("127.0.0.1", etcd.port, timeout=5, api_path="/v3/")
    client.session.trust_env = False
    return client


def value_of(etcd: EtcdProcess, number: int) -> dict[str, Any]:
    found = raw(etcd).get(f"{PREFIX}/node{number}")
    return dict(json.loads(found[0])) if found else {}


def test_members_find_each_other_and_leave(
    member: Callable[..., Member], etcd: EtcdProcess
) -> None:
    one, two = member(1).start().join(11), member(2).start().join(22)
    one.await_others(2)
    two.await_others(1)
    one.await_well()
    assert value_of(etcd, 1) | {"life": ""} == {
        "format": 1,
        "name": "node1",
        "address": "127.0.0.1:7001",
        "epoch": 11,
        "life": "",
    }
    three = member(3).start()
    three.await_others(1, 2)
    assert one.ports() == (2,), "who only looks on is no member"
    three.join(1)
    one.await_others(2, 3)
    two.membership.leave()
    assert value_of(etcd, 2) == {}, "gone when leave() returns, not a lease later"
    one.await_others(3)
    two.join(23)
    one.await_others(2, 3)
    assert one.lists == [(2,), (2, 3), (3,), (2, 3)], "told of each change once"
    assert one.later == two.later == []


def test_a_member_that_died_goes_with_its_lease_and_others_stay(
    member: Callable[..., Member], etcd: EtcdProcess
) -> None:
    one, two, three = (member(number).start().join(1) for number in (1, 2, 3))
    one.await_others(2, 3)
    client = raw(etcd)
    written = client.get(f"{PREFIX}/node3", metadata=True)
    started = time.monotonic()
    # Without leave(): as killed, its lease is not renewed any more.
    two.membership.close()
    one.await_others(3)
    # Several leases later the one that lives is still there, by the same lease: it renews.
    until(lambda: time.monotonic() > started + 3 * LEASE_S, lambda: "time does not pass")
    assert client.get(f"{PREFIX}/node3", metadata=True) == written
    assert one.ports() == (3,) and three.ports() == (1,)


def test_h4_etcd_killed_and_restarted_the_list_stays(
    member: Callable[..., Member], etcd: EtcdProcess
) -> None:
    one, two = member(1).start().join(1), member(2).start().join(1)
    one.await_others(2)
    two.await_others(1)
    etcd.kill()
    one.await_problem("no connection; check pool.etcd")
    one.await_problem("the last list of 1 members stays")
    assert one.ports() == (2,)
    two.membership.leave()
    two.join(5)
    assert one.ports() == (2,)
    etcd.start()
    one.await_well()
    two.await_well()
    until(lambda: value_of(etcd, 2).get("epoch") == 5, lambda: value_of(etcd, 2))
    assert one.ports() == (2,) and one.lists == [(2,)], "never empty in between"


def test_r2_etcd_comes_back_empty_the_list_stays(
    member: Callable[..., Member], etcd: EtcdProcess
) -> None:
    """Everybody has to announce itself again, and has one lease of time for it."""
    one, two, three = (member(number).start().join(1) for number in (1, 2, 3))
    one.await_others(2, 3)
    two.await_others(1, 3)
    etcd.kill()
    one.await_problem("no connection")
    three.membership.close()
    etcd.wipe()
    etcd.start()
    until(lambda: bool(value_of(etcd, 1) and value_of(etcd, 2)), lambda: "not announced again")
    one.await_others(2)
    one.await_well()
    assert one.lists[-2:] == [(2, 3), (2,)], one.lists
    assert all(numbers for numbers in one.lists), "empty because of an outage"


def test_h1_etcd_that_accepts_and_never_answers(
    member: Callable[..., Member], etcd: EtcdProcess
) -> None:
    one, two = member(1).start().join(1), member(2).start().join(1)
    one.await_others(2)
    etcd.pause()
    try:
        one.await_problem("no answer in 0.5 s")
        assert one.ports() == (2,)
        one.join(3)
        begun = time.monotonic()
        two.membership.leave()
        two.membership.close()
        assert time.monotonic() - begun < WAIT_S, "leave and close have deadlines"
    finally:
        etcd.go_on()
    one.await_well()
    until(lambda: value_of(etcd, 1).get("epoch") == 3, lambda: value_of(etcd, 1))


def test_started_before_etcd(member: Callable[..., Member], etcd: EtcdProcess) -> None:
    etcd.kill()
    one = member(1).start().join(1)
    one.await_problem("the last list of 0 members stays")
    assert one.ports() == ()
    etcd.start()
    one.await_well()
    two = member(2).start().join(1)
    two.await_others(1)
    one.await_others(2)


@pytest.mark.parametrize("theirs", [9, 5])
def test_a_later_epoch_under_our_name_calls_back(
    member: Callable[..., Member], etcd: EtcdProcess, theirs: int
) -> None:
    """The node's disk came from a backup: its former life has a key with a later epoch. An equal
    one is another life too."""
    former = member(1).start().join(theirs)
    until(lambda: value_of(etcd, 1).get("epoch") == theirs, lambda: value_of(etcd, 1))
    former.membership.close()
    watcher = member(2).start()
    watcher.await_others(1)
    again = member(1).start().join(5)
    until(lambda: value_of(etcd, 1).get("epoch") == theirs + 1, lambda: again.later)
    assert again.later == [theirs]
    again.await_well()
    assert watcher.lists == [(1,)], "the member never was away"


def test_a_key_of_a_former_life_is_replaced(
    member: Callable[..., Member], etcd: EtcdProcess
) -> None:
    """A node that restarts faster than its lease ends need not wait for it."""
    former = member(1).start().join(5)
    until(lambda: value_of(etcd, 1).get("epoch") == 5, lambda: value_of(etcd, 1))
    former.membership.close()
    again = member(1).start().join(6)
    until(lambda: value_of(etcd, 1).get("epoch") == 6, lambda: value_of(etcd, 1))
    again.await_well()
    assert again.later == []


def test_two_nodes_with_one_name_are_told(member: Callable[..., Member], etcd: EtcdProcess) -> None:
    one, other = member(1).start().join(1), member(1)
    until(lambda: value_of(etcd, 1).get("epoch") == 1, lambda: value_of(etcd, 1))
    seen: list[int] = []
    # This one is told and stays as it is.
    other.membership.start(other.changed, seen.append)
    other.membership.join(Address("127.0.0.1", 7009), "node1", 1)
    other.await_problem("two nodes are called node1, 127.0.0.1:7001 and 127.0.0.1:7009")
    assert set(seen) == {1} and one.ports() == ()
    assert value_of(etcd, 1)["address"] == "127.0.0.1:7001", "not overwritten"


def test_of_two_nodes_with_one_name_the_first_keeps_it(
    member: Callable[..., Member], etcd: EtcdProcess, caplog: pytest.LogCaptureFixture
) -> None:
    first = member(1).start().join(5)
    until(lambda: value_of(etcd, 1).get("epoch") == 5, lambda: value_of(etcd, 1))
    second = member(1)
    second.address = Address("127.0.0.1", 7009)
    with caplog.at_level(logging.WARNING):
        second.start().join(9)
        second.await_problem("two nodes are called node1, 127.0.0.1:7001 and 127.0.0.1:7009")
        until(lambda: value_of(etcd, 1).get("epoch") == 10, lambda: value_of(etcd, 1))
        first.await_well()
        # Some turns later they have not gone above each other again.
        for number in (3, 4):
            member(number).start().join(1)
            until(lambda n=number: n in first.ports() and n in second.ports(), second.ports)
    assert (first.later, second.later) == ([9], [])
    assert value_of(etcd, 1)["address"] == "127.0.0.1:7001"
    told = [line for line in caplog.messages if "two nodes are called" in line]
    assert len(told) == 2, "once by each"
    first.membership.leave()
    second.await_well()
    assert value_of(etcd, 1)["address"] == "127.0.0.1:7009", "when it is free, it may be taken"


def test_a_lease_that_ended_is_taken_anew(member: Callable[..., Member], etcd: EtcdProcess) -> None:
    one, two = member(1).start().join(1), member(2).start().join(1)
    one.await_others(2)
    client = raw(etcd)
    ((_, entry),) = client.get(f"{PREFIX}/node2", metadata=True)
    client.post(client.get_url("/lease/revoke"), json={"ID": entry["lease"]})
    until(lambda: bool(value_of(etcd, 2)), lambda: two.membership.problem())
    two.await_well()
    one.await_others(2)
    ((_, after),) = client.get(f"{PREFIX}/node2", metadata=True)
    assert after["lease"] != entry["lease"]


def test_entries_that_are_no_members_are_ignored(
    member: Callable[..., Member], etcd: EtcdProcess, caplog: pytest.LogCaptureFixture
) -> None:
    client = raw(etcd)
    good = Announcement("node2", Address("127.0.0.1", 7002), 3, "ab").encode()
    nonsense = {
        "a": b"",
        "b": b"\xff\xfe\x00",
        "c": b"[1, 2]",
        "d": b"[" * 4000,
        "e": good.encode(),  # says another name than its key
        "f": good.replace("node2", "f").replace("127.0.0.1:7002", "no port:x").encode(),
        "g": good.replace("node2", "g").replace('"epoch": 3', '"epoch": "3"').encode(),
        "h": good.replace("node2", "h").replace('"epoch": 3', f'"epoch": {2**63}').encode(),
        "i": good.replace("node2", "i").replace('"format": 1', '"format": 2').encode(),
        "j": b" " * 5000,
    }
    for name, value in nonsense.items():
        client.put(f"{PREFIX}/{name}", value)
    client.post(
        client.get_url("/kv/put"),
        json={"key": base64.b64encode(PREFIX.encode() + b"/\xff\xff").decode(), "value": ""},
    )
    client.put(f"{PREFIX}2/node4", good.replace("node2", "node4"))
    client.put(f"{PREFIX}/node2", good)
    with caplog.at_level(logging.WARNING):
        one = member(1).start().join(1)
        one.await_others(2)
        until(lambda: one.membership.ignored > 3 * len(nonsense), lambda: one.membership.ignored)
    warnings = [line.getMessage() for line in caplog.records if "ignored" in line.getMessage()]
    assert len(warnings) == len(nonsense) + 1, "one line each, not one a poll"
    assert all("\n" not in line for line in warnings)
    assert one.ports() == (2,)


def test_an_entry_under_our_own_name_that_is_nonsense_is_replaced(
    member: Callable[..., Member], etcd: EtcdProcess
) -> None:
    raw(etcd).put(f"{PREFIX}/node1", b"\x00")
    member(1).start().join(4)
    until(lambda: _epoch(etcd) == 4, lambda: "not replaced")


def _epoch(etcd: EtcdProcess) -> int:
    try:
        return int(value_of(etcd, 1)["epoch"])
    except (ValueError, KeyError):
        return 0


def test_h2_a_failing_callback_does_not_end_the_thread(member: Callable[..., Member]) -> None:
    one = member(1)
    one.fail_next = RuntimeError("a bug in whoever is told")
    one.start().join(1)
    member(2).start().join(1)
    one.await_others(2)
    until(lambda: one.lists == [(2,)], lambda: one.lists)
    one.await_well()
    assert one.membership.restarts == 1


def test_prefixes_are_separate_pools(member: Callable[..., Member]) -> None:
    one, two = member(1).start().join(1), member(2, prefix=f"{PREFIX}2/").start().join(1)
    three = member(3, prefix=f"{PREFIX}/").start().join(1)
    one.await_others(3)
    three.await_others(1)
    two.await_well()
    assert two.ports() == ()


def test_something_that_is_no_etcd(tmp_path: Path) -> None:
    """An address that answers HTTP with something else is one line, and no member is lost."""
    from http.server import BaseHTTPRequestHandler, HTTPServer

    answers = [b"<html>", b"[]", b"{}", b'{"kvs": 3, "header": {"revision": "1"}}']
    served: list[bytes] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = answers[len(served) % len(answers)]
            served.append(body)
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    config = PoolConfig(
        Address("127.0.0.1", 7001), open_pool=True, etcd=f"127.0.0.1:{server.server_port}"
    )
    membership = open_membership(config, SystemClock())
    assert isinstance(membership, EtcdMembership)
    try:
        membership.start(lambda: None)
        until(
            lambda: (
                len(served) > len(answers)
                and "not an etcd v3.4 gateway" in (membership.problem() or "")
            ),
            membership.problem,
        )
        assert membership.members() == () and membership.restarts == 0
        assert "\n" not in (membership.problem() or "")
    finally:
        membership.close()
        server.shutdown()
        thread.join(WAIT_S)
        server.server_close()


def test_client_not_installed_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "etcd3gw", None)
    config = PoolConfig(Address("127.0.0.1", 7001), open_pool=True, etcd="127.0.0.1:2379")
    with pytest.raises(ConfigError, match=r"install tierkv\[etcd\]"):
        open_membership(config, SystemClock())
