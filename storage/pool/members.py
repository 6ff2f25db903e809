"""Who belongs to the pool: the contract, and the static list.

Owns the contract Membership and StaticMembership. Knows neither connections nor who is alive: a
heartbeat says that (storage.pool.link). An address is only where to connect; a member is called
by the name that it says itself. Invariants: members() never holds this node and never waits; an
outage of whoever keeps the list leaves the last known list in force. Called by storage.pool.pool.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

from tierkv.storage.clock import Clock
from tierkv.storage.pool.config import Address, PoolConfig


class Membership(ABC):
    """All methods are thread-safe. Callbacks run in a thread of the membership, with no lock
    held; they may call every method but close()."""

    name: str
    """Which kind it is, for status: `static` or `etcd`."""

    @abstractmethod
    def start(
        self,
        on_change: Callable[[], None],
        on_later_epoch: Callable[[int], None] | None = None,
    ) -> None:
        """Begin to follow the list, once. Does not wait for it.

        `on_change` is called after members() changed. `on_later_epoch` is called with an epoch
        found under this node's own name that is not below its own: the node must take one above
        it and join() again.
        """

    @abstractmethod
    def members(self) -> tuple[Address, ...]:
        """Addresses of the others as last known, sorted; never this node. O(1)."""

    @abstractmethod
    def join(self, own: Address, name: str, epoch: int) -> None:
        """Announce this node; again after each new epoch. Does not wait: problem() says how it
        went."""

    @abstractmethod
    def leave(self) -> None:
        """Take the announcement back. Waits a bounded time; raises nothing: what could not be
        said ends by itself."""

    @abstractmethod
    def problem(self) -> str | None:
        """One line that says why the list may not be up to date now; None when it is."""

    @abstractmethod
    def close(self) -> None:
        """Stop following, without leave(). Idempotent; waits a bounded time."""


class StaticMembership(Membership):
    """The members that the configuration lists. They never change."""

    name = "static"

    def __init__(self, config: PoolConfig) -> None:
        own = (config.listen, config.own_address)
        others = {address for address in config.members if address not in own}
        self._members = tuple(sorted(others, key=lambda address: (address.host, address.port)))

    def start(
        self,
        on_change: Callable[[], None],
        on_later_epoch: Callable[[int], None] | None = None,
    ) -> None:
        """Nothing to follow."""

    def members(self) -> tuple[Address, ...]:
        return self._members

    def join(self, own: Address, name: str, epoch: int) -> None:
        """Nobody to tell: the others have a list of their own."""

    def leave(self) -> None:
        """Nobody to tell."""

    def problem(self) -> str | None:
        return None

    def close(self) -> None:
        """Nothing is held."""


def open_membership(config: PoolConfig, clock: Clock) -> Membership:
    """The kind that `config` asks for. ConfigError when its client is not installed."""
    if config.etcd is None:
        return StaticMembership(config)
    # Its client is an extra: only who configures etcd needs it.
    from tierkv.storage.pool.etcd import EtcdMembership

    return EtcdMembership(config, clock)
