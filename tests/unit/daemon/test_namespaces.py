"""Owner numbers: one a digest for ever, never given twice, kept across restarts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tierkv.daemon.namespaces import NamespaceRegistry
from tierkv.storage.errors import CapacityError, ConfigError, FormatVersionError
from tierkv.storage.identity import Fingerprint, namespace


def fingerprint(number: int, tenant: str = "") -> Fingerprint:
    return Fingerprint(
        weights_digest=number.to_bytes(32, "big"),
        architecture=(("layers", 2),),
        kv_dtype="float32",
        kv_quantisation="none",
        page_tokens=16,
        tenant=tenant,
    )


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "namespaces.json"


def test_r1_numbers_outlive_the_registry(path: Path) -> None:
    registry = NamespaceRegistry(path, 10)
    first = registry.register(fingerprint(1, "acme"), "acme", 4096)
    second = registry.register(fingerprint(2), "", 4096)
    assert (first.owner, second.owner) == (1, 2)
    assert registry.register(fingerprint(1, "acme"), "acme", 4096) == first
    registry.check()
    again = NamespaceRegistry(path, 10)
    assert again.all() == [first, second]
    assert again.find(namespace(fingerprint(1, "acme"))) == first
    again.check()


def test_a_number_is_never_given_twice(path: Path) -> None:
    registry = NamespaceRegistry(path, 10)
    first = registry.register(fingerprint(1), "", 4096)
    assert registry.forget(first.digest) and not registry.forget(first.digest)
    assert NamespaceRegistry(path, 10).register(fingerprint(1), "", 4096).owner == 2
    registry = NamespaceRegistry(path, 10)
    registry.skip_past([7, 3])
    assert registry.register(fingerprint(3), "", 4096).owner == 8


def test_limit_and_other_page_size(path: Path) -> None:
    registry = NamespaceRegistry(path, 1)
    registry.register(fingerprint(1), "", 4096)
    with pytest.raises(CapacityError, match="namespaces_max"):
        registry.register(fingerprint(2), "", 4096)
    with pytest.raises(ConfigError, match="4096"):
        registry.register(fingerprint(1), "", 8192)


def test_damage_is_told_and_left_as_it_is(path: Path) -> None:
    NamespaceRegistry(path, 10).register(fingerprint(1), "", 4096)
    good = json.loads(path.read_text())
    for change in (
        {"format": "other"},
        {"next_owner": 1},
        {"namespaces": [{}]},
        {"namespaces": [{**good["namespaces"][0], "digest": "00" * 32}]},
        {"namespaces": [{**good["namespaces"][0], "owner": -1}]},
        {"namespaces": 5},
    ):
        text = json.dumps({**good, **change})
        path.write_text(text)
        with pytest.raises(ConfigError, match=r"namespaces\.json"):
            NamespaceRegistry(path, 10)
        assert path.read_text() == text
    path.write_text(json.dumps({**good, "version": 2}))
    with pytest.raises(FormatVersionError):
        NamespaceRegistry(path, 10)
    path.write_text("[" * 100_000)
    with pytest.raises(ConfigError):
        NamespaceRegistry(path, 10)
