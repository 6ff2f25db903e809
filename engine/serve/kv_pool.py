"""The paged KV tensors on the compute device. Owns the bytes, not who uses which page.

Layout: one tensor `kv` of shape [layers, 2, pages, page_tokens, kv_heads, head_dim], index 0 of
the second axis is K, 1 is V. A token's slot is `page * page_tokens + offset`. A page's payload
(docs/formats/page.md) is `kv[:, :, page]` in C order, so that one strided copy moves it. Which
pages are free is engine/cache/page_pool.py's business.
"""

from __future__ import annotations

import torch

from tierkv.engine.serve.model_config import ModelConfig


class KVPool:
    """K and V of `num_pages` pages for every layer.

    Memory is touched at creation: fresh pages of the kernel are several times slower than warm
    ones, and a pool that cannot be had must fail at start.
    """

    def __init__(
        self,
        config: ModelConfig,
        num_pages: int,
        page_tokens: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.num_pages = num_pages
        self.page_tokens = page_tokens
        self.kv = torch.zeros(
            (
                config.num_layers,
                2,
                num_pages,
                page_tokens,
                config.num_kv_heads,
                config.head_dim,
            ),
            dtype=dtype,
            device=device,
        )
        self.page_bytes = config.kv_bytes_per_token(self.kv.itemsize) * page_tokens
        slots = self.kv.view(-1, num_pages * page_tokens, config.num_kv_heads, config.head_dim)
        # Views are made once: a decode step asks for every layer's.
        sides = slots.unbind(0)
        self._layers = list(zip(sides[::2], sides[1::2], strict=True))

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of one layer as token slots, [pages * page_tokens, kv_heads, head_dim].

        Views: writing to them writes the pool.
        """
        return self._layers[index]
