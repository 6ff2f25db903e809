"""Opens everything an engine consists of, in the order in which mistakes are cheapest to find.

Owns nothing once it has returned: the parts belong to the Engine. Reading the config and sizing
the pool come before weights are loaded, and the store before the model is warmed up.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch

from tierkv.engine.serve.calibration import calibration_file, recall, remember
from tierkv.engine.serve.chat import ChatTemplate
from tierkv.engine.serve.copies import open_copies
from tierkv.engine.serve.core import EngineCore, Tiers
from tierkv.engine.serve.engine_config import EngineConfig
from tierkv.engine.serve.fingerprint import build_fingerprint
from tierkv.engine.serve.kv_pool import KVPool
from tierkv.engine.serve.model import DecoderModel
from tierkv.engine.serve.model_config import ModelConfig
from tierkv.engine.serve.model_folder import load_config, load_weights
from tierkv.engine.serve.runner import ModelRunner
from tierkv.engine.serve.tokenizer import Tokenizer
from tierkv.engine.serve.weights_digest import weights_digest
from tierkv.storage.base import PageStore
from tierkv.storage.clock import Clock
from tierkv.storage.errors import CapacityError, ConfigError, first_line
from tierkv.storage.identity import Fingerprint, namespace
from tierkv.storage.policy import WritePolicy
from tierkv.storage.store import StoreRules, TieredStore
from tierkv.storage.transfer.base import PageTransfer
from tierkv.storage.transfer.probe import cuda_problem
from tierkv.storage.types import NamespaceId

log = logging.getLogger(__name__)

SALTS_MAX = 4096
"""Namespaces remembered; past it the oldest is forgotten and computed again when needed."""


@dataclass(slots=True)
class EngineParts:
    """What an engine is made of."""

    model_config: ModelConfig
    max_context: int
    tokenizer: Tokenizer
    core: EngineCore
    fingerprint: Fingerprint
    transfer: PageTransfer | None
    own_store: PageStore | None
    """Opened here, closed by close(); None when it was borrowed or there is none."""
    settings: EngineConfig
    calibration: Path | None
    """Where to keep what the restore planner learned."""
    _template: ChatTemplate | None = None
    _namespaces: dict[str, NamespaceId] = field(default_factory=dict)

    def chat_template(self) -> ChatTemplate:
        """Read on first use: models without one serve completions."""
        if self._template is None:
            self._template = ChatTemplate.from_folder(self.settings.model)
        return self._template

    def namespace_for(self, cache_salt: str) -> NamespaceId:
        """Namespace of requests with this salt; equal salts share prefixes, others never do."""
        known = self._namespaces.get(cache_salt)
        if known is None:
            known = namespace(dataclasses.replace(self.fingerprint, cache_salt=cache_salt))
            while len(self._namespaces) >= SALTS_MAX:
                self._namespaces.pop(next(iter(self._namespaces)))
            self._namespaces[cache_salt] = known
        return known

    def close(self) -> None:
        """Close copies and store. The engine thread has ended."""
        if self.calibration is not None and self.core.restore is not None:
            remember(self.calibration, self.core.restore)
        if self.transfer is not None:
            self.transfer.close()
        if self.own_store is not None:
            self.own_store.close()


def open_parts(
    config: EngineConfig, store: PageStore | None, clock: Clock, wake: Callable[[], None]
) -> EngineParts:
    """Open model, pool and store. Raises ConfigError and its kinds with nothing left open."""
    device, dtype = choose_device(config.device)
    model_config = load_config(config.model)
    max_context = _max_context(config, model_config)
    pages = pool_pages(config, model_config, dtype)
    tokenizer = Tokenizer.from_folder(config.model)
    digest = weights_digest(config.model)
    fingerprint = build_fingerprint(
        model_config, digest, dtype, config.page_tokens, tenant=config.tenant
    )
    page_bytes = page_size(config, model_config, dtype)
    own = _open_store(config, page_bytes, fingerprint, clock) if store is None else None
    below = store or own
    transfer: PageTransfer | None = None
    kept = None
    if config.calibration_dir is not None:
        kept = calibration_file(namespace(fingerprint), device, config.calibration_dir)
    try:
        if below is not None and below.page_bytes != page_bytes:
            raise ConfigError(
                f"open engine: the store's pages have {below.page_bytes} bytes, this model's "
                f"{page_bytes}; open a store for this model"
            )
        runner = _load(config, model_config, pages, device, dtype)
        tiers = None
        if below is not None:
            copies = None if kept is None else kept.with_suffix(".copies.json")
            on_gpu = device.type == "cuda"
            transfer = open_copies(runner.pool.kv, below, on_gpu, copies, clock)
            rules = config.store.rules if config.store is not None else StoreRules()
            policy: WritePolicy = config.write_policy or rules.write_policy
            tiers = Tiers(below, transfer, policy, rules.selective_hits)
        core = EngineCore(
            config,
            runner,
            frozenset(model_config.eos_token_ids),
            max_context,
            clock,
            tiers,
            wake,
        )
    except BaseException:
        if transfer is not None:
            transfer.close()
        if own is not None:
            own.close()
        raise
    if kept is not None and core.restore is not None:
        recall(kept, core.restore)
    return EngineParts(
        model_config, max_context, tokenizer, core, fingerprint, transfer, own, config, kept
    )


def choose_device(name: str) -> tuple[torch.device, torch.dtype]:
    """Compute device and dtype: fp32 on the CPU (bf16 is many times slower there), bf16 on CUDA."""
    if name not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"open engine: device is {name!r}, expected auto, cpu or cuda")
    if name == "cpu":
        return torch.device("cpu"), torch.float32
    problem = cuda_problem()
    if problem is None:
        return torch.device("cuda"), torch.bfloat16
    if name == "cuda":
        raise ConfigError(f"open engine: device is cuda, but {problem}")
    if torch.version.cuda is not None:
        # Somebody installed a CUDA build: say once why it does not compute on a GPU.
        log.warning("device=cpu reason=%s", problem)
    return torch.device("cpu"), torch.float32


def page_size(config: EngineConfig, model: ModelConfig, dtype: torch.dtype) -> int:
    """Payload bytes of one page."""
    if not 1 <= config.page_tokens <= 64:
        raise ConfigError(f"open engine: page_tokens is {config.page_tokens}, expected 1 to 64")
    return model.kv_bytes_per_token(dtype.itemsize) * config.page_tokens


def pool_pages(config: EngineConfig, model: ModelConfig, dtype: torch.dtype) -> int:
    """Pages of the pool on the compute device. Raises CapacityError when it cannot hold one."""
    page_bytes = page_size(config, model, dtype)
    pages = config.num_pages if config.num_pages is not None else config.pool_bytes // page_bytes
    if pages < 1:
        raise CapacityError(
            f"open engine: the KV pool has {config.pool_bytes} bytes, one page of "
            f"{config.page_tokens} tokens needs {page_bytes}; raise the pool to at least that"
        )
    return pages


def _max_context(config: EngineConfig, model: ModelConfig) -> int:
    if config.max_context is None:
        return model.max_context
    if not 1 <= config.max_context <= model.max_context:
        raise ConfigError(
            f"open engine: max_context is {config.max_context}, this model allows 1 to "
            f"{model.max_context}"
        )
    return config.max_context


def _open_store(
    config: EngineConfig, page_bytes: int, fingerprint: Fingerprint, clock: Clock
) -> PageStore | None:
    """The store that the config describes; None when it describes none."""
    if config.open_store is not None:
        if config.store is not None:
            raise ConfigError("open engine: two stores are configured; give one of them")
        return config.open_store(page_bytes, fingerprint)
    if config.store is None:
        return None
    return TieredStore.open(dataclasses.replace(config.store, page_bytes=page_bytes), clock)


def _load(
    config: EngineConfig,
    model_config: ModelConfig,
    pages: int,
    device: torch.device,
    dtype: torch.dtype,
) -> ModelRunner:
    """Weights into a model, a pool of `pages`, and both warmed up."""
    with _memory_for(f"the model's weights on {device}", "take a smaller model or another device"):
        model = DecoderModel(model_config, load_weights(config.model), device, dtype)
    size = pages * page_size(config, model_config, dtype)
    with _memory_for(f"a KV pool of {size} bytes on {device}", "lower the pool"):
        pool = KVPool(model_config, pages, config.page_tokens, dtype, device)
    with _memory_for(f"a forward pass on {device}", "lower the pool"):
        runner = ModelRunner(model, pool, config.threads)
        runner.warm_up()
    return runner


@contextmanager
def _memory_for(what: str, advice: str) -> Iterator[None]:
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        # torch has a class of its own for a GPU; its CPU allocator raises the plain one.
        lacking = isinstance(error, torch.OutOfMemoryError | MemoryError)
        if not lacking and "allocate" not in str(error):
            raise
        raise CapacityError(
            f"open engine: no memory for {what} ({first_line(error)}); {advice}"
        ) from error
