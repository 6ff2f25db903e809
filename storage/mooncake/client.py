"""A client of a Mooncake Store: the library behind values of our own and one line of text.

Owns the library's store object and counts the calls in it. Knows no pages: keys are text, memory
is addresses. Every call may take as long as the library does; storage.mooncake.gate watches. The
codes of the library that matter (measured, docs/formats/mooncake.md):

    code          of          meaning
    0, length     put, get    done; a put of a key that is there changes nothing and says 0
    -703, -704    get, size   nobody has it, or not yet whole: a miss
    -200          put         no room
    -600, -800    get         longer or shorter than asked for, or the transfer failed
    -900, -901    all         the master is gone, or silent
    other         all         a failure

Invariants: nothing is called after close(), where the library would crash; close() waits for the
calls in the library. Called by storage.mooncake's workers.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from typing import NamedTuple

from tierkv.storage.errors import TierClosedError, TierIOError
from tierkv.storage.mooncake.config import MooncakeConfig
from tierkv.storage.mooncake.library import (
    StoreLibrary,
    assert_installed,
    new_store,
    replicate_config,
    set_up,
)
from tierkv.storage.mooncake.trial import assert_usable

NO_ROOM_CODE = -200
MISS_CODES = frozenset({-703, -704})
DOUBTFUL_CODES = frozenset({-600, -800})

log = logging.getLogger(__name__)


class Piece(NamedTuple):
    """A run of this process's memory, in bytes."""

    address: int
    length: int


class Answer(Enum):
    """What became of one key of a call."""

    DONE = "done"
    MISS = "miss"
    """Nobody has it. Of get, size, remove."""
    NO_ROOM = "no room"
    """Of put."""
    OTHER_LENGTH = "other length"
    """The value is not as long as was asked for; nothing was written. Of get."""
    FAILED = "failed"
    """Nothing is known. What was to be filled may be filled in part."""


class MooncakeClient:
    """Thread-safe. Wrap with open_client(), or with any StoreLibrary that is set up."""

    def __init__(self, library: StoreLibrary, replication: object) -> None:
        """`replication`: the library's own form of how a value is kept."""
        self._library = library
        self._replication = replication
        self._changed = threading.Condition()
        self._calls = 0
        self._closed = False
        self._left = False
        self._code: int | None = None

    @property
    def last_code(self) -> int | None:
        """The library's code of the last failure; None while there is none."""
        return self._code

    def put(self, keys: Sequence[str], values: Sequence[Sequence[Piece]]) -> list[Answer]:
        """Store each value, its pieces one after the other. DONE as well when the key is there,
        with whatever value. The memory is read until this returns."""
        with self._call():
            codes = self._library.batch_put_from_multi_buffers(
                list(keys), *_columns(values), self._replication
            )
        return [self._put_answer(code) for code in _complete(codes, len(keys), "put")]

    def get(self, keys: Sequence[str], targets: Sequence[Sequence[Piece]]) -> list[Answer]:
        """Bring each value into its pieces, which must be as long as the value together.

        The memory is written until this returns, and not after; it is filled only if DONE.
        """
        with self._call():
            codes = self._library.batch_get_into_multi_buffers(list(keys), *_columns(targets))
        answers: list[Answer] = []
        doubts = True
        for key, code, target in zip(
            keys, _complete(codes, len(keys), "get"), targets, strict=True
        ):
            length = sum(piece.length for piece in target)
            answer = _get_answer(code, length)
            if answer is Answer.FAILED:
                self._code = code
                if doubts and (code >= 0 or code in DOUBTFUL_CODES):
                    explained = self._explain(key, length)
                    # A master that says nothing takes seconds each time.
                    doubts = explained is not None
                    answer = explained or Answer.FAILED
            answers.append(answer)
        return answers

    def exist(self, keys: Sequence[str]) -> list[bool | None]:
        """Whether each key is there; None: not known. Renews the keys' leases at the master."""
        with self._call():
            codes = self._library.batch_is_exist(list(keys))
        found: list[bool | None] = []
        for code in _complete(codes, len(keys), "exist"):
            if code < 0:
                self._code = code
            found.append(None if code < 0 else code > 0)
        return found

    def remove(self, key: str) -> Answer:
        """Remove a key, even while somebody reads it: for values that are worth nothing."""
        with self._call():
            code = self._library.remove(key, True)
        return self._plain_answer(code)

    def register(self, memory: Piece) -> None:
        """Register memory until unregister(). Raises TierIOError when the library refuses."""
        with self._call():
            code = self._library.register_buffer(memory.address, memory.length)
        if code != 0:
            raise TierIOError(
                f"mooncake: register {memory.length} bytes: the library says {code}; leave "
                "mooncake.master out, or use protocol tcp"
            )

    def unregister(self, memory: Piece) -> None:
        """The opposite of register(). What the library refuses is logged."""
        with self._call():
            code = self._library.unregister_buffer(memory.address)
        if code != 0:
            log.warning("mooncake: unregister bytes=%d code=%d", memory.length, code)

    def close(self, timeout_s: float) -> bool:
        """Leave the store, once no call is in it; False past the timeout, and then it stays.

        Idempotent. The library holds the interpreter lock for about a second here.
        """
        with self._changed:
            self._closed = True
            if not self._changed.wait_for(lambda: self._calls == 0, max(0.0, timeout_s)):
                return False
            first, self._left = not self._left, True
        if first:
            self._library.close()
        return True

    def check(self) -> None:
        """Assert that calls are counted. O(1)."""
        with self._changed:
            assert self._calls >= 0, self._calls

    @contextmanager
    def _call(self) -> Iterator[None]:
        with self._changed:
            if self._closed:
                raise TierClosedError("mooncake: the client was closed; open another")
            self._calls += 1
        try:
            yield
        finally:
            with self._changed:
                self._calls -= 1
                self._changed.notify_all()

    def _put_answer(self, code: int) -> Answer:
        if code == NO_ROOM_CODE:
            return Answer.NO_ROOM
        if code != 0:
            self._code = code
            return Answer.FAILED
        return Answer.DONE

    def _explain(self, key: str, length: int) -> Answer | None:
        """Why a get of `length` bytes did not fill its target; None: the master says nothing.

        A value of another length looks like a failed transfer, and an empty answer says nothing
        at all: the master knows how long the value is, if there is one.
        """
        with self._call():
            size = self._library.get_size(key)
        if size in MISS_CODES:
            return Answer.MISS
        if size < 0:
            return None
        return Answer.FAILED if size == length else Answer.OTHER_LENGTH

    def _plain_answer(self, code: int) -> Answer:
        if code == 0:
            return Answer.DONE
        if code in MISS_CODES:
            return Answer.MISS
        self._code = code
        return Answer.FAILED


def open_client(config: MooncakeConfig) -> MooncakeClient:
    """Connect to the store that `config` names.

    Raises ConfigError, one line, when the package is not installed or cannot be loaded, or when
    the master or our own address is of no use. Waits for a child process that tries all of it:
    about half a second, at most a few times connect_s.
    """
    config.validate()
    assert_installed()
    assert_usable(config)
    library = new_store(config)
    code = set_up(library, config, config.segment_bytes)
    if code != 0:
        raise TierIOError(
            f"mooncake: the master at {config.master} answered a moment ago and does not now "
            f"(code {code}); look at its log"
        )
    if config.registers_arena:
        log.warning(
            "mooncake: address=%s whoever reaches this process may read and write the registered "
            "host arena; keep its network closed",
            config.address,
        )
    return MooncakeClient(library, replicate_config(config.replicas))


def _get_answer(code: int, length: int) -> Answer:
    if code == length:
        return Answer.DONE
    return Answer.MISS if code in MISS_CODES else Answer.FAILED


def _columns(values: Sequence[Sequence[Piece]]) -> tuple[list[list[int]], list[list[int]]]:
    """Addresses and lengths, as the library wants them."""
    addresses = [[piece.address for piece in value] for value in values]
    return addresses, [[piece.length for piece in value] for value in values]


def _complete(codes: Sequence[int], count: int, operation: str) -> Sequence[int]:
    """`codes` when there is one for each key; TierIOError otherwise."""
    if len(codes) != count:
        raise TierIOError(
            f"mooncake {operation}: {count} keys asked, {len(codes)} answers; nothing is known"
        )
    return codes
