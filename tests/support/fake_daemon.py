"""A small daemon in a thread of the test: pages in a memfd, no limits kept, and faults on request.

For tests of the client, which want a peer that stalls, refuses, lies or dies at a chosen request.
It serves the verbs that an engine uses, one connection at a time per thread.
"""

from __future__ import annotations

import os
import socket
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tierkv.protocol import requests
from tierkv.protocol.answers import HelloAnswer, to_fields
from tierkv.protocol.errors import ProtocolError
from tierkv.protocol.frames import (
    FrameReader,
    encode_answer,
    encode_error,
    request_bounds,
)
from tierkv.protocol.messages import PROTOCOL_VERSION, Arena, Limits, Mode, Verb
from tierkv.protocol.packing import pack_slots, split_keys
from tierkv.protocol.requests import Request, parse_request
from tierkv.storage.checksum import payload_checksum

SLOT_HEADER_BYTES = 4096
HOST, COMMITTED, EXISTS = b"\x01", 0, 1

Fault = Callable[[Request], bytes | None]
"""Called for each request before it is served: bytes to send instead, or None to go on."""


class HangUpError(Exception):
    """Raised by a fault: close this connection now."""


@dataclass
class Peer:
    """One connection."""

    sock: socket.socket
    mode: str = Mode.SHARED.value
    leases: dict[int, list[int]] = field(default_factory=dict)
    reservations: dict[int, list[int]] = field(default_factory=dict)


class FakeDaemon:
    """Listens at `path` from start() to stop(). Pages outlive a stop(); boot tokens do not."""

    def __init__(
        self, path: Path, page_bytes: int = 4096, slots: int = 32, limits: Limits | None = None
    ) -> None:
        self.path = path
        self.limits = limits or Limits()
        slot_bytes = SLOT_HEADER_BYTES + page_bytes
        self.arena = Arena(4096 + slots * slot_bytes, 4096, slot_bytes, 4096, page_bytes, slots)
        self.fd = os.memfd_create("fake-arena", os.MFD_CLOEXEC)
        os.ftruncate(self.fd, self.arena.total_bytes)
        self.free = list(range(slots))
        self.pages: dict[bytes, int] = {}
        self.checksums: dict[bytes, bytes] = {}
        self.requests: list[Request] = []
        self.fault: Fault = lambda request: None
        self.hello: dict[str, Any] = {}
        """Fields that replace those of the next hello answers."""
        self.answered = threading.Condition()
        self._boots = 0
        self._ids = 0
        self._lock = threading.RLock()
        self._peers: list[Peer] = []
        self._threads: list[threading.Thread] = []
        self._listener: socket.socket | None = None

    def __enter__(self) -> FakeDaemon:
        self.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()
        os.close(self.fd)

    def start(self) -> None:
        """Listen, with a new boot token."""
        self._boots += 1
        self.path.unlink(missing_ok=True)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(os.fspath(self.path))
        self._listener.listen()
        self._spawn(self._accept, self._listener)

    def stop(self) -> None:
        """Hang up on everybody and go away."""
        assert self._listener is not None
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.hang_up()
        for thread in self._threads:
            thread.join(10)
            assert not thread.is_alive()
        self._threads.clear()

    def hang_up(self) -> None:
        """Close every connection."""
        with self._lock:
            peers, self._peers = self._peers, []
        for peer in peers:
            peer.sock.shutdown(socket.SHUT_RDWR)

    def count(self, verb: Verb) -> int:
        """Requests of this verb so far."""
        with self._lock:
            return sum(request.verb is verb for request in self.requests)

    def wait_for(self, condition: Callable[[], bool], timeout_s: float = 10.0) -> bool:
        """Wait until `condition`, looked at after each answer."""
        with self.answered:
            return self.answered.wait_for(condition, timeout_s)

    def held(self) -> tuple[int, int]:
        """Leases and reservations of all connections."""
        with self._lock:
            return (
                sum(len(peer.leases) for peer in self._peers),
                sum(len(peer.reservations) for peer in self._peers),
            )

    def payload(self, slot: int) -> bytes:
        """What lies in a slot."""
        start = self.arena.first_slot + slot * self.arena.slot_bytes + self.arena.payload_offset
        return os.pread(self.fd, self.arena.page_bytes, start)

    def write(self, slot: int, payload: bytes) -> None:
        """Put bytes into a slot."""
        start = self.arena.first_slot + slot * self.arena.slot_bytes + self.arena.payload_offset
        os.pwrite(self.fd, payload, start)

    def _spawn(self, run: Callable[[Any], None], argument: Any) -> None:
        thread = threading.Thread(target=run, args=(argument,), daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                sock, _ = listener.accept()
            except OSError:
                return
            peer = Peer(sock)
            with self._lock:
                self._peers.append(peer)
            self._spawn(self._serve, peer)

    def _serve(self, peer: Peer) -> None:
        bounds = request_bounds(self.limits).with_payload(self.arena.page_bytes)
        reader = FrameReader(bounds)
        try:
            while data := peer.sock.recv(1 << 20):
                for frame in reader.feed(data):
                    self._one(peer, parse_request(frame, self.limits))
        except (OSError, HangUpError):
            pass
        except ProtocolError as error:
            code = str(error.code)
            peer.sock.sendall(encode_error(error.request_id or 0, code, str(error)))
        finally:
            with self._lock:
                if peer in self._peers:
                    self._peers.remove(peer)
                for slots in peer.reservations.values():
                    self.free += slots
            peer.sock.close()
            with self.answered:
                self.answered.notify_all()

    def _one(self, peer: Peer, request: Request) -> None:
        with self._lock:
            self.requests.append(request)
        answer = self.fault(request)
        fds: list[int] = []
        if answer is None:
            with self._lock:
                fields = self._answer(peer, request.body)
            answer = encode_answer(request.request_id, fields)
            if request.verb is Verb.HELLO and fields["arena"] is not None:
                fds = [self.fd]
        if answer:
            socket.send_fds(peer.sock, [answer[:1]], fds)
            peer.sock.sendall(answer[1:])
        with self.answered:
            self.answered.notify_all()

    def _answer(self, peer: Peer, body: requests.Body) -> dict[str, Any]:
        self._ids += 1
        match body:
            case requests.Hello():
                return self._greet(peer, body)
            case requests.Lookup():
                return {"tiers": bytes(key in self.pages for key in split_keys(body.keys))}
            case requests.Lease():
                return self._lease(peer, split_keys(body.keys))
            case requests.Reserve():
                slots, self.free = self.free[: body.count], self.free[body.count :]
                if slots:
                    peer.reservations[self._ids] = slots
                return {"reservation": self._ids, "slots": pack_slots(slots)}
            case requests.Commit():
                return {"outcomes": self._commit(peer, body)}
            case requests.Release():
                for number in body.leases:
                    peer.leases.pop(number)
                for number in body.reservations:
                    self.free += peer.reservations.pop(number)
                return {}
            case requests.Put():
                self.write(peer.reservations[body.reservation][body.index], body.payload)
                return {}
            case requests.Get():
                return {"payload": self.payload(peer.leases[body.lease][body.index])}
            case requests.Prefetch():
                return {"accepted": len(split_keys(body.keys))}
            case requests.Flush():
                return {"durable": True}
            case requests.Drop():
                gone = [
                    key for key in split_keys(body.keys) if self.pages.pop(key, None) is not None
                ]
                return {"dropped": len(gone)}
            case requests.Namespaces():
                return {"namespaces": [{"namespace": bytes(32), "pages": {"host": 1}}]}
            case requests.Stats():
                return {"stats": {"classes": []}}
            case _:
                return {}

    def _greet(self, peer: Peer, hello: requests.Hello) -> dict[str, Any]:
        peer.mode = hello.mode
        shared = hello.mode == Mode.SHARED and hello.page_bytes > 0
        answer = HelloAnswer(
            PROTOCOL_VERSION,
            struct.pack("<QQ", self._boots, 0),
            self._ids,
            bytes(32) if hello.fingerprint else b"",
            to_fields(self.arena) if shared else None,
            to_fields(self.limits),
        )
        return to_fields(answer) | self.hello

    def _lease(self, peer: Peer, keys: list[Any]) -> dict[str, Any]:
        run = next((i for i, key in enumerate(keys) if key not in self.pages), len(keys))
        slots = [self.pages[key] for key in keys[:run]]
        if slots:
            peer.leases[self._ids] = slots
        return {
            "lease": self._ids,
            "slots": pack_slots(slots),
            "tiers": HOST * run,
            "checksums": b"".join(self.checksums[key] for key in keys[:run]),
        }

    def _commit(self, peer: Peer, body: requests.Commit) -> bytes:
        outcomes = []
        slots = peer.reservations.pop(body.reservation)
        keys = split_keys(body.keys)
        for index, key in enumerate(keys):
            if key in self.pages:
                outcomes.append(EXISTS)
                self.free.append(slots[index])
                continue
            self.pages[key] = slots[index]
            self.checksums[key] = (
                body.checksums[16 * index : 16 * index + 16]
                if body.checksums
                else payload_checksum(self.payload(slots[index]))
            )
            outcomes.append(COMMITTED)
        self.free += slots[len(keys) :]
        return bytes(outcomes)
