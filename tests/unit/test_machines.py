"""The arithmetic of other machines, against published figures worked out elsewhere."""

from __future__ import annotations

import pytest

from tierkv.machines import forecast, gpu_named, model_named
from tierkv.storage.errors import ConfigError

# Model, KiB of KV a token, then for 4k, 32k and 128k: ms of prefill per 1,000 tokens, GB/s.
TABLE = [
    ("llama-3.1-8b", 128, (32.5, 47.7, 99.8), (4.0, 2.8, 1.3)),
    ("llama-3.1-70b", 320, (292, 368, 629), (1.1, 0.9, 0.5)),
    ("qwen3-32b", 256, (138, 199, 407), (1.9, 1.3, 0.6)),
    ("deepseek-v3", 69, (170, 315, 812), (0.4, 0.2, 0.1)),
]


@pytest.mark.parametrize(("name", "kib", "prefill", "even"), TABLE)
def test_prefill_and_break_even_on_h100(
    name: str, kib: int, prefill: tuple[float, ...], even: tuple[float, ...]
) -> None:
    model = model_named(name)
    assert round(model.kv_bytes_per_token / 1024) == kib
    for tokens, ms, gbs in zip((4096, 32768, 131072), prefill, even, strict=True):
        row = forecast(gpu_named("h100"), model, tokens, 3e9)
        assert row.prefill_s * 1e6 / tokens == pytest.approx(ms, rel=0.01)
        # The published figures have one decimal.
        assert row.break_even_bytes_per_s / 1e9 == pytest.approx(gbs, abs=0.06)


def test_the_plan_is_never_worse_than_the_better_pure_way() -> None:
    for gbs in (0.5, 3, 4, 20, 55):
        for tokens in (100, 4096, 131072):
            row = forecast(gpu_named("h100"), model_named("llama-3.1-8b"), tokens, gbs * 1e9)
            best = min(row.plan.compute_all_s, row.plan.load_all_s)
            assert row.plan.expected_s <= best * 1.000001
            assert row.plan.compute_all_s == pytest.approx(row.prefill_s, rel=1e-6)
            assert row.plan.compute_tokens + row.plan.load_tokens == tokens


def test_where_both_ways_cost_the_same_the_plan_halves_the_time() -> None:
    model = model_named("llama-3.1-70b")
    even = forecast(gpu_named("h100"), model, 4096, 3e9).break_even_bytes_per_s
    row = forecast(gpu_named("h100"), model, 4096, even)
    assert row.plan.expected_s == pytest.approx(row.prefill_s / 2, rel=0.02)


def test_unknown_names_list_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="a100, l40s, h100, h200, b200"):
        gpu_named("tpu")
    with pytest.raises(ConfigError, match="qwen3-32b"):
        model_named("gpt")
