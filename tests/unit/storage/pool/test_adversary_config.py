"""Settings that cannot work are one clear line before anything is opened, not a bug at run time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tierkv.storage.errors import ConfigError
from tierkv.storage.pool import config as settings
from tierkv.storage.pool import messages
from tierkv.storage.pool.config import Address, PoolConfig
from tierkv.storage.pool.messages import Hello, LeaseAsk, read_request, write_request
from tierkv.storage.types import PageKey

SOUND = PoolConfig(Address("127.0.0.1", 1), (Address("127.0.0.2", 1),), key=b"k" * 16)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("node2", Address("node2", 7422)),
        ("node2:1", Address("node2", 1)),
        ("10.0.0.1:65535", Address("10.0.0.1", 65535)),
        ("::1", Address("::1", 7422)),
        ("fe80::1%eth0", Address("fe80::1%eth0", 7422)),
        ("[::1]", Address("::1", 7422)),
        ("[::1]:80", Address("::1", 80)),
    ],
)
def test_an_address_is_read_and_written_alike(text: str, expected: Address) -> None:
    assert Address.parse(text) == expected
    assert Address.parse(str(expected)) == expected


@pytest.mark.parametrize(
    "text",
    [
        *("", ":", ":80", "[::1", "[::1]80", "[]:80", "[node]:80", "[::1]:", "node:", "node:x"),
        *("node:-1", "node:65536", "node:\u00b2", "node:\u0661", "node:" + "1" * 5000, "a b:1"),
        *("node\n:1", " :1"),
    ],
)
def test_what_is_no_address_is_a_config_error(text: str) -> None:
    with pytest.raises(ConfigError, match="is not host:port") as error:
        Address.parse(text)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"batch_pages": 1025}, "batch_pages is 1025"),
        ({"breaker_failures": 0}, "breaker_failures is 0"),
        ({"breaker_open_s": 0.0}, "breaker_open 0 s"),
        ({"breaker_open_s": float("nan")}, "breaker_open nan s"),
        ({"suspect_s": 0.1}, "suspect is 0.1 s, .* heartbeat is 0.25 s"),
        ({"lease_s": 3600.0}, "lease is 3600 s, expected above 0 and up to 600 s"),
        ({"host_share": 1.5}, "host_share is 150%, expected 0% to 100%"),
        ({"rebalance_bytes_per_s": -1}, "rebalance is -1 B/s"),
        ({"name": "n" * 256}, "cannot be said"),
        ({"name": "\u00e9" * 128}, "cannot be said"),
        ({"name": "two\nlines"}, "cannot be said"),
        ({"name": "\udc80"}, "cannot be said"),
    ],
)
def test_settings_that_messages_cannot_carry_are_refused(
    changes: dict[str, Any], match: str
) -> None:
    with pytest.raises(ConfigError, match=match) as error:
        replace(SOUND, **changes).validate()
    assert "\n" not in str(error.value)


def test_the_largest_settings_travel() -> None:
    assert settings.BATCH_PAGES_MAX == messages.PAGES_MAX
    assert settings.NAME_BYTES_MAX == messages.NAME_BYTES_MAX
    largest = replace(SOUND, batch_pages=settings.BATCH_PAGES_MAX, name="n" * 255)
    largest.validate()
    keys = tuple(PageKey(number.to_bytes(32, "big")) for number in range(largest.batch_pages))
    for request in (Hello(largest.own_name, 1, ()), LeaseAsk(1, keys, 1, 0)):
        assert read_request(write_request(request, 1, 1)) is not None
