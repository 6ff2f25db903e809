"""Every error TierKV raises, and what it means for the caller.

    TierKVError                  code            who acts
    ├── ConfigError              config          the user: a value, path or folder is wrong
    │   ├── CapacityError        capacity        the user: a budget is below what is needed
    │   ├── DirectoryInUseError  in_use          the user: another process has it open
    │   ├── FormatVersionError   format_version  the user: data of another TierKV version
    │   └── ModelError           model           the user: a model folder cannot be loaded
    ├── RequestError             request         the client: this request can never be served
    ├── RequestTimeoutError      timeout         the client: it took longer than it may
    ├── OverloadedError          overloaded      the client: try again later
    ├── EngineStoppedError       engine_stopped  somebody: the engine serves no more
    └── TierError                tier            nobody at once: the tier degrades, misses follow
        ├── TierFullError        tier_full       the device has no room (ENOSPC)
        ├── TierIOError          tier_io         the device failed (EIO, short transfer)
        └── TierClosedError      tier_closed     used after close()

A miss is a value, never an exception. Corruption is a counted miss plus quarantine. A broken
promise inside TierKV asserts. Every message gives operation, subject, expected, actual and what
the user can do, in one line. `code` is stable: it goes over the wire and into exit messages.
"""

from __future__ import annotations


class TierKVError(Exception):
    """Base of all errors raised on purpose."""

    code = "error"


class ConfigError(TierKVError):
    """A value, path or folder that the user gave cannot work. Nothing was changed."""

    code = "config"


class CapacityError(ConfigError):
    """A budget is smaller than what it has to hold; the message names the number to change."""

    code = "capacity"


class DirectoryInUseError(ConfigError):
    """Another process holds the cache directory. Nothing was read or written."""

    code = "in_use"


class FormatVersionError(ConfigError):
    """A file on disk or in shared memory was written by another format version."""

    code = "format_version"


class ModelError(ConfigError):
    """A model folder or file lacks something, is damaged or has an unknown architecture."""

    code = "model"


class RequestError(TierKVError):
    """This request can never be served as asked (too long, bad parameter)."""

    code = "request"


class RequestTimeoutError(TierKVError, TimeoutError):
    """A request was aborted because it outlasted its time."""

    code = "timeout"


class OverloadedError(TierKVError):
    """Too much is waiting already; the same call may succeed later."""

    code = "overloaded"


class EngineStoppedError(TierKVError):
    """The engine thread has ended; the message says why. No request can be served any more."""

    code = "engine_stopped"


class TierError(TierKVError):
    """A tier cannot do what was asked now; the caller goes on without it."""

    code = "tier"


class TierFullError(TierError):
    """The device under a tier is out of space."""

    code = "tier_full"


class TierIOError(TierError):
    """The device under a tier returned an error or moved too few bytes."""

    code = "tier_io"


class TierClosedError(TierError):
    """The tier or store was closed."""

    code = "tier_closed"


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or its name when it has none.

    Of "out of memory" what was asked for and what is free; the advice after that is torch's.
    """
    lines = str(error).strip().splitlines()
    if not lines:
        return type(error).__name__
    head, found, _ = lines[0].partition(" is free.")
    return head + " is free" if found else lines[0]
