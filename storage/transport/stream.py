"""A connected socket whose every transfer is whole, and ends at a deadline.

Owns one socket. Knows nothing of frames. Two kinds with one interface: PlainStream leaves waiting
to the kernel (SO_RCVTIMEO, SO_SNDTIMEO, MSG_WAITALL), so that a page is one system call without
the GIL; TlsStream goes through ssl. Invariants: a transfer moves every byte or raises
TierIOError, after which the stream is of no use; one thread sends and receives, any thread may
interrupt(). Called by framing.py, tcp_peer.py, tcp_reads.py, tcp_server.py and handshake.py.
"""

from __future__ import annotations

import select
import socket
import ssl
import struct
from abc import ABC, abstractmethod
from collections.abc import Sequence

from tierkv.storage.clock import Clock
from tierkv.storage.errors import TierIOError
from tierkv.storage.types import Buffer

_TIMEVAL = struct.Struct("@ll")
IOV_MAX = 512
"""Buffers of one sendmsg; Linux takes 1024."""
SEND_STEP_BYTES = 8 << 20
"""Bytes of one system call at most. A timeout is per step."""
TIMEOUT_S_MIN = 0.001
"""Zero would mean for ever."""


class Stream(ABC):
    """What both kinds do. Timeouts are seconds of `clock`, deadlines its readings."""

    sends_now = False
    """Whether send_now() is there."""

    def __init__(self, sock: socket.socket, clock: Clock) -> None:
        self._sock = sock
        self._clock = clock
        self._poll = select.poll()
        self._poll.register(sock.fileno(), select.POLLIN)

    @abstractmethod
    def shake_hands(self, deadline: float) -> None:
        """Before anything is moved. TierIOError when that fails or `deadline` passes."""

    @abstractmethod
    def fill(self, view: memoryview, deadline: float, got: int = 0) -> int:
        """Fill `view`, of which `got` bytes are there; how many then are. Fewer than it has only
        when the peer closed.

        TierIOError when the connection fails or `deadline` passes.
        """

    @abstractmethod
    def receive_some(self, view: memoryview, deadline: float, *, ready: bool = False) -> int:
        """Receive what is there, one byte at least and `view` at most; 0 when the peer closed.

        `ready`: wait_readable() has just said so. TierIOError when the connection fails or
        `deadline` passes.
        """

    @abstractmethod
    def send(self, buffers: Sequence[Buffer], step_s: float, deadline: float | None = None) -> None:
        """Send all buffers in order, in place.

        TierIOError when the peer takes nothing for `step_s`, when `deadline` passes, or on error.
        """

    def send_now(self, data: bytes) -> bool:
        """Send without waiting, where `sends_now`. False when not all was sent: the stream is of
        no use then. TierIOError on error."""
        raise TierIOError("send to peer: this kind of connection may have to wait")

    def receive(self, view: memoryview, deadline: float) -> None:
        """Fill `view`. TierIOError when the peer closes, fails, or `deadline` passes."""
        if not self.receive_or_end(view, deadline):
            raise TierIOError("receive from peer: it closed the connection")

    def receive_or_end(self, view: memoryview, deadline: float) -> bool:
        """As receive(), but False when the peer closed before the first byte."""
        got = self.fill(view, deadline)
        if 0 < got < view.nbytes:
            raise TierIOError(f"receive from peer: closed after {got} of {view.nbytes} bytes")
        return got > 0

    def receive_bytes(self, length: int, deadline: float) -> bytearray:
        """So many bytes in new memory; the caller has checked the length."""
        data = bytearray(length)
        if length:
            with memoryview(data) as view:
                self.receive(view, deadline)
        return data

    def wait_readable(self, timeout_s: float) -> bool:
        """Wait for a first byte, or the end of the stream; False past the timeout."""
        if self._sock.fileno() < 0:
            raise TierIOError("wait for peer: the connection was closed on this side")
        try:
            return bool(self._poll.poll(max(0.0, timeout_s) * 1000))
        except OSError as error:
            raise TierIOError(f"wait for peer: {_reason(error)}") from error

    def interrupt(self) -> None:
        """Make transfers under way in other threads, and all later ones, fail at once."""
        try:
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            # Never connected or closed already: nothing can be waiting on it.
            return

    def close(self) -> None:
        """Let the socket go. By the thread that uses it. Idempotent."""
        # The peer is told, even where a forked child has the descriptor too.
        self.interrupt()
        self._sock.close()

    def _left(self, deadline: float, what: str, done: int = 0, length: int = 0) -> float:
        left = deadline - self._clock.monotonic()
        if left <= 0:
            after = f" after {done} of {length} bytes" if length else ""
            raise TierIOError(f"{what} peer: deadline passed{after}")
        return max(left, TIMEOUT_S_MIN)


class PlainStream(Stream):
    """TCP without TLS."""

    sends_now = True

    def __init__(self, sock: socket.socket, clock: Clock) -> None:
        super().__init__(sock, clock)
        sock.settimeout(None)

    def shake_hands(self, deadline: float) -> None:
        """Nothing to agree on."""

    def fill(self, view: memoryview, deadline: float, got: int = 0) -> int:
        length = view.nbytes
        while got < length:
            self._limit(socket.SO_RCVTIMEO, self._left(deadline, "receive from", got, length))
            try:
                with view[got:] as rest:
                    count = self._sock.recv_into(rest, 0, socket.MSG_WAITALL)
            except BlockingIOError:
                raise TierIOError(
                    f"receive from peer: deadline passed after {got} of {length} bytes"
                ) from None
            except OSError as error:
                raise TierIOError(f"receive from peer: {_reason(error)}") from error
            if count == 0:
                break
            got += count
        return got

    def receive_some(self, view: memoryview, deadline: float, *, ready: bool = False) -> int:
        while True:
            if not ready and not self.wait_readable(self._left(deadline, "receive from")):
                raise TierIOError("receive from peer: deadline passed")
            try:
                return self._sock.recv_into(view, 0, socket.MSG_DONTWAIT)
            except BlockingIOError:
                # Readable a moment ago: what was there did not have its checksum.
                ready = False
            except OSError as error:
                raise TierIOError(f"receive from peer: {_reason(error)}") from error

    def send(self, buffers: Sequence[Buffer], step_s: float, deadline: float | None = None) -> None:
        queue = [memoryview(buffer).cast("B") for buffer in buffers if len(buffer)]
        first = 0
        # What there is room for needs no time limit, and mostly there is room for all.
        flags = socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT
        while first < len(queue):
            left_s = step_s if deadline is None else min(step_s, self._left(deadline, "send to"))
            if not flags & socket.MSG_DONTWAIT:
                self._limit(socket.SO_SNDTIMEO, left_s)
            try:
                sent = self._sock.sendmsg(_step(queue, first), (), flags)
            except BlockingIOError:
                if flags & socket.MSG_DONTWAIT:
                    flags = socket.MSG_NOSIGNAL
                    continue
                raise TierIOError(f"send to peer: it took nothing for {left_s:.3g} s") from None
            except OSError as error:
                raise TierIOError(f"send to peer: {_reason(error)}") from error
            flags = socket.MSG_NOSIGNAL
            while first < len(queue) and sent >= queue[first].nbytes:
                sent -= queue[first].nbytes
                first += 1
            if sent:
                queue[first] = queue[first][sent:]

    def send_now(self, data: bytes) -> bool:
        try:
            return self._sock.send(data, socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT) == len(data)
        except BlockingIOError:
            return False
        except OSError as error:
            raise TierIOError(f"send to peer: {_reason(error)}") from error

    def _limit(self, option: int, seconds: float) -> None:
        seconds = max(seconds, TIMEOUT_S_MIN)
        whole = int(seconds)
        try:
            self._sock.setsockopt(
                socket.SOL_SOCKET, option, _TIMEVAL.pack(whole, int((seconds - whole) * 1e6))
            )
        except OSError as error:
            raise TierIOError(f"use connection to peer: {_reason(error)}") from error


class TlsStream(Stream):
    """TCP with TLS. One copy more each way, by the cipher."""

    _sock: ssl.SSLSocket

    def shake_hands(self, deadline: float) -> None:
        try:
            self._sock.settimeout(self._left(deadline, "greet"))
            self._sock.do_handshake()
        except (OSError, ValueError) as error:
            raise TierIOError(f"connect peer: TLS handshake failed: {_reason(error)}") from error

    def fill(self, view: memoryview, deadline: float, got: int = 0) -> int:
        length = view.nbytes
        while got < length:
            with view[got:] as rest:
                count = self._some(rest, deadline, got, length)
            if count == 0:
                break
            got += count
        return got

    def receive_some(self, view: memoryview, deadline: float, *, ready: bool = False) -> int:
        return self._some(view, deadline)

    def _some(self, view: memoryview, deadline: float, done: int = 0, length: int = 0) -> int:
        try:
            self._sock.settimeout(self._left(deadline, "receive from", done, length))
            return self._sock.recv_into(view)
        except TimeoutError:
            after = f" after {done} of {length} bytes" if length else ""
            raise TierIOError(f"receive from peer: deadline passed{after}") from None
        except (OSError, ValueError) as error:
            raise TierIOError(f"receive from peer: {_reason(error)}") from error

    def send(self, buffers: Sequence[Buffer], step_s: float, deadline: float | None = None) -> None:
        for buffer in buffers:
            with memoryview(buffer).cast("B") as view:
                for start in range(0, view.nbytes, SEND_STEP_BYTES):
                    left_s = step_s
                    if deadline is not None:
                        left_s = min(step_s, self._left(deadline, "send to"))
                    try:
                        self._sock.settimeout(left_s)
                        with view[start : start + SEND_STEP_BYTES] as step:
                            self._sock.sendall(step)
                    except TimeoutError:
                        raise TierIOError(
                            f"send to peer: it did not take {SEND_STEP_BYTES} bytes "
                            f"in {left_s:.3g} s"
                        ) from None
                    except (OSError, ValueError) as error:
                        raise TierIOError(f"send to peer: {_reason(error)}") from error

    def wait_readable(self, timeout_s: float) -> bool:
        return self._sock.pending() > 0 or super().wait_readable(timeout_s)

    def interrupt(self) -> None:
        try:
            # Not SSLSocket.shutdown: that takes TLS off first, and a receive in another thread
            # would then be given ciphertext as if it were a page.
            socket.socket.shutdown(self._sock, socket.SHUT_RDWR)
        except OSError:
            # As above.
            return


def open_stream(
    sock: socket.socket,
    clock: Clock,
    tls: ssl.SSLContext | None,
    *,
    server_side: bool,
    hostname: str | None,
    deadline: float,
) -> Stream:
    """Take over a connected socket; with `tls`, after its handshake. Closes it when that fails."""
    stream = wrap(sock, clock, tls, server_side=server_side, hostname=hostname)
    try:
        stream.shake_hands(deadline)
    except TierIOError:
        stream.close()
        raise
    return stream


def wrap(
    sock: socket.socket,
    clock: Clock,
    tls: ssl.SSLContext | None,
    *,
    server_side: bool,
    hostname: str | None,
) -> Stream:
    """Take over a connected socket; with `tls`, shake_hands() is next. Never waits. Closes it when
    that fails."""
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if tls is None:
            return PlainStream(sock, clock)
        wrapped = tls.wrap_socket(
            sock,
            server_side=server_side,
            server_hostname=None if server_side else hostname,
            do_handshake_on_connect=False,
        )
    except (OSError, ValueError) as error:
        sock.close()
        raise TierIOError(f"connect peer: {_reason(error)}") from error
    return TlsStream(wrapped, clock)


def _step(queue: list[memoryview], first: int) -> list[memoryview]:
    """What the next sendmsg takes: at most SEND_STEP_BYTES in IOV_MAX buffers."""
    room = SEND_STEP_BYTES
    step: list[memoryview] = []
    for view in queue[first : first + IOV_MAX]:
        if view.nbytes >= room:
            step.append(view[:room])
            break
        step.append(view)
        room -= view.nbytes
    return step


def _reason(error: Exception) -> str:
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return " ".join(str(text).split())
