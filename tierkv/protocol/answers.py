"""Answers as typed values: what a client gets to see after the codec.

Owns the fields of each verb's answer and their bounds. The daemon is checked as a client is: an
answer that breaks the contract raises ProtocolError and costs the connection, never a wrong page.
`to_fields` gives the map that frames.encode_answer takes. Called by both sides.
"""

from __future__ import annotations

from dataclasses import dataclass
from dataclasses import fields as fields_of
from typing import Any, TypeVar

from tierkv.protocol import fields
from tierkv.protocol.errors import ProtocolError
from tierkv.protocol.fields import Check
from tierkv.protocol.messages import (
    BOOT_TOKEN_BYTES,
    CHECKSUM_BYTES,
    OUTCOME_CODES,
    SLOT_ID_BYTES,
    TIER_CODES,
    Arena,
    Limits,
    WireCode,
)
from tierkv.storage.types import KEY_BYTES

_BYTES_MAX = 1 << 62

Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True)
class HelloAnswer:
    version: int
    boot_token: bytes
    """Another one than before: the daemon started anew, and all that was held is gone."""
    session: int
    namespace: bytes
    """32 bytes, or b"" without a fingerprint."""
    arena: dict[str, Any] | None
    """Fields of messages.Arena; None without shared memory."""
    limits: dict[str, Any]
    """Fields of messages.Limits."""


@dataclass(frozen=True, slots=True)
class LookupAnswer:
    tiers: bytes
    """TIER_CODES, one byte a key."""


@dataclass(frozen=True, slots=True)
class LeaseAnswer:
    """The leading run of the keys that is in host memory."""

    lease: int
    """Meaningless when the run is empty: nothing is held then."""
    slots: bytes
    tiers: bytes
    """Where each page was when it was asked for."""
    checksums: bytes
    """CHECKSUM_BYTES a page, zeros for a page without one; b"" where none are taken."""


@dataclass(frozen=True, slots=True)
class ReserveAnswer:
    reservation: int
    """Meaningless when there are no slots: nothing is held then."""
    slots: bytes


@dataclass(frozen=True, slots=True)
class CommitAnswer:
    outcomes: bytes
    """OUTCOME_CODES, one byte a key."""


@dataclass(frozen=True, slots=True)
class EmptyAnswer:
    """Of release, touch and put."""


@dataclass(frozen=True, slots=True)
class PrefetchAnswer:
    accepted: int


@dataclass(frozen=True, slots=True)
class GetAnswer:
    payload: bytes


@dataclass(frozen=True, slots=True)
class StatsAnswer:
    stats: dict[str, Any]


@dataclass(frozen=True, slots=True)
class NamespacesAnswer:
    namespaces: list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class DropAnswer:
    dropped: int


@dataclass(frozen=True, slots=True)
class FlushAnswer:
    durable: bool


_slots = fields.packed(SLOT_ID_BYTES)
_tier_max = max(TIER_CODES.values())
_outcome_max = max(OUTCOME_CODES.values())

_CHECKS: dict[type[Any], dict[str, Check]] = {
    HelloAnswer: {
        "version": fields.count,
        "boot_token": fields.exactly(BOOT_TOKEN_BYTES),
        "session": fields.an_id,
        "namespace": fields.exactly(0, KEY_BYTES),
        "arena": fields.optional_mapping,
        "limits": fields.mapping,
    },
    LookupAnswer: {"tiers": fields.codes(_tier_max)},
    LeaseAnswer: {
        "lease": fields.an_id,
        "slots": _slots,
        # A page that is held was somewhere.
        "tiers": fields.codes(_tier_max, lowest=1),
        "checksums": fields.packed(CHECKSUM_BYTES),
    },
    ReserveAnswer: {"reservation": fields.an_id, "slots": _slots},
    CommitAnswer: {"outcomes": fields.codes(_outcome_max)},
    EmptyAnswer: {},
    PrefetchAnswer: {"accepted": fields.count},
    GetAnswer: {"payload": fields.blob},
    StatsAnswer: {"stats": fields.mapping},
    NamespacesAnswer: {"namespaces": fields.mappings},
    DropAnswer: {"dropped": fields.whole(_BYTES_MAX)},
    FlushAnswer: {"durable": fields.truth},
}


def to_fields(answer: object) -> dict[str, Any]:
    """The map of an answer (or of any value of this package). Shallow: nothing is copied."""
    return {each.name: getattr(answer, each.name) for each in fields_of(answer)}  # type: ignore[arg-type]


def parse_answer(kind: type[Answer], values: dict[str, Any], limits: Limits) -> Answer:
    """The answer of type `kind`. Raises ProtocolError when a field is missing or wrong."""
    answer = fields.read(kind.__name__, kind, _CHECKS[kind], values, limits)
    if isinstance(answer, LeaseAnswer):
        pages = len(answer.slots) // SLOT_ID_BYTES
        checksums = len(answer.checksums)
        if len(answer.tiers) != pages or checksums not in (0, pages * CHECKSUM_BYTES):
            raise ProtocolError(
                WireCode.FIELD,
                f"lease: expected a tier and a checksum for each of {pages} slots, got "
                f"{len(answer.tiers)} tiers and {checksums} bytes of checksums",
            )
    return answer


def parse_arena(values: dict[str, Any]) -> Arena:
    """The arena of a hello. Raises ProtocolError when its slots do not fit into it."""
    checks = {each.name: fields.whole(_BYTES_MAX) for each in fields_of(Arena)}
    arena = fields.read("hello: arena", Arena, checks, values, Limits())
    sound = (
        arena.payload_offset + arena.page_bytes <= arena.slot_bytes
        and arena.first_slot + arena.slot_count * arena.slot_bytes <= arena.total_bytes
        and arena.page_bytes > 0
        and arena.slot_count > 0
    )
    if not sound:
        raise ProtocolError(WireCode.FIELD, f"hello: slots do not fit into the arena: {arena}")
    return arena


def parse_limits(values: dict[str, Any]) -> Limits:
    """The limits of a hello. What a later daemon adds is passed over."""
    names = [each.name for each in fields_of(Limits)]
    known = {name: values[name] for name in names if name in values}
    checks = {name: fields.whole(_BYTES_MAX, lowest=1) for name in known}
    return fields.read("hello: limits", Limits, checks, known, Limits())
