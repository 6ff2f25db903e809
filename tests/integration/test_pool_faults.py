"""Three nodes of a pool in network namespaces, and all that networks and machines can do to them.

After each: no wrong byte, no request past its deadline, check() of every daemon, and every
acknowledged copy found while one of its holders lives. After each test, once the daemons are gone,
an offline check of all their files.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.daemon_files import check_files
from tests.support.daemon_process import DaemonProcess, shared_folder
from tests.support.pages import page_keys, put_store, take_content
from tests.support.pool_cluster import Cluster, Load
from tierkv.demo.netns import Network, unavailable
from tierkv.storage.types import CommitOutcome, PageKey, TierName

HOSTS = 3
SKEWED = "tests.support.processes.skewed_daemon"

pytestmark = pytest.mark.skipif(
    unavailable() is not None, reason=f"no network namespaces here: {unavailable()}"
)


@pytest.fixture
def network() -> Iterator[Network]:
    with Network(HOSTS) as made:
        yield made


@pytest.fixture
def folder() -> Iterator[Path]:
    """A place for the daemons' files, which must be clean when the test is over."""
    with shared_folder() as made:
        yield made
        for node in sorted(made.iterdir()):
            check_files(node)


def stored(cluster: Cluster, host: int, first: int, count: int) -> list[PageKey]:
    """Pages committed on a host and copied to whoever is to hold them."""
    keys = page_keys(*range(first, first + count))
    assert set(put_store(cluster.client(host), keys)) == {CommitOutcome.COMMITTED}
    cluster.await_copied(host)
    return keys


def troubles(daemon: DaemonProcess) -> int:
    """What a daemon has noticed to be wrong with its peers."""
    rows = daemon.status()["pool"]["members"]
    kinds = ("failures", "corrupt_pages", "expired_leases", "connections_lost")
    return sum(row[kind] for row in rows for kind in kinds)


def test_every_copy_is_found_while_one_holder_lives(network: Network, folder: Path) -> None:
    with Cluster(network, folder, seed=1) as cluster:
        cluster.await_live()
        keys = {host: stored(cluster, host, 1000 * host, 40) for host in range(HOSTS)}
        for victim in range(HOSTS):
            cluster.kill(victim)
            for host in range(HOSTS):
                if host != victim:
                    cluster.await_known(host, keys[victim])
                    assert take_content(cluster.client(host), keys[victim]) == 40
            cluster.restart(victim)
            cluster.await_live()
            cluster.check()


def test_a_page_comes_from_the_other_node_and_then_from_its_replica(
    network: Network, folder: Path
) -> None:
    with Cluster(network, folder, seed=2) as cluster:
        cluster.await_live()
        keys = stored(cluster, 0, 0, 8)
        cluster.await_known(1, keys)
        with cluster.client(1).fetch(keys, 20.0).take(20.0) as lease:
            assert len(lease.keys) == 8
            assert set(lease.tiers) <= {TierName.REMOTE, TierName.HOST, TierName.NVME}
        cluster.kill(0)
        cluster.await_known(2, keys)
        assert take_content(cluster.client(2), keys) == 8
        cluster.check()


@pytest.mark.parametrize("mode", ["silent", "cut", "flip"])
def test_l1_a_peer_that_lies_or_falls_silent_costs_a_miss_at_most(
    network: Network, folder: Path, mode: str
) -> None:
    # Pages of some pieces each, so that a flipped bit is likely in a batch.
    with Cluster(network, folder, seed=3, page_bytes=1 << 16) as cluster:
        cluster.await_live()
        keys = stored(cluster, 0, 0, 60)
        for host in (1, 2):
            cluster.await_known(host, keys)
        for relay in cluster.relays:
            relay.set_mode(mode)
        for host in (1, 2):
            started = time.monotonic()
            take_content(cluster.client(host), keys, deadline_s=2.0)
            assert time.monotonic() - started < 2.0 + 5.0, "past its deadline"
        for relay in cluster.relays:
            relay.set_mode("pass")
        assert sum(map(troubles, (cluster.daemons[1], cluster.daemons[2]))), "nothing was wrong"
        cluster.await_live()
        for host in (1, 2):
            cluster.await_known(host, keys)
            assert take_content(cluster.client(host), keys) == 60
        cluster.check()


def test_a_link_that_goes_down_and_a_partition_heal(network: Network, folder: Path) -> None:
    with Cluster(network, folder, seed=4) as cluster:
        cluster.await_live()
        keys = stored(cluster, 0, 0, 30)
        network.set_link(0, up=False)
        cluster.await_live([1, 2])
        more = stored(cluster, 1, 500, 30)
        # What was copied from the host that is cut off is found on those that hold the copies.
        held = [key for key in keys if None not in cluster.client(1).lookup([key])]
        assert take_content(cluster.client(1), held) == len(held)
        network.set_link(0, up=True)
        network.set_apart([1, 2], apart=True)
        cluster.await_known(0, more)
        assert take_content(cluster.client(0), more) == 30
        network.set_apart([1, 2], apart=False)
        cluster.await_live()
        for host in range(HOSTS):
            cluster.await_known(host, keys + more)
            assert take_content(cluster.client(host), keys + more) == 60
        cluster.check()


def test_a_full_peer_refuses_and_nothing_is_lost_here(network: Network, folder: Path) -> None:
    def tiny(host: int) -> dict[str, object]:
        if host == 0:
            return {}
        return {"cache_root": None, "nvme_bytes": 0}

    pool = {"host_share": 0.02, "nvme_share": 0.0}
    with Cluster(network, folder, seed=5, pool=pool, changes=tiny) as cluster:
        cluster.await_live()
        keys = stored(cluster, 0, 0, 200)
        assert take_content(cluster.client(0), keys) == 200
        cluster.check()


def test_clocks_an_hour_apart_change_nothing(network: Network, folder: Path) -> None:
    with Cluster(network, folder, seed=6, modules={1: SKEWED}) as cluster:
        cluster.await_live()
        keys = stored(cluster, 0, 0, 20) + stored(cluster, 1, 100, 20)
        for host in range(HOSTS):
            cluster.await_known(host, keys)
            assert take_content(cluster.client(host), keys) == 40
        cluster.check()


def test_a_node_that_comes_back_with_an_old_epoch_joins_anew(
    network: Network, folder: Path
) -> None:
    with Cluster(network, folder, seed=7) as cluster:
        cluster.await_live()
        keys = stored(cluster, 0, 0, 20)
        epochs = [cluster.daemons[0].status()["pool"]["epoch"]]
        (kept,) = (folder / "n0").rglob("pool-epoch*")
        backup = kept.read_bytes()
        for _ in range(2):
            cluster.kill(0)
            cluster.restart(0)
            cluster.await_live()
            epochs.append(cluster.daemons[0].status()["pool"]["epoch"])
        cluster.kill(0)
        kept.write_bytes(backup)
        cluster.restart(0)
        cluster.await_live()
        epochs.append(cluster.daemons[0].status()["pool"]["epoch"])
        assert epochs == sorted(set(epochs)), f"an epoch was used twice: {epochs}"
        for host in range(HOSTS):
            cluster.await_known(host, keys)
            assert take_content(cluster.client(host), keys) == 20
        cluster.check()


KINDS = ("daemon", "worker", "link", "partition", "silent", "flip", "cut")


def steps_of(kind: str, cluster: Cluster, rng: random.Random) -> list[Callable[[], None]]:
    """One fault: what makes it, then what ends it."""
    host = rng.randrange(HOSTS)
    print(f"fault: {kind} host {host}")
    if kind == "daemon":
        return [lambda: cluster.kill(host), lambda: cluster.restart(host)]
    if kind == "worker":
        # It holds slots and pages when it dies.
        worker = cluster.start_worker(host)
        return [lambda: worker.tell("reserve 4") and None, worker.kill]
    if kind == "link":
        return [
            lambda: cluster.network.set_link(host, up=False),
            lambda: cluster.network.set_link(host, up=True),
        ]
    if kind == "partition":
        pair = rng.sample(range(HOSTS), 2)
        return [
            lambda: cluster.network.set_apart(pair, apart=True),
            lambda: cluster.network.set_apart(pair, apart=False),
        ]
    return [
        lambda: cluster.relays[host].set_mode(kind),
        lambda: cluster.relays[host].set_mode("pass"),
    ]


def run_mixed_load(network: Network, folder: Path, seed: int, rounds: int, pause_s: float) -> None:
    """Load on every host while one fault after the other comes and goes."""
    print(f"seed: {seed}")
    rng = random.Random(seed)
    with Cluster(network, folder, seed=seed) as cluster:
        cluster.await_live()
        with Load(cluster, seed) as load:
            for _ in range(rounds):
                for kind in rng.sample(KINDS, len(KINDS)):
                    for step in steps_of(kind, cluster, rng):
                        step()
                        load.go_on(rng.uniform(0.2, 1.0) * pause_s)
                    assert not load.errors, load.errors
        assert not load.errors, load.errors
        assert load.counts["stored"] and load.counts["host"], load.counts
        assert load.counts["remote"], f"nothing ever came from a peer: {load.counts}"
        print(f"load: {dict(load.counts)}")
        cluster.await_live()
        cluster.check()
        keys = stored(cluster, 0, 10_000_000, 16)
        for host in range(HOSTS):
            cluster.await_known(host, keys)
            assert take_content(cluster.client(host), keys) == 16
        cluster.check()


def test_mixed_load_under_faults(network: Network, folder: Path) -> None:
    run_mixed_load(network, folder, seed=20261129, rounds=4, pause_s=1.5)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(3))
def test_mixed_load_under_faults_for_long(network: Network, folder: Path, seed: int) -> None:
    run_mixed_load(network, folder, seed=seed, rounds=20, pause_s=6.0)
