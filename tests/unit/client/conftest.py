"""A fake daemon and clients that end with the test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.fake_daemon import FakeDaemon
from tierkv.client import Client, ClientSettings

PAGE_BYTES = 4096
QUICK = ClientSettings(
    call_s=5.0, backoff_first_s=0.01, backoff_max_s=0.05, breaker_failures=100, close_s=5.0
)

Connect = Callable[..., Client]


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[FakeDaemon]:
    with FakeDaemon(tmp_path / "socket", PAGE_BYTES) as running:
        yield running


@pytest.fixture
def connect(tmp_path: Path) -> Iterator[Connect]:
    """Makes clients of the fake daemon; checks and closes them at the end."""
    made: list[Client] = []

    def make(**options: Any) -> Client:
        options = {"page_bytes": PAGE_BYTES, "settings": QUICK, **options}
        client = Client(tmp_path / "socket", **options)
        made.append(client)
        return client

    yield make
    for client in made:
        client.check()
        client.close()
