"""Radix tree, eviction policies and page pool: everything about GPU slots except their bytes."""
