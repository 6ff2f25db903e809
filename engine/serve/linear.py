"""Matrix products of the model: y = x W^T + b, by the fastest way this machine has.

Owns the weights once they are handed in. Knows no layers. Called by the model only.

On the CPU the shapes that matter are 1 to 16 rows (decode) and hundreds (prefill). The plain
product repacks the weights inside every call, which costs decode of 4 to 8 rows about half its
time. MKL can keep them packed; the packed copy then replaces the plain one, so memory does not
double. That operator is private to torch: it is looked up, tried on the weights themselves at
several row counts, and the plain product stays wherever it is missing or does not agree.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

logger = logging.getLogger(__name__)

_PACK_ROWS_HINT = 256
_CHECK_ROWS = (1, 2, 3, 8, 33)
_CHECK_RELATIVE_ERROR_MAX = 1e-5

Linear = Callable[[torch.Tensor], torch.Tensor]
"""Maps [n, in] to a new tensor [n, out] of the same dtype."""


class PlainLinear:
    """torch's own product, any device and dtype."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.weight = weight
        self.bias = bias

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        return F.linear(rows, self.weight, self.bias)


class PackedLinear:
    """MKL's product over weights packed once. CPU float32 only."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._packed = torch.ops.mkl._mkl_reorder_linear_weight(weight, _PACK_ROWS_HINT)
        self.bias = bias
        # The operator reads only the shape of the plain weight when the row counts it is given
        # agree, so a single element stands in for all of them.
        self._shape = torch.zeros(1).expand(weight.shape)
        self._product: Any = torch.ops.mkl._mkl_linear.default

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self._product(rows, self._packed, self._shape, self.bias, rows.shape[0])
        return out


def make_linear(weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
    """Choose the product for `weight` [out, in]; the caller should drop its own reference.

    Packing and checking cost a few passes over the weights.
    """
    if weight.device.type == "cpu" and weight.dtype == torch.float32 and packing_available():
        packed = PackedLinear(weight, bias)
        if _agrees(packed, weight, bias):
            return packed
        logger.warning("packed product disagrees shape=%s using=plain", tuple(weight.shape))
    return PlainLinear(weight, bias)


def packing_available() -> bool:
    """True when this build of torch has MKL's packed product."""
    return hasattr(torch.ops.mkl, "_mkl_linear") and hasattr(
        torch.ops.mkl, "_mkl_reorder_linear_weight"
    )


def _agrees(packed: PackedLinear, weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
    """Compare with the plain product on fixed pseudo-random rows."""
    generator = torch.Generator().manual_seed(0)
    for count in _CHECK_ROWS:
        rows = torch.randn((count, weight.shape[1]), generator=generator)
        expected = F.linear(rows, weight, bias)
        error = (packed(rows) - expected).abs().max()
        if not bool(error <= _CHECK_RELATIVE_ERROR_MAX * expected.abs().max()):
            return False
    return True
