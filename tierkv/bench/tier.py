"""How much of the machine the tiers leave to a page: `tierkv bench tier`.

Owns its arena and a scratch folder, both removed at the end. Each figure stands beside the limit
measured in the same run, turn by turn:

- host: copying the same pages between warm memory with numpy.copyto, one thread, as the tier
  is driven; put is reserve + write + commit, get is lease + read, checked computes and verifies.
- nvme: the best plain loop, which is preadv/pwritev of the same slot images (header block and
  payload) with O_DIRECT over the same pool of threads into one preallocated file, with one
  fdatasync a batch. The tier's write adds the checksum, the header with the key and the index
  transaction; both move the same pages in the same batches. Several thread counts are tried,
  the plain loop's best is the limit and the tier runs with that count. Evicting a batch is timed
  by itself (nvme_evict_batch_ms), since the store does it ahead of writes and in larger batches.
  nvme_write hands over the checksum that the host tier has recorded, as a demotion does;
  nvme_write_hashed computes it. Reads always verify.

Disks of virtual machines are throttled after bursts, hence many small rounds.
"""

from __future__ import annotations

import itertools
import shutil
import statistics
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from tierkv.bench.filled import filled, pages_of
from tierkv.bench.report import BenchReport, samples
from tierkv.storage.checksum import copy_bytes, payload_checksum
from tierkv.storage.device import BlockFile, DirectDevice, aligned_buffer
from tierkv.storage.slot_header import HEADER_BYTES, slot_bytes_for
from tierkv.storage.tiers.host import HostTier
from tierkv.storage.tiers.nvme import NvmeTier
from tierkv.storage.types import KEY_BYTES, CommitOutcome, PageKey, ReadOutcome

PAGE_BYTES = 4 << 20
HOST_BATCH = 16
NVME_BATCH = 32
"""Pages per commit: what the flushes of data and index are shared by."""
THREADS = (2, 4, 8)

_numbers = itertools.count()


def run(quick: bool, directory: Path | None = None) -> BenchReport:
    """Measure host and nvme tiers; scratch files go under `directory` (default: the system's).

    Uses about 0.5 GB of memory and 0.4 GB of disk. Quick: under 40 s on two cores.
    """
    report = BenchReport("tier")
    report.config = {
        "page_bytes": PAGE_BYTES,
        "host_batch_pages": HOST_BATCH,
        "nvme_batch_pages": NVME_BATCH,
        "quick": quick,
        "plain_write": "pwritev of header and payload, O_DIRECT, one fdatasync a batch",
    }
    _measure_host(report, rounds=15 if quick else 60)
    scratch = Path(tempfile.mkdtemp(prefix="tierkv-bench-", dir=directory))
    try:
        _measure_nvme(report, scratch, rounds=12 if quick else 40)
    finally:
        shutil.rmtree(scratch)
    return report


def _measure_host(report: BenchReport, rounds: int) -> None:
    source = filled(HOST_BATCH * PAGE_BYTES)
    target = filled(HOST_BATCH * PAGE_BYTES)
    # A destination of its own, written once a round like an arena: else caches favour memcpy.
    reference = filled(HOST_BATCH * PAGE_BYTES)
    with ExitStack() as stack:
        actions: dict[str, Callable[[], object]] = {
            "memcpy": lambda: _copy_all(reference, source),
        }
        for suffix, checksums in (("", False), ("_checked", True)):
            capacity = HostTier.capacity_for(PAGE_BYTES, HOST_BATCH)
            tier = HostTier(None, PAGE_BYTES, capacity, checksums=checksums)
            stack.callback(tier.close)
            exchange = _HostExchange(
                tier, pages_of(source, PAGE_BYTES), pages_of(target, PAGE_BYTES)
            )
            actions[f"host_put{suffix}"] = exchange.put
            actions[f"host_get{suffix}"] = exchange.get
        taken = samples(actions, rounds)
    nbytes = HOST_BATCH * PAGE_BYTES
    for name in ("host_put", "host_get", "host_put_checked", "host_get_checked"):
        report.results[f"{name}_gbs"] = _gbs(nbytes, taken[name])
        report.ratios[name] = _ratio(taken["memcpy"], taken[name])
    report.limits["memcpy_gbs"] = _gbs(nbytes, taken["memcpy"])


class _HostExchange:
    """Puts one batch of pages into a host tier that has room for just that, and gets it back."""

    def __init__(
        self, tier: HostTier, sources: list[memoryview], targets: list[memoryview]
    ) -> None:
        self._tier = tier
        self._sources = sources
        self._targets = targets
        self._keys: list[PageKey] = []

    def put(self) -> None:
        self._tier.drop(self._keys)
        self._keys = _fresh_keys(len(self._sources))
        with self._tier.reserve(len(self._sources)) as reservation:
            for index, page in enumerate(self._sources):
                self._tier.write(reservation, index, page)
            outcomes = self._tier.commit(reservation, self._keys)
        assert set(outcomes) == {CommitOutcome.COMMITTED}

    def get(self) -> None:
        with self._tier.lease(self._keys) as lease:
            for index, out in enumerate(self._targets):
                assert self._tier.read(lease, index, out) is ReadOutcome.OK


def _measure_nvme(report: BenchReport, scratch: Path, rounds: int) -> None:
    source, target = (
        pages_of(filled(NVME_BATCH * PAGE_BYTES), PAGE_BYTES),
        pages_of(filled(NVME_BATCH * PAGE_BYTES), PAGE_BYTES),
    )
    with ExitStack() as stack:
        plain = _PlainLoop(scratch / "plain", source, target)
        stack.callback(plain.close)
        tier = NvmeTier(
            scratch / "tier",
            PAGE_BYTES,
            NvmeTier.capacity_for(PAGE_BYTES, 2 * NVME_BATCH),
            min_free_bytes=0,
        )
        stack.callback(tier.close)
        threads = _best_threads(plain, rounds=max(3, rounds // 4))
        known = [payload_checksum(page) for page in source]
        exchange = _NvmeExchange(tier, source, target)
        pool = stack.enter_context(ThreadPoolExecutor(threads))
        taken = samples(
            {
                "plain_write": lambda: plain.write(pool),
                "nvme_write": lambda: exchange.write(pool, known),
                "plain_read": lambda: plain.read(pool),
                "nvme_read": lambda: exchange.read(pool),
                "nvme_evict": exchange.evict,
                "nvme_write_hashed": lambda: exchange.write(pool, [None] * len(source)),
                "nvme_evict_again": exchange.evict,
            },
            rounds,
        )
        report.results["nvme_evict_batch_ms"] = statistics.median(taken["nvme_evict"]) * 1e3
        report.config["nvme_threads"] = threads
        report.config["o_direct"] = tier.direct
    nbytes = NVME_BATCH * PAGE_BYTES
    taken["plain_write_hashed"] = taken["plain_write"]
    for name in ("write", "write_hashed", "read"):
        report.results[f"nvme_{name}_gbs"] = _gbs(nbytes, taken[f"nvme_{name}"])
        if name != "write_hashed":
            report.limits[f"plain_{name}_gbs"] = _gbs(nbytes, taken[f"plain_{name}"])
        report.ratios[f"nvme_{name}"] = _ratio(taken[f"plain_{name}"], taken[f"nvme_{name}"])


class _PlainLoop:
    """What the disk can do: the same transfers with nothing around them."""

    def __init__(self, path: Path, sources: list[memoryview], targets: list[memoryview]) -> None:
        self._slot_bytes = slot_bytes_for(PAGE_BYTES)
        self._file: BlockFile = DirectDevice().open(path, create=True)
        self._file.allocate(len(sources) * self._slot_bytes)
        self._sources = sources
        self._targets = targets
        self._headers = [aligned_buffer(HEADER_BYTES) for _ in sources]
        self.close = self._file.close

    def write(self, pool: ThreadPoolExecutor) -> None:
        list(pool.map(self._write_one, range(len(self._sources))))
        self._file.fdatasync()

    def read(self, pool: ThreadPoolExecutor) -> None:
        list(pool.map(self._read_one, range(len(self._targets))))

    def _write_one(self, index: int) -> None:
        image = [self._headers[index], self._sources[index]]
        self._file.pwritev(image, index * self._slot_bytes)

    def _read_one(self, index: int) -> None:
        image = [self._headers[index], self._targets[index]]
        self._file.preadv(image, index * self._slot_bytes)


class _NvmeExchange:
    """Writes a batch through the tier, and reads it back, over the caller's threads."""

    def __init__(
        self, tier: NvmeTier, sources: list[memoryview], targets: list[memoryview]
    ) -> None:
        self._tier = tier
        self._sources = sources
        self._targets = targets
        self._keys: list[PageKey] = []
        self._stale: list[PageKey] = []

    def write(self, pool: ThreadPoolExecutor, checksums: Sequence[bytes | None]) -> None:
        self._stale, self._keys = self._keys, _fresh_keys(len(self._sources))
        with self._tier.reserve(len(self._sources)) as reservation:
            write = self._tier.write
            jobs = [
                pool.submit(write, reservation, index, page, checksum)
                for index, (page, checksum) in enumerate(zip(self._sources, checksums, strict=True))
            ]
            for job in jobs:
                job.result()
            outcomes = self._tier.commit(reservation, self._keys)
        assert set(outcomes) == {CommitOutcome.COMMITTED}

    def evict(self) -> None:
        """Make room for the next batch: one durable index transaction."""
        self._tier.drop(self._stale)

    def read(self, pool: ThreadPoolExecutor) -> None:
        with self._tier.lease(self._keys) as lease:
            jobs = [
                pool.submit(self._tier.read, lease, index, out)
                for index, out in enumerate(self._targets)
            ]
            for job in jobs:
                assert job.result() is ReadOutcome.OK


def _best_threads(plain: _PlainLoop, rounds: int) -> int:
    """The number of threads at which the plain loop writes and reads fastest."""
    seconds: dict[int, float] = {}
    for threads in THREADS:
        with ThreadPoolExecutor(threads) as pool:
            taken = samples(
                {"write": partial(plain.write, pool), "read": partial(plain.read, pool)}, rounds
            )
        seconds[threads] = sum(statistics.median(t) for t in taken.values())
    return min(seconds, key=lambda threads: seconds[threads])


def _copy_all(target: memoryview, source: memoryview) -> None:
    for out, page in zip(pages_of(target, PAGE_BYTES), pages_of(source, PAGE_BYTES), strict=True):
        copy_bytes(out, page)


def _fresh_keys(count: int) -> list[PageKey]:
    return [PageKey(next(_numbers).to_bytes(KEY_BYTES, "big")) for _ in range(count)]


def _gbs(nbytes: int, taken: list[float]) -> float:
    return nbytes / statistics.median(taken) / 1e9


def _ratio(limit: list[float], taken: list[float]) -> float:
    """Median over rounds of limit time over tier time, each pair taken side by side."""
    return statistics.median(a / b for a, b in zip(limit, taken, strict=True))
