"""Runs forward passes: the one place that decides threads and inference mode.

Owns the pairing of a model with its pool; both are built by the caller. On CUDA, also the stream
that passes run on, of a higher priority than copies. Knows no requests.
Called by the engine loop, from one thread at a time.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch

from tierkv.engine.serve.batch import SequenceInput, build_batch
from tierkv.engine.serve.kv_pool import KVPool
from tierkv.engine.serve.model import BeforeLayer, DecoderModel

PASS_PRIORITY = -1


class ModelRunner:
    """One model over one pool."""

    def __init__(self, model: DecoderModel, pool: KVPool, num_threads: int | None = None) -> None:
        """`num_threads` sets torch's CPU threads for the whole process; None leaves them."""
        if num_threads is not None:
            torch.set_num_threads(num_threads)
        self.model = model
        self.pool = pool
        self._stream: torch.cuda.Stream | None = None
        if model.device.type == "cuda":
            # Copies run at priority 0, the lowest there is: passes go before them.
            self._stream = torch.cuda.Stream(  # type: ignore[no-untyped-call]
                model.device, priority=PASS_PRIORITY
            )

    def run(
        self, sequences: Sequence[SequenceInput], before_layer: BeforeLayer | None = None
    ) -> torch.Tensor:
        """Compute the new tokens of `sequences` in one forward pass.

        Returns logits float32 [rows, vocab_size] on the model's device, in the order of the
        sequences: one row each, every new token's row for `all_logits`, none for `no_logits`.
        Writes the pool at the new tokens' slots. `before_layer` as in DecoderModel.forward.
        """
        batch = build_batch(sequences, self.pool.page_tokens)
        with torch.inference_mode(), self._own_stream():
            return self.model.forward(batch, self.pool, before_layer)

    @contextlib.contextmanager
    def _own_stream(self) -> Iterator[None]:
        """Make the pass's stream current, ordered after and before the caller's.

        So whoever marks "up to now" on the caller's stream, a copy or the sampler, means the
        pass too.
        """
        stream = self._stream
        if stream is None:
            yield
            return
        callers = torch.cuda.current_stream(self.model.device)
        stream.wait_stream(callers)
        try:
            with torch.cuda.stream(stream):
                yield
        finally:
            # A pass that broke half way has put work on its stream all the same.
            callers.wait_stream(stream)

    def warm_up(self) -> None:
        """Run one small prefill and one decode, so that the first request finds warm kernels.

        Overwrites page 0 of the pool: call it before anything is cached.
        """
        count = min(2, self.pool.page_tokens)
        self.run([SequenceInput([0] * count, count, [0])])
        self.run([SequenceInput([0], count, [0])])
