"""Requests as typed values: what a daemon gets to see after the codec.

Owns the fields of each verb's request and their bounds. Invariant: a value of these types was
checked field by field, so that whoever serves it checks only what depends on state. Called by the
daemon (parse_request) and by tests.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from tierkv.protocol import fields
from tierkv.protocol.errors import ProtocolError
from tierkv.protocol.fields import Check
from tierkv.protocol.frames import Frame
from tierkv.protocol.messages import (
    CHECKSUM_BYTES,
    PROTOCOL_VERSION,
    Limits,
    Mode,
    Verb,
    WireCode,
)
from tierkv.storage.types import KEY_BYTES

PAGE_BYTES_MAX = 1 << 40


@dataclass(frozen=True, slots=True)
class Hello:
    """First request of a connection."""

    version: int
    client: str
    page_bytes: int
    """0: an operator's connection, bound to no page class."""
    fingerprint: str
    """Text of storage.identity.to_json, or ""."""
    mode: str
    tenant: str


@dataclass(frozen=True, slots=True)
class Lookup:
    keys: bytes
    """KEY_BYTES each."""


@dataclass(frozen=True, slots=True)
class Lease:
    keys: bytes
    wait_ms: int
    hold_ms: int


@dataclass(frozen=True, slots=True)
class Reserve:
    count: int
    hold_ms: int


@dataclass(frozen=True, slots=True)
class Commit:
    reservation: int
    keys: bytes
    checksums: bytes
    """CHECKSUM_BYTES per key, or b"" when the client computed none."""


@dataclass(frozen=True, slots=True)
class Release:
    leases: list[int]
    reservations: list[int]


@dataclass(frozen=True, slots=True)
class Touch:
    keys: bytes


@dataclass(frozen=True, slots=True)
class Prefetch:
    keys: bytes
    wait_ms: int


@dataclass(frozen=True, slots=True)
class Put:
    reservation: int
    index: int
    payload: bytes


@dataclass(frozen=True, slots=True)
class Get:
    lease: int
    index: int


@dataclass(frozen=True, slots=True)
class Stats:
    pass


@dataclass(frozen=True, slots=True)
class Namespaces:
    pass


@dataclass(frozen=True, slots=True)
class Drop:
    """One of the two is empty."""

    namespace: bytes = b""
    keys: bytes = b""


@dataclass(frozen=True, slots=True)
class Flush:
    wait_ms: int


Body = (
    Hello
    | Lookup
    | Lease
    | Reserve
    | Commit
    | Release
    | Touch
    | Prefetch
    | Put
    | Get
    | Stats
    | Namespaces
    | Drop
    | Flush
)

_wait_ms = fields.whole_up_to("wait_ms")
_hold_ms = fields.whole_up_to("hold_ms")

_DECLARED: tuple[tuple[Verb, type[Any], dict[str, Check]], ...] = (
    (
        Verb.HELLO,
        Hello,
        {
            "version": fields.count,
            "client": fields.name,
            "page_bytes": fields.whole(PAGE_BYTES_MAX),
            "fingerprint": fields.long_text,
            "mode": fields.one_of(*(mode.value for mode in Mode)),
            "tenant": fields.name,
        },
    ),
    (Verb.LOOKUP, Lookup, {"keys": fields.keys}),
    (Verb.LEASE, Lease, {"keys": fields.keys, "wait_ms": _wait_ms, "hold_ms": _hold_ms}),
    (Verb.RESERVE, Reserve, {"count": fields.count, "hold_ms": _hold_ms}),
    (
        Verb.COMMIT,
        Commit,
        {
            "reservation": fields.an_id,
            "keys": fields.keys,
            "checksums": fields.packed(CHECKSUM_BYTES),
        },
    ),
    (Verb.RELEASE, Release, {"leases": fields.ids, "reservations": fields.ids}),
    (Verb.TOUCH, Touch, {"keys": fields.keys}),
    (Verb.PREFETCH, Prefetch, {"keys": fields.keys, "wait_ms": _wait_ms}),
    (
        Verb.PUT,
        Put,
        {"reservation": fields.an_id, "index": fields.count, "payload": fields.blob},
    ),
    (Verb.GET, Get, {"lease": fields.an_id, "index": fields.count}),
    (Verb.STATS, Stats, {}),
    (Verb.NAMESPACES, Namespaces, {}),
    (Verb.FLUSH, Flush, {"wait_ms": _wait_ms}),
)
_REQUESTS = {verb.value: (verb, kind, checks) for verb, kind, checks in _DECLARED}
_DROP_CHECKS: dict[str, Check] = {"namespace": fields.exactly(0, KEY_BYTES), "keys": fields.keys}


class Request(NamedTuple):
    """One checked request."""

    request_id: int
    verb: Verb
    body: Body


def parse_request(frame: Frame, limits: Limits) -> Request:
    """The request in a frame. Raises ProtocolError, its request_id set, for what is wrong in it.

    The error leaves the connection usable, but for WireCode.VERSION, after which it must end.
    """
    try:
        if frame.name == Verb.DROP:
            return Request(frame.request_id, Verb.DROP, _parse_drop(frame.fields, limits))
        known = _REQUESTS.get(frame.name)
        if known is None:
            raise ProtocolError(WireCode.VERB, f"unknown verb {fields.shown(frame.name)}")
        verb, kind, checks = known
        if verb is Verb.HELLO:
            _check_version(frame.fields)
        body: Body = fields.read(verb.value, kind, checks, frame.fields, limits)
        if isinstance(body, Commit):
            _check_commit(body)
        return Request(frame.request_id, verb, body)
    except ProtocolError as error:
        error.request_id = frame.request_id
        raise


def _check_version(values: Mapping[str, Any]) -> None:
    """Before any other field: another version may have other fields."""
    version = values.get("version")
    if type(version) is int and version != PROTOCOL_VERSION:
        raise ProtocolError(
            WireCode.VERSION,
            f"hello: this daemon speaks protocol version {PROTOCOL_VERSION}, the client "
            f"{version}; install the same TierKV on both sides",
        )


def _check_commit(body: Commit) -> None:
    expected = len(body.keys) // KEY_BYTES * CHECKSUM_BYTES
    if body.checksums and len(body.checksums) != expected:
        raise ProtocolError(
            WireCode.FIELD,
            f"commit: expected checksums to be 0 or {expected} bytes for "
            f"{len(body.keys) // KEY_BYTES} keys, got {len(body.checksums)}",
        )


def _parse_drop(values: Mapping[str, Any], limits: Limits) -> Drop:
    """A namespace or keys, not both; the other may be left out."""
    whole: dict[str, Any] = {"namespace": b"", "keys": b"", **values}
    body = fields.read(Verb.DROP.value, Drop, _DROP_CHECKS, whole, limits)
    if bool(body.namespace) == bool(body.keys):
        raise ProtocolError(WireCode.FIELD, "drop: expected either namespace or keys")
    return body
