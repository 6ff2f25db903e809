"""One node of a pool for tests of serving: a real store and transport, and a directory in memory.

The directory believes what the test says: who greeted, which epoch is known of a name, through
which connection a member is read.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.support.pages import page_content
from tierkv.storage.clock import Clock, SystemClock
from tierkv.storage.pool.config import Address, PoolConfig
from tierkv.storage.pool.holdings import Holdings
from tierkv.storage.pool.messages import (
    AnyRequest,
    Hello,
    OfferedPage,
    Refusal,
    read_answer,
    write_request,
)
from tierkv.storage.pool.serving import PoolServer, Served
from tierkv.storage.store import TieredStore
from tierkv.storage.tiers.host import HostTier
from tierkv.storage.transport.base import Peer, PeerIdentity
from tierkv.storage.transport.tcp import TcpTransport
from tierkv.storage.types import PageKey

POOL_KEY = bytes(range(32))
PAGE_BYTES = 20_000
WAIT_S = 20.0


class PoolNode:
    """A store, its transport and its server; and the Directory of that server."""

    def __init__(
        self,
        name: str,
        epoch: int,
        pages: int = 8,
        *,
        clock: Clock | None = None,
        store: TieredStore | None = None,
        **config: Any,
    ) -> None:
        self.own_name, self.own_epoch, self.leaving = name, epoch, False
        host = HostTier(None, PAGE_BYTES, HostTier.capacity_for(PAGE_BYTES, pages))
        self.store = TieredStore(host) if store is None else store
        self.transport = TcpTransport(POOL_KEY)
        self.generation = self.transport.register(self.store.arena_memory())
        members = (Address("127.0.0.1", 1),)
        self.config = PoolConfig(Address("127.0.0.1", 0), members, key=POOL_KEY, **config)
        self.server = PoolServer(self, self.config, clock or SystemClock())
        self.holdings = Holdings(self.store)
        self.served = Served(PAGE_BYTES, self.store, self.generation, self.holdings)
        self.server.add(self.served)
        self.host, self.port = self.transport.listen("127.0.0.1", 0, self.server.handle)
        self.known: dict[bytes, tuple[str, int]] = {}
        self.peers: dict[str, Peer] = {}
        self.on_open: Callable[[int], Served | None] = lambda _: None
        self.on_reader: Callable[[], None] = lambda: None

    # --- Directory ----------------------------------------------------------------------------

    def page_sizes(self) -> list[int]:
        return [PAGE_BYTES]

    def greeted(self, identity: PeerIdentity, hello: Hello) -> Hello | Refusal:
        self.known[identity.boot_token] = (hello.name, hello.epoch)
        return Hello(self.own_name, self.own_epoch, (PAGE_BYTES,), self.leaving)

    def member_of(self, identity: PeerIdentity) -> tuple[str, int] | None:
        return self.known.get(identity.boot_token)

    def told(self, text: str) -> bool:
        return False

    def unlisted(self, name: str) -> str | None:
        return None

    def reader(self, name: str) -> Peer | None:
        self.on_reader()
        return self.peers.get(name)

    def open_class(self, page_bytes: int, timeout_s: float) -> Served | None:
        assert timeout_s > 0
        return self.on_open(page_bytes)

    # --- for the test -------------------------------------------------------------------------

    def meet(self, other: PoolNode) -> None:
        """Connect both ways and greet."""
        for here, there in ((self, other), (other, self)):
            here.peers[there.own_name] = here.transport.connect(there.host, there.port, WAIT_S)
            answer = here.ask(there, Hello(here.own_name, here.own_epoch, (PAGE_BYTES,)), 0)
            assert isinstance(answer, Hello) and answer.name == there.own_name

    def ask(
        self,
        other: PoolNode,
        request: AnyRequest,
        peer_epoch: int | None = None,
        own_epoch: int | None = None,
    ) -> Any:
        """The answer of `other`, which must come from its present life and mean this one's."""
        mine = self.own_epoch if own_epoch is None else own_epoch
        theirs = other.own_epoch if peer_epoch is None else peer_epoch
        message = write_request(request, mine, theirs)
        payload = self.peers[other.own_name].message(message, WAIT_S)
        envelope, answer = read_answer(payload, request)
        assert (envelope.sender_epoch, envelope.receiver_epoch) == (other.own_epoch, mine)
        other.server.check()
        return answer

    def offer(self, *keys: PageKey) -> tuple[OfferedPage, ...]:
        """Where these pages lie here, and their checksums."""
        with self.store.fetch(keys, 0).take(0) as lease:
            assert lease.keys == list(keys)
            offsets = map(self.store.payload_offset, lease.slots)
            return tuple(map(OfferedPage, keys, offsets, lease.checksums))

    def holds(self, key: PageKey) -> bool:
        """Whether the page is here; wrong bytes are an assertion."""
        with self.store.fetch([key], 0).take(0) as lease:
            assert all(bytes(view) == page_content(key, PAGE_BYTES) for view in lease.views)
            return bool(lease.keys)

    def flip(self, offset: int) -> None:
        """Flip a bit of the arena behind everybody's back."""
        with self.store.arena_memory() as memory:
            memory[offset] ^= 1

    def close(self) -> None:
        """End everything; nothing may be held."""
        self.server.check()
        self.transport.close()
        self.transport.check()
        assert self.server.close(WAIT_S)
        self.server.check()
        host = self.store.stats().tiers[0]
        assert (host.leased_pages, host.reserved_pages) == (0, 0), host
        self.store.check()
        self.store.close()
