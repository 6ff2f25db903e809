"""The ucx data plane: pages by tag messages with rendezvous, through ucxx (or ucx-py).

Owns a node's end: what library, network device and settings there are, the server that answers,
the peers that were connected. Parts: ucx_server.py answers, ucx_peer.py and ucx_lane.py ask,
ucx_wire.py is what they say, ucx_address.py whom to; ucx_library.py is what they need of a
binding, ucx_ucxx.py and ucx_py.py are the two.
Invariants: UCX listens on the one network device that has the node's address, never on all; who
does not know the offer, which travels over the authenticated control channel only, is not
answered; no address of a peer reaches UCX unchecked on tcp. Called by planes.py.

Against strangers on the network: UCX itself parses whatever reaches its port, as in every use of
UCX. Page bytes are not encrypted; messages that ask and answer carry a proof.
"""

from __future__ import annotations

import atexit
import importlib
import os
import secrets
import threading
from types import ModuleType

from tierkv.storage.clock import Clock
from tierkv.storage.errors import ConfigError, TierClosedError, TierIOError
from tierkv.storage.transport.base import TransportLimits
from tierkv.storage.transport.plane import OFFER_BYTES_MAX, DataPlane
from tierkv.storage.transport.ucx_address import (
    Addresses,
    TcpAddresses,
    WholeAddresses,
    device_of,
)
from tierkv.storage.transport.ucx_lane import Lane
from tierkv.storage.transport.ucx_library import UcxLibrary, UcxWorker
from tierkv.storage.transport.ucx_peer import UcxPeer
from tierkv.storage.transport.ucx_py import UcxPyLibrary
from tierkv.storage.transport.ucx_server import UcxServer, UcxServerStats
from tierkv.storage.transport.ucx_ucxx import UcxxLibrary
from tierkv.storage.transport.ucx_wire import (
    NO_LANE,
    SECRET_BYTES,
    SLOT_BITS,
    Offer,
    pack_offer,
    request_bytes_max,
    unpack_offer,
)

TCP = "tcp"
SAMPLES = 3
SEGMENT = "1m"
"""Bytes that UCX's tcp sends at once. Its own 8 KiB reach half of what a plain socket does."""


class UcxPlane(DataPlane):
    """One node's end over UCX."""

    name = "ucx"

    def __init__(
        self,
        host: str,
        *,
        limits: TransportLimits,
        clock: Clock,
        transports: str = TCP,
        devices: str | None = None,
        library: UcxLibrary | None = None,
    ) -> None:
        """`host`: the address that this node listens on. `transports`, `devices`: as in UCX_TLS
        and UCX_NET_DEVICES; by default tcp on the device of `host`. With other transports
        members are trusted with addresses that UCX parses. ConfigError."""
        device, packed = device_of(host)
        if limits.read_pages >= 1 << SLOT_BITS:
            raise ConfigError(
                f"start the ucx plane: expected fewer than {1 << SLOT_BITS} pages a read, "
                f"got {limits.read_pages}"
            )
        self._limits = limits
        self._clock = clock
        self._library = load_library() if library is None else library
        self._options = _options(transports, devices or device, packed)
        self._secret = secrets.token_bytes(SECRET_BYTES)
        try:
            worker = self._library.open_worker(self._options, request_bytes_max(limits.read_pages))
            self._addresses: Addresses = WholeAddresses()
            if transports == TCP:
                self._addresses = self._tcp_addresses(
                    worker.address(), None if device == "lo" else packed
                )
        except TierIOError as error:
            raise ConfigError(
                f"start the ucx plane on {host!r}: {error}; check the device and the transports"
            ) from error
        self._address = self._addresses.pack(worker.address())
        self._server = UcxServer(worker, self._addresses, self._secret, limits, clock)
        self._lock = threading.Lock()
        self._peers: list[UcxPeer] = []
        self._spoilt: list[tuple[UcxWorker, bytes]] = []
        self._closed = False
        # Threads inside UCX while the interpreter is taken down would crash it.
        atexit.register(self.close)

    def _tcp_addresses(self, own: bytes, host: bytes | None) -> TcpAddresses:
        samples = [own]
        for _ in range(SAMPLES - 1):
            other = self._library.open_worker(self._options, message_bytes=0)
            samples.append(other.address())
            other.close()
        return TcpAddresses(samples, host)

    def register(self, memory: memoryview, generation: int) -> None:
        if not memory.c_contiguous or not memory.nbytes:
            raise TierIOError("register memory with ucx: expected contiguous memory")
        taken = len(self._server.sizes())
        if taken >= _memories_max(self._limits):
            raise TierIOError(
                f"register memory with ucx: {taken} are registered, no more are taken"
            )
        self._server.register(memory.cast("B"), generation)

    def unregister(self, generation: int) -> None:
        self._server.unregister(generation)

    def offer(self) -> bytes:
        raw = pack_offer(
            Offer(self._library.version, self._secret, self._address, self._server.sizes())
        )
        if len(raw) > OFFER_BYTES_MAX:
            raise TierIOError(f"ucx offer: {len(raw)} bytes, {OFFER_BYTES_MAX} may be sent")
        return raw

    def connect(self, offer: bytes, peer_name: str, timeout_s: float) -> UcxPeer:
        what = f"connect peer {peer_name} over ucx"
        try:
            known = self._read_offer(offer)
        except TierIOError as error:
            raise TierIOError(f"{what}: {error}") from error
        with self._lock:
            if self._closed:
                raise TierClosedError(f"{what}: the plane was closed")
            peer = UcxPeer(
                peer_name,
                known,
                self,
                self._open_lane,
                self._read_offer,
                self._limits,
                self._clock,
            )
            self._peers = [other for other in self._peers if other.running]
            self._peers.append(peer)
        try:
            peer.wait_greeted(timeout_s)
        except TierIOError:
            peer.close()
            raise
        return peer

    def _read_offer(self, raw: bytes) -> Offer:
        if len(raw) > OFFER_BYTES_MAX:
            raise TierIOError(f"ucx offer: expected at most {OFFER_BYTES_MAX} bytes")
        offer = unpack_offer(raw, _memories_max(self._limits))
        if offer.version != self._library.version:
            ours, theirs = (".".join(map(str, v)) for v in (self._library.version, offer.version))
            raise TierIOError(f"it has UCX {theirs}, this node {ours}; install the same")
        self._addresses.build(offer.address)
        return offer

    def take(self) -> tuple[UcxWorker, bytes]:
        """By peers: a worker, and the lane that it had last."""
        with self._lock:
            if self._spoilt:
                return self._spoilt.pop()
        return self._library.open_worker(self._options, message_bytes=0), NO_LANE

    def give(self, worker: UcxWorker, last: bytes, *, spoilt: bool) -> None:
        """By peers: what take() gave. Those that cannot be freed wait for the next peer."""
        if not spoilt:
            worker.close()
            return
        with self._lock:
            self._spoilt.append((worker, last))

    def _open_lane(self, worker: UcxWorker, offer: Offer, replaces: bytes) -> Lane:
        return Lane(worker, self._addresses, offer, replaces)

    def served(self) -> UcxServerStats:
        """What this node sent to others. O(1)."""
        return self._server.stats()

    def check(self) -> None:
        self._server.check()
        with self._lock:
            peers = list(self._peers)
        for peer in peers:
            peer.check()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            peers, self._peers = self._peers, []
        for peer in peers:
            peer.close()
        self._server.close()
        atexit.unregister(self.close)


def tcp_options(host: str) -> dict[str, str]:
    """The UCX settings of a plane on this address. ConfigError."""
    device, packed = device_of(host)
    return _options(TCP, device, packed)


def _options(transports: str, devices: str, host: bytes) -> dict[str, str]:
    return {
        "TLS": transports,
        "NET_DEVICES": devices,
        "TCP_AF_PRIO": "inet" if len(host) == 4 else "inet6",
        # A blocking connect() to a node that is gone would hold a thread for minutes (lesson H4).
        "TCP_CONN_NB": "y",
        "TCP_TX_SEG_SIZE": SEGMENT,
        "TCP_RX_SEG_SIZE": SEGMENT,
    }


def _memories_max(limits: TransportLimits) -> int:
    """One more than the limit: planes.py has a memory of its own, to prove who is read."""
    return limits.memories + 1


def load_library() -> UcxLibrary:
    """ucxx, else ucx-py. ConfigError when neither can be imported."""
    reasons = []
    try:
        return UcxxLibrary(import_quietly("ucxx._lib.libucxx"), import_quietly("ucxx._lib.arr"))
    except (ImportError, OSError) as error:
        reasons.append(f"ucxx: {error}")
    try:
        return UcxPyLibrary(import_quietly("ucp._libs.ucx_api"), import_quietly("ucp._libs.arr"))
    except (ImportError, OSError) as error:
        reasons.append(f"ucp: {error}")
    raise ConfigError(
        f"start the ucx plane: no UCX library can be imported ({'; '.join(reasons)}); "
        "install tierkv[ucx] or take ucx out of the configured planes"
    )


def import_quietly(name: str) -> ModuleType:
    """Import, and take back what the import wrote to the environment: NIXL's own UCX and child
    processes would inherit its settings."""
    before = dict(os.environ)
    try:
        return importlib.import_module(name)
    finally:
        for key in set(os.environ) - set(before):
            del os.environ[key]
        for key, value in before.items():
            if os.environ.get(key) != value:
                os.environ[key] = value
