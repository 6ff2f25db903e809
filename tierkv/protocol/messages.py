"""The verbs of the daemon: fields of each request and of its answer.

Values only; frames.py turns them into bytes, requests.py and answers.py check their fields, and
docs/formats/protocol.md shows the bytes. One page class (one payload size) is bound to a
connection by `hello`; everything after it speaks of that. page_bytes 0 binds none: an operator's
connection, for stats, namespaces, drop and flush. `fingerprint` is the text of
storage.identity.to_json, "" when the client has none; `client` is a name for people to read.

A request is [request_id, verb, fields], an answer [request_id, code, fields] where code is ""
when it went well and else an error's stable code with {"message": one line}. Answers may come in
another order than the requests. Keys travel as one byte string, KEY_BYTES each; slots as little-
endian u32, checksums CHECKSUM_BYTES each, tiers and outcomes one byte each (TIER_CODES,
OUTCOME_CODES).

verb        request fields                                answer fields
hello       version, client, page_bytes, fingerprint,     version, boot_token, session, namespace,
            mode ("shared" | "stream"), tenant            arena (Arena as a map, or None), limits
                                                          + the arena's descriptor (SCM_RIGHTS)
                                                          when mode is shared, sent with the
                                                          answer's first byte
lookup      keys                                          tiers
lease       keys, wait_ms, hold_ms                        lease, slots, tiers, checksums
reserve     count, hold_ms                                reservation, slots
commit      reservation, keys, checksums (may be empty)   outcomes
release     leases, reservations (lists of ids)           -
touch       keys                                          -
prefetch    keys, wait_ms                                 accepted (count of keys)
put         reservation, index, payload                   -             (stream mode)
get         lease, index                                  payload       (stream mode)
stats       -                                             stats (map)
namespaces  -                                             namespaces (list of maps)
drop        namespace (32 bytes) or keys                  dropped (count of pages)
flush       wait_ms                                       durable (bool)

A lease names the longest leading run of its keys that is in host memory within wait_ms. A lease
or a reservation ends with `release`, `commit`, its hold_ms or the connection, whichever is first.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from tierkv.storage.types import CommitOutcome, TierName

PROTOCOL_VERSION = 1
SLOT_ID_BYTES = 4
PAYLOAD_FRAME_EXTRA_BYTES = 1 << 16
"""A frame that carries a payload (put, and the answer of get) may be page_bytes and this long."""
CHECKSUM_BYTES = 16
BOOT_TOKEN_BYTES = 16

TIER_CODES: dict[TierName | None, int] = {
    None: 0,
    TierName.HOST: 1,
    TierName.NVME: 2,
    TierName.REMOTE: 3,
}
OUTCOME_CODES: dict[CommitOutcome, int] = {
    CommitOutcome.COMMITTED: 0,
    CommitOutcome.EXISTS: 1,
    CommitOutcome.FAILED: 2,
}


class Verb(StrEnum):
    """What a client can ask for."""

    HELLO = "hello"
    LOOKUP = "lookup"
    LEASE = "lease"
    RESERVE = "reserve"
    COMMIT = "commit"
    RELEASE = "release"
    TOUCH = "touch"
    PREFETCH = "prefetch"
    PUT = "put"
    GET = "get"
    STATS = "stats"
    NAMESPACES = "namespaces"
    DROP = "drop"
    FLUSH = "flush"


class Mode(StrEnum):
    """How payloads move."""

    SHARED = "shared"
    """The client maps the arena: no payload crosses the socket."""
    STREAM = "stream"
    """put and get carry payloads, for clients in another container."""


class WireCode(StrEnum):
    """Codes of refusals that only the protocol knows. Others are those of storage.errors."""

    VERSION = "protocol_version"
    """hello named a version this daemon does not speak; the connection ends."""
    FRAME = "frame"
    """The bytes are no frame within the limits; the connection ends, nothing after it is clear."""
    VERB = "unknown_verb"
    FIELD = "bad_field"
    """A field is missing, of another type or out of bounds (keys of the wrong length too)."""
    LIMIT = "limit"
    """The client holds or asks for more than one client may."""
    NOT_RESERVED = "not_reserved"
    """No such reservation of this connection (never was, committed, released or expired)."""
    NOT_LEASED = "not_leased"
    ORDER = "order"
    """hello was not the first request, or came twice, or the verb does not fit the mode."""
    PEER = "peer"
    """The peer's uid may not use this socket; the connection ends."""
    CLOSING = "closing"
    """The daemon is stopping."""
    INTERNAL = "internal"
    """A bug of the daemon; counted and logged there. The connection goes on."""


@dataclass(frozen=True, slots=True)
class Arena:
    """Where slots lie in the descriptor a client was given. Bytes."""

    total_bytes: int
    first_slot: int
    """Offset of slot 0."""
    slot_bytes: int
    payload_offset: int
    """From a slot's start to its payload."""
    page_bytes: int
    slot_count: int


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of one connection, told at hello. Checked before anything is allocated."""

    frame_bytes: int = 1 << 20
    """Longest frame without a payload."""
    keys: int = 4096
    """Keys of one request."""
    leases: int = 1024
    """Leases one client may hold."""
    leased_pages: int = 65536
    reservations: int = 256
    reserved_pages: int = 4096
    in_flight: int = 256
    """Requests of one client that wait for an answer."""
    hold_ms: int = 600_000
    """Longest hold of a lease or reservation."""
    wait_ms: int = 60_000
    """Longest wait a request may ask for."""
    ids: int = 64
    """Ids in one list of a release."""
