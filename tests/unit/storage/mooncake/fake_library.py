"""The Mooncake library in this process: a dict of values, real addresses, every trouble on order.

A Cluster is what several FakeLibraries share. Codes are those that the real library was seen to
return (docs/formats/mooncake.md). What is not called through the client crashes in the real one:
here a call after close() asserts.
"""

from __future__ import annotations

import ctypes
import threading
from collections import Counter
from collections.abc import Callable, Sequence

WAIT_S = 30.0
NOT_FOUND = -704
LEASED = -706
NO_ROOM = -200
TOO_SMALL = -600
TRANSFER_FAILED = -800
MASTER_GONE = -900


class Cluster:
    """Values by key, and what is wrong with the cluster."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.values: dict[str, bytes] = {}
        self.leased: set[str] = set()
        self.broken: set[str] = set()
        """Keys whose transfer fails half way: their node died."""
        self.room = 1 << 30
        """Values that still fit."""
        self.master_lives = True

    def flip(self, key: str, offset: int) -> None:
        with self.lock:
            value = bytearray(self.values[key])
            value[offset] ^= 0x10
            self.values[key] = bytes(value)


class FakeLibrary:
    """One client's view of a Cluster. `gate` holds every get and put while it is closed."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.calls: Counter[str] = Counter()
        self.threads: set[str] = set()
        """Names of the threads that called."""
        self.registered: dict[int, int] = {}
        self.raising: list[Exception] = []
        """What the next calls of get, put and exist raise."""
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()
        self.on_get: Callable[[], None] = lambda: None
        self.closed = False

    def setup(self, *args: object) -> int:
        return 0

    def register_buffer(self, buffer_ptr: int, size: int) -> int:
        self._enter("register")
        if buffer_ptr in self.registered:
            return TOO_SMALL
        self.registered[buffer_ptr] = size
        return 0

    def unregister_buffer(self, buffer_ptr: int) -> int:
        self._enter("unregister")
        return 0 if self.registered.pop(buffer_ptr, None) is not None else TOO_SMALL

    def batch_put_from_multi_buffers(
        self,
        keys: Sequence[str],
        all_buffer_ptrs: Sequence[Sequence[int]],
        all_sizes: Sequence[Sequence[int]],
        config: object,
    ) -> list[int]:
        self._enter("put")
        self._pass_gate()
        codes = []
        for key, addresses, sizes in zip(keys, all_buffer_ptrs, all_sizes, strict=True):
            pairs = zip(addresses, sizes, strict=True)
            value = b"".join(ctypes.string_at(address, size) for address, size in pairs)
            with self.cluster.lock:
                codes.append(self._put(key, value))
        return codes

    def batch_get_into_multi_buffers(
        self,
        keys: Sequence[str],
        all_buffer_ptrs: Sequence[Sequence[int]],
        all_sizes: Sequence[Sequence[int]],
    ) -> list[int]:
        self._enter("get")
        self._pass_gate()
        self.on_get()
        triples = zip(keys, all_buffer_ptrs, all_sizes, strict=True)
        return [self._get(key, addresses, sizes) for key, addresses, sizes in triples]

    def batch_is_exist(self, keys: Sequence[str]) -> list[int]:
        self._enter("exist")
        with self.cluster.lock:
            if not self.cluster.master_lives:
                return [MASTER_GONE] * len(keys)
            return [int(key in self.cluster.values) for key in keys]

    def get_size(self, key: str) -> int:
        self._enter("size")
        with self.cluster.lock:
            if not self.cluster.master_lives:
                return MASTER_GONE
            value = self.cluster.values.get(key)
            return NOT_FOUND if value is None else len(value)

    def remove(self, key: str, force: bool = False) -> int:
        self._enter("remove")
        with self.cluster.lock:
            if not self.cluster.master_lives:
                return MASTER_GONE
            if key in self.cluster.leased and not force:
                return LEASED
            return 0 if self.cluster.values.pop(key, None) is not None else NOT_FOUND

    def close(self) -> int:
        self._enter("close")
        self.closed = True
        return 0

    def _enter(self, name: str) -> None:
        assert not self.closed, "the library crashes when it is called after close()"
        self.calls[name] += 1
        self.threads.add(threading.current_thread().name)
        if self.raising and name in ("get", "put", "exist"):
            raise self.raising.pop(0)

    def _pass_gate(self) -> None:
        self.entered.set()
        assert self.gate.wait(WAIT_S), "a test left the library shut"

    def _put(self, key: str, value: bytes) -> int:
        cluster = self.cluster
        if not cluster.master_lives:
            return MASTER_GONE
        if key in cluster.values:
            return 0
        if cluster.room < 1:
            return NO_ROOM
        cluster.room -= 1
        cluster.values[key] = value
        return 0

    def _get(self, key: str, addresses: Sequence[int], sizes: Sequence[int]) -> int:
        with self.cluster.lock:
            if not self.cluster.master_lives:
                return MASTER_GONE
            value = self.cluster.values.get(key)
            broken = key in self.cluster.broken
        if value is None:
            return NOT_FOUND
        if len(value) != sum(sizes):
            return TOO_SMALL if len(value) > sum(sizes) else TRANSFER_FAILED
        if broken:
            value = value[: len(value) // 3]
        start = 0
        for address, size in zip(addresses, sizes, strict=True):
            piece = value[start : start + size]
            ctypes.memmove(address, piece, len(piece))
            start += size
        return TRANSFER_FAILED if broken else sum(sizes)
