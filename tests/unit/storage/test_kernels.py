"""The page kernels: compiled for every architecture, and their indexes run on the CPU."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from tests.support.kernel_on_cpu import KernelOnCpu, aligned_views, payload
from tierkv.storage.errors import TierIOError
from tierkv.storage.transfer import kernels
from tierkv.storage.transfer.layout import PagedKv
from tierkv.storage.transfer.staging import gather_staged, scatter_staged

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2]
SHAPES = {
    "heads": (3, 2, 9, 16, 3, 64),
    "one head": (2, 2, 7, 4, 1, 8),
    "odd row": (2, 2, 5, 3, 1, 5),
    "one layer": (1, 2, 5, 16, 2, 128),
    "latent": (4, 9, 16, 576),
    "odd latent": (3, 6, 1, 7),
}
"""[layers, 2, pages, page_tokens, kv_heads, head_dim] or [layers, pages, page_tokens, latent]."""


@pytest.fixture(scope="module")
def on_cpu(tmp_path_factory: pytest.TempPathFactory) -> KernelOnCpu:
    return KernelOnCpu(tmp_path_factory.mktemp("kernels"))


def filled(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Random bytes as a KV cache."""
    generator = torch.Generator().manual_seed(31)
    count = int(np.prod(shape)) * dtype.itemsize
    raw = torch.randint(0, 256, (count,), generator=generator, dtype=torch.uint8)
    return raw.view(dtype).reshape(shape)


@pytest.mark.parametrize("per_layer", [False, True], ids=["stacked", "per_layer"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", SHAPES)
def test_the_kernels_indexes_are_those_of_a_plain_gather(
    on_cpu: KernelOnCpu, name: str, dtype: torch.dtype, per_layer: bool
) -> None:
    kv = filled(SHAPES[name], dtype)
    paged = PagedKv([layer.clone() for layer in kv] if per_layer else kv)
    pages = [4, 0, 2]
    views = aligned_views(len(pages), paged.page_bytes)
    for blocks in (1, 3):
        for view in views:
            view[:] = bytes(len(view))
        whole = range(len(paged.planes))
        on_cpu.move("gather", paged, pages, views, whole, blocks_max=blocks)
        assert [bytes(view) for view in views] == [payload(kv, page) for page in pages]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", SHAPES)
def test_a_scatter_writes_its_layers_of_its_pages_and_nothing_else(
    on_cpu: KernelOnCpu, name: str, dtype: torch.dtype
) -> None:
    source, target = filled(SHAPES[name], dtype), filled(SHAPES[name], dtype).flip(0).clone()
    paged = PagedKv(target)
    pages = [1, 3]
    views = aligned_views(len(pages), paged.page_bytes)
    for page, view in zip(pages, views, strict=True):
        view[:] = payload(source, page)
    expected = target.clone()
    for layer in range(paged.layers):
        where = (layer, slice(None), pages) if target.dim() == 6 else (layer, pages)
        expected[where] = source[where]
        on_cpu.move(
            "scatter", paged, pages, views, paged.layer_planes(layer, layer + 1), blocks_max=2
        )
        assert torch.equal(target.view(torch.uint8), expected.view(torch.uint8)), f"{layer}"


def test_unaligned_memory_is_moved_in_narrower_words(on_cpu: KernelOnCpu) -> None:
    kv = filled(SHAPES["heads"], torch.float16)
    paged = PagedKv(kv)
    for shift, word in ((0, 16), (4, 4), (3, 1)):
        views = aligned_views(2, paged.page_bytes, shift=shift)
        planes = range(len(paged.planes))
        assert on_cpu.move("gather", paged, [5, 1], views, planes, blocks_max=2) == word
        assert [bytes(view) for view in views] == [payload(kv, page) for page in (5, 1)]


def test_groups_beyond_one_launch_and_neighbours_of_views_are_left_alone(
    on_cpu: KernelOnCpu,
) -> None:
    count = kernels.PAGES_MAX + 9
    kv = filled((1, 2, count, 1, 1, 8), torch.float16)
    paged = PagedKv(kv)
    pages = random.Random(5).sample(range(count), count)
    slot = paged.page_bytes + 32
    arena = np.full(count * slot + 16, 0xDB, np.uint8)
    start = -arena.__array_interface__["data"][0] % 16
    views = [memoryview(arena[start + i * slot :][: paged.page_bytes].data) for i in range(count)]
    word = on_cpu.move("gather", paged, pages, views, range(2), blocks_max=3)
    assert word == 16
    for page, view in zip(pages, views, strict=True):
        assert bytes(view) == payload(kv, page)
        view[:] = bytes([0xDB]) * len(view)
    assert (arena == 0xDB).all(), "bytes between the views were written"


def test_launches_cover_each_page_once_within_their_limits() -> None:
    count = 2 * kernels.PAGES_MAX + 1
    launches = list(
        kernels.plan_launches(
            list(range(count)),
            [4096 * i for i in range(count)],
            range(4, 8),
            row_bytes=32768,
            page_stride=32768,
            word_bytes=16,
            blocks_max=8,
        )
    )
    assert [int(launch.geometry["page_count"][0]) for launch in launches] == [224, 224, 1]
    assert [launch.blocks for launch in launches] == [8, 8, 4]
    seen = [
        page
        for launch in launches
        for page in launch.group["page"][0, : int(launch.geometry["page_count"][0])].tolist()
    ]
    assert seen == list(range(count))
    # Arguments by value must fit the 4 KiB that every device has for them.
    assert kernels.GROUP.itemsize + 8 + kernels.GEOMETRY.itemsize <= 4096


def test_constants_of_the_source_and_of_the_plan_agree() -> None:
    for name in ("PAGES_MAX", "THREADS", "UNROLL"):
        assert f"#define {name} {getattr(kernels, name)}\n" in kernels.SOURCE


@pytest.mark.parametrize("architecture", kernels.ARCHITECTURES)
def test_the_kernels_compile_without_a_gpu(architecture: str) -> None:
    from tierkv.storage.transfer.kernel_cupy import compile_cubin

    cubin = compile_cubin(architecture)
    assert cubin[:4] == b"\x7fELF"
    for name in kernels.kernel_names():
        assert f".text.{name}\0".encode() in cubin


def test_an_unknown_architecture_is_refused_in_one_line() -> None:
    from tierkv.storage.transfer.kernel_cupy import compile_cubin

    with pytest.raises(TierIOError, match="compile page kernels for sm_999: ") as caught:
        compile_cubin("sm_999")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("per_layer", [False, True], ids=["stacked", "per_layer"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", SHAPES)
def test_staging_by_torch_is_the_same_move(name: str, dtype: torch.dtype, per_layer: bool) -> None:
    kv = filled(SHAPES[name], dtype)
    paged = PagedKv([layer.clone() for layer in kv] if per_layer else kv)
    pages, planes = torch.tensor([3, 1]), paged.layer_planes(paged.layers - 1, paged.layers)
    staging = torch.empty(2, len(planes) * paged.row_bytes, dtype=torch.uint8)
    gather_staged(paged, pages, planes, staging)
    first = planes.start * paged.row_bytes
    for row, page in zip(staging, pages.tolist(), strict=True):
        assert bytes(row.numpy()) == payload(kv, page)[first:]
    scatter_staged(paged, pages.flip(0), planes, staging)
    back = torch.empty_like(staging)
    gather_staged(paged, pages.flip(0), planes, back)
    assert torch.equal(back, staging)
