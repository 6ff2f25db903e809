"""hello: from a connection to a session.

No state of its own. Checks who asks (peer), what for (fingerprint, page size, mode) and gives it a
session and the arena. Called by tierkv.daemon.connection, once a connection.
"""

from __future__ import annotations

from typing import Any

from tierkv.daemon.namespaces import Namespace
from tierkv.daemon.page_class import PageClass
from tierkv.daemon.peers import Peer
from tierkv.daemon.service import Service
from tierkv.daemon.session import Session
from tierkv.protocol.answers import HelloAnswer, to_fields
from tierkv.protocol.errors import ProtocolError
from tierkv.protocol.messages import PROTOCOL_VERSION, Mode, WireCode
from tierkv.protocol.requests import Hello
from tierkv.storage.errors import ConfigError
from tierkv.storage.identity import from_json


async def greet(service: Service, peer: Peer, hello: Hello) -> Session:
    """The session that `hello` asks for. It is not in service.sessions yet.

    Raises ProtocolError for what the client may not, ConfigError and its kinds for what cannot
    be: a page size without room, a fingerprint that is none.
    """
    mode = Mode(hello.mode)
    if hello.page_bytes == 0:
        return _session(service, peer, hello, mode, None, None)
    if mode is Mode.SHARED and not peer.known:
        # Without its end in sight, slots it reserved could never be trusted again.
        raise ProtocolError(
            WireCode.ORDER,
            "hello: this process cannot be watched from here (another pid namespace?), so it "
            "cannot share memory; use mode stream",
        )
    fingerprint = from_json(hello.fingerprint) if hello.fingerprint else None
    pages = await service.classes.open(hello.page_bytes)
    known: Namespace | None = None
    if fingerprint is not None:
        tenant = hello.tenant or fingerprint.tenant
        known = await service.register(pages, fingerprint, tenant)
    return _session(service, peer, hello, mode, known, pages)


def answer_fields(service: Service, session: Session) -> dict[str, Any]:
    """What the client is told."""
    shared = session.mode is Mode.SHARED and session.page_class is not None
    arena = session.page_class.arena if shared and session.page_class is not None else None
    return to_fields(
        HelloAnswer(
            version=PROTOCOL_VERSION,
            boot_token=service.boot_token,
            session=session.number,
            namespace=b"" if session.namespace is None else session.namespace.digest,
            arena=None if arena is None else to_fields(arena),
            limits=to_fields(session.limits),
        )
    )


def arena_fd(session: Session) -> int | None:
    """The descriptor that goes with the answer, borrowed; None when there is none."""
    if session.mode is not Mode.SHARED or session.page_class is None:
        return None
    try:
        return session.page_class.store.arena_fd()
    except ConfigError as error:
        raise AssertionError("a daemon's arena is a file") from error


def _session(
    service: Service,
    peer: Peer,
    hello: Hello,
    mode: Mode,
    known: Namespace | None,
    pages: PageClass | None,
) -> Session:
    return Session(
        peer,
        mode,
        known,
        pages,
        service.config.limits,
        service.timer,
        service.quarantine,
        hello.client,
    )
