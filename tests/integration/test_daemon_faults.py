"""The daemon and its workers as real processes, killed, stopped, stalled and lied to.

After each fault: the daemon's check(), the right content or a miss, and the other clients served.
After each test, once its daemons are gone: an offline check of all their files.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.daemon_files import check_files
from tests.support.daemon_process import (
    HOST_PAGES,
    PAGE_BYTES,
    DaemonProcess,
    shared_folder,
    small_config,
)
from tests.support.pages import page_content, page_key, put_store, take_content
from tests.support.worker_process import Worker
from tierkv.client.client import Client
from tierkv.protocol.answers import to_fields
from tierkv.protocol.frames import FrameReader, answer_bounds, encode_request
from tierkv.protocol.messages import PROTOCOL_VERSION, Limits, Verb, WireCode
from tierkv.protocol.requests import Hello
from tierkv.storage.checksum import payload_checksum
from tierkv.storage.errors import DirectoryInUseError
from tierkv.storage.types import CommitOutcome, PageKey, TierName

WAIT_S = 30.0
FAULTY = "tests.support.processes.faulty_daemon"


@pytest.fixture
def folder() -> Iterator[Path]:
    """A place for a daemon's files, which must be clean when the test has stopped or killed it."""
    with shared_folder() as made:
        yield made
        check_files(made)


def client_of(daemon: DaemonProcess, **options: Any) -> Client:
    return Client(daemon.config.socket_path, PAGE_BYTES, **options)


def host_of(status: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = status["classes"][0]["tiers"]["host"]
    return found


# --- workers that die ---------------------------------------------------------------------


def test_l2_killed_worker_gives_back_what_it_held(folder: Path) -> None:
    with DaemonProcess.started(small_config(folder)) as daemon, Worker(daemon) as worker:
        assert worker.tell("put 0 8") == "8"
        assert worker.tell("lease 0 8") == "8"
        assert worker.tell("reserve 16") == "16"
        held = daemon.status()["sessions"]
        assert held["leased_pages"] == 8 and held["reserved_pages"] == 16
        worker.kill()
        status = daemon.await_status(
            "all is free",
            lambda s: not host_of(s)["reserved_pages"] and not s["sessions"]["leases"],
        )
        assert status["sessions"]["quarantined_pages"] == 0
        daemon.check()
        with client_of(daemon) as other:
            assert take_content(other, [page_key(n) for n in range(8)]) == 8


def test_slots_of_a_living_process_are_quarantined(folder: Path) -> None:
    """Without a connection but stopped with the mapping: nobody gets its slots before its end."""
    with DaemonProcess.started(small_config(folder)) as daemon, Worker(daemon) as worker:
        assert worker.tell("reserve 16") == "16"
        assert worker.tell("disconnect") == "ok"
        worker.signal(signal.SIGSTOP)
        status = daemon.await_status(
            "quarantine", lambda s: s["sessions"]["quarantined_pages"] == 16
        )
        assert host_of(status)["reserved_pages"] == 16
        daemon.check()
        with client_of(daemon) as other:
            with other.reserve(HOST_PAGES) as held:
                assert len(held.views) == HOST_PAGES - 16, "a slot was given to two"
            # The client's own reservation was released by itself: it is free at once.
            assert host_of(daemon.status())["reserved_pages"] == 16
            worker.signal(signal.SIGKILL)
            daemon.await_status("free", lambda s: host_of(s)["reserved_pages"] == 0)
        daemon.check()


def test_expired_reservation_stays_reserved_while_its_process_lives(folder: Path) -> None:
    with DaemonProcess.started(small_config(folder)) as daemon:
        wire = Wire(daemon)
        answer = wire.ask(Verb.RESERVE, count=4, hold_ms=1)
        status = daemon.await_status("expiry", lambda s: s["sessions"]["expired_holds"] == 1)
        assert status["sessions"]["quarantined_pages"] == 4
        assert host_of(status)["reserved_pages"] == 4
        code, _ = wire.answer_to(
            Verb.COMMIT, reservation=answer["reservation"], keys=page_key(1), checksums=b""
        )
        assert code == WireCode.NOT_RESERVED
        daemon.check()
        wire.close()


def test_200_clients_connect_and_die(folder: Path) -> None:
    with DaemonProcess.started(small_config(folder)) as daemon, client_of(daemon) as other:
        keys = [page_key(n) for n in range(8)]
        put_store(other, keys)
        for number in range(200):
            wire = Wire(daemon, greet=number % 4 != 0)
            if number % 4 == 1:
                wire.send(encode_request(9, Verb.LOOKUP, {"keys": page_key(1)})[: number % 30 + 1])
            elif number % 4 == 2:
                wire.ask(Verb.LEASE, keys=b"".join(keys), wait_ms=0, hold_ms=60_000)
            elif number % 4 == 3:
                wire.ask(Verb.RESERVE, count=2, hold_ms=60_000)
                wire.ask(Verb.RELEASE, leases=[], reservations=[1])
            wire.close()
        status = daemon.await_status("one client", lambda s: s["sessions"]["connected"] == 1)
        assert status["requests"]["connections"] >= 200
        assert host_of(status)["reserved_pages"] == host_of(status)["leased_pages"] == 0
        assert take_content(other, keys) == 8
        daemon.check()


# --- the daemon dies ----------------------------------------------------------------------


def test_r1_r3_killed_daemon_comes_back_with_every_committed_page(folder: Path) -> None:
    values = small_config(folder)
    daemon = DaemonProcess.started(values)
    with client_of(daemon) as client:
        done: list[PageKey] = []
        stopping = threading.Event()

        def load() -> None:
            number = 0
            while not stopping.is_set() and number < HOST_PAGES - 4:
                keys = [page_key(number + each) for each in range(4)]
                if put_store(client, keys) == [CommitOutcome.COMMITTED] * 4:
                    done.extend(keys)
                    number += 4

        writer = threading.Thread(target=load)
        writer.start()
        daemon.await_status("pages", lambda s: bool(s["classes"]) and len(done) > 40)
        daemon.kill()
        first_token = client.boot_token
        # The worker keeps serving: everything is a miss, nothing raises.
        assert client.lookup(done[:2]) == [None, None] or not client.connected
        stopping.set()
        writer.join(WAIT_S)
        with DaemonProcess.started(values) as again:
            assert client.wait_connected(WAIT_S)
            assert client.boot_token != first_token
            for start in range(0, len(done), 8):
                part = done[start : start + 8]
                assert take_content(client, part) == len(part), "an acknowledged page is gone"
            again.check()
    daemon.__exit__()


def test_worker_and_daemon_killed_together(folder: Path) -> None:
    values = small_config(folder)
    with DaemonProcess.started(values) as daemon, Worker(daemon) as worker:
        assert worker.tell("put 0 32") == "32"
        assert worker.tell("lease 0 8") == "8"
        assert worker.tell("reserve 16") == "16"
        daemon.kill()
        worker.kill()
    with DaemonProcess.started(values) as again, Worker(again) as fresh:
        assert host_of(again.status())["free_pages"] == HOST_PAGES - 32
        assert fresh.tell("get 0 32") == "32"
        again.check()


def test_r3_slots_of_a_former_daemons_worker_are_quarantined(folder: Path) -> None:
    """The worker outlives the daemon and may still write through its old mapping."""
    values = small_config(folder)
    with DaemonProcess.started(values) as daemon, Worker(daemon) as worker:
        assert worker.tell("put 0 8") == "8"
        assert worker.tell("reserve 16") == "16"
        worker.signal(signal.SIGSTOP)
        daemon.kill()
        with DaemonProcess.started(values) as again, client_of(again) as client:
            status = again.status()
            assert status["sessions"]["quarantined_pages"] == 16
            assert host_of(status)["free_pages"] == HOST_PAGES - 8 - 16
            again.check()
            worker.signal(signal.SIGKILL)
            again.await_status("free", lambda s: host_of(s)["reserved_pages"] == 0)
            assert take_content(client, [page_key(n) for n in range(8)]) == 8
            again.check()


def test_reboot_finds_flushed_pages_on_disk(folder: Path) -> None:
    values = small_config(folder)
    with DaemonProcess.started(values) as daemon, client_of(daemon) as client:
        keys = [page_key(n) for n in range(16)]
        put_store(client, keys)
        assert client.flush(WAIT_S)
        daemon.kill()
    for arena in (folder / "arenas").glob("*.arena"):
        arena.unlink()
    with DaemonProcess.started(values) as again, client_of(again) as client:
        assert client.lookup(keys) == [TierName.NVME] * 16
        assert take_content(client, keys) == 16
        again.check()


def test_graceful_stop_flushes_and_removes_the_socket(folder: Path) -> None:
    values = small_config(folder, write_policy="write_back")
    daemon = DaemonProcess.started(values)
    with client_of(daemon) as client:
        keys = [page_key(n) for n in range(16)]
        put_store(client, keys)
        assert daemon.stop() == 0
        assert not daemon.config.socket_path.exists()
        assert client.lookup(keys[:1]) == [None]
    for arena in (folder / "arenas").glob("*.arena"):
        arena.unlink()
    with DaemonProcess.started(values) as again, client_of(again) as client:
        assert client.lookup(keys) == [TierName.NVME] * 16


# --- who may be there ---------------------------------------------------------------------


def test_second_daemon_on_one_directory(folder: Path) -> None:
    values = small_config(folder)
    with DaemonProcess.started(values) as daemon:
        for changes in ({}, {"socket_path": str(folder / "other.sock")}):
            with DaemonProcess({**values, **changes}) as second:
                code, notes = second.wait_failed()
            assert code == 2
            (line,) = [each for each in notes.splitlines() if each.startswith("tierkv: error")]
            assert "in use by process" in line and str(daemon.process.pid) in line
        daemon.check()


def test_socket_path_taken(folder: Path) -> None:
    path = folder / "daemon.sock"
    path.write_text("not a socket")
    with DaemonProcess(small_config(folder)) as daemon:
        code, notes = daemon.wait_failed()
    assert code == 2 and "it exists and is no socket" in notes
    assert path.read_text() == "not a socket"
    path.unlink()
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(path))
        other.listen()
        with DaemonProcess(small_config(folder)) as daemon:
            code, notes = daemon.wait_failed()
        assert code == 2 and "another process listens there" in notes


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_a1_foreign_uid_is_refused(folder: Path) -> None:
    folder.chmod(0o755)
    with DaemonProcess.started(small_config(folder, socket_mode=0o666)) as daemon:
        child = os.fork()
        if child == 0:
            status = 1
            try:
                os.setuid(65534)
                wire = Wire(daemon, greet=False)
                code, _ = wire.hello()
                # The connection ends after the refusal.
                status = 0 if code == WireCode.PEER and wire.ended() else 2
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        with client_of(daemon) as client:
            assert client.connected
        assert daemon.status()["requests"]["refused_connections"] == 1


# --- bad input ----------------------------------------------------------------------------


def test_bad_frames_end_one_connection_and_disturb_nobody(folder: Path) -> None:
    with DaemonProcess.started(small_config(folder)) as daemon, client_of(daemon) as other:
        keys = [page_key(n) for n in range(8)]
        put_store(other, keys)
        for garbage in (
            b"\xff\xff\xff\xff",
            (1 << 20).to_bytes(4, "little") + b"\x00" * 64,
            b"\x00\x00\x00\x00",
            b"\x03\x00\x00\x00\xc1\xc1\xc1",
            b"GET / HTTP/1.1\r\n\r\n",
        ):
            wire = Wire(daemon)
            wire.send(garbage)
            wire.sock.shutdown(socket.SHUT_WR)
            frames = wire.rest()
            assert all(frame.name == WireCode.FRAME for frame in frames)
            assert take_content(other, keys) == 8
        assert other.connections == 1
        daemon.check()


def test_refusals_keep_the_connection(folder: Path) -> None:
    with DaemonProcess.started(small_config(folder)) as daemon, client_of(daemon) as other:
        lease = other.fetch([page_key(1)], 0.0).take(0.0)
        put_store(other, [page_key(1)])
        lease = other.fetch([page_key(1)], WAIT_S).take(WAIT_S)
        wire = Wire(daemon)
        for code, verb, fields in (
            (WireCode.VERB, "conquer", {}),
            (WireCode.FIELD, "lookup", {"keys": b"short"}),
            (WireCode.FIELD, "lookup", {}),
            (WireCode.ORDER, "hello", to_fields(wire.greeting)),
            (WireCode.ORDER, "get", {"lease": 1, "index": 0}),
            (WireCode.NOT_LEASED, "release", {"leases": [1], "reservations": []}),
            (WireCode.NOT_RESERVED, "release", {"leases": [], "reservations": [1]}),
            (
                WireCode.NOT_RESERVED,
                "commit",
                {"reservation": 1, "keys": page_key(1), "checksums": b""},
            ),
            (WireCode.LIMIT, "reserve", {"count": 5000, "hold_ms": 1}),
            (WireCode.FIELD, "drop", {"namespace": bytes(32)}),
        ):
            found, message = wire.answer_to(verb, **fields)
            assert found == code, (verb, found, message)
            assert len(message["message"]) > 10 and "\n" not in message["message"]
        assert wire.ask(Verb.LOOKUP, keys=page_key(1)) == {"tiers": b"\x01"}
        assert daemon.status()["sessions"]["leases"] == 1
        lease.release()
        daemon.check()


def test_wrong_version_and_late_hello(folder: Path) -> None:
    with DaemonProcess.started(small_config(folder)) as daemon:
        wire = Wire(daemon, greet=False)
        code, _ = wire.answer_to(Verb.HELLO, version=PROTOCOL_VERSION + 1)
        assert code == WireCode.VERSION and wire.ended()
        wire = Wire(daemon, greet=False)
        code, _ = wire.answer_to(Verb.LOOKUP, keys=b"")
        assert code == WireCode.ORDER
        assert wire.hello()[0] == ""


def test_w7_page_that_is_not_what_its_client_said_is_not_published(folder: Path) -> None:
    with DaemonProcess.started(small_config(folder)) as daemon, client_of(daemon) as other:
        wire = Wire(daemon)
        held = wire.ask(Verb.RESERVE, count=2, hold_ms=60_000)
        answer = wire.ask(
            Verb.COMMIT,
            reservation=held["reservation"],
            keys=page_key(1) + page_key(2),
            checksums=bytes(32),
        )
        assert answer == {"outcomes": bytes([2, 2])}
        assert other.lookup([page_key(1), page_key(2)]) == [None, None]
        assert daemon.status()["classes"][0]["commit_mismatches"] == 2
        daemon.check()


@pytest.mark.parametrize("policy", ["always", "sampled"])
def test_w7_one_bad_page_of_a_commit_costs_only_itself(folder: Path, policy: str) -> None:
    """Every page is read once one was wrong, also those that sampling would have believed."""
    values = small_config(folder, verify_commit=policy, verify_commit_every=4)
    with DaemonProcess.started(values) as daemon, client_of(daemon) as other:
        wire = Wire(daemon)
        held = wire.ask(Verb.RESERVE, count=8, hold_ms=60_000)
        # Slots of a new arena are zero. Sampling reads the pages 0 and 4.
        right, wrong = payload_checksum(bytes(PAGE_BYTES)), b"\xee" * 16
        bad = {2, 4}
        keys = [page_key(n) for n in range(8)]
        answer = wire.ask(
            Verb.COMMIT,
            reservation=held["reservation"],
            keys=b"".join(keys),
            checksums=b"".join(wrong if n in bad else right for n in range(8)),
        )
        assert answer == {"outcomes": bytes([2 if n in bad else 0 for n in range(8)])}
        tiers = other.lookup(keys)
        assert [tier is None for tier in tiers] == [n in bad for n in range(8)]
        status = daemon.status()
        assert status["classes"][0]["commit_mismatches"] == len(bad)
        assert host_of(status)["free_pages"] == HOST_PAGES - 6
        assert status["sessions"]["reserved_pages"] == 0
        daemon.check()


def test_page_size_without_room_is_refused_with_the_number_to_change(folder: Path) -> None:
    with DaemonProcess.started(small_config(folder)) as daemon, client_of(daemon):
        wire = Wire(daemon, greet=False)
        code, fields = wire.hello(page_bytes=2 * PAGE_BYTES)
        assert code == "capacity" and "host.class_size" in fields["message"]


# --- disks --------------------------------------------------------------------------------


@pytest.mark.parametrize("code", ["ENOSPC", "EIO"])
def test_failing_disk_costs_misses_only(folder: Path, code: str) -> None:
    with (
        DaemonProcess.started(small_config(folder), FAULTY) as daemon,
        client_of(daemon) as client,
    ):
        keys = [page_key(n) for n in range(16)]
        assert daemon.tell(f"fail write {code} 1000000") == "ok"
        assert put_store(client, keys) == [CommitOutcome.COMMITTED] * 16
        daemon.await_status("copies failed", lambda s: s["classes"][0]["mover"]["failed"] >= 16)
        assert not client.flush(5.0)
        assert take_content(client, keys) == 16
        daemon.check()
        assert daemon.tell("heal") == "ok"


def test_h1_stalled_disk_blocks_nobody(folder: Path) -> None:
    with (
        DaemonProcess.started(small_config(folder), FAULTY) as daemon,
        client_of(daemon) as client,
    ):
        keys = [page_key(n) for n in range(16)]
        assert daemon.tell("stall write") == "ok"
        assert put_store(client, keys) == [CommitOutcome.COMMITTED] * 16
        assert not client.flush(0.2)
        assert take_content(client, keys) == 16
        assert put_store(client, [page_key(100)]) == [CommitOutcome.COMMITTED]
        assert client.lookup(keys[:1]) == [TierName.HOST]
        assert daemon.tell("release") == "ok"
        assert client.flush(WAIT_S)
        daemon.check()


def test_h1_stop_ends_within_its_bound_on_a_stalled_disk(folder: Path) -> None:
    values = small_config(folder, stop_s=2.0)
    with DaemonProcess.started(values, FAULTY) as daemon:
        with client_of(daemon) as client:
            keys = [page_key(n) for n in range(4)]
            assert daemon.tell("stall write") == "ok"
            assert put_store(client, keys) == [CommitOutcome.COMMITTED] * 4
            # The device holds its operation for longer than stop() waits here.
            assert daemon.stop() == 0
    assert "stuck in I/O" in daemon.notes or "durable=False" in daemon.notes, daemon.notes
    with DaemonProcess.started(values) as again, client_of(again) as client:
        assert take_content(client, keys) == 4
        again.check()


# --- files --------------------------------------------------------------------------------


def test_files_of_a_killed_daemon_are_checked_whole(folder: Path) -> None:
    """What the fixture says after each test: it looks at every page, and only offline."""
    with DaemonProcess.started(small_config(folder)) as daemon, client_of(daemon) as client:
        put_store(client, [page_key(n) for n in range(16)])
        assert client.flush(WAIT_S)
        with pytest.raises(DirectoryInUseError):
            check_files(folder)
        daemon.kill()
    reports = check_files(folder)
    assert sorted(report.pages for report in reports.values()) == [16, 16], reports
    (arena,) = (folder / "arenas").glob("*.arena")
    whole = arena.read_bytes()
    wanted = page_content(page_key(3), PAGE_BYTES)
    arena.write_bytes(whole.replace(wanted, bytes(PAGE_BYTES)))
    with pytest.raises(AssertionError, match="expected checksum"):
        check_files(folder)
    arena.write_bytes(whole)


# --- raw sockets --------------------------------------------------------------------------


class Wire:
    """A connection without the client library, so that it can break the rules."""

    def __init__(self, daemon: DaemonProcess, greet: bool = True) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(WAIT_S)
        self.sock.connect(str(daemon.config.socket_path))
        self.reader = FrameReader(answer_bounds(Limits()))
        self.number = 0
        self.greeting = Hello(PROTOCOL_VERSION, "test", PAGE_BYTES, "", "shared", "")
        if greet:
            assert self.hello()[0] == ""

    def hello(self, **changes: Any) -> tuple[str, dict[str, Any]]:
        return self.answer_to(Verb.HELLO, **{**to_fields(self.greeting), **changes})

    def send(self, data: bytes) -> None:
        self.sock.sendall(data)

    def ask(self, verb: Verb, **fields: Any) -> dict[str, Any]:
        code, found = self.answer_to(verb, **fields)
        assert code == "", (code, found)
        return found

    def answer_to(self, verb: Verb | str, **fields: Any) -> tuple[str, dict[str, Any]]:
        self.number += 1
        if isinstance(verb, Verb):
            self.send(encode_request(self.number, verb, fields))
        else:
            self.send(_unchecked(self.number, verb, fields))
        while True:
            for frame in self.reader.feed(self._receive()):
                assert frame.request_id == self.number
                return frame.name, frame.fields

    def _receive(self) -> bytes:
        data, fds, _, _ = socket.recv_fds(self.sock, 1 << 16, 4)
        for fd in fds:
            os.close(fd)
        assert data, "the daemon closed the connection"
        return data

    def rest(self) -> list[Any]:
        """Every frame until the connection ends."""
        frames = []
        while data := self.sock.recv(1 << 16):
            frames += list(self.reader.feed(data))
        return frames

    def ended(self) -> bool:
        return self.sock.recv(1) == b""

    def close(self) -> None:
        self.sock.close()


def _unchecked(number: int, verb: str, fields: dict[str, Any]) -> bytes:
    import msgpack

    body: bytes = msgpack.packb([number, verb, fields])
    return len(body).to_bytes(4, "little") + body


def test_pages_are_what_they_should_be() -> None:
    """The content that the tests above compare with differs from page to page."""
    assert page_content(page_key(1), PAGE_BYTES) != page_content(page_key(2), PAGE_BYTES)
