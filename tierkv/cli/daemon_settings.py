"""From a configuration to what the daemon takes, and the options that name a configuration.

Owns the mapping of configuration keys to DaemonConfig's fields, and the flags made from the schema.
Imports nothing of the daemon at module level. Called by `tierkv serve` and `tierkv config`, and by
every command that asks a running daemon where it is.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from tierkv.config import schema
from tierkv.config.loading import Loaded, load
from tierkv.config.sources import flag_of
from tierkv.storage.errors import ConfigError

if TYPE_CHECKING:
    from tierkv.config.schema import QuotaSection, Settings
    from tierkv.daemon.settings import DaemonConfig, QuotaRule
    from tierkv.storage.mooncake.config import MooncakeConfig
    from tierkv.storage.pool.config import PoolConfig

ConfigOption = Annotated[
    Path | None,
    typer.Option(
        "--config", envvar="TIERKV_CONFIG", help="YAML file. Default: none, built-in values."
    ),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="Any key, as host.size=20GiB or quotas.0.ttl=1d."
    ),
]


def with_key_flags(command: Callable[..., int]) -> Callable[..., int]:
    """Give a command that takes **flags one option per configuration key, read as text."""
    hints = get_type_hints(command, include_extras=True)
    parameters = [
        parameter.replace(annotation=hints[name])
        for name, parameter in inspect.signature(command).parameters.items()
        if parameter.kind is not inspect.Parameter.VAR_KEYWORD
    ]
    del hints["flags"]
    for name, key in schema.all_keys():
        option = typer.Option(
            flag_of(name), metavar=key.kind.metavar, help=key.help, show_default=False
        )
        parameter_name = name.replace(".", "__")
        hint = Annotated[str | None, option]
        hints[parameter_name] = hint
        parameters.append(
            inspect.Parameter(
                parameter_name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=hint
            )
        )
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = hints
    return command


def given_flags(flags: dict[str, Any], assignments: Iterable[str]) -> dict[str, str]:
    """What was given on the command line, by dotted key; an own flag wins over --set.

    Raises ConfigError for a --set that is no KEY=VALUE.
    """
    given: dict[str, str] = {}
    for assignment in assignments:
        name, sign, text = assignment.partition("=")
        if not sign or not name.strip():
            raise ConfigError(f"--set: expected KEY=VALUE as host.size=20GiB, got {assignment!r}")
        given[name.strip()] = text
    for name, value in flags.items():
        if value is not None:
            given[name.replace("__", ".")] = value
    return given


def load_configuration(
    config: Path | None, assignments: Iterable[str] | None, flags: dict[str, Any] | None = None
) -> Loaded:
    """File, this process's environment and flags. Raises ConfigError only for a bad --set."""
    return load(config, os.environ, given_flags(flags or {}, assignments or ()))


def daemon_config(settings: Settings) -> DaemonConfig:
    """What the daemon takes. Raises ConfigError and its kinds as DaemonConfig.validate does."""
    from tierkv.daemon.settings import DaemonConfig, VerifyCommit, VerifyLease

    daemon, host, nvme = settings.daemon, settings.host, settings.nvme
    movement, limits, http = settings.movement, settings.limits, settings.http
    config = DaemonConfig(
        socket_path=daemon.socket,
        socket_mode=daemon.socket_mode,
        socket_group=daemon.socket_group,
        allowed_uids=daemon.users,
        workers=daemon.workers,
        stop_s=daemon.stop,
        arena_directory=host.directory,
        host_bytes=host.size,
        host_class_bytes=host.class_size,
        huge_pages=host.huge_pages,
        cache_root=nvme.directory,
        nvme_bytes=nvme.size,
        nvme_class_bytes=nvme.class_size,
        nvme_min_free_bytes=nvme.min_free,
        write_policy=movement.write_policy,
        selective_hits=movement.selective_hits,
        admission=movement.admission,
        checksums=movement.checksums,
        verify_commit=VerifyCommit(movement.verify_commit),
        verify_commit_every=movement.verify_commit_every,
        verify_lease=VerifyLease(movement.verify_lease),
        write_budget_bytes_per_day=movement.write_budget,
        scrub_bytes_per_s=movement.scrub,
        preload_fraction=movement.preload,
        limits=_limits(settings),
        clients_max=limits.clients,
        namespaces_max=limits.namespaces,
        classes_max=limits.classes,
        http_host=http.bind,
        http_port=http.port,
        http_token=http.token,
        pool=_pool(settings),
        pool_key_file=settings.pool.key_file,
        mooncake=_mooncake(settings),
        mooncake_lookup_s=settings.mooncake.lookup_wait,
        log_level=settings.log.level,
        quotas=tuple(_rule(rule) for rule in settings.quotas),
    )
    config.validate()
    return config


def check_remote(config: DaemonConfig) -> None:
    """Raise ConfigError when the remote tier could not be opened with its settings and key."""
    from tierkv.daemon.remote_tier import pool_settings

    if config.pool is not None:
        pool_settings(config.pool, config.pool_key_file)
    if config.mooncake is not None:
        config.mooncake.validate()


def _limits(settings: Settings) -> Any:
    from tierkv.protocol.messages import Limits

    limits = settings.limits
    return Limits(
        frame_bytes=limits.frame,
        keys=limits.keys,
        leases=limits.leases,
        leased_pages=limits.leased_pages,
        reservations=limits.reservations,
        reserved_pages=limits.reserved_pages,
        in_flight=limits.in_flight,
        ids=limits.ids,
        hold_ms=round(limits.hold * 1000),
        wait_ms=round(limits.wait * 1000),
    )


def _pool(settings: Settings) -> PoolConfig | None:
    from tierkv.storage.pool.config import PoolConfig

    pool = settings.pool
    if pool.listen is None:
        return None
    return PoolConfig(
        listen=pool.listen,
        members=pool.members or (),
        name=pool.name,
        advertise=pool.advertise,
        any_interface=pool.any_interface,
        open_pool=pool.open_pool,
        tls_certificate=pool.tls_certificate,
        tls_key=pool.tls_key,
        tls_authority=pool.tls_authority,
        etcd=None if pool.etcd is None else str(pool.etcd),
        etcd_prefix=pool.etcd_prefix,
        transports=pool.transports,
        replicas=pool.replicas,
        hot_replicas=pool.hot_replicas,
        copy_after=pool.copy_after,
        hot_after=pool.hot_after,
        host_share=pool.host_share,
        nvme_share=pool.nvme_share,
        heartbeat_s=pool.heartbeat,
        suspect_s=pool.suspect,
        connect_s=pool.connect,
        lease_s=pool.lease,
        transfer_s=pool.transfer,
        store_s=pool.store,
        batch_pages=pool.batch_pages,
        pull_pages=pool.pull_pages,
        push_pages=pool.push_pages,
        rebalance_bytes_per_s=pool.rebalance,
        breaker_failures=pool.breaker_failures,
        breaker_open_s=pool.breaker_open,
    )


def _mooncake(settings: Settings) -> MooncakeConfig | None:
    from tierkv.storage.mooncake.config import MooncakeConfig

    mooncake = settings.mooncake
    if mooncake.master is None:
        return None
    return MooncakeConfig(
        master=str(mooncake.master),
        address=mooncake.address,
        metadata=mooncake.metadata,
        protocol=mooncake.protocol,
        device=mooncake.device or "",
        segment_bytes=mooncake.segment,
        register_arena=mooncake.register_arena,
        replicas=mooncake.replicas,
        copy_after=mooncake.copy_after,
        connect_s=mooncake.connect,
        call_s=mooncake.call,
        known_s=mooncake.known,
        absent_s=mooncake.absent,
        batch_pages=mooncake.batch_pages,
        pull_pages=mooncake.pull_pages,
        push_pages=mooncake.push_pages,
        breaker_failures=mooncake.breaker_failures,
        breaker_open_s=mooncake.breaker_open,
    )


def _rule(rule: QuotaSection) -> QuotaRule:
    from tierkv.daemon.settings import QuotaRule

    return QuotaRule(
        namespace=rule.namespace,
        tenant=rule.tenant,
        host_floor_bytes=rule.host_floor,
        host_ceiling_bytes=rule.host_ceiling,
        nvme_floor_bytes=rule.nvme_floor,
        nvme_ceiling_bytes=rule.nvme_ceiling,
        ttl_s=rule.ttl,
    )
