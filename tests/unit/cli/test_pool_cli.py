"""`tierkv pool status` and `tierkv drain` in a pool: what is shown of what a daemon tells.

Against real daemons: tests/integration/test_daemon_pool.py.
"""

from __future__ import annotations

import json
from importlib import import_module
from typing import Any

import pytest

from tests.unit.cli.conftest import Cli
from tests.unit.cli.test_bad_input import refused
from tierkv.cli.operator import Endpoint
from tierkv.cli.top import Reading, screen
from tierkv.config import format_size
from tierkv.daemon.pool_metrics import remote_metrics

pool_module = import_module("tierkv.cli.pool")
drain_module = import_module("tierkv.cli.drain")


def member(number: int, **changes: Any) -> dict[str, Any]:
    return {
        "name": f"node{number}",
        "address": f"10.0.0.{number}:7422",
        "epoch": 40 + number,
        "state": "live",
        "live": True,
        "leaving": False,
        "transport": "tcp",
        "declined": {},
        "breaker": "closed",
        "breaker_trips": 0,
        "known_pages": 1200,
        "page_sizes": [4096],
        "bytes_in": 3 << 20,
        "bytes_out": 1 << 20,
        "pages_in": 3,
        "pages_out": 1,
        "read_bytes_per_s": 2e9,
        "read_latency_s": 0.0015,
        "write_bytes_per_s": None,
        "write_latency_s": None,
        "failures": 2,
        "corrupt_pages": 0,
        "expired_leases": 0,
        "connections_lost": 1,
        "problem": None,
        **changes,
    }


REMOTE = {
    "queued": 0,
    "running": 1,
    "landed": 7,
    "missed": 2,
    "corrupt": 0,
    "failed": 3,
    "cancelled": 0,
    "refused": 0,
    "pushes_queued": 4,
    "pushed": 9,
    "push_duplicates": 1,
    "push_dropped": 0,
    "push_failed": 5,
    "worker_restarts": 0,
    "known_pages": 2400,
    "degraded": None,
}


def pool(*members: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {
        "state": "serving",
        "why": None,
        "name": "node1",
        "address": "10.0.0.1:7422",
        "epoch": 41,
        "fences": 0,
        "leaving": False,
        "membership": "static",
        "problem": None,
        "page_faults": {},
        "declined": {},
        "settings": {
            "replicas": 1,
            "hot_replicas": 2,
            "host_share": 0.25,
            "nvme_share": 0.1,
            "rebalance_bytes_per_s": 64 << 20,
        },
        "leases": {"held": 3, "pages": 48, "quarantined_pages": 0, "expired_pages": 0},
        "serving": {"requests": {"SYNC": 5}, "answers": {"OK": 5}, "stored": {"committed": 2}},
        "members": list(members),
        **changes,
    }


def daemon(found: dict[str, Any] | None, mooncake: Any = None) -> dict[str, Any]:
    return {
        "pid": 7,
        "sessions": {},
        "requests": {},
        "classes": [{"page_bytes": 4096, "tiers": {}, "remote": REMOTE, "pool_pages": {"host": 6}}],
        "pool": found,
        "mooncake": mooncake,
    }


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the daemon tells, under "status"."""
    script: dict[str, Any] = {}
    monkeypatch.setattr(pool_module, "read", lambda _: Reading(0.0, script["status"]))
    return script


def rows_of(out: str, name: str) -> list[list[str]]:
    return [line.split() for line in out.splitlines() if line.strip().startswith(name)]


def row_of(out: str, name: str) -> list[str]:
    (row,) = rows_of(out, name)
    return row


def test_members_are_shown(cli: Cli, told: dict[str, Any]) -> None:
    silent = member(3, live=False, transport=None, known_pages=0, problem="no answer in 2 s")
    leaving = member(4, leaving=True, breaker="open", read_bytes_per_s=None, read_latency_s=None)
    told["status"] = daemon(pool(member(2), silent, leaving))
    code, out, err = cli("pool", "status")
    assert (code, err) == (0, "")
    assert "member node1 at 10.0.0.1:7422" in out and "3 other members, 2 live" in out
    row = " ".join(row_of(out, "41"))
    assert row == "41 serving static 1 (hot 2) 25% 10% 48 pages"
    two, moved = rows_of(out, "node2 ")
    assert two == ["node2", "10.0.0.2:7422", "42", "live", "tcp"]
    assert moved[:6] == ["node2", "1,200", "3.0", "MiB", "1.0", "MiB"]
    assert f"{format_size(2 * 10**9)}/s" in out and "1.5 ms" in out
    assert rows_of(out, "node3 ")[0][3:5] == ["silent", "-"]
    assert rows_of(out, "node4 ")[0][3] == "leaving" and rows_of(out, "node4 ")[1][-1] == "open"
    assert "node3: no answer in 2 s" in out


def test_a_narrow_terminal_shows_whole_names(capsys: pytest.CaptureFixture[str]) -> None:
    from rich.console import Console

    long = {"epoch": 1795981389927, "name": "worker-12", "address": "10.120.130.140:7422"}
    found = pool(member(2, **long, state="connecting", live=False), epoch=1795981389927)
    console = Console(width=80, markup=False)
    for table in (pool_module.own_table(found), *pool_module.member_tables(found)):
        console.print(table)
    out = capsys.readouterr().out
    for text in ("1 other member, 0 live", "worker-12", "10.120.130.140:7422", "1795981389927"):
        assert text in out
    assert "…" not in out and "connecting" in out and "breaker" in out


def test_an_ipv6_address_is_no_style(cli: Cli, told: dict[str, Any]) -> None:
    told["status"] = daemon(pool(member(2, name=None, address="[fd00::2]:7422")))
    assert cli("pool", "status")[1].count("[fd00::2]:7422") == 2


def test_copies_that_were_not_made_are_told(cli: Cli, told: dict[str, Any]) -> None:
    told["status"] = daemon(pool(member(2), fences=1))
    _, out, _ = cli("pool", "status")
    assert "5 copies of pages of 4096 bytes were not made since the start: no member" in out
    assert "later epoch" not in out, "a node that came back is nothing to worry about"
    told["status"] = {**daemon(pool(member(2), fences=7)), "classes": []}
    _, out, _ = cli("pool", "status")
    assert "copies of pages" not in out
    assert "met 7 times with a later epoch: when that goes on, two nodes are called node1" in out


def test_why_a_faster_path_is_not_taken(cli: Cli, told: dict[str, Any]) -> None:
    two = member(2, declined={"nixl": "it offers none"})
    faults = {"8192": "register memory: no room"}
    told["status"] = daemon(
        pool(two, declined={"ucx": "pip install it"}, page_faults=faults, problem="etcd is away")
    )
    _, out, _ = cli("pool", "status")
    for line in (
        "node2: nixl is not taken: it offers none",
        "ucx is not used here: pip install it",
        "pages of 8192 bytes are not in the pool: register memory: no room",
        "members: etcd is away",
    ):
        assert line in out.splitlines()


def test_json_is_the_daemons_own(cli: Cli, told: dict[str, Any]) -> None:
    found = pool(member(2))
    told["status"] = daemon(found)
    code, out, err = cli("pool", "status", "--json")
    assert (code, err, out.count("\n")) == (0, "", 1)
    assert json.loads(out) == found


def test_a_pool_that_is_off_exits_1_and_says_why(cli: Cli, told: dict[str, Any]) -> None:
    off = {"state": "off", "why": "pool: no key; name a key_file"}
    told["status"] = daemon(off)
    assert cli("pool", "status") == (1, "the pool is off: pool: no key; name a key_file\n", "")
    code, out, _ = cli("pool", "status", "--json")
    assert (code, json.loads(out)) == (1, off)


def test_without_a_pool(cli: Cli, told: dict[str, Any]) -> None:
    told["status"] = daemon(None)
    refused(cli("pool", "status"), 2, "in no pool", "pool.listen")
    refused(cli("pool", "stats"), 2, "stats")
    code, out, _ = cli("pool")
    assert code == 0 and "status" in out


def test_a_mooncake_store_is_shown(cli: Cli, told: dict[str, Any]) -> None:
    store = {"state": "serving", "master": "m:50051", "protocol": "tcp", "degraded": None}
    told["status"] = {**daemon(None, store), "classes": []}
    assert cli("pool", "status") == (0, "Mooncake Store at m:50051, tcp\n", "")
    told["status"] = daemon(None, {**store, "degraded": "store m:50051 is not asked for a while"})
    _, out, _ = cli("pool", "status")
    assert out.splitlines()[1] == "store m:50051 is not asked for a while"
    assert "5 copies" in out.splitlines()[2] and "the store had no room" in out
    assert json.loads(cli("pool", "status", "--json")[1])["master"] == "m:50051"
    told["status"] = daemon(None, {"state": "off", "why": "mooncake: master is not reached"})
    assert cli("pool", "status")[:2] == (1, "Mooncake is off: mooncake: master is not reached\n")


def test_top_shows_the_remote_tier(capsys: pytest.CaptureFixture[str]) -> None:
    from rich.console import Console

    before = daemon(pool(member(2)))
    later = daemon(pool(member(2)))
    later["classes"][0]["remote"] = {**REMOTE, "landed": 27, "degraded": "nobody is there"}
    console = Console(width=200, force_terminal=False)
    console.print(screen(Reading(0.0, before), Reading(2.0, later)))
    row = row_of(capsys.readouterr().out, "4.0 KiB")
    assert row[2:5] == ["remote", "2,400", "known"]
    assert "10" in row and "nobody" in row


# Drain


@pytest.fixture
def drained(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The daemon's answer to drain, under "answer"; what it was asked, under "asked"."""
    script: dict[str, Any] = {}

    def http_json(where: Endpoint, path: str, body: Any = None, timeout_s: float = 0) -> Any:
        script["asked"] = (path, body)
        return script["answer"]

    monkeypatch.setattr(drain_module, "http_json", http_json)
    return script


def test_drain_says_what_the_pool_took(cli: Cli, drained: dict[str, Any]) -> None:
    complete = {"complete": True, "moved_pages": 1200, "left_pages": 0}
    drained["answer"] = {"durable": True, "pool": complete}
    code, out, err = cli("drain", "--timeout", "90s")
    assert (code, err) == (0, "")
    assert "1,200 pages were copied to other members; none is held here alone" in out
    assert drained["asked"] == ("/admin/drain", {"wait_s": 90.0})
    code, out, _ = cli("drain", "--json")
    assert json.loads(out) == {"drained": True, "durable": True, "pool": complete}


def test_drain_says_what_found_no_place(cli: Cli, drained: dict[str, Any]) -> None:
    partly = {"complete": False, "moved_pages": 5, "left_pages": 1300}
    drained["answer"] = {"durable": True, "pool": partly}
    code, out, err = cli("drain")
    assert code == 1 and "every page is durable" in out
    assert "5 pages were copied" in err and "1,300 found no place within 30s" in err
    assert err.count("\n") == 1
    assert cli("drain", "--json")[0] == 1


def test_drain_without_a_pool_is_as_before(cli: Cli, drained: dict[str, Any]) -> None:
    drained["answer"] = {"durable": True}
    code, out, _ = cli("drain")
    assert (code, out) == (0, "every page is durable; no new work is taken\n")
    assert cli("drain", "--json")[1] == '{"drained": true, "durable": true}\n'


# Metrics


def samples(status: dict[str, Any]) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for metric in remote_metrics(status)
        for sample in metric.samples
    }


def test_metrics_of_each_member() -> None:
    found = samples(daemon(pool(member(2), member(3, live=False, transport=None))))
    two, three = ("member", "10.0.0.2:7422"), ("member", "10.0.0.3:7422")
    assert found["tierkv_pool_up", ()] == 1
    assert found["tierkv_pool_epoch", ()] == 41
    assert found["tierkv_pool_leases", ()] == 3
    assert found["tierkv_pool_member_live", (two,)] == 1
    assert found["tierkv_pool_member_live", (three,)] == 0
    assert found["tierkv_pool_member_bytes_total", (("direction", "in"), two)] == 3 << 20
    assert found["tierkv_pool_member_failures_total", (("kind", "request"), two)] == 2
    assert found["tierkv_pool_member_read_latency_seconds", (two,)] == 0.0015
    assert ("tierkv_pool_member_write_latency_seconds", (two,)) not in found
    assert found["tierkv_pool_member_transport", (two, ("transport", "tcp"))] == 1
    size = ("page_bytes", "4096")
    assert found["tierkv_remote_pulls_total", (("outcome", "landed"), size)] == 7
    assert found["tierkv_remote_copies_total", (("outcome", "made"), size)] == 9
    assert found["tierkv_pool_kept_pages", (size, ("tier", "host"))] == 6


def test_metrics_of_a_pool_that_is_off() -> None:
    status = {"classes": [], "pool": {"state": "off", "why": "no key"}, "mooncake": None}
    assert samples(status) == {("tierkv_pool_up", ()): 0}
    assert samples({"classes": [], "pool": None, "mooncake": None}) == {}
