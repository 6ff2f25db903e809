"""What must be true of an engine and its store between two requests."""

from __future__ import annotations

from tierkv.engine.serve.engine import Engine
from tierkv.storage.store import TieredStore

WAIT_S = 20.0


def assert_given_back(engine: Engine, store: TieredStore) -> None:
    """Every invariant holds, nothing is under way and nothing is held. Empties the GPU cache."""
    engine.check()
    engine.drop_gpu_cache()
    assert store.wait_quiet(WAIT_S)
    store.check()
    stats = engine.stats()
    assert (stats.cache.pages_copying, stats.cache.protected_tokens) == (0, 0)
    assert stats.restore is not None
    assert (stats.restore.active, stats.restore.orphaned_pages) == (0, 0)
    assert stats.store is not None
    assert sum(tier.leased_pages + tier.reserved_pages for tier in stats.store.tiers) == 0
