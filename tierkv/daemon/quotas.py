"""Turns the configuration's quota rules into the stores' quotas and times to live.

No state. Rules of a namespace bound that namespace; rules of a tenant bound all its namespaces of
one page size together. Called by tierkv.daemon.service in a worker thread: what is above a
ceiling is evicted at once.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

from tierkv.daemon.namespaces import Namespace
from tierkv.daemon.page_class import PageClass
from tierkv.daemon.settings import DaemonConfig, QuotaRule
from tierkv.storage.errors import ConfigError
from tierkv.storage.quota import Quota
from tierkv.storage.types import TierName

log = logging.getLogger(__name__)


def apply_rules(config: DaemonConfig, pages: PageClass, known: Iterable[Namespace]) -> None:
    """Bound what these namespaces, all of one page class, may use. O(namespaces)."""
    groups: dict[str, tuple[QuotaRule, list[int]]] = {}
    for each in known:
        rule = config.rule_for(each.digest, each.tenant)
        if rule is None:
            continue
        pages.store.set_ttl(each.owner, rule.ttl_s)
        if rule.tenant is None:
            _try(f"namespace {each.digest.hex()[:16]}", pages, each.owner, None, rule)
        else:
            groups.setdefault(rule.tenant, (rule, []))[1].append(each.owner)
    for tenant, (rule, owners) in groups.items():
        _try(f"tenant {tenant}", pages, tenant, owners, rule)


def _try(
    whose: str, pages: PageClass, target: int | str, owners: list[int] | None, rule: QuotaRule
) -> None:
    try:
        if isinstance(target, int):
            pages.store.set_quota(target, _quota(pages, rule))
        else:
            pages.store.set_group_quota(target, owners or [], _quota(pages, rule))
    except ConfigError as error:
        # The operator must act, but the client that greets cannot: it is served without.
        log.error("quota of %s is not in force: %s", whose, error)


def _quota(pages: PageClass, rule: QuotaRule) -> Quota:
    floors = {TierName.HOST: rule.host_floor_bytes, TierName.NVME: rule.nvme_floor_bytes}
    ceilings = {TierName.HOST: rule.host_ceiling_bytes, TierName.NVME: rule.nvme_ceiling_bytes}
    there = {tier.name for tier in pages.store.stats().tiers}
    return Quota(
        floor_bytes={tier: size for tier, size in floors.items() if size and tier in there},
        ceiling_bytes={
            tier: size for tier, size in ceilings.items() if size is not None and tier in there
        },
    )
