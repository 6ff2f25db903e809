"""Scheduling step by step, on a model whose answers follow from the prompt alone."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.clock import ManualClock
from tests.support.hash_model import HashRunner, expected_output, hash_config
from tests.support.memory_tier import MemoryHostTier, MemoryTier
from tierkv.engine.serve.core import EngineCore, Tiers
from tierkv.engine.serve.engine_config import EngineConfig
from tierkv.engine.serve.request import FinishReason, Request, RequestState, request_ids
from tierkv.engine.serve.sampler import SamplingParams
from tierkv.engine.serve.scheduler import SchedulePolicy
from tierkv.storage.errors import RequestError
from tierkv.storage.fetch import TieredLease
from tierkv.storage.policy import WritePolicy
from tierkv.storage.store import TieredStore
from tierkv.storage.transfer.cpu import CpuTransfer
from tierkv.storage.types import NamespaceId, TierName

VOCAB = 50
PAGE = 4
MAX_CONTEXT = 200
DEADLINE_S = 20.0
STEPS_MAX = 500


class Bench:
    """One engine core, its clock, and what its requests were told."""

    def __init__(
        self, num_pages: int = 40, store: TieredStore | None = None, **config: Any
    ) -> None:
        self.clock = ManualClock()
        self.woken = threading.Event()
        self.runner = HashRunner(hash_config(VOCAB, MAX_CONTEXT), num_pages, PAGE)
        tiers = None
        if store is not None:
            transfer = CpuTransfer(self.runner.pool.kv)
            tiers = Tiers(store, transfer, WritePolicy.WRITE_BACK, 2)
        settings = EngineConfig(model=Path("hash"), page_tokens=PAGE, **config)
        self.core = EngineCore(
            settings,
            self.runner,  # type: ignore[arg-type]
            frozenset({VOCAB + 1}),
            MAX_CONTEXT,
            self.clock,
            tiers,
            wake=self.woken.set,
        )
        self.ended: list[Request] = []

    def submit(self, prompt: list[int], count: int = 3, **fields: Any) -> Request:
        params = fields.pop("params", SamplingParams(max_tokens=count))
        request = Request(
            request_id=next(request_ids),
            prompt=prompt,
            params=params,
            max_tokens=count,
            namespace=fields.pop("namespace", NamespaceId(b"n" * 32)),
            priority=fields.pop("priority", 0),
            arrival_s=self.clock.monotonic(),
        )
        self.clock.advance(0.001)
        self.core.submit(request, self._heard)
        return request

    def _heard(self, request: Request, token: int | None) -> None:
        if token is None:
            self.ended.append(request)

    def step(self) -> bool:
        busy = self.core.step()
        self.core.check()
        return busy

    def run_until(self, reached: Callable[[], bool]) -> None:
        for _ in range(STEPS_MAX):
            if reached():
                return
            self.woken.clear()
            if not self.step():
                # As the engine thread does: until a copy ends, or a while.
                self.woken.wait(self.core.idle_wait_s())
        raise AssertionError(f"not reached within {STEPS_MAX} steps")

    def finish(self) -> None:
        self.run_until(lambda: not self.core.scheduler.waiting and not self.core.scheduler.running)


def correct(request: Request) -> bool:
    expected = expected_output(request.prompt, request.max_tokens, VOCAB)
    return request.output == expected[: len(request.output)] and bool(request.output)


def numbers(start: int, count: int) -> list[int]:
    return [(start + 7 * i) % VOCAB for i in range(count)]


def test_a_long_prompt_is_prefilled_in_chunks_beside_decodes() -> None:
    bench = Bench(max_batch_tokens=8)
    short = bench.submit(numbers(1, 3), count=10)
    bench.step()
    assert short.state is RequestState.DECODE
    long = bench.submit(numbers(2, 20), count=2)
    progress = []
    while long.state is not RequestState.DECODE:
        before = len(short.output)
        bench.step()
        assert len(short.output) == before + 1, "decoding went on during the prefill"
        progress.append(long.computed)
    assert progress == [7, 14, 20]
    bench.finish()
    assert correct(short)
    assert correct(long)


def test_the_second_of_two_equal_prompts_waits_instead_of_computing() -> None:
    bench = Bench(max_batch_tokens=8)
    prompt = numbers(3, 33)
    first, second = bench.submit(prompt), bench.submit([*prompt[:32], 9])
    bench.step()
    assert first.state is RequestState.PREFILL
    assert second.state is RequestState.QUEUED
    bench.finish()
    assert (first.cached.gpu, second.cached.gpu) == (0, 32)
    assert bench.runner.computed_tokens < 2 * 33
    assert correct(first)
    assert correct(second)


def test_an_exhausted_pool_retracts_the_youngest_and_serves_both() -> None:
    bench = Bench(num_pages=8, watermark=0.0)
    first = bench.submit(numbers(1, 8), count=16)
    second = bench.submit(numbers(2, 8), count=16)
    bench.finish()
    assert bench.core.scheduler.retractions > 0
    assert (first.retractions, second.retractions > 0) == (0, True)
    for request in (first, second):
        assert request.finish_reason is FinishReason.LENGTH
        assert len(request.output) == 16
        assert correct(request)
    assert bench.core.cache.tree.protected_tokens == 0


def test_a_lone_request_larger_than_the_pool_ends_with_length() -> None:
    bench = Bench(num_pages=4)
    request = bench.submit(numbers(1, 9), count=100)
    bench.finish()
    assert request.finish_reason is FinishReason.LENGTH
    assert request.token_count == 4 * PAGE + 1
    assert correct(request)


def test_admission_keeps_the_watermark_free_while_others_run() -> None:
    bench = Bench(num_pages=10, watermark=0.3)
    first = bench.submit(numbers(1, 15), count=20)
    bench.step()
    second = bench.submit(numbers(2, 12), count=2)
    bench.step()
    assert first.state is RequestState.DECODE
    assert second.state is RequestState.QUEUED
    bench.finish()
    assert correct(second)


def test_lpm_admits_the_longest_cached_prefix_first_and_fcfs_does_not() -> None:
    for policy, winner in ((SchedulePolicy.LPM, 1), (SchedulePolicy.FCFS, 0)):
        bench = Bench(schedule=policy, max_running=1)
        bench.submit(numbers(5, 30), count=1)
        bench.finish()
        pair = [bench.submit(numbers(1, 12)), bench.submit([*numbers(5, 28), 1])]
        bench.step()
        assert pair[winner].state is not RequestState.QUEUED
        assert pair[1 - winner].state is RequestState.QUEUED
        bench.finish()


def test_a_starved_request_overtakes_longer_matches() -> None:
    bench = Bench(schedule=SchedulePolicy.LPM, max_running=1)
    bench.submit(numbers(5, 30), count=1)
    bench.finish()
    stranger = bench.submit(numbers(1, 12))
    bench.clock.advance(6.0)
    friend = bench.submit([*numbers(5, 28), 1])
    bench.step()
    assert stranger.state is not RequestState.QUEUED
    assert friend.state is RequestState.QUEUED


def test_higher_priority_is_admitted_first() -> None:
    bench = Bench(max_running=1)
    low, high = bench.submit(numbers(1, 8)), bench.submit(numbers(2, 8), priority=5)
    bench.step()
    assert (low.state, high.state) == (RequestState.QUEUED, RequestState.DECODE)


def test_namespaces_do_not_share_prefixes() -> None:
    bench = Bench()
    prompt = numbers(4, 17)
    bench.submit(prompt)
    bench.finish()
    other = bench.submit(prompt, namespace=NamespaceId(b"m" * 32))
    same = bench.submit(prompt)
    bench.finish()
    assert (other.cached.gpu, same.cached.gpu) == (0, 16)


def test_generated_tokens_are_cached_too_and_evicted_before_the_prompt() -> None:
    bench = Bench()
    request = bench.submit(numbers(4, 8), count=10)
    bench.finish()
    follow_up = [*request.prompt, *request.output, 1]
    assert (
        bench.core.cache.match(
            request.packed_prefix(request.computed // PAGE * PAGE), request.namespace
        ).token_count
        == request.computed // PAGE * PAGE
    )
    bench.core.cache.evict(2)
    again = bench.submit(follow_up)
    bench.finish()
    assert again.cached.gpu == 8
    assert correct(again)


@pytest.mark.parametrize("when", ["queued", "prefill", "decode"])
def test_abort_gives_everything_back(when: str) -> None:
    bench = Bench(max_running=1, max_batch_tokens=8)
    if when == "queued":
        bench.submit(numbers(9, 4), count=2)
        bench.step()
    request = bench.submit(numbers(1, 20), count=50)
    states = {
        "queued": RequestState.QUEUED,
        "prefill": RequestState.PREFILL,
        "decode": RequestState.DECODE,
    }
    bench.run_until(lambda: request.state is states[when])
    bench.core.abort(request.request_id)
    bench.core.check()
    assert request in bench.ended
    assert request.finish_reason is FinishReason.ABORT
    bench.finish()
    assert bench.core.cache.tree.protected_tokens == 0
    assert bench.core.cache.available_pages == 40


def test_stop_tokens_end_the_output_and_belong_to_it() -> None:
    bench = Bench()
    prompt = numbers(1, 6)
    answer = expected_output(prompt, 8, VOCAB)
    at = next(i for i, token in enumerate(answer) if token not in answer[:i] and i >= 2)
    params = SamplingParams(max_tokens=8, stop_token_ids=(answer[at],))
    request = bench.submit(prompt, count=8, params=params)
    bench.finish()
    assert request.output == answer[: at + 1]
    assert request.finish_reason is FinishReason.STOP


def test_bad_requests_are_refused_in_one_sentence() -> None:
    bench = Bench(num_pages=4)
    for prompt, words in (
        ([], "empty"),
        ([VOCAB], "token ids must be 0 to 49"),
        ([1] * MAX_CONTEXT, "shorten the prompt"),
        ([1] * (4 * PAGE), "enlarge the pool"),
    ):
        with pytest.raises(RequestError, match=words):
            bench.core.validate(prompt)


def test_too_many_waiting_requests_are_turned_away() -> None:
    bench = Bench(max_waiting=2, max_running=1)
    requests = [bench.submit(numbers(i, 8)) for i in range(4)]
    assert [r.finish_reason for r in requests[2:]] == [FinishReason.ERROR] * 2
    assert "try again later" in str(requests[3].error)
    bench.finish()
    assert all(correct(request) for request in requests[:2])


def test_a_broken_step_fails_the_requests_in_it_and_no_others() -> None:
    bench = Bench(max_running=1)
    first, second = bench.submit(numbers(1, 8)), bench.submit(numbers(2, 8))
    bench.step()
    bench.core.fail_running("engine step failed: out of memory")
    bench.core.check()
    assert first.finish_reason is FinishReason.ERROR
    assert first.error == "engine step failed: out of memory"
    bench.finish()
    assert correct(second)


# --- with a store below ------------------------------------------------------------------------


def store_of(page_bytes: int, host_pages: int = 64) -> tuple[TieredStore, MemoryTier]:
    nvme = MemoryTier(page_bytes, 256)
    return TieredStore(MemoryHostTier(page_bytes, host_pages), nvme), nvme


def page_bytes() -> int:
    return HashRunner(hash_config(VOCAB, MAX_CONTEXT), 1, PAGE).pool.page_bytes


def only_on_nvme(bench: Bench, store: TieredStore, prompt: list[int]) -> Request:
    """Compute a prompt, then push everything cached down to the lowest tier."""
    request = bench.submit(prompt)
    bench.finish()
    bench.core.drop_gpu_cache(DEADLINE_S)
    assert store.flush(DEADLINE_S)
    assert store.trim(TierName.HOST, 0) > 0
    return request


def test_p4_prefetch_starts_when_the_request_is_queued() -> None:
    store, nvme = store_of(page_bytes())
    bench = Bench(store=store, max_running=1)
    prompt = numbers(1, 21)
    only_on_nvme(bench, store, prompt)
    running = bench.submit(numbers(2, 6), count=40)
    bench.step()
    gate = nvme.hold("read")
    waiting = bench.submit(prompt)
    assert gate.entered.wait(DEADLINE_S), "nothing was read although the request is queued"
    assert waiting.state is RequestState.QUEUED
    gate.release()
    bench.finish()
    assert waiting.cached.nvme == 20
    assert correct(waiting)
    assert correct(running)
    store.close()


def test_h1_a_tier_that_never_answers_costs_the_deadline_not_the_request() -> None:
    store, nvme = store_of(page_bytes())
    bench = Bench(store=store, restore_deadline_s=10.0)
    prompt = numbers(1, 21)
    only_on_nvme(bench, store, prompt)
    gate = nvme.hold("read")
    late = bench.submit(prompt)
    # Waits for a moment, since a load may be quick; then computes although nothing has come.
    bench.run_until(lambda: late.state is RequestState.PREFILL)
    assert late.computed == 0
    assert 0 < bench.core.idle_wait_s() <= 1.0
    bench.clock.advance(10.1)
    bench.finish()
    assert late.cached.total == 0
    assert correct(late)
    assert bench.core.restore is not None
    assert bench.core.restore.stats().late == 1
    gate.release()
    assert store.wait_quiet(DEADLINE_S)
    store.check()
    store.close()


def test_p1_a_load_that_turns_out_slow_is_overtaken_by_computing() -> None:
    store, nvme = store_of(page_bytes())
    bench = Bench(store=store, restore_deadline_s=1000.0)
    prompt = numbers(1, 21)
    only_on_nvme(bench, store, prompt)
    gate = nvme.hold("read")
    late = bench.submit(prompt)
    bench.run_until(lambda: late.state is RequestState.PREFILL)
    bench.clock.advance(5.0)
    bench.finish()
    assert correct(late)
    assert late.cached.total == 0
    assert bench.core.restore is not None
    assert bench.core.restore.stats().late == 0
    gate.release()
    assert store.wait_quiet(DEADLINE_S)
    store.check()
    store.close()


def test_h3_aborting_waiting_requests_gives_their_fetches_back() -> None:
    store, nvme = store_of(page_bytes())
    bench = Bench(store=store, max_running=2)
    prompt = numbers(1, 21)
    only_on_nvme(bench, store, prompt)
    gate = nvme.hold("read")
    for _ in range(50):
        request = bench.submit(prompt)
        bench.core.abort(request.request_id)
    assert bench.core.restore is not None
    assert bench.core.restore.stats().active == 0
    gate.release()
    assert store.wait_quiet(DEADLINE_S)
    store.check()
    last = bench.submit(prompt)
    bench.finish()
    assert last.cached.total == 20
    store.close()


def test_l1_a_lease_that_ends_during_the_copy_is_a_miss(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store, _ = store_of(page_bytes())
    bench = Bench(store=store)
    prompt = numbers(1, 21)
    bench.submit(prompt)
    bench.finish()
    bench.core.drop_gpu_cache(DEADLINE_S)
    monkeypatch.setattr(TieredLease, "intact", property(lambda _: False))
    again = bench.submit(prompt)
    bench.finish()
    assert again.cached.total == 0
    assert correct(again)
    assert bench.core.restore is not None
    assert bench.core.restore.stats().failed == 5
    store.close()


def test_w6_a_corrupt_page_is_computed_and_never_read() -> None:
    store, nvme = store_of(page_bytes())
    bench = Bench(store=store)
    prompt = numbers(1, 21)
    request = only_on_nvme(bench, store, prompt)
    nvme.flip_bit(request.page_keys[2])
    before = bench.runner.computed_tokens
    again = bench.submit(prompt)
    bench.finish()
    assert again.cached.nvme == 4 * PAGE
    # The corrupt page, the prompt's last token and two of the three that were generated.
    assert bench.runner.computed_tokens - before == PAGE + 1 + 2
    assert correct(again)
    assert store.stats().tiers[1].corrupt == 1
    store.close()
