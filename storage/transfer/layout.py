"""Where the bytes of a page lie in a device's KV tensors: planes of equal rows.

Owns the description of the tensors, borrows them. Heads, one tensor or one a layer:

    kv [layers, 2, pages, page_tokens, kv_heads, head_dim]      planes: K0 V0 K1 V1 ...
    layer i: [2, pages, page_tokens, kv_heads, head_dim]

Multi-head latent attention:

    kv [layers, pages, page_tokens, latent_dim]                 planes: L0 L1 ...
    layer i: [pages, page_tokens, latent_dim]

A plane is [pages, row_bytes] of bytes, so that dtype and layout matter to nobody below: row `page`
of plane p is bytes [p * row_bytes, (p + 1) * row_bytes) of that page's payload
(docs/formats/page.md). Used by cpu.py, cuda.py and the tests' simulated device.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tierkv.storage.errors import ConfigError

KvTensors = torch.Tensor | Sequence[torch.Tensor]


class PagedKv:
    """Byte planes of a paged KV cache. Keeps the tensors alive."""

    def __init__(self, kv: KvTensors) -> None:
        """ConfigError for tensors of another shape or that are not contiguous by page."""
        self.stacked: torch.Tensor | None = None
        """uint8 [planes, pages, row_bytes] when the KV cache is one contiguous tensor."""
        if isinstance(kv, torch.Tensor):
            _expect(kv, (6, 4))
            if kv.is_contiguous():
                heads = kv.dim() == 6
                pages = kv.shape[2] if heads else kv.shape[1]
                count = kv.shape[0] * (2 if heads else 1)
                self.stacked = kv.view(torch.uint8).reshape(count, pages, -1)
        layers = list(kv)
        if not layers:
            raise ConfigError("open transfer: the KV cache has no layer")
        self.layers = len(layers)
        self.planes: list[torch.Tensor] = []
        """uint8 [pages, row_bytes] each, rows contiguous; layer-major, K before V."""
        for layer in layers:
            _expect(layer, (5, 3))
            self.planes.extend(_rows(plane) for plane in (layer if layer.dim() == 5 else [layer]))
        first = self.planes[0]
        self.pages, self.row_bytes = int(first.shape[0]), int(first.shape[1])
        self.page_stride = int(first.stride(0))
        """Bytes from one row to the next, the same in every plane."""
        if any(p.shape != first.shape or p.stride() != first.stride() for p in self.planes):
            raise ConfigError("open transfer: the layers of the KV cache differ in shape")
        self.planes_per_layer = len(self.planes) // self.layers
        self.page_bytes = len(self.planes) * self.row_bytes
        self.device = first.device

    def layer_planes(self, first_layer: int, end_layer: int) -> range:
        """Planes of layers [first, end)."""
        return range(first_layer * self.planes_per_layer, end_layer * self.planes_per_layer)


def _expect(tensor: torch.Tensor, dims: tuple[int, int]) -> None:
    if tensor.dim() not in dims:
        raise ConfigError(
            f"open transfer: a KV tensor has shape {tuple(tensor.shape)}, expected {dims[0]} "
            f"dimensions (heads) or {dims[1]} (latent), docs/formats/page.md"
        )


def _rows(plane: torch.Tensor) -> torch.Tensor:
    """[pages, ...] of any dtype as uint8 [pages, row_bytes]; a view."""
    if not plane[0].is_contiguous():
        raise ConfigError(
            f"open transfer: a page of the KV cache has strides {plane.stride()[1:]}, expected "
            "contiguous [page_tokens, ...]"
        )
    flat = plane.flatten(1).view(torch.uint8)
    assert flat.data_ptr() == plane.data_ptr(), "a view, never a copy"
    return flat
