"""Page copies between the paged pool and payload views: layout, order, failure."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tierkv.storage.errors import TierClosedError, TierIOError
from tierkv.storage.transfer.base import CopyEvent
from tierkv.storage.transfer.cpu import CpuTransfer

DEADLINE_S = 20.0


def pool(dtype: torch.dtype = torch.float32, pages: int = 12) -> torch.Tensor:
    """A pool [3 layers, 2, pages, 4 tokens, 2 heads, 8] with a distinct value everywhere."""
    shape = (3, 2, pages, 4, 2, 8)
    return torch.arange(np.prod(shape), dtype=torch.float32).reshape(shape).to(dtype).contiguous()


def buffers(count: int, page_bytes: int) -> list[memoryview]:
    return [memoryview(bytearray(page_bytes)) for _ in range(count)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_gather_gives_payload_order(dtype: torch.dtype) -> None:
    kv = pool(dtype)
    transfer = CpuTransfer(kv)
    views = buffers(3, transfer.page_bytes)
    assert transfer.gather([7, 0, 11], views).wait(DEADLINE_S)
    for page, view in zip([7, 0, 11], views, strict=True):
        payload = kv[:, :, page].contiguous().view(torch.uint8).numpy().tobytes()
        assert bytes(view) == payload
    transfer.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scatter_restores_exactly_the_named_pages(dtype: torch.dtype) -> None:
    kv = pool(dtype)
    original = kv.clone()
    transfer = CpuTransfer(kv)
    views = buffers(2, transfer.page_bytes)
    assert transfer.gather([2, 5], views).wait(DEADLINE_S)
    kv[:, :, [2, 5, 6]] = 0
    blank = kv.clone()
    assert transfer.scatter(views, [5, 6]).wait(DEADLINE_S)
    assert torch.equal(kv[:, :, 5], original[:, :, 2])
    assert torch.equal(kv[:, :, 6], original[:, :, 5])
    others = [page for page in range(12) if page not in (5, 6)]
    assert torch.equal(kv[:, :, others], blank[:, :, others])
    transfer.close()


def test_a_view_of_the_wrong_length_fails_the_copy_and_names_it() -> None:
    transfer = CpuTransfer(pool())
    event = transfer.gather([1], [memoryview(bytearray(transfer.page_bytes - 1))])
    assert event.wait(DEADLINE_S)
    assert isinstance(event.error, TierIOError)
    assert "copy 1 pages" in str(event.error)
    transfer.close()


def test_closed_transfer_refuses_and_close_waits_for_what_runs() -> None:
    kv = pool()
    transfer = CpuTransfer(kv)
    views = buffers(4, transfer.page_bytes)
    event = transfer.gather([0, 1, 2, 3], views)
    transfer.close()
    assert event.done
    with pytest.raises(TierClosedError):
        transfer.scatter(views, [0, 1, 2, 3])
    transfer.close()


