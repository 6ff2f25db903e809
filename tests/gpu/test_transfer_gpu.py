"""The data path on a real CUDA device: run with `python -m pytest -m gpu`.

Skips nothing when asked for: without a device it fails and says what is missing.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch

from tests.support.kernel_on_cpu import payload
from tierkv.engine.cache.page_pool import PagePool
from tierkv.storage.arena import Arena
from tierkv.storage.clock import SystemClock
from tierkv.storage.transfer.calibration import calibrate
from tierkv.storage.transfer.cuda import CudaTransfer
from tierkv.storage.transfer.layout import PagedKv
from tierkv.storage.transfer.probe import cuda_problem, missing_kernels

pytestmark = pytest.mark.gpu

DEADLINE_S = 60.0
PAGES = 64
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn]
SHAPES = {
    "heads": (4, 2, PAGES, 16, 8, 128),
    "small": (3, 2, PAGES, 4, 1, 8),
    "latent": (5, PAGES, 16, 576),
}


@pytest.fixture(scope="module", autouse=True)
def device() -> torch.device:
    problem = cuda_problem()
    assert problem is None, problem
    return torch.device("cuda", 0)


def filled(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    count = int(torch.tensor(shape).prod()) * dtype.itemsize
    raw = torch.randint(0, 256, (count,), dtype=torch.uint8, device=device)
    return raw.view(dtype).reshape(shape)


class Rig:
    """A transfer with an arena of `slots` pages, registered or not."""

    def __init__(self, kv: torch.Tensor, *, slots: int, registered: bool) -> None:
        self.kv = kv
        self.transfer = CudaTransfer(kv)
        page_bytes = self.transfer.page_bytes
        self.arena = Arena(None, page_bytes, (slots + 2) * (page_bytes + 8192) + 8192)
        geometry = self.arena.geometry
        if registered:
            done = self.transfer.register(
                self.arena.memory, unit_bytes=geometry.slot_bytes, first_bytes=geometry.first_slot
            )
            assert done == geometry.total_bytes
        self.views = [self.arena.payload_view(i) for i in range(slots)]

    def close(self) -> None:
        self.transfer.close()
        self.views.clear()
        self.arena.close()


METHODS = ["kernel", "copies"]


@pytest.fixture(params=METHODS)
def method(request: pytest.FixtureRequest) -> Iterator[str]:
    if request.param == "kernel":
        reason = missing_kernels()
        assert reason is None, reason
    yield request.param


@pytest.mark.parametrize("registered", [True, False], ids=["registered", "bounced"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", SHAPES)
def test_w1_pages_come_back_bit_for_bit(
    device: torch.device, method: str, name: str, dtype: torch.dtype, registered: bool
) -> None:
    kv = filled(SHAPES[name], dtype, device)
    rig = Rig(kv, slots=40, registered=registered)
    rig.transfer.ops.choose(method, method)
    pages = random.Random(3).sample(range(PAGES), 40)
    original = kv.clone()
    expected = [payload(original.cpu(), page) for page in pages]
    saved = rig.transfer.gather(pages, rig.views)
    assert saved.wait(DEADLINE_S)
    assert saved.error is None
    assert [bytes(view) for view in rig.views] == expected
    kv.view(torch.uint8).zero_()
    loaded = rig.transfer.scatter([view.toreadonly() for view in rig.views], pages)
    assert loaded.wait(DEADLINE_S)
    assert loaded.error is None
    now = kv.cpu()
    assert [payload(now, page) for page in pages] == expected
    for page in set(range(PAGES)) - set(pages):
        assert not any(payload(now, page)), "a page that was not named was written"
    assert rig.transfer.stats().bounced_pages == (0 if registered else 80)
    rig.close()


def test_per_layer_tensors_are_moved_like_one(device: torch.device, method: str) -> None:
    kv = [filled(SHAPES["heads"][1:], torch.bfloat16, device) for _ in range(4)]
    transfer = CudaTransfer(kv)
    transfer.ops.choose(method, method)
    views = [memoryview(bytearray(transfer.page_bytes)) for _ in range(5)]
    pages = [9, 2, 63, 0, 30]
    assert transfer.gather(pages, views).wait(DEADLINE_S)
    whole = torch.stack(kv).cpu()
    assert [bytes(view) for view in views] == [payload(whole, page) for page in pages]
    transfer.close()


@pytest.mark.parametrize("registered", [True, False], ids=["registered", "bounced"])
def test_w2_copies_are_ordered_behind_a_slow_pass_and_before_the_next(
    device: torch.device, method: str, registered: bool
) -> None:
    """A pass that takes long writes pages; they leave; the next pass overwrites them."""
    kv = filled(SHAPES["heads"], torch.bfloat16, device)
    rig = Rig(kv, slots=32, registered=registered)
    rig.transfer.ops.choose(method, method)
    pool = PagePool(PAGES, 16)
    rng = random.Random(11)
    for turn in range(20):
        pages = pool.allocate(rng.randrange(1, 33))
        assert pages is not None
        torch.cuda._sleep(rng.randrange(1, 20_000_000))
        value = float(turn + 1)
        kv[:, :, pages.tolist()] = value
        held = pool.begin_copy(pages)
        views = rig.views[: len(pages)]
        saved = rig.transfer.gather(held, views)
        assert saved.wait(DEADLINE_S)
        pool.finish_copy(held, free=True)
        kv[:, :, pages.tolist()] = -1.0
        for view in views:
            stored = torch.frombuffer(bytearray(view), dtype=torch.bfloat16)
            assert (stored == value).all(), f"turn {turn}"
        # Back into other pages, which the slow pass above may still be writing.
        back = pool.allocate(len(pages))
        assert back is not None
        torch.cuda._sleep(rng.randrange(1, 20_000_000))
        kv[:, :, back.tolist()] = -2.0
        held = pool.begin_copy(back)
        loaded = rig.transfer.scatter(views, held)
        sums = []
        for layer in range(kv.shape[0]):
            loaded.wait_layer(layer, DEADLINE_S)
            sums.append((kv[layer][:, back.tolist()] == value).all())
        assert all(bool(each) for each in sums), f"turn {turn}: a layer was read too early"
        assert loaded.wait(DEADLINE_S)
        pool.finish_copy(held, free=True)
        pool.check()
    rig.transfer.check()
    rig.close()


def test_calibration_finds_rates_and_keeps_the_pages(device: torch.device) -> None:
    kv = filled(SHAPES["heads"], torch.bfloat16, device)
    before = kv.clone()
    transfer = CudaTransfer(kv)
    found = calibrate(transfer, SystemClock())
    assert found.out_bytes_per_s[found.out_method] > 0
    assert torch.equal(kv.view(torch.uint8), before.view(torch.uint8))
    transfer.close()


def test_c3_memory_is_registered_once_and_let_go(device: torch.device) -> None:
    kv = filled(SHAPES["small"], torch.float16, device)
    for _ in range(2):
        # A second registration of the same memory would be refused if the first were kept.
        rig = Rig(kv, slots=8, registered=True)
        assert rig.transfer.stats().pinned_bytes == rig.arena.geometry.total_bytes
        rig.close()


def test_bytes_are_those_of_the_format(device: torch.device) -> None:
    kv = filled(SHAPES["latent"], torch.bfloat16, device)
    assert PagedKv(kv).page_bytes == 5 * 16 * 576 * 2
