"""The mover on tier doubles: batches, bounds, priority, deadlines, supervision, conservation."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.support.clock import ManualClock
from tests.support.memory_tier import Gate, MemoryHostTier, MemoryTier
from tests.support.pages import page_content, page_key, page_keys, put_tier
from tierkv.storage.bandwidth import Bandwidth
from tierkv.storage.clock import Clock, SystemClock
from tierkv.storage.errors import ConfigError, TierFullError, TierIOError
from tierkv.storage.eviction_log import EvictionLog
from tierkv.storage.mover import Job, JobState, Mover, MoverLimits, Refusal
from tierkv.storage.quota import QuotaBook, TierSize
from tierkv.storage.room import Room
from tierkv.storage.types import CommitOutcome, PageKey, ReadOutcome, TierName

PAGE_BYTES = 64
WAIT_S = 20.0
FAR = 1e12


class Rig:
    """Two tiers and the mover between them."""

    def __init__(self, clock: Clock, nvme_pages: int, limits: MoverLimits) -> None:
        self.host = MemoryHostTier(PAGE_BYTES, 32)
        self.nvme = MemoryTier(PAGE_BYTES, nvme_pages)
        self.gates: list[Gate] = []
        self.mover = Mover(self.host, self.nvme, limits, clock, Bandwidth(clock))

    def hold(self, operation: str) -> Gate:
        gate = self.nvme.hold(operation)
        self.gates.append(gate)
        return gate

    def demote(self, key: PageKey, deadline: float = FAR) -> Job:
        job = self.mover.submit_demote(key, deadline)
        assert isinstance(job, Job), job
        self.mover.check()
        return job

    def promote(self, key: PageKey, deadline: float = FAR) -> Job:
        source, target = self.nvme.lease([key]), self.host.reserve(1)
        assert len(source) == len(target) == 1
        job = self.mover.submit_promote(key, deadline, source, target)
        assert isinstance(job, Job), job
        self.mover.check()
        return job

    def settle(self) -> None:
        assert self.mover.wait_quiet(WAIT_S), self.mover.stats()
        self.check_idle()

    def check_idle(self) -> None:
        self.mover.check()
        for tier in (self.host, self.nvme):
            tier.check()
            stats = tier.stats()
            assert (stats.reserved_pages, stats.leased_pages) == (0, 0), stats


@contextmanager
def rigged(
    clock: Clock | None = None, nvme_pages: int = 32, limits: MoverLimits | None = None
) -> Iterator[Rig]:
    rig = Rig(clock or SystemClock(), nvme_pages, limits or MoverLimits())
    try:
        yield rig
    finally:
        for gate in rig.gates:
            gate.release()
        assert rig.mover.close(WAIT_S)
        rig.check_idle()


def one_demoter(**bounds: int) -> MoverLimits:
    return MoverLimits(demote_threads=1, promote_threads=1, **bounds)


def test_a_page_goes_down_and_comes_back_with_its_checksum() -> None:
    with rigged() as rig:
        put_tier(rig.host, page_keys(1))
        assert rig.mover.wait_ended([rig.demote(page_key(1))], WAIT_S)
        rig.host.drop(page_keys(1))
        job = rig.promote(page_key(1))
        rig.settle()
        assert (job.state, job.outcome) == (JobState.DONE, ReadOutcome.OK)
        with rig.host.lease(page_keys(1)) as lease:
            assert bytes(rig.host.view(lease, 0)) == page_content(page_key(1), PAGE_BYTES)
            assert rig.host.verify(lease, 0) is ReadOutcome.OK
        stats = rig.mover.stats()
        assert stats.completed == 2
        assert set(stats.read_bytes_per_s) == set(stats.write_bytes_per_s) == {TierName.NVME}
        assert stats.read_latency_s[TierName.NVME] > 0


def test_queued_demotions_share_one_commit() -> None:
    with rigged(limits=one_demoter(demote_batch_pages=8)) as rig:
        put_tier(rig.host, page_keys(*range(9)))
        gate = rig.hold("write")
        first = rig.demote(page_key(0))
        assert gate.entered.wait(WAIT_S)
        others = [rig.demote(page_key(number)) for number in range(1, 9)]
        gate.release()
        rig.settle()
        assert all(job.state is JobState.DONE for job in [first, *others])
        assert rig.nvme.calls["commit"] == 2


def test_c4_a_full_demote_queue_drops_and_counts() -> None:
    with rigged(limits=one_demoter(demote_queue_pages=2)) as rig:
        put_tier(rig.host, page_keys(0, 1, 2))
        gate = rig.hold("write")
        rig.demote(page_key(0))
        rig.demote(page_key(1))
        assert rig.mover.submit_demote(page_key(2), FAR) is Refusal.QUEUE_FULL
        assert not rig.mover.wait_demote_room(0.0)
        assert rig.mover.stats().dropped == 1
        gate.release()
        assert rig.mover.wait_demote_room(WAIT_S)
        rig.settle()
        assert rig.nvme.lookup(page_keys(0, 1, 2)) == [True, True, False]


def test_a_page_is_queued_once() -> None:
    with rigged(limits=one_demoter()) as rig:
        put_tier(rig.host, page_keys(0))
        gate = rig.hold("write")
        assert rig.demote(page_key(0)) is rig.demote(page_key(0))
        assert rig.mover.is_demoting(page_key(0)) and rig.mover.demoting_count == 1
        gate.release()


def test_a_page_that_left_host_is_refused() -> None:
    with rigged() as rig:
        assert rig.mover.submit_demote(page_key(0), FAR) is Refusal.GONE


def test_full_nvme_makes_room_by_evicting_its_coldest() -> None:
    with rigged(nvme_pages=2, limits=one_demoter()) as rig:
        put_tier(rig.nvme, page_keys(10, 11))
        put_tier(rig.host, page_keys(0))
        rig.demote(page_key(0))
        rig.settle()
        assert rig.nvme.lookup(page_keys(10, 11, 0)) == [False, True, True]


def test_a_waiting_promotion_cuts_a_batch_of_demotions_short() -> None:
    with rigged(limits=one_demoter()) as rig:
        put_tier(rig.host, page_keys(*range(7)))
        put_tier(rig.nvme, page_keys(20, 21))
        ended: list[PageKey] = []
        before = rig.hold("write")
        rig.demote(page_key(6))
        assert before.entered.wait(WAIT_S)
        first, *_ = [
            rig.mover.submit_demote(page_key(number), FAR, lambda job: ended.append(job.key))
            for number in range(6)
        ]
        assert isinstance(first, Job)
        reads, writes = rig.hold("read"), rig.hold("write")
        before.release()
        # The six are one batch now, and its first page is being written.
        assert writes.entered.wait(WAIT_S)
        rig.promote(page_key(20))
        assert reads.entered.wait(WAIT_S)
        # The only promote worker is busy: this one has to wait for the demote worker.
        source, target = rig.nvme.lease(page_keys(21)), rig.host.reserve(1)
        rig.mover.submit_promote(
            page_key(21), FAR, source, target, lambda job: ended.append(job.key)
        )
        writes.release()
        assert rig.mover.wait_ended([first], WAIT_S)
        reads.release()
        rig.settle()
        assert ended == page_keys(0, 21, 1, 2, 3, 4, 5)
        assert rig.mover.stats().completed == 9


def test_h1_a_job_past_its_deadline_is_cancelled_not_started() -> None:
    clock = ManualClock()
    with rigged(clock, limits=one_demoter()) as rig:
        put_tier(rig.host, page_keys(0, 1))
        gate = rig.hold("write")
        rig.demote(page_key(0))
        assert gate.entered.wait(WAIT_S)
        late = rig.demote(page_key(1), deadline=clock.monotonic() + 5)
        clock.advance(6)
        gate.release()
        rig.settle()
        assert late.state is JobState.CANCELLED
        assert rig.nvme.lookup(page_keys(0, 1)) == [True, False]


def test_h3_a_cancelled_job_gives_back_its_lease_and_slot() -> None:
    with rigged(limits=one_demoter()) as rig:
        put_tier(rig.nvme, page_keys(0, 1, 2))
        gate = rig.hold("read")
        running = [rig.promote(page_key(0)), rig.promote(page_key(1))]
        assert gate.entered.wait(WAIT_S)
        queued = rig.promote(page_key(2))
        # Two workers, two running reads: the third is still queued.
        assert rig.mover.cancel(queued)
        assert queued.state is JobState.CANCELLED
        assert not rig.mover.cancel(queued)
        rig.mover.check()
        gate.release()
        rig.settle()
        assert all(job.state is JobState.DONE for job in running)


@pytest.mark.parametrize("error", [TierIOError("write: EIO"), TierFullError("no room"), OSError(5)])
def test_h2_a_failing_write_fails_its_page_only(error: Exception) -> None:
    with rigged(limits=one_demoter()) as rig:
        put_tier(rig.host, page_keys(0, 1, 2))
        gate = rig.hold("reserve")
        jobs = [rig.demote(page_key(number)) for number in range(3)]
        assert gate.entered.wait(WAIT_S)
        rig.nvme.fail_next("write", error)
        gate.release()
        rig.settle()
        assert sorted(job.state.value for job in jobs) == ["done", "done", "failed"]
        assert rig.mover.stats().failed == 1
        assert rig.mover.stats().worker_restarts == 0


def test_h2_a_failing_commit_fails_its_batch_and_the_worker_goes_on() -> None:
    with rigged(limits=one_demoter()) as rig:
        put_tier(rig.host, page_keys(0, 1))
        rig.nvme.fail_next("commit", TierIOError("sync: EIO"))
        assert rig.mover.wait_ended([job := rig.demote(page_key(0))], WAIT_S)
        assert job.state is JobState.FAILED
        assert rig.mover.wait_ended([job := rig.demote(page_key(1))], WAIT_S)
        assert job.state is JobState.DONE


@pytest.mark.parametrize("operation", ["reserve", "write", "commit", "read"])
def test_h2_a_worker_survives_an_error_nobody_expected(operation: str) -> None:
    with rigged(limits=MoverLimits(demote_threads=1, promote_threads=1)) as rig:
        put_tier(rig.host, page_keys(0, 1))
        put_tier(rig.nvme, page_keys(10, 11))
        rig.nvme.fail_next(operation, ZeroDivisionError("a bug in a tier"))
        first = rig.promote(page_key(10)) if operation == "read" else rig.demote(page_key(0))
        assert rig.mover.wait_ended([first], WAIT_S)
        assert first.state is JobState.FAILED
        second = [rig.promote(page_key(11)), rig.demote(page_key(1))]
        rig.settle()
        assert [job.state for job in second] == [JobState.DONE, JobState.DONE]
        assert rig.mover.stats().worker_restarts == 1


def test_c4_no_room_in_nvme_is_no_failure() -> None:
    """A reader, such as the scrubber, holds the only page that could go."""
    with rigged(nvme_pages=1) as rig:
        put_tier(rig.host, page_keys(1))
        put_tier(rig.nvme, page_keys(9))
        with rig.nvme.lease(page_keys(9), quiet=True):
            job = rig.demote(page_key(1))
            assert rig.mover.wait_ended([job], WAIT_S)
        assert job.state is JobState.CANCELLED
        again = rig.demote(page_key(1))
        rig.settle()
        assert again.state is JobState.DONE
        stats = rig.mover.stats()
        assert (stats.completed, stats.cancelled, stats.failed) == (1, 1, 0)


def test_c4_a_tier_that_refuses_reservations_is_a_failure() -> None:
    with rigged() as rig:
        put_tier(rig.host, page_keys(1))
        rig.nvme.degraded = "write: EIO"
        job = rig.demote(page_key(1))
        rig.settle()
        assert job.state is JobState.FAILED and rig.mover.stats().failed == 1


@pytest.mark.parametrize("trouble", ["write", "commit", "no room"])
def test_no_job_ends_before_its_room_is_settled(trouble: str) -> None:
    clock = SystemClock()
    host, nvme = MemoryHostTier(PAGE_BYTES, 2), MemoryTier(PAGE_BYTES, 1)
    put_tier(host, page_keys(1))
    put_tier(nvme, page_keys(9))
    lease = nvme.lease(page_keys(9)) if trouble == "no room" else None
    if lease is None:
        nvme.fail_next(trouble, TierIOError(f"{trouble}: EIO"))
    book = QuotaBook({TierName.NVME: TierSize(PAGE_BYTES, 1)})
    room = Room(nvme, book, EvictionLog(clock))
    mover = Mover(host, nvme, MoverLimits(), clock, Bandwidth(clock), room)
    held: list[int] = []
    try:
        job = mover.submit_demote(page_key(1), FAR, lambda _: held.append(book.held_pages))
        assert isinstance(job, Job) and mover.wait_ended([job], WAIT_S)
        assert job.state is not JobState.DONE and held == [0]
    finally:
        assert mover.close(WAIT_S)
        if lease is not None:
            lease.release()


def test_h2_a_callback_that_raises_hurts_nobody_else() -> None:
    def careless(job: Job) -> None:
        raise KeyError(job.key)

    with rigged(limits=one_demoter()) as rig:
        put_tier(rig.host, page_keys(0, 1))
        rig.mover.submit_demote(page_key(0), FAR, careless)
        rig.demote(page_key(1))
        rig.settle()
        assert rig.mover.stats().completed == 2


@pytest.mark.parametrize("outcome", [ReadOutcome.CORRUPT, ReadOutcome.FAILED])
def test_w7_a_bad_read_never_becomes_a_host_page(outcome: ReadOutcome) -> None:
    with rigged() as rig:
        put_tier(rig.nvme, page_keys(0))
        rig.nvme.answer_reads(outcome)
        job = rig.promote(page_key(0))
        rig.settle()
        assert (job.state, job.outcome) == (JobState.FAILED, outcome)
        assert rig.host.lookup(page_keys(0)) == [False]


def test_a_promotion_of_a_page_that_came_to_host_meanwhile_keeps_the_first_copy() -> None:
    with rigged() as rig:
        put_tier(rig.nvme, page_keys(0))
        gate = rig.hold("read")
        job = rig.promote(page_key(0))
        assert gate.entered.wait(WAIT_S)
        assert put_tier(rig.host, page_keys(0)) == [CommitOutcome.COMMITTED]
        gate.release()
        rig.settle()
        assert job.state is JobState.DONE
        assert rig.host.stats().committed_pages == 1


def test_callbacks_run_before_a_job_counts_as_ended() -> None:
    seen: list[bool] = []
    with rigged() as rig:
        put_tier(rig.host, page_keys(0))
        told = threading.Event()

        def look(job: Job) -> None:
            seen.append(rig.mover.quiet)
            told.set()

        rig.mover.submit_demote(page_key(0), FAR, look)
        assert told.wait(WAIT_S)
        rig.settle()
    assert seen == [False]


def test_close_is_bounded_while_a_worker_hangs_and_finishes_later() -> None:
    with rigged(limits=one_demoter(demote_batch_pages=1)) as rig:
        put_tier(rig.host, page_keys(0, 1))
        gate = rig.hold("write")
        running = rig.demote(page_key(0))
        assert gate.entered.wait(WAIT_S)
        queued = rig.demote(page_key(1))
        assert not rig.mover.close(0.01)
        rig.mover.check()
        assert queued.state is JobState.CANCELLED
        assert rig.mover.submit_demote(page_key(5), FAR) is Refusal.CLOSING
        gate.release()
        assert rig.mover.close(WAIT_S)
        assert running.state is JobState.DONE


def test_limits_below_one_are_refused() -> None:
    with pytest.raises(ConfigError, match="demote_queue_pages is 0"):
        MoverLimits(demote_queue_pages=0)
