"""An engine and a store in miniature around the real transfer and page pool, on a simulated device.

Keys name payloads; pages and host slots are few, so that each is reused all the time. What is
freed is poisoned: host memory at once, as the next owner may write at once; device memory by work
on the compute stream, as the next owner's would be.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass

import numpy as np

from tests.support.simulated_device import POISON, Action, SimulatedDevice, SimulatedOps
from tierkv.engine.cache.page_pool import PageArray, PagePool, PagesInCopy
from tierkv.storage.errors import TierIOError
from tierkv.storage.transfer.base import CopyEvent, LayeredCopy
from tierkv.storage.transfer.device_ops import Wait
from tierkv.storage.transfer.streams import StreamTransfer

PAGES = 7
SLOTS = 6
ROW_BYTES = 16
KEYS = 12
ACTIONS = 150
STEPS_MAX = 20_000


@dataclass(eq=False)
class Saving:
    """A gather under way."""

    keys: list[int]
    slots: list[int]
    held: PagesInCopy
    event: CopyEvent


@dataclass(eq=False)
class Loading:
    """A scatter under way."""

    keys: list[int]
    slots: list[int]
    held: PagesInCopy
    event: LayeredCopy
    layered: bool
    layers_read: int = 0


class World:
    """One seed's run. AssertionError for a wrong byte, a leak or a deadlock."""

    def __init__(
        self, seed: int, skipped: frozenset[Wait] = frozenset(), failure_rate: float = 0.03
    ) -> None:
        self.rng = random.Random(seed)
        self.device = SimulatedDevice(self.rng, skipped)
        planes_per_layer = self.rng.choice([1, 2])
        planes = 3 * planes_per_layer
        self.kv = np.full((planes, PAGES, ROW_BYTES), POISON, np.uint8)
        self.ops = SimulatedOps(
            self.device, self.kv, planes_per_layer, bounce_pages=1, failure_rate=failure_rate
        )
        self.transfer = StreamTransfer(self.ops, threads=False)
        self.pool = PagePool(PAGES, 4)
        page_bytes = self.ops.page_bytes
        self.arena = np.full((SLOTS, page_bytes), POISON, np.uint8)
        # Half of the arena is registered; pages of the other half go through the bounce buffer.
        registered = self.rng.choice([0, SLOTS // 2, SLOTS])
        if registered:
            self.transfer.register(memoryview(self.arena[:registered].data).cast("B"))
        self.payloads = [
            np.frombuffer(random.Random(key).randbytes(page_bytes), np.uint8).reshape(planes, -1)
            for key in range(KEYS)
        ]
        self.resident: dict[int, int] = {}
        self.host: dict[int, int] = {}
        self.free_slots = list(range(SLOTS))
        self.leases: Counter[int] = Counter()
        self.saving: list[Saving] = []
        self.loading: list[Loading] = []
        self.done: Counter[str] = Counter()

    def run(self) -> None:
        """Random actions, then everything to its end."""
        actions = [
            *[self.compute, self.read, self.evict, self.evict, self.save, self.restore],
            *[self.restore, self.restore, self.abort, self.drop_slot],
        ]
        for _ in range(ACTIONS):
            self.rng.choice(actions)()
            for _ in range(self.rng.randrange(12)):
                self.advance()
            self.check()
        self.finish()

    # --- what an engine does -------------------------------------------------------------------

    def compute(self) -> None:
        """A forward pass fills fresh pages."""
        keys = self.pick([k for k in range(KEYS) if not self.known(k)])
        pages = self.pool.allocate(len(keys)) if keys else None
        if pages is None:
            return
        for key, page in zip(keys, pages.tolist(), strict=True):
            self.resident[key] = page
            self.device.put(
                self.device.compute,
                [self.write(page, plane, key) for plane in range(len(self.kv))],
            )

    def read(self) -> None:
        """A forward pass attends to pages."""
        for key in self.pick(list(self.resident)):
            self.attend(self.resident[key], key, range(len(self.kv)))

    def evict(self) -> None:
        """Pages leave for the store; the copy owns them."""
        keys = self.pick([k for k in self.resident if k not in self.host and not self.busy(k)])
        slots = self.reserve(len(keys))
        if not slots:
            return
        keys = keys[: len(slots)]
        pages = np.array([self.resident.pop(key) for key in keys], np.int32)
        self.gather(keys, slots, self.pool.begin_copy(pages))

    def save(self) -> None:
        """Pages are copied to the store and stay."""
        keys = self.pick([k for k in self.resident if k not in self.host and not self.busy(k)])
        slots = self.reserve(len(keys))
        if not slots:
            return
        keys = keys[: len(slots)]
        pages = np.array([self.resident[key] for key in keys], np.int32)
        self.gather(keys, slots, self.pool.begin_read(pages))

    def restore(self) -> None:
        """Pages come back, at once or layer by layer under a pass that follows them."""
        keys = self.pick([k for k in self.host if k not in self.resident and not self.busy(k)])
        pages = self.pool.allocate(len(keys)) if keys else None
        if pages is None:
            return
        slots = [self.host[key] for key in keys]
        self.leases.update(slots)
        held = self.pool.begin_copy(pages)
        views = [memoryview(self.arena[slot].data).toreadonly() for slot in slots]
        event = self.transfer.scatter(views, held)
        self.loading.append(Loading(keys, slots, held, event, self.rng.random() < 0.5))

    def abort(self) -> None:
        """A request goes away while its pages are under way."""
        if self.loading:
            copy = self.rng.choice(self.loading)
            if copy.event.cancel():
                assert copy.event.done
                self.done["cancelled"] += 1

    def drop_slot(self) -> None:
        """The store evicts a page that nobody leases."""
        idle = [key for key, slot in self.host.items() if not self.leases[slot]]
        if idle:
            self.free_slot(self.host.pop(self.rng.choice(idle)))

    # --- time ----------------------------------------------------------------------------------

    def advance(self) -> bool:
        """One small move of the device, of a copy thread or of the engine."""
        moved = False
        choice = self.rng.random()
        if choice < 0.7:
            moved = self.device.step()
        elif choice < 0.9:
            moved = self.rng.choice(self.transfer.lanes).pump()
        else:
            moved = self.poll()
        return moved

    def poll(self) -> bool:
        """What the engine does between steps: follow restores, take note of ends."""
        moved = False
        for loading in list(self.loading):
            moved |= self.follow(loading)
            if loading.event.done:
                self.loading.remove(loading)
                self.loaded(loading)
                moved = True
        for saving in [s for s in self.saving if s.event.done]:
            self.saving.remove(saving)
            self.saved(saving)
            moved = True
        return moved

    def follow(self, copy: Loading) -> bool:
        """Queue attention to each layer that is on its way."""
        if not copy.layered or copy.event.layers_issued <= copy.layers_read:
            return False
        try:
            copy.event.wait_layer(copy.layers_read, timeout_s=0.0)
        except TierIOError:
            copy.layered = False
            return True
        first = copy.layers_read * self.ops.planes_per_layer
        planes = range(first, first + self.ops.planes_per_layer)
        for key, page in zip(copy.keys, copy.held.page_list(), strict=True):
            self.attend(page, key, planes)
        copy.layers_read += 1
        self.done["layers followed"] += 1
        return True

    def loaded(self, copy: Loading) -> None:
        self.leases.subtract(copy.slots)
        failed = copy.event.error is not None
        self.pool.finish_copy(copy.held, free=failed)
        if failed:
            self.poison(copy.held.pages)
            self.done["failed restores"] += 1
            return
        self.resident.update(zip(copy.keys, copy.held.page_list(), strict=True))
        self.done["restored"] += len(copy.keys)

    def saved(self, copy: Saving) -> None:
        if copy.event.error is not None:
            for slot in copy.slots:
                self.free_slot(slot)
            self.done["failed saves"] += 1
        else:
            for key, slot in zip(copy.keys, copy.slots, strict=True):
                stored = self.arena[slot].reshape(len(self.kv), -1)
                assert (stored == self.payloads[key]).all(), f"key {key}: wrong bytes were stored"
                self.host[key] = slot
            self.done["saved"] += len(copy.keys)
        self.pool.finish_copy(copy.held, free=not copy.held.reads)
        if not copy.held.reads:
            self.poison(copy.held.pages)

    def finish(self) -> None:
        """Let everything end; nothing may be left over."""
        for _ in range(STEPS_MAX):
            moved = self.device.step()
            for lane in self.transfer.lanes:
                moved |= lane.pump()
            if not (moved | self.poll()):
                break
        assert not self.saving and not self.loading, "deadlock: copies wait for ever"
        assert not any(s.queue for s in self.device.streams.values()), "deadlock on the device"
        for page in self.resident.values():
            self.pool.free([page])
        self.resident.clear()
        for slot in self.host.values():
            self.free_slot(slot)
        self.check()
        assert self.pool.free_count == PAGES, "a page leaked"
        assert sorted(self.free_slots) == list(range(SLOTS)), "a slot leaked"
        assert not +self.leases, "a lease leaked"
        stats = self.transfer.stats()
        assert stats.broken is None
        assert (stats.out_bytes_waiting, stats.in_bytes_waiting) == (0, 0)
        self.transfer.close()

    # --- parts ---------------------------------------------------------------------------------

    def pick(self, keys: list[int]) -> list[int]:
        return self.rng.sample(keys, min(len(keys), self.rng.randrange(1, 4)))

    def busy(self, key: int) -> bool:
        return any(key in copy.keys for copy in [*self.saving, *self.loading])

    def known(self, key: int) -> bool:
        return key in self.resident or key in self.host or self.busy(key)

    def reserve(self, count: int) -> list[int]:
        taken, self.free_slots = self.free_slots[:count], self.free_slots[count:]
        return taken

    def gather(self, keys: list[int], slots: list[int], held: PagesInCopy) -> None:
        views = [memoryview(self.arena[slot].data) for slot in slots]
        self.saving.append(Saving(keys, slots, held, self.transfer.gather(held, views)))

    def attend(self, page: int, key: int, planes: range) -> None:
        self.device.put(self.device.compute, [self.expect(page, p, key) for p in planes])

    def write(self, page: int, plane: int, key: int) -> Action:
        def run() -> None:
            self.kv[plane, page] = self.payloads[key][plane]

        return run

    def expect(self, page: int, plane: int, key: int) -> Action:
        def run() -> None:
            right = (self.kv[plane, page] == self.payloads[key][plane]).all()
            assert right, f"key {key}: attention read wrong bytes in page {page}, plane {plane}"

        return run

    def poison(self, pages: PageArray) -> None:
        def run() -> None:
            self.kv[:, pages] = POISON

        self.device.put(self.device.compute, [run])

    def free_slot(self, slot: int) -> None:
        assert not self.leases[slot]
        self.arena[slot] = POISON
        self.free_slots.append(slot)
        self.rng.shuffle(self.free_slots)

    def check(self) -> None:
        self.pool.check()
        self.transfer.check()
        assert (
            len(self.resident)
            + self.pool.free_count
            + sum(len(c.held.pages) for c in [*self.saving, *self.loading] if not c.held.reads)
            == PAGES
        ), "a page has no owner"
