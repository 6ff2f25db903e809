"""Memory by its address: what NIXL is given, and whether this process may read a peer's.

Owns the ctypes and numpy calls that turn buffers into addresses. Called by nixl.py and
nixl_driver.py. Whoever takes an address keeps the buffer for as long as it is used.
"""

from __future__ import annotations

import ctypes
import os

from tierkv.storage.errors import TierIOError


class _Run(ctypes.Structure):
    """struct iovec."""

    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


def read_process(pid: int, address: int, length: int) -> bytes:
    """Bytes of another process of this machine, as UCX's cma would read them.

    TierIOError, one line with the system's reason, when that is not allowed or there is nothing.
    """
    target = ctypes.create_string_buffer(length)
    local = _Run(ctypes.addressof(target), length)
    remote = _Run(address, length)
    library = ctypes.CDLL(None, use_errno=True)
    got = library.process_vm_readv(
        ctypes.c_int(pid),
        ctypes.byref(local),
        ctypes.c_ulong(1),
        ctypes.byref(remote),
        ctypes.c_ulong(1),
        ctypes.c_ulong(0),
    )
    if got != length:
        reason = os.strerror(ctypes.get_errno()) if got < 0 else f"{got} of {length} bytes"
        raise TierIOError(
            f"read memory of process {pid}: {reason}; run both as one user, with ptrace allowed "
            "between them (kernel.yama.ptrace_scope, container capabilities)"
        )
    return target.raw
