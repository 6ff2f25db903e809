"""Page copies between the paged pool and payload views: layout, order, layers, ends."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import pytest
import torch

from tests.support.clock import ManualClock
from tierkv.engine.cache.page_pool import PagePool
from tierkv.storage.errors import ConfigError, TierClosedError, TierIOError
from tierkv.storage.transfer.base import CopyEvent
from tierkv.storage.transfer.calibration import Calibration, apply, calibrate
from tierkv.storage.transfer.cpu import CpuTransfer, HostOps
from tierkv.storage.transfer.device_ops import Wait
from tierkv.storage.transfer.layout import PagedKv
from tierkv.storage.transfer.opening import open_transfer
from tierkv.storage.transfer.streams import StreamTransfer

DEADLINE_S = 20.0


def pool(dtype: torch.dtype = torch.float32, pages: int = 12) -> torch.Tensor:
    """A pool [3 layers, 2, pages, 4 tokens, 2 heads, 8] with a distinct value everywhere."""
    shape = (3, 2, pages, 4, 2, 8)
    return torch.arange(np.prod(shape), dtype=torch.float32).reshape(shape).to(dtype).contiguous()


def buffers(count: int, page_bytes: int) -> list[memoryview]:
    return [memoryview(bytearray(page_bytes)) for _ in range(count)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_gather_gives_payload_order(dtype: torch.dtype) -> None:
    kv = pool(dtype)
    transfer = CpuTransfer(kv)
    views = buffers(3, transfer.page_bytes)
    assert transfer.gather([7, 0, 11], views).wait(DEADLINE_S)
    for page, view in zip([7, 0, 11], views, strict=True):
        payload = kv[:, :, page].contiguous().view(torch.uint8).numpy().tobytes()
        assert bytes(view) == payload
    transfer.close()


@pytest.mark.parametrize("per_layer", [False, True])
@pytest.mark.parametrize("latent", [False, True])
def test_scatter_restores_exactly_the_named_pages(latent: bool, per_layer: bool) -> None:
    kv = torch.randn(3, 12, 4, 24) if latent else pool()
    kv_layers = [layer.clone() for layer in kv]
    transfer = open_transfer(kv_layers if per_layer else kv)
    views = buffers(2, transfer.page_bytes)
    assert transfer.gather([2, 5], views).wait(DEADLINE_S)
    before = kv.clone()
    assert transfer.scatter([view.toreadonly() for view in views], [5, 6]).wait(DEADLINE_S)
    after = torch.stack(kv_layers) if per_layer else kv
    pages = 1 if latent else 2
    expected = before.clone()
    expected.select(pages, 5).copy_(before.select(pages, 2))
    expected.select(pages, 6).copy_(before.select(pages, 5))
    assert torch.equal(after, expected)
    assert transfer.stats().in_bytes == 2 * transfer.page_bytes
    transfer.check()
    transfer.close()


def test_a_view_of_the_wrong_length_fails_the_copy_and_names_it() -> None:
    transfer = CpuTransfer(pool())
    event = transfer.gather([1], [memoryview(bytearray(transfer.page_bytes - 1))])
    assert event.wait(DEADLINE_S)
    assert isinstance(event.error, TierIOError)
    assert "copy 1 pages: a view has" in str(event.error)
    assert transfer.stats().failed == 1
    transfer.close()


def test_tensors_that_are_no_kv_cache_are_refused() -> None:
    for wrong in (torch.zeros(2, 3), torch.zeros(3, 2, 4, 4, 2, 8).transpose(3, 4)):
        with pytest.raises(ConfigError, match=r"open transfer: a .*KV"):
            PagedKv(wrong)
    with pytest.raises(ConfigError, match="differ in shape"):
        PagedKv([torch.zeros(4, 1, 8), torch.zeros(4, 1, 9)])
    with pytest.raises(ConfigError, match="no layer"):
        PagedKv([])


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


class GatedOps(HostOps):
    """Moves of a direction wait for its gate; notes fences, and the layers that were moved."""

    def __init__(self, kv: torch.Tensor) -> None:
        super().__init__(kv)
        self.out_gate, self.in_gate = threading.Event(), threading.Event()
        self.moved: list[tuple[str, list[int], range]] = []
        self.waits: list[tuple[object, object, Wait]] = []
        self.passes = 0
        self.fault: Exception | None = None

    def record(self, stream: object) -> object:
        return f"pass {self.passes}" if stream == "compute" else "copy"

    def stream_wait(self, stream: object, event: object, why: Wait) -> None:
        self.waits.append((stream, event, why))

    def step_layers(self, page_count: int, *, reachable: bool) -> int:
        return 1

    def move_out(self, stream, pages, views, planes):  # type: ignore[no-untyped-def]
        assert self.out_gate.wait(DEADLINE_S)
        if self.fault is not None:
            raise self.fault
        super().move_out(stream, pages, views, planes)
        self.moved.append(("out", list(pages), planes))

    def move_in(self, stream, views, pages, planes):  # type: ignore[no-untyped-def]
        if planes.start > 0:
            assert self.in_gate.wait(DEADLINE_S)
        super().move_in(stream, views, pages, planes)
        self.moved.append(("in", list(pages), planes))


@pytest.fixture
def gated() -> StreamTransfer:
    return StreamTransfer(GatedOps(pool()))


def ops_of(transfer: StreamTransfer) -> GatedOps:
    assert isinstance(transfer.ops, GatedOps)
    return transfer.ops


def test_w2_the_fence_is_taken_when_the_copy_is_asked_for(gated: StreamTransfer) -> None:
    ops = ops_of(gated)
    ops.passes = 1
    first = gated.gather([4], buffers(1, gated.page_bytes))
    ops.passes = 2
    second = gated.gather([5], buffers(1, gated.page_bytes))
    ops.passes = 3
    ops.out_gate.set()
    assert first.wait(DEADLINE_S)
    assert second.wait(DEADLINE_S)
    assert ops.waits == [
        ("demote", "pass 1", Wait.FORWARD_PASS),
        ("demote", "pass 2", Wait.FORWARD_PASS),
    ]
    gated.close()


def test_directions_do_not_wait_for_each_other(gated: StreamTransfer) -> None:
    ops = ops_of(gated)
    ops.in_gate.set()
    blocked = gated.gather([1], buffers(1, gated.page_bytes))
    assert gated.scatter(buffers(1, gated.page_bytes), [2]).wait(DEADLINE_S)
    assert not blocked.done
    ops.out_gate.set()
    assert blocked.wait(DEADLINE_S)
    gated.close()


def test_layers_arrive_in_order_and_can_be_waited_for_one_by_one(gated: StreamTransfer) -> None:
    ops = ops_of(gated)
    copy = gated.scatter(buffers(2, gated.page_bytes), [2, 3])
    copy.wait_layer(0, DEADLINE_S)
    assert not copy.done
    with pytest.raises(TierIOError, match="restore layer 1: not there within 0 s"):
        copy.wait_layer(1, 0.0)
    ops.in_gate.set()
    copy.wait_layer(2, DEADLINE_S)
    assert copy.wait(DEADLINE_S)
    copy.wait_layer(2, 0.0)
    assert [planes for _, _, planes in ops.moved] == [range(2), range(2, 4), range(4, 6)]
    assert ("compute", "copy", Wait.LAYER) in ops.waits
    gated.close()


def test_a_scatter_that_has_not_begun_is_cancelled_without_a_byte(gated: StreamTransfer) -> None:
    ops = ops_of(gated)
    pages = PagePool(12, 4)
    taken = pages.allocate(2)
    assert taken is not None
    running = gated.scatter(buffers(1, gated.page_bytes), [7])
    held = pages.begin_copy(taken)
    waiting = gated.scatter(buffers(2, gated.page_bytes), held)
    running.wait_layer(0, DEADLINE_S)
    assert held.under_way
    assert waiting.cancel()
    assert waiting.done
    assert "cancelled" in str(waiting.error)
    assert not waiting.cancel(), "it has ended"
    pages.finish_copy(held, free=True)
    with pytest.raises(TierIOError, match="cancelled"):
        waiting.wait_layer(0, DEADLINE_S)
    ops.in_gate.set()
    assert running.wait(DEADLINE_S)
    assert running.error is None
    assert [each[1] for each in ops.moved] == [[7]] * 3
    assert gated.stats().cancelled == 1
    gated.check()
    gated.close()


def test_a_running_scatter_that_is_cancelled_stops_at_the_next_layer(
    gated: StreamTransfer,
) -> None:
    ops = ops_of(gated)
    copy = gated.scatter(buffers(1, gated.page_bytes), [7])
    copy.wait_layer(0, DEADLINE_S)
    assert not copy.cancel()
    ops.in_gate.set()
    assert copy.wait(DEADLINE_S)
    assert copy.error is not None
    assert "cancelled at layer" in str(copy.error)
    assert len(ops.moved) <= 2
    gated.close()


def test_h2_a_failed_copy_ends_with_its_error_and_the_next_one_runs(gated: StreamTransfer) -> None:
    ops = ops_of(gated)
    ops.out_gate.set()
    ops.fault = RuntimeError("CUDA error: out of memory")
    failed = gated.gather([1], buffers(1, gated.page_bytes))
    assert failed.wait(DEADLINE_S)
    assert "copy 1 pages: CUDA error: out of memory" in str(failed.error)
    ops.fault = None
    good = gated.gather([1], buffers(1, gated.page_bytes))
    assert good.wait(DEADLINE_S)
    assert good.error is None
    gated.close()


def test_h2_a_device_that_is_lost_ends_its_copies_and_refuses_the_next() -> None:
    class LostOps(HostOps):
        """Its events cannot be asked any more, nor new ones recorded on a copy stream."""

        lost = False

        def event_done(self, event: object, why: Wait) -> bool:
            self.lost = True
            raise RuntimeError("CUDA error: device lost")

        def record(self, stream: object) -> object:
            if self.lost:
                raise RuntimeError("CUDA error: device lost")
            return super().record(stream)

    ops = LostOps(pool())
    transfer = StreamTransfer(ops)
    first = transfer.gather([1], buffers(1, transfer.page_bytes))
    assert first.wait(DEADLINE_S)
    assert "device lost" in str(first.error)
    ops.lost = False
    second = transfer.gather([1], buffers(1, transfer.page_bytes))
    assert second.wait(DEADLINE_S)
    assert "takes no work any more" in str(second.error)
    assert transfer.stats().broken is not None
    transfer.check()
    transfer.close()


@pytest.mark.parametrize("way", ["gather", "scatter"])
def test_h2_a_device_that_is_lost_before_the_copy_ends_it_and_frees_its_pages(way: str) -> None:
    class LostOps(HostOps):
        def record(self, stream: object) -> object:
            raise RuntimeError("CUDA error: device lost\nSearch for it in the manual")

    transfer = StreamTransfer(LostOps(pool()))
    pages = PagePool(12, 4)
    mine = pages.allocate(2)
    assert mine is not None
    held = pages.begin_copy(mine)
    views = buffers(2, transfer.page_bytes)
    copy = transfer.gather(held, views) if way == "gather" else transfer.scatter(views, held)
    assert copy.wait(DEADLINE_S)
    assert str(copy.error).endswith("the device takes no work any more (CUDA error: device lost)")
    pages.finish_copy(held, free=True)
    pages.check()
    assert pages.free_count == 12
    transfer.check()
    transfer.close()


def test_h1_a_dead_copy_thread_leaves_nobody_waiting(gated: StreamTransfer) -> None:
    ops = ops_of(gated)
    ops.fault = AssertionError("a bug")
    hooked = threading.Event()
    before, threading.excepthook = threading.excepthook, lambda _: hooked.set()
    try:
        gated.gather([1], buffers(1, gated.page_bytes))
        queued = gated.gather([2], buffers(1, gated.page_bytes))
        ops.out_gate.set()
        assert queued.wait(DEADLINE_S)
        assert hooked.wait(DEADLINE_S)
    finally:
        threading.excepthook = before
    assert "thread has died" in str(queued.error)
    later = gated.gather([3], buffers(1, gated.page_bytes))
    assert later.wait(DEADLINE_S)
    assert later.error is not None


def test_callbacks_run_once_before_and_after_the_end() -> None:
    event = CopyEvent()
    calls: list[str] = []
    event.add_done_callback(lambda _: calls.append("early"))
    assert calls == []
    event.finish()
    event.add_done_callback(lambda _: calls.append("late"))
    assert calls == ["early", "late"]
    with pytest.raises(AssertionError, match="ends once"):
        event.finish()


def test_calibration_keeps_the_pages_and_is_read_back() -> None:
    kv = pool()
    before = kv.clone()
    transfer = CpuTransfer(kv)
    clock = ManualClock()
    found = calibrate(transfer, clock, rounds=1)
    assert torch.equal(kv, before)
    assert (found.out_method, found.in_method) == ("cpu", "cpu")
    assert Calibration.from_dict(found.to_dict()) == found
    assert apply(transfer, found)
    assert not apply(transfer, Calibration("kernel", "cpu", {}, {}))
    transfer.close()


@pytest.mark.parametrize(
    "spoil",
    [
        lambda d: d.pop("out_method"),
        lambda d: d.update(in_bytes_per_s=[1]),
        lambda d: d.update(out_bytes_per_s={"cpu": "fast"}),
    ],
)
def test_a_damaged_calibration_is_refused(spoil: Callable[[dict[str, object]], object]) -> None:
    found = Calibration("cpu", "cpu", {"cpu": 1.0}, {"cpu": 2.0}).to_dict()
    spoil(found)
    with pytest.raises(ConfigError, match="measured again"):
        Calibration.from_dict(found)
