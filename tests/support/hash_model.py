"""A model whose KV is a hash of everything before it, so that one wrong byte shows at once.

Stands in for ModelRunner. The KV of a token is a digest of all tokens up to it; before it computes
anything it compares every cached slot of the context with what must be there. The next token
follows from the last digest, so that a whole output is known from the prompt alone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from types import SimpleNamespace

import numpy as np
import torch

from tierkv.engine.serve.batch import SequenceInput
from tierkv.engine.serve.kv_pool import KVPool
from tierkv.engine.serve.model_config import ModelConfig

LAYERS, KV_HEADS, HEAD_DIM = 2, 1, 4
SLOT_BYTES = LAYERS * 2 * KV_HEADS * HEAD_DIM * 4


def hash_config(vocab_size: int, max_context: int) -> ModelConfig:
    """A configuration whose slots have room for one digest."""
    return ModelConfig(
        architecture="llama",
        vocab_size=vocab_size,
        hidden_size=8,
        intermediate_size=8,
        num_layers=LAYERS,
        num_heads=1,
        num_kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        rms_norm_eps=1e-5,
        rope_theta=10000.0,
        rope_scaling=None,
        max_context=max_context,
        tie_word_embeddings=True,
        attention_bias=False,
        eos_token_ids=(),
        bos_token_id=None,
    )


class HashRunner:
    """Same calls as ModelRunner. Remembers the digests of prefixes it has seen."""

    def __init__(self, config: ModelConfig, num_pages: int, page_tokens: int) -> None:
        device = torch.device("cpu")
        self.model = SimpleNamespace(config=config, device=device)
        self.pool = KVPool(config, num_pages, page_tokens, torch.float32, device)
        flat = self.pool.kv.view(torch.uint8).numpy()
        # [layers * 2, pages, page_tokens, bytes of one token in one plane]
        self._planes = flat.reshape(LAYERS * 2, num_pages, page_tokens, -1)
        self._planes[:] = 0xEE
        self._vocab = config.vocab_size
        self._known: dict[bytes, bytes] = {}
        self.computed_tokens = 0

    def run(
        self,
        sequences: Sequence[SequenceInput],
        before_layer: Callable[[int], None] | None = None,
    ) -> torch.Tensor:
        if before_layer is not None:
            for layer in range(LAYERS):
                before_layer(layer)
        rows = []
        for each in sequences:
            start = each.context_len - len(each.token_ids)
            history = self._verified(each.pages, start)
            digest = history
            for position, token in enumerate(each.token_ids, start):
                digest = chain(digest, int(token))
                self._slot(each.pages, position)[:] = as_planes(digest)
                self.computed_tokens += 1
            if not each.no_logits:
                rows.append(logits(digest, self._vocab))
        return torch.stack(rows) if rows else torch.empty(0, self._vocab)

    def _verified(self, pages: Sequence[int], count: int) -> bytes:
        """Digest that the context ends with; each slot must extend the one before it."""
        digest = b""
        for position in range(count):
            stored = self._slot(pages, position).tobytes()
            if self._known.get(stored) != digest:
                assert self._extends(digest, stored), f"slot {position} is not of its prefix"
                self._known[stored] = digest
            digest = stored
        return digest

    def _extends(self, before: bytes, stored: bytes) -> bool:
        """True when some token after `before` has this digest."""
        return any(chain(before, token) == stored for token in range(self._vocab))

    def _slot(self, pages: Sequence[int], position: int) -> np.ndarray:
        page, offset = divmod(position, self.pool.page_tokens)
        slot: np.ndarray = self._planes[:, int(pages[page]), offset]
        return slot


def chain(before: bytes, token: int) -> bytes:
    """Digest of a prefix from that of the prefix one shorter; b"" stands for none."""
    return hashlib.blake2b(before + bytes([token]), digest_size=SLOT_BYTES).digest()


def as_planes(digest: bytes) -> np.ndarray:
    return np.frombuffer(digest, np.uint8).reshape(LAYERS * 2, -1)


def logits(digest: bytes, vocab_size: int) -> torch.Tensor:
    """One row that puts all weight on the token that follows this prefix."""
    row = torch.zeros(vocab_size)
    row[next_token(digest, vocab_size)] = 1.0
    return row


def next_token(digest: bytes, vocab_size: int) -> int:
    return int.from_bytes(digest[:4], "little") % vocab_size


def expected_output(prompt: Sequence[int], count: int, vocab_size: int) -> list[int]:
    """What an engine on this model must answer."""
    digest = b""
    for token in prompt:
        digest = chain(digest, token)
    output = []
    for _ in range(count):
        token = next_token(digest, vocab_size)
        output.append(token)
        digest = chain(digest, token)
    return output
