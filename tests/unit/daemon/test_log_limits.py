"""The log says what a stranger causes once, not each time."""

from __future__ import annotations

import logging

import pytest

from tests.support.clock import ManualClock
from tierkv.daemon.log_limits import LINES_MAX, LOGGER, REPEAT_S, limit_refusals


def test_a_refused_connection_is_told_once_in_a_while(caplog: pytest.LogCaptureFixture) -> None:
    clock = ManualClock()
    log = logging.getLogger(LOGGER)
    made = limit_refusals(clock)
    try:
        with caplog.at_level(logging.INFO, LOGGER):
            for port in range(40000, 40010):
                log.warning("peer=%s refused=%s", f"10.0.0.2:{port}", "wrong key")
            assert len(caplog.records) == 1
            log.warning("peer=%s refused=%s", "10.0.0.3:40000", "wrong key")
            log.warning("peer=%s refused=%s", "10.0.0.2:40000", "another version")
            assert len(caplog.records) == 3
            for _ in range(2):
                log.error("peer=%s a bug", "10.0.0.2:1")
            assert len(caplog.records) == 5, "only warnings are held back"
            clock.advance(REPEAT_S + 1)
            log.warning("peer=%s refused=%s", "10.0.0.2:1", "wrong key")
            assert len(caplog.records) == 6
            for number in range(2 * LINES_MAX):
                log.warning("peer=%s refused=%s", "10.0.0.2:1", f"reason {number}")
            assert len(made._seen) == LINES_MAX
    finally:
        log.removeFilter(made)
