"""A pool of processes: holders killed with -9 at any moment, restarted, set back, stopped."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.daemon_process import ROOT
from tests.support.pages import page_keys, put_store, take_content
from tests.support.pool_nodes import (
    NEVER,
    WAIT_S,
    GatedPeer,
    Node,
    free_address,
    start_node,
    until,
)
from tierkv.storage.pool.config import Address
from tierkv.storage.remote import PullState
from tierkv.storage.types import TierName

PAGE_BYTES = 1 << 18
START_S = 60.0
SEED = 20261129
KILLS = 4

QUIET: dict[str, Any] = {"copy_after": NEVER, "hot_after": NEVER}
SETTINGS: dict[str, Any] = {
    "page_bytes": PAGE_BYTES,
    "host_pages": 64,
    "host_share": 0.5,
    "heartbeat_s": 0.05,
    "suspect_s": 1.0,
    "lease_s": 2.0,
    "transfer_s": 2.0,
    "store_s": 2.0,
}


class Child:
    """One node in a process of its own."""

    def __init__(self, address: Address, others: list[Address], **changes: Any) -> None:
        self.address = address
        settings = {
            "listen": str(address),
            "members": [str(other) for other in others],
            **SETTINGS,
            **{name: str(v) if isinstance(v, Path) else v for name, v in changes.items()},
        }
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.processes.pool_node", json.dumps(settings)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def await_ready(self) -> int:
        """Its epoch."""
        return int(self.line()["ready"])

    def line(self) -> dict[str, Any]:
        """The next line it says."""
        assert self.process.stdout is not None
        text = self.process.stdout.readline()
        assert text, f"the node at {self.address} ended: {self.process.poll()}"
        said: dict[str, Any] = json.loads(text)
        return said

    def do(self, what: str, **order: Any) -> dict[str, Any]:
        """Tell it something and wait until it is done."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": what, **order}) + "\n")
        self.process.stdin.flush()
        return self.line()

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def pause(self) -> None:
        """Stop it, and see that it stands still."""
        self.signal(signal.SIGSTOP)
        stat = Path(f"/proc/{self.process.pid}/stat")
        until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T", stat.read_text)

    def kill(self) -> None:
        """kill -9."""
        self.process.kill()
        self.process.wait(WAIT_S)

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


class Pool:
    """A node here, and children. `changes` are the settings of all."""

    def __init__(self, children: int, changes: dict[str, Any], each: list[dict[str, Any]]) -> None:
        self.changes = changes
        self.addresses = [free_address() for _ in range(children + 1)]
        self.children: list[Child] = []
        for number in range(children):
            own = each[number] if number < len(each) else {}
            self.children.append(self.start(number, **own))
        self.epochs = [child.await_ready() for child in self.children]
        self.near: Node = start_node(
            self.addresses[-1], self.addresses[:-1], **{**SETTINGS, **changes}
        )

    def start(self, number: int, **own: Any) -> Child:
        """Start, or start again, a child."""
        address = self.addresses[number]
        others = [other for other in self.addresses if other != address]
        return Child(address, others, **{**self.changes, **own})

    def restart(self, number: int, **own: Any) -> int:
        """A new process at the address of a dead one; returns its epoch."""
        self.children[number] = self.start(number, **own)
        return self.children[number].await_ready()

    def link_live(self, number: int) -> bool:
        address = self.addresses[number]
        return any(link.live for link in self.near.pool.links() if link.address == address)

    def await_live(self) -> None:
        """All see all."""
        until(
            lambda: all(link.live for link in self.near.pool.links()),
            lambda: [link.problem for link in self.near.pool.links()],
        )
        for child in self.children:
            if child.process.poll() is None:
                until(
                    lambda child=child: all(  # type: ignore[misc]
                        member["live"] for member in child.do("status")["members"]
                    ),
                    lambda child=child: child.do("status")["members"],  # type: ignore[misc]
                )

    def await_known(self, first: int, count: int) -> None:
        keys = page_keys(*range(first, first + count))
        until(lambda: all(self.near.store.lookup(keys)), lambda: self.near.store.lookup(keys))

    def get(self, first: int, count: int, deadline_s: float = WAIT_S) -> int:
        """Restore pages here, then forget them; asserts that no byte is wrong."""
        keys = page_keys(*range(first, first + count))
        found = take_content(self.near.store, keys, deadline_s)
        self.near.store.drop(keys, TierName.HOST)
        return found

    def close(self) -> None:
        self.near.gate.open.set()
        try:
            self.near.stop()
        finally:
            for child in self.children:
                child.close()


@contextmanager
def running(
    children: int, each: list[dict[str, Any]] | None = None, **changes: Any
) -> Iterator[Pool]:
    pool = Pool(children, changes, each or [])
    try:
        pool.await_live()
        yield pool
        if not pool.near.stopped:
            assert pool.near.store.wait_quiet(WAIT_S)
            pool.near.check()
        for child in pool.children:
            if child.process.poll() is None:
                child.do("check")
    finally:
        pool.close()


def test_pages_travel_between_processes() -> None:
    with running(2, **QUIET) as pool:
        pool.children[0].do("put", first=0, count=16)
        pool.await_known(0, 16)
        assert pool.get(0, 16) == 16


@pytest.mark.parametrize("after", [0, 100, PAGE_BYTES // 2, 3 * PAGE_BYTES + 17])
def test_a_holder_killed_in_the_middle_of_a_page_is_replaced_by_the_other(after: int) -> None:
    with running(2, **QUIET) as pool:
        for child in pool.children:
            child.do("put", first=0, count=8)
        pool.await_known(0, 8)
        until(
            lambda: all(link.known_pages == 8 for link in pool.near.pool.links()),
            lambda: [link.known_pages for link in pool.near.pool.links()],
        )
        victim = pool.children[0]
        victim.do("stick", after=after)

        def kill_when_stuck() -> None:
            if victim.line() == {"stuck": after}:
                victim.kill()

        killer = threading.Thread(target=kill_when_stuck)
        killer.start()
        assert pool.get(0, 8) == 8, "one holder lives"
        killer.join(WAIT_S)
        assert victim.process.poll() is not None, "nothing was asked of it"


def test_a_holder_that_stops_in_the_middle_of_a_page_costs_at_most_the_deadline() -> None:
    with running(1, **QUIET) as pool:
        child = pool.children[0]
        child.do("put", first=0, count=4)
        pool.await_known(0, 4)
        child.do("stick", after=PAGE_BYTES // 2)
        pulls = [pool.near.pull(key, 0.5) for key in page_keys(*range(4))]
        states = [pull.future.result(WAIT_S).state for pull in pulls]
        assert states == [PullState.FAILED] * 4
        assert all(not pull.target.open for pull in pulls)
        assert pool.near.store.lookup_here(page_keys(*range(4))) == [False] * 4


def test_h4_a_paused_holder_is_silent_and_its_pages_come_from_the_other() -> None:
    with running(2, **QUIET) as pool:
        for child in pool.children:
            child.do("put", first=0, count=8)
        until(
            lambda: all(link.known_pages == 8 for link in pool.near.pool.links()),
            lambda: [link.known_pages for link in pool.near.pool.links()],
        )
        pool.children[0].pause()
        try:
            assert pool.get(0, 8) == 8
            until(lambda: not pool.link_live(0), lambda: pool.near.pool.status()["members"])
            assert pool.link_live(1)
        finally:
            pool.children[0].signal(signal.SIGCONT)
        pool.await_live()
        assert pool.get(0, 8) == 8


def test_h1_a_node_closes_while_a_member_that_reads_from_it_is_paused() -> None:
    with running(1, store_s=600.0, transfer_s=600.0) as pool:
        pool.children[0].pause()
        try:
            keys = page_keys(*range(8))
            put_store(pool.near.store, keys)
            until(lambda: pool.near.remote.stats().pushes_queued > 0, pool.near.remote.stats)
            # Its last copies will never be answered; nothing of this node is read after.
            pool.near.stop()
        finally:
            pool.children[0].signal(signal.SIGCONT)


def test_an_acknowledged_copy_is_found_after_its_maker_was_killed() -> None:
    with running(2) as pool:
        assert pool.children[0].do("put", first=0, count=24) == {"flushed": True}
        pool.children[0].kill()
        until(lambda: not pool.link_live(0), lambda: pool.near.pool.status()["members"])
        pool.await_known(0, 24)
        assert take_content(pool.near.store, page_keys(*range(24))) == 24


def test_a_restarted_holder_keeps_its_pages_and_gets_a_later_epoch(tmp_path: Path) -> None:
    own = {"arena": tmp_path / "arena", "epoch": tmp_path / "epoch"}
    with running(1, [own], **QUIET) as pool:
        pool.children[0].do("put", first=0, count=8)
        pool.await_known(0, 8)
        epoch = pool.epochs[0]
        for _ in range(KILLS):
            pool.children[0].kill()
            later = pool.restart(0, **own)
            assert later == epoch + 1
            epoch = later
            pool.await_live()
            pool.await_known(0, 8)
            assert pool.get(0, 8) == 8


def test_a_holder_set_back_to_an_old_epoch_is_fenced_and_joins_above_it(tmp_path: Path) -> None:
    own = {"arena": tmp_path / "arena", "epoch": tmp_path / "epoch"}
    with running(2, [own], **QUIET) as pool:
        backup = (tmp_path / "epoch").read_bytes()
        pool.children[0].do("put", first=0, count=4)
        for _ in range(3):
            pool.children[0].kill()
            latest = pool.restart(0, **own)
            pool.await_live()
        pool.children[0].kill()
        (tmp_path / "epoch").write_bytes(backup)
        pool.restart(0, **own)
        pool.await_live()
        status = pool.children[0].do("status")
        assert status["epoch"] > latest and status["fences"] >= 1
        pool.await_known(0, 4)
        assert pool.get(0, 4) == 4
        members = pool.children[1].do("status")["members"]
        assert status["epoch"] in [member["epoch"] for member in members]


def test_a_holder_killed_between_lease_and_read_is_a_failure_not_a_wrong_page(
    tmp_path: Path,
) -> None:
    own = {"arena": tmp_path / "arena", "epoch": tmp_path / "epoch"}
    with running(1, [own], **QUIET) as pool:
        pool.children[0].do("put", first=0, count=8)
        pool.await_known(0, 8)

        def kill(peer: GatedPeer) -> None:
            pool.near.gate.before_read = None
            pool.children[0].kill()

        pool.near.gate.before_read = kill
        pull = pool.near.pull(page_keys(0)[0])
        assert pull.future.result(WAIT_S).state in (PullState.FAILED, PullState.MISSED)
        # The next life of the same address answers nothing of the former.
        pool.restart(0, **own)
        pool.await_live()
        pool.await_known(0, 8)
        assert pool.get(0, 8) == 8


def await_more(found: list[int]) -> None:
    """Wait until the load has ended a few more requests."""
    seen = len(found)
    until(lambda: len(found) > seen + 3, lambda: found)


def test_kills_at_random_under_load_are_never_a_wrong_byte(tmp_path: Path) -> None:
    print(f"seed {SEED}")
    random_ = random.Random(SEED)
    each = [{"arena": tmp_path / f"arena{n}", "epoch": tmp_path / f"epoch{n}"} for n in range(2)]
    with running(2, each, hot_replicas=2, replicas=2) as pool:
        for child in pool.children:
            child.do("put", first=0, count=12)
        stopping = threading.Event()
        errors: list[BaseException] = []
        found: list[int] = []

        def load() -> None:
            try:
                while not stopping.is_set():
                    found.append(pool.get(random.Random(len(found)).randrange(6), 6, 1.0))
            except BaseException as error:  # noqa: BLE001
                errors.append(error)

        worker = threading.Thread(target=load)
        worker.start()
        try:
            for _ in range(KILLS):
                number = random_.randrange(2)
                pool.await_live()
                await_more(found)
                pool.children[number].kill()
                await_more(found)
                pool.restart(number, **each[number])
        finally:
            stopping.set()
            worker.join(WAIT_S)
        assert not errors, errors[0]
        pool.await_live()
        pool.await_known(0, 12)
        assert pool.get(0, 12) == 12


def test_drain_before_stopping_loses_nothing_hot() -> None:
    with running(2, [QUIET], host_share=1.0) as pool:
        child = pool.children[0]
        child.do("put", first=0, count=16)
        assert child.do("drain") == {"drained": True}
        assert child.do("stop") == {"closed": True}
        child.process.wait(WAIT_S)
        until(lambda: not pool.link_live(0), lambda: pool.near.pool.status()["members"])
        pool.await_known(0, 16)
        assert take_content(pool.near.store, page_keys(*range(16))) == 16
