"""A wake-up for a thread that polls descriptors.

Owns one eventfd, closed when the last holder lets go, so that nobody kicks a descriptor that is
another file by now. Called by links and the supervisor.
"""

from __future__ import annotations

import os
import select
import weakref


class Kick:
    """Thread-safe. Any number of kicks before a rest() count as one."""

    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        weakref.finalize(self, os.close, self._fd)

    def fileno(self) -> int:
        """For poll: readable while kicked."""
        return self._fd

    def kick(self) -> None:
        """Wake the thread that rests, or is about to."""
        try:
            os.eventfd_write(self._fd, 1)
        except BlockingIOError:
            # The counter is full: it has been kicked more than often enough.
            return

    def clear(self) -> None:
        """Forget the kicks so far."""
        try:
            os.eventfd_read(self._fd)
        except BlockingIOError:
            # It was not kicked.
            return

    def rest(self, timeout_s: float) -> bool:
        """Wait for a kick at most `timeout_s`; True when there was one, which is then forgotten."""
        poll = select.poll()
        poll.register(self._fd, select.POLLIN)
        if not poll.poll(max(0.0, timeout_s) * 1000):
            return False
        self.clear()
        return True
