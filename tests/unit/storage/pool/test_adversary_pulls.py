"""Pulls: whose fault a failure is, what is a miss, and workers that rest when there is no work."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import pytest

from tests.support.pages import page_keys, take_content
from tests.support.pool_nodes import NEVER, WAIT_S, running_nodes, until
from tierkv.storage.errors import TierIOError
from tierkv.storage.pool import borrow, serving
from tierkv.storage.pool.messages import LeaseAsk, Verb, read_request
from tierkv.storage.pulls import PullQueue
from tierkv.storage.remote import PullState
from tierkv.storage.transport.base import PageRange, PeerRead

QUIET: dict[str, Any] = {"copy_after": NEVER, "hot_after": NEVER}


def test_h2_workers_rest_while_a_store_waits_to_be_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with running_nodes(2, **QUIET) as nodes:
        near, far = nodes
        keys = page_keys(1, 2)
        far.put(keys)
        nodes.await_known(keys)
        assert take_content(near.store, keys) == 2
        takes: list[str] = []
        take = PullQueue.take

        def counted(queue: PullQueue, lane: str, *rest: Any, **more: Any) -> Any:
            takes.append(lane)
            return take(queue, lane, *rest, **more)

        def stuck(generation: int) -> None:
            # Long enough for a worker that never rests to ask a thousand times.
            threading.Event().wait(0.5)
            raise TierIOError("unregister: a copy does not end")

        with monkeypatch.context() as patched:
            patched.setattr(PullQueue, "take", counted)
            patched.setattr(near.gate, "unregister", stuck)
            assert not near.pool.close(WAIT_S)
            assert len(takes) < 20, f"asked {len(takes)} times for pulls of a closed queue"
        assert near.pool.close(WAIT_S)
        near.store.close()
        near.stopped = True


def test_a_read_that_this_node_refused_is_not_held_against_the_peer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with running_nodes(2, breaker_failures=1, breaker_open_s=600.0, **QUIET) as nodes:
        near, far = nodes
        keys = page_keys(1, 2)
        far.put(keys)
        nodes.await_known(keys)
        (peer,) = [each for each in near.gate.peers if not each.inner.closed]  # type: ignore[attr-defined]

        def full(
            generation: int, ranges: Sequence[PageRange], into: object, timeout_s: float
        ) -> PeerRead:
            read = PeerRead(len(ranges))
            read.refuse("too many reads are under way here")
            return read

        with monkeypatch.context() as patched:
            patched.setattr(peer, "read", full)
            assert near.pull(keys[0]).future.result(WAIT_S).state is PullState.FAILED
        assert near.link(far).askable, "the peer has done nothing wrong"
        assert near.pull(keys[1]).future.result(WAIT_S).state is PullState.LANDED


def test_a_holder_that_may_lend_no_more_is_a_failure_not_a_miss(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(serving, "MEMBER_PAGES_MAX", 1)
    with running_nodes(2, batch_pages=1, **QUIET) as nodes:
        near, far = nodes
        keys = page_keys(*range(4))
        far.put(keys)
        nodes.await_known(keys)
        with near.gate.stalled():
            first = near.pull(keys[0])
            until(
                lambda: far.pool.status()["leases"]["pages"] == 1,
                lambda: far.pool.status()["leases"],
            )
            assert near.pull(keys[1]).future.result(WAIT_S).state is PullState.FAILED
            assert near.remote.holds(keys[1:2]) == [True], "nobody said that it is not there"
            assert near.link(far).askable, "a busy holder is sound"
        first.future.result(WAIT_S)
        until(
            lambda: far.pool.status()["leases"]["pages"] == 0, lambda: far.pool.status()["leases"]
        )
        assert near.pull(keys[1]).future.result(WAIT_S).state is PullState.LANDED


def test_l1_no_lease_is_believed_for_longer_than_was_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    believed: list[float] = []
    made = borrow.Borrow.__init__

    def note(self: borrow.Borrow, pulls: Any, hold_s: float, clock: Any) -> None:
        believed.append(hold_s)
        made(self, pulls, hold_s, clock)

    monkeypatch.setattr(borrow.Borrow, "__init__", note)
    asked: list[float] = []

    def hear(payload: bytes, timeout_s: float) -> None:
        if payload[6] == Verb.LEASE:
            parts = read_request(payload)
            assert parts is not None and isinstance(parts[1], LeaseAsk)
            asked.append(parts[1].hold_ms / 1000)

    with running_nodes(2, lease_s=7.0009, **QUIET) as nodes:
        nodes[1].put(page_keys(1))
        nodes.await_known(page_keys(1))
        nodes[0].gate.before_message = hear
        assert take_content(nodes[0].store, page_keys(1)) == 1
    assert believed == asked == [7.0]
