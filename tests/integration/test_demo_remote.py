"""The three daemons of `tierkv demo --remote`, without the model: pages move as the demo says."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support.pages import page_content, page_key, put_store
from tests.unit.cli.conftest import Cli, cli
from tierkv.client.client import Client
from tierkv.demo.netns import NAMESPACES, unavailable
from tierkv.demo.remote import Nodes
from tierkv.storage.identity import Fingerprint
from tierkv.storage.types import CommitOutcome, PageKey, TierName

__all__ = ["cli"]

PAGE_BYTES = 4096
WAIT_S = 20.0
COUNT = 24

needs_namespaces = pytest.mark.skipif(
    unavailable() is not None, reason=f"no network namespaces here: {unavailable()}"
)


def client_of(nodes: Nodes, host: int) -> Client:
    fingerprint = Fingerprint(
        weights_digest=bytes(32),
        architecture=(("layers", 2),),
        kv_dtype="float32",
        kv_quantisation="none",
        page_tokens=16,
    )
    return Client(nodes.socket(host), PAGE_BYTES, fingerprint)


def taken(client: Client, keys: list[PageKey]) -> set[TierName]:
    with client.fetch(keys, WAIT_S).take(WAIT_S) as lease:
        assert lease.keys == keys
        for key, view in zip(lease.keys, lease.views, strict=True):
            assert bytes(view) == page_content(key, PAGE_BYTES)
        return set(lease.tiers)


@needs_namespaces
def test_pages_come_from_the_node_then_from_its_copy() -> None:
    keys = [page_key(number) for number in range(COUNT)]
    before = {entry.name for entry in NAMESPACES.iterdir()} if NAMESPACES.is_dir() else set()
    with Nodes(8 << 20) as nodes:
        folder = nodes.socket(0).parent
        with client_of(nodes, 0) as client:
            assert set(put_store(client, keys)) == {CommitOutcome.COMMITTED}
        nodes.await_copies(0)
        assert nodes.pages(0) == COUNT
        with client_of(nodes, 1) as client:
            # Host 1 keeps nothing for others, so the copies are on host 2.
            nodes.await_known(1, 2 * COUNT)
            assert taken(client, keys) == {TierName.REMOTE}
            nodes.empty(1)
            assert nodes.pages(1) == 0
            nodes.kill(0)
            nodes.await_known(1, COUNT)
            assert taken(client, keys) == {TierName.REMOTE}
    after = {entry.name for entry in NAMESPACES.iterdir()}
    assert not {name for name in after - before if str(os.getpid()) in name}
    assert not folder.exists()


def test_without_root_it_is_one_line(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    from tierkv.demo import run as demo_run

    monkeypatch.setattr(demo_run, "resolve_model", lambda *_: Path("model"))
    monkeypatch.setattr(demo_run, "_Demo", lambda *_: None)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    code, out, err = cli("demo", "--remote")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "needs root" in err
