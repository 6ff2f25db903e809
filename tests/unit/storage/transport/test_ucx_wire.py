"""Messages and addresses of the ucx plane: round trips, and rubbish of every kind."""

from __future__ import annotations

import random
import struct
from hashlib import blake2b

import pytest

from tierkv.storage.errors import ConfigError, TierIOError
from tierkv.storage.transport.base import PageOutcome, PageRange
from tierkv.storage.transport.ucx_address import (
    ADDRESS_BYTES_MAX,
    TcpAddresses,
    WholeAddresses,
    device_of,
)
from tierkv.storage.transport.ucx_lane import tag_of
from tierkv.storage.transport.ucx_library import TAGS
from tierkv.storage.transport.ucx_wire import (
    NO_LANE,
    PROOF_BYTES,
    Hello,
    Offer,
    ReadRequest,
    Side,
    pack_hello,
    pack_offer,
    pack_read,
    pack_result,
    request_bytes_max,
    result_bytes,
    unpack_offer,
    unpack_request,
    unpack_result,
)

SECRET = bytes(range(32))
LANE = bytes(range(16))
SEED = 20261129
OFFER = Offer((1, 22), SECRET, b"address", {1: 4096, 9: 1 << 40})
READ = ReadRequest(LANE, 5, 9, 1.5, [PageRange(0, 1), PageRange((1 << 63) - 1, 0xFFFFFFFF)])
HELLO = Hello(LANE, NO_LANE, (1 << 64) - 1, b"address")


def loopback_address(identity: bytes = bytes(8), port: int = 1, machine: int = 0) -> bytes:
    """An address of the form that UCX gives to its tcp on a loopback device."""
    return b"\x20" + identity + bytes([machine]) * 35 + struct.pack(">H", port) + b"\x86\x80"


def ip_address(host: bytes, identity: bytes = bytes(8), port: int = 1) -> bytes:
    return (
        b"\x20" + identity + b"\x06\x00" + host + bytes(21) + struct.pack(">H", port) + b"\x86\x80"
    )


class TestMessages:
    def test_what_was_packed_is_unpacked(self) -> None:
        assert unpack_offer(pack_offer(OFFER), 2) == OFFER
        assert unpack_request(SECRET, pack_hello(SECRET, HELLO)) == HELLO
        assert unpack_request(SECRET, bytes(pack_read(SECRET, READ))) == READ
        outcomes = [PageOutcome.OK, PageOutcome.GONE, PageOutcome.FAILED]
        raw = pack_result(SECRET, LANE, 5, outcomes)
        assert len(raw) == result_bytes(3)
        assert unpack_result(SECRET, raw, LANE, 5) == outcomes

    def test_the_longest_request_is_what_a_server_makes_room_for(self) -> None:
        ranges = [PageRange(0, 1)] * 4096
        read = pack_read(SECRET, ReadRequest(LANE, 1, 1, 1.0, ranges))
        assert len(read) == request_bytes_max(4096)
        hello = pack_hello(SECRET, Hello(LANE, LANE, 1, bytes(ADDRESS_BYTES_MAX)))
        assert len(hello) == request_bytes_max(1)

    def test_a1_another_secret_is_refused(self) -> None:
        with pytest.raises(TierIOError, match="proof"):
            unpack_request(bytes(32), pack_hello(SECRET, HELLO))
        with pytest.raises(TierIOError, match="proof"):
            unpack_result(bytes(32), pack_result(SECRET, LANE, 5, []), LANE, 5)

    def test_a1_a_message_is_not_believed_from_the_other_side(self) -> None:
        result = pack_result(SECRET, LANE, 5, [PageOutcome.OK])
        with pytest.raises(TierIOError, match="proof"):
            unpack_request(SECRET, result)
        with pytest.raises(TierIOError, match="proof"):
            unpack_result(SECRET, pack_hello(SECRET, HELLO), LANE, 5)

    def test_a_result_is_not_believed_of_another_read_or_lane(self) -> None:
        raw = pack_result(SECRET, LANE, 5, [PageOutcome.OK])
        for lane, number in ((LANE, 6), (bytes(16), 5)):
            with pytest.raises(TierIOError, match="of read"):
                unpack_result(SECRET, raw, lane, number)

    @pytest.mark.parametrize(
        "raw", [pack_hello(SECRET, HELLO), bytes(pack_read(SECRET, READ))], ids=["hello", "read"]
    )
    def test_every_flipped_byte_and_every_length_is_noticed(self, raw: bytes) -> None:
        for at in range(len(raw)):
            with pytest.raises(TierIOError):
                unpack_request(SECRET, raw[:at] + bytes([raw[at] ^ 1]) + raw[at + 1 :])
            with pytest.raises(TierIOError):
                unpack_request(SECRET, raw[:at])

    def test_proven_rubbish_is_refused(self) -> None:
        # A member can prove anything.
        print(f"seed {SEED}")
        rng = random.Random(SEED)
        for _ in range(2000):
            body = bytes([rng.randrange(5)]) + rng.randbytes(rng.randrange(0, 80))
            proof = blake2b(body, key=SECRET, person=Side.CLIENT, digest_size=32).digest()
            try:
                request = unpack_request(SECRET, body + proof)
            except TierIOError:
                continue
            assert isinstance(request, Hello) or len(request.ranges) * 12 < len(body)
        assert PROOF_BYTES == 32

    def test_offers_that_are_none(self) -> None:
        genuine = pack_offer(OFFER)
        for raw in (
            b"",
            genuine[:-1],
            genuine + b"x",
            b"X" + genuine[1:],
            genuine[:6] + b"\x02" + genuine[7:],
            pack_offer(Offer((1, 22), SECRET, b"a", {0: 5})),
            pack_offer(Offer((1, 22), SECRET, b"a", {5: 0})),
        ):
            with pytest.raises(TierIOError, match="ucx offer"):
                unpack_offer(raw, 2)
        with pytest.raises(TierIOError, match="at most 1 memories"):
            unpack_offer(genuine, 1)

    def test_random_offers_raise_one_kind_of_error(self) -> None:
        print(f"seed {SEED}")
        rng = random.Random(SEED)
        genuine = pack_offer(OFFER)
        for _ in range(3000):
            raw = bytearray(genuine)
            for _ in range(rng.randrange(1, 6)):
                raw[rng.randrange(len(raw))] = rng.randrange(256)
            try:
                offer = unpack_offer(bytes(raw[: rng.randrange(len(raw) + 1)]), 2)
            except TierIOError as error:
                assert "\n" not in str(error)
            else:
                assert len(offer.sizes) <= 2

    def test_tags_of_a_lane_differ_and_fit(self) -> None:
        nonce = TAGS - 5
        tags = [tag_of(nonce, number, slot) for number in range(40) for slot in range(40)]
        assert len(set(tags)) == len(tags) and all(0 <= tag < TAGS for tag in tags)


class TestAddresses:
    def test_fields_travel_and_the_rest_is_our_own(self) -> None:
        ours = TcpAddresses(
            [ip_address(bytes([10, 0, 0, 1])), ip_address(b"\n\0\0\1", b"12345678", 7)], b"\n\0\0\1"
        )
        theirs = TcpAddresses([ip_address(b"\n\0\0\2")], b"\n\0\0\2")
        address = ip_address(b"\n\0\0\2", b"identity", 4321)
        assert ours.build(theirs.pack(address)) == address

    def test_loopback_of_this_machine_only(self) -> None:
        ours = TcpAddresses([loopback_address()], None)
        address = loopback_address(b"identity", 4321)
        assert ours.build(ours.pack(address)) == address
        elsewhere = TcpAddresses([loopback_address(machine=1)], None)
        with pytest.raises(TierIOError, match="loopback of another machine"):
            ours.build(elsewhere.pack(loopback_address(machine=1)))

    def test_another_kind_of_device_is_refused(self) -> None:
        ours = TcpAddresses([loopback_address()], None)
        theirs = TcpAddresses([ip_address(b"\n\0\0\2")], b"\n\0\0\2")
        with pytest.raises(TierIOError, match="another kind of network device"):
            ours.build(theirs.pack(ip_address(b"\n\0\0\2")))

    def test_no_bytes_of_a_peer_reach_the_rest_of_an_address(self) -> None:
        print(f"seed {SEED}")
        rng = random.Random(SEED)
        host = b"\n\0\0\1"
        template = ip_address(host)
        ours = TcpAddresses([template], host)
        genuine = ours.pack(template)
        built = 0
        for _ in range(2000):
            raw = bytearray(genuine)
            for _ in range(rng.randrange(1, 8)):
                raw[rng.randrange(len(raw))] = rng.randrange(256)
            try:
                address = ours.build(
                    bytes(raw[: rng.randrange(len(raw) + 1)] if rng.random() < 0.2 else raw)
                )
            except TierIOError:
                continue
            built += 1
            assert address[:1] == template[:1] and address[9:11] == template[9:11]
            assert address[15:-4] == template[15:-4] and address[-2:] == template[-2:]
        assert built > 100

    @pytest.mark.parametrize(
        ("samples", "host"),
        [
            ([bytes(20)], None),
            ([loopback_address(), loopback_address(machine=2)], None),
            ([loopback_address(), loopback_address() + b"x"], None),
            ([ip_address(b"\n\0\0\2")], b"\n\0\0\1"),
            ([ip_address(b"\n\0\0\2") + b"\n\0\0\2"], b"\n\0\0\2"),
        ],
        ids=["short", "more differs", "length differs", "host absent", "host twice"],
    )
    def test_unknown_forms_are_refused(self, samples: list[bytes], host: bytes | None) -> None:
        with pytest.raises(ConfigError, match="form that is not known"):
            TcpAddresses(samples, host)

    def test_whole_addresses_are_bounded(self) -> None:
        addresses = WholeAddresses()
        assert addresses.build(addresses.pack(b"anything")) == b"anything"
        for raw in (b"", bytes(ADDRESS_BYTES_MAX + 1)):
            with pytest.raises(TierIOError):
                addresses.build(raw)

    def test_the_device_of_an_address(self) -> None:
        assert device_of("127.0.0.1") == ("lo", bytes([127, 0, 0, 1]))
        assert device_of("localhost")[0] == "lo"
        with pytest.raises(ConfigError, match="choose an address of this machine"):
            device_of("no-such-host.invalid")
