"""Every field of every request: accepted at its bounds, refused by name past them."""

from __future__ import annotations

from typing import Any

import pytest

from tierkv.protocol import requests
from tierkv.protocol.errors import ProtocolError
from tierkv.protocol.frames import ID_MAX, Frame
from tierkv.protocol.messages import PROTOCOL_VERSION, Limits, Verb, WireCode
from tierkv.protocol.requests import parse_request

LIMITS = Limits(keys=4, ids=3)
KEYS = bytes(range(64))
HELLO: dict[str, Any] = {
    "version": PROTOCOL_VERSION,
    "client": "test",
    "page_bytes": 4096,
    "fingerprint": "",
    "mode": "shared",
    "tenant": "",
}
GOOD: dict[Verb, dict[str, Any]] = {
    Verb.HELLO: HELLO,
    Verb.LOOKUP: {"keys": KEYS},
    Verb.LEASE: {"keys": KEYS, "wait_ms": 10, "hold_ms": 10},
    Verb.RESERVE: {"count": 2, "hold_ms": 10},
    Verb.COMMIT: {"reservation": 1, "keys": KEYS, "checksums": bytes(32)},
    Verb.RELEASE: {"leases": [1, ID_MAX], "reservations": []},
    Verb.TOUCH: {"keys": KEYS},
    Verb.PREFETCH: {"keys": KEYS, "wait_ms": 0},
    Verb.PUT: {"reservation": 1, "index": 0, "payload": b"x"},
    Verb.GET: {"lease": 1, "index": 0},
    Verb.STATS: {},
    Verb.NAMESPACES: {},
    Verb.DROP: {"namespace": bytes(32)},
    Verb.FLUSH: {"wait_ms": 10},
}


def parse(verb: str, fields: dict[str, Any]) -> requests.Request:
    return parse_request(Frame(7, verb, fields), LIMITS)


@pytest.mark.parametrize("verb", list(Verb))
def test_every_verb_has_a_request(verb: Verb) -> None:
    request = parse(verb, GOOD[verb])
    assert request.request_id == 7
    assert request.verb is verb
    for name, value in GOOD[verb].items():
        assert getattr(request.body, name) == value


@pytest.mark.parametrize("verb", [verb for verb in Verb if verb is not Verb.DROP])
def test_a_missing_or_unknown_field_is_named(verb: Verb) -> None:
    for name in GOOD[verb]:
        less = {field: value for field, value in GOOD[verb].items() if field != name}
        with pytest.raises(ProtocolError, match=name) as caught:
            parse(verb, less)
        assert caught.value.code is WireCode.FIELD
        assert caught.value.request_id == 7
    with pytest.raises(ProtocolError, match="surprise"):
        parse(verb, {**GOOD[verb], "surprise": 1})


@pytest.mark.parametrize(
    ("verb", "field", "value"),
    [
        (Verb.LOOKUP, "keys", KEYS[:-1]),
        (Verb.LOOKUP, "keys", bytes(5 * 32)),
        (Verb.LOOKUP, "keys", "text"),
        (Verb.LOOKUP, "keys", [KEYS]),
        (Verb.LEASE, "wait_ms", LIMITS.wait_ms + 1),
        (Verb.LEASE, "wait_ms", -1),
        (Verb.LEASE, "wait_ms", 1.0),
        (Verb.LEASE, "hold_ms", LIMITS.hold_ms + 1),
        (Verb.RESERVE, "count", -1),
        (Verb.RESERVE, "count", True),
        (Verb.RESERVE, "count", 1 << 32),
        (Verb.COMMIT, "reservation", None),
        (Verb.COMMIT, "checksums", bytes(16)),
        (Verb.COMMIT, "checksums", bytes(15)),
        (Verb.RELEASE, "leases", [1, 2, 3, 4]),
        (Verb.RELEASE, "leases", [-1]),
        (Verb.RELEASE, "reservations", b"1"),
        (Verb.PUT, "payload", "text"),
        (Verb.GET, "index", 1 << 32),
        (Verb.HELLO, "mode", "carrier pigeon"),
        (Verb.HELLO, "client", "x" * 257),
        (Verb.HELLO, "fingerprint", b""),
        (Verb.HELLO, "page_bytes", -4096),
        (Verb.HELLO, "version", "1"),
        (Verb.DROP, "namespace", bytes(31)),
        (Verb.DROP, "keys", bytes(33)),
    ],
)
def test_a_bad_field_is_named(verb: Verb, field: str, value: Any) -> None:
    with pytest.raises(ProtocolError, match=field) as caught:
        parse(verb, {**GOOD[verb], field: value})
    assert caught.value.code is WireCode.FIELD
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    ("verb", "field", "value"),
    [
        (Verb.LOOKUP, "keys", b""),
        (Verb.LOOKUP, "keys", bytes(4 * 32)),
        (Verb.LEASE, "wait_ms", LIMITS.wait_ms),
        (Verb.LEASE, "hold_ms", LIMITS.hold_ms),
        (Verb.COMMIT, "checksums", b""),
        (Verb.COMMIT, "reservation", ID_MAX),
        (Verb.RELEASE, "leases", [1, 2, 3]),
        (Verb.HELLO, "page_bytes", 0),
    ],
)
def test_fields_at_their_bounds(verb: Verb, field: str, value: Any) -> None:
    assert getattr(parse(verb, {**GOOD[verb], field: value}).body, field) == value


def test_another_version_is_told_before_its_fields_are_looked_at() -> None:
    with pytest.raises(ProtocolError, match="version 1") as caught:
        parse(Verb.HELLO, {"version": PROTOCOL_VERSION + 1, "colour": "blue"})
    assert caught.value.code is WireCode.VERSION


def test_unknown_verb() -> None:
    with pytest.raises(ProtocolError, match="'steal'") as caught:
        parse("steal", {})
    assert caught.value.code is WireCode.VERB


@pytest.mark.parametrize("fields", [{}, {"namespace": bytes(32), "keys": KEYS}])
def test_drop_takes_either_a_namespace_or_keys(fields: dict[str, Any]) -> None:
    with pytest.raises(ProtocolError, match="either"):
        parse(Verb.DROP, fields)
