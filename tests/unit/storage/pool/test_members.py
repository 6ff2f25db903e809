"""The static list of members."""

from __future__ import annotations

import sys

import pytest

from tests.support.clock import ManualClock
from tierkv.storage.pool.config import Address, PoolConfig
from tierkv.storage.pool.members import StaticMembership, open_membership

OWN = Address("10.0.0.1", 7422)
OTHERS = (Address("node10", 7422), Address("10.0.0.2", 7423), Address("10.0.0.2", 7422))


def test_members_are_the_others_sorted_and_stay() -> None:
    membership = open_membership(PoolConfig(OWN, OTHERS), ManualClock())
    assert isinstance(membership, StaticMembership) and membership.name == "static"
    changes: list[str] = []
    membership.start(lambda: changes.append("changed"))
    expected = (Address("10.0.0.2", 7422), Address("10.0.0.2", 7423), Address("node10", 7422))
    assert membership.members() == expected
    membership.join(OWN, "me", 3)
    membership.leave()
    membership.close()
    assert membership.members() == expected
    assert membership.problem() is None and changes == []


@pytest.mark.parametrize("own", [OWN, Address("public", 7422)])
def test_never_this_node(own: Address) -> None:
    """Also where the configuration was not validated: a node must not connect to itself."""
    config = PoolConfig(OWN, (*OTHERS, own), advertise=Address("public", 7422))
    assert own not in StaticMembership(config).members()
    assert len(StaticMembership(config).members()) == len(OTHERS)


def test_a_static_list_needs_no_etcd_client(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "etcd3gw", None)
    monkeypatch.delitem(sys.modules, "tierkv.storage.pool.etcd", raising=False)
    assert open_membership(PoolConfig(OWN, OTHERS), ManualClock()).members()
    assert "tierkv.storage.pool.etcd" not in sys.modules
