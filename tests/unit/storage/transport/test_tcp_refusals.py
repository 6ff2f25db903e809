"""The log says what a stranger causes once, not at each of its tries."""

from __future__ import annotations

import logging

import pytest

from tests.support.clock import ManualClock
from tierkv.storage.errors import TierIOError
from tierkv.storage.transport.tcp import TcpTransport
from tierkv.storage.transport.tcp_refusals import ADDRESSES_MAX, OTHERS, REPEAT_S, RefusalLog

LIMIT_S = 30.0


def test_an_address_is_told_of_once_in_a_while(caplog: pytest.LogCaptureFixture) -> None:
    clock = ManualClock()
    refusals = RefusalLog(clock)
    for port in range(40000, 40010):
        refusals.note(f"10.0.0.2:{port}", "wrong key")
        refusals.check()
    refusals.note("10.0.0.3:40000", "wrong key")
    assert caplog.messages == [
        "peer=10.0.0.2:40000 refused=wrong key",
        "peer=10.0.0.3:40000 refused=wrong key",
    ]
    clock.advance(REPEAT_S)
    refusals.note("10.0.0.2:40010", "another version")
    refusals.note("10.0.0.2:40011", "another version")
    assert caplog.messages[2:] == [
        f"peer=10.0.0.2:40010 refused=another version times=10 in_s={REPEAT_S:.0f}"
    ]


def test_addresses_without_number_are_told_of_together(caplog: pytest.LogCaptureFixture) -> None:
    clock = ManualClock()
    refusals = RefusalLog(clock)
    for number in range(3 * ADDRESSES_MAX):
        refusals.note(f"fe80::{number:x}:40000", "wrong key")
        refusals.check()
    assert len(caplog.messages) == ADDRESSES_MAX + 1
    clock.advance(REPEAT_S)
    refusals.note("10.0.0.2:1", "wrong key")
    assert caplog.messages[-1] == "peer=10.0.0.2:1 refused=wrong key", "the oldest made room"
    refusals.check()
    assert OTHERS in refusals._told


def test_a_peer_with_a_wrong_key_writes_one_line(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), TcpTransport(bytes(32)) as stranger:
        with TcpTransport(bytes(range(32))) as server:
            address = server.listen("127.0.0.1", 0, lambda peer, payload: payload)
            for _ in range(5):
                with pytest.raises(TierIOError, match="does not have this pool's key"):
                    stranger.connect(*address, LIMIT_S)
        assert server.stats().refused_connections == 5
        server.check()
        lines = [line for line in caplog.messages if line.startswith("peer=")]
        assert len(lines) == 1 and "does not have this pool's key" in lines[0], lines
