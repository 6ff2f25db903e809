"""Worker threads: results and errors arrive on the loop; the queue has a bound."""

from __future__ import annotations

import asyncio
import threading

import pytest

from tierkv.daemon import workers as module
from tierkv.daemon.workers import Workers
from tierkv.storage.errors import OverloadedError

WAIT_S = 30.0


async def test_h2_a_failing_call_does_not_end_its_thread() -> None:
    workers = Workers(1, asyncio.get_running_loop())

    def fail() -> None:
        raise ValueError("on purpose")

    with pytest.raises(ValueError, match="on purpose"):
        await workers.submit(fail)
    assert await workers.submit(lambda: threading.current_thread().name) == "daemon-0"
    assert workers.running == 0
    assert workers.close(WAIT_S)


async def test_queue_is_bounded_and_stuck_threads_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "QUEUE_MAX", 2)
    workers = Workers(1, asyncio.get_running_loop())
    started, release = threading.Event(), threading.Event()

    def stuck() -> None:
        started.set()
        assert release.wait(WAIT_S)

    first = workers.submit(stuck)
    assert started.wait(WAIT_S)
    waiting = [workers.submit(int) for _ in range(2)]
    with pytest.raises(OverloadedError):
        workers.submit(int)
    assert not workers.close(0.01)
    release.set()
    await asyncio.gather(first, *waiting)
    with pytest.raises(OverloadedError):
        workers.submit(int)
