"""What every Tier must do, sentence by sentence of storage/base.py.

Subclass TierConformance in a test module and give it open_tier(). Each test calls check() after
each step. Pages are small; the page size is no multiple of 4 KiB on purpose.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tierkv.storage.base import MappedTier, Tier
from tierkv.storage.checksum import payload_checksum
from tierkv.storage.device import aligned_buffer
from tierkv.storage.errors import TierClosedError
from tierkv.storage.types import KEY_BYTES, CommitOutcome, PageKey, ReadOutcome

PAGE_BYTES = 5000
PAGES = 8
HAMMER_SEED = 20261129
JOIN_LIMIT_S = 60.0


def page_key(number: int) -> PageKey:
    """A key for tests."""
    return PageKey(number.to_bytes(KEY_BYTES, "big"))


def page_bytes_of(number: int, nbytes: int = PAGE_BYTES) -> bytes:
    """The content every test expects under page_key(number)."""
    return random.Random(number).randbytes(nbytes)


def put(tier: Tier, numbers: list[int], owners: list[int] | int = 0) -> list[CommitOutcome]:
    """Write and commit these pages, checking after each step."""
    with tier.reserve(len(numbers)) as reservation:
        assert len(reservation) == len(numbers), "no room for the test's pages"
        for index, number in enumerate(numbers):
            tier.write(reservation, index, page_bytes_of(number, tier.page_bytes))
        outcomes = tier.commit(reservation, [page_key(n) for n in numbers], owners)
    tier.check()
    return outcomes


def get(tier: Tier, number: int) -> bytes | None:
    """The page's bytes, or None when it is not there or does not verify."""
    out = bytearray(tier.page_bytes)
    with tier.lease([page_key(number)]) as lease:
        if not lease or tier.read(lease, 0, memoryview(out)) is not ReadOutcome.OK:
            return None
    return bytes(out)


class TierConformance:
    """The suite. `room` is the number of pages the tier under test holds."""

    def open_tier(self, folder: Path) -> Tier:
        raise AssertionError("a subclass opens its tier here")

    @pytest.fixture
    def tier(self, tmp_path: Path) -> Iterator[Tier]:
        tier = self.open_tier(tmp_path)
        assert tier.stats().capacity_pages == PAGES
        yield tier
        tier.close()

    # --- lookup, reserve, write, commit

    def test_a_committed_page_is_read_back_bit_for_bit(self, tier: Tier) -> None:
        assert put(tier, [1, 2]) == [CommitOutcome.COMMITTED] * 2
        assert get(tier, 1) == page_bytes_of(1)
        assert get(tier, 2) == page_bytes_of(2)
        tier.check()

    def test_a_reserved_page_cannot_be_seen(self, tier: Tier) -> None:
        with tier.reserve(1) as reservation:
            tier.write(reservation, 0, page_bytes_of(1))
            assert tier.lookup([page_key(1)]) == [False]
            assert tier.stats().reserved_pages == 1
            tier.check()
        assert tier.stats().free_pages == PAGES

    def test_l1_lookup_has_no_side_effects(self, tier: Tier) -> None:
        put(tier, [1, 2, 3])
        before, order = tier.stats(), tier.victims(3)
        assert tier.lookup([page_key(1), page_key(9)]) == [True, False]
        assert tier.stats() == before
        assert tier.victims(3) == order
        tier.check()

    def test_reserve_is_short_when_slots_run_out_and_never_evicts(self, tier: Tier) -> None:
        put(tier, [1, 2])
        with tier.reserve(PAGES) as most:
            assert len(most) == PAGES - 2
            with tier.reserve(1) as none:
                assert len(none) == 0
            tier.check()
        assert tier.lookup([page_key(1), page_key(2)]) == [True, True]
        assert tier.stats().evictions == 0

    def test_commit_of_an_existing_key_frees_the_slot(self, tier: Tier) -> None:
        put(tier, [1])
        assert put(tier, [1, 2]) == [CommitOutcome.EXISTS, CommitOutcome.COMMITTED]
        stats = tier.stats()
        assert (stats.committed_pages, stats.duplicates, stats.writes) == (2, 1, 2)
        assert get(tier, 1) == page_bytes_of(1)

    def test_a_key_twice_in_one_commit_is_stored_once(self, tier: Tier) -> None:
        assert put(tier, [1, 1]) == [CommitOutcome.COMMITTED, CommitOutcome.EXISTS]
        assert tier.stats().committed_pages == 1

    def test_slots_past_the_keys_are_freed(self, tier: Tier) -> None:
        reservation = tier.reserve(3)
        tier.write(reservation, 0, page_bytes_of(1))
        assert tier.commit(reservation, [page_key(1)]) == [CommitOutcome.COMMITTED]
        tier.check()
        assert tier.stats().free_pages == PAGES - 1
        reservation.release()
        tier.check()

    def test_c4_an_unwritten_slot_fails_and_is_counted(self, tier: Tier) -> None:
        with tier.reserve(2) as reservation:
            tier.write(reservation, 1, page_bytes_of(2))
            outcomes = tier.commit(reservation, [page_key(1), page_key(2)])
        assert outcomes == [CommitOutcome.FAILED, CommitOutcome.COMMITTED]
        assert tier.stats().rejected == 1
        assert tier.lookup([page_key(1)]) == [False]
        tier.check()

    def test_a_slot_may_be_written_again_before_commit(self, tier: Tier) -> None:
        with tier.reserve(1) as reservation:
            tier.write(reservation, 0, page_bytes_of(7))
            tier.write(reservation, 0, page_bytes_of(1))
            tier.commit(reservation, [page_key(1)])
        assert get(tier, 1) == page_bytes_of(1)
        tier.check()

    @pytest.mark.parametrize("nbytes", [0, PAGE_BYTES - 1, PAGE_BYTES + 1])
    def test_a_wrong_length_is_refused(self, tier: Tier, nbytes: int) -> None:
        put(tier, [1])
        with tier.reserve(1) as reservation:
            with pytest.raises(ValueError, match=f"expected {PAGE_BYTES} bytes, got {nbytes}"):
                tier.write(reservation, 0, bytes(nbytes))
            tier.check()
            tier.write(reservation, 0, page_bytes_of(2))
            tier.commit(reservation, [page_key(2)])
        with tier.lease([page_key(1)]) as lease:
            with pytest.raises(ValueError, match=f"expected {PAGE_BYTES} bytes, got {nbytes}"):
                tier.read(lease, 0, memoryview(bytearray(nbytes)))
        assert get(tier, 2) == page_bytes_of(2)
        tier.check()

    def test_too_many_keys_or_a_short_key_are_refused(self, tier: Tier) -> None:
        with tier.reserve(1) as reservation:
            tier.write(reservation, 0, page_bytes_of(1))
            with pytest.raises(ValueError, match="2 keys for 1 reserved"):
                tier.commit(reservation, [page_key(1), page_key(2)])
            with pytest.raises(ValueError, match="key of 32 bytes, got 3"):
                tier.commit(reservation, [PageKey(b"abc")])
            tier.check()
            assert tier.commit(reservation, [page_key(1)]) == [CommitOutcome.COMMITTED]

    def test_aligned_and_odd_buffers_hold_the_same_page(self, tier: Tier) -> None:
        aligned = aligned_buffer(PAGE_BYTES)
        aligned[:] = page_bytes_of(1)
        odd = memoryview(bytearray(PAGE_BYTES + 1))[1:]
        odd[:] = page_bytes_of(2)
        with tier.reserve(2) as reservation:
            tier.write(reservation, 0, aligned)
            tier.write(reservation, 1, odd)
            tier.commit(reservation, [page_key(1), page_key(2)])
        with tier.lease([page_key(1), page_key(2)]) as lease:
            assert tier.read(lease, 0, odd) is ReadOutcome.OK
            assert tier.read(lease, 1, aligned) is ReadOutcome.OK
        assert (bytes(odd), bytes(aligned)) == (page_bytes_of(1), page_bytes_of(2))

    def test_a_known_checksum_is_stored_as_it_is_and_found_wrong_at_the_read(
        self, tier: Tier
    ) -> None:
        right, wrong = payload_checksum(page_bytes_of(1)), payload_checksum(b"on the way")
        with tier.reserve(2) as reservation:
            tier.write(reservation, 0, page_bytes_of(1), right)
            tier.write(reservation, 1, page_bytes_of(2), wrong)
            tier.commit(reservation, [page_key(1), page_key(2)])
        with tier.lease([page_key(1), page_key(2)]) as lease:
            assert lease.checksums == [right, wrong]
            out = memoryview(bytearray(PAGE_BYTES))
            assert tier.read(lease, 0, out) is ReadOutcome.OK
            assert tier.read(lease, 1, out) is ReadOutcome.CORRUPT
            tier.check()

    # --- lease, read, release

    def test_w6_lease_is_the_longest_leading_run(self, tier: Tier) -> None:
        put(tier, [1, 2, 4])
        with tier.lease([page_key(n) for n in (1, 2, 3, 4)]) as lease:
            assert lease.keys == [page_key(1), page_key(2)]
            assert tier.stats().leased_pages == 2
            tier.check()
        stats = tier.stats()
        assert (stats.hits, stats.misses, stats.leased_pages) == (2, 2, 0)

    def test_an_empty_lease_and_an_empty_reservation_are_fine(self, tier: Tier) -> None:
        with tier.lease([page_key(1)]) as lease, tier.reserve(0) as reservation:
            assert (len(lease), len(reservation)) == (0, 0)
            assert tier.commit(reservation, []) == []
        tier.check()

    def test_lease_pins_against_eviction(self, tier: Tier) -> None:
        put(tier, [1, 2, 3])
        with tier.lease([page_key(1)]):
            assert tier.evict(PAGES) == [page_key(2), page_key(3)]
            tier.check()
            assert tier.lookup([page_key(1)]) == [True]
            assert tier.evict(1) == []
        assert tier.evict(1) == [page_key(1)]
        tier.check()
        assert tier.stats().free_pages == PAGES

    def test_l2_two_leases_on_one_page_need_two_releases(self, tier: Tier) -> None:
        put(tier, [1])
        first, second = tier.lease([page_key(1)]), tier.lease([page_key(1)])
        first.release()
        first.release()
        tier.check()
        assert tier.evict(1) == []
        second.release()
        assert tier.evict(1) == [page_key(1)]
        tier.check()

    def test_l2_double_release_of_a_reservation_frees_once(self, tier: Tier) -> None:
        reservation = tier.reserve(2)
        tier.release(reservation)
        tier.release(reservation)
        tier.check()
        assert tier.stats().free_pages == PAGES

    def test_w7_a_corrupt_page_is_gone_and_its_slot_never_used_again(self, tier: Tier) -> None:
        with tier.reserve(1) as reservation:
            tier.write(reservation, 0, page_bytes_of(1), bytes(range(16)))
            tier.commit(reservation, [page_key(1)])
        out = memoryview(bytearray(PAGE_BYTES))
        with tier.lease([page_key(1)]) as lease:
            assert tier.read(lease, 0, out) is ReadOutcome.CORRUPT
            assert tier.lookup([page_key(1)]) == [False]
            assert tier.read(lease, 0, out) is ReadOutcome.CORRUPT
            tier.check()
        stats = tier.stats()
        assert (stats.corrupt, stats.quarantined_pages, stats.committed_pages) == (1, 1, 0)
        with tier.reserve(PAGES) as rest:
            assert len(rest) == PAGES - 1
        assert put(tier, [1]) == [CommitOutcome.COMMITTED]
        assert get(tier, 1) == page_bytes_of(1)

    # --- evict, victims, touch, drop

    def test_eviction_takes_the_coldest_first(self, tier: Tier) -> None:
        put(tier, [1, 2, 3, 4])
        tier.touch([page_key(1), page_key(9)])
        tier.lease([page_key(2)]).release()
        assert tier.victims(9) == [page_key(n) for n in (3, 4, 1, 2)]
        assert tier.victims(2) == [page_key(3), page_key(4)]
        assert tier.evict(1) == [page_key(3)]
        tier.check()
        put(tier, [5])
        assert tier.evict(9) == [page_key(n) for n in (4, 1, 2, 5)]
        tier.check()
        assert tier.stats().evictions == 5

    def test_evicted_slots_can_be_reserved(self, tier: Tier) -> None:
        put(tier, list(range(PAGES)))
        tier.evict(3)
        with tier.reserve(PAGES) as reservation:
            assert len(reservation) == 3
            tier.check()

    def test_drop_removes_and_counts_what_was_there(self, tier: Tier) -> None:
        put(tier, [1, 2])
        assert tier.drop([page_key(1), page_key(1), page_key(9)]) == 1
        tier.check()
        assert tier.lookup([page_key(1), page_key(2)]) == [False, True]
        assert tier.stats().free_pages == PAGES - 1

    def test_a_leased_page_that_is_dropped_is_freed_at_its_last_release(self, tier: Tier) -> None:
        put(tier, [1])
        out = memoryview(bytearray(PAGE_BYTES))
        first, second = tier.lease([page_key(1)]), tier.lease([page_key(1)])
        assert tier.drop([page_key(1)]) == 1
        assert tier.lookup([page_key(1)]) == [False]
        tier.check()
        first.release()
        assert tier.read(second, 0, out) is ReadOutcome.OK
        assert bytes(out) == page_bytes_of(1)
        assert tier.stats().free_pages == PAGES - 1
        # A new copy may come while the old one is still being read.
        assert put(tier, [1]) == [CommitOutcome.COMMITTED]
        second.release()
        tier.check()
        assert tier.stats().free_pages == PAGES - 1
        assert get(tier, 1) == page_bytes_of(1)

    # --- owners, quiet readers

    def test_owners_are_kept_with_their_pages(self, tier: Tier) -> None:
        put(tier, [1, 2, 3], [7, 0, 2**32 - 1])
        put(tier, [4], 7)
        keys = [page_key(n) for n in (1, 2, 3, 4, 9)]
        assert tier.owner_of(keys) == [7, 0, 2**32 - 1, 7, None]
        assert tier.owners() == {7: 2, 0: 1, 2**32 - 1: 1}
        with tier.lease(keys) as lease:
            assert lease.owners == [7, 0, 2**32 - 1, 7]
        tier.check()

    def test_a_page_that_exists_keeps_its_owner(self, tier: Tier) -> None:
        put(tier, [1], 7)
        assert put(tier, [1], 8) == [CommitOutcome.EXISTS]
        assert tier.owners() == {7: 1}

    def test_owners_are_counted_out_with_their_pages(self, tier: Tier) -> None:
        put(tier, [1, 2, 3, 4], [5, 5, 6, 6])
        with tier.lease([page_key(1)]):
            tier.drop([page_key(1)])
            tier.check()
            assert tier.owners() == {5: 1, 6: 2}
        assert tier.evict(1) == [page_key(2)]
        tier.check()
        assert tier.owners() == {6: 2}
        with tier.reserve(1) as reservation:
            tier.write(reservation, 0, page_bytes_of(8), bytes(range(16)))
            tier.commit(reservation, [page_key(8)], 9)
        assert tier.owners() == {6: 2, 9: 1}
        assert get(tier, 8) is None
        tier.check()
        assert tier.owners() == {6: 2}
        # A slot that comes back under another owner counts for that one.
        put(tier, [1, 2], 4)
        assert tier.owners() == {6: 2, 4: 2}
        tier.check()

    def test_keys_of_an_owner_coldest_first(self, tier: Tier) -> None:
        put(tier, [1, 2, 3, 4], [5, 6, 5, 6])
        tier.touch([page_key(1)])
        with tier.lease([page_key(3)], quiet=True):
            assert tier.keys_of(5) == [page_key(3), page_key(1)]
        assert tier.keys_of() == [page_key(n) for n in (2, 3, 4, 1)]
        assert tier.keys_of(7) == []
        tier.check()

    def test_eviction_keeps_to_the_owners_named(self, tier: Tier) -> None:
        put(tier, [1, 2, 3, 4, 5], [5, 6, 7, 5, 6])
        assert tier.victims(9, [5, 7]) == [page_key(n) for n in (1, 3, 4)]
        assert tier.victims(9, []) == tier.victims(9, [99]) == tier.evict(9, []) == []
        with tier.lease([page_key(1)], quiet=True):
            assert tier.evict(1, {5}) == [page_key(4)]
            assert tier.evict(1, {5}) == []
            tier.check()
        tier.touch([page_key(2)])
        assert tier.evict(1, (6,)) == [page_key(5)]
        assert tier.victims(9) == [page_key(n) for n in (1, 3, 2)]
        assert tier.evict(9, range(10)) == [page_key(n) for n in (1, 3, 2)]
        tier.check()
        assert (tier.owners(), tier.stats().evictions) == ({}, 5)

    @pytest.mark.parametrize("owners", [-1, 2**32, [1, 2], []])
    def test_a_wrong_owner_is_refused(self, tier: Tier, owners: list[int] | int) -> None:
        with tier.reserve(1) as reservation:
            tier.write(reservation, 0, page_bytes_of(1))
            with pytest.raises(ValueError, match="owner"):
                tier.commit(reservation, [page_key(1)], owners)
            tier.check()
            assert tier.commit(reservation, [page_key(1)], 3) == [CommitOutcome.COMMITTED]
        assert tier.owner_of([page_key(1)]) == [3]

    def test_p4_a_quiet_lease_counts_nothing_and_warms_nothing(self, tier: Tier) -> None:
        put(tier, [1, 2, 3])
        before = tier.stats()
        with tier.lease([page_key(1), page_key(9)], quiet=True) as lease:
            assert lease.keys == [page_key(1)]
            assert tier.evict(1) == [page_key(2)]
            out = memoryview(bytearray(PAGE_BYTES))
            assert tier.read(lease, 0, out) is ReadOutcome.OK
        after = tier.stats()
        assert (after.hits, after.misses) == (before.hits, before.misses)
        assert tier.victims(2) == [page_key(1), page_key(3)]
        tier.check()

    @pytest.mark.parametrize("told", [(1, 7), (2, 7), (1, 8), (2, 8)])
    def test_commit_decides_whatever_the_write_was_told(
        self, tier: Tier, told: tuple[int, int]
    ) -> None:
        with tier.reserve(2) as reservation:
            for index in range(2):
                content = page_bytes_of(index + 1)
                key = page_key(told[0] + index)
                tier.write(reservation, index, content, key=key, owner=told[1])
            outcomes = tier.commit(reservation, [page_key(1), page_key(2)], 7)
        assert outcomes == [CommitOutcome.COMMITTED] * 2
        tier.check()
        assert [get(tier, n) for n in (1, 2)] == [page_bytes_of(n) for n in (1, 2)]
        assert tier.owners() == {7: 2}
        assert tier.lookup([page_key(3)]) == [False]

    # --- as a whole

    def test_stats_conserve_slots(self, tier: Tier) -> None:
        put(tier, [1, 2, 3])
        with tier.reserve(2), tier.lease([page_key(1)]):
            stats = tier.stats()
            assert stats.capacity_pages == PAGES
            assert (stats.reserved_pages, stats.committed_pages) == (2, 3)
            held = stats.reserved_pages + stats.committed_pages + stats.quarantined_pages
            assert stats.free_pages + held == stats.capacity_pages
            assert stats.slot_bytes == 4096 + 8192
            tier.check()

    def test_use_after_close_is_refused(self, tier: Tier) -> None:
        put(tier, [1])
        lease, reservation = tier.lease([page_key(1)]), tier.reserve(1)
        tier.close()
        tier.close()
        for use in (
            lambda: tier.lookup([page_key(1)]),
            lambda: tier.reserve(1),
            lambda: tier.write(reservation, 0, page_bytes_of(2)),
            lambda: tier.commit(reservation, [page_key(2)]),
            lambda: tier.lease([page_key(1)]),
            lambda: tier.read(lease, 0, memoryview(bytearray(PAGE_BYTES))),
            lambda: tier.evict(1),
            lambda: tier.victims(1),
            lambda: tier.touch([page_key(1)]),
            lambda: tier.drop([page_key(1)]),
            lambda: tier.owner_of([page_key(1)]),
            tier.owners,
            tier.keys_of,
            tier.check,
        ):
            with pytest.raises(TierClosedError, match="closed"):
                use()
        lease.release()
        reservation.release()

    def test_hammer_from_several_threads(self, tier: Tier) -> None:
        failures: list[BaseException] = []

        def work(seed: int) -> None:
            try:
                _hammer(tier, random.Random(seed), steps=120)
            except BaseException as error:
                failures.append(error)
                raise

        seeds = [HAMMER_SEED + n for n in range(4)]
        threads = [threading.Thread(target=work, args=(seed,)) for seed in seeds]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(JOIN_LIMIT_S)
            assert not thread.is_alive(), "a thread hangs"
        assert not failures, f"hammer seeds {seeds}: {failures[0]!r}"
        tier.check()
        stats = tier.stats()
        assert (stats.reserved_pages, stats.leased_pages, stats.corrupt) == (0, 0, 0)
        assert stats.committed_pages == stats.capacity_pages - stats.free_pages


class MappedTierConformance(TierConformance):
    """What a MappedTier must do besides."""

    @pytest.fixture
    def mapped(self, tier: Tier) -> MappedTier:
        assert isinstance(tier, MappedTier)
        return tier

    def test_a_page_filled_in_place_and_sealed_is_committed(self, mapped: MappedTier) -> None:
        with mapped.reserve(1) as reservation:
            payload = mapped.payload(reservation, 0)
            assert len(payload) == PAGE_BYTES
            payload[:] = page_bytes_of(1)
            mapped.seal(reservation, 0)
            assert mapped.commit(reservation, [page_key(1)]) == [CommitOutcome.COMMITTED]
        mapped.check()
        with mapped.lease([page_key(1)]) as lease:
            view = mapped.view(lease, 0)
            assert view.readonly
            assert bytes(view) == page_bytes_of(1)
            assert mapped.verify(lease, 0) is ReadOutcome.OK
            assert lease.checksums == [payload_checksum(page_bytes_of(1))]

    def test_w7_verify_quarantines_a_page_with_a_wrong_checksum(self, mapped: MappedTier) -> None:
        with mapped.reserve(1) as reservation:
            mapped.payload(reservation, 0)[:] = page_bytes_of(1)
            mapped.seal(reservation, 0, payload_checksum(b"something else"))
            mapped.commit(reservation, [page_key(1)])
        with mapped.lease([page_key(1)]) as lease:
            assert mapped.verify(lease, 0) is ReadOutcome.CORRUPT
            mapped.check()
        assert mapped.lookup([page_key(1)]) == [False]
        assert mapped.stats().quarantined_pages == 1

    def test_an_unsealed_slot_fails(self, mapped: MappedTier) -> None:
        with mapped.reserve(1) as reservation:
            mapped.payload(reservation, 0)[:] = page_bytes_of(1)
            assert mapped.commit(reservation, [page_key(1)]) == [CommitOutcome.FAILED]
        mapped.check()


def _hammer(tier: Tier, chance: random.Random, steps: int) -> None:
    """Random calls on few keys; every byte that is handed out must be right."""
    out = bytearray(PAGE_BYTES)
    for _ in range(steps):
        numbers = [chance.randrange(12) for _ in range(chance.randrange(1, 4))]
        keys = [page_key(n) for n in numbers]
        action = chance.randrange(6)
        if action <= 1:
            with tier.reserve(len(keys)) as reservation:
                for index in range(len(reservation)):
                    tier.write(reservation, index, page_bytes_of(numbers[index]))
                if chance.random() < 0.9:
                    tier.commit(reservation, keys[: len(reservation)], chance.randrange(3))
        elif action <= 3:
            with tier.lease(keys) as lease:
                for index in range(len(lease)):
                    assert tier.read(lease, index, memoryview(out)) is ReadOutcome.OK
                    assert out == page_bytes_of(numbers[index])
        elif action == 4:
            tier.evict(chance.randrange(3), chance.choice([None, [0], [1, 2]]))
        else:
            tier.drop(keys)
        tier.lookup(keys)
        tier.touch(keys[:1])
        tier.check()
