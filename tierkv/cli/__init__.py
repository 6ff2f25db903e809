"""Command line of TierKV."""
