"""TierKV: a tiered store that keeps LLM attention KV cache alive outside the GPU.

Importing this package is light: it loads neither torch nor the engine nor any tier.
"""

__version__ = "0.1.0"

__all__ = ["__version__"]
