"""The negotiated transport: TCP introduces two nodes, the fastest plane both have moves the pages.

Owns a TcpTransport (handshake, messages, and the path that is always there), the data planes in
order of preference, and a small memory of random bytes that every plane offers, so that whoever
connects can prove that it reads this process. Knows no plane in particular. Messages carry one
byte before the application's, docs/formats/transport.md; nodes with and without planes understand
each other. Invariants: no byte of an application's message reaches a plane, none of ours the
application; with no planes it is a TcpTransport; a plane that fails costs its speed, never the
connection. Used by the pool.
"""

from __future__ import annotations

import hashlib
import logging
import mmap
import secrets
import threading
from collections.abc import Sequence
from dataclasses import replace

from tierkv.storage.clock import Clock, SystemClock
from tierkv.storage.errors import ConfigError, TierClosedError, TierIOError, TierKVError
from tierkv.storage.transport.base import (
    Handler,
    PeerIdentity,
    Transport,
    TransportLimits,
    TransportStats,
)
from tierkv.storage.transport.introduction import (
    ANSWER_BYTES_MAX,
    APPLICATION,
    INTRODUCE,
    PLANES_MAX,
    PROBE_BYTES,
    PROBE_GENERATION,
    Introduction,
    pack_introduction,
    unpack_question,
)
from tierkv.storage.transport.negotiated_peer import NegotiatedPeer
from tierkv.storage.transport.plane import DataPlane
from tierkv.storage.transport.plane_worker import Worker
from tierkv.storage.transport.tcp import TcpTransport, TlsContexts

log = logging.getLogger(__name__)


class NegotiatedTransport(Transport):
    """One node's end over TCP and the planes given."""

    name = "negotiated"

    def __init__(
        self,
        key: bytes | None,
        *,
        planes: Sequence[DataPlane] = (),
        open_pool: bool = False,
        any_interface: bool = False,
        limits: TransportLimits | None = None,
        boot_token: bytes | None = None,
        tls: TlsContexts | None = None,
        clock: Clock | None = None,
    ) -> None:
        """Takes over `planes`, the preferred first; the rest as TcpTransport. ConfigError."""
        names = [plane.name for plane in planes]
        if len(set(names)) != len(names) or len(names) > PLANES_MAX:
            raise ConfigError(
                f"start transport: expected at most {PLANES_MAX} different data planes, got {names}"
            )
        self._limits = limits or TransportLimits()
        self._clock = clock or SystemClock()
        room = max(self._limits.message_bytes + 1, ANSWER_BYTES_MAX)
        self._tcp = TcpTransport(
            key,
            open_pool=open_pool,
            any_interface=any_interface,
            limits=replace(self._limits, message_bytes=room),
            boot_token=boot_token,
            tls=tls,
            clock=self._clock,
        )
        self.boot_token = self._tcp.boot_token
        self._planes = list(planes)
        self._worker = Worker()
        self._lock = threading.Lock()
        self._peers: list[NegotiatedPeer] = []
        self._introductions = 0
        self._closed = False
        # Page-aligned and never unmapped while a plane may still have it.
        self._probe = mmap.mmap(-1, PROBE_BYTES)
        self._probe[:] = secrets.token_bytes(PROBE_BYTES)
        self._digest = hashlib.sha256(self._probe).digest()
        for plane in self._planes:
            self._register(plane, memoryview(self._probe), PROBE_GENERATION)

    def register(self, memory: memoryview) -> int:
        generation = self._tcp.register(memory)
        for plane in self._planes:
            self._register(plane, memory, generation)
        return generation

    def unregister(self, generation: int) -> None:
        problems: list[TierKVError] = []
        ends: list[DataPlane | Transport] = [*self._planes, self._tcp]
        for end in ends:
            try:
                end.unregister(generation)
            except TierKVError as error:
                # The others have to let go all the same.
                problems.append(error)
        if problems:
            raise problems[0]

    def listen(self, host: str, port: int, handler: Handler) -> tuple[str, int]:
        def answer(peer: PeerIdentity, message: bytes) -> bytes:
            return self._answer(peer, message, handler)

        return self._tcp.listen(host, port, answer)

    def connect(self, host: str, port: int, timeout_s: float) -> NegotiatedPeer:
        deadline = self._clock.monotonic() + timeout_s
        control = self._tcp.connect(host, port, timeout_s)
        peer = NegotiatedPeer(control, self._planes, self._limits, self._clock, self._worker)
        # Also with no time left: then it is said so, and made good later.
        peer.negotiate(deadline - self._clock.monotonic())
        with self._lock:
            if not self._closed:
                self._peers = [known for known in self._peers if not known.closed]
                self._peers.append(peer)
                return peer
        peer.close()
        raise TierClosedError(f"connect peer {host}:{port}: the transport was closed")

    def stats(self) -> TransportStats:
        stats = self._tcp.stats()
        return replace(stats, served_messages=max(0, stats.served_messages - self._introductions))

    def check(self) -> None:
        self._tcp.check()
        for plane in self._planes:
            plane.check()
        with self._lock:
            peers = list(self._peers)
        for peer in peers:
            peer.check()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            peers, self._peers = self._peers, []
        problems: list[TierKVError] = []
        ends: list[NegotiatedPeer | Worker | DataPlane | Transport]
        # Peers before the worker: what it asks of one ends at once then.
        ends = [*peers, self._worker, *self._planes, self._tcp]
        for end in ends:
            try:
                end.close()
            except TierKVError as error:
                # The others have to be closed all the same.
                problems.append(error)
        if problems:
            raise problems[0]

    def _register(self, plane: DataPlane, memory: memoryview, generation: int) -> None:
        try:
            plane.register(memory, generation)
        except TierIOError as error:
            # It stays readable over tcp.
            log.warning("plane=%s memory=%d not offered: %s", plane.name, generation, error)

    def _answer(self, peer: PeerIdentity, message: bytes, handler: Handler) -> bytes:
        kind = message[:1]
        if kind == APPLICATION:
            answer = handler(peer, message[1:])
            limit = self._limits.message_bytes
            if len(answer) > limit:
                raise TierIOError(f"answer of {len(answer)} bytes, at most {limit}")
            return answer
        if kind != INTRODUCE:
            raise TierIOError(f"message of kind {kind.hex() or 'none'}: run the same version")
        with self._lock:
            self._introductions += 1
        return pack_introduction(self._introduce(unpack_question(message)))

    def _introduce(self, names: Sequence[str]) -> Introduction:
        offers: dict[str, bytes] = {}
        refusals: dict[str, str] = {}
        planes = {plane.name: plane for plane in self._planes}
        for name in names:
            if name not in planes:
                refusals[name] = "the peer does not have it"
                continue
            try:
                offers[name] = planes[name].offer()
            except TierKVError as error:
                refusals[name] = f"the peer cannot offer it: {error}"
        return Introduction(self._digest, offers, refusals)
