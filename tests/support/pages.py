"""Pages whose content follows from their key, so that any reader can tell a wrong one."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from tierkv.storage.base import PageStore, Tier
from tierkv.storage.types import CommitOutcome, PageKey


def page_key(number: int) -> PageKey:
    """The key of test page `number`."""
    return PageKey(hashlib.sha256(number.to_bytes(8, "little")).digest())


def page_keys(*numbers: int) -> list[PageKey]:
    return [page_key(number) for number in numbers]


def page_content(key: PageKey, page_bytes: int) -> bytes:
    """What the page under `key` must hold: distinct in every byte range, cheap to make."""
    return hashlib.shake_128(key).digest(page_bytes)


def put_tier(tier: Tier, keys: Sequence[PageKey]) -> list[CommitOutcome]:
    """Write and commit pages straight into one tier."""
    with tier.reserve(len(keys)) as held:
        assert len(held) == len(keys), "the test's tier is too small"
        for index, key in enumerate(keys):
            tier.write(held, index, page_content(key, tier.page_bytes))
        return tier.commit(held, keys)


def put_store(store: PageStore, keys: Sequence[PageKey]) -> list[CommitOutcome]:
    """Reserve, fill and commit as many of `keys` as the store gives slots for."""
    with store.reserve(len(keys)) as held:
        taken = keys[: len(held.views)]
        for key, view in zip(taken, held.views, strict=True):
            view[:] = page_content(key, store.page_bytes)
        return held.commit(taken)


def take_content(store: PageStore, keys: Sequence[PageKey], deadline_s: float = 20.0) -> int:
    """Fetch `keys`, assert that every page handed out is right, return how many there were."""
    with store.fetch(keys, deadline_s).take(deadline_s) as lease:
        assert lease.keys == list(keys[: len(lease.keys)]), "not a leading run"
        for key, view in zip(lease.keys, lease.views, strict=True):
            assert bytes(view) == page_content(key, store.page_bytes), f"wrong page {key.hex()}"
        return len(lease.keys)
