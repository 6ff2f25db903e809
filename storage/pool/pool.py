"""Pool: this node's part in a pool of nodes.

Owns the transport, the membership, this node's epoch, a link a member, and the store's end
(PoolRemote) of each page size. Puts them together: who is who (serving.Directory), what a link has
to know and tell (link.LinkOwner), what a store's end sees around it (remote.Surroundings). Moves
no bytes. Called by the daemon; attach() gives TieredStore.attach_remote() its remote.

    event                                    consequence
    a member greets, or answers a greeting   its life is compared with the roster; a new one voids
                                             the leases that the old one held here
    a peer knows this node's later epoch     a later epoch is taken and made durable, then everybody
                                             is greeted anew; at most once in FENCE_S, then rarer
    a member falls silent, comes, leaves     its queued pulls and copies go elsewhere; rebalancing
    the list of members changes              links are made and closed

Invariants: nothing is said before the epoch is durable; a member has one link; what a store gives
is unregistered before the store is let go. Lock order: the pool's lock is held for O(members) and
no call to the outside.
"""

from __future__ import annotations

import logging
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tierkv.storage.clock import Clock
from tierkv.storage.errors import ConfigError, TierKVError
from tierkv.storage.pool.config import Address, PoolConfig
from tierkv.storage.pool.epoch import Epoch
from tierkv.storage.pool.link import Link
from tierkv.storage.pool.members import Membership, open_membership
from tierkv.storage.pool.messages import ADDRESS_BYTES_MAX, Hello, Refusal, Status
from tierkv.storage.pool.notices import REPEAT_S, Notices, two_nodes
from tierkv.storage.pool.opening import open_transport
from tierkv.storage.pool.remote import PoolRemote
from tierkv.storage.pool.roster import TWIN_S, Roster, Standing
from tierkv.storage.pool.serving import PoolServer, Served
from tierkv.storage.pool.status import (
    class_row,
    lease_row,
    member_row,
    server_row,
    settings_row,
)
from tierkv.storage.transport.base import Peer, PeerIdentity, Transport

FENCE_S = 1.0
FENCE_S_MAX = 60.0
"""Between two epochs taken because a peer knew a later one: two nodes of one name would go above
each other for ever, and end the leases of each other's readers each time. It doubles while they
do, and falls back after ten times as long without."""
READER_S = 1.0
UNLISTED_S = 5.0
"""For so long a member that nobody lists here may be one whose link is only being made."""
UNLISTED_MAX = 64

OpenClass = Callable[[int, float], bool]
"""(page size, seconds) -> whether this node has a store of that size now, attached here."""

log = logging.getLogger(__name__)


class Pool:
    """See the module docstring. Thread-safe; start() once."""

    def __init__(
        self,
        config: PoolConfig,
        transport: Transport,
        membership: Membership,
        epoch: Epoch,
        clock: Clock,
        open_class: OpenClass | None = None,
        declined: Mapping[str, str] | None = None,
    ) -> None:
        """Takes over `transport` and `membership`. `transport` allows at least as many message
        connections as opening.MESSAGE_CONNECTIONS. `declined`: transports that cannot be had here,
        and why, for status()."""
        config.validate()
        self.own_name = config.own_name
        self.transport = transport
        self._config = config
        self._membership = membership
        self._epoch = epoch
        self._clock = clock
        self._open_class = open_class
        self._declined = dict(declined or {})
        self._roster = Roster(self.own_name, clock)
        self._notices = Notices(clock)
        self._unlisted: dict[str, str] = {}
        """Who offered copies and is in no list here, and what was said of it. Under `_lock`."""
        self._server = PoolServer(self, config, clock)
        self._lock = threading.Lock()
        self._links: dict[Address, Link] = {}
        self._all_links: tuple[Link, ...] = ()
        self._remotes: dict[int, PoolRemote] = {}
        self._served: dict[int, Served] = {}
        self._seen: dict[Link, tuple[object, ...]] = {}
        self._opening = threading.Lock()
        self._met = threading.Condition()
        """Told when a link has changed."""
        self._fencing = threading.Lock()
        self._fence_again = clock.monotonic()
        self._fence_pause_s = FENCE_S
        self._fences = 0
        self._restarts = 0
        self._own_address = config.own_address
        self._leaving = False
        self._started = False
        self._closing = threading.Event()
        self._keeper = threading.Thread(target=self._keep, name="tierkv-pool", daemon=True)

    # --- life -----------------------------------------------------------------------------

    def start(self) -> Address:
        """Serve, and begin to connect to the members; returns the address that was taken.

        ConfigError when the address cannot be used.
        """
        listen = self._config.listen
        if self._config.name is None and listen.port == 0:
            raise ConfigError(f"pool: listen {listen} takes any port; then the member needs a name")
        host, port = self.transport.listen(listen.host, listen.port, self._server.handle)
        self._own_address = self._config.advertise or Address(listen.host, port)
        self._started = True
        self._membership.start(self._members_changed, lambda epoch: self.fenced(epoch, "the list"))
        self._membership.join(self._own_address, self.own_name, self.own_epoch)
        self._members_changed()
        self._keeper.start()
        log.info("pool member=%s listen=%s:%d epoch=%d", self.own_name, host, port, self.own_epoch)
        return Address(host, port)

    def attach(self, page_bytes: int) -> PoolRemote:
        """The remote tier of one page size, unbound. ConfigError when that size has one."""
        with self._lock:
            self._assert_free(page_bytes)
        return PoolRemote(page_bytes, self, self._config, self._clock)

    def drain(self, timeout_s: float) -> bool:
        """Leave: take nothing more in, and have what is in host and nowhere else copied to other
        members, hottest first. False when not all of it was acknowledged in time."""
        self._leaving = True
        deadline = self._clock.monotonic() + timeout_s
        done = True
        for remote in list(self._remotes.values()):
            done &= remote.drain(max(0.0, deadline - self._clock.monotonic()))
        return done

    def close(self, timeout_s: float) -> bool:
        """Leave and let everything go; False when something may still reach into a store's arena,
        which must stay then. Idempotent: a later call waits again."""
        deadline = self._clock.monotonic() + timeout_s

        def left_s() -> float:
            return max(0.0, deadline - self._clock.monotonic())

        self._closing.set()
        if self._started:
            self._membership.leave()
        self._membership.close()
        with self._lock:
            links = list(self._all_links)
        ended = _close_links(links, left_s)
        closed = True
        for remote in list(self._remotes.values()):
            closed &= remote.close(left_s())
        # Of memory that can be read still, what is leased stays leased.
        ended &= closed and self._server.close(left_s())
        if self._keeper.ident is not None:
            self._keeper.join(left_s())
        try:
            self.transport.close()
        except TierKVError as error:
            log.error("close pool: transport error=%s", error)
            return False
        return ended

    # --- who is who: Directory ------------------------------------------------------------

    @property
    def own_epoch(self) -> int:
        """This node's epoch now."""
        return self._epoch.value

    @property
    def leaving(self) -> bool:
        """Whether this node takes nothing more in."""
        return self._leaving or self._closing.is_set()

    def page_sizes(self) -> tuple[int, ...]:
        """Page sizes that this node has stores for."""
        with self._lock:
            return tuple(self._served)

    def hello(self) -> Hello:
        """What this node says of itself."""
        address = str(self._own_address).encode()[:ADDRESS_BYTES_MAX].decode("utf-8", "ignore")
        return Hello(
            self.own_name, self.own_epoch, self.page_sizes(), self.leaving, address=address
        )

    def greeted(self, identity: PeerIdentity, hello: Hello) -> Hello | Refusal:
        """See Directory."""
        standing = self._judge(identity, hello)
        if standing is Standing.FENCED:
            if (twins := self._twins(hello)) is not None:
                self._notices.tell(twins, lasts_s=TWIN_S)
            known = self._roster.epoch_of(hello.name)
            return Refusal(Status.FENCED, known, self._roster.address_of(hello.name))
        if standing not in (Standing.KNOWN, Standing.NEW_LIFE):
            reason = self._reason(standing, hello)
            self._notices.tell(reason, lasts_s=TWIN_S)
            return Refusal(Status.REFUSED, text=reason)
        for link in self.links():
            if link.name == hello.name and link.epoch != hello.epoch:
                link.greet_again()
            elif not link.live:
                # It runs: our own tries to connect need not wait for their pause to end.
                link.hurry()
        return self.hello()

    def member_of(self, identity: PeerIdentity) -> tuple[str, int] | None:
        """See Directory."""
        return self._roster.member_of(identity.boot_token)

    def unlisted(self, name: str) -> str | None:
        """See Directory."""
        if not self._is_unlisted(name):
            return None
        where = "pool.members" if self._membership.name == "static" else self._membership.name
        text = (
            f"{name} at {self._roster.address_of(name) or 'an unknown address'} is not in the "
            f"members of {self.own_name}, which takes no copies from it; add it to {where} of "
            f"{self.own_name}"
        )
        with self._lock:
            if len(self._unlisted) < UNLISTED_MAX:
                self._unlisted[name] = text
        self._notices.tell(text, lasts_s=TWIN_S)
        return text

    def reader(self, name: str) -> Peer | None:
        """See Directory. Waits READER_S at most for a link that is being made: a member that just
        found this node offers pages before this node has found it."""
        peer = self._reader_now(name)
        made = [link for link in self.links() if link.name in (None, name) and not link.live]
        if peer is not None or not made:
            return peer
        for link in made:
            link.hurry()
        with self._met:
            self._met.wait_for(
                lambda: self._closing.is_set() or self._reader_now(name) is not None, READER_S
            )
        return self._reader_now(name)

    def open_class(self, page_bytes: int, timeout_s: float) -> Served | None:
        """See Directory."""
        served = self._served.get(page_bytes)
        opener = self._open_class
        if served is not None or opener is None or self.leaving or self._config.host_share == 0:
            return served
        deadline = self._clock.monotonic() + timeout_s
        if not self._opening.acquire(timeout=max(0.0, timeout_s)):
            return None
        try:
            left_s = deadline - self._clock.monotonic()
            if page_bytes not in self._served and left_s > 0:
                opener(page_bytes, left_s)
        finally:
            self._opening.release()
        return self._served.get(page_bytes)

    # --- for links: LinkOwner -------------------------------------------------------------

    def met(self, link: Link, identity: PeerIdentity, hello: Hello) -> str | None:
        """See LinkOwner."""
        for other in self.links():
            if other is not link and other.name == hello.name and other.live:
                return f"it is the member {hello.name} of {other.address}; list each member once"
        standing = self._judge(identity, hello)
        if standing in (Standing.KNOWN, Standing.NEW_LIFE):
            return None
        reason = self._reason(standing, hello)
        if standing is Standing.OWN_NAME or reason == self._twins(hello):
            self._notices.tell(reason, lasts_s=TWIN_S)
        return reason

    def told(self, text: str) -> bool:
        """See LinkOwner and Directory."""
        return self._notices.told(text)

    def refused_by(self, link: Link, text: str) -> None:
        """See LinkOwner."""
        self._notices.tell(text, f"member={self.own_name} is refused by {link.lane}: {text}")

    def fenced(self, epoch: int, told_by: str, address: str = "") -> None:
        """See LinkOwner."""
        with self._fencing:
            now = self._clock.monotonic()
            if epoch < self.own_epoch or now < self._fence_again:
                return
            if now - self._fence_again > 10 * self._fence_pause_s:
                self._fence_pause_s = FENCE_S
            self._fence_again = now + self._fence_pause_s
            self._fence_pause_s = min(2 * self._fence_pause_s, FENCE_S_MAX)
            before = self.own_epoch
            try:
                after = self._epoch.raise_above(epoch)
            except ConfigError as error:
                log.error("pool member=%s epoch=%d fenced: %s", self.own_name, before, error)
                return
            self._fences += 1
        own = str(self._own_address)
        if address not in ("", own):
            # Nobody says here when the other one is gone: it is shown as long as it is told.
            self._notices.tell(two_nodes(self.own_name, own, address), lasts_s=REPEAT_S)
        else:
            # Two nodes of one name go above each other for ever: the epochs are no news then.
            line = (
                f"member={self.own_name}: {told_by} knows epoch {epoch} of this name, this node "
                f"was at {before}: its state was lost or set back, or another node has the same "
                f"name; joining again with epoch {after}"
            )
            self._notices.tell("a later epoch of this name", line)
        if self._started:
            self._membership.join(self._own_address, self.own_name, after)
        for link in self.links():
            link.greet_again()
            link.hurry()

    def link_changed(self, link: Link) -> None:
        """See LinkOwner."""
        with self._met:
            self._met.notify_all()
        self._look_at(link)

    # --- for stores: Surroundings ---------------------------------------------------------

    def links(self) -> tuple[Link, ...]:
        """One a member, live or not. O(1)."""
        return self._all_links

    def serve(self, served: Served, remote: PoolRemote) -> None:
        """See Surroundings."""
        with self._lock:
            self._assert_free(served.page_bytes)
            self._server.add(served)
            self._served[served.page_bytes] = served
            self._remotes[served.page_bytes] = remote
        for link in self.links():
            # What the peer holds of this size is to be heard now, not with the next heartbeat.
            link.hurry()

    def unserve(self, page_bytes: int, timeout_s: float) -> bool:
        """See Surroundings."""
        with self._lock:
            self._served.pop(page_bytes, None)
        if not self._server.remove(page_bytes, timeout_s):
            return False
        with self._lock:
            self._remotes.pop(page_bytes, None)
        return True

    def problem(self) -> str | None:
        """See Surroundings."""
        links = self.links()
        if not links or any(link.askable for link in links):
            return self._membership.problem()
        worst = links[0]
        return (
            f"none of {len(links)} members can be asked; {worst.address}: "
            f"{worst.problem or worst.last_error or worst.state.value}"
        )

    # --- as a whole -----------------------------------------------------------------------

    def status(self) -> dict[str, Any]:
        """The pool as this node sees it, for people. O(members + leases)."""
        serving = self._server.stats()
        return {
            "name": self.own_name,
            "address": str(self._own_address),
            "epoch": self.own_epoch,
            "fences": self._fences,
            "leaving": self._leaving,
            "membership": self._membership.name,
            "problem": "; ".join(self._problems()) or None,
            "settings": settings_row(self._config),
            "declined": dict(self._declined),
            "leases": lease_row(serving),
            "serving": server_row(serving),
            "members": [member_row(link) for link in self.links()],
            "classes": [class_row(remote) for remote in list(self._remotes.values())],
            "restarts": self._restarts,
        }

    def check(self) -> None:
        """Assert the invariants of every part. O(pages known + journals)."""
        self._roster.check()
        self._notices.check()
        self._epoch.check()
        self._server.check()
        self.transport.check()
        links = self.links()
        assert len({link.lane for link in links}) == len(links), "two links to one address"
        for link in links:
            link.check()
        for remote in list(self._remotes.values()):
            remote.check()

    # --- inside ---------------------------------------------------------------------------

    def _reader_now(self, name: str) -> Peer | None:
        for link in self.links():
            # A member that moved has a link at its former address too, with nobody behind it.
            if link.name == name and (session := link.session()) is not None:
                return session.peer
        return None

    def _assert_free(self, page_bytes: int) -> None:
        if self._closing.is_set():
            raise ConfigError(f"pool: closing, pages of {page_bytes} bytes come too late")
        if page_bytes in self._remotes:
            raise ConfigError(
                f"pool: pages of {page_bytes} bytes have a store already; close that first"
            )

    def _judge(self, identity: PeerIdentity, hello: Hello) -> Standing:
        standing = self._roster.greet(hello.name, hello.epoch, identity.boot_token, hello.address)
        if standing is Standing.NEW_LIFE:
            # What its former life leased may still be read by nobody, or by its network card.
            self._server.drop_member(hello.name)
        return standing

    def _reason(self, standing: Standing, hello: Hello) -> str:
        if standing is Standing.OWN_NAME:
            return two_nodes(hello.name, str(self._own_address), hello.address)
        if standing is Standing.TOO_MANY:
            return f"{hello.name} is one member too many; make several pools"
        # Without the epochs: a text that is always new is told without end.
        return self._twins(hello) or (
            f"{hello.name} came back with an earlier epoch; it hears of it and takes a later one"
        )

    def _twins(self, hello: Hello) -> str | None:
        """That two nodes have this name; None when none but one was heard lately."""
        other = self._roster.twin_of(hello.name)
        if other is None:
            return None
        return two_nodes(hello.name, self._roster.address_of(hello.name), other)

    def _problems(self) -> list[str]:
        """What is wrong now with who belongs to the pool, one line each."""
        listed = self._membership.problem()
        return ([] if listed is None else [listed]) + self._notices.lasting()

    def _is_unlisted(self, name: str) -> bool:
        """Whether a member that is heard has no link, nor one that may turn out to be its own."""
        greeted_s = self._roster.greeted_s(name)
        address = self._roster.address_of(name)
        links = self.links()
        if greeted_s is None or any(name == each.name or address == each.lane for each in links):
            return False
        return greeted_s > UNLISTED_S or all(each.name is not None for each in links)

    def _look_at_unlisted(self) -> None:
        """Go on telling of those that nobody lists here, while they are there."""
        with self._lock:
            unlisted = list(self._unlisted.items())
        for name, text in unlisted:
            if self._is_unlisted(name):
                self._notices.tell(text, lasts_s=TWIN_S)
                continue
            self._notices.over(text)
            with self._lock:
                self._unlisted.pop(name, None)

    def _members_changed(self) -> None:
        """Make and close links so that there is one a member. From any thread."""
        wanted = set(self._membership.members())
        with self._lock:
            if self._closing.is_set():
                return
            gone = [self._links.pop(address) for address in self._links.keys() - wanted]
            new = [
                Link(address, self, self.transport, self._config, self._clock)
                for address in sorted(wanted - self._links.keys(), key=str)
            ]
            self._links.update({link.address: link for link in new})
            self._all_links = tuple(self._links.values())
            remotes = list(self._remotes.values())
        for link in new:
            link.start()
        for link in gone:
            log.info("pool member=%s address=%s is no member any more", link.name, link.address)
            link.close()
            for remote in remotes:
                remote.link_closed(link)
            if link.name is not None and not self._speaks(link.name):
                self._server.drop_member(link.name)

    def _speaks(self, name: str) -> bool:
        """Whether a member is live, at whatever address."""
        return any(link.name == name and link.live for link in self.links())

    def _keep(self) -> None:
        """Life of the keeper: what comes with time and not with an event."""
        while not self._closing.wait(self._config.heartbeat_s):
            try:
                self._server.expire()
                self._look_at_unlisted()
                for link in self.links():
                    self._look_at(link)
            except Exception:  # noqa: BLE001
                # The one supervisor: a bug met once must not end the upkeep (lesson H2).
                log.error("pool keeper: %s", traceback.format_exc())
                self._restarts += 1

    def _look_at(self, link: Link) -> None:
        """Tell the stores' ends when something about a member has changed."""
        now = (link.askable, link.takes_copies, link.live, link.leaving, link.epoch)
        with self._lock:
            before, self._seen[link] = self._seen.get(link, ()), now
            for gone in self._seen.keys() - set(self._all_links):
                del self._seen[gone]
            remotes = list(self._remotes.values())
        if before != now:
            for remote in remotes:
                remote.link_changed(link, members=before[2:] != now[2:])


def _close_links(links: Sequence[Link], left_s: Callable[[], float]) -> bool:
    """Close all at once: a connection to a member that does not answer takes its time to end."""
    closers: list[threading.Thread] = []
    for link in links:
        closer = threading.Thread(
            target=link.close, args=(left_s(),), name=f"tierkv-closing-{link.lane}", daemon=True
        )
        try:
            closer.start()
        except RuntimeError:
            # The system gives no more threads.
            link.close(left_s())
        else:
            closers.append(closer)
    for closer in closers:
        closer.join(left_s())
    stopped = [link.close(0.0) for link in links]
    return all(stopped) and not any(closer.is_alive() for closer in closers)


def open_pool(
    config: PoolConfig,
    epoch_path: Path | None,
    clock: Clock,
    open_class: OpenClass | None = None,
) -> Pool:
    """A pool over the transports that `config` names, not started yet.

    `epoch_path`: where this node's epoch is kept; None: nowhere. ConfigError for what cannot work;
    a faster transport that is not installed is no error.
    """
    config.validate()
    epoch = Epoch(epoch_path, clock)
    membership = open_membership(config, clock)
    transport, declined = open_transport(config, clock)
    return Pool(config, transport, membership, epoch, clock, open_class, declined)
