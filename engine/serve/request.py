"""What a client asks for and what it gets back, and the engine's record of one request.

`Request` is mutable and belongs to the engine thread from submit to finish; everything else here
is a frozen value that may cross threads.

State of a request; each arrow names who takes it:

    QUEUED     --scheduler.admit-->    RESTORING   pages of a lower tier are on their way
    QUEUED     --scheduler.admit-->    PREFILL     nothing to restore
    RESTORING  --restore.finish-->     PREFILL
    PREFILL    --scheduler.commit-->   DECODE      all prompt tokens are computed
    PREFILL, DECODE --scheduler.retract--> QUEUED  the pool ran out; computed pages stay cached
    any        --scheduler.finish-->   FINISHED    stop, length, abort or error
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from enum import Enum, StrEnum, auto

from tierkv.engine.serve.sampler import SamplingParams
from tierkv.storage.types import NamespaceId, PackedTokens, PageKey, pack_tokens


class FinishReason(StrEnum):
    """Why a request ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class RequestState(Enum):
    """Where a request stands; see the module's table."""

    QUEUED = auto()
    RESTORING = auto()
    PREFILL = auto()
    DECODE = auto()
    FINISHED = auto()


@dataclass(frozen=True, slots=True)
class CachedTokens:
    """Prompt tokens that were not computed, by the tier they came from."""

    gpu: int = 0
    host: int = 0
    nvme: int = 0
    remote: int = 0

    @property
    def total(self) -> int:
        return self.gpu + self.host + self.nvme + self.remote


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """A finished request."""

    request_id: int
    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    cached: CachedTokens
    queued_s: float
    """Submit to first admission."""
    ttft_s: float | None
    """Submit to first generated token; None when none came."""
    total_s: float
    error: str | None = None
    """One line when finish_reason is ERROR."""


@dataclass(frozen=True, slots=True)
class StreamEvent:
    """One step of a streamed generation."""

    token_ids: tuple[int, ...]
    """New tokens; empty in the last event of an aborted request."""
    text: str
    """New text: whole UTF-8 characters only, stop strings removed."""
    output: RequestOutput | None
    """The whole result in the last event, None before it."""


@dataclass(slots=True, eq=False)
class Request:
    """One request inside the engine. Owned by the engine thread."""

    request_id: int
    prompt: list[int]
    params: SamplingParams
    namespace: NamespaceId
    """Digest that its page keys are chained from: model, adapter, tenant and salt."""
    priority: int
    arrival_s: float
    packed: PackedTokens = field(init=False)
    """Prompt tokens; generated tokens are appended by `packed_all`."""
    output: list[int] = field(default_factory=list)
    state: RequestState = RequestState.QUEUED
    page_keys: list[PageKey] = field(default_factory=list)
    """Keys of the full pages of prompt + output, extended as it grows."""
    computed: int = 0
    """Tokens from the start whose KV is in the pool."""
    cached: CachedTokens = field(default_factory=CachedTokens)
    admitted_s: float | None = None
    first_token_s: float | None = None
    finished_s: float | None = None
    finish_reason: FinishReason | None = None
    error: str | None = None
    retractions: int = 0

    def __post_init__(self) -> None:
        self.packed = pack_tokens(self.prompt)

    @property
    def token_count(self) -> int:
        """Prompt and generated tokens together."""
        return len(self.prompt) + len(self.output)

    def packed_all(self) -> PackedTokens:
        """Prompt and generated tokens, packed. O(output)."""
        return PackedTokens(self.packed + pack_tokens(self.output))


request_ids = itertools.count(1)
"""Ids are unique in one process and never reused."""
