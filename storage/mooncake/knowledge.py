"""What is known of the pages in a Mooncake Store, from what was asked and what became of it.

Owns four bounded memories of keys: see the table in remote.py. Knows no network. Called by the
remote and its workers. Invariant: held() never names a page that is avoided or corrupt.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from tierkv.storage.clock import Clock
from tierkv.storage.mooncake.config import MooncakeConfig
from tierkv.storage.mooncake.memory import ExpiringKeys
from tierkv.storage.types import PageKey


class Knowledge:
    """Thread-safe; never waits."""

    def __init__(self, config: MooncakeConfig, clock: Clock) -> None:
        pages = config.known_pages
        self._held = ExpiringKeys(clock, pages, config.known_s)
        self._absent = ExpiringKeys(clock, pages, config.absent_s)
        self._avoided = ExpiringKeys(clock, pages, config.avoid_s)
        self._corrupt = ExpiringKeys(clock, config.corrupt_pages, config.corrupt_s)

    @property
    def pages(self) -> int:
        """Pages that the store is believed to have."""
        return len(self._held)

    def held(self, key: PageKey) -> bool:
        """Whether the page is there and may be asked for."""
        return key in self._held and key not in self._avoided and key not in self._corrupt

    def answers(self, key: PageKey) -> bool:
        """Whether nothing would be learned by asking now."""
        return (
            key in self._held or key in self._absent or key in self._avoided or key in self._corrupt
        )

    def needs_no_copy(self, key: PageKey) -> bool:
        """Whether a copy would tell the store nothing new."""
        return key in self._held and key not in self._corrupt

    def is_corrupt(self, key: PageKey) -> bool:
        """Whether the page's value was found wrong."""
        return key in self._corrupt

    def found(self, keys: Collection[PageKey]) -> None:
        """The store said that it has them."""
        self._absent.discard(keys)
        self._held.add(keys)

    def missed(self, keys: Collection[PageKey]) -> None:
        """The store said that it does not have them."""
        self._held.discard(keys)
        self._absent.add(keys)

    def failed(self, keys: Collection[PageKey]) -> None:
        """Their bytes did not come."""
        self._avoided.add(keys)

    def wrong(self, keys: Collection[PageKey]) -> None:
        """What came was not the page (lesson W7: counted, remembered, never retried for ever)."""
        self._held.discard(keys)
        self._corrupt.add(keys)

    def stored(self, keys: Sequence[PageKey]) -> None:
        """They were put, by us and from verified pages, where nothing was."""
        self._avoided.discard(keys)
        self._corrupt.discard(keys)
        self.found(keys)

    def check(self) -> None:
        """Assert the bounds. O(keys)."""
        for memory in (self._held, self._absent, self._avoided, self._corrupt):
            memory.check()
