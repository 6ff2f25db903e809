"""How operator commands reach a running daemon: its unix socket, and HTTP for admin calls.

Owns finding the daemon (the same configuration as `tierkv serve` reads) and one blocking
connection. Knows no page and maps no memory. Every call has a deadline; a daemon that is away or
refuses is one error, never an empty answer. Called by top, ls, drop, drain, explain and stat.
"""

from __future__ import annotations

import json
import os
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from tierkv.cli.daemon_settings import given_flags
from tierkv.config.sources import read_layers
from tierkv.storage.clock import SystemClock
from tierkv.storage.closing import Closing
from tierkv.storage.errors import ConfigError, RequestError, TierIOError

if TYPE_CHECKING:
    from tierkv.client.handshake import Session
    from tierkv.protocol.frames import Frame
    from tierkv.protocol.messages import Verb

STATUS_PATH = "/status"
TIMEOUT_S = 10.0
ANSWER_BYTES_MAX = 64 << 20
CLIENT_NAME = "tierkv operator"
_RECEIVE_BYTES = 1 << 16

SocketOption = Annotated[
    Path | None,
    typer.Option("--socket", help="The daemon's unix socket. Default: from the configuration."),
]

Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where one daemon is."""

    socket: Path
    url: str | None
    """None: its HTTP is off or its port is not fixed."""
    token: str | None
    by_socket: bool = False
    """The socket was named on the command line: `url` may then be another daemon's."""


def endpoint(config: Path | None, socket: Path | None) -> Endpoint:
    """The daemon that the configuration describes; `socket` wins over its socket.

    Raises ConfigError for a mistake in the file or the environment. Sizes are not compared with
    the machine: looking at a daemon needs no room.
    """
    flags = {} if socket is None else {"daemon.socket": str(socket)}
    layers = read_layers(
        config, os.environ, given_flags({}, [f"{k}={v}" for k, v in flags.items()])
    )
    if layers.mistakes:
        raise ConfigError(str(layers.mistakes[0]))
    values = {name: value.parsed for name, value in layers.values.items()}
    bind, port = values["http.bind"], values["http.port"]
    address = f"[{bind}]" if bind is not None and ":" in bind else bind
    url = None if bind is None or port == 0 else f"http://{address}:{port}"
    return Endpoint(values["daemon.socket"], url, values["http.token"], socket is not None)


class DaemonSocket(Closing):
    """One greeted connection. A context manager; blocking; one request at a time.

    `page_bytes` 0 asks for no page class: figures, namespaces, drop and flush only. With another
    value lookups are possible; no memory is mapped.
    """

    def __init__(self, path: Path, page_bytes: int = 0) -> None:
        """Connect. Raises TierIOError when nobody answers there, ConfigError when it refuses us."""
        from tierkv.client.handshake import Greeting, greet
        from tierkv.protocol.messages import PROTOCOL_VERSION, Mode
        from tierkv.protocol.requests import Hello

        self._path = path
        self._next_id = 1
        self._clock = SystemClock()
        hello = Hello(
            version=PROTOCOL_VERSION,
            client=CLIENT_NAME,
            page_bytes=page_bytes,
            fingerprint="",
            mode=Mode.STREAM.value,
            tenant="",
        )
        try:
            self._session: Session = greet(Greeting(path, hello, TIMEOUT_S), self._clock)
        except OSError as error:
            raise TierIOError(
                f"connect to {path}: {error.strerror or error}; is tierkv serve running there?"
            ) from error

    @property
    def boot_token(self) -> bytes:
        """Which start of which daemon this is."""
        return self._session.boot_token

    @property
    def keys_max(self) -> int:
        """Keys that one lookup may have."""
        return self._session.limits.keys

    def close(self) -> None:
        """End the connection. Idempotent."""
        self._session.sock.close()

    def ask(
        self,
        verb: Verb,
        fields: Mapping[str, object],
        kind: type[Answer],
        timeout_s: float = TIMEOUT_S,
    ) -> Answer:
        """Send one request, wait for its answer. Raises RequestError for a refusal."""
        from tierkv.protocol.answers import parse_answer
        from tierkv.protocol.errors import ProtocolError
        from tierkv.protocol.frames import encode_request

        number = self._next_id
        self._next_id += 1
        deadline = self._clock.monotonic() + timeout_s
        try:
            self._session.sock.settimeout(timeout_s)
            self._session.sock.sendall(encode_request(number, verb, fields))
            frame = self._receive(number, deadline)
            if frame.name:
                message = str(frame.fields.get("message", "")).split("\n")[0][:300]
                raise RequestError(f"{verb.value}: the daemon refused: {message or frame.name}")
            return parse_answer(kind, frame.fields, self._session.limits)
        except OSError as error:
            raise TierIOError(
                f"{verb.value} {self._path}: {error.strerror or error}; is the daemon alive?"
            ) from error
        except ProtocolError as error:
            raise TierIOError(
                f"{verb.value} {self._path}: the answer makes no sense ({error}); "
                "install the same TierKV on both sides"
            ) from error

    def _receive(self, number: int, deadline: float) -> Frame:
        while True:
            left_s = deadline - self._clock.monotonic()
            if left_s <= 0:
                raise TimeoutError(110, "no answer in time")
            self._session.sock.settimeout(left_s)
            data = self._session.sock.recv(_RECEIVE_BYTES)
            if not data:
                raise ConnectionResetError(104, "the daemon closed the connection")
            for frame in self._session.reader.feed(data):
                if frame.request_id == number:
                    return frame

    # What operators ask for

    def stats(self) -> dict[str, Any]:
        """The daemon in figures, as GET /status gives them."""
        from tierkv.protocol.answers import StatsAnswer
        from tierkv.protocol.messages import Verb

        return self.ask(Verb.STATS, {}, StatsAnswer).stats

    def namespaces(self) -> list[dict[str, Any]]:
        """One row a namespace: namespace (bytes), tenant, fingerprint, pages and bytes per tier."""
        from tierkv.protocol.answers import NamespacesAnswer
        from tierkv.protocol.messages import Verb

        return self.ask(Verb.NAMESPACES, {}, NamespacesAnswer).namespaces

    def drop(self, digest: bytes) -> int:
        """Remove every page of a namespace; how many there were."""
        from tierkv.protocol.answers import DropAnswer
        from tierkv.protocol.messages import Verb

        return self.ask(Verb.DROP, {"namespace": digest, "keys": b""}, DropAnswer, 60.0).dropped

    def flush(self, wait_s: float) -> bool:
        """Make what is only in host memory durable; False when `wait_s` was too short."""
        from tierkv.protocol.answers import FlushAnswer
        from tierkv.protocol.messages import Verb

        wait_s = min(wait_s, self._session.limits.wait_ms / 1000)
        fields = {"wait_ms": round(wait_s * 1000)}
        return self.ask(Verb.FLUSH, fields, FlushAnswer, wait_s + TIMEOUT_S).durable

    def lookup(self, keys: Sequence[bytes]) -> list[str | None]:
        """The fastest tier that holds each key, by name. No side effects."""
        from tierkv.protocol.answers import LookupAnswer
        from tierkv.protocol.messages import TIER_CODES, Verb

        names = {code: None if tier is None else tier.value for tier, code in TIER_CODES.items()}
        found: list[str | None] = []
        for start in range(0, len(keys), self.keys_max):
            part = b"".join(keys[start : start + self.keys_max])
            tiers = self.ask(Verb.LOOKUP, {"keys": part}, LookupAnswer).tiers
            found += [names.get(code) for code in tiers]
        return found


def http_json(
    where: Endpoint,
    path: str,
    body: Mapping[str, object] | None = None,
    timeout_s: float = TIMEOUT_S,
) -> Any:
    """The JSON of GET `path`, or of POST with a body; None for 404.

    Raises ConfigError when HTTP or its token is missing, RequestError when the daemon refuses,
    TierIOError when nobody answers.
    """
    if where.url is None:
        raise ConfigError(f"{path}: needs the daemon's HTTP; set http.bind and a fixed http.port")
    headers = {"Content-Type": "application/json"}
    if where.token is not None:
        headers["Authorization"] = f"Bearer {where.token}"
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(where.url + path, data, headers)
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as response:
            return json.loads(response.read(ANSWER_BYTES_MAX))
    except urllib.error.HTTPError as error:
        if error.code == 404:
            return None
        if error.code in (401, 403):
            hint = "set http.token or TIERKV_HTTP_TOKEN to the same value for both"
            raise ConfigError(f"{where.url}{path}: admin call refused; {hint}") from None
        raise RequestError(
            f"{where.url}{path}: status {error.code}; see the daemon's log"
        ) from None
    except ValueError as error:
        raise ConfigError(f"{where.url}{path}: {error}; is this a TierKV daemon?") from None
    except OSError as error:
        reason = error.reason if isinstance(error, urllib.error.URLError) else error
        raise TierIOError(f"{where.url}{path}: {reason}; is tierkv serve running?") from None
