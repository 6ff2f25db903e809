"""DaemonConfig: what cannot work is refused before anything is opened."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tierkv.daemon.settings import DaemonConfig, QuotaRule
from tierkv.storage.errors import CapacityError, ConfigError

KEYS = {"host_bytes": "host.size", "cache_root": "nvme.directory", "nvme_bytes": "nvme.size"}
"""What a user calls these fields."""


def test_defaults_are_valid() -> None:
    DaemonConfig().validate()


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({"host_bytes": 0}, CapacityError),
        ({"host_bytes": 10, "host_class_bytes": 11}, CapacityError),
        ({"cache_root": Path("/cache"), "nvme_bytes": 0}, CapacityError),
        ({"nvme_bytes": 10, "nvme_class_bytes": 11}, CapacityError),
        ({"socket_path": Path("/" + "x" * 108)}, ConfigError),
        ({"socket_mode": 0o4600}, ConfigError),
        ({"http_host": "0.0.0.0"}, ConfigError),
        ({"http_port": 70000}, ConfigError),
        ({"allowed_uids": ()}, ConfigError),
        ({"workers": 0}, ConfigError),
        ({"clients_max": 0}, ConfigError),
        ({"verify_commit_every": 0}, ConfigError),
        ({"preload_fraction": 1.5}, ConfigError),
        ({"scrub_bytes_per_s": -1}, ConfigError),
        ({"stop_s": 0.0}, ConfigError),
        ({"write_budget_bytes_per_day": 0}, ConfigError),
        ({"log_level": "loud"}, ConfigError),
    ],
)
def test_what_cannot_work_is_refused(changes: dict[str, Any], kind: type[Exception]) -> None:
    field = next(iter(changes))
    with pytest.raises(kind, match=KEYS.get(field, field)):
        replace(DaemonConfig(), **changes).validate()


def test_quota_rules() -> None:
    with pytest.raises(ConfigError, match="exactly one"):
        QuotaRule()
    with pytest.raises(ConfigError, match="exactly one"):
        QuotaRule(namespace="ab", tenant="acme")
    with pytest.raises(ConfigError, match="hex"):
        QuotaRule(namespace="xy")
    with pytest.raises(ConfigError, match="floor"):
        QuotaRule(tenant="acme", host_floor_bytes=2, host_ceiling_bytes=1)
    with pytest.raises(ConfigError, match="ttl_s"):
        QuotaRule(tenant="acme", ttl_s=0.0)


def test_the_first_rule_that_matches_counts() -> None:
    first = QuotaRule(namespace="abab", ttl_s=1.0)
    second = QuotaRule(tenant="acme", ttl_s=2.0)
    config = replace(DaemonConfig(), quotas=(first, second))
    assert config.rule_for(b"\xab" * 32, "acme") is first
    assert config.rule_for(b"\xcd" * 32, "acme") is second
    assert config.rule_for(b"\xcd" * 32, "other") is None


def test_digest_tells_settings_apart_but_not_tokens() -> None:
    config = DaemonConfig(http_token="secret-1")
    assert config.digest() == replace(config, http_token="secret-2").digest()
    assert config.digest() != replace(config, host_bytes=5).digest()
    assert "secret-1" not in repr(config)
