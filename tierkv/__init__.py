"""TierKV: a tiered store that keeps LLM attention KV cache alive outside the GPU.

Importing this package is light: it loads neither torch nor the engine nor any tier. The clients
of the daemon are found here by name and loaded when first asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tierkv.client import AsyncClient, Client

__version__ = "0.1.0"

__all__ = ["AsyncClient", "Client", "__version__"]


def __getattr__(name: str) -> Any:
    if name in ("AsyncClient", "Client"):
        from tierkv import client

        return getattr(client, name)
    raise AttributeError(f"module 'tierkv' has no attribute {name!r}")
