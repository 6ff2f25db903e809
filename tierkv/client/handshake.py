"""Connects to a daemon and says hello, blocking, with a deadline.

Owns the socket until it is handed over in a Session. Sorts what can go wrong: ConfigError is a
mistake somebody must correct (another protocol version, another user, other pages), OSError means
that the daemon is not there now. Called by the clients, at start and when they reconnect.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tierkv.client.mapping import ArenaMapping
from tierkv.protocol.answers import (
    HelloAnswer,
    parse_answer,
    parse_arena,
    parse_limits,
    to_fields,
)
from tierkv.protocol.errors import ProtocolError
from tierkv.protocol.frames import Frame, FrameReader, answer_bounds, encode_request
from tierkv.protocol.messages import PROTOCOL_VERSION, Limits, Mode, Verb, WireCode
from tierkv.protocol.requests import Hello
from tierkv.storage.clock import Clock
from tierkv.storage.errors import ConfigError

HELLO_ID = 0
"""Request id of the hello; links count from 1."""
PATH_BYTES_MAX = 107
RECEIVE_BYTES = 1 << 16
FDS_MAX = 4
ADDRESS_PREFIX = "unix:"

_PASSING = (WireCode.CLOSING, WireCode.LIMIT, WireCode.INTERNAL, WireCode.FRAME)
"""Refusals of a hello that may not be repeated: the daemon stops, or is full."""


@dataclass(slots=True)
class Session:
    """One connection after its hello."""

    sock: socket.socket
    reader: FrameReader
    limits: Limits
    boot_token: bytes
    session: int
    namespace: bytes
    mapping: ArenaMapping | None
    """None in stream mode and for operators."""


@dataclass(frozen=True, slots=True)
class Greeting:
    """What a client says of itself, and where."""

    path: Path
    hello: Hello
    timeout_s: float


def socket_path(address: str) -> Path:
    """The path in "unix:/path". Raises ConfigError."""
    path = address.removeprefix(ADDRESS_PREFIX)
    if not address.startswith(ADDRESS_PREFIX) or not path:
        raise ConfigError(
            f"daemon address: expected unix:/path/to/socket, got {address!r}; "
            "name the socket that tierkv serve listens on"
        )
    return check_path(Path(path))


def check_path(path: Path) -> Path:
    """The path, if a socket can have it. Raises ConfigError."""
    if len(os.fsencode(path)) > PATH_BYTES_MAX:
        raise ConfigError(
            f"daemon address: a socket's path has at most {PATH_BYTES_MAX} bytes, got {path}; "
            "choose a shorter one"
        )
    return path


def greet(
    greeting: Greeting, clock: Clock, known: ArenaMapping | None = None, populate: bool = True
) -> Session:
    """Connect and say hello. `known`: a mapping to use again when the daemon has the same arena.

    Raises ConfigError or OSError, see above; nothing is left open then.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    fds: list[int] = []
    try:
        deadline = clock.monotonic() + greeting.timeout_s
        _connect(sock, greeting)
        reader = FrameReader(answer_bounds(Limits()))
        sock.sendall(encode_request(HELLO_ID, Verb.HELLO, to_fields(greeting.hello)))
        frame = _receive(sock, reader, fds, lambda: deadline - clock.monotonic())
        return _session(greeting, sock, reader, frame, fds, known, populate)
    except ProtocolError as error:
        sock.close()
        raise ConfigError(
            f"connect to {greeting.path}: whoever listens there is no daemon of this version "
            f"({error}); check the path"
        ) from error
    except BaseException:
        sock.close()
        raise
    finally:
        for fd in fds:
            os.close(fd)


def _connect(sock: socket.socket, greeting: Greeting) -> None:
    sock.settimeout(greeting.timeout_s)
    try:
        sock.connect(os.fspath(greeting.path))
    except PermissionError as error:
        raise ConfigError(
            f"connect to {greeting.path}: permission denied for uid {os.getuid()}; "
            "run as the daemon's user or join the socket's group"
        ) from error


def _receive(
    sock: socket.socket, reader: FrameReader, fds: list[int], left_s: Callable[[], float]
) -> Frame:
    """The first frame; descriptors that came along are appended to `fds`."""
    while True:
        left = left_s()
        if left <= 0:
            raise TimeoutError("no answer to hello")
        sock.settimeout(left)
        data, came, _, _ = socket.recv_fds(sock, RECEIVE_BYTES, FDS_MAX, socket.MSG_CMSG_CLOEXEC)
        fds += came
        if not data:
            raise ConnectionResetError("the daemon closed the connection before its hello")
        for frame in reader.feed(data):
            return frame


def _session(
    greeting: Greeting,
    sock: socket.socket,
    reader: FrameReader,
    frame: Frame,
    fds: list[int],
    known: ArenaMapping | None,
    populate: bool,
) -> Session:
    path, hello = greeting.path, greeting.hello
    if frame.name:
        message = str(frame.fields.get("message", frame.name)).splitlines() or [frame.name]
        if frame.name in _PASSING:
            raise ConnectionRefusedError(f"the daemon refused: {message[0][:300]}")
        raise ConfigError(f"connect to {path}: {message[0][:300]} ({frame.name[:32]})")
    answer = parse_answer(HelloAnswer, frame.fields, Limits())
    if frame.request_id != HELLO_ID or answer.version != PROTOCOL_VERSION:
        raise ConfigError(
            f"connect to {path}: the daemon speaks protocol version {answer.version}, this client "
            f"{PROTOCOL_VERSION}; install the same TierKV on both sides"
        )
    limits = parse_limits(answer.limits)
    reader.bounds = answer_bounds(limits)
    if hello.mode == Mode.STREAM:
        reader.bounds = reader.bounds.with_payload(hello.page_bytes)
    mapping = None
    if hello.mode == Mode.SHARED and hello.page_bytes:
        mapping = _map(greeting, answer, fds, known, populate)
    return Session(
        sock, reader, limits, answer.boot_token, answer.session, answer.namespace, mapping
    )


def _map(
    greeting: Greeting,
    answer: HelloAnswer,
    fds: list[int],
    known: ArenaMapping | None,
    populate: bool,
) -> ArenaMapping:
    if answer.arena is None or len(fds) != 1:
        raise ConfigError(
            f"connect to {greeting.path}: the daemon shared no memory; use mode stream"
        )
    arena = parse_arena(answer.arena)
    if arena.page_bytes != greeting.hello.page_bytes:
        raise ConfigError(
            f"connect to {greeting.path}: the daemon's pages have {arena.page_bytes} bytes, this "
            f"client's {greeting.hello.page_bytes}; use the same model and page size"
        )
    found = os.fstat(fds[0])
    if known is not None and (found.st_dev, found.st_ino) == known.file and known.arena == arena:
        return known
    mapping = ArenaMapping(fds[0], arena)
    if populate:
        mapping.populate()
    return mapping
