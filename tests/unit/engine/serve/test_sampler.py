"""Sampling: what is refused, what is kept, and that neighbours do not matter."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tierkv.engine.serve.sampler import Sampler, SamplingParams, SamplingState
from tierkv.storage.errors import RequestError

VOCAB = 50


def rows(count: int, seed: int = 3) -> torch.Tensor:
    return torch.randn(count, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.5),
        ("top_p", float("nan")),
        ("seed", -1),
        ("seed", 2**63),
        ("max_tokens", 0),
        ("stop_token_ids", (1, -2)),
        ("stop_token_ids", tuple(range(257))),
    ],
)
def test_bad_parameters_are_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(RequestError, match=f"{field} must be"):
        SamplingParams(**{field: value})


def test_limits_themselves_are_accepted() -> None:
    SamplingParams(temperature=100.0, top_p=1.0, seed=2**63 - 1, max_tokens=1)
    SamplingParams(stop_token_ids=tuple(range(256)))


def test_greedy_takes_the_lowest_id_among_equals() -> None:
    logits = torch.zeros(3, VOCAB)
    logits[0, [9, 30]] = 4.0
    logits[1, [VOCAB - 1, 2]] = 1.0
    states = [SamplingState(SamplingParams()) for _ in range(3)]
    assert Sampler().sample(logits, states) == [9, 2, 0]


def test_no_rows_no_tokens() -> None:
    assert Sampler().sample(torch.empty(0, VOCAB), []) == []


def test_top_k_and_top_p_keep_only_what_they_say() -> None:
    logits = rows(1)
    order = logits[0].argsort(descending=True)
    sums = logits[0].softmax(-1)[order].cumsum(0)
    nucleus = int((sums < 0.7).sum()) + 1
    for params, kept in (
        (SamplingParams(temperature=1.0, top_k=3, seed=1), 3),
        (SamplingParams(temperature=1.0, top_p=0.7, seed=1), nucleus),
        (SamplingParams(temperature=5.0, top_k=1, seed=1), 1),
        (SamplingParams(temperature=1.0, top_p=1e-9, seed=1), 1),
    ):
        state = SamplingState(params)
        drawn = {Sampler().sample(logits, [state])[0] for _ in range(400)}
        assert drawn == set(order[:kept].tolist())


def test_frequencies_follow_the_distribution() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0, -1.0]])
    state = SamplingState(SamplingParams(temperature=0.8, seed=11))
    count = 4000
    drawn = torch.tensor([Sampler().sample(logits, [state])[0] for _ in range(count)])
    frequencies = torch.bincount(drawn, minlength=4) / count
    expected = (logits[0] / 0.8).softmax(-1)
    assert (frequencies - expected).abs().max() < 0.03


def test_a_seeded_request_does_not_depend_on_its_neighbours() -> None:
    steps = [rows(4, seed) for seed in range(20)]
    params = SamplingParams(temperature=1.0, top_p=0.95, seed=42)
    state = SamplingState(params)
    alone = [Sampler().sample(step[2:3], [state])[0] for step in steps]
    others = [
        SamplingState(SamplingParams()),
        SamplingState(SamplingParams(temperature=2.0, seed=42)),
        SamplingState(params),
        SamplingState(SamplingParams(temperature=0.5, top_k=5)),
    ]
    together = [Sampler().sample(step, others)[2] for step in steps]
    assert together == alone
    assert len(set(alone)) > 1


def test_sampling_leaves_the_logits_alone() -> None:
    logits = rows(2)
    before = logits.clone()
    states = [SamplingState(SamplingParams(temperature=1.0, top_k=4, seed=s)) for s in (1, 2)]
    Sampler().sample(logits, states)
    assert torch.equal(logits, before)
