"""Who is there: the first four frames of a connection, docs/formats/transport.md shows them.

Owns the shared key and what is proved with it. Knows sockets only as Stream. Each side sends a
fresh nonce; each proves that it has the key by HMAC-SHA256 over both greetings and its role, so
that no proof can be replayed, reflected, or used under another version, mode or boot token. The
client proves first: a server shows a stranger its version and boot token and nothing else.
Called by tcp_peer.py and tcp_server.py.

Not promised: on a connection without TLS, somebody between the two can change what follows.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import secrets

from tierkv.storage.errors import ConfigError, TierIOError
from tierkv.storage.transport.base import PeerIdentity
from tierkv.storage.transport.stream import Stream
from tierkv.storage.transport.wire import (
    GREETING_BYTES,
    HEADER_BYTES,
    NONCE_BYTES,
    PROOF_BYTES,
    VERSION,
    Greeting,
    Kind,
    error_bounds,
    exactly,
    pack_error,
    pack_frame,
    pack_greeting,
    unpack_error,
    unpack_greeting,
    unpack_header,
)

KEY_BYTES_MIN = 16
REFUSE_S = 1.0
_DOMAIN = b"tierkv transport v1\0"
_CLIENT = b"client\0"
_SERVER = b"server\0"
_NO_PROOF = bytes(PROOF_BYTES)

log = logging.getLogger(__name__)


class Credentials:
    """The pool's shared key, or the decision to have none."""

    def __init__(self, key: bytes | None, *, open_pool: bool = False) -> None:
        """ConfigError without a key unless `open_pool`, with both, or for a short key."""
        if key is None and not open_pool:
            raise ConfigError(
                "start transport: no shared key; give the pool's key, or ask for an open pool"
            )
        if key is not None and open_pool:
            raise ConfigError("start transport: a shared key and an open pool; choose one")
        if key is not None and len(key) < KEY_BYTES_MIN:
            raise ConfigError(
                f"start transport: expected a shared key of {KEY_BYTES_MIN} bytes or more, "
                f"got {len(key)}"
            )
        if key is None:
            log.warning(
                "transport=tcp open=yes anyone who can connect reads the memory; give it a key"
            )
        # Hashed, because HMAC takes a key and the same with zeros after it for one.
        self._key = None if key is None else hashlib.sha256(_DOMAIN + key).digest()

    @property
    def keyed(self) -> bool:
        """False in an open pool."""
        return self._key is not None

    def prove(self, role: bytes, transcript: bytes) -> bytes:
        """PROOF_BYTES that only somebody with the key can make; zeros in an open pool."""
        if self._key is None:
            return _NO_PROOF
        return hmac.new(self._key, _DOMAIN + role + transcript, hashlib.sha256).digest()

    def proved(self, role: bytes, transcript: bytes, proof: bytes | bytearray) -> bool:
        """Whether `proof` is prove() of the same, in constant time."""
        return hmac.compare_digest(self.prove(role, transcript), proof)

    def __repr__(self) -> str:
        return f"Credentials(keyed={self.keyed})"


def greet_server(
    stream: Stream, credentials: Credentials, boot_token: bytes, deadline: float
) -> PeerIdentity:
    """The client's part. TierIOError when the peer is not one, or has another key or version."""
    hello = _greeting(credentials, boot_token)
    _send(stream, Kind.HELLO, hello, deadline)
    welcome = _receive(stream, Kind.WELCOME, GREETING_BYTES, deadline)
    peer = unpack_greeting(welcome)
    _compare(peer, credentials)
    transcript = hello + welcome
    _send(stream, Kind.PROOF, credentials.prove(_CLIENT, transcript), deadline)
    proof = _receive(stream, Kind.READY, PROOF_BYTES, deadline)
    if not credentials.proved(_SERVER, transcript, proof):
        raise TierIOError("greet peer: it does not have this pool's key; check both keys")
    return PeerIdentity(peer.boot_token)


def greet_client(
    stream: Stream, credentials: Credentials, boot_token: bytes, deadline: float
) -> PeerIdentity:
    """The server's part. On failure the client is told why, in general words, and TierIOError."""
    try:
        hello = _receive(stream, Kind.HELLO, GREETING_BYTES, deadline)
        peer = unpack_greeting(hello)
        welcome = _greeting(credentials, boot_token)
        # Before comparing, so that both sides can say what differs.
        _send(stream, Kind.WELCOME, welcome, deadline)
        _compare(peer, credentials)
        transcript = hello + welcome
        proof = _receive(stream, Kind.PROOF, PROOF_BYTES, deadline)
        if not credentials.proved(_CLIENT, transcript, proof):
            raise TierIOError("greet peer: it does not have this pool's key; check both keys")
    except TierIOError as error:
        refuse(stream, str(error))
        raise
    _send(stream, Kind.READY, credentials.prove(_SERVER, transcript), deadline)
    return PeerIdentity(peer.boot_token)


def _greeting(credentials: Credentials, boot_token: bytes) -> bytes:
    nonce = secrets.token_bytes(NONCE_BYTES)
    return pack_greeting(Greeting(VERSION, credentials.keyed, nonce, boot_token))


def _compare(peer: Greeting, credentials: Credentials) -> None:
    if peer.version != VERSION:
        raise TierIOError(
            f"greet peer: it speaks transport version {peer.version}, this TierKV {VERSION}; "
            "run the same version on both"
        )
    if peer.keyed != credentials.keyed:
        theirs, ours = ("a key", "none") if peer.keyed else ("no key", "one")
        raise TierIOError(f"greet peer: it has {theirs}, this node has {ours}; make them equal")


def _send(stream: Stream, kind: Kind, body: bytes, deadline: float) -> None:
    stream.send([pack_frame(kind, 0, body)], step_s=float(1 << 20), deadline=deadline)


def _receive(stream: Stream, kind: Kind, length: int, deadline: float) -> bytes:
    bounds = {kind: exactly(length), Kind.ERROR: error_bounds()}
    header = unpack_header(stream.receive_bytes(HEADER_BYTES, deadline), bounds)
    body = bytes(stream.receive_bytes(header.length, deadline))
    if header.kind is Kind.ERROR:
        raise TierIOError(f"greet peer: it refused: {unpack_error(body)}")
    return body


def refuse(stream: Stream, text: str) -> None:
    """Tell a client, between two frames, why it is served no more. Never raises; takes REFUSE_S
    at most."""
    try:
        stream.send([pack_error(0, text)], REFUSE_S)
    except TierIOError as error:
        # It has left: nobody to tell.
        log.debug("refusal=untold reason=%s", error)
