"""Runs forward passes: the one place that decides threads and inference mode.

Owns the pairing of a model with its pool; both are built by the caller. Knows no requests.
Called by the engine loop, from one thread at a time.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tierkv.engine.serve.batch import SequenceInput, build_batch
from tierkv.engine.serve.kv_pool import KVPool
from tierkv.engine.serve.model import BeforeLayer, DecoderModel


class ModelRunner:
    """One model over one pool."""

    def __init__(self, model: DecoderModel, pool: KVPool, num_threads: int | None = None) -> None:
        """`num_threads` sets torch's CPU threads for the whole process; None leaves them."""
        if num_threads is not None:
            torch.set_num_threads(num_threads)
        self.model = model
        self.pool = pool

    def run(
        self, sequences: Sequence[SequenceInput], before_layer: BeforeLayer | None = None
    ) -> torch.Tensor:
        """Compute the new tokens of `sequences` in one forward pass.

        Returns logits float32 [rows, vocab_size] on the model's device, in the order of the
        sequences: one row each, every new token's row for `all_logits`, none for `no_logits`.
        Writes the pool at the new tokens' slots. `before_layer` as in DecoderModel.forward.
        """
        batch = build_batch(sequences, self.pool.page_tokens)
        with torch.inference_mode():
            return self.model.forward(batch, self.pool, before_layer)

    def warm_up(self) -> None:
        """Run one small prefill and one decode, so that the first request finds warm kernels.

        Overwrites page 0 of the pool: call it before anything is cached.
        """
        count = min(2, self.pool.page_tokens)
        self.run([SequenceInput([0] * count, count, [0])])
        self.run([SequenceInput([0], count, [0])])
