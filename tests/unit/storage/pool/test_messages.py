"""docs/formats/pool.md: its worked example is what the code says; and messages that are none."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierkv.storage.checksum import header_checksum
from tierkv.storage.errors import TierIOError
from tierkv.storage.pool.envelope import ENVELOPE_BYTES, MESSAGE_BYTES_MAX, Envelope, pack
from tierkv.storage.pool.messages import (
    FINGERPRINTS_MAX,
    LOOKUP_KEYS_MAX,
    PAGE_SIZES_MAX,
    PAGES_MAX,
    Answer,
    AnyRequest,
    Changes,
    Hello,
    LeaseAsk,
    LeasedPage,
    LeaseGrant,
    Lookup,
    LookupAnswer,
    OfferedPage,
    Refusal,
    ReleaseAsk,
    Released,
    Since,
    SnapshotAsk,
    SnapshotPart,
    Status,
    StoreAnswer,
    StoreAsk,
    StoreOutcome,
    Sync,
    SyncAnswer,
    Verb,
    read_answer,
    read_request,
    write_answer,
    write_request,
)
from tierkv.storage.types import PageKey

DOCUMENT = Path(__file__).parents[4] / "docs" / "formats" / "pool.md"
FIRST, SECOND = PageKey(bytes(range(32))), PageKey(bytes(range(32, 64)))
CHECKSUM = bytes(range(0xF0, 0x100))
U64 = (1 << 64) - 1


def fingerprints(*numbers: int) -> np.ndarray[Any, np.dtype[np.uint64]]:
    return np.array(numbers, np.uint64)


PRINTED = int.from_bytes(FIRST[:8], "little")
REQUESTS: dict[str, AnyRequest] = {
    "hello": Hello("a", 7, ()),
    "sync": Sync((Since(5000, 3, 41),)),
    "snapshot": SnapshotAsk(5000, 0, 0, 0, 65536),
    "lookup": Lookup(5000, (FIRST, SECOND)),
    "lease": LeaseAsk(5000, (FIRST, SECOND), 10_000, 500),
    "release": ReleaseAsk((6,)),
    "store": StoreAsk(5000, 1, (OfferedPage(SECOND, 8192, CHECKSUM),), 2000),
}
ANSWERS: dict[str, Answer] = {
    "hello": Hello("b", 9, (5000,), address="10.0.0.2:7422"),
    "sync": SyncAnswer(
        False, (5000,), (Changes(5000, 3, 42, fingerprints(PRINTED), fingerprints()),)
    ),
    "snapshot": SnapshotPart(3, 42, 1, fingerprints(PRINTED)),
    "lookup": LookupAnswer((True, False)),
    "lease": LeaseGrant(6, 1, (LeasedPage(20480, CHECKSUM), None)),
    "release": Released(1),
    "store": StoreAnswer((StoreOutcome.COMMITTED,)),
}
SHOWN = sorted(set(REQUESTS) - {"hello"})


def dumped(name: str) -> bytes:
    """The bytes of one hex dump; each line's offset is checked."""
    text = DOCUMENT.read_text(encoding="utf-8")
    block = re.split(rf"(?:^|\n){name}\n(?=000)", text)[1].split("\n\n")[0].split("```")[0]
    out = b""
    for line in block.splitlines():
        offset, rest = line.split("  ", 1)
        assert int(offset) == len(out), line
        out += bytes.fromhex(re.split(r" {2,}", rest)[0])
    return out


def asked(name: str) -> bytes:
    return write_request(REQUESTS[name], 7, 9)


def answered(name: str) -> bytes:
    return write_answer(REQUESTS[name].verb, ANSWERS[name], 9, 7)


def same(one: object, other: object) -> bool:
    """Equality that looks into the arrays of values."""
    if isinstance(one, np.ndarray):
        return isinstance(other, np.ndarray) and one.tolist() == other.tolist()
    if isinstance(one, (Changes, SnapshotPart)):
        names = type(one).__slots__
        return type(one) is type(other) and all(
            same(getattr(one, name), getattr(other, name)) for name in names
        )
    if isinstance(one, SyncAnswer):
        assert isinstance(other, SyncAnswer)
        head = (one.leaving, one.page_sizes) == (other.leaving, other.page_sizes)
        return head and all(map(same, one.changes, other.changes))
    return one == other


def sealed(message: bytes) -> bytes:
    """The message with the digest that belongs to it."""
    digest = header_checksum(message[:24] + message[32:])
    return message[:24] + digest.to_bytes(8, "little") + message[32:]


def with_body(verb: Verb, body: bytes, status: Status = Status.REQUEST) -> bytes:
    return pack(Envelope(verb, status, 7, 9), body)


@pytest.mark.parametrize("name", SHOWN)
def test_worked_example_request(name: str) -> None:
    assert dumped(name) == asked(name)
    envelope, request = read_request(dumped(name)) or (None, None)
    assert envelope == (REQUESTS[name].verb, Status.REQUEST, 7, 9)
    assert request == REQUESTS[name]


@pytest.mark.parametrize("name", sorted(ANSWERS))
def test_worked_example_answer(name: str) -> None:
    assert dumped(f"{name} answer") == answered(name)
    envelope, answer = read_answer(dumped(f"{name} answer"), REQUESTS[name])
    assert envelope == (REQUESTS[name].verb, Status.OK, 9, 7)
    assert same(answer, ANSWERS[name])


def test_worked_example_refusals() -> None:
    fenced = Refusal(Status.FENCED, 12, "10.0.0.3:7422")
    assert dumped("fenced") == write_answer(Verb.SYNC, fenced, 9, 7)
    assert read_answer(dumped("fenced"), REQUESTS["sync"])[1] == fenced
    refused = Refusal(Status.REFUSED, text="no key")
    assert dumped("refused") == write_answer(Verb.UNREAD, refused, 9, 0)


@pytest.mark.parametrize("code", [*Verb, *Status])
def test_every_code_is_in_the_document(code: Verb | Status) -> None:
    assert f"| {code.value} | {code.name} |" in DOCUMENT.read_text(encoding="utf-8")


def test_every_outcome_is_in_the_document() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    for outcome in StoreOutcome:
        assert re.search(rf"{outcome.value} {outcome.name}\b", text), outcome


# --- what was said comes back ------------------------------------------------------------------

numbers = st.integers(0, U64)
epochs = st.integers(1, U64)
page_sizes = st.integers(1, (1 << 32) - 1)
offsets = st.integers(0, (1 << 62) - 1)
keys = st.binary(min_size=32, max_size=32).map(PageKey)
checksums = st.binary(min_size=16, max_size=16)
names = (
    st.text(st.characters(codec="utf-8"), min_size=1, max_size=255)
    .filter(str.isprintable)
    .filter(lambda name: len(name.encode()) <= 255)
)
some_keys = st.lists(keys, min_size=1, max_size=40).map(tuple)
arrays = st.lists(numbers, max_size=30).map(lambda values: np.array(values, np.uint64))
hellos = st.builds(
    Hello,
    names,
    epochs,
    st.lists(page_sizes, max_size=PAGE_SIZES_MAX).map(tuple),
    st.booleans(),
    st.booleans(),
)
requests = st.one_of(
    hellos,
    st.builds(
        Sync, st.lists(st.builds(Since, page_sizes, numbers, numbers), max_size=5).map(tuple)
    ),
    st.builds(SnapshotAsk, page_sizes, numbers, numbers, numbers, st.integers(1, FINGERPRINTS_MAX)),
    st.builds(Lookup, page_sizes, some_keys),
    st.builds(LeaseAsk, page_sizes, some_keys, st.integers(1, 600_000), st.integers(0, 600_000)),
    st.builds(ReleaseAsk, st.lists(numbers, min_size=1, max_size=40).map(tuple)),
    st.builds(
        StoreAsk,
        page_sizes,
        epochs,
        st.lists(st.builds(OfferedPage, keys, offsets, checksums), min_size=1, max_size=9).map(
            tuple
        ),
        st.integers(1, 600_000),
    ),
)


@given(requests, epochs, epochs)
def test_a_request_comes_back_as_it_was(request: AnyRequest, sender: int, receiver: int) -> None:
    parts = read_request(write_request(request, sender, receiver))
    assert parts is not None
    assert parts[0] == (request.verb, Status.REQUEST, sender, receiver)
    assert parts[1] == request


@given(st.data())
def test_an_answer_comes_back_as_it_was(data: st.DataObject) -> None:
    request, answer = data.draw(
        st.one_of(hello_talk(), sync_talk(), snapshot_talk(), page_talk()), label="talk"
    )
    envelope, got = read_answer(write_answer(request.verb, answer, 5, 6), request)
    assert envelope == (request.verb, Status.OK, 5, 6)
    assert same(got, answer)


def hello_talk() -> st.SearchStrategy[tuple[Any, Any]]:
    return st.tuples(hellos, hellos)


@st.composite
def sync_talk(draw: st.DrawFn) -> tuple[Any, Any]:
    sizes = draw(st.lists(page_sizes, max_size=5, unique=True))
    changes = []
    for size in sizes:
        needed = draw(st.booleans())
        added, removed = (
            (fingerprints(), fingerprints()) if needed else (draw(arrays), draw(arrays))
        )
        changes.append(
            Changes(size, draw(numbers), draw(numbers), added, removed, draw(st.booleans()), needed)
        )
    request = Sync(tuple(Since(size, draw(numbers), draw(numbers)) for size in sizes))
    served = tuple(draw(st.lists(page_sizes, max_size=5)))
    return request, SyncAnswer(draw(st.booleans()), served, tuple(changes))


@st.composite
def snapshot_talk(draw: st.DrawFn) -> tuple[Any, Any]:
    whole = draw(arrays)
    token, seq = draw(numbers), draw(numbers)
    start, count = draw(st.integers(0, 40)), draw(st.integers(1, 40))
    same_one = draw(st.booleans())
    asked_token, asked_seq = (token, seq) if same_one else (draw(numbers), draw(numbers))
    begun = (asked_token, asked_seq) == (token, seq)
    part = whole[start : start + count] if begun else whole[:count]
    request = SnapshotAsk(5000, asked_token, asked_seq, start, count)
    return request, SnapshotPart(token, seq, len(whole), part)


@st.composite
def page_talk(draw: st.DrawFn) -> tuple[Any, Any]:
    wanted = draw(some_keys)
    kind = draw(st.sampled_from(["lookup", "lease", "release", "store"]))
    if kind == "lookup":
        return Lookup(1, wanted), LookupAnswer(tuple(draw(st.booleans()) for _ in wanted))
    if kind == "lease":
        page = st.none() | st.builds(LeasedPage, offsets, checksums)
        pages = tuple(draw(page) for _ in wanted)
        lease = draw(epochs) if any(pages) else 0
        return LeaseAsk(1, wanted, 1, 0), LeaseGrant(lease, draw(epochs), pages)
    if kind == "release":
        ids = tuple(range(len(wanted)))
        return ReleaseAsk(ids), Released(draw(st.integers(0, len(ids))))
    offered = tuple(OfferedPage(key, 0, bytes(16)) for key in wanted)
    outcomes = tuple(draw(st.sampled_from(StoreOutcome)) for _ in wanted)
    return StoreAsk(1, 1, offered, 1), StoreAnswer(outcomes)


@given(st.sampled_from(Status), numbers, st.text(max_size=600))
def test_a_refusal_is_one_bounded_printable_line(status: Status, epoch: int, text: str) -> None:
    if status in (Status.REQUEST, Status.OK):
        return
    message = write_answer(Verb.LOOKUP, Refusal(status, epoch, text), 5, 0)
    assert len(message) <= ENVELOPE_BYTES + 4 + 512
    got = read_answer(message, Lookup(1, (FIRST,)))[1]
    assert isinstance(got, Refusal) and got.status is status
    assert got.text.isprintable() and len(got.text) <= 512
    carries = status in (Status.FENCED, Status.STALE)
    assert got.epoch == (epoch if carries else 0)


# --- what is no message is refused -------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(REQUESTS))
def test_every_flipped_bit_and_every_cut_of_a_request_is_refused(name: str) -> None:
    message = asked(name)
    for changed in damaged(message):
        refused_request(changed)


@pytest.mark.parametrize("name", sorted(ANSWERS))
def test_every_flipped_bit_and_every_cut_of_an_answer_is_refused(name: str) -> None:
    for changed in damaged(answered(name)):
        with pytest.raises(TierIOError, match="read pool message"):
            read_answer(changed, REQUESTS[name])


def damaged(message: bytes) -> list[bytes]:
    """The message with each single bit flipped, with each tail cut off, and with a byte more."""
    out = [message[:length] for length in range(len(message))]
    for bit in range(8 * len(message)):
        changed = bytearray(message)
        changed[bit // 8] ^= 1 << (bit % 8)
        out.append(bytes(changed))
    return [*out, message + b"\0"]


def refused_request(message: bytes) -> None:
    """None for a digest that is wrong, else one line."""
    try:
        assert read_request(message) is None
    except TierIOError as error:
        assert "read pool message" in str(error) and "\n" not in str(error)


@pytest.mark.parametrize("name", sorted(REQUESTS))
def test_a1_a_cut_body_with_the_right_digest_is_refused(name: str) -> None:
    message = asked(name)
    for changed in [*(message[:end] for end in range(32, len(message))), message + b"\0"]:
        with pytest.raises(TierIOError, match="read pool message"):
            read_request(sealed(changed))


@pytest.mark.parametrize("name", sorted(ANSWERS))
def test_a1_a_cut_answer_with_the_right_digest_is_refused(name: str) -> None:
    message = answered(name)
    for changed in [*(message[:end] for end in range(32, len(message))), message + b"\0"]:
        with pytest.raises(TierIOError, match="read pool message"):
            read_answer(sealed(changed), REQUESTS[name])


@given(st.data())
def test_a1_a_liar_with_the_right_digest_is_refused_or_means_what_it_says(
    data: st.DataObject,
) -> None:
    name = data.draw(st.sampled_from(sorted(REQUESTS)))
    message = bytearray(asked(name))
    for _ in range(data.draw(st.integers(1, 4))):
        message[data.draw(st.integers(6, len(message) - 1))] = data.draw(st.integers(0, 255))
    changed = sealed(bytes(message))
    try:
        parts = read_request(changed)
    except TierIOError:
        return
    assert parts is not None
    envelope, request = parts
    assert write_request(request, envelope.sender_epoch, envelope.receiver_epoch) == changed


@given(st.binary(max_size=200))
def test_a1_garbage_is_refused(garbage: bytes) -> None:
    refused_request(garbage)
    with pytest.raises(TierIOError):
        read_answer(garbage, Lookup(1, (FIRST,)))


def test_another_version_is_refused_by_both_with_both_numbers() -> None:
    changed = asked("hello")[:4] + b"\x02\x00" + asked("hello")[6:]
    for message in (changed, sealed(changed)):
        with pytest.raises(TierIOError, match="version 1 here, 2 there"):
            read_request(message)
        with pytest.raises(TierIOError, match="version 1 here, 2 there"):
            read_answer(message, Hello("a", 1, ()))


def test_a_message_above_the_limit_is_refused_unread() -> None:
    with pytest.raises(TierIOError, match=f"to {MESSAGE_BYTES_MAX} bytes"):
        read_request(bytes(MESSAGE_BYTES_MAX + 1))


def u32(number: int) -> bytes:
    return number.to_bytes(4, "little")


def u64(number: int) -> bytes:
    return number.to_bytes(8, "little")


ABOVE: dict[str, tuple[Verb, bytes]] = {
    "no name": (Verb.HELLO, u64(1) + b"\0\0\0\0"),
    "page sizes": (Verb.HELLO, u64(1) + b"\0\1\x41\0a" + u64(1) * 65),
    "flags": (Verb.HELLO, u64(1) + b"\4\1\0\0a"),
    "name": (Verb.HELLO, u64(1) + b"\0\2\0\0a\n"),
    "not utf-8": (Verb.HELLO, u64(1) + b"\0\1\0\0\xff"),
    "epoch 0": (Verb.HELLO, u64(0) + b"\0\1\0\0a"),
    "page size 0": (Verb.HELLO, u64(1) + b"\0\1\1\0a" + u64(0)),
    "wants": (Verb.SYNC, u32(PAGE_SIZES_MAX + 1) + u64(1) * 3 * (PAGE_SIZES_MAX + 1)),
    "part": (Verb.SNAPSHOT, u64(1) * 4 + u32(FINGERPRINTS_MAX + 1)),
    "empty part": (Verb.SNAPSHOT, u64(1) * 4 + u32(0)),
    "lookup": (Verb.LOOKUP, u64(1) + u32(LOOKUP_KEYS_MAX + 1) + FIRST * (LOOKUP_KEYS_MAX + 1)),
    "nothing": (Verb.LOOKUP, u64(1) + u32(0)),
    "huge": (Verb.LOOKUP, u64(1) + u32((1 << 32) - 1) + FIRST),
    "page bytes": (Verb.LOOKUP, u64(1 << 32) + u32(1) + FIRST),
    "lease": (Verb.LEASE, u64(1) + u32(PAGES_MAX + 1) + u32(1) * 2 + FIRST * (PAGES_MAX + 1)),
    "hold": (Verb.LEASE, u64(1) + u32(1) + u32(600_001) + u32(0) + FIRST),
    "no hold": (Verb.LEASE, u64(1) + u32(1) + u32(0) + u32(0) + FIRST),
    "wait": (Verb.LEASE, u64(1) + u32(1) + u32(1) + u32(600_001) + FIRST),
    "release": (Verb.RELEASE, u32(PAGES_MAX + 1) + u64(1) * (PAGES_MAX + 1)),
    "store": (Verb.STORE, u64(1) * 2 + u32(PAGES_MAX + 1) + u32(1) + bytes(56) * (PAGES_MAX + 1)),
    "generation": (Verb.STORE, u64(1) + u64(0) + u32(1) + u32(1) + bytes(56)),
    "offset": (Verb.STORE, u64(1) * 2 + u32(1) * 2 + FIRST + u64(1 << 62) + CHECKSUM),
    "no request": (Verb.UNREAD, b""),
}


@pytest.mark.parametrize("case", sorted(ABOVE))
def test_a1_what_is_out_of_bounds_is_refused(case: str) -> None:
    with pytest.raises(TierIOError, match="read pool message"):
        read_request(with_body(*ABOVE[case]))


def test_a1_epochs_of_nobody_are_refused() -> None:
    body = REQUESTS["lookup"].encode()
    for sender, receiver in ((0, 9), (7, 0)):
        with pytest.raises(TierIOError, match="epoch"):
            read_request(pack(Envelope(Verb.LOOKUP, Status.REQUEST, sender, receiver), body))
    hello = pack(Envelope(Verb.HELLO, Status.REQUEST, 7, 0), REQUESTS["hello"].encode())
    assert read_request(hello) is not None


MISFITS: dict[str, tuple[str, bytes]] = {
    "one bit too few": ("lookup", LookupAnswer((True,)).encode()),
    "a bit in the padding": ("lookup", u32(2) + b"\x07"),
    "one page too many": ("lease", LeaseGrant(0, 1, (None,) * 3).encode()),
    "pages without a lease": ("lease", LeaseGrant(0, 1, (LeasedPage(1, CHECKSUM), None)).encode()),
    "a lease of nothing": ("lease", LeaseGrant(4, 1, (None, None)).encode()),
    "no generation": ("lease", LeaseGrant(0, 0, (None, None)).encode()),
    "an outcome there is not": ("store", u32(1) + b"\x06"),
    "no outcome": ("store", u32(1) + b"\x00"),
    "released more than asked": ("release", Released(2).encode()),
    "changes nobody asked for": (
        "sync",
        SyncAnswer(False, (), (Changes(1, 0, 0, fingerprints(), fingerprints()),)).encode(),
    ),
    "a snapshot's part is short": ("snapshot", SnapshotPart(3, 1, 2, fingerprints(1)).encode()),
    "a snapshot's part is long": ("snapshot", SnapshotPart(3, 1, 1, fingerprints(1, 2)).encode()),
    "changes and a snapshot": (
        "sync",
        SyncAnswer(
            False, (), (Changes(5000, 0, 0, fingerprints(1), fingerprints(), False, True),)
        ).encode(),
    ),
}


@pytest.mark.parametrize("case", sorted(MISFITS))
def test_an_answer_that_does_not_fit_its_request_is_refused(case: str) -> None:
    name, body = MISFITS[case]
    message = with_body(REQUESTS[name].verb, body, Status.OK)
    with pytest.raises(TierIOError, match="read pool message"):
        read_answer(message, REQUESTS[name])


def test_an_answer_to_something_else_is_refused() -> None:
    for message in (answered("release"), asked("lookup"), with_body(Verb.UNREAD, b"", Status.OK)):
        with pytest.raises(TierIOError, match="does not answer LOOKUP"):
            read_answer(message, Lookup(1, (FIRST,)))


def test_a1_changes_of_all_page_sizes_together_are_bounded() -> None:
    half = np.zeros(FINGERPRINTS_MAX // 2 + 1, np.uint64)
    request = Sync((Since(1, 0, 0), Since(2, 0, 0)))
    parts = tuple(Changes(size, 1, 1, half, fingerprints()) for size in (1, 2))
    message = write_answer(Verb.SYNC, SyncAnswer(False, (), parts), 5, 6)
    with pytest.raises(TierIOError, match="changes"):
        read_answer(message, request)
