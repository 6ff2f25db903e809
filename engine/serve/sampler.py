"""From logits to tokens: parameters a client may ask for, and the choice itself.

Owns nothing between calls: a request's random state is its own SamplingState, so what is drawn
for it does not depend on its neighbours in the batch. Knows no requests beyond that. Called by
the engine loop after each forward.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from tierkv.storage.errors import RequestError

TEMPERATURE_MAX = 100.0
SEED_MAX = 2**63 - 1
STOP_TOKENS_MAX = 256


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one request's tokens are chosen. Raises RequestError on a value that cannot be."""

    temperature: float = 0.0
    """0 is greedy: the most likely token, the lowest id among equals."""
    top_k: int = 0
    """Keep the k most likely tokens; 0 keeps all."""
    top_p: float = 1.0
    """Keep the fewest most likely tokens whose probabilities reach this sum; 1 keeps all."""
    seed: int | None = None
    """None: seeded by the system."""
    max_tokens: int = 256
    """Longest output in tokens, at least 1."""
    stop_token_ids: tuple[int, ...] = field(default=())
    """End the output at any of these, besides the model's own end tokens."""
    ignore_eos: bool = False
    """Go on past the model's own end tokens."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and 0 <= self.temperature <= TEMPERATURE_MAX):
            raise _refused("temperature", f"0 to {TEMPERATURE_MAX:g}", self.temperature)
        if self.top_k < 0:
            raise _refused("top_k", "0 (all) or more", self.top_k)
        if not 0 < self.top_p <= 1:
            raise _refused("top_p", "above 0, at most 1", self.top_p)
        if self.seed is not None and not 0 <= self.seed <= SEED_MAX:
            raise _refused("seed", f"0 to {SEED_MAX}", self.seed)
        if self.max_tokens < 1:
            raise _refused("max_tokens", "1 or more", self.max_tokens)
        if len(self.stop_token_ids) > STOP_TOKENS_MAX:
            raise _refused(
                "stop_token_ids", f"at most {STOP_TOKENS_MAX} ids", len(self.stop_token_ids)
            )
        if any(token < 0 for token in self.stop_token_ids):
            raise _refused("stop_token_ids", "ids of 0 or more", min(self.stop_token_ids))

    @property
    def greedy(self) -> bool:
        """True when no randomness is involved."""
        return self.temperature == 0


class SamplingState:
    """One request's parameters and random state. Keep it for the request's whole life."""

    __slots__ = ("generator", "params")

    def __init__(self, params: SamplingParams) -> None:
        self.params = params
        self.generator: torch.Generator | None = None
        if not params.greedy:
            self.generator = torch.Generator()
            if params.seed is None:
                self.generator.seed()
            else:
                self.generator.manual_seed(params.seed)


class Sampler:
    """Chooses one token per row."""

    def sample(self, logits: torch.Tensor, states: Sequence[SamplingState]) -> list[int]:
        """Choose a token for each row of `logits` [rows, vocab_size], one state per row.

        Does not change `logits`; draws once from each sampling state's generator. O(vocab) a
        greedy row, O(vocab log vocab) a sampled one.
        """
        assert logits.shape[0] == len(states), "sampler: one state per row of logits"
        if not states:
            return []
        with torch.inference_mode():
            chosen: list[int] = logits.argmax(dim=-1).tolist()
            for row, state in enumerate(states):
                if state.generator is not None:
                    chosen[row] = _draw(logits[row], state.params, state.generator)
        return chosen


def _draw(row: torch.Tensor, params: SamplingParams, generator: torch.Generator) -> int:
    """Draw by inverting the cumulative distribution of the kept tokens at one uniform number."""
    scaled = row.float() / params.temperature
    if 0 < params.top_k < scaled.shape[0]:
        ordered, ids = scaled.topk(params.top_k)
    else:
        ordered, ids = scaled.sort(descending=True, stable=True)
    sums = ordered.double().softmax(dim=-1).cumsum(dim=-1)
    # The first place where the sum reaches top_p is still kept.
    kept = min(int((sums < params.top_p).sum()) + 1, sums.shape[0])
    uniform = float(torch.rand((), dtype=torch.float64, generator=generator))
    target = uniform * float(sums[kept - 1])
    at = min(int((sums[:kept] <= target).sum()), kept - 1)
    return int(ids[at])


def _refused(name: str, expected: str, actual: float) -> RequestError:
    return RequestError(f"sampling parameters: {name} must be {expected}, got {actual}")
