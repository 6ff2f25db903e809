"""TieredStore on the real tiers against a naive model: a set of keys whose content is known.

The model knows what must never happen: a page that was never committed, a wrong byte, a run that
is not a leading run, a page in host that a fetch does not deliver, a leaked pin or slot, an owner
above its ceiling or an expired page that stays. Where a page is may depend on timing, what it holds
may not. With a remote tier there are pages elsewhere as well, that come, go, stall and arrive
damaged. 22,000 steps in all; each run names its seed, and `pytest -k <id>` replays its driver.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.memory_remote import Fault, Medium, MemoryRemote
from tests.support.pages import page_content, page_key
from tierkv.storage.base import Fetch, PageLease
from tierkv.storage.checksum import payload_checksum
from tierkv.storage.mover import MoverLimits
from tierkv.storage.policy import AdmissionName, WritePolicy
from tierkv.storage.promotion import Verify
from tierkv.storage.quota import Quota
from tierkv.storage.store import StoreConfig, StoreRules, TieredStore
from tierkv.storage.tiers.host import HostTier
from tierkv.storage.tiers.nvme import NvmeTier
from tierkv.storage.types import CommitOutcome, PageKey, TierName

PAGE_BYTES = 4096
WAIT_S = 30.0
UNIVERSE = 60
STEPS = 2000
HELD_MAX = 2
OWNERS = 3
PULL_ENDS = ("landed", "missed", "corrupt", "failed", "cancelled")


@dataclass(frozen=True, slots=True)
class Scenario:
    """One configuration and the seed that drives it."""

    seed: int
    policy: WritePolicy
    host_pages: int
    nvme_pages: int
    admission: AdmissionName = AdmissionName.HOTNESS
    verify: Verify = Verify.ALWAYS
    queue: int = 64
    ceilings: tuple[int, int] | None = None
    """Pages of each owner in host and in nvme."""
    remote: int | None = None
    """Pulls that a remote tier takes over at a time; None: there is no remote tier."""

    def __str__(self) -> str:
        below = "" if self.remote is None else f"-remote{self.remote}"
        return f"{self.policy.value}-{self.host_pages}-{self.nvme_pages}{below}-seed{self.seed}"


SCENARIOS = [
    Scenario(11, WritePolicy.WRITE_BACK, 8, 16),
    Scenario(12, WritePolicy.WRITE_BACK, 3, 40, admission=AdmissionName.ALL, queue=1),
    Scenario(13, WritePolicy.WRITE_THROUGH, 6, 12, admission=AdmissionName.ALL),
    Scenario(14, WritePolicy.WRITE_THROUGH, 16, 4, verify=Verify.RECOVERED),
    Scenario(15, WritePolicy.WRITE_THROUGH_SELECTIVE, 8, 24),
    Scenario(16, WritePolicy.WRITE_THROUGH_SELECTIVE, 1, 1, admission=AdmissionName.ALL),
    Scenario(17, WritePolicy.WRITE_THROUGH, 10, 24, ceilings=(4, 9)),
    Scenario(18, WritePolicy.WRITE_BACK, 6, 16, ceilings=(3, 5)),
    Scenario(19, WritePolicy.WRITE_THROUGH, 8, 12, remote=64),
    Scenario(20, WritePolicy.WRITE_BACK, 4, 6, remote=3, admission=AdmissionName.ALL),
    Scenario(21, WritePolicy.WRITE_THROUGH, 10, 24, remote=16, ceilings=(4, 9)),
]


def owner_of(key: PageKey) -> int:
    """Every page has one owner, and neighbours often have another."""
    return key[0] % OWNERS


class Driver:
    """Takes random steps on a store and holds each result against the model."""

    def __init__(self, scenario: Scenario, folder: Path) -> None:
        self.rng = random.Random(scenario.seed)
        self.config = StoreConfig(
            page_bytes=PAGE_BYTES,
            host_bytes=HostTier.capacity_for(PAGE_BYTES, scenario.host_pages),
            host_arena_path=folder / "arena",
            nvme_root=folder / "nvme",
            nvme_bytes=NvmeTier.capacity_for(PAGE_BYTES, scenario.nvme_pages),
            nvme_min_free_bytes=0,
            rules=StoreRules(
                write_policy=scenario.policy,
                admission=scenario.admission,
                verify=scenario.verify,
                mover=MoverLimits(demote_queue_pages=scenario.queue, demote_batch_pages=4),
            ),
        )
        self.host_pages = scenario.host_pages
        self.ceilings = scenario.ceilings
        self.pulls_max = scenario.remote
        self.medium = Medium()
        self.remote: MemoryRemote | None = None
        self.store = self.open()
        self.committed: set[PageKey] = set()
        self.held: list[PageLease] = []
        self.asked = 0
        self.handed_out = 0
        self.done: Counter[str] = Counter()
        self.pulls: Counter[str] = Counter()
        """How pulls ended, in all."""
        self.actions: list[tuple[int, Callable[[], None]]] = [
            (30, self.commit),
            (30, self.fetch),
            (8, self.fetch_twice),
            (6, self.cancel),
            (8, self.let_go),
            (5, self.reserve_and_leave),
            (6, self.touch),
            (2, self.flush),
            (1, self.reopen),
            (1, self.drop_owner),
            (1, self.preload),
            (2, self.scrub),
        ]
        if self.pulls_max is not None:
            self.actions += [
                (8, self.commit_elsewhere),
                (6, self.trouble_elsewhere),
                (4, self.stall),
                (2, self.lose_elsewhere),
                (8, self.fetch_here),
            ]

    def open(self) -> TieredStore:
        store = TieredStore.open(self.config)
        if self.ceilings is not None:
            sizes = {tier.name: tier.slot_bytes for tier in store.stats().tiers}
            pages = dict(zip((TierName.HOST, TierName.NVME), self.ceilings, strict=True))
            limits = {tier: pages[tier] * sizes[tier] for tier in pages}
            for owner in range(OWNERS):
                store.set_quota(owner, Quota(ceiling_bytes=limits))
        if self.pulls_max is not None:
            self.remote = MemoryRemote(self.medium, pages_max=self.pulls_max)
            store.attach_remote(self.remote)
        return store

    def step(self) -> None:
        weights = [weight for weight, _ in self.actions]
        (action,) = self.rng.choices([action for _, action in self.actions], weights)
        self.done[action.__name__] += 1
        action()
        self.store.check()
        if self.ceilings is not None:
            for owner, usage in self.store.owners().items():
                for tier, ceiling in zip(usage.pages, self.ceilings, strict=True):
                    assert usage.pages[tier] <= ceiling, (owner, usage)

    def run_of_keys(self) -> list[PageKey]:
        # Runs overlap like prompts with common prefixes do, and favour the low numbers.
        start = min(int(self.rng.expovariate(0.08)), UNIVERSE - 1)
        count = self.rng.randint(1, 6)
        return [page_key(number) for number in range(start, start + count)]

    # --- steps ---

    def commit(self) -> None:
        keys = self.run_of_keys()
        owner = owner_of(keys[0])
        keys = [key for key in keys if owner_of(key) == owner]
        with self.store.reserve(len(keys), owner) as held:
            keys = keys[: len(held.views)]
            for key, view in zip(keys, held.views, strict=True):
                view[:] = page_content(key, PAGE_BYTES)
            outcomes = held.commit(keys, owner=owner)
        if self.ceilings is None:
            assert all(outcome is not CommitOutcome.FAILED for outcome in outcomes)
        keys = [
            key
            for key, outcome in zip(keys, outcomes, strict=True)
            if outcome is not CommitOutcome.FAILED
        ]
        self.committed.update(keys)
        if self.ceilings is None:
            assert self.store.lookup(keys) == [TierName.HOST] * len(keys)

    def start(self, keys: list[PageKey]) -> Fetch:
        # What comes from elsewhere is its owner's, as what is committed here is.
        return self.store.fetch(keys, WAIT_S, owner=owner_of(keys[0]))

    def fetch(self) -> None:
        keys = self.run_of_keys()
        certain = self.leading(keys, {TierName.HOST})
        self.take(self.start(keys), certain)

    def fetch_twice(self) -> None:
        keys = self.run_of_keys()
        certain = self.leading(keys, {TierName.HOST})
        both = [self.start(keys), self.start(keys)]
        self.rng.shuffle(both)
        for fetch in both:
            self.take(fetch, certain)

    def cancel(self) -> None:
        keys = self.run_of_keys()
        fetch = self.start(keys)
        self.store.check()
        fetch.cancel()

    def fetch_here(self) -> None:
        keys = self.run_of_keys()
        submits = self.the_remote.submits
        asked = len(submits)
        certain = self.leading(keys, {TierName.HOST})
        self.take(self.store.fetch(keys, WAIT_S, here=True), certain, counted=False)
        assert len(submits) == asked, "the remote was asked for what is here"

    def commit_elsewhere(self) -> None:
        for key in self.run_of_keys():
            content = page_content(key, PAGE_BYTES)
            self.medium.put(key, content, payload_checksum(content))
            self.committed.add(key)

    def trouble_elsewhere(self) -> None:
        kinds = [Fault.FAIL, Fault.FLIP, Fault.MISS]
        self.the_remote.faults = {key: self.rng.choice(kinds) for key in self.run_of_keys()}
        self.the_remote.reachable = self.rng.random() < 0.8

    def stall(self) -> None:
        """A fetch is given up while its pulls do not move, and what moves no more still holds."""
        self.the_remote.stall()
        keys = self.run_of_keys()
        certain = self.leading(keys, {TierName.HOST})
        fetch = self.start(keys)
        self.store.check()
        if self.rng.random() < 0.5:
            fetch.cancel()
        else:
            self.take(fetch, certain, timeout_s=0.0)
        self.store.check()
        self.the_remote.release()

    def lose_elsewhere(self) -> None:
        for key in self.run_of_keys():
            self.medium.drop(key)

    def let_go(self) -> None:
        if self.held:
            self.held.pop(self.rng.randrange(len(self.held))).release()

    def reserve_and_leave(self) -> None:
        with self.store.reserve(self.rng.randint(1, self.host_pages)) as held:
            for view in held.views:
                view[:] = b"\xa5" * PAGE_BYTES
            self.store.check()

    def touch(self) -> None:
        self.store.touch(self.run_of_keys())

    def flush(self) -> None:
        self.let_all_go()
        durable = self.store.flush(WAIT_S)
        # A read that was cancelled while it ran keeps its slot until it ends.
        self.quiet()
        if not durable:
            return
        # Everything in host can go now, so a run that exists and fits has to come whole.
        keys = self.run_of_keys()[: self.host_pages]
        known = self.leading(keys, {TierName.HOST, TierName.NVME})
        self.take(self.store.fetch(keys, WAIT_S), known if self.ceilings is None else 0)

    def drop_owner(self) -> None:
        owner = self.rng.randrange(OWNERS)
        self.quiet()
        self.store.drop_owner(owner)
        assert owner not in self.store.owners()

    def preload(self) -> None:
        self.store.preload(self.rng.randint(1, self.host_pages))

    def scrub(self) -> None:
        report = self.store.scrub_step(self.rng.randint(1, 8))
        assert (report.corrupt, report.failed) == (0, 0), report

    def reopen(self) -> None:
        self.let_all_go()
        everything = [page_key(number) for number in range(UNIVERSE + 6)]
        self.quiet()
        before = self.store.lookup(everything)
        self.count_up()
        self.store.close()
        reboot = self.rng.random() < 0.5
        assert self.config.host_arena_path is not None
        if reboot:
            self.config.host_arena_path.unlink()
        self.store = self.open()
        after = self.store.lookup(everything)
        for was, now in zip(before, after, strict=True):
            if was is TierName.NVME:
                assert now is TierName.NVME
            elif not reboot and was is not TierName.REMOTE and now is not TierName.REMOTE:
                # What is elsewhere comes and goes with who can be reached.
                assert now is was
            else:
                assert now is not TierName.HOST

    # --- the model ---

    @property
    def the_remote(self) -> MemoryRemote:
        assert self.remote is not None
        return self.remote

    def take(
        self, fetch: Fetch, certain: int, timeout_s: float = WAIT_S, counted: bool = True
    ) -> None:
        lease = fetch.take(timeout_s)
        if counted:
            self.asked += len(fetch.keys)
            self.handed_out += len(lease.keys)
        assert lease.keys == fetch.keys[: len(lease.keys)], "not a leading run"
        assert certain <= len(lease.keys), "a page that was there did not come"
        self.verify(lease)
        if len(self.held) < HELD_MAX and self.rng.random() < 0.4:
            self.held.append(lease)
        else:
            lease.release()

    def verify(self, lease: PageLease) -> None:
        for key, view in zip(lease.keys, lease.views, strict=True):
            assert key in self.committed, "a page that nobody committed"
            assert view == page_content(key, PAGE_BYTES), f"wrong bytes under {key.hex()}"

    def leading(self, keys: list[PageKey], tiers: set[TierName]) -> int:
        found = self.store.lookup(keys)
        for index, tier in enumerate(found):
            assert tier is None or keys[index] in self.committed
            if tier not in tiers:
                return index
        return len(keys)

    def let_all_go(self) -> None:
        while self.held:
            lease = self.held.pop()
            # Held over many evictions, and still what it was.
            self.verify(lease)
            lease.release()

    def quiet(self) -> None:
        assert self.store.wait_quiet(WAIT_S)
        self.store.check()

    def count_up(self) -> None:
        """Nothing is held, and every key asked for was handed out or missed (lesson C4)."""
        stats = self.store.stats()
        for tier in stats.tiers:
            assert (tier.leased_pages, tier.reserved_pages) == (0, 0), tier
            assert (tier.corrupt, tier.quarantined_pages) == (0, 0), tier
        assert sum(stats.restored_pages.values()) == self.handed_out
        assert stats.missed_pages == self.asked - self.handed_out
        assert stats.mover.failed == stats.mover.worker_restarts == 0, stats.mover
        self.asked = self.handed_out = 0
        if stats.remote is not None:
            self.pulls.update({name: getattr(stats.remote, name) for name in PULL_ENDS})


@pytest.mark.parametrize("scenario", SCENARIOS, ids=str)
def test_w6_l2_h3_store_agrees_with_the_model(scenario: Scenario, tmp_path: Path) -> None:
    driver = Driver(scenario, tmp_path)
    try:
        for _ in range(STEPS):
            driver.step()
        driver.let_all_go()
        driver.quiet()
        driver.count_up()
    except AssertionError as error:
        raise AssertionError(f"seed={scenario.seed} step={driver.done.total()}: {error}") from error
    finally:
        driver.store.close()
    assert len(driver.done) == len(driver.actions), driver.done
    if scenario.remote is not None:
        assert all(driver.pulls[name] for name in PULL_ENDS), driver.pulls
