"""How long computing and loading will take, and how much to compute while the rest loads.

Pure arithmetic on what was measured: no I/O, no torch, no clock. `PrefillCost` is fitted to
forward passes, `LoadRate` to pages that arrived; `meet` splits a gap between the two. Used by
restore.py, `tierkv bench offload` and `tierkv plan`.

A missing prefix is computed from its head while it is loaded from its tail, until they meet
(Cake: Jin et al., "Compute Or Load KV Cache? Why Not Both?", 2024). Where we differ: the compute
chunk is sized so that both end together, the decision is taken anew at every step, and loading
alone is left to itself when it would end before a chunk could.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

FORGET = 0.97
"""Weight of the past when one more pass is noted: about the last 30 count."""
PRIOR_WEIGHT = 1e-3
RATE_GAIN = 0.3
"""Weight of the newest arrival in the estimate of a load rate."""


@dataclass(frozen=True, slots=True)
class CostCoefficients:
    """t(n, context) = a * n + b * n * context + c, in seconds; context is the mean over the n."""

    a: float
    b: float
    c: float

    def seconds(self, tokens: float, context_start: float) -> float:
        """Time to compute `tokens` new tokens after `context_start` earlier ones."""
        return tokens * (self.a + self.b * (context_start + tokens / 2)) + self.c

    def chunked(self, tokens: int, context_start: int, chunk_tokens: int) -> float:
        """The same in chunks of at most `chunk_tokens`, each with its fixed cost."""
        if tokens <= 0:
            return 0.0
        chunks = -(-tokens // chunk_tokens)
        return self.seconds(tokens, context_start) + (chunks - 1) * self.c


DEFAULT_COST = CostCoefficients(a=1e-3, b=0.0, c=0.0)
"""Before anything was measured: a thousand tokens a second."""


class PrefillCost:
    """Fits CostCoefficients online, by least squares of the relative error with forgetting."""

    def __init__(self, start: CostCoefficients = DEFAULT_COST) -> None:
        prior = np.array([start.a, start.b, start.c])
        # Scales make the three unknowns comparable in the weak prior.
        self._scale = np.array([1e3, 1e6, 1e2])
        self._matrix = np.diag(PRIOR_WEIGHT * self._scale**2)
        self._vector = self._matrix @ prior
        self._current = start
        self.samples = 0

    @property
    def current(self) -> CostCoefficients:
        """The fit so far."""
        return self._current

    def note(self, tokens: int, context_start: float, seconds: float) -> None:
        """One forward pass: `tokens` new tokens after a mean of `context_start` earlier ones."""
        if tokens <= 0 or seconds <= 0:
            return
        row = np.array([tokens, tokens * (context_start + tokens / 2), 1.0]) / seconds
        self._matrix = FORGET * self._matrix + np.outer(row, row)
        self._vector = FORGET * self._vector + row
        self.samples += 1
        self._current = self._solve()

    def _solve(self) -> CostCoefficients:
        """Least squares with all coefficients at least 0: the worst offender is set to 0."""
        free = [0, 1, 2]
        solution = np.zeros(3)
        while free:
            ridge = np.diag((1e-9 * self._scale**2)[free])
            part = np.linalg.solve(self._matrix[np.ix_(free, free)] + ridge, self._vector[free])
            if (part >= 0).all():
                solution[free] = part
                break
            free.remove(free[int(np.argmin(part * self._scale[free]))])
        a, b, c = (float(value) for value in solution)
        return CostCoefficients(max(a, 1e-9), b, c)


class LoadRate:
    """Moving estimate of one tier's throughput as arrivals see it, in bytes a second.

    Concurrent loads share it: `note` takes the time since the previous arrival, or since the load
    began when nothing came before.
    """

    def __init__(self, bytes_per_s: float | None = None) -> None:
        self._rate = bytes_per_s
        self._last_arrival = float("-inf")

    @property
    def bytes_per_s(self) -> float | None:
        """None until something arrived."""
        return self._rate

    def note(self, nbytes: int, began: float, now: float) -> None:
        """`nbytes` that were asked for at `began` are there at `now` (monotonic seconds)."""
        busy = now - max(began, self._last_arrival)
        self._last_arrival = now
        if busy <= 0:
            return
        sample = nbytes / busy
        if self._rate is None:
            self._rate = sample
        else:
            # In time, not in rate: a slow arrival must weigh as much as it costs.
            self._rate = 1 / ((1 - RATE_GAIN) / self._rate + RATE_GAIN / sample)

    def seconds(self, nbytes: float, waited: float = 0.0, next_bytes: float = 0.0) -> float:
        """Time until `nbytes` more have come; 0 when the rate is not known yet.

        `waited` seconds have gone by since the last arrival while `next_bytes` were under way: a
        load that is late is as slow as it looks.
        """
        if self._rate is None:
            return 0.0
        rate = self._rate
        if next_bytes and waited * rate > 2 * next_bytes:
            rate = next_bytes / waited
            return nbytes / rate
        return max(0.0, nbytes / rate - waited)


def meet(
    gap_tokens: int,
    context_start: int,
    cost: CostCoefficients,
    load_s_per_token: float,
    credit_s: float = 0.0,
) -> float:
    """Tokens to compute at the head of a gap so that its tail is loaded at the same moment.

    `credit_s`: loading time that has gone by already. 0: loading alone ends sooner than a chunk
    could. gap_tokens: loading is no help. Found by bisection: computing costs more the more
    tokens, loading less.
    """
    low, high = 0.0, float(gap_tokens)
    if cost.seconds(high, context_start) <= 0.0:
        return high
    for _ in range(40):
        middle = (low + high) / 2
        load = max(0.0, (gap_tokens - middle) * load_s_per_token - credit_s)
        if cost.seconds(middle, context_start) <= load:
            low = middle
        else:
            high = middle
    return low


@dataclass(frozen=True, slots=True)
class Plan:
    """What a restore was expected to take, in seconds."""

    compute_tokens: int
    """Tokens at the head that are computed."""
    load_tokens: int
    expected_s: float
    compute_all_s: float
    load_all_s: float


def plan(
    tokens: int,
    context_start: int,
    cost: CostCoefficients,
    load_s_per_token: float,
    latency_s: float,
    chunk_tokens: int,
) -> Plan:
    """Split `tokens` between computing and loading; recompute outright when that is best."""
    compute_all = cost.chunked(tokens, context_start, chunk_tokens)
    load_all = latency_s + tokens * load_s_per_token
    head = int(meet(tokens, context_start, cost, load_s_per_token, -latency_s))
    both = max(
        cost.chunked(head, context_start, chunk_tokens),
        latency_s + (tokens - head) * load_s_per_token,
    )
    best = min(both, compute_all, load_all)
    if best == compute_all:
        head = tokens
    elif best == load_all:
        head = 0
    return Plan(head, tokens - head, best, compute_all, load_all)


def dump_calibration(cost: CostCoefficients, rates: dict[str, float]) -> str:
    """JSON of what was learned, for the next start on the same machine and model."""
    return json.dumps({"version": 1, "cost": [cost.a, cost.b, cost.c], "rates": rates})


def load_calibration(text: str) -> tuple[CostCoefficients, dict[str, float]] | None:
    """Inverse of dump_calibration; None for anything else: calibration is learned again."""
    try:
        value = json.loads(text)
        if value["version"] != 1:
            return None
        a, b, c = (float(each) for each in value["cost"])
        rates = {str(tier): float(rate) for tier, rate in value["rates"].items()}
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    numbers: Sequence[float] = [a, b, c, *rates.values()]
    if not all(np.isfinite(each) and each >= 0 for each in numbers) or a <= 0:
        return None
    return CostCoefficients(a, b, c), rates
