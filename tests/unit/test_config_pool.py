"""The sections `pool` and `mooncake`: read from every layer, refused where they cannot be meant."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from tests.unit.test_config_loading import loaded, mistakes, source_of
from tierkv.cli.daemon_settings import daemon_config
from tierkv.config import kinds
from tierkv.config.remote_sections import MooncakeSection, PoolSection
from tierkv.config.schema import section_keys
from tierkv.storage.mooncake.config import MooncakeConfig
from tierkv.storage.pool.config import Address, PoolConfig

# Every key set to something else than its default.
POOL = """
pool:
  listen: 10.0.0.1
  members: [10.0.0.2, "10.0.0.3:7000", "[fd00::4]:7000"]
  name: left
  advertise: node1:7001
  any_interface: yes
  key_file: /etc/tierkv/pool.key
  open_pool: yes
  tls_certificate: /tls/node.pem
  tls_key: /tls/node.key
  tls_authority: /tls/ca.pem
  etcd: etcd1
  etcd_prefix: /other
  transports: [nixl, tcp]
  replicas: 2
  hot_replicas: 3
  copy_after: 2
  hot_after: 9
  host_share: 50%
  nvme_share: 0.1
  heartbeat: 100ms
  suspect: 1s
  connect: 3s
  lease: 4s
  transfer: 5s
  store: 6s
  batch_pages: 8
  pull_pages: 100
  push_pages: 200
  rebalance: 64MB/s
  breaker_failures: 4
  breaker_open: 7s
"""


def test_every_field_of_the_pool_has_a_key(tmp_path: Path) -> None:
    config = daemon_config(loaded(POOL, tmp_path).settings())
    pool = config.pool
    assert pool is not None and config.pool_key_file == Path("/etc/tierkv/pool.key")
    least = PoolConfig(listen=Address("::", 0))
    for field in dataclasses.fields(PoolConfig):
        if field.name != "key":
            assert getattr(pool, field.name) != getattr(least, field.name), field.name
    assert pool.listen == Address("10.0.0.1", 7422)
    assert [str(member) for member in pool.members] == [
        "10.0.0.2:7422",
        "10.0.0.3:7000",
        "[fd00::4]:7000",
    ]
    assert (pool.own_name, pool.own_address) == ("left", Address("node1", 7001))
    assert (pool.etcd, pool.etcd_prefix) == ("etcd1:2379", "/other")
    assert (pool.host_share, pool.nvme_share) == (0.5, 0.1)
    assert (pool.heartbeat_s, pool.suspect_s, pool.lease_s) == (0.1, 1.0, 4.0)
    assert pool.rebalance_bytes_per_s == 64_000_000
    assert pool.transports == ("nixl", "tcp")


def test_defaults_are_those_of_the_pool(tmp_path: Path) -> None:
    config = daemon_config(loaded("pool: {listen: node1}", tmp_path).settings())
    assert config.pool == PoolConfig(listen=Address("node1", 7422))
    assert daemon_config(loaded("pool:\n", tmp_path).settings()).pool is None


MOONCAKE = """
mooncake:
  master: "[fd00::1]:5"
  metadata: http://meta:8080/metadata
  address: 10.0.0.1
  protocol: rdma
  device: mlx5_0
  segment: 1GiB
  register_arena: no
  replicas: 2
  copy_after: 3
  lookup_wait: 5ms
  connect: 3s
  call: 4s
  known: 1m
  absent: 1s
  batch_pages: 8
  pull_pages: 100
  push_pages: 200
  breaker_failures: 4
  breaker_open: 7s
"""


def test_fields_of_mooncake(tmp_path: Path) -> None:
    config = daemon_config(loaded(MOONCAKE, tmp_path).settings())
    mooncake = config.mooncake
    assert mooncake is not None and config.pool is None and config.mooncake_lookup_s == 0.005
    assert mooncake.master_address == ("fd00::1", 5)
    least = MooncakeConfig("m:1")
    inside = {
        *("local_buffer_bytes", "pull_workers", "avoid_s", "corrupt_s"),
        *("known_pages", "corrupt_pages"),
    }
    for field in dataclasses.fields(MooncakeConfig):
        moved = getattr(mooncake, field.name) != getattr(least, field.name)
        assert moved == (field.name not in inside), field.name
    plain = daemon_config(loaded("mooncake: {master: node1}", tmp_path).settings())
    assert plain.mooncake == MooncakeConfig("node1:50051")


def test_lists_and_addresses_from_environment_and_flags(tmp_path: Path) -> None:
    environment = {"TIERKV_POOL_MEMBERS": "node2, node3:1", "TIERKV_POOL_LISTEN": "node1"}
    result = loaded(None, tmp_path, environment, {"pool.transports": "ucx,tcp"})
    pool = result.settings().pool
    assert pool.members == (Address("node2", 7422), Address("node3", 1))
    assert pool.transports == ("ucx", "tcp")
    assert source_of(result, "pool.members") == "environment TIERKV_POOL_MEMBERS"


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("pool: {listen: node1, member: node2}", "did you mean pool.members?"),
        ("pool: {listen: [node1, node2]}", "expected one value"),
        ("pool: {listen: 'node1:70000'}", "expected an address such as node2:7422"),
        ("pool: {listen: 'http://node1'}", "expected an address"),
        ("pool: {listen: node1, members: [a, 'b:c']}", "expected an address"),
        ("pool: {listen: node1, members: {a: 1}}", "expected a value"),
        ("pool: {listen: node1, replicas: two}", "expected a number"),
        ("pool: {listen: node1, heartbeat: 250}", "expected a duration"),
        ("pool: {listen: node1, rebalance: 64MB/h}", "expected bytes a second such as 64MB/s"),
        ("pool: {listen: node1, transports: [rdma]}", "expected some of nixl, ucx, tcp"),
        ("pool: {listen: node1, transports: [tcp, tcp]}", "each once"),
        ("pool: {listen: node1, host_share: 2GiB}", "expected a share"),
        ("pool: {listen: node1, open_pool: maybe}", "expected true or false"),
        ("pool: {members: [node2]}", "needs pool.listen"),
        ("mooncake: {segment: 1GiB}", "needs mooncake.master"),
        ("mooncake: {master: node1, protocol: udp}", "expected one of tcp, rdma"),
        ("pool: {listen: node1}\nmooncake: {master: node1}", "a node has one remote tier"),
    ],
)
def test_what_cannot_be_meant_is_refused_in_one_line(text: str, part: str, tmp_path: Path) -> None:
    (mistake,) = mistakes(loaded(text, tmp_path))
    assert part in mistake and "\n" not in mistake


def test_what_only_the_pool_refuses_is_no_mistake_here(tmp_path: Path) -> None:
    # The daemon serves on without the pool then; see tests/unit/daemon.
    text = "pool: {listen: node1, members: [node2, node2], replicas: 9, key_file: /no/such}"
    assert loaded(text, tmp_path).mistakes == ()


def test_keys_say_what_they_are() -> None:
    for section in (PoolSection, MooncakeSection):
        assert section.__doc__
        for name, key in section_keys(section).items():
            assert 10 < len(key.help) < 75, name


@pytest.mark.parametrize(
    ("text", "value"),
    [("64MB/s", 64_000_000), ("64 MiB/s", 64 << 20), ("1000", 1000), ("0", 0)],
)
def test_rates(text: str, value: int) -> None:
    assert kinds.RATE.parse(text) == value
    assert kinds.RATE.parse(kinds.RATE.show(value)) == value


@pytest.mark.parametrize("text", ["fast", "64MB/m", "/s", "-1MB/s", "64MB/", "1/s/s"])
def test_bad_rates(text: str) -> None:
    with pytest.raises(ValueError, match="expected bytes a second"):
        kinds.RATE.parse(text)


@pytest.mark.parametrize(
    ("text", "shown"),
    [("node2", "node2:7422"), ("10.0.0.1:80", "10.0.0.1:80"), ("fd00::1", "[fd00::1]:7422")],
)
def test_addresses(text: str, shown: str) -> None:
    kind = kinds.address(7422)
    assert kind.show(kind.parse(text)) == shown
    assert kind.parse(shown) == kind.parse(text)


@pytest.mark.parametrize("text", ["", " ", "a b", "a:b", "a:70000", "a/b", "[::1", ":80", "a\tb"])
def test_bad_addresses(text: str) -> None:
    with pytest.raises(ValueError, match="expected an address"):
        kinds.address(7422).parse(text)
