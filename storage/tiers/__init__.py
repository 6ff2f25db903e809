"""Tiers below the GPU; each implements tierkv.storage.base.Tier."""
