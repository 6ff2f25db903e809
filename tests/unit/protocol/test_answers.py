"""Answers are checked as requests are; packed lists and stats come back as they went."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from tierkv.protocol import answers, packing
from tierkv.protocol.answers import parse_answer, parse_arena, parse_limits, to_fields
from tierkv.protocol.errors import ProtocolError
from tierkv.protocol.messages import Arena, Limits
from tierkv.protocol.stats import class_stats, parse_stats, stats_fields
from tierkv.storage.base import MoverStats, StoreStats, TierStats
from tierkv.storage.types import CommitOutcome, PageKey, TierName

LIMITS = Limits()
ARENA = Arena(4096 + 2 * 8192, 4096, 8192, 4096, 4096, 2)


def tier(name: TierName) -> TierStats:
    values: dict[str, Any] = {
        each.name: index for index, each in enumerate(dataclasses.fields(TierStats))
    }
    return TierStats(**{**values, "name": name, "degraded": None})


STATS = StoreStats(
    tiers=(tier(TierName.HOST), tier(TierName.NVME)),
    mover=MoverStats(1, 2, 3, 4, 5, 6, 7, read_bytes_per_s={TierName.NVME: 1.5}),
    admission_rejected=3,
    restored_pages={TierName.HOST: 4},
    degraded="nvme: off",
)


def test_a_lease_has_one_of_everything_for_each_slot() -> None:
    good = answers.LeaseAnswer(3, packing.pack_slots([5, 6]), b"\x01\x02", bytes(32))
    assert parse_answer(answers.LeaseAnswer, to_fields(good), LIMITS) == good
    bare = dataclasses.replace(good, checksums=b"")
    assert parse_answer(answers.LeaseAnswer, to_fields(bare), LIMITS) == bare
    for change in (
        {"tiers": b"\x01"},
        {"checksums": bytes(16)},
        {"slots": bytes(5)},
        {"tiers": b"\x00\x01"},
    ):
        with pytest.raises(ProtocolError):
            parse_answer(answers.LeaseAnswer, to_fields(good) | change, LIMITS)


@pytest.mark.parametrize(
    "change",
    [
        {"slot_count": 3},
        {"page_bytes": 4097},
        {"page_bytes": 0},
        {"slot_count": 0},
        {"payload_offset": 4097},
        {"first_slot": -1},
        {"total_bytes": "20480"},
    ],
)
def test_an_arena_whose_slots_lie_outside_is_refused(change: dict[str, Any]) -> None:
    assert parse_arena(to_fields(ARENA)) == ARENA
    with pytest.raises(ProtocolError):
        parse_arena(to_fields(ARENA) | change)


def test_limits_of_a_later_daemon_are_read() -> None:
    assert parse_limits(to_fields(Limits(keys=9)) | {"later": 1}) == Limits(keys=9)
    with pytest.raises(ProtocolError):
        parse_limits({"keys": 0})


def test_packed_lists() -> None:
    keys = [PageKey(bytes([n]) * 32) for n in range(3)]
    assert packing.split_keys(b"".join(keys)) == keys
    assert list(packing.unpack_slots(packing.pack_slots([0, 1, 2**32 - 1]))) == [0, 1, 2**32 - 1]
    sums = [b"", bytes(range(16))]
    assert packing.split_checksums(packing.pack_checksums(sums)) == sums
    tiers = [None, TierName.HOST, TierName.NVME, TierName.REMOTE]
    assert packing.unpack_tiers(packing.pack_tiers(tiers)) == tiers
    assert packing.unpack_outcomes(packing.pack_outcomes(CommitOutcome)) == list(CommitOutcome)
    with pytest.raises(ProtocolError):
        packing.unpack_tiers(b"\x09")
    with pytest.raises(ProtocolError):
        packing.unpack_outcomes(b"\x09")


def test_stats_come_back_equal() -> None:
    assert parse_stats(stats_fields(STATS)) == STATS


def test_stats_of_another_version() -> None:
    fields = stats_fields(STATS)
    assert parse_stats(fields | {"later": {"x": 1}}) == STATS
    del fields["missed_pages"]
    assert parse_stats(fields).missed_pages == 0
    for change in ({"tiers": 1}, {"admission_rejected": "3"}, {"mover": None}):
        with pytest.raises(ProtocolError, match=next(iter(change))):
            parse_stats(fields | change)
    del fields["mover"]
    with pytest.raises(ProtocolError, match="mover"):
        parse_stats(fields)


def test_stats_of_one_class() -> None:
    fields = stats_fields(STATS)
    by_name = {each["name"]: each for each in fields["tiers"]}
    answer = {"classes": [{"page_bytes": 1}, {"page_bytes": 2, **fields, "tiers": by_name}]}
    assert class_stats(answer, 2) == STATS
    assert class_stats(answer, 3) is None
    assert class_stats({}, 3) is None
