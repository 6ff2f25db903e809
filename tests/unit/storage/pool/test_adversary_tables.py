"""Tables that peers can fill: none grows for ever, and none shuts out who comes later."""

from __future__ import annotations

import numpy as np

from tests.support.clock import ManualClock
from tests.support.pages import page_keys, put_store
from tests.support.pool_node import PAGE_BYTES, PoolNode
from tierkv.storage.pool.messages import Hello, SnapshotAsk, SnapshotPart
from tierkv.storage.pool.roster import NAMES_MAX, Roster, Standing


def test_members_that_are_gone_make_way_for_new_ones() -> None:
    clock = ManualClock()
    roster = Roster("me", clock)
    for number in range(NAMES_MAX):
        standing = roster.greet(f"n{number}", 1, number.to_bytes(16, "little"))
        assert standing is Standing.NEW_LIFE
    assert roster.greet("new", 1, b"x" * 16) is Standing.TOO_MANY, "all were here just now"
    clock.advance(7200.0)
    roster.member_of((5).to_bytes(16, "little"))
    assert roster.greet("n6", 1, (6).to_bytes(16, "little")) is Standing.KNOWN
    for number in range(NAMES_MAX - 2):
        token = (NAMES_MAX + number).to_bytes(16, "little")
        assert roster.greet(f"later{number}", 1, token) is Standing.NEW_LIFE
        roster.check()
    assert roster.member_of((5).to_bytes(16, "little")) == ("n5", 1), "who speaks stays"
    assert roster.member_of((6).to_bytes(16, "little")) == ("n6", 1), "who greets stays"
    assert roster.member_of((7).to_bytes(16, "little")) is None
    assert roster.greet("one more", 1, b"y" * 16) is Standing.TOO_MANY


def test_a_snapshot_that_nobody_reads_on_is_let_go() -> None:
    clock = ManualClock()
    holder = PoolNode("b", 9, clock=clock)
    asker = PoolNode("a", 7)
    try:
        asker.meet(holder)
        put_store(holder.store, page_keys(*range(4)))
        part = asker.ask(holder, SnapshotAsk(PAGE_BYTES, 0, 0, 0, 1))
        assert isinstance(part, SnapshotPart) and part.total == 4
        assert holder.server._teller.reading == 1
        clock.advance(5.0)
        holder.server.expire()
        assert holder.server._teller.reading == 1, "it may only be slow"
        more = asker.ask(holder, SnapshotAsk(PAGE_BYTES, part.token, part.seq, 1, 2))
        assert isinstance(more, SnapshotPart) and (more.token, more.seq) == (part.token, part.seq)
        clock.advance(3600.0)
        holder.server.expire()
        assert holder.server._teller.reading == 0
        again = asker.ask(holder, SnapshotAsk(PAGE_BYTES, part.token, part.seq, 3, 1))
        assert np.isin(again.fingerprints, part.fingerprints).any() or again.total == 4
        assert isinstance(asker.ask(holder, Hello("a", 7, ()), 0), Hello)
    finally:
        asker.close()
        holder.close()
