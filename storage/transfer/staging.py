"""Pages to page-contiguous staging and back, in plain torch operators, on any device.

Owns nothing. What the kernels of kernels.py do, for machines without cupy: one operator for a
group of pages when the KV cache is one tensor, one a plane otherwise; never one a page. Bytes are
moved as the widest integers that fit a row. Called by cuda.py.
"""

from __future__ import annotations

import torch

from tierkv.storage.transfer.layout import PagedKv

_WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)


def gather_staged(kv: PagedKv, index: torch.Tensor, planes: range, staging: torch.Tensor) -> None:
    """Fill uint8 [pages, bytes of planes] from pages `index` (int64, on the KV's device)."""
    word = _word(kv)
    target = staging.view(word).view(len(index), len(planes), -1)
    if kv.stacked is not None:
        # [pages, planes, words], strided: the operator reads where the pages lie.
        paged = kv.stacked[planes.start : planes.stop].view(word).transpose(0, 1)
        torch.index_select(paged, 0, index, out=target)
        return
    for position, plane in enumerate(planes):
        target[:, position].copy_(kv.planes[plane].view(word).index_select(0, index))


def scatter_staged(kv: PagedKv, index: torch.Tensor, planes: range, staging: torch.Tensor) -> None:
    """Fill pages `index` from uint8 [pages, bytes of planes]."""
    word = _word(kv)
    source = staging.view(word).view(len(index), len(planes), -1)
    if kv.stacked is not None:
        paged = kv.stacked[planes.start : planes.stop].view(word).transpose(0, 1)
        paged.index_copy_(0, index, source)
        return
    for position, plane in enumerate(planes):
        kv.planes[plane].view(word).index_copy_(0, index, source[:, position])


def _word(kv: PagedKv) -> torch.dtype:
    strides = (kv.row_bytes, kv.page_stride, *(plane.data_ptr() for plane in kv.planes))
    return next(w for w in _WORDS if all(s % w.itemsize == 0 for s in strides))
