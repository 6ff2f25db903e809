"""What the sidecar costs: `tierkv bench daemon`. Real daemon processes, this process the client.

Owns two daemons (one without, one with every checksum verified), their arenas and a scratch
folder, all removed at the end.

- lookup32_p50_ms: a round trip for 32 keys that are there, one after the other.
- small_calls_per_s: lookups of one key, IN_FLIGHT of them under way from one client.
- store, retrieve: pages of 4 MiB through the shared arena, reserve + copy + commit and
  lease + copy + release, beside numpy.copyto of the same bytes, turn by turn, one thread. Checked:
  the daemon computes the checksum of every page it publishes and verifies every page it leases.
- index: a million pages, see tierkv.bench.index.

    python -m tierkv.bench.daemon FOLDER CHECKED        is the daemon, for this benchmark
"""

from __future__ import annotations

import select
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tierkv.bench.filled import filled, numbered_keys, pages_of
from tierkv.bench.index import build_index, measure_open
from tierkv.bench.report import BenchReport, samples
from tierkv.client.client import Client
from tierkv.client.settings import ClientSettings
from tierkv.daemon.run import run_daemon
from tierkv.daemon.server import Daemon
from tierkv.daemon.settings import DaemonConfig, VerifyCommit, VerifyLease
from tierkv.storage.checksum import copy_bytes
from tierkv.storage.tiers.host import HostTier
from tierkv.storage.types import CommitOutcome, PageKey, TierName

PAGE_BYTES = 4 << 20
BATCH_PAGES = 16
HOST_PAGES = 3 * BATCH_PAGES
IN_FLIGHT = 64
LOOKUP_KEYS = 32
INDEX_PAGES = 1_000_000
START_S = 60.0
WAIT_S = 60.0


def run(quick: bool, directory: Path | None = None) -> BenchReport:
    """Measure; scratch files of the index go under `directory` (default: the system's).

    Uses about 0.6 GB of memory. Quick: under 40 s on two cores.
    """
    report = BenchReport("daemon")
    report.config = {
        "page_bytes": PAGE_BYTES,
        "batch_pages": BATCH_PAGES,
        "in_flight": IN_FLIGHT,
        "index_pages": INDEX_PAGES,
        "quick": quick,
    }
    with ExitStack() as stack:
        plain = stack.enter_context(_client(stack.enter_context(_daemon(checked=False))))
        checked = stack.enter_context(_client(stack.enter_context(_daemon(checked=True))))
        _measure_calls(report, plain, quick)
        _measure_pages(report, plain, checked, rounds=15 if quick else 60)
    scratch = Path(tempfile.mkdtemp(prefix="tierkv-bench-", dir=directory))
    try:
        _measure_index(report, scratch / "index", INDEX_PAGES)
    finally:
        shutil.rmtree(scratch)
    return report


def _measure_calls(report: BenchReport, client: Client, quick: bool) -> None:
    keys = numbered_keys(1 << 40, LOOKUP_KEYS)
    with client.reserve(len(keys)) as held:
        assert len(held.views) == len(keys), "the arena is too small"
        held.commit(keys)
    rounds, calls = (2000, 20_000) if quick else (10_000, 100_000)
    taken: list[float] = []
    for _ in range(rounds):
        started = time.perf_counter()
        found = client.lookup(keys)
        taken.append(time.perf_counter() - started)
        assert found == [TierName.HOST] * len(keys)
    report.results["lookup32_p50_ms"] = statistics.median(taken) * 1e3
    report.results["lookup32_p99_ms"] = sorted(taken)[len(taken) * 99 // 100] * 1e3
    rates = [_calls_per_s(client, keys[:1], calls // 5) for _ in range(5)]
    report.results["small_calls_per_s"] = statistics.median(rates)


def _calls_per_s(client: Client, keys: list[PageKey], calls: int) -> float:
    under_way: deque[Future[list[TierName | None]]] = deque()
    started = time.perf_counter()
    for _ in range(calls):
        if len(under_way) >= IN_FLIGHT:
            assert under_way.popleft().result(WAIT_S) == [TierName.HOST]
        under_way.append(client.submit_lookup(keys))
    for future in under_way:
        assert future.result(WAIT_S) == [TierName.HOST]
    return calls / (time.perf_counter() - started)


def _measure_pages(report: BenchReport, plain: Client, checked: Client, rounds: int) -> None:
    source, target = filled(BATCH_PAGES * PAGE_BYTES), filled(BATCH_PAGES * PAGE_BYTES)
    # A destination of its own, written once a round like an arena: else caches favour memcpy.
    reference = filled(BATCH_PAGES * PAGE_BYTES)
    actions: dict[str, Callable[[], object]] = {"memcpy": lambda: _copy_all(reference, source)}
    for suffix, client in (("", plain), ("_checked", checked)):
        exchange = _Exchange(client, pages_of(source, PAGE_BYTES), pages_of(target, PAGE_BYTES))
        actions[f"store{suffix}"] = exchange.store
        actions[f"retrieve{suffix}"] = exchange.retrieve
    taken = samples(actions, rounds, warmup=4)
    nbytes = BATCH_PAGES * PAGE_BYTES
    for name in ("store", "retrieve", "store_checked", "retrieve_checked"):
        pairs = zip(taken["memcpy"], taken[name], strict=True)
        report.ratios[name] = statistics.median(limit / spent for limit, spent in pairs)
        report.results[f"{name}_gbs"] = nbytes / statistics.median(taken[name]) / 1e9
    report.limits["memcpy_gbs"] = nbytes / statistics.median(taken["memcpy"]) / 1e9


class _Exchange:
    """Stores a batch of new pages, the daemon evicting old ones, and gets it back."""

    def __init__(self, client: Client, sources: list[memoryview], targets: list[memoryview]):
        self._client = client
        self._sources = sources
        self._targets = targets
        self._next = 0
        self._keys: list[PageKey] = []

    def store(self) -> None:
        self._next += 1
        self._keys = numbered_keys(self._next << 20, len(self._sources))
        with self._client.reserve(len(self._keys)) as held:
            for view, page in zip(held.views, self._sources, strict=True):
                copy_bytes(view, page)
            outcomes = held.commit(self._keys)
        assert set(outcomes) == {CommitOutcome.COMMITTED}

    def retrieve(self) -> None:
        with self._client.fetch(self._keys, WAIT_S).take(WAIT_S) as lease:
            for view, out in zip(lease.views, self._targets, strict=True):
                copy_bytes(out, view)


def _measure_index(report: BenchReport, root: Path, pages: int) -> None:
    build_index(root, pages)
    cost = measure_open(root)
    report.results["index_open_s"] = cost.seconds
    report.results["index_disk_bytes_per_page"] = cost.disk_bytes_per_page
    report.results["index_ram_bytes_per_page"] = cost.ram_bytes_per_page


@contextmanager
def _daemon(checked: bool) -> Iterator[Path]:
    """A daemon in a process of its own; its socket. Its files are removed with it."""
    shm = Path("/dev/shm")
    folder = Path(tempfile.mkdtemp(prefix="tkvb-", dir=shm if shm.is_dir() else None))
    process = subprocess.Popen(
        [sys.executable, "-m", "tierkv.bench.daemon", str(folder), str(int(checked))],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        readable, _, _ = select.select([process.stdout], [], [], START_S)
        if not readable or process.stdout.readline() != "ready\n":
            raise RuntimeError("bench daemon: the daemon did not start; see its messages above")
        yield folder / "socket"
        process.send_signal(signal.SIGTERM)
        process.wait(WAIT_S)
    finally:
        process.kill()
        process.communicate()
        shutil.rmtree(folder)


def _serve(folder: Path, checked: bool) -> int:
    def ready(daemon: Daemon) -> None:
        sys.stdout.write("ready\n")
        sys.stdout.flush()

    config = DaemonConfig(
        socket_path=folder / "socket",
        arena_directory=folder / "arenas",
        host_bytes=HostTier.capacity_for(PAGE_BYTES, HOST_PAGES),
        checksums=checked,
        verify_commit=VerifyCommit.ALWAYS,
        verify_lease=VerifyLease.ALWAYS if checked else VerifyLease.NEVER,
        http_host=None,
        log_level="warning",
    )
    return run_daemon(config, on_ready=ready)


def _client(socket_path: Path) -> Client:
    return Client(socket_path, PAGE_BYTES, settings=ClientSettings(call_s=WAIT_S, commit_s=WAIT_S))


def _copy_all(target: memoryview, source: memoryview) -> None:
    for out, page in zip(pages_of(target, PAGE_BYTES), pages_of(source, PAGE_BYTES), strict=True):
        copy_bytes(out, page)


if __name__ == "__main__":
    sys.exit(_serve(Path(sys.argv[1]), sys.argv[2] == "1"))
