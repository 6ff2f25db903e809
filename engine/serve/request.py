"""What a client asks for and what it gets back, and the engine's record of one request.

`Request` is mutable and belongs to the engine thread from submit to finish; everything else here
is a frozen value that may cross threads.

State of a request; each arrow names who takes it:

    QUEUED     --scheduler.admit-->    PREFILL     computing its head, loading its tail
    PREFILL    --scheduler.commit-->   DECODE      all prompt tokens are there
    PREFILL, DECODE --scheduler.retract--> QUEUED  the pool ran out; computed pages stay cached
    any        --scheduler.finish-->   FINISHED    stop, length, abort or error
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from enum import Enum, StrEnum, auto

from tierkv.engine.cache.node import NodeRef, PageArray
from tierkv.engine.cache.page_table import PageTable
from tierkv.engine.cache.prefix_cache import NO_PAGES
from tierkv.engine.serve.planner import Plan
from tierkv.engine.serve.sampler import SamplingParams, SamplingState
from tierkv.storage.identity import page_keys
from tierkv.storage.types import TOKEN_BYTES, NamespaceId, PackedTokens, PageKey, pack_tokens


class FinishReason(StrEnum):
    """Why a request ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class RequestState(Enum):
    """Where a request stands; see the module's table."""

    QUEUED = auto()
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
    plan: Plan | None = None
    """How its missing prefix was to be brought back; None when no lower tier held any."""


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
    max_tokens: int
    """Longest output: that of `params`, cut to what the context leaves."""
    namespace: NamespaceId
    """Digest that its page keys are chained from: model, adapter, tenant and salt."""
    priority: int
    arrival_s: float
    packed: bytearray = field(init=False)
    """Prompt and generated tokens, packed; grows with `append`."""
    sampling: SamplingState = field(init=False)
    output: list[int] = field(default_factory=list)
    state: RequestState = RequestState.QUEUED
    page_keys: list[PageKey] = field(default_factory=list)
    """Keys of the full pages of prompt + output, extended as it grows."""
    computed: int = 0
    """Tokens from the start whose KV is in the pool."""
    table: PageTable | None = None
    """Its pages while it runs. [0, shared_pages) belong to the tree and are protected by `hold`;
    the rest are this request's own."""
    shared_pages: int = 0
    hold: NodeRef | None = None
    cached: CachedTokens = field(default_factory=CachedTokens)
    admitted_s: float | None = None
    first_token_s: float | None = None
    finished_s: float | None = None
    finish_reason: FinishReason | None = None
    error: str | None = None
    retractions: int = 0
    plan: Plan | None = None
    """How its missing prefix was to be brought back; None when no tier held any."""

    def __post_init__(self) -> None:
        self.packed = bytearray(pack_tokens(self.prompt))
        self.sampling = SamplingState(self.params)

    @property
    def token_count(self) -> int:
        """Prompt and generated tokens together."""
        return len(self.prompt) + len(self.output)

    def append(self, token: int) -> None:
        """Add one generated token."""
        self.output.append(token)
        self.packed += pack_tokens([token])

    def tokens(self, start: int, end: int) -> list[int]:
        """Token ids at positions [start, end) of prompt and output together."""
        prompt = len(self.prompt)
        if end <= prompt:
            return self.prompt[start:end]
        return self.prompt[start:] + self.output[max(0, start - prompt) : end - prompt]

    def packed_prefix(self, token_count: int) -> PackedTokens:
        """The first `token_count` tokens, packed. O(token_count) copy."""
        return PackedTokens(bytes(self.packed[: token_count * TOKEN_BYTES]))

    @property
    def own_pages(self) -> PageArray:
        """Pages that only this request holds, int32; a view of its table."""
        return NO_PAGES if self.table is None else self.table.pages[self.shared_pages :]

    def restorable_pages(self, page_tokens: int) -> int:
        """Leading whole pages that may come from a cache: the last token is always computed,
        since its logits choose the next one."""
        return (self.token_count - 1) // page_tokens

    def extend_keys(self, page_tokens: int) -> None:
        """Bring `page_keys` up to the whole pages that prompt and output fill now."""
        first = len(self.page_keys)
        if self.token_count // page_tokens > first:
            parent = self.page_keys[-1] if first else self.namespace
            rest = PackedTokens(bytes(self.packed[first * page_tokens * TOKEN_BYTES :]))
            self.page_keys += page_keys(parent, rest, page_tokens)


request_ids = itertools.count(1)
"""Ids are unique in one process and never reused."""
