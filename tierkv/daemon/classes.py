"""The page sizes a daemon serves, and the budgets they share.

Owns every PageClass: opened at the first hello that names its size, or at a start. Knows no
sessions. Called by tierkv.daemon.service, the verbs and the upkeep, on the loop's thread; stores
are opened and closed in worker threads.

Invariant: the classes' host and nvme shares add up to at most the configured budgets.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator
from functools import partial

from tierkv.daemon.layout import Layout
from tierkv.daemon.page_class import PageClass, StoreOpener, retire_arena, store_config
from tierkv.daemon.settings import DaemonConfig
from tierkv.daemon.workers import Workers
from tierkv.storage.errors import CapacityError
from tierkv.storage.store import StoreConfig

log = logging.getLogger(__name__)


class PageClasses:
    """See the module docstring."""

    def __init__(
        self, config: DaemonConfig, layout: Layout, workers: Workers, open_store: StoreOpener
    ) -> None:
        self._config = config
        self._layout = layout
        self._workers = workers
        self._open_store = open_store
        self._classes: dict[int, PageClass] = {}
        self._opening: dict[int, asyncio.Future[PageClass]] = {}
        self._shares: dict[int, tuple[int, int]] = {}
        self.prepare: Callable[[PageClass], Awaitable[None]] | None = None
        """What a class needs before its first client is served."""

    def __iter__(self) -> Iterator[PageClass]:
        return iter(list(self._classes.values()))

    def __len__(self) -> int:
        return len(self._classes)

    def get(self, page_bytes: int) -> PageClass | None:
        """The class of a page size, if it is open."""
        return self._classes.get(page_bytes)

    async def open(self, page_bytes: int) -> PageClass:
        """The class of a page size, opened now if it is not yet.

        Raises CapacityError when the budget has no room for it, and what opening a store raises.
        """
        known = self._classes.get(page_bytes)
        if known is not None:
            return known
        opening = self._opening.get(page_bytes)
        if opening is None:
            opening = asyncio.ensure_future(self._open(page_bytes))
            self._opening[page_bytes] = opening
            opening.add_done_callback(lambda _: self._opening.pop(page_bytes))
        # Several clients may wait for it: one that goes away does not end it for the others.
        return await asyncio.shield(opening)

    async def close(self, timeout_s: float) -> None:
        """Close every store; what is stuck in I/O past the bound is left behind."""
        closing = [self._workers.submit(each.close) for each in self]
        self._classes.clear()
        if not closing:
            return
        done, late = await asyncio.wait(closing, timeout=timeout_s)
        for future in done:
            if (error := future.exception()) is not None:
                log.error("close page class: %s", error)
        if late:
            log.error("close: %d page classes are stuck in I/O, left behind", len(late))

    def check(self) -> None:
        """Assert every store's invariants and that the shares fit. Expensive."""
        for name, whole, used in (
            ("host", self._config.host_bytes, sum(host for host, _ in self._shares.values())),
            ("nvme", self._config.nvme_bytes, sum(nvme for _, nvme in self._shares.values())),
        ):
            assert used <= whole, f"{name}: {used} bytes given out, {whole} there"
        assert self._classes.keys() <= self._shares.keys(), "a class without a share"
        for each in self:
            each.store.check()

    async def _open(self, page_bytes: int) -> PageClass:
        host_bytes, nvme_bytes = self._share(page_bytes)
        self._shares[page_bytes] = (host_bytes, nvme_bytes)
        wanted = store_config(
            self._config,
            page_bytes,
            self._layout.arena_path(page_bytes),
            self._layout.nvme_root(page_bytes),
            host_bytes,
            nvme_bytes,
        )
        try:
            opened = await self._workers.submit(partial(self._make, wanted))
            if self.prepare is not None:
                try:
                    await self.prepare(opened)
                except BaseException:
                    opened.close()
                    raise
        except BaseException:
            del self._shares[page_bytes]
            raise
        self._classes[page_bytes] = opened
        tiers = opened.store.stats().tiers
        log.info(
            "page_class=%d %s",
            page_bytes,
            " ".join(f"{t.name}_pages={t.committed_pages}/{t.capacity_pages}" for t in tiers),
        )
        return opened

    def _make(self, wanted: StoreConfig) -> PageClass:
        wanted.validate()
        assert wanted.host_arena_path is not None, "clients cannot map an anonymous arena"
        holders_path = self._layout.holders_path(wanted.page_bytes)
        retire_arena(wanted.host_arena_path, wanted.page_bytes, wanted.host_bytes)
        if not wanted.host_arena_path.exists():
            # Whatever they say is about another arena.
            holders_path.unlink(missing_ok=True)
        store = self._open_store(wanted)
        try:
            return PageClass(
                store, self._config, holders_path, wanted.host_bytes, wanted.nvme_bytes
            )
        except BaseException:
            store.close()
            raise

    def _share(self, page_bytes: int) -> tuple[int, int]:
        config = self._config
        if len(self._shares) >= config.classes_max:
            raise CapacityError(
                f"open page size {page_bytes}: {config.classes_max} page sizes are served "
                "already; raise limits.classes"
            )
        host_used = sum(host for host, _ in self._shares.values())
        nvme_used = sum(nvme for _, nvme in self._shares.values())
        host = self._part("host", page_bytes, config.host_class_bytes, config.host_bytes, host_used)
        if config.cache_root is None:
            return host, 0
        nvme = self._part("nvme", page_bytes, config.nvme_class_bytes, config.nvme_bytes, nvme_used)
        return host, nvme

    def _part(self, tier: str, page_bytes: int, share: int | None, whole: int, used: int) -> int:
        wanted = whole if share is None else share
        if used and share is None:
            raise CapacityError(
                f"open page size {page_bytes}: all {whole} bytes of {tier}.size serve "
                f"{self._sizes()}; set {tier}.class_size to share them (at most {whole // 2})"
            )
        if used + wanted > whole:
            raise CapacityError(
                f"open page size {page_bytes}: {tier}.class_size is {wanted}, but only "
                f"{whole - used} of {tier}.size ({whole}) are left beside {self._sizes()}; "
                f"raise {tier}.size to at least {used + wanted}"
            )
        return wanted

    def _sizes(self) -> str:
        return "page size " + ", ".join(str(size) for size in sorted(self._shares))
