"""Batches of keys looked up on another node: the lookup part of `tierkv bench remote`.

Owns one child process, a node with a store whose pages the other process asks for by LOOKUP, one
batch after the other over one TcpTransport. The node's own server answers; only who is a member is
settled beforehand, by a directory that knows one.

    python -m tierkv.bench.remote_lookup KEY        is the child
"""

from __future__ import annotations

import secrets
import sys
import time
from collections.abc import Sequence

from tierkv.bench.child import HOST, Child, say_ready
from tierkv.bench.filled import numbered_keys
from tierkv.storage.clock import SystemClock
from tierkv.storage.pool.config import Address, PoolConfig
from tierkv.storage.pool.holdings import Holdings
from tierkv.storage.pool.messages import (
    Hello,
    Lookup,
    LookupAnswer,
    Refusal,
    read_answer,
    write_request,
)
from tierkv.storage.pool.serving import PoolServer, Served
from tierkv.storage.store import TieredStore
from tierkv.storage.tiers.host import HostTier
from tierkv.storage.transport.base import Peer, PeerIdentity
from tierkv.storage.transport.tcp import TcpTransport

WAIT_S = 30.0
PAGE_BYTES = 4096
PAGES = 8192
KEYS = 32
"""Of one batch: half of them are there."""
BATCHES = 256
OWN_EPOCH, NODE_EPOCH = 7, 9


def lookup_batches_per_s(seconds: float) -> float:
    """LOOKUPs of 32 keys between two processes, one at a time, for about `seconds`; per second.

    Every answer is compared with what the node holds.
    """
    key = secrets.token_bytes(32)
    with Child("tierkv.bench.remote_lookup", key.hex()) as child, TcpTransport(key) as transport:
        peer = transport.connect(HOST, int(child.words[0]), WAIT_S)
        _ask(peer, Hello("asker", OWN_EPOCH, ()), 0)
        batches = [_batch(number) for number in range(BATCHES)]
        expected = LookupAnswer((True, False) * (KEYS // 2))
        done = 0
        started = time.monotonic()
        while (taken := time.monotonic() - started) < seconds or not done:
            for batch in batches:
                assert _ask(peer, batch, NODE_EPOCH) == expected, "a look-up was answered wrong"
            done += BATCHES
        return done / taken


def _batch(number: int) -> Lookup:
    """Keys of which every other one is there, spread over the node's pages."""
    first = number * 31 % (PAGES - KEYS)
    here, absent = numbered_keys(first, KEYS // 2), numbered_keys(PAGES + first, KEYS // 2)
    pairs = zip(here, absent, strict=True)
    return Lookup(PAGE_BYTES, tuple(key for pair in pairs for key in pair))


def _ask(peer: Peer, request: Hello | Lookup, peer_epoch: int) -> object:
    payload = peer.message(write_request(request, OWN_EPOCH, peer_epoch), WAIT_S)
    return read_answer(payload, request)[1]


class _OneMember:
    """A Directory that knows whoever greeted last."""

    own_epoch = NODE_EPOCH
    leaving = False

    def page_sizes(self) -> Sequence[int]:
        return [PAGE_BYTES]

    def greeted(self, identity: PeerIdentity, hello: Hello) -> Hello | Refusal:
        self._member = (identity, hello)
        return Hello("node", NODE_EPOCH, (PAGE_BYTES,))

    def member_of(self, identity: PeerIdentity) -> tuple[str, int] | None:
        known, hello = self._member
        return (hello.name, hello.epoch) if known == identity else None

    def told(self, text: str) -> bool:
        return False

    def unlisted(self, name: str) -> str | None:
        return None

    def reader(self, name: str) -> Peer | None:
        return None

    def open_class(self, page_bytes: int, timeout_s: float) -> Served | None:
        return None


def _serve(key: bytes) -> int:
    capacity = HostTier.capacity_for(PAGE_BYTES, PAGES)
    store = TieredStore(HostTier(None, PAGE_BYTES, capacity))
    with store.reserve(PAGES) as held:
        held.commit(numbered_keys(0, len(held.views)))
    config = PoolConfig(Address(HOST, 0), (Address(HOST, 1),), key=key)
    server = PoolServer(_OneMember(), config, SystemClock())
    with TcpTransport(key) as transport:
        generation = transport.register(store.arena_memory())
        server.add(Served(PAGE_BYTES, store, generation, Holdings(store)))
        _, port = transport.listen(HOST, 0, server.handle)
        say_ready(port)
        sys.stdin.read()
    server.close(WAIT_S)
    store.close()
    return 0


if __name__ == "__main__":
    sys.exit(_serve(bytes.fromhex(sys.argv[1])))
