"""The CUDA kernels that move pages between paged KV and payload order, and their launch plan.

Owns the source, the layout of its arguments and how a group of pages becomes launches. Knows
neither torch nor cupy: kernel_cupy.py compiles and launches it; the tests compile the same source
as C++ and run it on the CPU.

One launch moves planes [first, first + count) of up to PAGES_MAX pages. A page's planes are one
contiguous run of its payload, so a page is cut into tiles of TILE_WORDS words of that run; a block
takes every gridDim.x-th tile. Each thread has UNROLL loads in flight before its first store: the
far side is host memory over PCIe, and latency times bandwidth (about 100 KiB) must be in flight
with few multiprocessors, so that decoding keeps the others. The streaming hints keep pages that
only pass through from pushing decode's data out of the L2 cache.

Pages and addresses travel by value in the kernel's arguments (below 4 KiB, any device's limit):
they are copied at launch, so nothing on the host must outlive it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

PAGES_MAX = 224
THREADS = 256
UNROLL = 8
TILE_WORDS = THREADS * UNROLL
WORD_SIZES = (16, 4, 1)
ARCHITECTURES = ("sm_80", "sm_90", "sm_100")
"""What CI compiles for: A100, H100 and H200, B200. Others are compiled when they are met."""

SOURCE = """
#define PAGES_MAX 224
#define THREADS 256
#define UNROLL 8

typedef unsigned int u32;
typedef unsigned long long u64;

// Byte addresses of the payloads (pinned host memory, or staging on the device) and page indexes.
struct PageGroup {
    u64 payload[PAGES_MAX];
    u32 page[PAGES_MAX];
};

struct Geometry {
    u64 page_stride;  // bytes from one page to the next within a plane
    u32 row_words;    // words of one page in one plane
    u32 first_plane;
    u32 plane_count;
    u32 page_count;
};

template <typename Word, bool GATHER>
__device__ __forceinline__ void move_pages(const PageGroup &group, const u64 *__restrict__ planes,
                                           const Geometry &geometry) {
    const u32 words = geometry.plane_count * geometry.row_words;
    const u32 tiles = (words + THREADS * UNROLL - 1) / (THREADS * UNROLL);
    const u32 all_tiles = tiles * geometry.page_count;
    for (u32 tile = blockIdx.x; tile < all_tiles; tile += gridDim.x) {
        const u32 member = tile / tiles;
        const u32 first = (tile - member * tiles) * (THREADS * UNROLL) + threadIdx.x;
        const u64 row = group.page[member] * geometry.page_stride;
        Word *payload = reinterpret_cast<Word *>(group.payload[member]) +
                        static_cast<u64>(geometry.first_plane) * geometry.row_words;
        Word held[UNROLL];
#pragma unroll
        for (int i = 0; i < UNROLL; ++i) {
            const u32 word = first + i * THREADS;
            if (word < words) {
                const u32 plane = word / geometry.row_words;
                const Word *paged =
                    reinterpret_cast<const Word *>(planes[geometry.first_plane + plane] + row) +
                    (word - plane * geometry.row_words);
                held[i] = __ldcs(GATHER ? paged : payload + word);
            }
        }
#pragma unroll
        for (int i = 0; i < UNROLL; ++i) {
            const u32 word = first + i * THREADS;
            if (word < words) {
                const u32 plane = word / geometry.row_words;
                Word *paged = reinterpret_cast<Word *>(planes[geometry.first_plane + plane] + row) +
                              (word - plane * geometry.row_words);
                __stcs(GATHER ? payload + word : paged, held[i]);
            }
        }
    }
}

#define KERNEL(NAME, WORD, GATHER)                                                      \\
    extern "C" __global__ void __launch_bounds__(THREADS)                               \\
        NAME(const __grid_constant__ PageGroup group, const u64 *__restrict__ planes,   \\
             const __grid_constant__ Geometry geometry) {                               \\
        move_pages<WORD, GATHER>(group, planes, geometry);                              \\
    }

KERNEL(tierkv_gather_16, uint4, true)
KERNEL(tierkv_gather_4, u32, true)
KERNEL(tierkv_gather_1, unsigned char, true)
KERNEL(tierkv_scatter_16, uint4, false)
KERNEL(tierkv_scatter_4, u32, false)
KERNEL(tierkv_scatter_1, unsigned char, false)
"""

GROUP = np.dtype([("payload", "<u8", (PAGES_MAX,)), ("page", "<u4", (PAGES_MAX,))])
GEOMETRY = np.dtype(
    [
        ("page_stride", "<u8"),
        ("row_words", "<u4"),
        ("first_plane", "<u4"),
        ("plane_count", "<u4"),
        ("page_count", "<u4"),
    ]
)


def kernel_names() -> list[str]:
    """Entry points of SOURCE."""
    return [f"tierkv_{way}_{size}" for way in ("gather", "scatter") for size in WORD_SIZES]


@dataclass(frozen=True, slots=True)
class Launch:
    """One kernel launch: its grid and the two arguments that travel by value."""

    blocks: int
    group: npt.NDArray[np.void]
    """GROUP, one element."""
    geometry: npt.NDArray[np.void]
    """GEOMETRY, one element."""


def word_size(row_bytes: int, page_stride: int, addresses: Sequence[int]) -> int:
    """Widest word that every row, stride and address is a multiple of. O(addresses)."""
    every = np.bitwise_or.reduce(np.asarray([row_bytes, page_stride, *addresses], np.uint64))
    return next(size for size in WORD_SIZES if int(every) % size == 0)


def plan_launches(
    pages: Sequence[int],
    payloads: Sequence[int],
    planes: range,
    *,
    row_bytes: int,
    page_stride: int,
    word_bytes: int,
    blocks_max: int,
) -> Iterator[Launch]:
    """Cut a group of pages into launches of at most PAGES_MAX pages and `blocks_max` blocks.

    `payloads[i]` is the address of page i's whole payload, of which `planes` are moved.
    """
    row_words = row_bytes // word_bytes
    tiles = -(-len(planes) * row_words // TILE_WORDS)
    for start in range(0, len(pages), PAGES_MAX):
        count = min(PAGES_MAX, len(pages) - start)
        group = np.zeros(1, GROUP)
        group["payload"][0, :count] = payloads[start : start + count]
        group["page"][0, :count] = pages[start : start + count]
        geometry = np.zeros(1, GEOMETRY)
        geometry[0] = (page_stride, row_words, planes.start, len(planes), count)
        yield Launch(min(blocks_max, tiles * count), group, geometry)
